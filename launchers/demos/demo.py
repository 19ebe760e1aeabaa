"""`make demo`: ladder races standard on two MPI ranks, then a rank is killed and the batch goes on where it stopped.

Starts what users start (mpirun, `laddertron run`) and draws what comes back; decides nothing. Needs no root and no
network: the link between the two ranks is emulated in the collective, a timer that holds every all-reduce back.
"""

from __future__ import annotations

import json
import os
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
from ..compose.mpi import compose
from ..control.processes import descendants, kill
from ..job.fleet import Fleet

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = {"standard": ROOT / "configs/demo-standard.yaml", "ladder": ROOT / "configs/demo.yaml"}
PROMPTS = ROOT / "configs/demo-prompts.jsonl"
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
    deployment = deploy.load(CONFIGS["standard"])
    fleet = Fleet(deployment, os.environ)
    program = (sys.executable, "-m", f"{__package__}.race", str(RACE_S), str(folder / "prompts.json"))
    command = compose(deployment, fleet.site, fleet.shares[0], (*program, *map(str, CONFIGS.values())))
    with (folder / "race.log").open("w+") as log:
        job = subprocess.Popen(
            command.argv,
            env={**os.environ, **command.env},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
        assert job.stdout is not None
        try:
            for line in job.stdout:
                if line.startswith("{"):
                    yield json.loads(line)
            if job.wait() != 0:
                log.seek(0)
                raise SystemExit(f"the race ended with status {job.returncode}:\n{log.read()[-4000:]}")
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
                job.wait()


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
    bodies = [json.loads(line) for line in PROMPTS.read_text().splitlines()]
    with source.open("w") as file:
        for number in range(LINES):
            line = bodies[number % len(bodies)]
            body = {**line["body"], "seed": number, "max_tokens": 64, "ignore_eos": True}
            file.write(json.dumps({**line, "custom_id": f"line-{number}", "body": body}) + "\n")
    command = [sys.executable, "-m", "laddertron.launchers.cli", "run", str(CONFIGS["ladder"])]
    command += ["-i", str(source), "-o", str(output)]
    _show(console, command)
    _run_until_killed(console, command, output)
    _show(console, [*command, "--resume"])
    resumed = subprocess.run([*command, "--resume"], check=False)
    return _count(console, output) or resumed.returncode


def _show(console: Console, command: list[str]) -> None:
    words = [word.replace(str(ROOT) + "/", "") for word in command[3:]]
    console.print(f"[bold]$ laddertron {' '.join(Path(w).name if w.startswith('/') else w for w in words)}")


def _run_until_killed(console: Console, command: list[str], output: Path) -> None:
    job = subprocess.Popen(command)
    killed = False
    while job.poll() is None:
        if not killed and output.exists() and output.read_bytes().count(b"\n") >= LINES // 4:
            ranks = [p for p in descendants(job.pid) if _is_rank(p.pid)]
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


def _is_rank(pid: int) -> bool:
    try:
        return b"laddertron.launchers.rank.worker" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False


def _count(console: Console, output: Path) -> int:
    """Prints what is there; 0 if every line has exactly one answer."""
    ids = [json.loads(line)["custom_id"] for line in output.read_text().splitlines()]
    lost, twice = LINES - len(set(ids)), len(ids) - len(set(ids))
    console.print(f"\n[bold]{LINES} lines, {len(ids)} answers, {lost} lost, {twice} duplicate")
    return 0 if (lost, twice) == (0, 0) else 1


if __name__ == "__main__":
    sys.exit(main())
