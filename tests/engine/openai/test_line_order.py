"""The order of a job's lines, against brute force."""

from __future__ import annotations

import random
from typing import cast

from laddertron.engine.openai.batch_input import BatchLine
from laddertron.engine.openai.body import Body
from laddertron.engine.openai.line_order import LEAST_SHARED, PATIENCE, LineOrder, PreparedLine, shared_length
from laddertron.engine.openai.schema import COMPLETIONS
from laddertron.engine.request import SamplingParams
from planned_job import distinct_tokens


def add(order: LineOrder, number: int, prompt: tuple[int, ...], max_tokens: int = 8, salt: str = "") -> None:
    body = Body(COMPLETIONS, "tiny", SamplingParams(max_tokens, seed=0), max_tokens=max_tokens, cache_salt=salt)
    order.add(BatchLine(number, 100, f"c{number}", body=body), [prompt])


def ids(draw: random.Random, count: int) -> tuple[int, ...]:
    return tuple(draw.randrange(1000) for _ in range(count))


def prompt_of(ready: PreparedLine) -> tuple[int, ...]:
    return cast("list[tuple[int, ...]]", ready.prompts)[0]


def brute_shared(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def test_shared_length(run_seed: int) -> None:
    draw = random.Random(run_seed)
    for _ in range(300):
        one = tuple(draw.randrange(2) for _ in range(draw.randrange(40)))
        other = (*one[: draw.randrange(41)], *(draw.randrange(2) for _ in range(draw.randrange(5))))
        assert shared_length(one, other) == brute_shared(one, other)


def test_a_tree_of_prefixes_is_taken_depth_first(run_seed: int) -> None:
    """200 lines over twelve prefixes in three families, shuffled: only what differs from the line before is new, so
    that every prefix is computed once with a cache of one line. Each says how much of it is needed again."""
    draw = random.Random(run_seed)
    roots = [ids(draw, 2 * LEAST_SHARED) for _ in range(3)]
    prefixes = [(*root, *ids(draw, 2 * LEAST_SHARED)) for root in roots for _ in range(4)]
    prompts = [(*draw.choice([*roots, *prefixes]), *ids(draw, draw.randrange(1, 30))) for _ in range(200)]
    order = LineOrder(1000)
    for number, prompt in enumerate(prompts):
        add(order, number, prompt)
    rest, computed, before = list(prompts), 0, tuple[int, ...]()
    while order:
        ready = order.take()
        prompt = prompt_of(ready)
        assert prompt is prompts[ready.line.number]
        rest.remove(prompt)
        assert ready.shared == max((brute_shared(prompt, other) for other in rest), default=0)
        computed += len(prompt) - brute_shared(prompt, before)
        before = prompt
    assert not rest
    assert computed <= distinct_tokens(prompts) + 30 * len(prefixes), "a few tokens may be shared by chance"


def test_equal_prompts_follow_each_other(run_seed: int) -> None:
    """However short, and whatever all lines share: LineFlights answers them together."""
    draw = random.Random(run_seed)
    prompts = [ids(draw, 5) for _ in range(10)] * 3
    draw.shuffle(prompts)
    order = LineOrder(100)
    for number, prompt in enumerate(prompts):
        add(order, number, prompt)
    taken = [prompt_of(order.take()) for _ in prompts]
    assert all(taken[at] == taken[at + 1] == taken[at + 2] for at in range(0, 30, 3))


def test_other_salts_share_nothing() -> None:
    order = LineOrder(10)
    for number in range(8):
        add(order, number, tuple(range(100)), salt=f"s{number % 2}")
    assert [order.take().line.number % 2 for _ in range(8)] in ([0] * 4 + [1] * 4, [1] * 4 + [0] * 4)


def test_lines_that_share_nothing_mix_long_and_short(run_seed: int) -> None:
    """Equal ones keep the file's order, also with a template's tokens in common; else every second is the longest."""
    draw = random.Random(run_seed)
    template, order = ids(draw, 200), LineOrder(100)
    for number in range(50):
        add(order, number, (*template, *ids(draw, 20)))
    assert [order.take().line.number for _ in range(50)] == list(range(50))
    lengths = [draw.randrange(1, 5000) for _ in range(50)]
    for number, length in enumerate(lengths):
        add(order, number, (number, *ids(draw, 20)), max_tokens=length)
    rest = list(range(50))
    for turn in range(50):
        took = order.take().line.number
        assert took in (rest[0], max(rest, key=lambda number: lengths[number]))
        assert turn < 1 or rest[0] == took or lengths[took] == max(lengths[number] for number in rest)
        rest.remove(took)


def test_a_line_waits_a_bounded_time_for_those_that_share_prefixes(run_seed: int) -> None:
    """Lines of one prefix keep coming, as those of a long file do: another one is taken after PATIENCE look-aheads."""
    draw = random.Random(run_seed)
    most, prefix, order = 20, ids(draw, 200), LineOrder(20)
    add(order, -1, (*prefix, 1))
    assert order.take().line.number == -1
    add(order, 0, ids(draw, 50))
    for number in range(1, most):
        add(order, number, (*prefix, *ids(draw, 9)))
    taken: list[int] = []
    for number in range(most, 10 * most):
        taken.append(order.take().line.number)
        add(order, number, (*prefix, *ids(draw, 9)))
    assert taken.index(0) == PATIENCE * most


def test_lines_that_share_most_of_their_prompts_have_one_group(run_seed: int) -> None:
    """Also a conversation's growing prompts, and a line that comes after the others of its group were taken."""
    draw = random.Random(run_seed)
    system, order = ids(draw, 100), LineOrder(100)
    documents = [(*system, *ids(draw, 600)) for _ in range(4)]
    prompts = [(*document, *ids(draw, 20)) for document in documents for _ in range(5)]
    talk = ids(draw, 300)
    prompts += [talk[:length] for length in (120, 180, 240, 300)]
    late = prompts.pop(0)
    draw.shuffle(prompts)
    for number, prompt in enumerate(prompts):
        add(order, number, prompt)
    taken = [order.take() for _ in prompts]
    add(order, 100, late)
    taken.append(order.take())
    groups = [{ready.group for ready in taken if prompt_of(ready)[:700] == document} for document in documents]
    groups.append({ready.group for ready in taken if prompt_of(ready)[:120] == talk[:120]})
    assert [len(group) for group in groups] == [1] * 5
    assert len(set[int]().union(*groups)) == 5
