"""A checkpoint whose answers are known: each token follows from the one before it, by weights that are written.

`scripts`: what follows each mark, a special token of its own with which a chat template may end its prompt. Where a
grammar forbids that, and after any other token, all tokens are equally likely.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import checkpoints
import torch
from tiny_text import byte_level, write_folder
from tokenizers import AddedToken

HERMES = (
    "{% for t in tools or [] %}[{{ t.function | tojson }}]{% endfor %}{% for m in messages %}<|{{ m.role }}|>"
    "{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>"
    "{{ '<|calls|>' if tools and messages[-1].role == 'user' else '<|says|>' }}{% endif %}"
)
"""Ends with the mark `<|calls|>` where a user speaks and there are tools, else with `<|says|>`."""
REASONS = HERMES.replace(
    "{{ m.content", "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content"
).replace("<|says|>", "<|thinks|>")
"""The same of a model that reasons, with the mark `<|thinks|>`."""
_LOGIT = 40.0


def save(folder: Path, scripts: Mapping[str, str], template: str = HERMES, **overrides: Any) -> Path:
    """Writes the folder. An answer is cut at `|`, into tokens that no other place has. `overrides`: of checkpoints."""
    tokenizer = byte_level()
    pieces = [piece for answer in scripts.values() for piece in answer.split("|")]
    assert len(set(pieces)) == len(pieces), "a piece has two followers"
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in scripts])
    tokenizer.add_tokens([AddedToken(piece, special=False, normalized=False) for piece in pieces])
    follower: dict[int, int] = {}
    for mark, answer in scripts.items():
        chain = [mark, *answer.split("|"), "</s>"]
        ids = [int(tokenizer.token_to_id(piece) or 0) for piece in chain]
        follower |= dict(pairwise(ids))
    vocab = tokenizer.get_vocab_size()
    hidden = -(-vocab // 64) * 64
    checkpoints.save(folder, "llama", tokenizer=False, vocab_size=vocab, hidden_size=hidden, **overrides)

    def written(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        for name, tensor in tensors.items():
            if name.endswith(("o_proj.weight", "down_proj.weight", "lm_head.weight", "embed_tokens.weight")):
                tensor.zero_()
            elif name.endswith("norm.weight"):
                tensor.fill_(1.0)
        tensors["model.embed_tokens.weight"][range(vocab), range(vocab)] = 1.0
        tensors["lm_head.weight"][list(follower.values()), list(follower)] = _LOGIT / hidden**0.5
        return tensors

    checkpoints.edit_tensors(folder, written)
    return write_folder(folder, tokenizer, template)
