"""Runs one case of cases.py on a FakeGpu: the engine's steps, with launches, copies, waits, memory, order and
compilations; or the collectives of every rank. Imported by gpu_dry.py, which forks a process for each case.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "helpers"), str(Path(__file__).parent)]

import torch  # noqa: E402
from cases import CAPABILITIES, CASES, DRAWS, Case  # noqa: E402
from fake_gpu import DEVICE, Graph  # noqa: E402
from stand_ins import FakeDriver, compiled, install, spilled, use_flashinfer  # noqa: E402

GPU = install()  # before laddertron is imported

from fake_rank import BATCHED, deployment_of, start, write_checkpoint  # noqa: E402
from laddertron.engine.request import Request, SamplingParams  # noqa: E402
from laddertron.engine.schedule.scheduler import Scheduler  # noqa: E402
from laddertron.engine.schedule.speculation import MOST, SpeculationRule  # noqa: E402
from laddertron.engine.step.engine import Engine, StepProgress, drain  # noqa: E402
from laddertron.engine.step.kv_capacity import working_bytes  # noqa: E402
from laddertron.engine.step.memory import graph_shapes  # noqa: E402
from laddertron.models.config.predictor import predictor_of  # noqa: E402
from laddertron.models.config.shapes import Shape  # noqa: E402
from laddertron.models.cuda import megatron_layers  # noqa: E402, F401
from laddertron.models.weights.tensor_reader import FP8  # noqa: E402

torch.set_grad_enabled(False)
torch.set_num_threads(1)
DRIVER, ASKED = FakeDriver(GPU), use_flashinfer(GPU)

PROMPT, ANSWER, STEPS = 15, 8, 2
DRAFTED = 120
"""Tokens of an answer with drafts, all of which hold here: the host reads zeros from the device."""
OUTSIDE_LAYERS = 20
"""The most launches of a recorded step outside its layers."""
KINDS = ("launch", "to_device", "to_host", "wait")


@dataclass
class CaseResult:
    """`rows`: figures by name, of a step; `faults`: what must not be."""

    name: str
    faults: list[str] = field(default_factory=list)
    rows: dict[str, float] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)


def _sum(counts: Counter[tuple[str, str]], kind: str) -> int:
    return sum(n for (k, _), n in counts.items() if k == kind)


class Rank:
    """Every stage of a case's rank 0 in this process, behind one engine."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case = case
        built, self.memories, self.plans, self.first_graphs = start(GPU, case, 0, folder)
        self.stages, first = built, built[0]
        steps = [stage.runner._graphs for stage in built]
        self.at_start = [0 if graphs is None else len(graphs.recorded) for graphs in steps]
        self.draws = 0 if steps[0] is None else len(steps[0]._draws)
        limits = first.scheduler_limits
        if case.drafts:  # else drafts would have to pay, in the seconds of this machine
            limits = replace(limits, speculation=SpeculationRule(priced=False))
        self.engine = Engine(Scheduler(limits), first.runner, self.plans, StepProgress())
        self.working = [
            working_bytes(
                deployment_of(case, folder), stage.runner.model.shard, "nccl", torch.bfloat16,
                FP8 if "kv_cache_dtype" in case.engine else torch.bfloat16, stage.limits.max_model_len, DEVICE,
                predictor=predictor_of(stage.config) if case.engine.get("speculation") == "mtp" else None,
            )
            for stage in built
        ]  # fmt: skip
        self._number = 0

    def graphs(self, stage: int) -> dict[Shape, Graph]:
        """The graphs of a stage's steps that are recorded, in that order; those of draws follow the start's."""
        steps, first, at_start = self.stages[stage].runner._graphs, self.first_graphs[stage], self.at_start[stage]
        if steps is None:
            return {}
        places = (first + at + (self.draws if at >= at_start else 0) for at in range(len(steps.recorded)))
        return dict(zip(steps.recorded, map(GPU.graphs.__getitem__, places), strict=True))

    def add(self, count: int, prompt: int = PROMPT, answer: int = ANSWER, **params: Any) -> None:
        for _ in range(count):
            self._number += 1
            tokens = tuple((self._number + i) % 1000 for i in range(prompt))
            sampling = SamplingParams(max_tokens=answer, seed=self._number, **params)
            self.engine.add(Request(f"r{self._number}", tokens, sampling))

    def steps(self, count: int) -> tuple[Counter[tuple[str, str]], int]:
        """Runs `count` steps; returns their counts of device operations and the peak above the memory in use."""
        before, live = GPU.counts.copy(), GPU.live
        GPU.peak = live
        for _ in range(count):
            self.engine.step()
        return GPU.counts - before, GPU.peak - live

    def decode(self, params: dict[str, Any], seats: int) -> tuple[Counter[tuple[str, str]], int]:
        """The same of STEPS decode-only steps, after all prompts are prefilled."""
        self.add(seats, answer=DRAFTED if self.case.drafts else ANSWER, **params)
        self.steps(3 + 2 * (self.case.stages - 1))
        counted = self.steps(STEPS)
        for _ in drain(self.engine):
            pass
        return counted


def measure(case: Case, folder: Path, driver: FakeDriver, asked: Counter[str]) -> CaseResult:
    result, rank = CaseResult(case.name), Rank(case, folder)
    compilations, modules = len(driver.sources), set(asked)
    rank.add(2, 700, 3, temperature=0.0)
    rank.add(3, 2400, 3, temperature=0.0)
    prompts, most = rank.steps(1)
    mixed, peak = rank.steps(1)
    most = max(most, peak)
    for _ in drain(rank.engine):
        pass
    for name, counts in (("prompts", prompts), ("mixed", mixed)):
        result.rows |= {f"{name} {kind}": _sum(counts, kind) for kind in KINDS}
    for name, params in DRAWS.items():
        counts, peak = rank.decode(params, case.seats)
        most = max(most, peak)
        result.rows |= {f"{name} {kind}": _sum(counts, kind) / STEPS for kind in KINDS}
        expected = STEPS * (case.stages * case.recorded + (name != "top_p" and case.draws_recorded))
        if (recorded := _sum(counts, "replay")) != expected:
            result.faults.append(f"{name}: {recorded} replays in {STEPS} decode steps, not {expected}")
    check_mixed(result, rank)
    check_drafted(result, rank)
    check_start(result, rank)
    stages = [graphs for at in range(case.stages) if (graphs := rank.graphs(at))]
    for name, shape in (("recorded", (case.seats, 0)), ("recorded mixed", max(shapes_of(case), key=sum))):
        for kind in ("launch", "collective"):
            result.rows[f"{name} {kind}"] = sum(_sum(graphs[shape].counts, kind) for graphs in stages)
    draws = GPU.graphs[rank.at_start[0] :][:1] if case.draws_recorded else []
    result.rows["drawn launch"] = sum(_sum(graph.counts, "launch") for graph in draws)
    for seats in (1, 3, 16, 33):  # sizes and lengths that no step had before
        rank.add(min(seats, case.seats), 7 * seats, 3, temperature=0.7, top_k=5)
        for _ in drain(rank.engine):
            pass
    if new := {source.name for source, _ in driver.sources[compilations:]}:
        result.faults.append(f"compiled after warm-up: {', '.join(sorted(new))}")
    if more := set(asked) - modules:
        result.faults.append(f"FlashInfer compiles after warm-up: {', '.join(sorted(more))}")
    result.faults += sorted({f"forbidden: {what}" for what in GPU.forbidden})
    result.faults += [f"unordered: {what} ({n} times)" for what, n in Counter(GPU.order.faults).most_common(8)]
    weigh(result, rank, most)
    return result


def shapes_of(case: Case) -> tuple[Shape, ...]:
    """The shapes of a stage's steps that may be recorded."""
    return graph_shapes(case.seats, BATCHED, MOST * case.drafts)


def check_start(result: CaseResult, rank: Rank) -> None:
    """The start records every shape, or the largest alone; then each other one is recorded once, when it is used."""
    case, shapes = rank.case, shapes_of(rank.case)
    if not case.recorded:
        return
    graphs, at_start, expected = rank.graphs(0), rank.at_start[0], 1 if case.late else len(shapes)
    if at_start != expected or next(iter(graphs)) != max(shapes, key=sum):
        result.faults.append(f"{at_start} graphs are recorded at the start, not {expected}, the largest first")
    if not case.late:
        return
    used = set(map(id, GPU.replayed))
    if unused := [shape for shape, graph in list(graphs.items())[1:] if id(graph) not in used]:
        result.faults.append(f"recorded and not used: {unused}")
    if not 1 < len(graphs) < len(shapes) or len(GPU.graphs) != len(graphs) + rank.draws:
        recordings = len(GPU.graphs) - rank.draws
        result.faults.append(f"{recordings} recordings for {len(graphs)} steps that were used, of {len(shapes)}")


def check_mixed(result: CaseResult, rank: Rank) -> None:
    """Steps of decodes with up to eight prompts of at most 1,024 rows are replays, one a stage and one of the draw
    where that is recorded: none is computed eagerly; a layer of a dense model launches at most twelve kernels. A stage
    cuts prompts into chunks of 256 tokens, so a pipeline's steps get more of the long ones."""
    case, eager = rank.case, list[int]()
    if not case.mixes:
        return
    for stage in rank.stages:
        model = stage.runner.model
        model.forward_streams = partial(_counted, eager, model.forward_streams)
    before, replayed, many = rank.plans.steps, len(GPU.replayed), case.stages
    for count, prompt in ((8, 15), (8, 16), (1, 2), (3, 80), (many, 500), (2 * many, 512)):
        rank.add(count, prompt, temperature=0.8, answer=40)
        rank.steps(4)
    for _ in drain(rank.engine):  # also what is in flight between stages
        pass
    replays, steps = GPU.replayed[replayed:], rank.plans.steps - before
    if eager:
        result.faults.append(f"{len(eager)} steps with at most 1,024 prompt rows were computed eagerly")
    if len(replays) != (expected := (case.stages + case.draws_recorded) * steps):
        result.faults.append(f"{len(replays)} replays in {steps} steps, some with prompts, not {expected}")
    mixed = {id(graph) for at in range(case.stages) for shape, graph in rank.graphs(at).items() if min(shape)}
    if len(used := mixed.intersection(map(id, replays))) < 4 * case.stages:
        result.faults.append(f"{len(used)} graphs of steps with prompts were used")
    launches = max(_sum(GPU.graphs[first].counts, "launch") for first in rank.first_graphs)
    if case.dense and launches > 12 * case.layers // case.stages + OUTSIDE_LAYERS:
        result.faults.append(f"{launches} launches in a recorded step with prompts of {case.layers} layers")


def check_drafted(result: CaseResult, rank: Rank) -> None:
    """A step of sequences with drafts replays a graph in which each is one prompt, and the recorded draw of all its
    rows; its figures are those of one sequence."""
    case = rank.case
    if not case.drafts:
        return
    for sequences, rows in ((1, 16), (5, 64)):
        rank.add(sequences, answer=DRAFTED, temperature=0.0)
        rank.steps(5)
        replayed = len(GPU.replayed)
        counts, _ = rank.steps(STEPS)
        if sequences == 1:
            result.rows |= {f"drafted {kind}": _sum(counts, kind) / STEPS for kind in KINDS}
        joined = rank.graphs(0)[0, rows]
        if (replays := sum(graph is joined for graph in GPU.replayed[replayed:])) != STEPS:
            result.faults.append(f"{replays} replays of {rows} rows in {STEPS} steps of {sequences} with drafts")
        if (replays := _sum(counts, "replay")) != STEPS * (1 + case.draws_recorded):
            result.faults.append(f"{replays} replays in {STEPS} steps of {sequences} sequences with drafts")
        for _ in drain(rank.engine):
            pass


def _counted(steps: list[int], forward: Any, *arguments: Any) -> Any:
    steps.append(len(arguments))
    return forward(*arguments)


def weigh(result: CaseResult, rank: Rank, step: int) -> None:
    """The bytes taken and the bytes that engine/step/memory.py reserves for them, of the stage that comes nearest."""
    reserved, memories = rank.working, rank.memories
    for name, taken, parts in (
        ("step", [step], ("activations", "all-reduces in flight", "draws")),
        ("attention", [m.attention for m in memories], ("attention workspace",)),
        ("recorded", [m.recorded for m in memories], ("CUDA graphs",)),
        ("loading", [m.loading for m in memories], tuple(reserved[0])),
    ):
        rooms = [sum(parts_reserved.get(part, 0) for part in parts) for parts_reserved in reserved]
        bytes_taken, room = max(zip(taken, rooms, strict=False), key=lambda pair: pair[0] - pair[1])
        result.memory |= {name: bytes_taken, f"{name} kept": room}
        # NOTE: torch's attention computes its scores in one piece on fake tensors, which a GPU's kernels do not.
        if bytes_taken > room and (name != "step" or rank.case.recorded):
            result.faults.append(f"memory of {name}: {bytes_taken >> 20} MiB taken, {room >> 20} MiB reserved")


def check_kernels(result: CaseResult, driver: FakeDriver) -> None:
    """Each specialisation that a call site asked for, compiled for every capability."""
    for source, options in driver.sources:
        kinds, constants = " ".join(source.signature.values()), " ".join(map(str, source.constants.values()))
        for capability in CAPABILITIES:
            if capability < 89 and "fp8" in kinds:
                continue
            if lost := spilled(compiled(source, options, capability).asm["cubin"]):
                where = f"{source.name} ({kinds}; {constants}) for {capability}"
                result.faults.append(f"{where}: {lost} bytes spilled a thread")


def collectives(case: Case, folder: Path) -> CaseResult:
    """Whether every rank sets off the same collectives in the same order, from its first to those of recorded steps."""
    result, orders = CaseResult(case.name), dict[str, list[str]]()
    GPU.checks_order = False
    for rank in range(case.tp):
        GPU.collectives.clear()
        start(GPU, case, rank, folder)
        digest = hashlib.sha256(repr(GPU.collectives).encode()).hexdigest()[:12]
        orders.setdefault(f"{len(GPU.collectives)} collectives {digest}", []).append(str(rank))
    result.rows = {f"{order} of ranks {' '.join(ranks)}": len(ranks) for order, ranks in orders.items()}
    if len(orders) != 1:
        result.faults.append(f"ranks differ in their collectives: {'; '.join(result.rows)}")
    return result


def run(name: str, every_rank: bool = False) -> dict[str, Any]:
    """The case's result, as a dictionary; once a process. every_rank: of the collectives of its ranks."""
    case = next(case for case in CASES if case.name == name)
    if every_rank:
        case = replace(case, layers=max(2, case.stages), engine={**case.engine, "max_num_seqs": 4})
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_checkpoint(Path(folder) / "model", case)
        with GPU:
            result = collectives(case, checkpoint) if every_rank else measure(case, checkpoint, DRIVER, ASKED)
    if not every_rank:
        check_kernels(result, DRIVER)
    return asdict(result)
