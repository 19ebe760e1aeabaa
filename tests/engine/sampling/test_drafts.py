"""Drafts looked up and rows taken, against brute force; edits behind drafts; drafts drawn as tokens are."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from laddertron.engine.batch import NewSequence
from laddertron.engine.request import SamplingParams
from laddertron.engine.sampling.decide import taken
from laddertron.engine.sampling.drafts import LONGEST, SHORTEST, DraftDraws, look_up
from laddertron.engine.sampling.penalties import SlotEdits
from laddertron.engine.sampling.sampler import Sampler


def brute_force(known: list[int], most: int) -> list[int]:
    """The latest of the longest matches, and what is behind it, token by token."""
    for length in range(LONGEST, SHORTEST - 1, -1):
        for at in range(len(known) - 1, length - 1, -1):
            if len(known) > length and known[at - length : at] == known[-length:]:
                return [(known[at:] * most)[i] for i in range(most)]
    return []


def test_drafts_are_what_followed_the_last_time(run_seed: int) -> None:
    """Every third text ends as it begins, which is a match."""
    dice = random.Random(run_seed)
    for number in range(3000):
        known = [dice.randrange(dice.choice((2, 4, 9))) for _ in range(dice.randrange(SHORTEST, 40))]
        most = dice.randrange(6)
        if repeats := number % 3 == 0:
            known, most = [*known, *known[:SHORTEST]], most + 1
        found = look_up(np.array(known, np.int32), most)
        assert found == (brute_force(known, most) if most else []), known
        assert found or not repeats


def test_a_prompt_that_is_copied_is_drafted_on() -> None:
    prompt = list(range(100, 140))
    assert look_up(np.array([*prompt, *prompt[:5]], np.int32), 8) == prompt[5:13]
    assert look_up(np.array([7, 8, 7, 8], np.int32), 5) == [7, 8, 7, 8, 7]
    assert look_up(np.array([1, 2, 3, 4], np.int32), 5) == []
    assert look_up(np.array([1, 1], np.int32), 5) == []


def test_rows_count_up_to_the_first_wrong_draft(run_seed: int) -> None:
    dice = random.Random(run_seed)
    for _ in range(2000):
        offset, fed, ids = list[int](), list[int](), list[int]()
        bad, want = list[bool](), list[bool]()
        for _ in range(dice.randrange(1, 4)):
            sound = True
            for row in range(dice.randrange(1, 5)):
                offset.append(row)
                fed.append(dice.randrange(2))
                bad.append(dice.random() < 0.1)
                sound = row == 0 or (sound and ids[-1] == fed[-1] and not bad[-1])
                want.append(sound)
                ids.append(dice.randrange(2))
        assert taken(*map(np.array, (offset, fed, ids, bad))).tolist() == want


def test_edits_behind_a_draft_leave_the_slot_as_it_is() -> None:
    """Penalties count the draft and bad words end behind it; without it nothing has changed."""
    params = SamplingParams(
        max_tokens=9, seed=1, presence_penalty=1.0, repetition_penalty=1.5, bad_word_ids=((4, 6), (5, 4, 7))
    )

    def edits(*outputs: int) -> SlotEdits:
        return SlotEdits(NewSequence(0, 0, 2, (1, 2, *outputs), params), 0, 50)

    def state(e: SlotEdits) -> tuple[list[int], list[float], list[int]]:
        columns, counts = e.seen
        return columns.tolist(), counts.tolist(), e.forbidden(0).tolist()

    held = edits(5)
    later = held.fork()
    later.append(4)
    assert state(later) == state(edits(5, 4))
    assert state(held) == state(edits(5))
    held.append(9)
    assert state(held) == state(edits(5, 9))
    assert state(later) == state(edits(5, 4))


@pytest.mark.parametrize(
    "keys",
    [
        {"temperature": 0.0, "repetition_penalty": 1.3},
        {"temperature": 1.0, "top_p": 0.9, "presence_penalty": 1.0, "logprobs": 3},
        {"temperature": 0.8, "min_p": 0.02, "bad_word_ids": ((4, 6), (5, 4, 7)), "min_tokens": 3},
        {"allowed_token_ids": tuple(range(20)), "logit_bias": ((3, 2.0),), "return_digest": True},
    ],
)
def test_drafts_are_drawn_as_the_sequences_own_tokens(keys: dict[str, Any], run_seed: int) -> None:
    """From the same logits a draft model draws the very ids that follow, three at a time, with noise, edits and
    filters; which of them were right is told later, and then it goes on from there."""
    dice, logits = random.Random(run_seed), torch.randn(24, 50, generator=torch.Generator().manual_seed(run_seed)) * 2
    params = SamplingParams(max_tokens=99, seed=run_seed, stop_token_ids=(1,), **keys)
    new = NewSequence(0, 1, 2, (8, 9, 7), params)
    sampler = Sampler(50, range(50), 1, lambda payload: payload[None], torch.device("cpu"))
    sampler.admit(new)
    drawn = [int(sampler.sample(row[None], [0]).ids[0]) for row in logits]
    draws = DraftDraws(50, range(50), 1, torch.device("cpu"), None)
    draws.admit(new)
    tokens, length = np.zeros((1, 64), np.int32), np.array([3])
    tokens[0, :3] = new.tokens
    at = 0
    while at < 20:
        later = iter(logits[at + 1 : at + 3, None])
        drafts = draws.draft(logits[at : at + 1], {0: 3}, tokens, length, partial(lambda rest, _: next(rest), later))
        assert drafts == {0: drawn[at : at + 3]}
        came = dice.randrange(1, 4)
        tokens[0, length[0] : length[0] + came] = drawn[at : at + came]
        length[0] += came
        at += came


def test_the_device_is_waited_for_before_logits_are_read() -> None:
    """A wait that ends with an error, as where a peer has died, comes before the host looks at the logits."""

    class Gone(Exception):
        pass

    def drain() -> None:
        raise Gone

    class Unread(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError(f"{func} before the wait")

    draws = DraftDraws(50, range(50), 1, torch.device("cpu"), None, drain=drain)
    draws.admit(NewSequence(0, 0, 2, (1, 2), SamplingParams(max_tokens=4, seed=1)))
    tokens, length = np.array([[1, 2, 0, 0]], np.int32), np.array([2])
    with pytest.raises(Gone):
        draws.draft(torch.zeros(1, 50).as_subclass(Unread), {0: 1}, tokens, length, lambda slots: torch.zeros(1, 50))
