"""Writes a checkpoint folder in another format, with bit-identical tensors, config.json and, for transformers, the code
of the declared wiring. Only one tensor is in memory at a time.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..config.dialects import MODELING_FILE, DialectError, to_dialect
from ..config.json_fields import read_json
from ..config.model_config import Layout, ModelConfig, from_folder
from .checkpoint import ITEMSIZES, CheckpointError, StoredTensor, refuse_other_formats
from .file_writer import Entries, write_tensors
from .mapping import open_checkpoint
from .rows import Rows, sources
from .shard_writer import BESIDE
from .slices import head_of
from .tensor_reader import DTYPES, Reader

FILE_BYTES = 5 << 30
Progress = Callable[[int, int], None]


def convert(folder: Path, target: Path, dialect: str, progress: Progress = lambda done, total: None) -> ModelConfig:
    """Writes `target` atomically; returns its config. progress(done, total) in bytes. Raises DialectError (the format
    cannot express this model), CheckpointError, ValueError or OSError."""
    if target.exists():
        raise CheckpointError(f"{target}: is there already: remove it, or give another folder")
    if not (folder / "config.json").is_file():
        refuse_other_formats(folder)
    config, data = from_folder(folder), read_json(folder / "config.json").data
    words = to_dialect(config, data, dialect)
    stored = open_checkpoint(folder, config).tensors
    if packed := next((name for name, tensor in stored.items() if tensor.code), None):
        raise DialectError(f"4-bit weights ({packed}) are not converted: keep the folder, or convert its original")
    layout: Layout = "dolomite" if dialect == "ladder-residual" else "huggingface"
    if (words["model_type"], layout) == ("mixtral", "huggingface"):
        layout = "mixtral"
    parts = sources(config, layout)
    extra = [name for name in stored if name not in sources(config, config.layout) and name != head_of(config)]
    if extra and layout != config.layout:
        raise DialectError(
            f"quantised weights ({extra[0]}) are not fused or taken apart: use a format with their names"
        )
    parts |= {name: (Rows(name, 0, (stored[name].shape or (1,))[0]),) for name in extra}
    entries = {name: _entry(stored, rows) for name, rows in parts.items()}
    with Reader() as reader:

        def fill(name: str, tensor: Tensor) -> None:
            copy_rows(reader, stored, parts[name], tensor)

        part = target.with_name(f"{target.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        write_model(part, words, entries, fill, progress)
    read = from_folder(part)
    as_it_was = replace(
        read,
        family=config.family,
        layout=config.layout,
        declares_wiring=config.declares_wiring,
        attention_scale=config.attention_scale,
        eos_token_ids=config.eos_token_ids,  # some are in generation_config.json, which is copied later
    )
    if as_it_was != config:
        raise DialectError(f"{dialect} reads back as another model than {folder}: nothing was written to {target}")
    open_checkpoint(part, read)
    copy_beside(folder, part)
    part.rename(target)
    return read


def copy_beside(source: Path, folder: Path) -> None:
    for name in BESIDE:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def copy_rows(reader: Reader, stored: Mapping[str, StoredTensor], parts: tuple[Rows, ...], target: Tensor) -> None:
    """Copies the concatenated rows into `target`, in its type."""
    at = 0
    for rows in parts:
        reader.read(stored[rows.tensor], rows.row, 0, target[at : at + rows.count], None)
        at += rows.count


def write_model(
    folder: Path,
    config_json: Mapping[str, Any],
    entries: Entries,
    fill: Callable[[str, Tensor], None],
    progress: Progress = lambda done, total: None,
) -> None:
    """Writes config.json, the modeling file if it names one, and the tensors in files of at most FILE_BYTES."""
    folder.mkdir(parents=True, exist_ok=True)
    files: list[dict[str, tuple[tuple[int, ...], torch.dtype]]] = [{}]
    sizes = {name: prod(shape) * dtype.itemsize for name, (shape, dtype) in entries.items()}
    room = FILE_BYTES
    for name, entry in entries.items():
        if files[-1] and room < sizes[name]:
            files.append({})
            room = FILE_BYTES
        files[-1][name] = entry
        room -= sizes[name]
    done, total = 0, sum(sizes.values())

    def written(count: int) -> None:
        nonlocal done
        done += count
        progress(done, total)

    weight_map: dict[str, str] = {}
    for number, some in enumerate(files, 1):
        file = "model.safetensors" if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.safetensors"
        write_tensors(folder / file, some, fill, {"format": "pt"}, written)
        weight_map |= dict.fromkeys(some, file)
    if len(files) > 1:
        write_json(
            folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map}
        )
    if "auto_map" in config_json:
        shutil.copyfile(Path(__file__).with_name(MODELING_FILE), folder / MODELING_FILE)
    write_json(folder / "config.json", config_json)


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _entry(stored: Mapping[str, StoredTensor], parts: tuple[Rows, ...]) -> tuple[tuple[int, ...], torch.dtype]:
    first = stored[parts[0].tensor]
    kinds = {stored[part.tensor].dtype for part in parts}
    if len(kinds) > 1:
        raise DialectError(
            f"{first.file}: {first.name} would be fused of {' and '.join(sorted(kinds))}: convert to one"
        )
    assert first.dtype in ITEMSIZES
    shape = first.shape and (sum(part.count for part in parts), *first.shape[1:])
    return shape, DTYPES[first.dtype]
