"""The kernels' threads (models/cpu/pool.c): every part of a region is computed once, whoever computes it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from laddertron.topology.transport import native
from waiting import HANG_S

LIBRARY = native.load("laddertron.models.cpu._kernels")
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="the kernels were not built: make env")

# In a process of its own, without torch and its threads: parts of regions, with the threads that computed them.
BEGIN = """
import ctypes, os, sys, threading, time
library = ctypes.CDLL(sys.argv[1])
Body = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_int)

def region(threads, body=lambda part: None):
    found = []
    def compute(_, part, parts):
        assert parts == threads
        found.append((part, threading.get_native_id()))
        body(part)
    library.kernels_parallel(Body(compute), None, threads)
    assert sorted(part for part, _ in found) == list(range(threads)), found
    return {who for _, who in found}

me = threading.get_native_id()
"""


def run(script: str, prefix: str = "") -> None:
    assert LIBRARY is not None
    command = ["sh", "-c", f'{prefix} exec "$@"', "sh", sys.executable, "-c", BEGIN + script, LIBRARY._name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr


def test_every_part_is_computed_once_by_workers_that_sleep_and_that_do_not() -> None:
    run("""
who = set()
for turn in range(300):
    who |= region(4, lambda part: time.sleep(0.001))
    time.sleep(0.002 * (turn % 10 == 0))
assert len(who) == 4, who
""")


def test_many_regions_read_the_same_sum() -> None:
    """As fast as they come, over more threads than processors."""
    run("""
data = bytes(range(256)) * 256
library.kernels_read.restype = ctypes.c_uint64
library.kernels_read.argtypes = ctypes.c_char_p, ctypes.c_int64, ctypes.c_int
first = library.kernels_read(data, len(data), 1)
assert {library.kernels_read(data, len(data), 2 + n % 4) for n in range(20000)} == {first}
""")


def test_a_region_of_another_thread_is_computed_by_its_caller() -> None:
    """While the first one's parts are held."""
    run("""
held, over = threading.Event(), threading.Event()
def hold(part):
    held.set()
    over.wait()
first = threading.Thread(target=region, args=(2, hold))
first.start()
held.wait()
assert region(3) == {me}
over.set()
first.join()
assert region(3)
""")


def test_without_threads_the_caller_computes_alone() -> None:
    """A stack that fits in no memory: the system gives no thread."""
    run("assert region(4) == {me}", "ulimit -s 68719476736;")


def test_a_forked_process_has_workers_of_its_own() -> None:
    run("""
region(4)
if (child := os.fork()) == 0:
    who = set()
    for _ in range(50):
        who |= region(4, lambda part: time.sleep(0.001))
    os._exit(0 if len(who) == 4 else 1)
assert os.waitpid(child, 0)[1] == 0
assert region(4)
""")
