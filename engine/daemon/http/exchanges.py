"""The requests in flight, shared fairly between owners: at the limit, one of the owner with the most gives way to that
of an owner with fewer. Pure: an exchange is ended by its own `end`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from ...openai.errors import ApiError
from ..keys import Key
from .connections import spare


class Endable(Protocol):
    """A request in flight. `waiting`: for the rest of its body."""

    key: Key | None
    secret: str

    @property
    def waiting(self) -> bool: ...

    def end(self, error: ApiError) -> None: ...


@dataclass(frozen=True, slots=True)
class Place:
    """`owner`: the key's id, or the address if there is no key."""

    owner: str
    address: str


class Exchanges:
    """At most `most` connections less a reserve have a request, and `of_address` of one address: the reserve is for
    clients whose key is not known yet."""

    def __init__(self, most: int, of_address: int) -> None:
        self._most, self._of_address = most - spare(most), of_address
        self._open: dict[Endable, Place] = {}
        self.addresses: Counter[str] = Counter()

    def __iter__(self) -> Iterator[Endable]:
        return iter(self._open)

    def enter(self, exchange: Endable, place: Place) -> None:
        """Counts a request, possibly in place of another owner's. Raises ApiError if its owner has too many itself."""
        if self.addresses[place.address] >= self._of_address:
            self._make_room(place, lambda other: other.address == place.address)
        if len(self._open) >= self._most:
            self._make_room(place, lambda other: True)
        self._open[exchange] = place
        self.addresses[place.address] += 1

    def leave(self, exchange: Endable) -> None:
        if (place := self._open.pop(exchange, None)) is not None:
            self.addresses[place.address] -= 1
            if not self.addresses[place.address]:
                del self.addresses[place.address]

    def end(self, exchanges: Iterable[Endable], error: ApiError) -> None:
        for exchange in exchanges:
            self.leave(exchange)
            exchange.end(error)

    def _make_room(self, place: Place, among: Callable[[Place], bool]) -> None:
        """Ends a request of the owner with the most: the oldest that waits for its body, of which nothing is lost, else
        the newest."""
        counts = Counter(other.owner for other in self._open.values() if among(other))
        owner, count = counts.most_common(1)[0]
        if count <= counts[place.owner] + 1:
            raise _busy(place.owner, counts[place.owner])
        theirs = [exchange for exchange, other in self._open.items() if other.owner == owner and among(other)]
        victim = next((exchange for exchange in theirs if exchange.waiting), theirs[-1])
        self.end((victim,), _busy(owner, count))


def _busy(owner: str, count: int) -> ApiError:
    message = f"too many requests are in flight, {count} of {owner or 'this client'}: try again when some have ended"
    return ApiError(message, "busy", status=503, retry_after=5, close=True)
