"""Where each rank of a launch belongs: said by the composer in the ranks' environment, verified by the ranks when they
meet. Pure. Only where a fabric was given: its host names are those that hosts call themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..topology.identity import Launcher
from ..topology.layout import GroupLayout
from ..topology.mapping import MappingError, Observed, verify
from ..topology.placement import Placement, Seat
from .hosts import Host

ENV_SEATS = "LADDERTRON_SEATS"
"""`node1:8,node2:8`: the hosts in the order of ranks."""


def seats_text(hosts: Sequence[Host]) -> str:
    """The value of ENV_SEATS."""
    return ",".join(f"{host.name}:{host.slots}" for host in hosts)


def expected(text: str) -> Placement:
    """What ENV_SEATS says, as a placement of one group. Raises MappingError on a value that is none of ours."""
    seats: list[Seat] = []
    nodes: list[tuple[int, ...]] = []
    for part in text.split(","):
        name, _, count = part.partition(":")
        if not name or not count.isdecimal() or not 1 <= int(count) <= 65536:
            raise MappingError(
                f"{ENV_SEATS}={text[:200]!r}: expected node1:8,node2:8; it is laddertron's to set, unset it"
            )
        first = len(seats)
        seats += [Seat(first + local, name, local, None, None, "", None, (), "") for local in range(int(count))]
        nodes.append(tuple(range(first, len(seats))))
    if len({len(ranks) for ranks in nodes}) > 1:
        raise MappingError(f"{ENV_SEATS}={text[:200]!r}: hosts with unequal numbers of ranks; unset it")
    return Placement(len(seats), 1, tuple(seats), (GroupLayout(tuple(nodes)),))


def verify_seats(text: str | None, observed: Sequence[Observed], launcher: Launcher) -> None:
    """Raises MappingError, with the launcher's option that mends it, unless every rank runs where `text` has it; None:
    nobody has said where."""
    if text is not None:
        verify(expected(text), observed, launcher)
