"""The host that a request names, in its target or its Host field (RFC 9112, 3.2), and its check where a daemon without
keys listens on loopback: a web page whose name resolves to this machine must not read answers. Pure.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ...config.rules import is_loopback
from ...openai.errors import ApiError

_AUTHORITY = re.compile(
    r"(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<name>[\w.~!$&'()*+,;=%-]*))(?::(?P<port>\d{0,5}))?", re.ASCII
)
_ABSOLUTE = re.compile(
    rb"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<authority>[^/?#]*)(?P<path>/[^?#]*)?(?P<query>\?[^#]*)?"
)
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Authority:
    """`host`: in lower case, without brackets and the dot of the root. `port`: None if it is not named."""

    host: str
    port: int | None


def authority_of(text: str) -> Authority:
    """Parses `host[:port]`. Raises ValueError, also for user information."""
    match = _AUTHORITY.fullmatch(text)
    if match is None or int(match["port"] or 0) > 65535:
        raise ValueError(f"{text[:80]!r} is not host:port")
    host = match["name"]
    if host is None:
        host = str(ipaddress.IPv6Address(match["six"]))
    return Authority(host.lower().removesuffix("."), int(match["port"]) if match["port"] else None)


def origin_form(method: bytes, target: bytes) -> tuple[bytes, bytes | None]:
    """The path and query of a request's target, and its authority in absolute form, else None. Raises ValueError."""
    if target.startswith(b"/") or target == b"*":
        return target, None
    match = _ABSOLUTE.fullmatch(target)
    if match is None or match["scheme"].lower() not in (b"http", b"https") or not match["authority"]:
        raise ValueError(f"{target[:80]!r} is neither a path nor an http URL")
    authority_of(match["authority"].decode("latin-1"))
    path = match["path"] or (b"*" if method == b"OPTIONS" and not match["query"] else b"/")
    return path + (match["query"] or b""), match["authority"]


def check_local(hosts: Sequence[str], origins: Sequence[str], names: Collection[str]) -> None:
    """Checks the Host and Origin fields of a request to a daemon without keys on loopback, which serves this machine:
    under `names`, localhost and loopback addresses, to its own pages and to programs. A request without Host is of
    HTTP/1.0, and so of a program: browsers send one. Raises ApiError."""
    host = authority_of(hosts[0]) if len(hosts) == 1 else None
    if hosts and not (host and (is_loopback(host.host) or host.host in names)):
        named = "several hosts" if host is None else f"host {host.host[:80]!r}"
        message = f"{named}: without keys this daemon serves localhost, loopback addresses and daemon.host only"
        message += ": use one of them, or set daemon.api_key_file"
        raise ApiError(message, "misdirected_request", status=421, close=True)
    if origins and not (host and len(origins) == 1 and _is_same(origins[0], host)):
        message = (
            f"origin {origins[0][:80]!r}: without keys this daemon answers no other web page: set daemon.api_key_file"
        )
        raise ApiError(message, "foreign_origin", status=403, close=True)


def _is_same(origin: str, host: Authority) -> bool:
    scheme, mark, rest = origin.partition("://")
    default = _PORTS.get(scheme.lower())
    try:
        given = authority_of(rest)
    except ValueError:
        return False
    return bool(mark and default) and (given.host, given.port or default) == (host.host, host.port or default)
