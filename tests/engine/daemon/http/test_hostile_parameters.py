"""What clients may ask for and engines cannot do: 400 with the reason, through the whole daemon; never an alert."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from daemon_tools import LIMITS, NAME, Served, deployment, line, lines_of, served, submit, wait_batch
from fake_job import FakeJob
from laddertron.engine.metrics.observer import Observer
from laddertron.engine.request import TokensEvent
from laddertron.engine.sampling import grammar
from prometheus_client import CollectorRegistry
from tiny_text import write_folder

needs_grammars = pytest.mark.skipif(not grammar.available, reason="llguidance is not installed: laddertron[grammar]")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[Served]:
    with served(deployment(tmp_path_factory.mktemp("hostile")), folder) as running:
        yield running


def refused(daemon: Served, **body: Any) -> openai.BadRequestError:
    with pytest.raises(openai.BadRequestError) as caught:
        daemon.client().completions.create(model=NAME, prompt="x", extra_body=body)
    assert daemon.jobs[0].submitted == []
    return caught.value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("repetition_penalty", 1e-300),
        ("repetition_penalty", 0.009),
        ("repetition_penalty", 1e300),
        ("temperature", 1e300),
        ("temperature", -1e-300),
        ("top_p", -5e-324),
        ("min_p", 1.0000001),
        ("presence_penalty", 1e308),
        ("frequency_penalty", -2.1),
        ("logit_bias", {"5": 1e300}),
        ("min_tokens", 10**30),
        ("top_k", 10**400),
        ("seed", 2**64),
        ("allowed_token_ids", list(range(20_000))),
    ],
)
def test_extreme_numbers(daemon: Served, name: str, value: Any) -> None:
    assert refused(daemon, **{name: value}).param in (name, "logit_bias[5]")


@needs_grammars
@pytest.mark.parametrize(
    "body",
    [
        {"guided_json": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(900)}}},
        {"guided_json": {"$ref": "#"}},
        {"guided_grammar": 'start: a\na: a "x"'},
        {"guided_regex": "(ab|cd|ef)" * 20_000},
        {"guided_choice": []},
        {"structured_outputs": {"json": {"type": "integer", "multipleOf": 1e-300}}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"allOf": [{"$ref": "#"}]}},
            }
        },
    ],
    ids=["900", "ref", "endless", "regex", "none", "multiple", "format"],
)
def test_grammars_that_would_fail_at_work(daemon: Served, body: dict[str, Any]) -> None:
    error = refused(daemon, **body)
    assert error.code in ("invalid_grammar", "invalid_value"), error
    assert len(error.message) < 900


class Unkept(FakeJob):
    """Every request's constraints fail after its first token."""

    def next_event(self, sequence: Any) -> TokensEvent:
        return TokensEvent(
            sequence.request.request_id, sequence.choice, 0, (), "constraint_error", message="too complex"
        )


def test_constraints_that_fail_at_work_are_the_clients(folder: Path, tmp_path: Path) -> None:
    """400 with the reason, whole, streamed and in a batch; the count of non-finite logits stands still."""
    observer = Observer(CollectorRegistry())
    with served(deployment(tmp_path), folder, lambda: [Unkept(LIMITS)], observer=observer) as daemon:
        client = daemon.client()
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match="too complex") as caught:
                client.completions.create(model=NAME, prompt="x", stream=stream)
            assert (caught.value.code, caught.value.type) == ("constraint_error", "invalid_request_error")
        batch = wait_batch(client, submit(client, line("a")).id)
        response = lines_of(client, batch.error_file_id)["a"]["response"]
        assert (response["status_code"], response["body"]["error"]["code"]) == (400, "constraint_error")
        text = observer.render("")[0].decode()
        assert "laddertron_nonfinite_logits_total 0.0" in text
        assert 'laddertron_request_success_total{finished_reason="constraint_error"} 3.0' in text
        assert json.dumps(response)
