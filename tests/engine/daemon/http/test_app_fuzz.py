"""The API's own description turned against it: generated requests, good and bad, never a 5xx, never a crash.

A bounded share runs in `make test`; `make fuzz` sets LADDERTRON_FUZZ_CASES for the long one. Both count their cases.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import schemathesis
from daemon_tools import Served, deployment, line, served, submit, wait_batch
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, status_code_conformance
from tiny_text import write_folder

CASES = int(os.environ.get("LADDERTRON_FUZZ_CASES", "6"))  # a route and mode
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = write_folder(tmp_path_factory.mktemp("tiny"))
    with served(deployment(tmp_path_factory.mktemp("fuzz")), folder) as running:
        yield running


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["good", "bad"])
def test_generated_requests_are_answered_as_described(daemon: Served, mode: GenerationMode, run_seed: int) -> None:
    """Every route with values of its description and with broken ones: statuses and content types are those it names,
    none is a server's failure; afterwards the daemon still does its work."""
    schema = schemathesis.openapi.from_url(f"{daemon.url}/openapi.json")
    sent = 0
    for result in schema.get_all_operations():
        operation = result.ok()

        @seed(run_seed)
        @settings(
            max_examples=CASES,
            deadline=None,
            phases=(Phase.generate,),
            suppress_health_check=list(HealthCheck),
            database=None,
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def send(case: schemathesis.Case) -> None:
            nonlocal sent
            sent += 1
            if case.path == "/v1/overview":
                case.query.pop("stream", None)  # events that go on until their reader leaves
            case.validate_response(case.call(timeout=300), checks=CHECKS)

        try:
            send()
        except Exception as error:
            if "Unsatisfiable" not in type(error).__name__:  # nothing of a route without parameters can be broken
                raise
    print(f"{sent} cases")
    assert sent >= CASES * 5
    client = daemon.client()
    assert wait_batch(client, submit(client, line("a")).id).request_counts.completed == 1
