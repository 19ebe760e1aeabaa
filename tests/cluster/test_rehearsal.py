"""`make rehearse`: what refuses it, its model, and what an interrupted one leaves; all of it with a rank a node."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from laddertron.engine.text.tokenizer import TextModel
from laddertron.models.config.model_config import from_folder
from laddertron.models.weights.mapping import open_checkpoint
from monitoring_queries import BOARDS
from waiting import HANG_S

from cluster import draw_board, rehearsal, rehearsal_model

TESTS = Path(__file__).resolve().parents[1]
COMMAND = [sys.executable, "-m", "cluster.rehearsal", "--per-node", "1"]


def test_what_refuses_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """No root, too little memory, no Prometheus: one line each, exit code 2, and nothing is made."""
    monkeypatch.setattr(sys, "argv", ["rehearsal.py"])
    monkeypatch.setattr(rehearsal, "why_not", lambda: None)
    monkeypatch.setattr(rehearsal, "Cluster", lambda *_: pytest.fail("nodes were made"))
    monkeypatch.setattr(rehearsal, "available_bytes", lambda fs: 1 << 30)
    said = ["16 ranks, twice during a reload, need 12.5 GiB; 1.0 GiB are free"]
    assert rehearsal.main() == 2
    monkeypatch.setattr(rehearsal, "available_bytes", lambda fs: 1 << 40)
    monkeypatch.setenv("PATH", "/nowhere")
    said.append("prometheus is not installed (Debian: apt-get install prometheus)")
    assert rehearsal.main() == 2
    monkeypatch.setattr(rehearsal, "why_not", lambda: "network namespaces need root on Linux")
    said.append("network namespaces need root on Linux")
    assert rehearsal.main() == 2
    assert capsys.readouterr().err.splitlines() == [f"error: rehearse: {reason}" for reason in said]


def test_the_model_has_the_shape_of_405b(tmp_path: Path) -> None:
    """126 layers over 191 files, some of them in two; every header is accepted; chats begin with the right tokens."""
    folder = tmp_path / "model"
    rehearsal_model.write(folder)
    config = from_folder(folder)
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (126, 128, 8)
    assert config.dtype == "bfloat16"
    open_checkpoint(folder, config)
    placed = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(placed.values())) == 191
    assert any(len({f for n, f in placed.items() if f".layers.{layer}." in n}) > 1 for layer in range(126))
    text = TextModel.from_folder(folder)
    begin, header = (text.tokenizer.token_to_id(name) for name in ("<|begin_of_text|>", "<|start_header_id|>"))
    assert text.encode("a b")[0] == begin
    assert text.encode_chat([{"role": "user", "content": "hello"}])[:2] == [begin, header]
    assert text.tokenizer.decode(text.encode("héllo wörld")) == "héllo wörld"


@pytest.mark.parametrize("board", BOARDS)
def test_a_dashboard_is_drawn(board: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every panel of it, of each kind and unit; those of one metric are empty, and named."""

    def matrix(url: str) -> dict[str, Any]:
        question = parse_qs(urlsplit(url).query)
        labels = {"node": "n0", "link": "net", "le": "+Inf"}
        values = [[float(question["start"][0]) + second, str(second)] for second in range(3)]
        rows = [{"metric": labels, "values": values}] * ("collective_seconds" not in question["query"][0])
        return {"data": {"result": rows}}

    monkeypatch.setattr(draw_board, "ask", matrix)
    empty = draw_board.draw("http://unused", board, 100.0, 103.0, tmp_path / "board.png")
    assert (tmp_path / "board.png").read_bytes().startswith(b"\x89PNG")
    asked = [panel for panel in BOARDS[board]["panels"] if panel.get("targets")]
    without = [p["title"] for p in asked if all("collective_seconds" in target["expr"] for target in p["targets"])]
    assert empty == without


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{TESTS}:{TESTS / 'helpers'}", "TMPDIR": str(folder)}


def left(folder: Path) -> list[str]:
    """What remains of a rehearsal whose temporary files were in the folder: its files, and processes that name it."""
    words = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if os.access(path, os.R_OK)]
    return [*os.listdir(folder), *(w.decode(errors="replace") for w in words if str(folder).encode() in w)]


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_one_leaves_nothing(tmp_path: Path, signum: int, code: int) -> None:
    """While ranks of preflight are at work on both nodes."""
    with subprocess.Popen(COMMAND, stdout=subprocess.PIPE, text=True, env=environment(tmp_path)) as run:
        assert run.stdout is not None
        assert any("preflight" in line for line in run.stdout)
        assert left(tmp_path)
        run.send_signal(signum)
        assert run.wait(HANG_S) == code
    assert left(tmp_path) == []


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_a_rehearsal_with_one_rank_a_node(tmp_path: Path) -> None:
    """Every step, its faults included: nothing lost, nothing duplicate, no stream broken, nothing left."""
    done = subprocess.run(COMMAND, capture_output=True, text=True, env=environment(tmp_path), check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    assert "alert: LaddertronRankDown, rank 1 on n1" in done.stdout
    assert "500 answers, 0 lost, 0 duplicate; 4 streams, 0 broken" in done.stdout
    assert "all bits are equal" in done.stdout
    assert "exit code 0; the open stream ended with 'length'" in done.stdout
    assert left(tmp_path) == []
