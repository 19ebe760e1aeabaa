"""The scheduler against a fake model: whatever arrives, ends, is cancelled or preempted, the books balance and every
sequence reads exactly its own prefix."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from schedule_play import play


@settings(
    max_examples=2000,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(st.binary(min_size=20, max_size=400))
def test_random_schedules_keep_the_books_and_end(data: bytes) -> None:
    """Random limits, arrivals (shared prompts, n > 1, priorities, deadlines, max_tokens 0), cancels, stops and commits
    that come a step late: no block is lost or used twice, every choice ends, with the tokens of its prompt alone."""
    play(data)
