"""Thread pools whose threads all run from the start: one that is started at its first use may find none to be had, and
what it was to do would be lost."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor


def started_threads(count: int, name: str) -> ThreadPoolExecutor:
    """Makes a pool of `count` running threads. Raises OSError if they cannot be started."""
    pool, all_run = ThreadPoolExecutor(count, name), threading.Barrier(count + 1)
    try:
        for _ in range(count):  # each occupies a thread until all run
            pool.submit(all_run.wait)
        all_run.wait()
    except RuntimeError as error:
        all_run.abort()
        pool.shutdown(wait=False)
        raise OSError(f"{name}: {error}") from error
    return pool
