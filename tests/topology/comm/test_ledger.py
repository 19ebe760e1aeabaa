"""The accounts of collectives are read by the heartbeat's thread while the stepping thread writes them."""

from __future__ import annotations

import sys
import threading

from laddertron.topology.comm.ledger import Ledger


def test_the_accounts_may_be_read_while_new_kinds_appear() -> None:
    """A read that fails would be a heartbeat without figures, and look like a rank that starts anew."""
    ledger, written = Ledger(), threading.Event()

    def write() -> None:
        for n in range(6000):
            ledger.add("all_reduce", "exchange", f"link {n}", 8, 0.0, 0.0, 0.0)
        written.set()

    writer = threading.Thread(target=write)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        writer.start()
        while not written.is_set():
            ledger.entries()
            ledger.history()
    finally:
        sys.setswitchinterval(interval)
        writer.join()
    assert sum(entry.count for entry in ledger.entries()) == 6000
