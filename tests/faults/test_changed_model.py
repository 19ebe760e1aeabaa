"""A model folder that changes under a real daemon (the demo model under mpirun) before a process that reads it starts
by itself: it is refused by name, no answer mixes two models, and restored files or a reload end the refusal."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from job_tools import MPIRUN
from laddertron.launchers.control import processes
from safetensors.torch import load_file, save_file

from faults.night import ROOT, Night, line, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not MPIRUN.exists(), reason=f"no Open MPI at {MPIRUN}"),
]
LINES = 60


def copied(folder: Path) -> Path:
    """The demo deployment with a model folder of its own."""
    shutil.copy(ROOT / "configs" / "demo.yaml", folder / "demo.yaml")
    shutil.copytree(ROOT / "configs" / "demo" / "demo-ladder", folder / "demo" / "demo-ladder")
    return folder / "demo" / "demo-ladder"


@pytest.fixture
def night(tmp_path: Path) -> Iterator[Night]:
    copied(tmp_path)
    made = Night(tmp_path, real=True, sets=("parallel.deterministic=true",), config=tmp_path / "demo.yaml")
    yield made
    made.close()


def tune(model: Path, name: str = "model.layers.3.mlp.down_proj.weight", scale: float = -1.0) -> None:
    """Replaces one tensor's values, atomically, as a new copy of the file would."""
    file = model / "model.safetensors"
    tensors = load_file(file)
    tensors[name] = tensors[name] * scale
    save_file(tensors, model / "part", {"format": "pt"})
    (model / "part").replace(file)


def edit(model: Path, file: str, **changes: Any) -> None:
    path = model / file
    data = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**data, **changes}))


def lines(tokens: int = 64) -> list[dict[str, Any]]:
    return [line(f"line-{n}", tokens, n) for n in range(LINES)]


def answers(night: Night, batch: str) -> dict[str, str]:
    until("the batch's end", lambda: night.batch(batch)["status"] in ("completed", "failed"), 180, 0.1)
    return {
        row["custom_id"]: row["response"]["body"]["choices"][0]["text"]
        for row in night.rows(night.batch(batch), "output")
    }


def digest_of(night: Night, batch: str) -> str | None:
    with closing(sqlite3.connect(f"file:{night.folder / 'data' / 'store.db'}?mode=ro", uri=True)) as db:
        digest: str | None = db.execute("SELECT model_digest FROM batches WHERE id = ?", (batch,)).fetchone()[0]
        return digest


def refused(night: Night, words: str) -> None:
    until("a refusal", lambda: words in night.replica()["reason"] and night.status() == 503, 120, 0.1)


def reload(night: Night) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "laddertron.launchers.cli", "reload", *night.argv[4:]]
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)


def test_weights_replaced_in_place_are_not_served_by_a_relaunch(night: Night) -> None:
    """1. All lines of a batch are answered by A. 2. Amid a second batch one tensor is replaced, and a rank dies: not
    ready, rank, host, file and tensor named, with the fix; the daemon goes on. 3. The file is restored: the batch
    completes with A's answers. 4. B again, and a rank dies amid a third batch; a reload serves B: each line is A's or
    B's, none is both, and the batch is of no single model. 5. A batch of B."""
    model = night.folder / "demo" / "demo-ladder"
    night.start()
    night.ready()
    first = night.submit(lines())
    by_a = answers(night, first)
    assert len(by_a) == LINES
    original = (model / "model.safetensors").read_bytes()
    second = night.submit(lines())
    until("answers", lambda: len(night.committed()) >= LINES + 8, 60)
    tune(model)
    assert processes.kill(night.victims("rank")[0])
    refused(night, "model.safetensors: tensor model.layers.3.mlp.down_proj.weight differs from the model that this job")
    reason = night.replica()["reason"]
    assert "restore the files, or run `laddertron reload`" in reason
    assert f"(node {os.uname().nodename}" in reason
    (model / "model.safetensors").write_bytes(original)
    night.ready()
    assert answers(night, second) == by_a
    assert digest_of(night, first) == digest_of(night, second) is not None
    third = night.submit(lines(200))
    until("answers", lambda: len(night.committed()) >= 2 * LINES + 8, 60)
    tune(model)
    assert processes.kill(night.victims("rank")[0])
    refused(night, "differs from the model")
    done = reload(night)
    assert done.returncode == 0, done.stdout + done.stderr
    mixed = answers(night, third)
    assert len(mixed) == LINES
    assert digest_of(night, third) is None
    fourth = night.submit(lines(200))
    by_b = answers(night, fourth)
    assert digest_of(night, fourth) not in (None, digest_of(night, first))
    (model / "model.safetensors").write_bytes(original)
    assert reload(night).returncode == 0
    long_a = answers(night, night.submit(lines(200)))
    assert {name: text for name, text in mixed.items() if text not in (long_a[name], by_b[name])} == {}
    assert any(mixed[name] == by_b[name] != long_a[name] for name in mixed)
    assert any(mixed[name] == long_a[name] != by_b[name] for name in mixed)
    assert night.stop() == 0


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("config.json", {"rms_norm_eps": 1e-4}),
        ("generation_config.json", {"eos_token_id": 5}),
        ("tokenizer_config.json", {"another": 1}),
        ("laddertron.manifest.json", {}),
    ],
)
def test_another_small_file_is_named(night: Night, file: str, changes: dict[str, Any]) -> None:
    model = night.folder / "demo" / "demo-ladder"
    night.start()
    night.ready()
    edit(model, file, **changes)
    assert processes.kill(night.victims("rank")[1])
    refused(night, f"{file} ")
    assert "from the model that this job serves" in night.replica()["reason"]
    assert night.stop() == 0


def test_a_standby_does_not_take_the_folders_state_for_its_own(night: Night) -> None:
    """Norms would come from the changed file, packed weights from the memfd: refused, by the take-over and by the cold
    start after it, until the file is restored."""
    model = night.folder / "demo" / "demo-ladder"
    night.argv += ["--set", "daemon.standby=1", "--set", "engine.kv_cache_memory=16MiB"]
    night.start()
    night.stands()
    by_a = answers(night, night.submit(lines()))
    original = (model / "model.safetensors").read_bytes()
    tune(model, "model.norm.weight", 2.0)
    assert processes.kill(night.victims("rank", night.launches()[:1])[0])
    refused(night, "tensor model.norm.weight differs")
    assert any("takes over" in event["message"] for event in night.events("standby"))
    (model / "model.safetensors").write_bytes(original)
    night.ready()
    assert answers(night, night.submit(lines())) == by_a
    assert night.stop() == 0


def test_a_text_worker_of_another_tokenizer_is_refused(night: Night) -> None:
    """tokenizer.json changes and both text workers die: none of the new ones is used, the reason is logged, and lines
    wait; once it is restored they are answered as before."""
    model = night.folder / "demo" / "demo-ladder"
    night.start()
    night.ready()
    text = [{**one, "body": {**one["body"], "prompt": f"def f{n}("}} for n, one in enumerate(lines(8))]
    before = answers(night, night.submit(text))
    original = (model / "tokenizer.json").read_text()
    data = json.loads(original)
    data["model"]["merges"] = data["model"]["merges"][:100]
    (model / "tokenizer.json").write_text(json.dumps(data))
    for worker in night.victims("text worker"):
        assert processes.kill(worker)
    batch = night.submit(text)
    until(
        "a refusal",
        lambda: any("tokenizer.json changed since" in e["message"] for e in night.events("text_worker")),
        60,
    )
    (model / "tokenizer.json").write_text(original)
    assert answers(night, batch) == before
    assert night.stop() == 0


def test_a_daemon_that_restarts_with_one_tuned_tensor_fails_its_batch_and_reuses_nothing(night: Night) -> None:
    """The daemon stops amid a batch, one tensor changes, it starts: the batch fails as answered by another model, what
    was answered is kept, and `--reuse` of it is refused."""
    model = night.folder / "demo" / "demo-ladder"
    night.argv += ["--set", "daemon.drain_timeout=1s"]
    night.start()
    night.ready()
    batch = night.submit(lines(200))
    until("answers", lambda: len(night.committed()) >= 8, 60)
    night.process.kill()
    night.process.wait()
    tune(model, "model.layers.0.input_layernorm.weight", 1.5)
    night.start()
    night.ready()
    until("the batch's end", lambda: night.batch(batch)["status"] == "failed", 60, 0.1)
    assert night.batch(batch)["errors"]["data"][0]["code"] == "model_changed"
    assert len(night.rows(night.batch(batch), "output")) >= 8
    assert night.stop() == 0


DIVERTED = """#!/bin/sh
if [ "$OMPI_COMM_WORLD_RANK" = 1 ] && [ -z "$DIVERTED" ]; then DIVERTED=1 exec unshare -m "$0" "$@"; fi
if [ -n "$DIVERTED" ]; then mount --bind {other} {model} || exit 9; fi
exec {python} "$@"
"""
"""A Python of the ranks; rank 1 finds another folder at the model's path, as on a host with a stale copy."""


def divert(folder: Path) -> Path:
    """Makes that Python; returns rank 1's model folder."""
    model, other = folder / "demo" / "demo-ladder", folder / "stale"
    shutil.copytree(model, other)
    program = folder / "python"
    program.write_text(DIVERTED.format(other=other, model=model, python=sys.executable))
    program.chmod(0o755)
    return other


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (tune, "model.safetensors: tensor model.layers.3.mlp.down_proj.weight differs"),
        (partial(edit, file="config.json", rms_norm_eps=1e-4), "config.json "),
        (partial(edit, file="config.json", rope_theta=1e6), "config.json "),
        (partial(edit, file="tokenizer_config.json", another=1), "tokenizer_config.json "),
    ],
    ids=["tensor", "eps", "theta", "tokenizer"],
)
@pytest.mark.parametrize("outer", [False, True], ids=["launched", "outer"])
def test_ranks_with_another_copy_are_refused(tmp_path: Path, change: Any, words: str, outer: bool) -> None:
    """A stale copy on rank 1's host, under `run` and under an mpirun of one's own: no line is answered, and the error
    names rank 1, its host, file and tensor."""
    copied(tmp_path)
    change(divert(tmp_path))
    (tmp_path / "in.jsonl").write_text(json.dumps(line("a", 8, 1)) + "\n")
    words_of_run = [
        "run",
        str(tmp_path / "demo.yaml"),
        "-i",
        str(tmp_path / "in.jsonl"),
        "-o",
        str(tmp_path / "out.jsonl"),
    ]
    words_of_run += ["--set", f"daemon.data_dir={tmp_path / 'data'}"]
    python = str(tmp_path / "python")
    if outer:
        argv = [str(MPIRUN), "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", "2", python]
    else:
        argv, words_of_run = [sys.executable], [*words_of_run, "--set", f"launch.python={python}"]
    argv += ["-m", "laddertron.launchers.cli", *words_of_run]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=300)
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode != 0, said
    assert words in said
    assert "rank 1 " in said
    assert os.uname().nodename in said
    assert not (tmp_path / "out.jsonl").exists() or (tmp_path / "out.jsonl").read_bytes() == b""
