"""Reserves the bytes of uploads in flight: against their key's limit on stored bytes, and against the disk."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

from ..store import records
from ..store.disk import free_bytes
from ..store.store import Store
from ..usage import Usage
from .errors import unstored


class Reservations:
    """The uploads in flight, for the daemon's event loop. `least_free`: bytes of the store's disk that stay free."""

    def __init__(self, store: Store, usage: Usage, least_free: int) -> None:
        self.store, self.usage, self._least_free = store, usage, least_free
        self.in_flight: Counter[str] = Counter()
        """Reserved bytes of each owner."""
        self.unwritten: Counter[str] = Counter()
        """Those of them that are not on the disk yet."""
        self.added: Counter[str] = Counter()
        """Bytes of each owner's uploads that were stored since the start."""

    @contextlib.contextmanager
    def begin(self, owner: str) -> Iterator[Reservation]:
        """Makes an upload's reservation, which is released when the block ends."""
        reservation = Reservation(self, owner)
        try:
            yield reservation
        finally:
            reservation.close()

    async def check_disk(self, owner: str, others: bool) -> None:
        """Raises ApiError if the disk has no room for all reservations, or `others` (the owner has several) and they
        take more than half of the room: their bytes may never arrive."""
        room = await self.store.in_thread(lambda: free_bytes(self.store.folder)) - self._least_free
        if self.unwritten.total() > room:
            raise unstored("the disk is nearly full")
        if others and self.unwritten[owner] > room // 2:
            raise unstored("this key's unfinished uploads take half of the free disk")


class Reservation:
    """One upload's reserved bytes."""

    def __init__(self, all_of: Reservations, owner: str) -> None:
        self._all, self._owner = all_of, owner
        self._size = self._written = 0
        self._before: int | None = None  # bytes that the owner had stored at the start of the daemon

    async def grow(self, size: int) -> None:
        """Reserves `size` bytes in total; counts them before it checks, since a check may wait. Raises ApiError,
        StoreUnavailable or OSError."""
        if (more := size - self._size) <= 0:
            return
        self._size = size
        self._all.in_flight[self._owner] += more
        self._all.unwritten[self._owner] += more
        try:
            await self._all.check_disk(self._owner, self._all.unwritten[self._owner] > size - self._written)
            await self._check_key()
        except BaseException:
            self.close()  # at once: another upload's check must not fail because of it
            raise

    async def _check_key(self) -> None:
        added, owner = self._all.added, self._owner
        most = self._all.usage.limits_of(owner).stored_bytes
        while most is not None and (self._before is None or self._stored + self._all.in_flight[owner] > most):
            mark = added[owner]
            stored = await self._all.store.read(lambda db: records.stored_bytes(db, owner))
            self._before = stored - mark
            if added[owner] == mark:  # else the row of an upload that has ended meanwhile may not have been read
                self._all.usage.check_stored(owner, stored, self._size, self._all.in_flight[owner] - self._size)
                return

    @property
    def _stored(self) -> int:
        return (self._before or 0) + self._all.added[self._owner]

    def wrote(self, size: int) -> None:
        """Records that so many more bytes are on the disk, where they count as used."""
        self._all.unwritten[self._owner] -= min(size, self._size - self._written)
        self._written = min(self._written + size, self._size)

    def stored(self, size: int) -> None:
        """Records that the upload has become a stored file of `size` bytes."""
        self._all.added[self._owner] += size

    def close(self) -> None:
        for counter, size in ((self._all.in_flight, self._size), (self._all.unwritten, self._size - self._written)):
            counter[self._owner] -= size
            if not counter[self._owner]:
                del counter[self._owner]
        self._size = self._written = 0
