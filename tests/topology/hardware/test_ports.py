"""Listening on a port of a range: the first free one, one that only closed connections have, and none left."""

from __future__ import annotations

import socket

import pytest
from laddertron.topology.hardware.ports import listen, port_range


def some_range(count: int) -> range:
    """Ports that were free a moment ago, below those that the kernel gives to others."""
    for first in range(20000, 30000, count):
        doors = []
        try:
            for port in range(first, first + count):
                doors.append(socket.create_server(("127.0.0.1", port)))
            return range(first, first + count)
        except OSError:
            continue
        finally:
            for door in doors:
                door.close()
    raise AssertionError("no free range of ports")


def test_ports_in_use_are_skipped_and_the_last_one_is_missed() -> None:
    """Three listeners take the range in order around a port in use; a fourth is refused with host and range. A port
    whose connections are closed, some of them still in TIME_WAIT, is free for the next launch."""
    ports = some_range(4)
    with socket.create_server(("127.0.0.1", ports[1])):
        doors = [listen("127.0.0.1", ports) for _ in range(3)]
        assert [door.getsockname()[1] for door in doors] == [ports[0], ports[2], ports[3]]
        with pytest.raises(OSError) as caught:
            listen("127.0.0.1", ports)
        assert socket.gethostname() in str(caught.value)
        assert f"{ports[0]}-{ports[-1]}" in str(caught.value)
        with socket.create_connection(("127.0.0.1", ports[2])) as caller:
            answer, _ = doors[1].accept()
            answer.close()  # first, so that TIME_WAIT stays at this port
            assert caller.recv(1) == b""
        doors[1].close()
        with listen("127.0.0.1", ports) as again:
            assert again.getsockname()[1] == ports[2]
        for door in doors:
            door.close()


def test_a_range_contains_both_ends() -> None:
    assert port_range("40000-40002") == range(40000, 40003)


@pytest.mark.parametrize("address", ["", "0.0.0.0", "0", "::", "::0", "0:0:0:0:0:0:0:0", "0x0"])  # noqa: S104
def test_no_spelling_of_every_interface_is_listened_on(address: str) -> None:
    with pytest.raises(ValueError, match="every interface"):
        listen(address)
