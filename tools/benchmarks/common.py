"""Shared by benchmarks: JSON lines, turns, medians with their spread, Markdown, figures, environments of other engines.
Imports the standard library alone, since other engines' Pythons import it.
"""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

T = TypeVar("T")
UNFIT = ("torchvision", "torchaudio", "torchcodec")
"""Packages that others bring and nothing here uses; their wheels may belong to another build of torch, and then
transformers cannot be imported."""


def numbers(text: str) -> list[int]:
    """Parses an option such as 1,8."""
    return [int(part) for part in text.split(",")]


def say(**line: Any) -> None:
    print(json.dumps(line), flush=True)


def to_and_fro(lanes: Iterable[T], turn: int) -> list[T]:
    """The lanes, in reverse order every other turn."""
    return list(lanes)[:: -1 if turn % 2 else 1]


def in_turns(names: Iterable[str], turns: int, measure: Callable[[str], T]) -> dict[str, list[T]]:
    """Calls `measure` for each name once a turn, in alternating order; returns the results by name."""
    results: dict[str, list[T]] = {name: [] for name in names}
    for turn in range(turns):
        for name in to_and_fro(results, turn):
            results[name].append(measure(name))
    return results


def spread(values: Sequence[float], form: str) -> str:
    """The median, with the least and the most where there are several."""
    middle, least, most = (format(value, form) for value in (median(values), min(values), max(values)))
    return f"{middle} ({least} to {most})" if len(values) > 1 else middle


def table(head: str, rows: Iterable[Iterable[object]]) -> list[str]:
    """Markdown; head: the columns' names with | between them."""
    lines = [head, *(" | ".join(map(str, row)) for row in rows)]
    return [f"| {lines[0]} |", "|---" * (head.count("|") + 1) + "|", *(f"| {line} |" for line in lines[1:])]


def renewed(page: str, lines: Iterable[str], script: str = "") -> str:
    """The page with these lines between `<!-- ...script...: begin -->` and `<!-- end -->`; the rest is prose."""
    head, begin, rest = re.split(rf"(<!-- [^>]*{script}[^>]*: begin -->)", page, maxsplit=1)
    return "\n".join((f"{head}{begin}", "", *lines, "", f"<!-- end -->{rest.partition('<!-- end -->')[2]}"))


def svg(figure: Any) -> str:
    """A figure of matplotlib's, the same bytes each time."""
    import matplotlib as mpl

    drawn = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "laddertron"}):
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    return drawn.getvalue()


def versions(*packages: str) -> dict[str, str | None]:
    """Each package's version; None where it is not installed."""
    by_package: dict[str, str | None] = dict.fromkeys(packages)
    for package in packages:
        try:
            by_package[package] = version(package)
        except PackageNotFoundError:
            continue
    return by_package


def environment(folder: Path, needs: Sequence[str], without: Sequence[str] = (), python: str = sys.executable) -> Path:
    """The bin folder of a virtual environment with these packages, made once. Raises CalledProcessError with pip's
    words in its `stderr`, or OSError without such a `python`."""
    if not (folder / ".complete").exists():
        pip = [str(folder / "bin" / "pip")]
        commands = [[python, "-m", "venv", "--clear", str(folder)], [*pip, "install", "-q", *needs]]
        commands += [[*pip, "uninstall", "-q", "-y", *without]] if without else []
        for command in commands:
            subprocess.run(command, stderr=subprocess.PIPE, text=True, check=True)
        (folder / ".complete").touch()
    return folder / "bin"


class LineProcess:
    """A program that answers each JSON line on its standard input with one line; it may print others, which do not
    begin with a brace. Its standard error goes to `log`."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], log: Path) -> None:
        self._name, self._log = log.stem, log.open("w+")
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, env=environ
        )

    def ask(self, order: Any) -> dict[str, Any]:
        """Raises RuntimeError with the end of the log if the program ends."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """The next line, also before the first order; else as `ask`."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        self._log.seek(0)
        raise RuntimeError(f"{self._name} ended: {self._log.read().strip().splitlines()[-1:]}")

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._log.close()
