"""benchmarks/adaptation.py: which runs there are, and the table of those that are there."""

from __future__ import annotations

import sys
from pathlib import Path

from laddertron.models.training.reference import Reference

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import adaptation
import quality


def test_every_way_of_the_first_seed_comes_before_the_second() -> None:
    """A run that is cut off leaves a whole table of one seed."""
    runs = adaptation.runs(["demo"])
    assert len(runs) == len(set(runs)) == 7 * len(quality.SEEDS)
    assert {seed for *_, seed in runs[:7]} == {0}


def test_sizes_are_what_they_are_called() -> None:
    found = {size: Reference(adaptation.config_of(size)).config.num_parameters for size in adaptation.SIZES}
    assert 0.5e6 < found["demo"] < 1.5e6
    assert 3e6 < found["4M"] < 5e6
    assert 8e6 < found["10M"] < 12e6


def test_table_has_means_and_the_last_points_spread() -> None:
    curve = [50.0, 40.0, 30.0, 25.0, 22.0, 20.0]
    results = {
        "runs": {"demo/all layers/hard/0": curve, "demo/all layers/hard/1": [value + 2 for value in curve]},
    }
    assert adaptation.table(results, "demo")[2:] == [
        "| all layers, hard | 2 | 51.00 | 41.00 | 31.00 | 26.00 | 23.00 | 21.00 ± 1.41 |"
    ]
    assert adaptation.table({"runs": {}}, "demo") == []
