"""A rank whose interpreter is held up: by work, which its pulse shows, or by a lock, which ends it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from laddertron.launchers.control import pulse
from laddertron.launchers.control.control_client import EXIT_CHANNEL_LOST
from laddertron.launchers.control.messages import Beat, Drain, Pulse
from laddertron.topology.transport.native import bind, locate
from test_control import Channel, with_channel
from waiting import HANG_S

pytestmark = pytest.mark.skipif(locate(pulse.EXTENSION) is None, reason="the extension was not built")
COMPUTES = 're.match("(a*)*b", "a" * 60)'  # for ever, in C, without letting go of the lock
LOCKED = "ctypes.PyDLL(None).pause()"
UNREAD = "import os; os.set_blocking(2, False); os.write(2, bytes(1 << 22)); os.set_blocking(2, True)"
RANK = """
    import ctypes, re, sys
    from laddertron.launchers.control import pulse
    from laddertron.launchers.control.control_client import ControlClient
    from laddertron.launchers.control.messages import Beat
    pulse.SLOW_S = {slow_s}
    client = ControlClient(sys.argv[1], bytes.fromhex(sys.stdin.readline()), 0, 0, Beat, silence_s=5.0)
    client.poll(None)
    sys.setswitchinterval(1000)
    {work}
"""


async def rank(channel: Channel, work: str, slow_s: float, see: Callable[[], Awaitable[None]]) -> tuple[int, str]:
    """Starts a rank, lets it work once it has sent a heartbeat, and ends it after `see`. Its exit status and stderr."""
    script = textwrap.dedent(RANK.format(work=work, slow_s=slow_s))
    command, pipe = [sys.executable, "-c", script, channel.address], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stderr=pipe, text=True) as process:
        assert process.stdin is not None
        process.stdin.write(f"{channel.secret.hex()}\n")
        process.stdin.flush()
        try:
            await channel.heard.until(lambda: channel.heard.of(Beat))
            channel.server.send(Drain(), 0)
            await see()
        finally:
            process.kill()
            _, err = await asyncio.to_thread(process.communicate)
    return process.returncode, err


def test_a_rank_that_computes_and_cannot_send_heartbeats_has_a_pulse() -> None:
    """Work holds the interpreter's lock: for longer than a rank may be silent, the owner hears that it computes."""

    async def story(channel: Channel) -> None:
        async def pulses() -> None:
            await channel.heard.until(lambda: len(channel.heard.of(Pulse)) >= 4)
            assert channel.heard.gone == []

        status, _ = await rank(channel, COMPUTES, HANG_S, pulses)
        assert status == -9

    with_channel(story, world_size=1)


@pytest.mark.parametrize(
    ("work", "slow_s", "why"),
    [(LOCKED, HANG_S, "no thread of it runs"), (COMPUTES, 2.0, "the interpreter is locked for")],
    ids=["a lock", "work without end"],
)
def test_a_rank_whose_interpreter_is_locked_is_ended_and_says_where(work: str, slow_s: float, why: str) -> None:
    async def story(channel: Channel) -> None:
        status, err = await rank(channel, work, slow_s, lambda: channel.heard.until(lambda: channel.heard.gone))
        assert status == EXIT_CHANNEL_LOST
        assert why in err
        assert 'File "<string>"' in err
        assert work is COMPUTES or len(channel.heard.of(Pulse)) < 4

    with_channel(story, world_size=1)


def test_a_locked_rank_ends_although_its_error_output_is_full() -> None:
    """Its reason cannot be written while its launcher does not read."""

    async def story(channel: Channel) -> None:
        gone = channel.heard.until(lambda: channel.heard.gone)
        status, err = await rank(channel, f"{UNREAD}; {LOCKED}", HANG_S, lambda: gone)
        assert status == EXIT_CHANNEL_LOST
        assert "this rank ends itself" not in err

    with_channel(story, world_size=1)


def test_a_pulse_that_cannot_start_leaves_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without memory or a thread for it, the rank has its other watchdog."""

    def without(function: Any, result: Any, *arguments: Any) -> Any:
        bound = bind(function, result, *arguments)
        return (lambda *given: None) if len(arguments) == 9 else bound

    async def story(channel: Channel) -> None:
        client = await asyncio.to_thread(channel.client, 0)
        monkeypatch.setattr(pulse, "bind", without)
        before = set(os.listdir("/proc/self/fd"))
        asked = (channel.address, channel.secret, 0, 1, HANG_S, 1)
        assert await asyncio.to_thread(pulse.start_pulse, *asked) is None
        await channel.heard.until(lambda: not channel.server.pulses)
        assert set(os.listdir("/proc/self/fd")) == before
        await asyncio.to_thread(client.close)

    with_channel(story)


def test_a_pulse_has_a_connection_of_its_own() -> None:
    """A second one of the same rank is refused, and the rank stays."""

    async def story(channel: Channel) -> None:
        client = await asyncio.to_thread(channel.client, 0, watchdog=True)
        with pytest.raises(ConnectionError):
            await asyncio.to_thread(pulse.start_pulse, channel.address, channel.secret, 0, 1, HANG_S, 1)
        with pytest.raises(ConnectionError):
            await asyncio.to_thread(pulse.start_pulse, channel.address, channel.secret, 7, 1, HANG_S, 1)
        assert channel.heard.gone == []
        assert channel.server.connected == {0}
        await asyncio.to_thread(client.close)

    with_channel(story)
