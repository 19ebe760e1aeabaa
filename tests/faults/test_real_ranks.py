"""SIGKILL and SIGSTOP of real ranks (the demo model under mpirun) below a real daemon: idle, in prefill, in decode,
amid streams and while loading. Part of `make fault-test`; FAULT_SEED replays a run."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import checkpoints
import lane_checkpoints
import predictors
import pytest
import scripted_model
from job_tools import MPIRUN
from laddertron.launchers.control import processes
from laddertron.launchers.control.processes import ProcessId

from faults.night import ROOT, Night, StreamReader, line, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not MPIRUN.exists(), reason=f"no Open MPI at {MPIRUN}"),
]
SEED = int(os.environ.get("FAULT_SEED", random.SystemRandom().randrange(2**32)))
LINES = 300


STAGED = ("parallel.tensor_parallel_size=1", "parallel.pipeline_parallel_size=2")
DRAFTING = ("engine.speculation=model", f"engine.draft_model={ROOT / 'configs' / 'demo' / 'demo-draft'}")


@pytest.fixture(params=[(), STAGED, DRAFTING, STAGED + DRAFTING], ids=["tp2", "pp2", "drafts", "pp2-drafts"])
def night(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Night]:
    made = Night(tmp_path, real=True, sets=request.param)
    yield made
    made.close()


def workload(moment: str, rng: random.Random) -> list[dict[str, Any]]:
    """For "prefill" prompts near the model's length and one token each: nearly every step computes a prompt."""
    if moment == "prefill":
        prompts = [[rng.randrange(3, 1000) for _ in range(240)] for _ in range(LINES)]
        return [line(f"line-{n}", 1, n, prompt) for n, prompt in enumerate(prompts)]
    return [line(f"line-{n}", 64, n) for n in range(LINES)]


def phase(night: Night) -> str:
    """Of the only replica, as /ready says it; "" while nobody answers."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{night.port}/ready", timeout=5) as answer:
            body = json.load(answer)
    except urllib.error.HTTPError as error:
        body = json.load(error)
    except OSError:
        return ""
    return str(body["replicas"][0]["phase"])


def failures(night: Night) -> list[dict[str, Any]]:
    return [event for event in night.events("failure") if "replica" in event]


def metric(night: Night, name: str) -> float:
    """A counter of the only replica."""
    with urllib.request.urlopen(f"http://127.0.0.1:{night.port}/metrics", timeout=60) as answer:
        return float(re.findall(rf"(?m)^laddertron_{name}_total.* (\S+)$", answer.read().decode())[0])


def a_start(night: Night) -> float:
    """Starts the daemon; the seconds from its first rank process until it is ready: processes, imports, weights."""
    night.start()
    until("ranks", lambda: night.victims("rank"), 300)
    return night.ready()


def struck_rank(victim: ProcessId) -> int:
    """Open MPI tells each process its rank in its environment."""
    words = Path(f"/proc/{victim.pid}/environ").read_bytes().split(b"\0")
    return next(int(word.partition(b"=")[2]) for word in words if word.startswith(b"OMPI_COMM_WORLD_RANK="))


@pytest.mark.parametrize(
    ("signum", "moment"),
    [
        (signal.SIGKILL, "idle"),
        (signal.SIGKILL, "prefill"),
        (signal.SIGKILL, "decode"),
        (signal.SIGKILL, "loading"),
        (signal.SIGSTOP, "prefill"),
        (signal.SIGSTOP, "decode"),
    ],
    ids=lambda value: value.name if isinstance(value, signal.Signals) else value,
)
def test_a_real_rank_is_lost(signum: signal.Signals, moment: str, night: Night) -> None:
    """Found within 2 s (frozen: 15 s), not ready from then on, the rank and its node named, every process of the launch
    gone; serving again within 10 s beyond what a start takes; every line has one answer."""
    rng = random.Random(f"{SEED} {signum} {moment}")
    start_s = a_start(night)
    batch = night.submit(workload(moment, rng))
    if moment == "idle":
        until("an idle engine", lambda: night.batch(batch)["status"] == "completed", 120)
    elif moment == "loading":
        assert night.strike("rank", rng) is not None  # the launch under test is the second
        until("a launch that loads", lambda: phase(night) == "loading" and len(night.victims("rank")) == 2, 60)
        time.sleep(rng.uniform(0.0, start_s / 2))
        assert phase(night) == "loading"
    else:
        until("answers", lambda: len(night.committed()) >= 20, 60)
        time.sleep(rng.uniform(0.0, 0.5))
    known = [p for what in ("keeper", "mpirun", "rank") for p in night.victims(what)]
    seen = len(failures(night))
    victim = rng.choice(sorted(night.victims("rank"), key=lambda p: p.pid))
    rank = struck_rank(victim)
    assert processes.kill(victim, signum)
    began = time.monotonic()
    bar_s = 15.0 if signum == signal.SIGSTOP else 2.0
    until("not ready", lambda: phase(night) != "ready", bar_s, 0.01)
    not_ready = time.monotonic() - began
    until("the failure", lambda: len(failures(night)) > seen, max(bar_s - not_ready, 0.1), 0.01)
    found = time.monotonic() - began
    told = failures(night)[seen]
    until("an empty launch", lambda: not any(processes.is_alive(p) for p in known), 15.0)
    gone = time.monotonic() - began
    night.ready()
    again = time.monotonic() - began
    assert (told["rank"], told["node"]) == (rank, os.uname().nodename), told
    assert (f"stage {rank}" in json.dumps(told)) == (STAGED[1] in night.argv), told
    until("the batch's end", lambda: night.batch(batch)["status"] == "completed", 180, 0.1)
    names = [row["custom_id"] for row in night.rows(night.batch(batch), "output")]
    assert sorted(names) == sorted(f"line-{n}" for n in range(LINES))
    print(
        f"\nFAULT_SEED={SEED} {signum.name} of rank {rank}, {moment}: unready {not_ready:.2f} s, named {found:.2f} s, "
        f"gone {gone:.2f} s, serving again {again:.1f} s, a start {start_s:.1f} s; {LINES} lines, {LINES} answers"
    )
    assert again - found <= 10.0 + start_s
    assert night.stop() == 0


STREAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("completions", {"prompt": "def f(", "temperature": 0, "logprobs": 2}),
    "drawn, n=2": ("completions", {"prompt": "class A", "seed": 1, "n": 2}),
    "penalties": ("completions", {"prompt": "import ", "seed": 2, "repetition_penalty": 1.2, "frequency_penalty": 0.5}),
    "a grammar": ("completions", {"prompt": "x = ", "seed": 3, "guided_regex": "([a-z]{3}, ){60}"}),
    "a chat": ("chat/completions", {"messages": [{"role": "user", "content": "hi"}], "seed": 4, "temperature": 0.7}),
    "a stop string": ("completions", {"prompt": "for ", "seed": 5, "stop": ["never said", "nor this"]}),
}


def gone_on(streams: list[StreamReader], seen: list[int]) -> bool:
    """Whether each is further than that, or over."""
    return all(len(s.events) > count or not s.is_alive() for s, count in zip(streams, seen, strict=True))


def test_streams_outlive_their_ranks(night: Night) -> None:
    """Six streams while ranks are killed three times, each time once all streams have gone on: with
    `deterministic: true` they say what they say in an undisturbed run, bit for bit (the digests of all logits too)."""
    rng = random.Random(f"{SEED} streams")
    night.argv += ["--set", "parallel.deterministic=true"]
    night.start()
    night.ready()
    longest = {"max_tokens": 220, "n": 3, "return_digest": True}  # else drafts end them before the third kill
    asked = {name: (path, body | longest) for name, (path, body) in STREAMS.items()}
    calm = {name: StreamReader(night.port, *one) for name, one in asked.items()}
    for stream in calm.values():
        stream.join()
    streams = {name: StreamReader(night.port, *one) for name, one in asked.items()}
    gaps = []
    for _ in range(3):
        until("tokens", partial(gone_on, list(streams.values()), [len(s.events) + 5 for s in streams.values()]), 120)
        assert night.strike("rank", rng) is not None
        began = time.monotonic()
        until("not ready", lambda: phase(night) != "ready", 10.0, 0.01)
        until(
            "the next token", partial(gone_on, list(streams.values()), [len(s.events) for s in streams.values()]), 120
        )
        gaps.append(time.monotonic() - began)
    for name, stream in streams.items():
        stream.join()
        assert stream.whole
        assert stream.said == calm[name].said, name
        assert all(end is not None for end in (one["end"] for one in stream.said.values()))
    assert len(failures(night)) == 3
    print(
        f"\nFAULT_SEED={SEED} {len(streams)} streams: the next token after {', '.join(f'{gap:.1f}' for gap in gaps)} s"
    )
    assert night.stop() == 0


REASONING = "".join(f"|thought {n}, " for n in range(60))


@pytest.mark.parametrize("drafts", [(), ("engine.speculation=ngram",)], ids=["plain", "drafts"])
def test_a_grammar_after_reasoning_outlives_its_ranks(tmp_path: Path, drafts: tuple[str, ...]) -> None:
    """Six chats on two stages whose content has a grammar that begins after the reasoning; the cache is too small for
    all. A rank of each stage is killed: one while all reason, one amid the content. Each stream says what it says in an
    undisturbed run, and its content is the grammar's."""
    scripts = {"<|thinks|>": f"<think>{REASONING}|</think>"}
    shape = {"num_hidden_layers": 2, "max_position_embeddings": 512}
    folder = scripted_model.save(tmp_path / "model", scripts, scripted_model.REASONS, **shape)
    keys = ("parallel.deterministic=true", f"model.path={folder}", "model.wiring=auto", "engine.kv_cache_memory=1MiB")
    night = Night(tmp_path, real=True, sets=(*STAGED, *drafts, *keys))
    schema = {"type": "string", "pattern": "^([a-z]{3}, ){30}$"}
    form = {"type": "json_schema", "json_schema": {"name": "words", "schema": schema}}
    body = {"messages": [{"role": "user", "content": "hi"}], "response_format": form, "return_digest": True}
    asked = [("chat/completions", {**body, "max_tokens": 400, "seed": seed}) for seed in range(6)]
    try:
        a_start(night)
        calm = [StreamReader(night.port, *one) for one in asked]
        for stream in calm:
            stream.join()
        streams = [StreamReader(night.port, *one) for one in asked]
        for rank, events in ((0, 10), (1, 80)):
            until("tokens", partial(gone_on, streams, [events] * 6), 120)
            victim = next(p for p in night.victims("rank") if struck_rank(p) == rank)
            assert processes.kill(victim, signal.SIGKILL)
            until("not ready", lambda: phase(night) != "ready", 10.0, 0.01)
        for stream, undisturbed in zip(streams, calm, strict=True):
            stream.join()
            assert stream.whole, night.tail()
            assert stream.said == undisturbed.said
            text = stream.said[0]["text"].partition("thought 59, ")[2]
            assert re.fullmatch('"([a-z]{3}, ){30}"', text), text
        assert metric(night, "num_preemptions") > 0
        assert night.stop() == 0
    finally:
        night.close()


def mixed(number: int) -> dict[str, Any]:
    """Line `number` of a batch: lengths, sampling, choices, log-probabilities and stops by its number."""
    rng = random.Random(number)
    asked = line(
        f"line-{number}",
        rng.choice((1, 8, 40)),
        number,
        [rng.randrange(3, 1000) for _ in range(8 * rng.randint(1, 25))],
    )
    kinds: tuple[dict[str, Any], ...] = (
        {},
        {"temperature": 0.8, "top_p": 0.9},
        {"n": 2, "temperature": 1.0},
        {"logprobs": 2},
        {"stop": ["e", "\n"]},
    )
    asked["body"] |= kinds[number % len(kinds)]
    return asked


@pytest.mark.parametrize("rank", [0, 1])
def test_a_mixed_batch_outlives_a_rank_of_either_stage(tmp_path: Path, rank: int) -> None:
    """500 lines of every kind over two stages; half way a rank is killed. Every line has one answer, and lines that ask
    the same, before the loss or after it, have the same one."""
    night, half = Night(tmp_path, real=True, sets=(*STAGED, "parallel.deterministic=true")), 250
    try:
        a_start(night)
        lines = [mixed(n) for n in range(half)]
        lines += [asked | {"custom_id": f"again-{n}"} for n, asked in enumerate(lines)]
        batch = night.submit(lines)
        until("half of the answers", lambda: len(night.committed()) >= half, 300)
        victim = next(p for p in night.victims("rank") if struck_rank(p) == rank)
        assert processes.kill(victim, signal.SIGKILL)
        until("the batch's end", lambda: night.batch(batch)["status"] == "completed", 300, 0.1)
        (told,) = failures(night)
        assert told["rank"] == rank
        assert f"stage {rank}" in json.dumps(told)
        rows = night.rows(night.batch(batch), "output")
        assert sorted(row["custom_id"] for row in rows) == sorted(asked["custom_id"] for asked in lines)
        answers = {row["custom_id"]: row["response"]["body"]["choices"] for row in rows}
        for number in range(half):
            assert [c["text"] for c in answers[f"line-{number}"]] == [c["text"] for c in answers[f"again-{number}"]], (
                number
            )
        assert night.stop() == 0
    finally:
        night.close()


TENSOR, SPREAD = ("parallel.expert_layout=tensor",), ("parallel.expert_layout=spread",)
STANDBY = ("daemon.standby=1", "engine.kv_cache_memory=16MiB")
MTP = ("engine.speculation=mtp",)


@pytest.mark.parametrize(
    ("family", "sets", "rank"),
    [
        *[("qwen3_moe", layout, rank) for layout in (TENSOR, SPREAD) for rank in (0, 1)],
        *[("deepseek_v3", SPREAD, 1), ("longcat_flash", TENSOR, 0), ("longcat_flash", SPREAD, 1), ("lanes", (), 1)],
        *[
            ("glm_moe_dsa", (), 1),
            ("deepseek_v32", STANDBY, 0),
            ("deepseek_v3", STANDBY, 0),
            ("longcat_flash", SPREAD + STANDBY, 1),
            ("lanes", STANDBY, 0),
            *[("deepseek_v3", MTP, 1), ("glm4_moe", STAGED + MTP, 1)],
        ],
    ],
    ids=lambda value: "-".join(word.rpartition("=")[2] for word in value) if isinstance(value, tuple) else None,
)
def test_streams_and_a_batch_outlive_a_rank_of_a_family(
    tmp_path: Path, family: str, sets: tuple[str, ...], rank: int
) -> None:
    """A rank with experts, latents or lanes is killed while three streams and a batch run, also amid drafts of the
    predicting layer; a standby, if there is one, takes over. Each stream has the text and the digests of an undisturbed
    run, each line one answer, and lines with equal prompts the same one before the loss and after it."""
    save = lane_checkpoints.save if family == "lanes" else partial(checkpoints.save, recipe=family)
    if MTP[0] in sets:
        save = partial(predictors.save, family=family, calm=0.1)
    folder = save(tmp_path / "model", max_position_embeddings=512)
    keys = (*sets, "parallel.deterministic=true", f"model.path={folder}")
    night = Night(tmp_path, real=True, sets=keys)
    prompts = ("def f(", "class A", "import ", "x = ")
    asked = {
        name: (STREAMS[name][0], {"max_tokens": 180, "return_digest": True, **STREAMS[name][1]})
        for name in ("greedy", "drawn, n=2", "a chat")
    }
    try:
        a_start(night)
        if STANDBY[0] in sets:
            night.stands()
        calm = {name: StreamReader(night.port, *one) for name, one in asked.items()}
        for stream in calm.values():
            stream.join()
            assert stream.whole, night.tail()
        batch = night.submit([line(f"line-{n}", 40, n, prompts[n % len(prompts)]) for n in range(LINES)])
        until("answers", lambda: len(night.committed()) >= 20, 60)
        streams = {name: StreamReader(night.port, *one) for name, one in asked.items()}
        until("tokens", partial(gone_on, list(streams.values()), [5] * len(streams)), 120)
        assert not any(stream.whole for stream in streams.values())
        assert night.batch(batch)["status"] == "in_progress"
        victim = next(p for p in night.victims("rank", night.launches()[:1]) if struck_rank(p) == rank)
        assert processes.kill(victim, signal.SIGKILL)
        for name, stream in streams.items():
            stream.join()
            assert stream.whole
            assert stream.said == calm[name].said, name
        until("the batch's end", lambda: night.batch(batch)["status"] == "completed", 180, 0.1)
        (failure,) = failures(night)
        assert failure["rank"] == rank
        assert (metric(night, "spec_decode_num_draft_tokens") > 0) == (MTP[0] in sets)
        assert [event["standby"] for event in night.events("recovered")] == [STANDBY[0] in sets]
        rows = night.rows(night.batch(batch), "output")
        assert sorted(row["custom_id"] for row in rows) == sorted(f"line-{n}" for n in range(LINES))
        texts = {row["custom_id"]: row["response"]["body"]["choices"][0]["text"] for row in rows}
        for n, _ in enumerate(prompts):
            assert len({texts[f"line-{m}"] for m in range(n, LINES, len(prompts))}) == 1, prompts[n]
        assert night.stop() == 0
    finally:
        night.close()
