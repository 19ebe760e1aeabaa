"""Which attention backend serves, what is said about it, and what is refused."""

from __future__ import annotations

import importlib
import importlib.util
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_flashinfer import LIBRARY
from laddertron.models import attention_choice
from laddertron.models.attention_choice import AttentionError, make_attention
from laddertron.models.cpu.kernels import Kernels
from laddertron.models.cuda import workspace
from laddertron.models.cuda.flashinfer import prompt_kernel
from laddertron.models.cuda.fp8 import converts_fp8, multiplies_fp8
from laddertron.models.weights.tensor_reader import FP8
from test_flashinfer import CPU, CUDA, make_cache

BF16 = torch.bfloat16
CONFIG: Any = SimpleNamespace(head_dim=64, num_layers=2, sliding_window=None, attention_scale=None, latent=None)
LATENT = SimpleNamespace(index=None)
SHARD: Any = SimpleNamespace(config=CONFIG, num_heads=4)


def chosen(wanted: str, dtype: torch.dtype = BF16) -> tuple[str, str]:
    backend, why = make_attention(wanted, SHARD, make_cache(2, 64, 2, 4, dtype, CPU), dtype)
    return backend.name, why


def test_on_a_cpu() -> None:
    """auto takes the kernels where they were built, torch is torch, flashinfer is refused with its reason."""
    assert chosen("torch") == ("torch", "torch, as configured")
    assert chosen("auto")[0] == ("torch" if Kernels.find() is None else "cpu")
    assert chosen("auto", torch.float16) == chosen("auto")
    with pytest.raises(AttentionError, match=r"attention=flashinfer: it needs a CUDA device, not cpu; use auto"):
        chosen("flashinfer")


def test_over_latents() -> None:
    """The same words: the kernels where they serve, which deterministic needs; flashinfer needs a GPU."""
    config = SimpleNamespace(head_dim=40, num_layers=1, latent=LATENT, attention_scale=0.2, sliding_window=None)
    shard: Any = SimpleNamespace(config=config, num_heads=4, num_kv_heads=1)

    def latent(wanted: str, dtype: torch.dtype = BF16, deterministic: bool = False) -> str:
        cache = attention_choice.make_cache(shard, 2, 4, dtype, CPU)
        return make_attention(wanted, shard, cache, BF16, deterministic)[0].name

    kernels = Kernels.find() is not None
    assert latent("auto") == ("cpu, latent" if kernels else "torch, latent")
    assert latent("torch") == latent("auto", torch.float32) == "torch, latent"
    if kernels:
        assert latent("auto", deterministic=True) == "cpu, latent"
    with pytest.raises(AttentionError, match=r"parallel.deterministic with engine.attention=torch, latents torch.bf"):
        latent("torch", deterministic=True)
    with pytest.raises(AttentionError, match="attention=flashinfer: it needs a CUDA device, not cpu; use auto or tor"):
        latent("flashinfer")


def test_the_library_is_taken_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_choice, "flashinfer_or_reason", lambda *_: LIBRARY)
    monkeypatch.setattr(attention_choice, "kernel_store", lambda _: None)
    assert chosen("flashinfer") == ("flashinfer", "flashinfer fake, rotation and writes by torch; prompts by FA2")


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0), (12, 1)])
def test_which_kernels_a_gpu_has(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """By compute capability: the library's kernel for prompts, as the library itself chooses where it is installed, and
    whether fp8 weights are multiplied and converted as they are."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    library = None if importlib.util.find_spec("flashinfer") is None else importlib.import_module("flashinfer.utils")
    if library is not None:
        monkeypatch.setattr(library, "get_compute_capability", lambda _: capability)
        monkeypatch.setattr(torch.version, "cuda", "12.8")
    for kv_dtype in (BF16, FP8):
        kernel = prompt_kernel(capability, kv_dtype)
        assert kernel[:3] == ("FA3" if capability == (9, 0) and kv_dtype is BF16 else "FA2")
        assert ("as FA3 reads no fp8 keys" in kernel) == (capability == (9, 0) and kv_dtype is FP8)
        if library is not None:
            assert library.determine_attention_backend(CUDA, 0, False, False, BF16, kv_dtype) == kernel[:3].lower()
    assert multiplies_fp8(CUDA) == converts_fp8(CUDA) == (capability >= (8, 9))


def test_why_the_library_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not installed, broken, or not for this model: a reason, never an exception, since auto goes on with torch."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    library = attention_choice.flashinfer_or_reason
    assert "not float32" in library(CUDA, torch.float32, CONFIG, 4)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert "not installed" in library(CUDA, BF16, CONFIG, 4)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    monkeypatch.setattr(attention_choice, "kernels_missing", lambda: "no nvcc")
    assert library(CUDA, BF16, CONFIG, 4) == "no nvcc"
    monkeypatch.setattr(attention_choice, "kernels_missing", lambda: None)

    def broken(name: str) -> Any:
        raise OSError("libcudart.so.12: cannot open")

    monkeypatch.setattr(importlib, "import_module", broken)
    assert "cannot be imported: OSError: libcudart" in library(CUDA, BF16, CONFIG, 4)
    for version, taken in (
        ("0.6.17", False),
        ("0.7.1.post3", False),
        ("0.7.2", True),
        ("0.10.0", True),
        ("main", True),
    ):
        module = SimpleNamespace(__version__=version)
        monkeypatch.setattr(importlib, "import_module", lambda _, module=module: module)
        chosen_library = library(CUDA, BF16, CONFIG, 4)
        assert chosen_library is module if taken else "older than 0.7.2" in chosen_library


def test_kernels_must_be_there_or_compilable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer alone cannot run: it needs nvcc with a C++ compiler, kernels that were compiled before, or the package
    that has them."""
    monkeypatch.delenv("CXX", raising=False)
    for folder in ("CUDA_HOME", "FLASHINFER_WORKSPACE_BASE"):
        monkeypatch.setenv(folder, str(tmp_path))

    def missing(packages: set[str], nvcc: str | None = None, cxx: str | None = "/usr/bin/c++") -> str | None:
        monkeypatch.setattr(workspace, "find_spec", lambda name: name in packages or None)
        monkeypatch.setattr(shutil, "which", {"nvcc": nvcc, "c++": cxx}.get)
        return workspace.kernels_missing()

    assert missing(set()) is None
    assert "install flashinfer-jit-cache" in (missing({"flashinfer"}) or "")
    assert missing({"flashinfer", "flashinfer_jit_cache"}) is None
    assert missing({"flashinfer"}, "/usr/bin/nvcc") is None
    assert "finds no C++ compiler" in (missing({"flashinfer"}, "/usr/bin/nvcc", None) or "")
    compiled = tmp_path / ".cache" / "flashinfer" / "0.7" / "90a" / "decode.so"
    compiled.parent.mkdir(parents=True)
    compiled.touch()
    assert missing({"flashinfer"}) is None
    compiled.unlink()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    assert missing({"flashinfer"}) is None
