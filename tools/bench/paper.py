"""`laddertron bench paper`: the published sweep of Ladder Residual with dummy weights, by the ranks of an
mpirun, and its rows next to the published and the simulated ones.

The ranks of one group measure, the others of the mpirun wait; every variant is loaded, timed and freed in its turn.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.box import SIMPLE
from rich.table import Table

from ...launchers.cli.commands.check import read_model
from ...models.config.dialects import stock_json
from ...models.config.known_models import known
from ...models.config.model_config import ModelConfig, make_wiring
from ...models.config.parts import Wiring, declaration
from ...topology.cost.cost import Shape
from ...topology.hardware.presets import GPU_MODELS
from ...topology.placement.identity import Identity
from ..plan.published import SPEEDUPS, TOKENS
from ..plan.roofline import Load, SimulatedGroup, gpu_rates, links
from ..plan.step_simulator import law
from .bench import Case
from .bench_measure import Row, Say, measure, roomy
from .picture import picture

WIRINGS = ("standard", "parallel", "ladder", "desync-2", "desync-4", "none")
PROMPT, GENERATE = 1024, 512


@dataclass(frozen=True, slots=True)
class Sweep:
    """A model of the paper: `name` there, the smallest group that has room for it on GPUs of 80 GB, batch sizes."""

    architecture: str
    name: str
    least: int
    batches: tuple[int, ...]


SWEEPS = {
    "8b": Sweep("llama-3.1-8b", "8B", 2, (1, 4, 16, 64)),
    "70b": Sweep("llama-3.1-70b", "70B", 4, (1, 4, 16, 64)),
    "405b": Sweep("llama-3.1-405b", "405B", 16, (1, 4, 8, 16)),
}


@dataclass(frozen=True, slots=True)
class Asked:
    """The measurements to make. scale: divides layers, heads, widths and lengths, for machines that are too small for
    the model."""

    sweep: Sweep
    sizes: tuple[int, ...]
    batches: tuple[int, ...]
    peer: bool
    scale: int
    repeats: int
    overrides: tuple[str, ...]

    @property
    def cases(self) -> list[Case]:
        return [Case(batch, PROMPT // self.scale, GENERATE // self.scale) for batch in self.batches]


def scaled(config: ModelConfig, scale: int) -> ModelConfig:
    """With a scale-th of the layers, heads, FFN and vocabulary; 1: the model itself."""
    heads, layers = max(2, config.num_heads // scale), max(2, config.num_layers // scale)
    return replace(
        config,
        num_layers=layers,
        hidden_size=heads * config.head_dim,
        num_heads=heads,
        num_kv_heads=min(heads, config.num_kv_heads),
        ffn_size=config.ffn_size // scale,
        vocab_size=config.vocab_size // scale,
        wiring=make_wiring("standard", layers),
    )


def wired(name: str, layers: int, tp: int) -> Wiring:
    return make_wiring(name, layers, tensor_parallel_size=tp if name.startswith("desync") else None)


def run(asked: Asked, identity: Identity, say: Say, keep: Callable[[list[Row]], None]) -> None:
    """Every rank of the mpirun calls it. keep: called on rank 0 with each variant's rows. Raises what `build` does."""
    for tp, wiring in product(asked.sizes, WIRINGS):
        say(f"loading tp {tp}, {wiring}")
        with TemporaryDirectory(prefix="laddertron-paper-") as folder:
            rows = _variant(asked, identity, tp, wiring, Path(folder), say)
        if identity.rank == 0:
            mark = {"tp": tp, "wiring": wiring, "peer": asked.peer, "scale": asked.scale, "model": asked.sweep.name}
            keep([row | mark for row in rows])


def _variant(asked: Asked, identity: Identity, tp: int, wiring: str, folder: Path, say: Say) -> list[Row]:
    import torch

    from ...engine.step.build import build
    from ...launchers.rank.rank import DeviceError, choose_device, join_group, set_threads
    from .bench_rank import Bench, bench

    config = scaled(known(asked.sweep.architecture), asked.scale)
    declared = "standard" if wiring == "none" else wiring
    fields = stock_json(config, {"eos_token_id": 1})
    fields["laddertron_wiring"] = declaration(wired(declared, config.num_layers, tp))
    (folder / "config.json").write_text(json.dumps(fields))
    keys = {
        "model.load_format": "dummy", "model.wiring": "no-communication" if wiring == "none" else "auto",
        "model.max_model_len": max(case.prompt + case.generate for case in asked.cases),
        "parallel.tensor_parallel_size": tp, "parallel.replicas": identity.size // tp,
    }  # fmt: skip
    words = [f"{key}={value}" for key, value in keys.items()]
    deployment = roomy(read_model(str(folder), [*words, *asked.overrides]), asked.cases)
    rows: list[Row] = []

    def lead(ranks: Bench) -> None:
        if identity.rank == 0:
            rows.extend(measure([(wiring, ranks)], asked.cases, asked.repeats, say))

    set_threads(deployment, identity)
    with join_group(deployment, identity) as communicator:
        if not asked.peer and communicator.backend != "nccl":
            raise DeviceError(
                f"--p2p off disables a path of NCCL, and backend {communicator.backend} has none: leave it out"
            )
        built = build(deployment, communicator, choose_device(deployment, identity))
        bench(built, communicator, lead)
    del built
    gc.collect()
    torch.cuda.empty_cache()
    return rows


@dataclass(frozen=True, slots=True)
class Compared:
    """A measured row with the others: tokens/s and times standard's, each measured, published and simulated on H100.
    ratio: L/c, as what communicating adds to computing; None where one of the two was not measured."""

    row: Row
    rates: tuple[float | None, ...]
    gains: tuple[float | None, ...]
    ratio: float | None

    @property
    def law(self) -> float | None:
        return law(1.0, self.ratio) if self.row["wiring"] == "ladder" and self.ratio is not None else None


def compared(rows: Sequence[Row], sweep: Sweep) -> Iterator[Compared]:
    """The rows of one model by size, peer access and batch."""
    measured = {(row["tp"], row["peer"], row["batch"], row["wiring"]): row["decode_tok_s"][0] for row in rows}
    for row in sorted(rows, key=lambda r: (r["tp"], not r["peer"], r["batch"], WIRINGS.index(r["wiring"]))):
        place = row["tp"], row["peer"], row["batch"]
        own, standard, silent = (measured.get((*place, wiring)) for wiring in (row["wiring"], "standard", "none"))
        published, said_gain = _published(row, sweep)
        made, flat = (_simulated(row, wiring, sweep) for wiring in (row["wiring"], "standard"))
        yield Compared(
            row,
            (own, published, made),
            (own / standard if own and standard else None, said_gain, made / flat),
            silent / standard - 1 if silent and standard else None,
        )


def _published(row: Row, sweep: Sweep) -> tuple[float | None, float | None]:
    """Tokens/s, and times standard's: of ladder at batch 4 the paper has that of more models."""
    peer = "p2p" if row["peer"] else "no p2p"
    if row["scale"] != 1 or row["tp"] != max(8, sweep.least):
        return None, None
    published = TOKENS.get((sweep.name, "2 nodes" if row["tp"] > 8 and row["peer"] else peer, row["batch"]), {})
    own = published.get(row["wiring"])
    if own is None and (row["wiring"], row["batch"]) == ("ladder", 4):
        return None, SPEEDUPS[peer].get(sweep.name)
    return own, own / published["standard"] if own else None


def _simulated(row: Row, wiring: str, sweep: Sweep) -> float:
    """Tokens/s on nodes of eight H100s, by the prices of `plan`."""
    config, tp = scaled(known(sweep.architecture), row["scale"]), row["tp"]
    inside, rate = ("nvlink", 450e9) if row["peer"] else ("pcie", None)
    shape = Shape(max(1, tp // 8), min(tp, 8), inside, "ib", 8, rate, 50e9)  # type: ignore[arg-type]
    group = SimulatedGroup(config, tp, gpu_rates(GPU_MODELS["H100"].device(0, "", 0)), links("nccl", shape))
    load = Load(decodes=row["batch"], context=row["prompt"] + row["generate"] / 2)
    return float(row["batch"] / group.step(load, wired(wiring, config.num_layers, tp)).total_s)


def paper_table(comparison: Sequence[Compared]) -> Table:
    table = Table(
        title="decoded tokens/s and times standard's: measured, published, simulated (H100)",
        title_style="dim", title_justify="left", padding=(0, 1, 0, 0), pad_edge=False, box=SIMPLE,
    )  # fmt: skip
    names = ("tp", "P2P", "batch", "wiring", "tok/s", "publ.", "sim.", "gain", "publ.", "sim.", "law", "L/c")
    for name in names:
        table.add_column(name, justify="left" if name == "wiring" else "right", no_wrap=True)
    for one in comparison:
        rates = ["" if rate is None else f"{rate:,.{int(rate < 1000)}f}" for rate in one.rates]
        gains = ["" if gain is None else f"{gain:.2f}" for gain in (*one.gains, one.law, one.ratio)]
        row = one.row
        table.add_row(str(row["tp"]), "on" if row["peer"] else "off", str(row["batch"]), row["wiring"], *rates, *gains)
    return table


def paper_plot(comparison: Sequence[Compared], path: Path) -> None:
    """Ladder over standard against L/c, each source in a colour, and the law. Raises PlotError or ValueError."""
    ladder = [one for one in comparison if one.row["wiring"] == "ladder" and one.ratio is not None]
    with picture(path) as axes:
        end = max([2.0, *(one.ratio * 1.1 for one in ladder if one.ratio is not None)])
        points = [end * i / 200 for i in range(201)]
        axes.plot(points, [law(1.0, x) for x in points], color="#222", label="the law")
        for index, name in enumerate(("measured", "published", "simulated, H100")):
            mine = [(one.ratio, one.gains[index]) for one in ladder if one.gains[index] is not None]
            if mine:
                axes.scatter(*zip(*mine, strict=True), color=f"C{index}", label=name)
        axes.set(xlabel="L / c, measured", ylabel="ladder over standard", xlim=(0, end))
        axes.legend(fontsize="small")
