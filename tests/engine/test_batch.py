"""The step plan's frame: what goes in comes out, and a damaged frame raises, whatever is damaged."""

from __future__ import annotations

import contextlib
import json
import math
import random
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from laddertron.engine.batch import (
    MAGIC,
    Batch,
    Chunk,
    NewSequence,
    StepResult,
    decode,
    decode_result,
    encode,
    encode_result,
)
from laddertron.engine.request import SamplingParams, TokenLogprob
from laddertron.topology.json_codec import ReadError, from_json

U32 = st.integers(0, 2**32 - 1)
SMALL = st.integers(0, 300)
REAL = st.floats(-1e6, 1e6)
PARAMS = st.builds(
    SamplingParams,
    max_tokens=SMALL,
    seed=st.integers(0, 2**64 - 1),
    min_tokens=SMALL,
    temperature=REAL,
    top_p=REAL,
    top_k=SMALL,
    min_p=REAL,
    presence_penalty=REAL,
    frequency_penalty=REAL,
    repetition_penalty=REAL,
    logit_bias=st.lists(st.tuples(U32, REAL), max_size=3).map(tuple),
    allowed_token_ids=st.lists(U32, max_size=3).map(tuple),
    stop_token_ids=st.lists(U32, max_size=3).map(tuple),
    n=st.integers(1, 128),
    logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
    grammar=st.none() | st.text(min_size=1, max_size=10),
)
TOKENS = st.lists(U32, max_size=5).map(tuple)
CHUNKS = st.builds(Chunk, SMALL, U32, SMALL, st.booleans(), st.booleans(), SMALL, SMALL)
BATCHES = st.builds(
    Batch,
    step=st.integers(0, 2**64 - 1),
    released=TOKENS,
    admitted=st.lists(st.builds(NewSequence, SMALL, SMALL, SMALL, TOKENS, PARAMS), max_size=3).map(tuple),
    blocks=st.lists(st.tuples(SMALL, TOKENS), max_size=3).map(tuple),
    copies=st.lists(st.tuples(U32, U32), max_size=3).map(tuple),
    chunks=st.lists(CHUNKS, max_size=4).map(tuple),
    split=SMALL,
)


@settings(max_examples=200, deadline=None, database=None, print_blob=True)
@given(BATCHES, st.randoms(use_true_random=False))
def test_frame_there_and_back_and_cut(batch: Batch, draw: random.Random) -> None:
    """Decoding gives the batch again, types included; every shorter frame, and one longer, raises."""
    frame = encode(batch)
    again = decode(frame)
    assert again == batch
    assert [type(v) for c in again.chunks for v in c] == [int, int, int, bool, bool, int, int] * len(batch.chunks)
    for at in {0, 1, len(frame) - 1, *(draw.randrange(len(frame)) for _ in range(20))}:
        with pytest.raises((ValueError, struct.error)):
            decode(frame[:at])
    with pytest.raises(ValueError, match="left over"):
        decode(frame + b"\0")


@settings(max_examples=200, deadline=None, database=None, print_blob=True)
@given(BATCHES, st.randoms(use_true_random=False))
def test_a_damaged_frame_raises_or_says_something_else(batch: Batch, draw: random.Random) -> None:
    """Random bytes overwritten, counts above all: no other exception, no endless loop, no giant allocation."""
    frame = bytearray(encode(batch))
    for _ in range(4):
        frame[draw.randrange(4, len(frame))] = draw.choice((0, 1, 127, 255))
    with contextlib.suppress(ValueError, struct.error):
        decode(bytes(frame))


def test_every_truncation_of_one_frame() -> None:
    """A frame with one of everything, cut at every byte."""
    params = SamplingParams(9, seed=3, logit_bias=((1, 2.0),), stop_token_ids=(5,), grammar="{}")
    batch = Batch(
        7, (1,), (NewSequence(0, 0, 2, (4, 5), params),), ((0, (3,)),), ((1, 2),), (Chunk(0, 0, 2, True, True),)
    )
    frame = encode(batch)
    assert decode(memoryview(frame)) == batch
    for at in range(len(frame)):
        with pytest.raises((ValueError, struct.error)):
            decode(frame[:at])


def test_frames_of_another_version_are_refused() -> None:
    frame = struct.pack("<I", MAGIC + 1) + encode(Batch(0))[4:]
    with pytest.raises(ValueError, match=f"is not {MAGIC:#x}: ranks of different versions"):
        decode(frame)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ([], "expected an object, got a list"),
        ({"max_tokens": 1}, "seed: missing"),
        ({"max_tokens": 1, "seed": 0, "top_q": 1}, "top_q: unknown key: did you mean 'top_p'"),
        ({"max_tokens": 1, "seed": 2**64}, "seed: expected less than 18446744073709551616, got 18446744073709551616"),
        ({"max_tokens": 1, "seed": True}, "seed: expected a whole number, got true"),
        ({"max_tokens": 1, "seed": 0, "top_p": float("nan")}, "top_p: expected a finite number"),
        ({"max_tokens": 1, "seed": 0, "min_p": 10**400}, "min_p: expected a"),
        ({"max_tokens": 1, "seed": 0, "logit_bias": [[1]]}, r"logit_bias\[0\]\[1\]: missing"),
        ({"max_tokens": 1, "seed": 0, "logit_bias": {"1": 1}}, "logit_bias: expected a list, got an object"),
        ({"max_tokens": 1, "seed": 0, "allowed_token_ids": [-1]}, r"allowed_token_ids\[0\]: expected greater than"),
        ({"max_tokens": 1, "seed": 0, "logprobs": 1.5}, "logprobs: expected a whole number, got 1.5"),
        ({"max_tokens": 1, "seed": 0, "grammar": 1}, "grammar: expected a string, got 1"),
    ],
)
def test_parameters_of_another_shape_are_refused(data: object, said: str) -> None:
    with pytest.raises(ReadError, match=said):
        from_json(SamplingParams, json.dumps(data).encode())


def test_num_tokens_adds_up() -> None:
    assert Batch(0, chunks=(Chunk(0, 0, 5, False), Chunk(1, 9, 1, True))).num_tokens == 6


def test_a_result_travels_whole() -> None:
    """From the last stage of a pipeline to rank 0: every field, NaN as NaN; to the other ranks the ids alone."""
    found = TokenLogprob(5, -0.1, ((5, -0.1), (7, -2.5)), 2**64 - 1)
    scored = {2: [found, TokenLogprob(9, float("nan"))]}
    more = {1: [(7, found), (8, None)]}
    result = StepResult(
        [5, 0], frozenset({3}), {1: found}, scored, {3: "no id is left"}, more, {1: 4}, {0: [6], 1: [8, 9]}
    )
    again = decode_result(encode_result(result))
    assert (again.tokens, again.nonfinite, again.logprobs) == ([5, 0], {3}, {1: found})
    assert again.failures == {3: "no id is left"}
    assert again.prompt_logprobs[2][0] == found
    assert math.isnan(again.prompt_logprobs[2][1].logprob)
    assert (again.more, again.drafted, again.proposed) == (result.more, result.drafted, result.proposed)
    ids = StepResult([5, 0], frozenset(), more={1: [(7, None), (8, None)]}, proposed=result.proposed)
    assert decode_result(encode_result(result, ids_alone=True)) == ids
