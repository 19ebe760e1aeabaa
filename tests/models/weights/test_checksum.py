"""The CRC-32 that manifests are made of is zlib's, whoever computes it."""

from __future__ import annotations

import random
import zlib

import pytest
from laddertron.models.weights import manifest
from laddertron.topology.transport import native


@pytest.mark.parametrize("built", [True, False])
def test_it_is_zlibs(built: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every length around the folding's 64 and 128 bytes, many random ones, in one piece and in two."""
    if not built:
        monkeypatch.setattr(native, "load", lambda module: None)
    manifest.crc32.cache_clear()
    sums, draw = manifest.crc32(), random.Random(1)
    library = native.load("laddertron.models.cpu._kernels")
    assert (sums is manifest._plain) == (library is None or not library.kernels_has_crc32())
    for size in [*range(260), *(draw.randrange(1 << 16) for _ in range(100))]:
        data = bytearray(draw.randbytes(size))
        assert sums(data, size, 0) == zlib.crc32(data)
        cut = draw.randint(0, size)
        before = sums(data, cut, 0)
        assert sums(data[cut:], size - cut, before) == zlib.crc32(data)
    manifest.crc32.cache_clear()
