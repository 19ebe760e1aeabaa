"""Plots as SVG: finite numbers, labels apart, round ticks."""

from __future__ import annotations

import itertools
import random
import re
from xml.etree import ElementTree

import pytest
from laddertron.tools.plan.charts import LABEL_STEP, ChartSeries, Stack, _ticks, lines, stacks


def label_heights(svg: str, names: list[str]) -> list[float]:
    """Where the names at the lines' ends stand."""
    root = ElementTree.fromstring(svg)
    return sorted(float(t.get("y", "nan")) for t in root.iter("text") if t.text in names)


def test_random_lines_are_finite_and_their_names_stand_apart(run_seed: int) -> None:
    """However lines lie, no coordinate is NaN or infinite and no two names overlap."""
    rng = random.Random(run_seed)
    for _ in range(40):
        names = [f"line {i}" for i in range(rng.randint(1, 9))]
        series = [
            ChartSeries(
                n, tuple((2.0**k, rng.uniform(1, rng.choice([2, 1e6]))) for k in range(rng.randint(1, 10))), "--c1"
            )
            for n in names
        ]
        svg = lines(series, "x", "y")
        assert not re.search(r"nan|inf", svg)
        heights = label_heights(svg, names)
        assert len(heights) == len(names)
        gaps = [b - a for a, b in itertools.pairwise(heights)]
        assert all(gap >= LABEL_STEP - 0.11 for gap in gaps), f"{heights}"
        root = ElementTree.fromstring(svg)
        numbers = max(float(t.get("y", "nan")) for t in root.iter("text") if t.text == "1")  # the axis's first
        assert heights[-1] <= numbers - 12, "the names reach the numbers below"


def test_names_are_escaped() -> None:
    """A model may be called anything."""
    svg = lines([ChartSeries("<a&b>", ((1.0, 2.0), (2.0, 3.0)), "--c1")], "x", "y")
    assert "&lt;a&amp;b&gt;" in svg
    ElementTree.fromstring(svg)


def test_nothing_to_draw_draws_nothing() -> None:
    """Empty plots are left out of the page."""
    assert lines([], "x", "y") == stacks([], {}, "GiB") == ""


def test_bars_are_as_long_as_their_parts() -> None:
    """Widths are in proportion, and the limit's line stands where a bar of that length would end."""
    svg = stacks([Stack("one", (("a", 10.0), ("b", 30.0)))], {"a": "--c1", "b": "--c2"}, "GiB", ("there is", 40.0))
    root = ElementTree.fromstring(svg)
    bars = [r for r in root.iter("rect") if r.get("height") == "16"]
    widths = [float(r.get("width", "nan")) for r in bars]
    assert widths[1] == pytest.approx(3 * widths[0], rel=0.01)
    limit = next(e for e in root.iter("line") if e.get("class") == "limit")
    assert float(limit.get("x1", "nan")) == pytest.approx(float(bars[1].get("x", "nan")) + widths[1], abs=0.2)


def test_ticks_are_round() -> None:
    """1, 2, 2.5 or 5 times a power of ten, inside the range."""
    assert _ticks(0.0, 100.0) == [0, 20, 40, 60, 80, 100]
    assert _ticks(0.0, 0.9) == [0, 0.2, 0.4, 0.6, 0.8]
    assert _ticks(0.0, 47.0) == [0, 10, 20, 30, 40]
