"""Logs of ranks on their way to the launcher: the worker writes it in one form, mpirun mixes the lines of all
ranks, job_launch.py reads them again. Knows nothing of processes.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass

log = logging.getLogger("laddertron.ranks")

REMEMBERED = 256
_LINE = re.compile(
    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) "
    r"rank (?P<rank>\d+) on (?P<node>\S+) (?P<logger>\S+): (?P<text>.*)"
)


class RankFormatter(logging.Formatter):
    """Every line by itself says when, how bad, and who: also the lines of a traceback stand among other ranks'."""

    def __init__(self, rank: int, node: str) -> None:
        super().__init__()
        self._who = f"rank {rank} on {node}"

    def format(self, record: logging.LogRecord) -> str:
        head = f"{self.formatTime(record)} {record.levelname} {self._who} {record.name}: "
        return "\n".join(head + line for line in super().format(record).splitlines())


def set_up_logs(rank: int, node: str) -> None:
    """A rank's own words in full, its libraries' from warnings on: every rank would tell what each of them found."""
    handler = logging.StreamHandler()
    handler.setFormatter(RankFormatter(rank, node))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("laddertron").setLevel(logging.INFO)


@dataclass(frozen=True, slots=True)
class RankLine:
    level: int
    rank: int
    node: str
    text: str


def read_line(line: str) -> RankLine | None:
    """A rank's log line; None for other output. Skips a launcher's tag."""
    found = _LINE.search(line)
    if found is None:
        return None
    return RankLine(logging.getLevelNamesMapping()[found["level"]], int(found["rank"]), found["node"], found["text"])


class RankWords:
    """Passes on what ranks say at its level, with rank and node; what is no rank's log at INFO, as it came. A warning
    that was given already is INFO too, whichever rank, replica or launch repeats it: once is enough. Of one
    deployment."""

    def __init__(self) -> None:
        self._said: dict[str, None] = {}

    def take(self, line: str, replica: int) -> None:
        """One line of a launch's output."""
        found = read_line(line)
        if found is None:
            log.info("%s", line)
            return
        again = found.level >= logging.WARNING and self._again(found.text)
        where = {"rank": found.rank, "node": found.node, "replica": replica}
        level = logging.INFO if again else found.level
        log.log(level, "rank %d on %s: %s", found.rank, found.node, found.text, extra=where)

    def _again(self, text: str) -> bool:
        again = text in self._said
        self._said.pop(text, None)
        self._said[text] = None  # the last said is the last forgotten
        if len(self._said) > REMEMBERED:
            del self._said[next(iter(self._said))]
        return again
