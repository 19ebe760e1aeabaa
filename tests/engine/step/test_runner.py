"""The guards of a step, through the real engine on two ranks: NaN, ranks that disagree, grammars."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import jsonschema
import pytest
from laddertron.engine.openai.structured_output import GrammarFields, grammar_of
from laddertron.engine.sampling import grammar
from laddertron.engine.step.engine import TIMEOUT_FACTOR, CollectiveTimeouts
from tokenizers import Tokenizer

Ranks = Callable[..., list[Any]]
DEMO = Path(__file__).parents[3] / "configs" / "demo" / "demo-standard"
POISONED = 299
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "rank": {"type": "integer", "minimum": 0, "maximum": 64},
        "hidden": {"type": "boolean"},
    },
    "required": ["name", "rank", "hidden"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.save(tmp_path_factory.mktemp("llama"), "llama")


@pytest.mark.parametrize("extra", [{}, {"overlapped": True}, {"stages": 2}], ids=["plain", "overlapped", "stages"])
def test_nan_logits_end_only_their_request(ranks: Ranks, llama: Path, extra: dict[str, Any]) -> None:
    """One token's embedding is NaN on the rank that holds it. A request whose prompt contains it, one that only wants
    its prompt scored, one with two choices, and one that gives its blocks back before its only token is known end with
    numerical_error; those beside them, some in blocks that held NaN before, answer as they do without the poison; also
    where a step is set off before the NaN of the one before it is known, and where stages hold the layers."""
    good = [{"prompt": prompt} for prompt in checkpoints.prompts(5, seed=2, vocab=POISONED)]
    bad: list[dict[str, Any]] = [
        {"prompt": [7, POISONED, 9]},
        {"prompt": [*range(10, 30), POISONED], "n": 2, "temperature": 1.0},
        {"prompt": [POISONED, 8, 9], "max_tokens": 0, "prompt_logprobs": 1},
        {"prompt": [10, 11, POISONED, 12], "max_tokens": 1},
    ]
    asked = [good[0], bad[0], good[1], bad[1], good[2], bad[2], *good[3:], bad[3]]
    want = ranks(2, "engine_guards:answer", {"folder": str(llama), "asked": good})[0]
    got = ranks(
        2,
        "engine_guards:answer",
        {"folder": str(llama), "asked": asked, "poisoned": POISONED, "max_num_seqs": 3, "kv_cache_memory": 200 << 10}
        | extra,
    )[0]
    for plain, mixed in zip(range(5), (0, 2, 4, 6, 7), strict=True):
        assert got[f"r{mixed}/0"] == want[f"r{plain}/0"]
    for choice in ("r1/0", "r3/0", "r3/1", "r5/0", "r8/0"):
        assert got[choice]["finish"] == "numerical_error", choice
        assert got[choice]["tokens"] == []
        assert "NaN" in got[choice]["message"]


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"max_num_batched_tokens": 16},
        {"overlapped": True},
        {"stages": 2},
        {"stages": 2, "microbatches": 5},
        {"stages": 2, "microbatches": 5, "max_num_batched_tokens": 16},
        {"stages": 2, "microbatches": 5, "speculation": "ngram"},
    ],
    ids=["plain", "chunked", "overlapped", "stages", "wide", "wide-chunked", "drafts"],
)
def test_nan_in_a_shared_prefix_ends_all_that_share_it(ranks: Ranks, llama: Path, extra: dict[str, Any]) -> None:
    """Requests come one after the other with the same beginning, NaN in its midst: those that took its keys from the
    cache before anybody knew end as the first one does, none answers from zeros in their place; those that share what
    lies before the NaN answer as they do alone."""
    beginning = [*range(100, 120), POISONED, *range(120, 130)]
    bad = [{"prompt": [*beginning, 10 + i, 20 + i], "n": 1 + (i == 4)} for i in range(7)]
    good = [{"prompt": [*beginning[:18], 30 + i, 40 + i]} for i in range(3)]
    asked = [bad[0], good[0], *bad[1:4], good[1], *bad[4:], good[2]]
    want = ranks(2, "engine_guards:answer", {"folder": str(llama), "asked": good})[0]
    got = ranks(
        2,
        "engine_guards:answer",
        {"folder": str(llama), "asked": asked, "poisoned": POISONED, "max_num_batched_tokens": 36} | extra,
    )[0]
    for plain, mixed in zip(range(3), (1, 5, 9), strict=True):
        assert got.pop(f"r{mixed}/0") == want[f"r{plain}/0"]
    assert len(got) == 8
    assert {choice: (told["finish"], told["tokens"]) for choice, told in got.items()} == dict.fromkeys(
        got, ("numerical_error", [])
    )


@pytest.mark.parametrize("liar", [0, 1])
@pytest.mark.parametrize("step", [0, 3])
@pytest.mark.parametrize("overlapped", [False, True])
def test_another_token_on_one_rank_stops_the_next_step(
    ranks: Ranks, llama: Path, liar: int, step: int, overlapped: bool
) -> None:
    """One rank draws another token at a step: every rank raises within the next one, and no token of the step, nor any
    after it, has been told. Where steps overlap, the next one's gather is read when a third is set off."""
    args = {"folder": str(llama), "asked": [{"prompt": [5, 6, 7]}], "liar": liar, "step": step}
    args["overlapped"] = overlapped
    for rank, found in enumerate(ranks(2, "engine_guards:disagree", args)):
        assert found["ranks"] == [0, 1]  # two ranks have no majority
        assert found["step"] == step
        assert found["ran"] <= step + 2
        told = found["told"].get("r0", {"tokens": []})["tokens"]
        assert len(told) <= step
        assert rank == 0 or told == []


def test_a_silent_rank_is_named_after_a_few_steps_time(ranks: Ranks, llama: Path) -> None:
    """Rank 1 falls silent after four steps: rank 0 gives it thirty steps' time (a second at least, here), not the
    minute that the first step has, and says who and which collective."""
    args = {"folder": str(llama), "asked": [{"prompt": [5, 6, 7], "max_tokens": 30}], "steps": 4, "least": 1.0}
    found = ranks(2, "engine_guards:fall_silent", args)[0]
    assert found["peer"] == 1
    assert "rank 1" in found["message"]
    assert re.search(r"collective \d+", found["message"])
    assert 1.0 <= found["timeout"] < max(2.0, 2 * TIMEOUT_FACTOR * found["longest"])


def test_timeouts_follow_the_steps() -> None:
    """Before anything is known the first limit holds; then thirty times the longest step of the size, in proportion for
    a larger one; hiccups are forgotten, and nothing goes below the least."""
    times = CollectiveTimeouts(60.0, lambda limit: None, least=2.0)
    assert times.limit(1) == 60.0
    times.after(8, 0.1)
    assert times.limit(8) == times.limit(15) == times.limit(1) == pytest.approx(3.0)
    assert times.limit(2048) == pytest.approx(3.0 * 256)
    times.after(2048, 1.5)
    assert times.limit(2048) == pytest.approx(45.0)
    times.after(8, 5.0)
    assert times.limit(8) == pytest.approx(150.0)
    for _ in range(400):
        times.after(8, 0.01)
    assert times.limit(8) == 2.0


@pytest.mark.skipif(not grammar.available, reason="llguidance is not installed: laddertron[grammar]")
@pytest.mark.parametrize("stages", [1, 2])
def test_a_schema_is_kept_to_by_the_demo_model(ranks: Ranks, stages: int) -> None:
    """response_format json_schema on two ranks: each answer parses and fits the schema, whatever a model of under two
    million parameters would rather say; a request beside them goes on as if alone."""
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    spec = grammar_of(GrammarFields(guided_json=SCHEMA))
    prompt = tokenizer.encode("def ").ids
    shaped = {"prompt": prompt, "max_tokens": 150, "temperature": 1.0, "grammar": spec, "stop_token_ids": [1, 2]}
    plain = {"prompt": prompt, "max_tokens": 12, "seed": 77}
    args = {"folder": str(DEMO), "asked": [shaped, plain, {**shaped, "n": 2}], "model": {"dtype": "float32"}} | {
        "stages": stages
    }
    got, alone = (ranks(2, "engine_guards:answer", a)[0] for a in (args, args | {"asked": [plain]}))
    for choice in ("r0/0", "r2/0", "r2/1"):
        assert got[choice]["finish"] == "stop", got[choice]
        jsonschema.validate(json.loads(tokenizer.decode(got[choice]["tokens"])), SCHEMA)
    assert got["r1/0"] == alone["r0/0"]
