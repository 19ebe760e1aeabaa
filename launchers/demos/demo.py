"""`make demo`: ladder races standard on two MPI ranks, then a rank is killed and the batch goes on where it stopped.

Starts what users start (mpirun, `laddertron run`) and draws what comes back; decides nothing. Needs no root and no
network: the link between the two ranks is emulated in the collective, a timer that holds every all-reduce back.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ...engine.config import load as deploy
from ...engine.text.tokenizer import TextModel
from ..control.processes import descendants, kill
from ..measure.bench_job import BenchError, BenchJob
from .serving import PROMPTS, ROOT, tally, words_of, write_lines

CONFIGS = {"standard": ROOT / "configs/demo-standard.yaml", "ladder": ROOT / "configs/demo.yaml"}
RACE_S = 4.0
"""Seconds that the slower model should need over the emulated link."""
LINES = 160
"""Requests of the batch whose rank is killed."""
BAR = 34


def main() -> int:
    """Exit status 0 if everything went as it should."""
    console = Console(highlight=False)
    started = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="laddertron-demo-"))
    try:
        text = TextModel.from_folder(ROOT / "configs/demo-ladder")
        _race(console, text, folder)
        status = _kill_and_resume(console, folder)
    except BenchError as error:
        raise SystemExit(str(error)) from None
    finally:
        shutil.rmtree(folder)
    console.print(f"\n[dim]{time.monotonic() - started:.0f} s in all[/]")
    return status


# the race


def _race(console: Console, text: TextModel, folder: Path) -> None:
    console.rule("[bold]the race: ladder against standard, two MPI ranks, the same prompts")
    console.print(
        "Two models of 0.9 M parameters, each trained with its own wiring. They take turns: the "
        "one whose own clock is behind steps next.\n"
    )
    results: dict[str, Any] = {}
    with Live(console=console, refresh_per_second=10, transient=True) as live:
        for message in _race_messages(text, folder):
            if "c" in message:
                results["c"] = message["c"]
            elif message["race"] in ("link", "no delay"):
                picture = _picture(message, results.get("c", 0.0), text)
                if message.get("over"):
                    results[message["race"]] = message
                    live.console.print(picture)
                elif console.is_terminal:
                    live.update(picture)
    _verdict(console, results)


def _race_messages(text: TextModel, folder: Path) -> Iterator[dict[str, Any]]:
    prompts = [json.loads(line)["body"].get("prompt") for line in PROMPTS.read_text().splitlines()]
    ids = [text.tokenizer.encode(prompt).ids for prompt in prompts if prompt is not None]
    (folder / "prompts.json").write_text(json.dumps(ids))
    words = (str(RACE_S), str(folder / "prompts.json"), *map(str, CONFIGS.values()))
    with BenchJob(deploy.load(CONFIGS["standard"]), "the race", "demos.race", words) as job:
        while True:
            message = job.answer()
            yield message
            if message.get("race") == "no delay" and message.get("over"):
                return


def _picture(message: dict[str, Any], c: float, text: TextModel) -> Group:
    delayed = message["race"] == "link"
    link = f"{c * 1e6:.0f} us, as long as a sub-block computes (L/c = 1)" if delayed else "no delay"
    table = Table.grid(padding=(0, 1), expand=True)
    table.add_column(ratio=1)
    table.add_column(ratio=1)
    table.add_row(*(_lane(lane, message["total"], text) for lane in message["lanes"]))
    head = Text.assemble(("EMULATED link: ", "bold yellow"), (link, "yellow"))
    return Group(head, table)


def _lane(lane: dict[str, Any], total: int, text: TextModel) -> Panel:
    seconds = max(lane["seconds"], 1e-9)
    computing = max(0.0, seconds - lane["exposed"])
    done = min(BAR, round(BAR * lane["tokens"] / total))
    exposed = min(BAR, round(BAR * lane["exposed"] / seconds))
    flight = lane["hidden"] + lane["exposed"]
    share = 100 * lane["hidden"] / flight if flight else 0.0
    lines = Text(no_wrap=True)
    lines.append("█" * done, "green").append("░" * (BAR - done) + "\n", "dim")
    lines.append(f"{lane['tokens'] / seconds:.0f} tokens/s", "bold")
    lines.append(f"  {lane['tokens']} in {seconds:.2f} s{', done' if lane['done'] else ''}\n")
    lines.append("█" * (BAR - exposed), "green").append("█" * exposed + "\n", "red")
    lines.append(f"computing {computing:.2f} s, ", "green").append(f"waiting {lane['exposed']:.2f} s\n", "red")
    lines.append(f"communication {flight:.2f} s, {share:.0f}% hidden\n")
    words = " ".join(text.tokenizer.decode(lane["text"]).split())
    lines.append((words[: 2 * BAR] or " ").ljust(2 * BAR)[:BAR] + "\n", "italic dim")
    lines.append(words[BAR : 2 * BAR], "italic dim")
    return Panel(lines, title=lane["lane"], border_style="cyan" if lane["lane"] == "ladder" else "white")


def _verdict(console: Console, results: dict[str, Any]) -> None:
    for name, words in (("link", "over the emulated link"), ("no delay", "with no delay")):
        lanes = {lane["lane"]: lane for lane in results[name]["lanes"]}
        rates = {key: lane["tokens"] / lane["seconds"] for key, lane in lanes.items()}
        ratio = rates["ladder"] / rates["standard"]
        console.print(
            f"ladder / standard {words}: [bold]{ratio:.2f}x[/] "
            f"({rates['ladder']:.0f} / {rates['standard']:.0f} tokens/s)"
        )
    console.print(
        "[dim]The law allows 2x at L/c = 1, and nothing where there is nothing to hide. What ladder costs in "
        "quality: configs/MODEL_CARD.md and docs/performance.md.[/]\n"
    )


# the batch, a rank's death, and going on


def _kill_and_resume(console: Console, folder: Path) -> int:
    console.rule(f"[bold]the job: {LINES} lines from JSONL to JSONL, a rank killed on the way")
    source, output = folder / "in.jsonl", folder / "out.jsonl"
    write_lines(source, LINES, chats=True, max_tokens=64, ignore_eos=True)
    command = [sys.executable, "-m", "laddertron.launchers.cli", "run", str(CONFIGS["ladder"])]
    command += ["-i", str(source), "-o", str(output)]
    _show(console, command)
    _run_until_killed(console, command, output)
    _show(console, [*command, "--resume"])
    resumed = subprocess.run([*command, "--resume"], check=False)
    words, whole = tally(LINES, [output])
    console.print(f"\n[bold]{words}")
    return resumed.returncode if whole else 1


def _show(console: Console, command: list[str]) -> None:
    words = [word.replace(str(ROOT) + "/", "") for word in command[3:]]
    console.print(f"[bold]$ laddertron {' '.join(Path(w).name if w.startswith('/') else w for w in words)}")


def _run_until_killed(console: Console, command: list[str], output: Path) -> None:
    job = subprocess.Popen(command)
    killed = False
    while job.poll() is None:
        if not killed and output.exists() and output.read_bytes().count(b"\n") >= LINES // 4:
            ranks = [p for p in descendants(job.pid) if "laddertron.launchers.rank.worker" in words_of(p.pid)]
            if ranks:
                kill(ranks[-1], signal.SIGKILL)
                killed = True
                console.print(f"[bold red]killed rank process {ranks[-1].pid} (SIGKILL)")
        try:
            job.wait(0.02)
        except subprocess.TimeoutExpired:
            continue
    answered = output.read_bytes().count(b"\n")
    console.print(f"exit status {job.returncode}; {answered} of {LINES} answers are on disk\n")


if __name__ == "__main__":
    sys.exit(main())
