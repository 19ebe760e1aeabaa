"""`make demo`: ladder races standard on two MPI ranks, then a rank is killed and the batch resumes. Runs `laddertron
run` under mpirun, without root or network; the link between the ranks is emulated.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ...engine import child
from ...engine.config import load as deploy
from ...engine.text.tokenizer import TextModel
from ...launchers.compose.mpi import WORKER
from ...launchers.control.processes import descendants, kill, words_of
from ...launchers.measure.rank_job import BenchError, BenchJob
from ...models.config.model_config import from_folder
from ...topology.comm.ledger import overlap_ratio
from ..bench.bench_measure import roomy

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = ROOT / "configs/demo/prompts.jsonl"
CONFIGS = {"standard": ROOT / "configs/demo-standard.yaml", "ladder": ROOT / "configs/demo.yaml"}
RACE_S, ROUNDS = 3.0, 8
"""About the seconds that a model needs for a race, and the turns that it takes in it."""
SEATS, MAX_TOKENS = 8, 64
"""The models' max_num_seqs; tokens of an answer."""
LINES = 160
"""Requests of the batch whose rank is killed."""
BAR = 34
Items = list[tuple[list[int], int, float]]
"""Requests as a BenchJob takes them: prompt, tokens to generate, arrival."""


def main() -> int:
    console = Console(highlight=False)
    started = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="laddertron-demo-"))
    try:
        _race(console)
        status = _kill_and_resume(console, folder)
    except BenchError as error:
        raise SystemExit(str(error)) from None
    finally:
        shutil.rmtree(folder)
    console.print(f"\n[dim]{time.monotonic() - started:.0f} s in all[/]")
    return status


# the race


@dataclass(slots=True)
class Lane:
    """A model on two ranks of its own, and what it has done in the present race."""

    name: str
    job: BenchJob
    tokens: int = 0
    seconds: float = 0.0
    exposed: float = 0.0
    hidden: float = 0.0

    def run(self, items: Items) -> None:
        result = self.job.ask("mix", items=items)
        self.tokens += result["generated_tokens"]
        self.seconds += result["total_s"]
        self.exposed += result["exposed_s"]
        self.hidden += result["hidden_s"]

    @property
    def rate(self) -> float:
        return self.tokens / (self.seconds or 1.0)


def _race(console: Console) -> None:
    """Measures c, what a sub-block computes beyond its waits, at no delay; then at L = c. Raises BenchError."""
    console.rule("[bold]the race: ladder against standard, two MPI ranks each, the same prompts")
    console.print(
        "Two models of 0.9 M parameters, each trained with its own wiring. They take turns, round by round.\n"
    )
    prompts = _prompts()
    with ExitStack() as stack:
        lanes = _lanes(stack, 0.0)
        first = lanes[0].job.ask("mix", items=prompts)
        layers = from_folder(Path(lanes[0].job.deployment.model.path)).num_layers
        c = (first["total_s"] - first["exposed_s"]) / first["steps"] / (2 * layers)
        rounds = max(1, round(RACE_S / ROUNDS / first["total_s"]))
        _run_rounds(console, lanes, prompts * rounds, "no delay")
    with ExitStack() as stack:
        delayed = _lanes(stack, c)
        title = f"{c * 1e6:.0f} us, as long as a sub-block computes (L/c = 1)"
        _run_rounds(console, delayed, prompts * max(1, rounds // 2), title)
    for words, (standard, ladder) in (("over the emulated link", delayed), ("with no delay", lanes)):
        ratio = f"[bold]{ladder.rate / standard.rate:.2f}x[/]"
        console.print(f"ladder / standard {words}: {ratio} ({ladder.rate:.0f} / {standard.rate:.0f} tokens/s)")
    console.print(
        "[dim]At L/c = 1 ladder can be up to 2x as fast; without a delay there is nothing to overlap "
        "(docs/layouts.md). What ladder costs in quality: configs/demo/MODEL_CARD.md.[/]\n"
    )


def _prompts() -> Items:
    """The demo's prompts: one batch of what the models' seats hold."""
    text = TextModel.from_folder(ROOT / "configs/demo/demo-ladder")
    prompts = [json.loads(line)["body"].get("prompt") for line in PROMPTS.read_text().splitlines()]
    ids = [text.tokenizer.encode(prompt).ids for prompt in prompts if prompt is not None]
    return [(ids[number % len(ids)], MAX_TOKENS, 0.0) for number in range(SEATS)]


def _lanes(stack: ExitStack, delay_s: float) -> list[Lane]:
    """Standard, then ladder, each on ranks of its own over a link of that delay, warmed up."""
    lanes = []
    for name, path in CONFIGS.items():
        deployment = deploy.load(path)
        link: dict[str, Any] = {"collective": "emulated" if delay_s else "auto", "emulated_delay": delay_s}
        linked = replace(deployment, parallel=replace(deployment.parallel, **link))
        lanes.append(Lane(name, stack.enter_context(BenchJob(roomy(linked, ()), name))))
    for lane in lanes:
        lane.job.ask("mix", items=_prompts())
    return lanes


def _run_rounds(console: Console, lanes: list[Lane], items: Items, title: str) -> None:
    total = ROUNDS * len(items) * MAX_TOKENS
    head = Text.assemble(("EMULATED link: ", "bold yellow"), (title, "yellow"))
    with Live(console=console, transient=True) as live:
        for number in range(ROUNDS):
            for lane in lanes[:: -1 if number % 2 else 1]:
                lane.run(items)
                if console.is_terminal:
                    live.update(_picture(head, lanes, total))
        live.console.print(_picture(head, lanes, total))


def _picture(head: Text, lanes: list[Lane], total: int) -> Group:
    table = Table.grid(padding=(0, 1), expand=True)
    table.add_column(ratio=1)
    table.add_column(ratio=1)
    table.add_row(*(_panel(lane, total) for lane in lanes))
    return Group(head, table)


def _panel(lane: Lane, total: int) -> Panel:
    done = min(BAR, round(BAR * lane.tokens / total))
    exposed = min(BAR, round(BAR * lane.exposed / (lane.seconds or 1.0)))
    flight = lane.hidden + lane.exposed
    share = 100 * (overlap_ratio(lane.hidden, lane.exposed) or 0.0)
    lines = Text(no_wrap=True)
    lines.append("█" * done, "green").append("░" * (BAR - done) + "\n", "dim")
    lines.append(f"{lane.rate:.0f} tokens/s", "bold").append(f"  {lane.tokens} in {lane.seconds:.2f} s\n")
    lines.append("█" * (BAR - exposed), "green").append("█" * exposed + "\n", "red")
    lines.append(f"computing {max(0.0, lane.seconds - lane.exposed):.2f} s, ", "green")
    lines.append(f"waiting {lane.exposed:.2f} s\n", "red")
    lines.append(f"communication {flight:.2f} s, {share:.0f}% hidden")
    return Panel(lines, title=lane.name, border_style="cyan" if lane.name == "ladder" else "white")


# the batch, a rank's death, and going on


def _kill_and_resume(console: Console, folder: Path) -> int:
    console.rule(f"[bold]the job: {LINES} lines from JSONL to JSONL, a rank killed on the way")
    source, output = folder / "in.jsonl", folder / "out.jsonl"
    write_lines(source, LINES, chats=True, max_tokens=64, ignore_eos=True)
    command = list(child.laddertron("run", str(CONFIGS["ladder"]), "-i", str(source), "-o", str(output)))
    _show(console, command)
    _run_until_killed(console, command, output)
    _show(console, [*command, "--resume"])
    resumed = subprocess.run([*command, "--resume"], check=False, env=child.environment())
    words, complete = tally(LINES, [output])
    console.print(f"\n[bold]{words}")
    return resumed.returncode if complete else 1


def _show(console: Console, command: list[str]) -> None:
    words = [word.replace(str(ROOT) + "/", "") for word in command[len(child.laddertron()) :]]
    console.print(f"[bold]$ laddertron {' '.join(Path(w).name if w.startswith('/') else w for w in words)}")


def _run_until_killed(console: Console, command: list[str], output: Path) -> None:
    job = subprocess.Popen(command, env=child.environment())
    killed = False
    while job.poll() is None:
        if not killed and output.exists() and output.read_bytes().count(b"\n") >= LINES // 4:
            ranks = [p for p in descendants(job.pid) if WORKER in words_of(p.pid)]
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


def write_lines(path: Path, count: int, chats: bool = False, **more: Any) -> None:
    """A batch of the demo's prompts over and over, each with a seed of its own; `more`: of each body, over its own."""
    bodies = [json.loads(line) for line in PROMPTS.read_text().splitlines()]
    bodies = [line for line in bodies if chats or "prompt" in line["body"]]
    with path.open("w") as file:
        for number in range(count):
            line = bodies[number % len(bodies)]
            body = {**line["body"], "seed": number, **more}
            file.write(json.dumps({**line, "custom_id": f"line-{number}", "body": body}) + "\n")


def tally(count: int, files: Sequence[Path]) -> tuple[str, bool]:
    """Counts the answers in `files`; returns a summary and whether each of the `count` lines has exactly one."""
    ids = [json.loads(row)["custom_id"] for path in files for row in path.read_text().splitlines()]
    lost, twice = count - len(set(ids)), len(ids) - len(set(ids))
    return f"{count} lines, {len(ids)} answers, {lost} lost, {twice} duplicate", not lost and not twice


if __name__ == "__main__":
    sys.exit(main())
