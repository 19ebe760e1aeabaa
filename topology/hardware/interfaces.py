"""Addresses of this host's network interfaces, from the C library's getifaddrs: IPv4 and IPv6 with their prefix."""

from __future__ import annotations

import ctypes
import ctypes.util
import ipaddress
import socket


class _Sockaddr(ctypes.Structure):
    _fields_ = (("family", ctypes.c_ushort), ("data", ctypes.c_ubyte * 26))


class _Ifaddrs(ctypes.Structure):
    pass


_Ifaddrs._fields_ = (
    ("next", ctypes.POINTER(_Ifaddrs)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.POINTER(_Sockaddr)),
    ("netmask", ctypes.POINTER(_Sockaddr)),
    ("other", ctypes.c_void_p),
    ("data", ctypes.c_void_p),
)


def addresses() -> dict[str, list[str]]:
    """By interface name: `10.0.0.1/24`, `fe80::1/64`. Raises OSError if the system does not say."""
    libc = ctypes.CDLL(None, use_errno=True)
    head = ctypes.POINTER(_Ifaddrs)()
    if libc.getifaddrs(ctypes.byref(head)) != 0:
        raise OSError(ctypes.get_errno(), "getifaddrs failed")
    texts: dict[str, list[str]] = {}
    try:
        entry = head
        while entry:
            item = entry.contents
            entry = item.next
            if not item.address:
                continue
            ip = _ip(item.address.contents)
            if ip is not None:
                mask = _ip(item.netmask.contents, item.address.contents.family) if item.netmask else None
                prefix = ip.max_prefixlen if mask is None else int(mask).bit_count()
                texts.setdefault(item.name.decode(), []).append(f"{ip}/{prefix}")
    finally:
        libc.freeifaddrs(head)
    return texts


def _ip(sockaddr: _Sockaddr, family: int | None = None) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address after the port (IPv4) or after port and flow label (IPv6). A netmask's own family may be unset."""
    data = bytes(sockaddr.data)
    family = sockaddr.family if family is None else family
    if family == socket.AF_INET:
        return ipaddress.IPv4Address(data[2:6])
    if family == socket.AF_INET6:
        return ipaddress.IPv6Address(data[6:22])
    return None


def address_of(interface: str) -> str:
    """An address of this host's interface, IPv4 before IPv6. Raises ValueError if it has none."""
    by_interface = addresses()
    texts = [text.partition("/")[0] for text in by_interface.get(interface, [])]
    if not texts:
        raise ValueError(f"interface {interface} has no address on this host, which has {', '.join(by_interface)}")
    return next((address for address in texts if ":" not in address), texts[0])


def address_towards(peer: str) -> str:
    """This host's address on the route to `peer`, an address. Raises OSError if there is no route."""
    family, kind, protocol, _, place = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(place)  # a datagram socket sends nothing
        own: str = probe.getsockname()[0]
    return own


def interface_of(address: str) -> str:
    """The network interface that holds an address. Raises ValueError naming those that there are."""
    names = {text.partition("/")[0]: name for name, texts in addresses().items() for text in texts}
    if address.startswith("127."):
        return names.get("127.0.0.1", "lo")
    if address not in names:
        raise ValueError(f"no interface here has the address {address}: there are {names}")
    return names[address]
