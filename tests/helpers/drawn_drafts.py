"""A step's result without a model: each draft is right with a probability."""

from __future__ import annotations

from random import Random

from laddertron.engine.batch import Batch, StepResult

TOKEN = 7


def drawn_result(batch: Batch, accepted: float, draw: Random) -> StepResult:
    """TOKEN for each chunk that samples, and for each draft up to the first wrong one. accepted: how probably a draft
    is right if the ones before it are."""
    more, drafted = {}, {}
    for chunk in batch.chunks:
        right = 0
        while right < chunk.drafts and draw.random() < accepted:
            right += 1
        more[chunk.slot], drafted[chunk.slot] = [(TOKEN, None)] * right, chunk.drafts
    return StepResult([TOKEN for chunk in batch.chunks if chunk.samples], more=more, drafted=drafted)
