"""Recorded decode steps: which sizes, when they are refused, and the same answers with and without them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import checkpoints
import lane_checkpoints
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laddertron.engine.batch import Chunk
from laddertron.engine.schedule.speculation import MOST
from laddertron.engine.step.cuda_graphs import (
    CudaRecorder,
    GraphsError,
    StepGraphs,
    _joined,
    collectives_refuse,
    graphed,
    model_refuses,
    recorded_at_start,
)
from laddertron.engine.step.memory import MOST_GRAPHED, graph_shapes, graph_sizes
from laddertron.models.attention import StepLayout
from laddertron.models.config.known_models import known
from laddertron.models.cuda.workspace import prompts_of
from laddertron.models.stages import make_stages
from laddertron.topology.comm.ledger import Ledger
from recorded_graph import BATCHED, TapeRecorder

Ranks = Callable[..., list[Any]]


@given(st.integers(1, 2000), st.data())
def test_every_step_has_a_size(most: int, data: st.DataObject) -> None:
    """Each number of sequences up to the limit is padded to the next size: by at most a third of the step from 16 on,
    below by less than its own number; the sizes are few."""
    sizes = graph_sizes(most)
    assert sizes == tuple(sorted(set(sizes)))
    assert sizes[-1] == min(most, MOST_GRAPHED)
    assert len(sizes) <= 16
    count = data.draw(st.integers(1, sizes[-1]))
    size = min(size for size in sizes if size >= count)
    assert size - count <= (size / 3 if count >= 16 else count - 1)


@given(st.integers(1, 2000), st.integers(1, 8192), st.integers(0, 600), st.lists(st.integers(2, 600), max_size=12))
def test_which_steps_are_recorded(seats: int, most: int, decodes: int, prompts: list[int]) -> None:
    """Every step of at most 512 decodes, 1,024 prompt rows and eight prompts that score no prompt, and no other; in the
    smallest shape that has room, which two ranks with the same chunks therefore share."""
    decodes = min(decodes, seats)
    while decodes + sum(prompts) > most or not decodes + len(prompts):
        decodes, prompts = (1, []) if not prompts else (decodes, prompts[1:])
        decodes = min(decodes, most)
    graphs = StepGraphs.__new__(StepGraphs)
    graphs.shapes = sorted(graph_shapes(seats, most), key=lambda shape: shape[::-1])
    chunks = [Chunk(slot, 5, 1, True) for slot in range(decodes)]
    chunks += [Chunk(1000 + slot, 0, count, True) for slot, count in enumerate(prompts)]
    shape = graphs.shape(chunks)
    recorded = decodes <= MOST_GRAPHED and sum(prompts) <= 1024 and len(prompts) <= 8
    assert (shape is not None) == recorded
    if shape is not None:
        assert shape[0] >= decodes
        assert shape[1] >= sum(prompts)
        assert (shape[1] == 0) == (not prompts)
        smaller = [s for s in graph_shapes(seats, most) if s[0] >= decodes and (s[1] >= sum(prompts) > 0 or s[1] == 0)]
        assert prompts == [] or shape[1] == min(rows for _, rows in smaller if rows)
        scored = chunks[-1]._replace(prompt_logprobs=True)
        assert (graphs.shape([*chunks[:-1], scored]) is None) == bool(prompts)


@given(st.integers(1, 300), st.integers(300, 4096), st.lists(st.integers(0, MOST), min_size=1, max_size=300))
def test_which_steps_with_drafts_are_recorded(seats: int, tokens: int, drafts: list[int]) -> None:
    """All of at most 512 rows, in a shape with room: rows of a sequence are joined, unless there are few drafts."""
    counts = [1 + count for count in drafts[:seats]]
    while sum(counts) > min(tokens, MOST_GRAPHED):
        counts.pop()
    graphs = StepGraphs.__new__(StepGraphs)
    graphs.shapes = sorted(graph_shapes(seats, tokens, MOST), key=lambda shape: shape[::-1])
    graphs.sizes = tuple(decodes for decodes, rows in graphs.shapes if not rows)
    graphs.drafted = tuple(rows for decodes, rows in graphs.shapes if not decodes)
    rows = [Chunk(slot, 5 + row, 1, True) for slot, count in enumerate(counts) for row in range(count)]
    shape = graphs.shape(rows)
    assert shape is not None
    if shape[0]:
        assert shape[0] >= len(rows)
        assert shape[1] == 0
        assert len(rows) < 2 * len(counts)
    else:
        assert prompts_of(shape) >= len(counts)
        assert shape[1] >= len(rows) > len(counts)


def test_the_rows_of_a_sequence_are_joined() -> None:
    """Starts, lengths and slots of the sequences; the tokens stay where they are."""
    zeros = torch.zeros(6, dtype=torch.int64)
    slots = np.array([4, 4, 4, 0, 2, 2])
    layout = StepLayout(zeros, list(range(7)), [8, 9, 10, 3, 6, 7], zeros[None], zeros, zeros, 6, True, slots)
    joined = _joined(layout)
    assert (joined.query_start, joined.kv_len, joined.decode) == ([0, 3, 4, 6], [10, 3, 7], 0)
    assert joined.rows is not None
    assert joined.rows.tolist() == [4, 0, 2]


def test_sizes_by_example() -> None:
    assert graph_shapes(5, 64, MOST)[5:] == ((0, 2), (0, 4), (0, 8), (0, 16), (0, 32), (0, 64))
    assert graph_shapes(1, 64, MOST)[2:] == ((0, 2), (0, 4), (0, 8), (0, 16))
    assert graph_shapes(256, 4096, MOST)[-1] == (0, 512)
    assert graph_shapes(5, 64) == ((1, 0), (2, 0), (4, 0), (5, 0), (5, 64))
    mixed = [(d, c) for c in (128, 256, 512, 1024) for d in (8, 64, 256)]
    assert graph_shapes(256, 4096)[-12:] == tuple(mixed)
    assert graph_shapes(600, 300)[-12:] == tuple((d, c) for c in (128, 256, 300) for d in (8, 64, 256, 512))
    assert graph_sizes(1) == (1,)
    assert graph_sizes(5) == (1, 2, 4, 5)
    assert graph_sizes(256) == (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


def test_when_steps_are_recorded() -> None:
    """auto takes them where all parts can; true insists and says what is missing; false is false."""
    assert graphed("auto", "cuda", True, "flashinfer", None) == (True, "on")
    assert graphed(True, "cuda", True, "flashinfer", None)[0]
    assert graphed(False, "cuda", True, "flashinfer", None) == (False, "off, as configured")
    lacking: list[tuple[str, str, bool, str, str | None]] = [
        ("a cpu", "cpu", True, "flashinfer", None),
        ("attention torch", "cuda", False, "torch", None),
        ("backend gloo", "cuda", True, "flashinfer", collectives_refuse("gloo", 2, False)),
    ]
    for reason, *arguments in lacking:
        use, why = graphed("auto", *arguments)  # type: ignore[arg-type]
        assert not use
        assert reason in why
        with pytest.raises(GraphsError, match=reason):
            graphed(True, *arguments)  # type: ignore[arg-type]


def test_which_collectives_may_be_recorded() -> None:
    """NCCL's, and those of a group of one, where nothing travels; a host's clock that plays a fabric may not."""
    assert collectives_refuse("nccl", 8, False) is None
    assert collectives_refuse("nccl", 1, True) is None
    assert collectives_refuse("native", 1, False) is None
    assert collectives_refuse("native", 1, True) is not None
    assert collectives_refuse("gloo", 2, False) is not None


def test_a_pipeline_that_hands_on_chosen_positions_is_not_recorded() -> None:
    """Of a model whose every other layer uses what the one before chose: if a stage begins with such a layer, every
    stage refuses, also those that neither send nor take."""
    config = replace(known("glm-5"), experts=None)
    assert config.latent is not None
    assert config.latent.index is not None
    full = tuple(layer % 2 == 0 for layer in range(config.num_layers))
    config = replace(config, latent=replace(config.latent, index=replace(config.latent.index, full=full)))
    for layers, refuses in (((26, 26, 26), False), ((25, 27, 26), True), ((26, 25, 27), True)):
        for stage in make_stages(config, layers):
            assert (model_refuses(stage.config, stage) is not None) is refuses, layers
    assert model_refuses(config, None) is None


def test_the_stand_in_repeats_what_it_noted() -> None:
    """A replay sees new values in the tensors, not new values of Python's."""
    recorder, x, out, factor = TapeRecorder(), torch.ones(3), torch.zeros(3), [2.0]

    def compute() -> None:
        out.copy_((x.view(3, 1) * factor[0]).flatten() + 1)

    replay = recorder.record(compute)
    x.fill_(5)
    factor[0] = 100.0
    replay()
    assert out.tolist() == [11.0, 11.0, 11.0]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    def make(recipe: str) -> Path:
        folder = tmp_path_factory.mktemp(recipe)
        return lane_checkpoints.save(folder) if recipe == "lanes" else checkpoints.save(folder, recipe)

    return make


@pytest.mark.parametrize(
    ("recipe", "size"),
    [
        ("ladder", 2),
        ("mistral", 1),
        *(pytest.param(recipe, 2, marks=pytest.mark.slow) for recipe in ("qwen3", "lanes")),
    ],
)
def test_ids_are_the_same_with_and_without_graphs(
    ranks: Ranks, checkpoint: Callable[[str], Path], recipe: str, size: int
) -> None:
    """Nine requests of different lengths through five slots: steps of one to five decodes, padded and not, with and
    without prompts. The same answers as without graphs and as the portable backend gives; every step was a replay.
    fp32; greedy on two ranks, drawn on one. The same again where ids stay on the device: the graphs take them from
    there, and no step waits for those of the one before."""
    folder, prompts = str(checkpoint(recipe)), checkpoints.prompts(9, seed=4)
    params = {"temperature": 0.8, "n": 2, "max_tokens": 5} if size == 1 else {"max_tokens": 5}
    args = {"folder": folder, "prompts": prompts, "params": params}
    portable, eager, recorded, overlapped = (
        ranks(size, "recorded_graph:generate", args | {"how": how})[0]
        for how in ("portable", "eager", "recorded", "overlapped")
    )
    assert overlapped["answers"] == recorded["answers"] == eager["answers"] == portable["answers"]
    assert (eager["replayed"], recorded["eager"], overlapped["eager"]) == (0, 0, 0)
    assert recorded["replayed"] == eager["eager"]
    assert overlapped["replayed"] == recorded["replayed"]
    # Every result but the last was read when the next step had been set off, from ids that no host had seen.
    assert overlapped["steps"] == {"late": overlapped["steps"]["late"], "waited": 1, "host": 0, "joined": 0}
    assert recorded["replayed"] >= 14
    assert recorded["computed"] == 2 * len(graph_shapes(5, BATCHED))


def test_random_mixes_give_the_same_ids(ranks: Ranks, checkpoint: Callable[[str], Path], run_seed: int) -> None:
    """Prompts of any length, through graphs of several sizes: prompts alone, with few and many decodes, in pieces."""
    folder, prompts = str(checkpoint("llama")), checkpoints.prompts(12, seed=run_seed)
    args = {"folder": folder, "prompts": prompts, "params": {"max_tokens": 4}}
    shapes = [(1, 0), (3, 0), (5, 0), *((decodes, rows) for rows in (5, 12, 33, 64) for decodes in (1, 3, 5))]
    eager = ranks(1, "recorded_graph:generate", args | {"how": "eager"})[0]
    found = ranks(1, "recorded_graph:generate", args | {"how": "overlapped", "shapes": shapes})[0]
    assert found["answers"] == eager["answers"]
    assert (found["eager"], found["replayed"]) == (0, eager["eager"])


@pytest.mark.parametrize(
    ("recipe", "size", "stages"),
    [
        ("llama", 2, 2),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("ladder", 3, 3), ("ladder", 4, 2), ("lanes", 4, 2))
        ),
    ],
)
def test_stages_record_their_steps(
    ranks: Ranks, checkpoint: Callable[[str], Path], recipe: str, size: int, stages: int
) -> None:
    """Rows, and what of a wiring is still pending, cross between replays, on every stage: the same answers as
    without stages and without graphs."""
    args = {"folder": str(checkpoint(recipe)), "prompts": checkpoints.prompts(9, seed=4), "params": {"max_tokens": 5}}
    plain = ranks(1, "recorded_graph:generate", args | {"how": "eager"})[0]
    found = ranks(size, "recorded_graph:generate", args | {"how": "recorded", "stages": stages})
    assert found[0]["answers"] == plain["answers"]
    assert {each["replayed"] for each in found} == {found[0]["replayed"]}
    assert found[0]["replayed"] >= 14
    assert {each["eager"] for each in found} == {0}
    assert {each["computed"] for each in found} == {2 * len(graph_shapes(5, BATCHED))}


def test_a_start_records_what_fits_into_its_time() -> None:
    """All that take 20 s together; else as many as do; one in any case."""
    assert [recorded_at_start(seconds, 25) for seconds in (0.0, 0.8, 0.81, 5.0, 20.0, 60.0)] == [25, 25, 24, 4, 1, 1]


@pytest.mark.parametrize("stages", [1, 2])
def test_graphs_are_recorded_at_their_first_use(ranks: Ranks, checkpoint: Callable[[str], Path], stages: int) -> None:
    """The second rank takes 9 s for a graph: both ranks of a group record two at the start and the same others in the
    same steps, and stages each by their own time. The same answers as without graphs, and no step is eager."""
    args = {"folder": str(checkpoint("ladder")), "prompts": checkpoints.prompts(9, seed=4), "params": {"max_tokens": 5}}
    plain = ranks(1, "recorded_graph:generate", args | {"how": "eager"})[0]
    found = ranks(2, "recorded_graph:generate", args | {"how": "recorded", "stages": stages, "graph_s": [0.1, 9.0]})
    count = len(graph_shapes(5, BATCHED))
    assert found[0]["answers"] == plain["answers"]
    assert [each["eager"] for each in found] == [0, 0]
    assert found[0]["replayed"] == found[1]["replayed"]
    first, second = ((each["at_start"], each["computed"]) for each in found)
    assert second[0] == count + 2
    assert count + 2 < second[1] <= 2 * count
    assert first == (second if stages == 1 else (2 * count, 2 * count))


def test_a_late_recording_is_logged_and_no_part_of_a_step_s_time() -> None:
    """The log says at the start what waits, and later what was recorded; `recorded_at` is when."""
    graphs, lines = StepGraphs.__new__(StepGraphs), list[str]()
    recorder, model = TapeRecorder(), SimpleNamespace(boundary="stages", states="of the last step")
    crossing: list[Any] = []

    def compute(shape: Any) -> None:
        crossing.append(model.boundary)
        model.states = "of a graph"

    graphs.shapes, graphs.sizes, graphs.drafted = [(1, 0), (4, 0), (4, 64)], (1, 4), ()
    parts: dict[str, Any] = {
        "_model": model, "_recorder": recorder, "_say": lines.append, "_greatest": lambda seconds: 15.0,
        "_boundary": "fixed", "reserved": 64 << 20, "_replays": {}, "recorded_at": 0.0,
        "_compute": compute, "_padding": lambda shape: (),
        "_stage": lambda shape: True,
    }  # fmt: skip
    for name, part in parts.items():
        setattr(graphs, name, part)
    graphs.record()
    assert list(graphs.recorded) == [(4, 64)]
    assert crossing == ["fixed"] * 4
    assert "2 of decode steps to 4 sequences, 1 with prompts to 64 tokens; 1 recorded in" in lines[0]
    assert lines[0].endswith("0 MiB of the 64 kept free for them; 2 wait for their first use: all would take 45 s")
    at_start = graphs.recorded_at
    graphs._capture_late((1, 0))
    assert list(graphs.recorded) == [(4, 64), (1, 0)]
    assert (model.boundary, model.states, recorder.computed) == ("stages", "of the last step", 5)
    assert graphs.recorded_at > at_start > 0
    assert lines[1].startswith("CUDA graphs: 1 decodes and 0 rows of prompts, recorded at the first use in")
    assert lines[1].endswith("0 MiB; 1 wait")


def test_steps_beyond_the_largest_graph_run_eagerly(ranks: Ranks, checkpoint: Callable[[str], Path]) -> None:
    folder, prompts = str(checkpoint("llama")), checkpoints.prompts(5, seed=6)
    args = {"folder": folder, "prompts": prompts, "params": {"max_tokens": 6}}
    plain = ranks(1, "recorded_graph:generate", args | {"how": "eager"})[0]
    found = ranks(1, "recorded_graph:generate", args | {"how": "recorded", "shapes": [(1, 0), (2, 0)]})[0]
    assert found["answers"] == plain["answers"]
    assert 0 < found["replayed"] < 18


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_cuda_graph_repeats_its_work() -> None:
    device = torch.device("cuda")
    x, out = torch.ones(64, device=device), torch.zeros(64, device=device)
    weight = torch.randn(64, 64, device=device)
    recorder = CudaRecorder(device, Ledger())
    replay = recorder.record(lambda: out.copy_(weight @ x))  # type: ignore[arg-type]
    x.copy_(torch.randn(64))
    replay()
    assert torch.allclose(out, weight @ x, atol=1e-4)
