"""The log format of ranks: workers write it, mpirun interleaves the lines of all ranks, job_launch.py parses them.
Knows nothing of processes.
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


def is_log_line(line: str) -> bool:
    """Whether a rank logged this line of a launch's output, in this format."""
    return _LINE.search(line) is not None


class RankFormatter(logging.Formatter):
    """Prefixes every line with time, level and rank, also each line of a traceback, because mpirun interleaves the
    lines of all ranks."""

    def __init__(self, rank: int, node: str) -> None:
        super().__init__()
        self._who = f"rank {rank} on {node}"

    def format(self, record: logging.LogRecord) -> str:
        head = f"{self.formatTime(record)} {record.levelname} {self._who} {record.name}: "
        return "\n".join(head + line for line in super().format(record).splitlines())


def set_up_logs(rank: int, node: str) -> None:
    """Sets up a rank's logging: laddertron at INFO, libraries only at WARNING, because every rank would repeat them."""
    handler = logging.StreamHandler()
    handler.setFormatter(RankFormatter(rank, node))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("laddertron").setLevel(logging.INFO)


class RankWords:
    """Logs the output of one deployment's ranks: log lines at their level with rank and node, other lines unchanged at
    INFO. A repeated warning is logged at INFO, whichever rank, replica or launch repeats it."""

    def __init__(self) -> None:
        self._said: dict[str, None] = {}

    def take(self, line: str, replica: int) -> None:
        """Logs one line of a launch's output."""
        match = _LINE.search(line)  # a launcher may prefix a tag
        if match is None:
            log.info("%s", line)
            return
        level = logging.getLevelNamesMapping()[match["level"]]
        if level >= logging.WARNING and self._again(match["text"]):
            level = logging.INFO
        rank, node = int(match["rank"]), match["node"]
        extra = {"rank": rank, "node": node, "replica": replica}
        log.log(level, "rank %d on %s: %s", rank, node, match["text"], extra=extra)

    def _again(self, text: str) -> bool:
        again = text in self._said
        self._said.pop(text, None)
        self._said[text] = None  # moves it to the end: the oldest are forgotten first
        if len(self._said) > REMEMBERED:
            del self._said[next(iter(self._said))]
        return again
