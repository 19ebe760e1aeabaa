"""The plan's advice in plain sentences, even where it is another layout or another engine. Pure; no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..models.config import ModelConfig
from ..topology.placement import Placement
from .plan_layouts import Layout, by_cost
from .plan_memory import Memory, Stored

if TYPE_CHECKING:
    from .plan import Prediction

NEAR = 0.05
"""Predictions that differ by less than this are the same to us."""


def describe(layout: Layout) -> str:
    """`2 replicas of tp 8, fp8, standard`."""
    many = f"{layout.replicas} replicas of " if layout.replicas > 1 else ""
    pipeline = f" x pp {layout.stages}" if layout.stages > 1 else ""
    kind = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}.get(layout.stored.weights, layout.stored.weights)
    return f"{many}tp {layout.tp}{pipeline}, {kind}, {layout.wiring.name}"


def recommend(
    config: ModelConfig,
    stored: Stored,
    room: Memory,
    placement: Placement,
    layouts: Sequence[Layout],
    predictions: Sequence[Prediction],
) -> tuple[str, ...]:
    """Sentences, most important first."""
    said = [] if room.fits else [f"As configured it {room.verdict}."]
    asked = (placement.tensor_parallel_size, 1, stored, config.wiring.name)
    own = next((x for x in layouts if (x.tp, x.stages, x.stored, x.wiring.name) == asked), None)
    there = [x for x in by_cost(layouts) if x.wiring.name == config.wiring.name]
    if there:
        said += _cost_words(config, stored, own, there, room.max_num_seqs)
        ladder = [x for x in by_cost(layouts) if x.wiring.name == "ladder"]
        if config.wiring.name != "ladder" and ladder:
            text = f"Were the model trained as ladder: {describe(ladder[0])}, {_price(ladder[0])}"
            said.append(f"{text}{_needs(ladder[0])}.")
        quick = min(there, key=lambda x: x.fastest.step_s if x.fastest else 0.0)
        if quick.fastest:
            said.append(
                f"Quickest for a single user: {describe(quick)}, a token every {quick.fastest.step_s * 1e3:.1f} ms "
                f"({quick.fastest.tokens_per_s:.0f} tokens/s){_needs(quick)}."
            )
    elif layouts:
        said.append("No layout on these devices has room for this model: add nodes, or take its fp8 weights.")
    return (*said, *_wiring_words(config, placement, predictions))


def _cost_words(
    config: ModelConfig, stored: Stored, own: Layout | None, there: Sequence[Layout], max_num_seqs: int
) -> list[str]:
    """The cheapest layout for weights of this wiring, and of these very weights; what was asked about beside it."""
    best = there[0]
    if best is own:
        text = f"Take it: of all layouts of these GPUs the one asked about is the cheapest, {_price(best)}"
        return [f"{text}{_more(best, max_num_seqs)}."]
    said = [f"Cheapest: {describe(best)}, {_price(best)}{_needs(best)}."]
    mine = [x for x in there if x.stored == stored]
    here = [x for x in mine if x.engine == "laddertron"]
    if mine and mine[0] not in (best, own):
        said.append(f"Cheapest with these very weights: {describe(mine[0])}, {_price(mine[0])}{_needs(mine[0])}.")
    if here and here[0] not in (best, own, mine[0]):
        said.append(f"Cheapest with these very weights on this engine: {describe(here[0])}, {_price(here[0])}.")
    if own is not None and own.cheapest and best.cheapest:
        ratio = own.cheapest.dollars / best.cheapest.dollars
        verdict = "no different within what this can tell" if ratio < 1 + NEAR else f"{ratio:.1f}x the cheapest"
        said.append(f"The layout asked about: {describe(own)}, {_price(own)}, {verdict}{_more(own, max_num_seqs)}.")
    return said


def _price(layout: Layout) -> str:
    speed = layout.cheapest
    if speed is None:
        return "does not fit"
    return f"${speed.dollars:.2f} a million output tokens ({speed.output_per_s:,.0f} tokens/s at batch {speed.batch})"


def _more(layout: Layout, max_num_seqs: int) -> str:
    speed = layout.cheapest
    each = -(-speed.batch // layout.replicas) if speed else 0
    return f"; that takes engine.max_num_seqs of {each}, configured are {max_num_seqs}" if each > max_num_seqs else ""


def _needs(layout: Layout) -> str:
    notes = []
    if layout.stored.weights == "fp8":
        notes.append("a checkpoint in fp8 whose answers satisfy you")
    if layout.engine == "another":
        notes.append("an engine with pipeline parallelism, which laddertron is not (vLLM and TensorRT-LLM are)")
    return f"; needs {' and '.join(notes)}" if notes else ""


def _wiring_words(config: ModelConfig, placement: Placement, predictions: Sequence[Prediction]) -> list[str]:
    """What ladder would bring to this very layout."""
    by_key = {(p.wiring, p.batch): p for p in predictions}
    batches = sorted({p.batch for p in predictions if p.fits})
    if placement.tensor_parallel_size == 1:
        return ["One rank a replica: there is no all-reduce, and nothing for a ladder to hide."]
    if not batches:
        return []
    low, high = batches[0], batches[-1]
    gain, most = by_key["ladder", low], by_key["ladder", high]
    cost = by_key["standard", low].time
    text = (
        f"On this layout all-reduces are {cost.exposed_s / cost.total_s:.0%} of a standard step at batch {low}; ladder "
        f"is {gain.speedup:.2f}x as fast there and {most.speedup:.2f}x at batch {high}"
    )
    if config.wiring.name == "standard":
        text += (
            "; these weights are standard and would have to be retrained for it"
            if max(gain.speedup, most.speedup) > 1 + NEAR
            else ", not worth retraining for"
        )
    return [f"{text}."]
