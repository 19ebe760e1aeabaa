"""Checked bodies and a small model's limits, for tests of the door."""

from __future__ import annotations

from typing import Any

from laddertron.engine.openai.body import Body, check_body
from laddertron.engine.openai.schema import CHAT, COMPLETIONS
from laddertron.engine.openai.to_engine import RequestOrigin
from laddertron.engine.request import ModelLimits

LIMITS = ModelLimits(max_model_len=64, vocab_size=300, max_num_seqs=8, kv_tokens=1000, eos_token_ids=(1,))
ORIGIN = RequestOrigin("r0", "run-0", "a")
USER = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> Body:
    return check_body({"model": "m", "messages": USER, **fields}, CHAT)


def completion(**fields: Any) -> Body:
    return check_body({"model": "m", "prompt": "hi", **fields}, COMPLETIONS)
