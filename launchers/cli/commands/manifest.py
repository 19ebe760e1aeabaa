"""`laddertron manifest`: checksums of a model folder, made once; every later load verifies what it reads."""

from __future__ import annotations

import time
from pathlib import Path

import click

from ....models.weights.checkpoint import CheckpointError
from ....topology.hardware.fabric import counted
from ..errors import ended_by


@click.command()
@click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--check", is_flag=True, help="Verify the whole folder against its manifest.")
@ended_by(CheckpointError)
@ended_by(OSError, end=click.ClickException)
def command(model: Path, check: bool) -> None:
    """Write MODEL/laddertron.manifest.json, or verify MODEL against it.

    The manifest has a CRC-32 for each 8 MiB of the weights and of the other files that are read. Each rank verifies a
    share while loading; on a mismatch the start fails, and the error names file and tensor.

    \b
      laddertron manifest /models/Llama-3.1-8B
      laddertron manifest /models/Llama-3.1-8B --check
    """
    from rich.console import Console

    from ....models.weights.manifest import Verifier, make_manifest, read_manifest, stored_in, write_manifest
    from ..run_view import byte_bar

    console, start = Console(stderr=True), time.monotonic()
    if check:
        listed = read_manifest(model)
        if listed is None:
            raise CheckpointError(f"{model}: no manifest: write it with `laddertron manifest {model}`")
        with ended_by(CheckpointError, end=click.ClickException), Verifier(model, stored_in(model), (0, 1)) as verifier:
            verifier.finish()
        manifest, done = listed, "matches the manifest"
    else:
        with byte_bar(console, "checksums") as progress:
            manifest = make_manifest(model, progress)
        done = f"listed in {write_manifest(model, manifest).name}"
    seconds, size = time.monotonic() - start, manifest.total_bytes
    files = counted(len(manifest.files), "file")
    click.echo(f"{model}: {files}, {size / 1e9:.2f} GB, {done} ({size / 1e9 / seconds:.2f} GB/s)")
