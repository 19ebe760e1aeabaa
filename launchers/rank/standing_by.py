"""A hot standby's rank: all of a start but weights and KV, then the wait for Load."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from ...engine.request import TokensEvent
from ...engine.step.memory import STANDBY_RANK
from ...models.config.json_fields import Refusal
from ...topology.comm.groups import Communicator
from ...topology.hardware.sysfs import Sysfs, resident_bytes
from ..control.messages import Command, HeldWeights, Load, Shutdown, Standing, StateMessage
from ..control.processes import start_time

log = logging.getLogger(__name__)


class StandbyRefused(Refusal, RuntimeError):
    """This host has no memory for ranks that stand by."""


class Channel(Protocol):
    """The owner of the job, as a rank sees it: launchers/control/control_client.py."""

    def poll(self, timeout: float | None = 0.0) -> list[Command]: ...

    def send_tokens(self, events: Sequence[TokensEvent]) -> None: ...

    def send_state(self, message: StateMessage) -> None: ...


def require_memory(available: int, ranks: int) -> None:
    """available: free bytes of this host (0: unknown) for `ranks` of the launch. Raises StandbyRefused."""
    if 0 < available < ranks * STANDBY_RANK:
        raise StandbyRefused(
            f"no memory for a standby: {ranks} ranks here need {STANDBY_RANK >> 20} MiB each, {available >> 20} MiB "
            "are free: free some, or set daemon.standby: 0"
        )


def stand_by(channel: Channel, communicator: Communicator, has_room: Callable[[int], bool]) -> int | None:
    """Until Load: the descriptor of held weights (HeldWeights), -1 without; None: Shutdown came in its place. The group
    meets once, so that what its first collective sets up is there. `has_room`, with such a descriptor: see Standing."""
    communicator.gather(np.zeros(1, np.uint8))
    file, commands = -1, channel.poll(0.0)
    if commands and isinstance(held := commands[0], HeldWeights):
        file = open_held(held)
    channel.send_state(Standing(resident_bytes(Sysfs()), has_room(file)))
    while commands := commands or channel.poll(None):
        for command in commands:
            if isinstance(command, Load | Shutdown):
                return file if isinstance(command, Load) else None
        commands = []
    return None


def open_held(held: HeldWeights) -> int:
    """Opens the retained weights' file, which then outlives its process; -1, with a log line, if it cannot."""
    try:
        file = os.open(f"/proc/{held.pid}/fd/{held.file}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        log.warning("weights are not shared with the serving launch, a failure costs their load: %s", error)
        return -1
    if start_time(held.pid) != held.start_time:  # its pid is another's by now
        os.close(file)
        return -1
    return file
