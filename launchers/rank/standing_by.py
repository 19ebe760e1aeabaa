"""A rank that stands by: all that a start does but for weights and KV, then the wait for the word to load.

What follows on Load is every rank's own start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from ...engine.estimate.memory import STANDBY_RANK
from ...engine.request import TokensEvent
from ...models.refusal import Refusal
from ...topology.comm.groups import Communicator
from ...topology.hardware.sysfs import Sysfs, resident_bytes
from ..control.messages import Command, Load, Shutdown, Standing, StateMessage


class StandbyRefused(Refusal, RuntimeError):
    """This host has no memory for ranks that stand by."""


class Channel(Protocol):
    """The owner of the job, as a rank sees it: launchers/control/control_client.py."""

    def poll(self, timeout: float | None = 0.0) -> list[Command]: ...

    def send_tokens(self, events: Sequence[TokensEvent]) -> None: ...

    def send_state(self, message: StateMessage) -> None: ...


def require_memory(available: int, ranks: int) -> None:
    """Before anything is imported. available: bytes free on this host (0: not known), where `ranks` of the launch are.
    Raises StandbyRefused."""
    if 0 < available < ranks * STANDBY_RANK:
        raise StandbyRefused(
            f"no memory to stand by: {ranks} ranks here hold some {STANDBY_RANK >> 20} MiB each, {available >> 20} MiB "
            "are free: free some, or set daemon.standby: 0"
        )


def stand_by(channel: Channel, communicator: Communicator, has_room: Callable[[], bool]) -> bool:
    """Until Load; False: Shutdown came in its place. The group meets once, so that what its first collective sets up is
    there. `has_room`: see Standing."""
    communicator.gather(np.zeros(1, np.uint8))
    channel.send_state(Standing(resident_bytes(Sysfs()), has_room()))
    while commands := channel.poll(None):
        for command in commands:
            if isinstance(command, Load | Shutdown):
                return isinstance(command, Load)
    return False
