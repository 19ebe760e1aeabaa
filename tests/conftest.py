"""Fixtures that every test may use, and an environment that is the same wherever the tests run."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest
from folders import FOLDERS
from hypothesis import HealthCheck, is_hypothesis_test, settings
from laddertron.topology.hardware.cpu_tier import LOOKS, LOOKS_VARIABLE, limit_libraries
from rank_pool import RankPool

sys.path[:0] = FOLDERS

# A runner may itself be a job of Slurm or a rank of an MPI, stand behind a proxy, or have a terminal of its own shape.
_OF_A_JOB = ("SLURM_", "PBS_", "LSB_", "PMI_", "PMIX_", "MPI_LOCAL", "OMPI_COMM_", "LADDERTRON_CONTROL")
_OF_A_RANK = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
_OF_A_TERMINAL = {"COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE"}
for _name in [n for n in os.environ if n.startswith(_OF_A_JOB) or n in _OF_A_RANK | _OF_A_TERMINAL]:
    del os.environ[_name]
os.environ["TERM"] = "xterm-256color"  # a dumb one is shown no progress
# Nothing is compiled, but Megatron-core's decorators would have every rank import the compiler: a quarter of its start.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("HOME", tempfile.gettempdir())  # Open MPI's mpirun does not start without one
os.environ.setdefault(LOOKS_VARIABLE, LOOKS)
limit_libraries(os.environ)  # LADDERTRON_CPU_TIER=avx2 pytest …: before any test imports torch
for _name in ("NO_PROXY", "no_proxy"):
    os.environ[_name] = ",".join(filter(None, (os.environ.get(_name), "127.0.0.1,localhost")))

_first, _, _last = os.environ.get("LADDERTRON_SEED", "0").partition("-")
SEEDS = range(int(_first), int(_last or _first) + 1)
"""One seed, so that every run of `make test` draws the same; several in `make test-seeds`."""

# How long an example takes depends on the load. Without a database no run depends on an earlier one.
settings.register_profile(
    "laddertron",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
    derandomize=len(SEEDS) == 1,
    database=None,
)
settings.load_profile("laddertron")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Call a test that takes `run_seed` with each seed, and with those of its mark `seeds`. Under several seeds a
    hypothesis test runs as often, each time with other examples."""
    if len(SEEDS) > 1 and is_hypothesis_test(metafunc.function):
        metafunc.fixturenames.append("run_seed")
    if "run_seed" in metafunc.fixturenames:
        found = [seed for mark in metafunc.definition.iter_markers("seeds") for seed in mark.args]
        seeds = list(dict.fromkeys([*SEEDS, *found]))
        metafunc.parametrize("run_seed", seeds, ids=[f"seed{seed}" for seed in seeds])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "run_seed" in getattr(item, "fixturenames", ()) or is_hypothesis_test(getattr(item, "function", None)):
            item.add_marker("draws")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add to a failure how to repeat it and how to keep it as an explicit example."""
    report = yield
    if report.failed and item.get_closest_marker("draws"):
        name = item.nodeid.partition("[")[0]
        keep = "put the failing arguments printed above into @example(...)"
        if not is_hypothesis_test(getattr(item, "function", None)):
            seed = item.callspec.params["run_seed"]  # type: ignore[attr-defined]
            keep = f"repeat: LADDERTRON_SEED={seed} pytest {name}\nkeep: @pytest.mark.seeds({seed})"
        report.sections.append(("explicit example", keep))
    return report


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[..., list[Any]]]:
    """`ranks(4, "test_x:case", {"seed": 1}, timeout_s=600) -> [result of rank 0, …]`: runs `case(rank, seed=1)` on four
    ranks at once. `rank` is a rank_pool.Rank; arguments and results are JSON. A failure on any rank raises RankError
    with its traceback, and the next call gets fresh ranks."""
    pool = RankPool()
    yield pool.run
    pool.close()
