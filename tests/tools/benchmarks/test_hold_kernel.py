"""The kernels that stand for a collective: compiled for the GPUs they are for, and interpreted, without a GPU."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

GPU = Path(__file__).resolve().parents[3] / "tools" / "benchmarks" / "gpu"
sys.path.insert(0, str(GPU))

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed: make env ACCEL=cuda"
)

REGISTER_FILE = 65536
"""Registers of a multiprocessor, from Volta to Blackwell; a thread's are dealt in eights."""


def _compiled(kernel: Any, signature: dict[str, str], constants: dict[str, int], capability: int, warps: int) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind.startswith("*")}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})


def _hold(capability: int, kind: str, itemsize: int) -> Any:
    import hold_kernel

    signature = {"x": f"*{kind}", "scratch": f"*{kind}", "vectors": "i32", "moved": "i32", "ns": "i32"}
    constants = {"VECTOR": hold_kernel.VECTOR_BYTES // itemsize, "TILE": hold_kernel.TILE_BYTES // itemsize}
    signature |= dict.fromkeys(constants, "constexpr")
    return _compiled(hold_kernel.hold, signature, constants, capability, hold_kernel.HOLD_WARPS)


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(("kind", "itemsize"), [("bf16", 2), ("fp32", 4)])
def test_a_program_has_a_multiprocessors_whole_register_file(
    capability: int, kind: str, itemsize: int, tmp_path: Path
) -> None:
    """So that no block of the computation can run beside it: 64 registers for each of 1,024 threads, and next to
    nothing spilled. Bytes go by 16 a thread, and threads that wait for one another would hang, as each reads the time
    itself: no barrier before the last nap."""
    import triton

    compiled = _hold(capability, kind, itemsize)
    ptx = compiled.asm["ptx"]
    assert compiled.asm["cubin"][:4] == b"\x7fELF"
    assert ptx.count("ld.global.v4.b32") == 4
    assert "globaltimer" in ptx
    last_nap = ptx.rindex("nanosleep.u32")
    assert "bar.sync" not in ptx[:last_nap]
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    binary = tmp_path / "hold.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    usage = subprocess.run([str(tool), "-res-usage", str(binary)], capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK"))  # type: ignore[index]
    assert -(-registers // 8) * 8 * 1024 == REGISTER_FILE, usage
    assert stack < 64, usage


def test_a_pure_delay_touches_no_memory() -> None:
    import hold_kernel

    ptx = _compiled(hold_kernel.delay, {"ns": "i32"}, {}, 90, 1).asm["ptx"]
    assert "nanosleep.u32" in ptx
    assert not re.search(r"\b(ld|st)\.global", ptx)


def test_the_bytes_of_the_message_are_copied_and_it_stays_as_it_is() -> None:
    """Interpreted on the CPU: one lap and nearly two, one program and many, three types, and no bytes at all. What lies
    beyond the last whole vector is left alone. A clock of 50 ns a reading makes every program nap through its 400."""
    program = Path(__file__).with_name("interpret_hold.py")
    done = subprocess.run(
        [sys.executable, str(program)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(GPU)},
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(text) for text in done.stdout.splitlines()]
    assert len(lines) == 4
    for line in lines:
        assert line["copied"], line
        assert line["rest_untouched"], line
        assert line["x_unchanged"], line
        assert 4 <= line["naps_a_program"] <= 8, line
