"""Training losses: the next token, and another model's distribution over it (distillation)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .tokens import unpacked


@dataclass(frozen=True, slots=True)
class Distil:
    """`weight` of the teacher's loss (the next token's has the rest); both sides at `temperature`; of the teacher's
    logits the `top_k` largest alone (0: all), the student's compared over the same tokens."""

    weight: float = 0.0
    temperature: float = 1.0
    top_k: int = 0


def next_token(logits_BTV: Tensor, ids: Tensor, taught: Tensor) -> Tensor:
    """The sum over taught tokens of -log p, in nats."""
    losses = F.cross_entropy(logits_BTV.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return torch.where(taught.flatten(), losses, 0.0).sum()


def divergence(student_BTV: Tensor, teacher_BTV: Tensor, taught: Tensor, how: Distil) -> Tensor:
    """The sum over taught tokens of KL(teacher | student) at the temperature, times its square (so that gradients keep
    their size; Hinton et al., arXiv 1503.02531)."""
    student, teacher = student_BTV.float() / how.temperature, teacher_BTV.float() / how.temperature
    if how.top_k:
        teacher, chosen = teacher.topk(min(how.top_k, teacher.shape[-1]), dim=-1)
        student = student.gather(-1, chosen)
    log_q, log_p = student.log_softmax(-1), teacher.log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    return torch.where(taught, kl, 0.0).sum() * how.temperature**2


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Over held-out text, a token: loss (nats) and perplexity; against another model, the mean KL of what it and this
    one expect next (nats), and how often both would say the same."""

    tokens: int
    loss: float
    divergence: float | None = None
    agreement: float | None = None

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)


@torch.no_grad()
def held_out(model: nn.Module, ids_N: np.ndarray, context: int, original: nn.Module | None = None) -> HeldOut:
    """The loss of every taught token after the first, in separate pieces of `context`."""
    device = next(model.parameters()).device
    sums = torch.zeros(4, dtype=torch.float64)  # tokens, loss, divergence, agreements
    for start in range(0, len(ids_N) - 1, context):
        ids, taught = (x.to(device) for x in unpacked(ids_N[None, start : start + context + 1]))
        logits = model(ids[:, :-1]).float()
        measured = [taught.sum(), next_token(logits, ids, taught)]
        if original is not None:
            expected = original(ids[:, :-1]).float()
            same = (logits.argmax(-1) == expected.argmax(-1)) & taught
            measured += [divergence(logits, expected, taught, Distil()), same.sum()]
        sums[: len(measured)] += torch.stack([f.double() for f in measured]).cpu()
    tokens, loss, apart, same_tokens = sums.tolist()
    if not tokens:
        raise ValueError("no token of the held-out text is taught: give more of it")
    beside = (apart / tokens, same_tokens / tokens) if original is not None else (None, None)
    return HeldOut(int(tokens), loss / tokens, *beside)
