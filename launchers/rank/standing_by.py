"""A rank of a hot standby: starts without weights and KV cache, and waits for Load."""

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
    """This host has too little memory for standby ranks."""


class Channel(Protocol):
    """A rank's connection to the owner of the job: launchers/control/control_client.py."""

    def poll(self, timeout: float | None = 0.0) -> list[Command]: ...

    def send_tokens(self, events: Sequence[TokensEvent]) -> None: ...

    def send_state(self, message: StateMessage) -> None: ...

    def wait_for_ranks(self) -> tuple[str, ...]: ...

    def exchange_doors(self, place: str) -> tuple[str, ...]: ...


def require_memory(available: int, ranks: int) -> None:
    """Checks that `ranks` standby ranks fit in `available` bytes of this host (0: unknown). Raises StandbyRefused."""
    if 0 < available < ranks * STANDBY_RANK:
        raise StandbyRefused(
            f"no memory for a standby: {ranks} ranks here need {STANDBY_RANK >> 20} MiB each, {available >> 20} MiB "
            "are free: free some, or set daemon.standby: 0"
        )


def stand_by(channel: Channel, communicator: Communicator, has_room: Callable[[int], bool]) -> int | None:
    """Waits for Load. Returns the descriptor of the retained weights (HeldWeights), -1 if there are none, or None after
    Shutdown. Runs one collective first, so that the group's connections exist. `has_room`: called with the descriptor;
    see Standing."""
    communicator.gather(np.zeros(1, np.uint8))
    file, commands = -1, channel.poll(0.0)
    if commands and isinstance(retained := commands[0], HeldWeights):
        file = open_held(retained)
    channel.send_state(Standing(resident_bytes(Sysfs()), has_room(file)))
    while commands := commands or channel.poll(None):
        for command in commands:
            if isinstance(command, Load | Shutdown):
                return file if isinstance(command, Load) else None
        commands = []
    return None


def open_held(retained: HeldWeights) -> int:
    """Opens the retained weights' file, which then outlives its process; on failure logs it and returns -1."""
    try:
        file = os.open(f"/proc/{retained.pid}/fd/{retained.file}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        log.warning("weights are not shared with the serving launch, a failure costs their load: %s", error)
        return -1
    if start_time(retained.pid) != retained.start_time:  # another process has this pid now
        os.close(file)
        return -1
    return file
