"""Logs of ranks on their way to the launcher: the worker writes it in one form, mpirun mixes the lines of all
ranks, job_launch.py reads them again. Knows nothing of processes.
"""

from __future__ import annotations

import logging
import re

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


class RankWords:
    """Passes on what ranks say at its level, with rank and node; what is no rank's log at INFO, as it came. A warning
    that was given already is INFO too, whichever rank, replica or launch repeats it: once is enough. Of one
    deployment."""

    def __init__(self) -> None:
        self._said: dict[str, None] = {}

    def take(self, line: str, replica: int) -> None:
        """One line of a launch's output."""
        found = _LINE.search(line)  # a launcher's tag may stand before it
        if found is None:
            log.info("%s", line)
            return
        level = logging.getLevelNamesMapping()[found["level"]]
        if level >= logging.WARNING and self._again(found["text"]):
            level = logging.INFO
        rank, node = int(found["rank"]), found["node"]
        extra = {"rank": rank, "node": node, "replica": replica}
        log.log(level, "rank %d on %s: %s", rank, node, found["text"], extra=extra)

    def _again(self, text: str) -> bool:
        again = text in self._said
        self._said.pop(text, None)
        self._said[text] = None  # the last said is the last forgotten
        if len(self._said) > REMEMBERED:
            del self._said[next(iter(self._said))]
        return again
