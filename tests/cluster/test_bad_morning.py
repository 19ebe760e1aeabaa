"""Each fault of a first morning is named by the first line of the error."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.bad_morning import FAULTS, Fault, meet
from cluster.nodes import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_each_fault_is_named(link: Cluster, tmp_path: Path, fault: Fault) -> None:
    """The times are the rehearsal's: here other tests share the cores."""
    meet(fault, link, tmp_path)
