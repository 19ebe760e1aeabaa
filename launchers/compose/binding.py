"""A process on the cores of its seat: `launch.bind_to: placement`. Before torch starts its threads."""

from __future__ import annotations

import os
from collections.abc import Iterable

from ...topology.hardware.fabric import format_cpus
from ...topology.placement.mapping import MappingError

TASKS = "/proc/self/task"


def bind(cores: Iterable[int]) -> None:
    """This process's threads, and so those that they will start, on `cores` alone. Raises MappingError where the
    machine does not give all of them."""
    wanted = set(cores)
    for thread in map(int, os.listdir(TASKS)):
        try:
            os.sched_setaffinity(thread, wanted)
        except ProcessLookupError:
            continue  # it ended meanwhile
        except OSError:
            break  # none of the cores is there, which what follows says
    # of cores that a container or a batch step lacks, the kernel says nothing
    given = os.sched_getaffinity(0)
    if given != wanted:
        raise MappingError(
            f"launch.bind_to is placement, which has cores {format_cpus(wanted)} for this rank; the machine gives "
            f"{format_cpus(given)}: save the fabric from inside the same allocation or container (`laddertron launch "
            "CONFIG topo --save FILE`), or set launch.bind_to: none"
        )
