"""The channel on a thread of its own: a busy daemon silences no rank, and every rank goes on hearing pings."""

from __future__ import annotations

import asyncio
import time

import pytest
from laddertron import __version__
from laddertron.launchers.control import control, control_client
from laddertron.launchers.control.control import ControlThread, new_secret
from laddertron.launchers.control.control_client import ControlClient
from laddertron.launchers.control.messages import Beat, Hello, RankMessage, Welcome
from waiting import FOR_EVER_S, HANG_S, until


class Recorder:
    def __init__(self) -> None:
        self.messages: list[RankMessage] = []
        self.gone: list[int] = []
        self.fail = False

    def on_message(self, rank: int, message: RankMessage) -> None:
        self.messages.append(message)
        if self.fail:
            self.fail = False
            raise RuntimeError("on purpose")

    def on_gone(self, rank: int, reason: str) -> None:
        self.gone.append(rank)


async def hear(condition: object, recorder: Recorder) -> None:
    async with asyncio.timeout(HANG_S):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.01)


def test_a_busy_loop_starves_neither_pings_nor_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner's loop is blocked until ten pings were sent and the rank's word was stamped; nothing is lost, and
    one message that cannot be taken does not hold up the next."""
    monkeypatch.setattr(control, "PING_S", 0.02)
    monkeypatch.setattr(control_client, "BEAT_S", 0.02)

    async def story() -> None:
        recorder, secret = Recorder(), new_secret()
        channel = ControlThread(recorder, secret, Welcome("{}", 0, 1, __version__), "127.0.0.1")
        address = await channel.start()
        try:
            options = {"watchdog": False, "silence_s": FOR_EVER_S, "end": lambda reason: None, "beat": Beat}
            client = await asyncio.to_thread(lambda: ControlClient(address, secret, 0, 0, **options))  # type: ignore[arg-type]
            await hear(lambda: any(isinstance(m, Beat) for m in recorder.messages), recorder)
            (peer,) = channel.server.peers.values()
            for _ in range(10):
                sent, began, taken = peer.sent_at, time.monotonic(), len(recorder.messages)
                until(lambda sent=sent: peer.sent_at > sent, "no ping while the owner's loop was busy")  # type: ignore[misc]
                until(lambda began=began: channel.heard[0] > began, "no sign of life was stamped")  # type: ignore[misc]
                assert len(recorder.messages) == taken
            recorder.fail = True
            taken = len(recorder.messages)
            await hear(lambda: len(recorder.messages) > taken + 1, recorder)
            assert isinstance(recorder.messages[0], Hello)
            await asyncio.to_thread(client.close)
            await hear(lambda: recorder.gone == [0], recorder)
            assert await channel.all_gone() == frozenset()
        finally:
            await channel.close()
        assert not channel.thread.is_alive()

    asyncio.run(story())


def test_an_address_that_cannot_be_had_is_an_oserror_and_leaves_no_thread() -> None:
    async def story() -> None:
        channel = ControlThread(Recorder(), new_secret(), Welcome("{}", 0, 1, __version__), "192.0.2.1")
        with pytest.raises(OSError, match="192"):
            await channel.start()
        await channel.close()
        assert not channel.thread.is_alive()

    asyncio.run(story())
