"""A JSONL batch file as the mix of requests of `laddertron bench throughput`: ids, lengths, arrivals. No torch."""

from __future__ import annotations

import random
from pathlib import Path

from ...engine.config.schema import Deployment
from ...engine.openai.batch_input import read_lines
from ...engine.openai.body import Body
from ...engine.text.tokenizer import TextModel

NEW_TOKENS = 128
"""For a line that does not say how many it wants."""


def read_items(deployment: Deployment, file: Path, rate: float | None, seed: int) -> list[tuple[list[int], int, float]]:
    """(prompt, tokens to generate, arrival in seconds) of every prompt of every line. Raises ValueError naming the
    first bad line, or a prompt that the model is too short for."""
    text = TextModel.from_folder(Path(deployment.text_folder))
    dice, at, out = random.Random(seed), 0.0, []
    with file.open("rb") as lines:
        for line in read_lines(lines):
            if line.body is None:
                raise ValueError(f"{file}, line {line.number}: {line.error}")
            for prompt in _prompts(text, line.body):
                at += dice.expovariate(rate) if rate else 0.0
                out.append((prompt, line.body.max_tokens or NEW_TOKENS, at))
    if not out:
        raise ValueError(f"{file}: no requests in it")
    return out


def _prompts(text: TextModel, body: Body) -> list[list[int]]:
    if body.messages:
        return [text.encode_chat(list(body.messages))]
    return [text.encode(p) if isinstance(p, str) else list(p) for p in body.prompts]
