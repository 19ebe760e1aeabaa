"""`laddertron check`: a deployment file and the files it names, validated without running anything.

No torch, no MPI: quick enough for an editor's save hook and for CI.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from pathlib import Path

import click

from ...engine.config import ConfigError, Deployment, Loaded, by_line, draft
from ...engine.daemon.tls import TlsFault, check_pair
from ..fabric_option import fabric_option

FILES = (
    "model.tokenizer",
    "parallel.tuning_file",
    "launch.hostfile",
    "launch.fabric",
    "daemon.api_key_file",
    "daemon.tls_cert",
    "daemon.tls_key",
)


def _value(deployment: Deployment, key: str) -> str | None:
    section, name = key.split(".")
    value: str | None = getattr(getattr(deployment, section), name)
    return value


def missing_files(loaded: Loaded) -> Iterator[str]:
    """One fault for each file that the deployment names and this machine has not."""
    for key in FILES:
        path = _value(loaded.deployment, key)
        if path is not None and not Path(path).exists():
            yield loaded.fault(key, f"{path}: no such file; relative paths stand against the config's folder")


def tokenizer_faults(loaded: Loaded) -> Iterator[str]:
    """The model's folder is one, and it or the tokenizer's has no tokenizer.json."""
    d = loaded.deployment
    file = Path(d.text_folder) / "tokenizer.json"
    if (Path(d.model.path) / "config.json").is_file() and file.parent.is_dir() and not file.is_file():
        key = "model.path" if d.model.tokenizer is None else "model.tokenizer"
        yield loaded.fault(
            key, f"{file} is missing: save it there with transformers' AutoTokenizer(…).save_pretrained(folder)"
        )


def tls_faults(loaded: Loaded) -> Iterator[str]:
    """What is wrong with the daemon's certificate and key, where both are there."""
    daemon = loaded.deployment.daemon
    if daemon.tls_cert and daemon.tls_key and Path(daemon.tls_cert).exists() and Path(daemon.tls_key).exists():
        try:
            check_pair(daemon.tls_cert, daemon.tls_key)
        except TlsFault as fault:
            yield loaded.fault(f"daemon.{fault.key}", str(fault))


def model_faults(loaded: Loaded, look: bool = True, bad: Set[str] = frozenset()) -> Iterator[str]:
    """What the model and the deployment ask of each other: readable, splits over the ranks, long enough. Unless `look`,
    the model is taken by its folder's name, if that is known. Keys in `bad` are not judged."""
    from ...models.config import from_folder
    from ...models.known import by_folder
    from ...models.shapes import ShapeError, check_shapes

    d = loaded.deployment
    folder, guess = Path(d.model.path), by_folder(Path(d.model.path).name)
    model, taken = (None, "") if guess is None else (guess.config, f" ({guess.name} by its folder's name)")
    if "model.path" in bad:
        return
    if look and not folder.is_dir():
        yield loaded.fault("model.path", f"{folder}: no such folder (check --no-model skips the model)")
    elif look:
        try:
            model, taken = from_folder(folder), ""
        except (OSError, ValueError) as error:
            yield loaded.fault("model.path", " ".join(str(error).split()))
            return
    if model is None:
        return
    if "parallel.tensor_parallel_size" not in bad:
        try:
            check_shapes(model, d.parallel.tensor_parallel_size)
        except ShapeError as error:
            yield loaded.fault("parallel.tensor_parallel_size", f"{error}{taken}")
    if d.model.max_model_len is not None and d.model.max_model_len > model.max_position_embeddings:
        yield loaded.fault(
            "model.max_model_len",
            f"{d.model.max_model_len} is more than the model's "
            f"max_position_embeddings={model.max_position_embeddings}{taken}",
        )
    layers = d.model.ladder_layers
    last = layers if isinstance(layers, int) else max((n + 1 for n in layers or ()), default=0)
    if last > model.num_layers:
        yield loaded.fault("model.ladder_layers", f"names {last} layers, the model has {model.num_layers}{taken}")


def summary(loaded: Loaded) -> str:
    """What the deployment is, in one line."""
    d = loaded.deployment
    p = d.parallel
    where = f"{len(d.launch.hosts)} hosts" if d.launch.hosts else d.launch.hostfile or "this host or the allocation"
    return (
        f"{loaded.name}: OK: {d.served_model_name}, tp {p.tensor_parallel_size} x {p.replicas} "
        f"= {d.world_size} ranks on {where}, wiring {d.model.wiring}, collective {p.collective}"
    )


@click.command(short_help="Validate a deployment file without running anything.")
@click.argument("config", type=click.Path())
@fabric_option
@click.option("--set", "overrides", multiple=True, metavar="SECTION.KEY=VALUE", help="Override one key of the file.")
@click.option("--no-model", is_flag=True, help="The weights and other files are elsewhere: check the file alone.")
def command(config: str, overrides: tuple[str, ...], no_model: bool) -> None:
    """Validate CONFIG, the files it names and how its model splits over the ranks.

    \b
    Every fault is one line, FILE:LINE: KEY: what is wrong, what is allowed; exit code 2.
      laddertron check deploy.yaml
      laddertron check configs/llama-3.1-405b-tp16.yaml --no-model
      laddertron check deploy.yaml --set parallel.tensor_parallel_size=4
    """
    found = draft(config, overrides)
    loaded = found.loaded
    faults = [*found.faults, *model_faults(loaded, not no_model, found.bad)]
    if not no_model:
        faults += [*missing_files(loaded), *tls_faults(loaded)]
        if "model.path" not in found.bad:
            faults += tokenizer_faults(loaded)
    if faults:
        raise ConfigError(sorted(faults, key=by_line))
    click.echo(summary(loaded))
