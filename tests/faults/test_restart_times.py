"""How long a stream waits for its next token when a rank dies, by the size of the weights and where they lie: prints a
table. Part of `make fault-test`; RESTART_GIGABYTES=4 makes the model of docs/operating.md, RESTART_ROUNDS repeats."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import pytest
from job_tools import MPIRUN

from faults.night import ROOT, Night, StreamReader, until

sys.path.insert(0, str(ROOT / "tools" / "benchmarks"))
from common import table
from peers.model import write

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not MPIRUN.exists(), reason=f"no Open MPI at {MPIRUN}"),
]
GIGABYTES = float(os.environ.get("RESTART_GIGABYTES", "0.4"))
ROUNDS = int(os.environ.get("RESTART_ROUNDS", "1"))
CACHES = ("page cache", "cold")
TRANSFORMERS = """\
import sys, torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
print(model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=1, do_sample=False, pad_token_id=0)[0, -1].item())
"""


def make_checkpoint(folder: Path, gigabytes: float) -> None:
    """Layers as wide as those of Llama 3.2 1B, until the weights have this size."""
    layers = max(1, round((gigabytes * 1e9 - 2 * 2 * 32000 * 2048) / 2 / 60.8e6))
    write(folder, hidden_size=2048, num_hidden_layers=layers, num_attention_heads=32, intermediate_size=8192,
          vocab_size=32000)  # fmt: skip


def drop_caches(folder: Path) -> None:
    for file in folder.rglob("*.safetensors"):
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def test_the_next_token_after_a_rank_died_with_large_weights(tmp_path: Path) -> None:
    """A random bf16 Llama on two ranks, with and without a launch that stands by, its files in the page cache and
    dropped from it: each stream goes on with the undisturbed tokens. Beside it transformers, from a new process to its
    first token."""
    model = tmp_path / "model"
    make_checkpoint(model, GIGABYTES)
    config = tmp_path / "deploy.yaml"
    engine = {"device": "cpu", "threads": 1, "max_num_seqs": 2, "kv_cache_memory": "64MiB"}
    parts = {
        "model": {"path": str(model), "served_model_name": "demo"},
        "parallel": {"tensor_parallel_size": 2, "deterministic": True},
        "engine": {**engine, "max_num_batched_tokens": 256},
        "daemon": {"data_dir": str(tmp_path / "unused")},
    }
    config.write_text(json.dumps(parts))  # YAML holds JSON
    took = {(name, cache): list[float]() for name in ("standby", "cold start", "transformers") for cache in CACHES}
    for standby, name in enumerate(("cold start", "standby")):
        folder = tmp_path / name.replace(" ", "-")
        folder.mkdir()
        night = Night(folder, real=True, sets=(f"daemon.standby={standby}",), config=config)
        try:
            for cache, seconds in kills(night, model, standby=bool(standby)):
                took[name, cache].append(seconds)
        finally:
            night.close()
    for cache in CACHES * ROUNDS:
        if cache == "cold":
            drop_caches(model)
        began = time.monotonic()
        subprocess.run([sys.executable, "-c", TRANSFORMERS, str(model)], check=True, capture_output=True)
        took["transformers", cache].append(time.monotonic() - began)
    rows = [[name, *(f"{median(took[name, cache]):.1f} s" for cache in CACHES)] for name in ("standby", "cold start")]
    rows.append(["transformers", *(f"{median(took['transformers', cache]):.1f} s" for cache in CACHES)])
    print(f"\n{GIGABYTES:g} GB, {ROUNDS} rounds", *table(" | ".join(("next token by", *CACHES)), rows), sep="\n")


def kills(night: Night, model: Path, standby: bool) -> list[tuple[str, float]]:
    """Seconds from the kill of a rank to the next token of an open stream, for each round and cache."""
    body = {"prompt": "t5 t6 t7", "max_tokens": 16, "seed": 1, "temperature": 0}
    wait = night.stands if standby else night.ready
    night.start()
    wait()
    undisturbed = StreamReader(night.port, "completions", body)
    undisturbed.join()
    found = []
    for number, cache in enumerate(CACHES * ROUNDS):
        wait()
        stream = StreamReader(night.port, "completions", body)
        until("tokens", lambda: len(stream.events) > 4, 120)  # noqa: B023 (called before the next)
        if cache == "cold":
            drop_caches(model)
        assert night.strike("rank", random.Random(number), night.launches()[:1]) is not None
        began = time.monotonic()
        until("recovery", lambda: len(night.events("recovered")) > number, 300)  # noqa: B023
        seen = len(stream.events)
        until("the next token", lambda: len(stream.events) > seen or stream.whole, 120, 0.001)  # noqa: B023
        found.append((cache, time.monotonic() - began))
        stream.join()
        assert stream.whole
        assert stream.said == undisturbed.said
        print(*(event["message"] for event in night.events("recovered")[number:]), f"{found[-1][1]:.2f} s in all")
    assert all(event["standby"] == standby for event in night.events("recovered"))
    assert ("the rest lay in memory" in night.log_path.read_text()) == standby
    assert night.stop() == 0
    return found
