"""Results are stored in groups, in order, one group at a time; what fails is raised."""

from __future__ import annotations

import asyncio

import pytest
from laddertron.engine.daemon.result_sink import ResultSink


def test_results_that_arrive_while_a_group_is_stored_are_the_next_group() -> None:
    async def story() -> None:
        groups, gate = list[list[int]](), asyncio.Event()

        async def store(results: list[int]) -> None:
            groups.append(results)
            await gate.wait()

        sink = ResultSink[int](store)
        sink.add(0, 1)
        await asyncio.sleep(0)
        for number in range(1, 4):
            sink.add(number, 1)
        assert (groups, sink.pending, sink.full) == ([[0]], True, False)
        sink.add(4, 1 << 30)
        assert sink.full
        gate.set()
        await sink.settled()
        assert (groups, sink.pending, sink.full) == ([[0], [1, 2, 3, 4]], False, False)
        sink.wake()
        await sink.settled()
        assert groups[-1] == []

    asyncio.run(story())


def test_what_store_raises_is_raised_to_who_waits() -> None:
    """Also for the last group, after which nothing is pending: it was not stored."""

    async def story() -> None:
        async def store(results: list[int]) -> None:
            raise OSError("no disk")

        for wait in (ResultSink.moved, ResultSink.settled):
            sink = ResultSink[int](store)
            sink.add(1, 1)
            for _ in range(2):
                with pytest.raises(OSError, match="no disk"):
                    await wait(sink)
            assert not sink.pending

    asyncio.run(story())


def test_nothing_is_stored_after_a_failure() -> None:
    """Also no result that arrives between the failure and its handling, in which a damaged row is restored."""

    async def story() -> None:
        groups = list[list[int]]()

        async def store(results: list[int]) -> None:
            groups.append(results)
            raise OSError("no disk")

        sink = ResultSink[int](store)
        sink.add(1, 1)
        with pytest.raises(OSError, match="no disk"):
            await sink.settled()
        sink.add(2, 1)
        sink.wake()
        await asyncio.sleep(0)
        assert groups == [[1]]

    asyncio.run(story())
