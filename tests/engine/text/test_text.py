"""Text and ids: the detokeniser against the library's decode, stop strings against a character-wise oracle, templates
and tokenizers against transformers, and a pool whose workers survive nothing so that the pool survives everything."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from laddertron.engine.sampling import grammar
from laddertron.engine.text.chat_template import ChatTemplate, TemplateError
from laddertron.engine.text.detokenizer import OutputText, Pieces
from laddertron.engine.text.pool import PoolLimits, PromptError, TextPool, TextUnavailable
from laddertron.engine.text.tokenizer import ChatOptions, TextError, TextModel
from laddertron.launchers.control.processes import descendants, words_of
from tiny_text import byte_fallback, byte_level, metaspace, unprefixed, write_folder
from tokenizers import Tokenizer

KINDS: dict[str, Callable[[], Tokenizer]] = {
    "bytes": byte_level,
    "fallback": byte_fallback,
    "unstripped": unprefixed,
    "window": metaspace,
}


def chunks(ids: list[int], rng: random.Random) -> list[list[int]]:
    out = []
    while ids:
        n = rng.randint(1, 5)
        out.append(ids[:n])
        ids = ids[n:]
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_given_out_equals_decode_of_the_whole(kind: str, run_seed: int) -> None:
    """Random ids (invalid UTF-8, special and unknown ones among them), pushed in random chunks."""
    tokenizer = KINDS[kind]()
    pieces = Pieces(tokenizer)
    assert pieces.kind == kind
    rng = random.Random(run_seed)
    for _ in range(400):
        ids = [rng.randrange(tokenizer.get_vocab_size() + 3) for _ in range(rng.randint(0, 40))]
        for skip in (True, False):
            stream = pieces.stream(skip)
            text = "".join(stream.push(c) for c in chunks(ids, rng)) + stream.finish()
            assert text == tokenizer.decode(ids, skip_special_tokens=skip), ids


@pytest.mark.parametrize("kind", KINDS)
def test_real_text_comes_back_character_by_character(kind: str) -> None:
    tokenizer = KINDS[kind]()
    text = "that then" if kind == "window" else "that 🦙 then: naïve é — 日本語 "
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    stream = Pieces(tokenizer).stream()
    assert "".join(stream.push([i]) for i in ids) + stream.finish() == text


def test_an_incomplete_character_is_held_back() -> None:
    """A llama has four bytes: three tokens give nothing, the fourth gives it; a lost tail becomes U+FFFD."""
    tokenizer = byte_level()
    ids = tokenizer.encode("🦙", add_special_tokens=False).ids
    assert len(ids) == 4
    stream = Pieces(tokenizer).stream()
    assert [stream.push([i]) for i in ids] == ["", "", "", "🦙"]
    stream = Pieces(tokenizer).stream()
    assert stream.push(ids[:3]) + stream.finish() == "\ufffd"


def test_an_answer_keeps_the_space_that_joins_it_to_its_prompt() -> None:
    """SentencePiece drops a text's first space: it is the prompt's to drop, not the answer's."""
    tokenizer = byte_fallback()
    prompt = tokenizer.encode("hello").ids
    vocabulary = tokenizer.get_vocab()
    ids = [vocabulary["▁t"], vocabulary["o"]]
    assert Pieces(tokenizer).stream(continues=True).push(ids) == " to"
    assert tokenizer.decode(prompt + ids) == "hello to"
    assert Pieces(tokenizer).stream(continues=False).push(ids) == "to"


def test_an_unknown_decoder_never_holds_back_for_ever() -> None:
    """Eight tokens that complete no character are given out as they stand."""
    tokenizer = byte_level()
    pieces = Pieces(tokenizer)
    pieces.kind = "window"
    stream = pieces.stream()
    lone = tokenizer.encode("🦙", add_special_tokens=False).ids[0]
    out = [stream.push([lone]) for _ in range(24)]
    assert "".join(out) == "\ufffd" * 24
    assert max(i for i, text in enumerate(out) if text) == 23


def stop_oracle(text: str, stops: tuple[str, ...], include: bool) -> tuple[str, str | None]:
    """Character by character: the first stop string to be complete, of those the longest."""
    for end in range(1, len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found:
            stop = max(found, key=len)
            return text[:end] if include else text[: end - len(stop)], stop
    return text, None


def test_stop_strings_match_across_tokens_as_on_characters(run_seed: int) -> None:
    """Random texts over three letters, random stops, random chunks: always the oracle's text, never more streamed."""
    tokenizer = byte_level()
    pieces = Pieces(tokenizer)
    rng = random.Random(run_seed)
    for _ in range(600):
        text = "".join(rng.choice("and ") for _ in range(rng.randint(0, 30)))
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        stops = tuple("".join(rng.choice("and ") for _ in range(rng.randint(1, 4))) for _ in range(rng.randint(1, 3)))
        include = rng.random() < 0.5
        out = OutputText(pieces.stream(), stops, include)
        given = ""
        want, matched = stop_oracle(text, stops, include)
        for chunk in chunks(ids, rng):
            given += out.push(chunk)
            assert want.startswith(given)
        given += out.finish()
        assert (given, out.matched) == (want, matched), (text, stops)
        if matched is not None:
            # the tokens taken are those whose text completes the stop string, no more
            end = len(want) if include else len(want) + len(matched)
            assert len(tokenizer.decode(ids[: out.n_tokens])) >= end > len(tokenizer.decode(ids[: out.n_tokens - 1]))


def test_text_that_may_become_a_stop_string_is_held_until_it_cannot() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("xSTxSTOP", add_special_tokens=False).ids
    out = OutputText(Pieces(tokenizer).stream(), ("STOP",))
    assert [out.push([i]) for i in ids] == ["x", "", "", "STx", "", "", "", ""]
    assert (out.matched, out.n_tokens, out.finish()) == ("STOP", 8, "")
    out = OutputText(Pieces(tokenizer).stream(), ("STOP",))
    assert out.push(ids[:3]) + out.finish() == "xST"


def test_min_tokens_defers_stop_strings() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("xxoxo", add_special_tokens=False).ids
    out = OutputText(Pieces(tokenizer).stream(), ("x",), min_tokens=3)
    assert out.push(ids) == "xxo"
    assert out.n_tokens == 4


def test_templates_get_what_they_expect_and_no_more() -> None:
    """tojson without HTML escapes, loop controls, generation blocks, trimmed blocks, raise_exception, strftime_now."""
    source = (
        "{{ bos_token }}{% for m in messages %}\n"
        "    {% if m.role == 'user' and loop.index > 2 %}{% break %}{% endif %}\n"
        "{% generation %}[{{ m.content | tojson }}]{% endgeneration %}\n"
        "{% endfor %}\n"
        "{% if tools is none and strftime_now('%Y') | int > 2000 and hint is defined %}{{ hint }}{% endif %}"
    )
    messages = [
        {"role": "user", "content": "<a> & é"},
        {"role": "user", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    text = ChatTemplate(source, {"bos_token": "<s>"}).render(messages, ChatOptions(variables={"hint": "!"}))
    assert text == '<s>["<a> & é"]["b"]!'
    with pytest.raises(TemplateError, match="roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}", {}).render(messages)
    with pytest.raises(TemplateError, match="does not compile"):
        ChatTemplate("{% if %}", {})
    with pytest.raises(TemplateError, match="failed on the messages"):
        ChatTemplate("{{ messages[0].content + 1 }}", {}).render(messages)


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ messages.append({'role': 'user'}) }}",
        "{{ (messages | attr('__class__')).__base__ }}",
        "{% set x = '{0.__class__}'.format(messages) %}{{ x }}{{ messages.clear() }}",
    ],
)
def test_a_template_does_not_leave_the_sandbox(attack: str) -> None:
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(TemplateError):
        ChatTemplate(attack, {}).render(messages)
    assert messages == [{"role": "user", "content": "x"}]


def test_message_words_are_data_not_template() -> None:
    text = ChatTemplate("{{ messages[0].content }}", {}).render([{"role": "user", "content": "{{ 7 * 7 }}{% x %}"}])
    assert text == "{{ 7 * 7 }}{% x %}"


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] | trim }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_ids_equal_those_of_transformers(tmp_path: Path) -> None:
    """Prompts and chats over every kind of folder, add_bos_token said both ways."""
    transformers = pytest.importorskip("transformers")
    folders = [
        write_folder(tmp_path / "bytes", byte_level(), TEMPLATE),
        write_folder(tmp_path / "fallback", byte_fallback(), TEMPLATE),
        write_folder(tmp_path / "listed", byte_level(), [{"name": "default", "template": TEMPLATE}]),
        write_folder(tmp_path / "object", byte_level(), TEMPLATE, bos_token={"__type": "AddedToken", "content": "<s>"}),
    ]
    prompts = ["", "the hand", " and 🦙", "<|user|>x</s>", "a  b\n"]
    messages = [
        {"role": "system", "content": "be terse"},
        {"role": "user", "content": " the end "},
        {"role": "assistant", "content": "and the"},
    ]
    for folder in folders:
        ours, theirs = TextModel.from_folder(folder), transformers.AutoTokenizer.from_pretrained(folder)
        for prompt in prompts:
            for special in (True, False):
                want = theirs(prompt, add_special_tokens=special)["input_ids"]
                assert ours.encode(prompt, special) == want, (folder.name, prompt)
        for options in (ChatOptions(), ChatOptions(False), ChatOptions(False, True)):
            want = theirs.apply_chat_template(
                messages,
                add_generation_prompt=options.add_generation_prompt,
                continue_final_message=options.continue_final_message,
                return_dict=False,
            )
            assert ours.encode_chat(messages, options) == want, (folder.name, options)


def test_the_beginning_token_follows_the_config(tmp_path: Path) -> None:
    """A Llama folder's add_bos_token overrides tokenizer.json's own rule; other classes leave it to tokenizer.json."""
    for rule, want in ((True, [1]), (False, []), (None, [1])):
        config = {} if rule is None else {"add_bos_token": rule}
        folder = write_folder(tmp_path / str(rule), byte_fallback(), tokenizer_class="LlamaTokenizer", **config)
        assert TextModel.from_folder(folder).encode("a")[: len(want)] == want
        assert (1 in TextModel.from_folder(folder).encode("a")) == bool(want)


def test_a_folder_says_where_answers_end(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 1, 9]}))
    assert TextModel.from_folder(folder).eos_ids == (1, 7, 9)


def test_an_unusable_folder_is_refused_with_the_mend(tmp_path: Path) -> None:
    with pytest.raises(TextError, match=r"tokenizer.json is missing: save it"):
        TextModel.from_folder(tmp_path)
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(TextError, match=r"tokenizer.model alone is not read"):
        TextModel.from_folder(tmp_path)
    panics = json.loads(byte_level().to_str())
    panics["model"]["continuing_subword_prefix"] = "#########"  # longer than what is merged
    for broken in (dict[str, object](), panics):
        (tmp_path / "tokenizer.json").write_text(json.dumps(broken))
        with pytest.raises(TextError, match="cannot be read as a tokenizer"):
            TextModel.from_folder(tmp_path)
    write_folder(tmp_path, template=[{"name": "tools", "template": "x"}])
    with pytest.raises(TextError, match='without "default"'):
        TextModel.from_folder(tmp_path)
    write_folder(tmp_path, template=None)
    with pytest.raises(TemplateError, match="/v1/completions"):
        TextModel.from_folder(tmp_path).encode_chat([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    ("config", "beside", "said"),
    [
        ({"chat_template": [{"name": ["a"], "template": "x"}]}, None, 'without "default"'),
        ({"chat_template": 5}, None, "chat_template is a int"),
        ({}, "[1]", "chat_template.json is not an object"),
        ({}, "[" * 100_000, "chat_template.json is not an object"),
        ({"tokenizer_class": ["LlamaTokenizer"], "add_bos_token": True}, None, ""),
    ],
)
def test_files_of_other_shapes_are_refused_by_name_or_passed_over(
    tmp_path: Path, config: dict[str, Any], beside: str | None, said: str
) -> None:
    folder = write_folder(tmp_path)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if beside is not None:
        (folder / "chat_template.json").write_text(beside)
    if not said:
        assert TextModel.from_folder(folder).bos_id is None
        return
    with pytest.raises(TextError, match=said):
        TextModel.from_folder(folder)


HOSTILE = (
    "{% if messages[0].content == 'loop' %}"
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    "{% elif messages[0].content == 'grow' %}{{ (messages[0].content * 10**9) * 100 }}"
    "{% elif messages[0].content == 'escape' %}{{ ''.__class__.__mro__ }}"
    "{% else %}{{ messages[0].content }}{% endif %}"
)


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def test_a_pool_survives_what_its_workers_do_not(tmp_path: Path) -> None:
    """Among good chats: one that loops for ever, one that eats memory, one that tries to escape. Each has its own
    error, the good ones their ids, and no process is left."""
    write_folder(tmp_path, template=HOSTILE)
    limits = PoolLimits(workers=2, cpu_seconds=0.5, memory_bytes=2 << 30, max_ids=100)

    async def code(work: Any) -> str:
        with pytest.raises(PromptError) as caught:
            await work
        return caught.value.code

    async def go() -> None:
        async with TextPool(tmp_path, limits) as pool:
            good = [asyncio.ensure_future(pool.of("").encode_chat(user(f"n {i}"), ChatOptions())) for i in range(20)]
            bad = {
                k: asyncio.ensure_future(code(pool.of("").encode_chat(user(k), ChatOptions())))
                for k in ("loop", "grow", "escape")
            }
            more = [asyncio.ensure_future(pool.of("").encode(f"m {i}")) for i in range(20)]
            assert {k: await v for k, v in bad.items()} == {
                "loop": "prompt_too_costly",
                "grow": "prompt_too_costly",
                "escape": "chat_template_error",
            }
            model = TextModel.from_folder(tmp_path)
            assert await asyncio.gather(*good) == [tuple(model.encode_chat(user(f"n {i}"))) for i in range(20)]
            assert await asyncio.gather(*more) == [tuple(model.encode(f"m {i}")) for i in range(20)]
            with pytest.raises(PromptError, match="201 tokens") as caught:
                await pool.of("").encode("xy" * 100)
            assert caught.value.code == "context_length_exceeded"
            # one whose asker went away overruns: those behind it are not to blame
            gone = [asyncio.ensure_future(pool.of("").encode_chat(user("loop"), ChatOptions())) for _ in range(2)]
            behind = [asyncio.ensure_future(pool.of("").encode(f"m {i}")) for i in range(20)]
            await asyncio.sleep(0)
            for task in gone:
                task.cancel()
            assert await asyncio.gather(*behind) == [await m for m in more]
            pids = children()
            assert pids
            os.kill(pids[0], signal.SIGKILL)
            assert await asyncio.gather(*[pool.of("").encode(f"m {i}") for i in range(20)]) == [await m for m in more]
        assert children() == []
        with pytest.raises(TextUnavailable, match="not running"):
            await pool.of("").encode("late")

    asyncio.run(go())


def test_a_ten_megabyte_prompt_costs_its_request_not_the_pool(tmp_path: Path) -> None:
    """It ends in an error (too long, or too much work) while another worker goes on."""
    write_folder(tmp_path)

    async def go() -> None:
        async with TextPool(tmp_path, PoolLimits(workers=2, cpu_seconds=0.6, max_ids=4096)) as pool:
            big = asyncio.ensure_future(pool.of("").encode("and the " * 1_250_000))
            await asyncio.sleep(0)
            assert len(await pool.of("").encode("x")) == 2
            with pytest.raises(PromptError):
                await big
            assert len(await pool.of("").encode("x")) == 2

    asyncio.run(go())


def test_grammars_are_checked_where_they_may_cost_a_process(tmp_path: Path) -> None:
    """A good one passes, a bad one says why; without the library every one is refused with the fix."""
    write_folder(tmp_path)

    async def go() -> str:
        async with TextPool(tmp_path, PoolLimits(workers=1)) as pool:
            if grammar.available:
                await pool.of("").check_grammar('{"grammars": [{"json_schema": {"type": "object"}}]}')
            with pytest.raises(PromptError) as caught:
                await pool.of("").check_grammar('{"grammars": [{"lark_grammar": "start: /(/"}]}')
            assert caught.value.code == "invalid_grammar"
            assert len(await pool.of("").encode("x")) == 2
            return str(caught.value)

    said = asyncio.run(go())
    assert ("cannot be used" if grammar.available else "laddertron[grammar]") in said


def children() -> list[int]:
    """Pids of this process's text workers."""
    return [p.pid for p in descendants(os.getpid()) if "laddertron.engine.text.worker" in words_of(p.pid)]


def test_nothing_at_the_door_loads_torch() -> None:
    """Door, text and run command come up without torch, transformers or MPI."""
    modules = "engine.run.run engine.text.worker engine.openai.answers launchers.cli.commands.run"
    program = (
        "import importlib, sys\n"
        f"for name in {modules.split()!r}: importlib.import_module('laddertron.' + name)\n"
        "print(sorted({'torch', 'transformers', 'mpi4py'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
