"""The plan's advice in sentences (it may name another layout), and a deployment file for it. Pure; no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .layouts import Layout, by_cost
from .mixtures import mixture_words

if TYPE_CHECKING:
    from .estimate import CapacityEstimate

TIE_SHARE = 0.05
"""Predictions that differ by less than this share are considered equal."""
STOCK = ("standard", "split", "pipeline")
"""Layouts over two nodes that need no weights trained for them."""
LADDER_UP_TO = ((1, 1.3), (8, 2.0), (math.inf, 0.4))
"""Sequences (at most), and the L/c up to which ladder is the fastest layout of two nodes for them; above it, a pipeline
of stock weights is. L/c: the time that all-reduces add to a step, over the step without them. Measured:
docs/pictures/layouts.json."""


def fastest(ratio: float, batch: int) -> str:
    """The fastest of ladder and the stock layouts over two nodes."""
    return "ladder" if ratio <= next(up_to for most, up_to in LADDER_UP_TO if batch <= most) else "pipeline"


def describe(layout: Layout) -> str:
    """`2 replicas of tp 8, fp8, standard`."""
    many = f"{layout.replicas} replicas of " if layout.replicas > 1 else ""
    pipeline = f" x pp {layout.stages}" if layout.stages > 1 else ""
    kind = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}.get(layout.stored.weights, layout.stored.weights)
    return f"{many}tp {layout.tp}{pipeline}, {kind}, {layout.wiring.name}"


def recommend(plan: CapacityEstimate) -> tuple[str, ...]:
    """Sentences, most important first."""
    sentences = [] if plan.memory.fits else [f"As configured it {plan.memory.verdict}."]
    sentences += mixture_words(plan.mixtures)
    wiring = plan.question.config.wiring.name
    there = [x for x in by_cost(plan.layouts) if x.wiring.name == wiring]
    if there:
        sentences += _cost_words(plan, there)
        ladder = [x for x in by_cost(plan.layouts) if x.wiring.name == "ladder"]
        if wiring != "ladder" and ladder:
            text = f"If the model were trained as ladder: {describe(ladder[0])}, {_price(ladder[0])}"
            sentences.append(f"{text}{_needs(ladder[0])}.")
        quick = min(there, key=lambda x: x.fastest.step_s if x.fastest else 0.0)
        if quick.fastest:
            sentences.append(
                f"Fastest for one sequence: {describe(quick)}, {quick.fastest.step_s * 1e3:.1f} ms per "
                f"token{_needs(quick)}."
            )
    elif plan.layouts:
        sentences.append("No layout on these devices has room for this model: add nodes, or use quantised weights.")
    return (*sentences, *_wiring_words(plan), *_context_parallel_words(plan))


def _context_parallel_words(plan: CapacityEstimate) -> list[str]:
    price, size = plan.context_parallel, plan.question.placement.world.tp
    if price is None:
        return []
    crossing = "at no context of this model" if price.pays_from is None else f"from {price.pays_from:,} positions on"
    return [
        f"Dividing the latents over the {size} ranks (decode context parallelism, not built) would give the cache "
        f"{size}x the room. With {price.batch} sequences of {price.context:,} positions it would save "
        f"{price.saves_s * 1e3:.1f} ms a step and cost {price.costs_s * 1e3:.1f} ms for gathered queries and reduced "
        f"outputs; at this batch it is faster {crossing}."
    ]


def _cost_words(plan: CapacityEstimate, there: Sequence[Layout]) -> list[str]:
    """The cheapest layout for weights of this wiring, the cheapest for these weights, and the layout that was asked
    about. there: the layouts of this wiring, the cheapest first."""
    best, max_num_seqs = there[0], plan.memory.max_num_seqs
    own = next((x for x in plan.layouts if x.key == plan.question.key), None)
    if best is own:
        text = f"This layout is the cheapest on these GPUs, {_price(best)}"
        return [f"{text}{_more(best, max_num_seqs)}."]
    sentences = [f"Cheapest: {describe(best)}, {_price(best)}{_needs(best)}; {_keys(best)}."]
    mine = [x for x in there if x.stored == plan.question.stored]
    if mine and mine[0] not in (best, own):
        sentences.append(f"Cheapest with these weights: {describe(mine[0])}, {_price(mine[0])}; {_keys(mine[0])}.")
    if own is not None and own.cheapest and best.cheapest:
        ratio = own.cheapest.dollars / best.cheapest.dollars
        verdict = "equal within the model's error" if ratio < 1 + TIE_SHARE else f"{ratio:.1f}x the cheapest"
        sentences.append(f"This layout: {describe(own)}, {_price(own)}, {verdict}{_more(own, max_num_seqs)}.")
    return sentences


def _price(layout: Layout) -> str:
    speed = layout.cheapest
    if speed is None:
        return "does not fit"
    return f"${speed.dollars:.2f} per million output tokens ({speed.output_per_s:,.0f} tokens/s at batch {speed.batch})"


def _more(layout: Layout, max_num_seqs: int) -> str:
    speed = layout.cheapest
    per_replica = -(-speed.batch // layout.replicas) if speed else 0
    return f"; set engine.max_num_seqs to {per_replica} (now {max_num_seqs})" if per_replica > max_num_seqs else ""


def _needs(layout: Layout) -> str:
    stored = layout.stored
    return f"; needs an {stored.form.title} checkpoint validated for quality" if stored.quantised else ""


def keys_of(layout: Layout) -> dict[str, int]:
    keys = {"tensor_parallel_size": layout.tp}
    keys |= {"pipeline_parallel_size": layout.stages} if layout.stages > 1 else {}
    return keys | ({"replicas": layout.replicas} if layout.replicas > 1 else {})


def deployment_text(plan: CapacityEstimate, config: str | None) -> str:
    """A deployment file of the cheapest layout for these weights; the layout that was asked about if none fits.
    `config`: the file that was asked about, named in a comment for its other keys. Raises ValueError if nothing
    fits."""
    q = plan.question
    fits = [x for x in by_cost(plan.layouts) if x.stored == q.stored and x.wiring.name == q.config.wiring.name]
    if not fits and not plan.memory.fits:
        raise ValueError("no layout of these weights fits these devices: there is nothing to write")
    p, per_node = q.placement, max(count for _, count in q.placement.hosts)
    if fits and (speed := fits[0].cheapest):
        keys, seats = keys_of(fits[0]), max(1, -(-speed.batch // fits[0].replicas))
        why = f"{describe(fits[0])}: {_price(fits[0])}, predicted by `laddertron plan`"
        per_node = min(per_node, fits[0].gpus)
    else:
        keys = {"tensor_parallel_size": p.world.tp, "pipeline_parallel_size": p.world.stages}
        seats, why = plan.memory.max_num_seqs, "the layout that `laddertron plan` was asked about"
    source = f"# Other keys as in {config}.\n" if config else "# model.path: where the weights are.\n"
    lines = [f"# {why}.", f"{source}model:", f"  path: /models/{q.name}", f"  max_model_len: {q.keys.max_model_len}"]
    lines += ["parallel:", *(f"  {key}: {value}" for key, value in keys.items())]
    lines += ["launch:", f"  ranks_per_node: {per_node}", "engine:", f"  device: {'cuda' if q.keys.gpu else 'cpu'}"]
    lines += [f"  max_num_seqs: {seats}", f"  max_num_batched_tokens: {max(q.keys.max_num_batched_tokens, seats)}"]
    return "\n".join(lines) + "\n"


def _keys(layout: Layout) -> str:
    return f"parallel: {{{', '.join(f'{key}: {value}' for key, value in keys_of(layout).items())}}}"


def _wiring_words(plan: CapacityEstimate) -> list[str]:
    """The gain of ladder in this layout."""
    by_key = {(p.wiring, p.batch): p for p in plan.predictions}
    batches = sorted({p.batch for p in plan.predictions if p.fits})
    if plan.question.placement.world.tp == 1:
        return ["One rank per replica: there are no all-reduces for ladder to overlap."]
    if not batches:
        return []
    low, high = batches[0], batches[-1]
    if plan.question.config.wiring.name == "shortcut":
        return [
            "These weights read the experts' output three sub-blocks later, which overlap its all-reduce: at batch "
            f"{low} they are {by_key['shortcut', low].speedup:.2f}x as fast as with experts and MLP in one sum."
        ]
    gain, most = by_key["ladder", low], by_key["ladder", high]
    cost = by_key["standard", low].time
    text = (
        f"On this layout all-reduces are {cost.exposed_s / cost.total_s:.0%} of a standard step at batch {low}; ladder "
        f"is {gain.speedup:.2f}x as fast there and {most.speedup:.2f}x at batch {high}"
    )
    if plan.question.config.wiring.name == "standard":
        text += (
            "; these standard weights must be retrained for it"
            if max(gain.speedup, most.speedup) > 1 + TIE_SHARE
            else ", not worth retraining for"
        )
    times = {batch: by_key["standard", batch].time for batch in (low, high)}
    ratios = {batch: time.exposed_s / time.compute_s for batch, time in times.items()}
    sentences = [f"{text}."]
    if plan.question.shape.nodes > 1 and not plan.question.keys.gpu:  # measured on CPUs: no advice for GPUs
        best = (
            f"{fastest(ratio, batch)} at batch {batch}, where all-reduces add {ratio:.0%} to the computation"
            for batch, ratio in ratios.items()
        )
        sentences.append(f"By measurements on two emulated nodes the fastest layout is {', and '.join(best)}.")
    if (lanes := plan.question.config.lanes) is not None:
        own, hides = by_key["lanes", low], 2 * lanes.delay
        sentences.append(
            f"These weights have lanes, which read an output {hides} sub-blocks later: they hide all-reduces up to an "
            f"L/c of {hides}; here it is {ratios[low]:.1f}, and they are {own.speedup:.2f}x as fast as standard at "
            f"batch {low}."
        )
    return sentences
