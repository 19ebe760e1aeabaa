"""One look at whether this machine can have nodes; the tests here are skipped with the reason where it cannot."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cluster.nodes import Cluster, why_not


@pytest.fixture(scope="session")
def possible() -> None:
    if (reason := why_not()) is not None:
        pytest.skip(f"no emulated cluster: {reason}")


@pytest.fixture(scope="module")
def pair(possible: None) -> Iterator[Cluster]:
    """Two nodes, shared by a module's tests; `fresh_link` gives each an unspoilt link."""
    with Cluster(2) as cluster:
        yield cluster


@pytest.fixture
def link(pair: Cluster) -> Iterator[Cluster]:
    pair.control.fix(0, 1)
    pair.control.link()
    yield pair
    pair.control.fix(0, 1)
    pair.control.link()
