"""CRC-32 of large blocks by models/cpu/checksum.c, else by zlib (a quarter of the speed). Both release the GIL."""

from __future__ import annotations

import ctypes
import functools
import zlib
from collections.abc import Callable

from ...topology.transport import native

Crc32 = Callable[[bytearray, int, int], int]
"""(buffer, how many of its bytes, the CRC-32 of what came before) -> CRC-32."""


@functools.cache
def crc32() -> Crc32:
    library = native.load("laddertron.models.cpu._kernels")
    if library is None or not library.kernels_has_crc32():
        return _plain
    call = native.bind(library.kernels_crc32, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_int64)

    def folded(buffer: bytearray, count: int, before: int) -> int:
        held = (ctypes.c_char * len(buffer)).from_buffer(buffer)
        result: int = call(before, ctypes.addressof(held), count)
        return result

    return folded


def _plain(buffer: bytearray, count: int, before: int) -> int:
    return zlib.crc32(memoryview(buffer)[:count], before)
