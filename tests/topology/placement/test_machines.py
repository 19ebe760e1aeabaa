"""Machines by hostname and boot id: which ranks share one, and one hostname that two have."""

from __future__ import annotations

import pytest
from laddertron.topology.placement.machines import Machine, boot_id, own_addresses, shared_hostname, this_machine


@pytest.mark.parametrize(
    ("other", "clash"),
    [
        (Machine("n0", "boot-a", ("10.0.0.1",)), False),
        (Machine("n0", "boot-a", ("192.168.0.1", "10.0.0.1")), False),  # seen over another of its interfaces
        (Machine("n0", "boot-a"), False),  # no interface is up
        (Machine("n1", "boot-a", ("10.0.0.2",)), False),  # another container of this machine
        (Machine("n1", "boot-b", ("10.0.0.2",)), False),
        (Machine("n0", "boot-b", ("10.0.0.2",)), True),  # a cloned image
        (Machine("n0", "boot-b", ("172.17.0.1", "10.0.0.1")), True),  # both have the bridge of containers
        (Machine("n0", "boot-a", ("10.0.0.2",)), True),  # a container with the hostname of another
    ],
)
def test_two_machines_with_one_hostname(other: Machine, clash: bool) -> None:
    """The rank that is second is named, with the addresses of both machines."""
    first = Machine("n0", "boot-a", ("10.0.0.1", "172.17.0.1"))
    fault = shared_hostname({0: first, 1: Machine("n9", "boot-a", ("10.0.0.9",)), 2: other})
    assert (fault is not None) == clash
    if fault is not None:
        assert fault[0] == 2
        words = f"two machines have the hostname n0: 10.0.0.1 (rank 0) and {other.addresses[0]} (rank 2)"
        assert fault[1].startswith(words)


def test_this_machine_is_itself() -> None:
    me = this_machine()
    assert me.boot_id == boot_id()
    assert shared_hostname({0: me, 1: this_machine()}) is None
    assert not any(text.startswith(("127.", "fe80:")) or text == "::1" for text in me.addresses)
    assert all(own_addresses(text)[0] == text for text in me.addresses)
