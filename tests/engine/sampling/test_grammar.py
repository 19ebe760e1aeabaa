"""Structured output: whatever the logits say, what comes out obeys the grammar, on every tp; and bad grammars."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from laddertron.engine.openai.structured_output import GrammarFields, grammar_of
from laddertron.engine.request import SamplingParams
from laddertron.engine.sampling import grammar
from laddertron.engine.sampling.sampler import Gather, Sampled
from sampling_ranks import Ranks, cut, make, sequence
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from waiting import cheapest

pytestmark = pytest.mark.skipif(not grammar.available, reason="llguidance is not installed: laddertron[grammar]")

EOS = 256
WORDS = ['"', ' "', '": ', "true", "null", "yes", "no", '{"', '"}', "12", "345", "é", "[]", ", "]
VOCAB = 300
"""The model's vocabulary is larger than the tokenizer's, as it is when padded."""

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer with a few whole words."""
    encoder = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate(alphabet)}
    vocab["<eos>"] = EOS
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        letters = encoder.pre_tokenize_str(word)[0][0]
        for end in range(2, len(letters) + 1):
            if letters[:end] not in vocab:
                vocab[letters[:end]] = len(vocab)
                merges.append((letters[: end - 1], letters[end - 1]))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = encoder
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def spec(**asked: Any) -> str:
    """What the door makes of guided_json, guided_regex or guided_choice."""
    made = grammar_of(GrammarFields(**{f"guided_{kind}": given for kind, given in asked.items()}))
    assert made is not None
    return made


def params(one: str | None, **fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=400, stop_token_ids=(EOS,), grammar=one, **{"seed": 3, **fields})


def write(
    folder: Path, tp: int, requests: list[SamplingParams], steps: int, outputs: Any = None
) -> list[list[Sampled]]:
    """Draws `steps` ids a request from random logits that want no particular text, stopping at the end of each."""
    torch.manual_seed(17)
    logits = torch.randn(steps, len(requests), VOCAB)

    def task(rank: int, gather: Gather) -> list[Sampled]:
        slots = grammar.GrammarSlots(folder / "tokenizer.json", VOCAB, (EOS,))
        sampler = make(VOCAB, tp, rank, gather, len(requests), slots)
        for slot, request in enumerate(requests):
            sampler.admit(sequence(slot, request, output=outputs[slot] if outputs else ()))
        return [sampler.sample(cut(step, tp, rank), range(len(requests))) for step in logits]

    return Ranks(tp).run(task)


def texts(folder: Path, results: list[Sampled]) -> list[str | None]:
    """What each row wrote before its EOS, None if it did not end."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    out: list[str | None] = []
    for row in range(len(results[0].ids)):
        ids = [int(step.ids[row]) for step in results]
        out.append(tokenizer.decode(ids[: ids.index(EOS)]) if EOS in ids else None)
    return out


REGEX, CHOICES = r"[0-9]{3}-[a-c]{1,4}x", ["yes", 'no "never"', "vielleicht\nspäter\\"]


def of_all_kinds() -> list[SamplingParams]:
    grammars = [spec(json=PERSON), spec(regex=REGEX), spec(choice=CHOICES), None]
    draws: list[dict[str, Any]] = [{"temperature": 0.0}, {}, {"top_p": 0.7}, {"top_k": 3}]
    return [params(one, seed=i, **draw) for one in grammars for i, draw in enumerate(draws)]


@pytest.fixture(scope="module")
def single(folder: Path) -> list[Sampled]:
    """What one rank draws for them."""
    return write(folder, 1, of_all_kinds(), 260)[0]


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_every_text_obeys_its_grammar(folder: Path, single: list[Sampled], tp: int) -> None:
    """A schema, a regex, a choice and any object, beside a free row, drawn from noise by greedy, plain and filtered
    sampling: every text that ended parses; the ids are those of one rank, and the free row's those without grammars."""
    ranks = [single] if tp == 1 else write(folder, tp, of_all_kinds(), 260)
    for mine in ranks:
        for step, other in zip(mine, single, strict=True):
            assert (step.ids == other.ids).all()
            assert not step.nonfinite.any()
    found = texts(folder, ranks[0])
    ended = [text for text in found[:4] if text is not None]
    assert ended
    for text in ended:
        person = json.loads(text)
        assert set(person) == {"name", "age", "tags"}
        assert 0 <= person["age"] <= 150
        assert len(person["name"]) <= 5
        assert set(person["tags"]) <= {"a", "b"}
    assert all(text is not None and re.fullmatch(REGEX, text) for text in found[4:8])
    assert all(text in CHOICES for text in found[8:12])


def test_any_json_object(folder: Path) -> None:
    """Any object: what came out is an object, or the beginning of one."""
    anything = spec(json={"type": "object"})
    results = write(folder, 2, [params(anything, seed=s, top_k=4) for s in range(4)], 200)[0]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for row, text in enumerate(texts(folder, results)):
        if text is not None:
            assert isinstance(json.loads(text), dict)
        else:
            assert tokenizer.decode([int(step.ids[row]) for step in results]).lstrip().startswith("{")


SPACED: dict[str, tuple[str, str]] = {
    "JSON": (spec(json=PERSON), "{"),
    "JSON with a pattern of its own": (
        spec(json={"type": "array", "items": {"type": "integer"}, "x-guidance": {"whitespace_pattern": "[ ]+"}}),
        "[",
    ),
    "a regular expression": (spec(regex="a\\s*b"), "a"),
    "white space that a grammar ignores": (spec(grammar='start: "a" "b"\n%ignore /[ ]+/'), "a"),
}


@pytest.mark.parametrize("name", SPACED)
def test_blanks_do_not_go_on_for_ever(folder: Path, name: str) -> None:
    """Logits that want nothing but a blank: after `max_whitespace` of them the grammar forbids more, on every shard, in
    forks and after a preemption too."""
    one, before = SPACED[name]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    (blank,), known = tokenizer.encode(" ").ids, tokenizer.encode(before).ids
    for most in (32, 5):
        slots = grammar.GrammarSlots(folder / "tokenizer.json", VOCAB, (EOS,), most)
        slots.admit(0, one, known)
        for _ in range(most):
            assert slots.state(0).allowed(range(VOCAB))[blank]
            slots.state(0).advance(blank)
        slots.admit(1, one, [*known, *[blank] * most])
        for state in (slots.state(0), slots.state(0).fork(), slots.state(1)):
            whole = state.allowed(range(VOCAB))
            assert (bool(whole[blank]), bool(whole.any())) == (False, True)
            shards = [state.allowed(range(start, start + VOCAB // 4)) for start in range(0, VOCAB, VOCAB // 4)]
            assert (np.concatenate(shards) == whole).all()


@pytest.mark.parametrize(
    ("one", "before"),
    [
        (spec(json={"type": "string"}), '"'),
        (spec(regex="[a-z ]+"), "a"),
        (spec(regex="a {60}b"), "a"),
    ],
)
def test_blanks_of_a_text_are_not_bounded(folder: Path, one: str, before: str) -> None:
    """In a string, and where nothing else may come."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    (blank,) = tokenizer.encode(" ").ids
    slots = grammar.GrammarSlots(folder / "tokenizer.json", VOCAB, (EOS,))
    slots.admit(0, one, tokenizer.encode(before).ids)
    for _ in range(60):
        assert slots.state(0).allowed(range(VOCAB))[blank]
        slots.state(0).advance(blank)


def test_after_the_end_only_eos_may_come(folder: Path) -> None:
    results = write(folder, 2, [params(spec(choice=["yes"]))], 8)[0]
    ids = [int(step.ids[0]) for step in results]
    end = ids.index(EOS)
    assert ids[end:] == [EOS] * (8 - end)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_grammar_that_is_complete_ends_whatever_else_is_asked(folder: Path, tp: int) -> None:
    """Before min_tokens, without EOS among the allowed ids, with EOS as a bad word: the text is returned."""
    asked: list[dict[str, Any]] = [
        {"min_tokens": 50},
        {"allowed_token_ids": tuple(i for i in range(VOCAB) if i != EOS)},
        {"bad_word_ids": ((EOS,),), "logit_bias": ((EOS, -100.0),)},
    ]
    results = write(folder, tp, [params(spec(choice=["yes"]), **more) for more in asked], 5)
    for rank in results:
        assert texts(folder, rank) == ["yes"] * 3


def test_a_preempted_sequence_goes_on_in_its_grammar(folder: Path) -> None:
    """1. A row writes 3 ids. 2. It is admitted anew with those as known output: the grammar goes on after them."""
    request = params(spec(regex="abcdefgh"))
    first = [int(step.ids[0]) for step in write(folder, 1, [request], 9)[0]]
    again = [int(step.ids[0]) for step in write(folder, 1, [request], 6, outputs=[first[:3]])[0]]
    assert again == first[3:]


REASONS = {"reasoning": ["<", "e"], "thinking": True, "calls": []}


@pytest.mark.parametrize(("tp", "reasons"), [(1, False), (2, False), (1, True), (2, True)])
def test_drafts_are_masked_row_by_row_and_end_where_the_grammar_refuses(folder: Path, tp: int, reasons: bool) -> None:
    """Drafts of a schema's text, right up to one of them: the rows draw the ids that single steps draw, whatever is
    drafted behind, the grammar goes on behind those that were right, and what it refuses is no draft. So it is where
    the grammar begins after reasoning, which an `e` ends."""
    one = f'{{"preamble":{json.dumps(REASONS)},{spec(json=PERSON)[1:]}' if reasons else spec(json=PERSON)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    request = params(one, top_p=0.8, logit_bias=((tokenizer.encode("e").ids[0], 4.0),))
    single = [int(step.ids[0]) for step in write(folder, tp, [request], 40)[0]]

    def task(rank: int, gather: Gather) -> list[int]:
        sampler = make(VOCAB, tp, rank, gather, 1, grammar.GrammarSlots(folder / "tokenizer.json", VOCAB, (EOS,)))
        sampler.admit(sequence(0, request))
        drawn, last = list[int](), 3
        steps = torch.randn(40, 1, VOCAB, generator=torch.Generator().manual_seed(17))
        while len(drawn) < 30 and EOS not in drawn:
            right = len(drawn) % 4
            guess = [*single[len(drawn) : len(drawn) + right], VOCAB - 1, *single[:3]]
            drafts = sampler.drafted(0, guess)
            assert drafts[:right] == guess[:right]
            assert reasons or (len(drafts) == right and sampler.drafted(0, [VOCAB - 1]) == [])
            rows = steps[len(drawn) : len(drawn) + len(drafts) + 1, 0]
            step = sampler.sample(cut(rows, tp, rank), [0] * len(rows), np.array([last, *drafts]))
            assert step.taken is not None
            drawn += step.ids[step.taken].tolist()
            last = drawn[-1]
        return drawn

    for drawn in Ranks(tp).run(task):
        assert drawn == single[: len(drawn)]
        said = tokenizer.decode(drawn)
        assert (said.partition("e")[2].lstrip("\n") if reasons else said).startswith("{"), said


def test_masks_of_shards_are_pieces_of_the_whole(folder: Path) -> None:
    slots = grammar.GrammarSlots(folder / "tokenizer.json", VOCAB, (EOS,))
    slots.admit(0, spec(json=PERSON), [])
    whole = slots.state(0).allowed(range(VOCAB))
    assert 0 < whole.sum() < VOCAB
    for start, stop in [(0, 1), (3, 17), (16, 24), (250, VOCAB), (VOCAB, VOCAB), (31, 32)]:
        assert (slots.state(0).allowed(range(start, stop)) == whole[start:stop]).all()


def test_a_mask_does_not_hide_bad_logits(folder: Path) -> None:
    """NaN at an id that the grammar forbids: the row is reported all the same."""

    def task(rank: int, gather: Gather) -> list[bool]:
        sampler = make(VOCAB, 2, rank, gather, 2, grammar.GrammarSlots(folder / "tokenizer.json", VOCAB, (EOS,)))
        for slot in (0, 1):
            sampler.admit(sequence(slot, params(spec(choice=["yes", "no"]))))
        logits = torch.zeros(2, VOCAB)
        logits[1, 299] = torch.nan
        bad: list[bool] = sampler.sample(cut(logits, 2, rank), [0, 1]).nonfinite.tolist()
        return bad

    assert Ranks(2).run(task) == [[False, True]] * 2


def test_a_grammar_that_slipped_through_ends_its_own_request(folder: Path) -> None:
    """A spec that no door would have let in fails where it is compiled: that row says why, the other one draws."""
    results = write(folder, 2, [params('{"grammars": []}'), params(spec(choice=["no"]))], 2)
    for rank in results:
        assert rank[0].nonfinite.tolist() == [True, False]
        assert "empty grammars array" in rank[0].failures[0]
        assert list(rank[0].failures) == [0]


def test_a_grammar_cannot_hold_up_the_engine(folder: Path) -> None:
    """(a{1000}){1000}: compiled or given up by the library within bounds (2 s and 300 MB without them)."""

    def admit() -> None:
        slots = grammar.GrammarSlots(folder / "tokenizer.json", VOCAB, (EOS,))
        slots.admit(0, spec(regex="(a{1000}){1000}"), [])
        assert slots.state(0).allowed(range(VOCAB)).any() or "too many" in (slots.state(0).failure() or "")

    assert cheapest(admit, 2) < 1.0


BAD: dict[str, str] = {
    "no library form": '{"json_schema": 3}',
    "no JSON": "start: x",
    "open group": spec(regex="a(("),
    "unknown type": spec(json={"type": "objet"}),
    "unsatisfiable": spec(json={"type": "string", "minLength": 5, "maxLength": 2}),
    "fetches nothing": spec(json={"$ref": "http://127.0.0.1:9/schema"}),
    "too long": "x" * (grammar.MAX_SPEC + 1),
    "too deep": '{"grammars":[{"json_schema":' + '{"items":' * 5000 + "{}" + "}" * 5000 + "}]}",
    "empty": '{"grammars": []}',
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_grammar_is_a_value_error_at_the_door(name: str) -> None:
    """In bounded time, in few words, without touching the network."""

    def refused() -> str:
        with pytest.raises(ValueError) as caught:
            grammar.validate(BAD[name])
        return str(caught.value)

    assert cheapest(refused, 2) < 1.0
    assert 10 < len(refused()) < 400


def test_without_the_library_asking_for_a_grammar_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "llguidance", None)
    with pytest.raises(ValueError, match=r"install laddertron\[grammar\]"):
        grammar.validate(spec(regex="a"))

    def task(rank: int, gather: Gather) -> None:
        with pytest.raises(ValueError, match=r"install laddertron\[grammar\]"):
            make(VOCAB, 1, rank, gather, 1).admit(sequence(0, params("{}")))

    Ranks(1).run(task)


def test_a_mask_costs_little(folder: Path) -> None:
    """Specs that many requests share are compiled once: admitting one more takes well under 5 ms."""
    slots = grammar.GrammarSlots(folder / "tokenizer.json", VOCAB, (EOS,))
    person = spec(json=PERSON)
    slots.admit(0, person, [])
    assert cheapest(lambda: slots.admit(1, person, []), 20) < 5e-3


BRANCHES = "\n".join(["start: r0", *(f"r{i}: r{i + 1} | r{i + 1} r{i + 1}" for i in range(2000)), 'r2000: "a"'])
HOSTILE: dict[str, str] = {
    "900 properties": spec(json={"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(900)}}),
    "a $ref to itself": spec(json={"$ref": "#"}),
    "two that refer to one another": spec(
        json={"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    ),
    "900 properties in 30 forms": spec(
        json={"anyOf": [{"type": "object", "properties": {f"p{i}{j}": {} for j in range(30)}} for i in range(30)]}
    ),
    "a rule without an end": '{"grammars":[{"lark_grammar":"start: a\\na: a \\"x\\""}]}',
    "ambiguous 2,000 times": json.dumps({"grammars": [{"lark_grammar": BRANCHES}]}),
    "a pattern of nothing": spec(regex=r"[^\x00-\x{10FFFF}]"),
    "a long pattern": spec(regex="(ab|cd|ef)" * 20_000),
    "a long constant": spec(json={"const": "x" * 200_000}),
    "a multiple that costs": spec(json={"type": "integer", "multipleOf": 99991, "minimum": 3}),
    "a tiny multiple": spec(json={"type": "number", "multipleOf": 1e-300}),
    "a huge bound": spec(json={"type": "number", "minimum": 1e308}),
    "10^18 characters": spec(json={"type": "string", "maxLength": 10**18}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_grammar_that_would_fail_at_work_is_refused_at_the_door(folder: Path, name: str) -> None:
    """By the library's reason or ours, twice, and in bounded time."""
    slots = grammar.GrammarSlots(folder / "tokenizer.json", VOCAB, (EOS,))

    def check() -> None:
        with pytest.raises(ValueError, match=r"cannot be used: .+"):
            slots.check(HOSTILE[name])

    check()
    assert cheapest(check, 1) < 2.0


def test_a_grammar_that_takes_long_to_compile_is_refused_and_few_are_held(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library counts no fuel for it, and a step of all requests would wait. Half a gigabyte for each of 64 would be
    held."""
    slots = grammar.GrammarSlots(folder / "tokenizer.json", VOCAB, (EOS,))
    with monkeypatch.context() as patch:
        patch.setattr(grammar, "COMPILE_SECONDS", 0.0)
        with pytest.raises(ValueError, match=r"takes .* s to compile, at most 0 s are"):
            slots.check(spec(json=PERSON))
    compiled: list[str] = []

    def seconds_each(spec: str) -> grammar.Prototype:
        compiled.append(spec)
        return grammar.Prototype(grammar.library().LLMatcher(slots.tokenizer, spec), 0.4)

    monkeypatch.setattr(slots, "_compiled", seconds_each)
    words = [spec(choice=[f"word {i}"]) for i in range(12)]
    for word in words:
        slots.admit(0, word, ())
    slots.admit(0, words[-5], ())
    assert compiled == words, "the latest are held"
    slots.admit(0, words[0], ())
    assert compiled[-1] == words[0], "the first made room"


def test_the_door_lets_good_grammars_pass_and_knows_them_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = grammar.GrammarSlots(folder / "tokenizer.json", VOCAB, (EOS,))
    good = [
        spec(json=PERSON),
        spec(regex="[a-z]*"),
        spec(choice=["yes", "no"]),
        spec(json={"enum": [*range(5000)]}),
    ]
    for one in good:
        slots.check(one)
    monkeypatch.setattr(grammar, "validate", lambda spec: pytest.fail("a grammar was compiled again"))
    for one in good:
        slots.check(one)


AMBIGUOUS = json.dumps({"grammars": [{"lark_grammar": 'start: a\na: a a | "a" | a a a | a a a a'}]})
UNKEPT: dict[str, dict[str, Any]] = {
    "allowed ids that no text of the grammar has": {"grammar": spec(choice=["yes"]), "allowed_token_ids": (7, 8)},
    "stop ids that are all there is": {"min_tokens": 5, "stop_token_ids": tuple(range(VOCAB))},
    "an ambiguous grammar's rows": {"grammar": AMBIGUOUS, "min_tokens": 190},
}


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", UNKEPT)
def test_what_cannot_be_kept_is_a_reason_and_no_numerical_error(folder: Path, name: str, tp: int) -> None:
    """The row says why, whatever is asked of it; the row beside it draws on."""
    asked = SamplingParams(**{"max_tokens": 400, "seed": 3, "stop_token_ids": (EOS,), **UNKEPT[name]})
    results = write(folder, tp, [asked, params(None)], 200 if name.startswith("an") else 10)
    ended = [step for step in results[0] if step.nonfinite[0]]
    assert ended, "nothing came to an end"
    assert all(0 in step.failures for step in ended)
    assert not any(step.nonfinite[1] for step in results[0])


def test_where_grammars_cannot_be_had_nothing_may_come_and_it_is_said_why() -> None:
    state = grammar.NoGrammars("no tokenizer here").state(3)
    for each in (state, state.fork()):
        each.advance(7)
        assert not each.allowed(range(VOCAB)).any()
        assert each.accepts([1, 2]) == 0
        assert each.failure() == "no tokenizer here"
