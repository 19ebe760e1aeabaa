"""The five CPU tiers, what each offers, and LADDERTRON_CPU_TIER, which lowers this process's. No torch. With
topology/placement/identity.py the only module below launchers/ that reads the environment.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Literal

Tier = Literal["amx", "avx512_bf16", "avx512", "avx2", "generic"]

TIERS: tuple[Tier, ...] = ("amx", "avx512_bf16", "avx512", "avx2", "generic")
"""Best first. `generic` is every other processor of any architecture: torch alone computes."""
VARIABLE = "LADDERTRON_CPU_TIER"
INT8: tuple[Tier, ...] = ("amx", "avx512_bf16", "avx512", "avx2")
"""Where `model.weights: int8` is computed. The other types are computed in every tier."""

_AVX2 = frozenset({"avx2", "fma", "f16c"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
_AVX512_BF16 = _AVX512 | {"avx512_bf16"}
_NEEDS: Mapping[Tier, frozenset[str]] = {
    "amx": _AVX512_BF16 | {"amx_tile", "amx_bf16"},
    "avx512_bf16": _AVX512_BF16,
    "avx512": _AVX512,
    "avx2": _AVX2,
    "generic": frozenset(),
}
_LIBRARIES = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS")
_LIMITS: Mapping[Tier, tuple[str, str, str]] = {
    "avx512_bf16": ("AVX512_CORE_BF16", "avx512", "AVX512"),
    "avx512": ("AVX512_CORE", "avx512", "AVX512"),
    "avx2": ("AVX2", "avx2", "AVX2"),
    "generic": ("SSE41", "default", "SSE4_2"),
}

LOOKS_VARIABLE, LOOKS = "GOMP_SPINCOUNT", "300"
"""How often torch's threads look for work before they sleep. The default is milliseconds of looking, on processors that
the threads of models/cpu/pool.c want."""


class TierError(ValueError):
    """LADDERTRON_CPU_TIER asks for a tier that cannot be; the message carries value, rule and fix."""


def detect(flags: frozenset[str], machine: str) -> Tier:
    """The best tier of a processor with these `flags` (as in /proc/cpuinfo) and this architecture (as `uname -m`)."""
    if machine not in ("x86_64", "AMD64"):
        return "generic"
    return next(tier for tier in TIERS if _NEEDS[tier] <= flags)


def own() -> Tier:
    return detect(cpu_flags(), platform.machine())


def current(environ: Mapping[str, str] | None = None) -> Tier:
    """This process's tier: the machine's, or the lower one that `environ` forces. Raises TierError."""
    forced = (os.environ if environ is None else environ).get(VARIABLE)
    return own() if not forced else lowered(forced, own())


def lowered(forced: str, best: Tier) -> Tier:
    """`forced`, if a processor whose own tier is `best` can play it. Raises TierError."""
    offered = TIERS[TIERS.index(best) :]
    if forced not in offered:
        rule = "is above this processor's tier: it" if forced in TIERS else "is no CPU tier: this processor"
        raise TierError(f"{VARIABLE}={forced!r} {rule} can play {', '.join(offered)}: set one of them, or unset it")
    return forced


def described(tier: Tier, best: Tier) -> str:
    """For people: `avx2`, or that it is forced and what it would be."""
    return tier if tier == best else f"{tier} (forced by {VARIABLE}; the processor's own is {best})"


def require_int8(tier: Tier) -> None:
    """Raises TierError unless int8 weights are computed in `tier`."""
    if tier not in INT8:
        raise TierError(f"int8 weights are computed in the CPU tiers {', '.join(INT8)}; this is {tier}: use stored")


def limits(tier: Tier, best: Tier) -> dict[str, str]:
    """Environment variables that limit oneDNN, ATen and MKL to `tier` on a machine whose best tier is `best`. Empty for
    the best tier itself: there the libraries may use every instruction set, including those of no tier."""
    return {} if tier == best else dict(zip(_LIBRARIES, _LIMITS[tier], strict=True))


def limit_libraries(environ: MutableMapping[str, str]) -> None:
    """Puts a forced tier's limits into `environ`, where they replace others. For os.environ: before torch is imported,
    or at the latest before it computes anything, since each library looks once. Raises TierError."""
    if environ.get(VARIABLE):
        environ.update(limits(current(environ), own()))


def cpu_flags(path: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """The first processor's flags; none where the system does not say."""
    try:
        with path.open(encoding="utf-8") as lines:
            flags = next((line for line in lines if line.startswith("flags")), "")
    except OSError:
        return frozenset()
    return frozenset(flags.partition(":")[2].split())
