"""What users, clients and other versions of this program see, against committed copies under golden/snapshots.

A change here is a change of behaviour: where it is meant, `make snapshots` writes the copies anew, and the diff is part
of the change.
"""

from __future__ import annotations

import hashlib
import json
import os
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import click
import pytest
from config_cases import BAD_CONFIGS, BAD_OVERRIDES, BAD_VALUES, RULE_CASES, complete
from laddertron.engine.batch import Batch, Chunk, NewSequence, encode
from laddertron.engine.config.load import ConfigError, digest, load, to_json
from laddertron.engine.daemon.http.app import make_api
from laddertron.engine.metrics.catalogue import GROUPS
from laddertron.engine.openai.batch_input import check_line
from laddertron.engine.openai.responses_body import ResponsesFields
from laddertron.engine.openai.schema import CHAT, COMPLETIONS, json_schema
from laddertron.engine.openai.validators import json_schema as schema_of
from laddertron.engine.request import SamplingParams
from laddertron.launchers.cli.__main__ import group
from laddertron.launchers.control import frames
from laddertron.launchers.control.messages import to_wire
from model_configs import REFUSED, read
from test_control import RANK_MESSAGES, SERVER_MESSAGES

TESTS = Path(__file__).resolve().parent
GOLDEN = TESTS / "golden" / "snapshots"
FIELDS_BEGIN, FIELDS_END = "<!-- fields: make snapshots -->\n", "<!-- end of fields -->\n"
RENEW = "LADDERTRON_RENEW_SNAPSHOTS" in os.environ


_CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
_TEXT: dict[str, Any] = {"model": "m", "prompt": "hi"}
BAD_FIELDS: tuple[dict[str, Any], ...] = (
    {"temprature": 1}, {"temperature": -1}, {"temperature": "1"}, {"temperature": True}, {"top_p": 0}, {"top_k": -2},
    {"min_p": 2}, {"presence_penalty": 3}, {"repetition_penalty": 0}, {"n": 10**9}, {"n": 1.0}, {"max_tokens": 0},
    {"max_tokens": 3, "max_completion_tokens": 4}, {"max_tokens": 3, "min_tokens": 4}, {"logit_bias": {"a": 1}},
    {"logit_bias": {"1": 101}}, {"logit_bias": {"1": 1, "01": 2}}, {"logit_bias": []}, {"stop": ["x"] * 17},
    {"stop": ""}, {"stop": 1}, {"stop_token_ids": [-1]}, {"stop_token_ids": 1}, {"seed": 2**64}, {"top_logprobs": 3},
    {"logprobs": True, "top_logprobs": 21}, {"stream_options": {}}, {"stream": True}, {"best_of": 2},
    {"use_beam_search": True}, {"tools": [{"type": "function"}]}, {"tool_choice": "auto"}, {"audio": {}},
    {"modalities": ["text", "audio"]}, {"chat_template": "{{ x }}"}, {"chat_template_kwargs": {"messages": []}},
    {"continue_final_message": True, "add_generation_prompt": True}, {"messages": []}, {"messages": None},
    {"messages": "hi"}, {"messages": [1]}, {"messages": [{"role": "tool"}]},
    {"tools": [{"type": "function", "function": {"name": "a b"}}]},
    {"messages": [{"role": "king", "content": "x"}]}, {"messages": [{"role": "user"}]}, {"model": 1}, {"model": ""},
    {"messages": [{"role": "user", "content": "x", "contnet": "x"}]}, {"response_format": {"type": "xml"}},
    {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, {"response_format": {"type": "json_schema"}},
    {"guided_regex": "a", "guided_json": {}}, {"guided_json": "{"}, {"guided_regex": "a\\"}, {"user": 7},
    {"prompt": "x"}, {"truncate_prompt_tokens": 0}, {"metadata": {"a": 1}}, {"prompt_logprobs": -1},
)  # fmt: skip
BAD_PROMPTS: tuple[dict[str, Any], ...] = (
    {"prompt": 7}, {"prompt": []}, {"prompt": ["a", [1]]}, {"prompt": [1, "a"]}, {"prompt": [1, -1]}, {"suffix": "b"},
    {"prompt": ["a"] * 1000, "n": 2}, {"max_tokens": 0}, {"messages": []}, {"logprobs": 21}, {"echo": 1},
)  # fmt: skip
BAD_BYTES = (
    b"", b"{", b"{} {}", b"[]", b'"x"', b"\xef\xbb\xbf{}", b'{"a": "\xff"}', b'{"a": NaN}', b'{"a": 1e999}',
    b'{"a": 1, "a": 2}', b'{"a": "\\ud800"}', b'{"a":' * 65 + b"1" + b"}" * 65, b"[" + b"[]," * 70_000 + b"[]]",
    b"1" * 5000, b"{'a': 1}", b'{"a": "tab\there"}', b'{"a": "unfinished',
)  # fmt: skip
_LINE = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": _CHAT}
BAD_LINES: tuple[dict[str, Any], ...] = (
    {}, {**_LINE, "extra": 1}, {**_LINE, "metod": 1}, {**_LINE, "custom_id": 1}, {**_LINE, "custom_id": ""},
    {**_LINE, "custom_id": "x" * 513}, {**_LINE, "method": "GET"}, {**_LINE, "url": "/v1/embeddings"},
    {**_LINE, "url": 1}, {**_LINE, "body": []}, {**_LINE, "body": {}},
)  # fmt: skip


def _pretty(value: Any) -> str:
    return json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _helps() -> str:
    """`--help` of every command and subcommand, 100 columns wide."""

    def walk(command: click.Command, context: click.Context) -> Iterator[str]:
        command._help_option = None  # click keeps it as the first caller had it, without -h if called alone
        yield f"$ {context.command_path} --help\n{command.get_help(context)}\n"
        if isinstance(command, click.Group):
            for name in command.list_commands(context):
                if (found := command.get_command(context, name)) is not None:
                    yield from walk(found, click.Context(found, context, name, **found.context_settings))

    top = click.Context(group, info_name="laddertron", terminal_width=100, **group.context_settings)
    return "\n".join(walk(group, top))


def _field_names(schema: Any, path: str = "") -> Iterator[str]:
    """Names of the properties in a schema, dotted where they are nested."""
    if isinstance(schema, dict):
        for name, below in schema.get("properties", {}).items():
            yield f"{path}{name}"
            yield from _field_names(below, f"{path}{name}.")
        for key, below in schema.items():
            if key != "properties":
                yield from _field_names(below, path)
    elif isinstance(schema, list):
        for below in schema:
            yield from _field_names(below, path)


def _api() -> str:
    """Of the OpenAPI document: paths, parameters, fields and status codes, and a digest of each operation, which covers
    types, bounds and descriptions."""
    document = make_api(Mock(), Mock(), "0").openapi()
    lines = []
    for path, operations in document.pop("paths").items():
        for method, operation in operations.items():
            lines.append(f"{method.upper()} {path} {_digest(operation)}")
            parts = {
                "parameters": [p["name"] for p in operation.get("parameters", ())],
                "body": dict.fromkeys(_field_names(operation.get("requestBody"))),
                "responses": operation["responses"],
                "answer": dict.fromkeys(_field_names(operation["responses"])),
            }
            for label, names in parts.items():
                if names:
                    text = f"{label}: {' '.join(sorted(names))}"
                    lines += textwrap.wrap(
                        text, 118, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False
                    )
    return "\n".join([*lines, f"the rest {_digest(document)}"]) + "\n"


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _config_errors(folder: Path) -> str:
    def said(text: str, *overrides: str) -> list[str]:
        file = folder / "deploy.yaml"
        file.write_text(text, encoding="utf-8")
        try:
            load(file, overrides)
        except ConfigError as error:
            return [line.replace(f"{folder}/", "") for line in error.faults]
        return []

    good = "model: {path: ./m}\n"
    texts = [*BAD_CONFIGS, *map(complete, (*BAD_VALUES, *(text for text, _ in RULE_CASES)))]
    files = [{"file": text, "errors": said(text)} for text in texts]
    return _pretty(files + [{"set": word, "errors": said(good, word)} for word in BAD_OVERRIDES])


def _model_errors(folder: Path) -> str:
    """Of each config.json that is refused: its family, what is changed in it (null: left out), and the message."""
    lines = []
    for data, changes in REFUSED:
        lines.append(f"{data['model_type']} {json.dumps(changes)}")
        try:
            read(folder, data, **changes)
        except ValueError as fault:
            lines.append("    " + str(fault).replace(f"{folder}/", ""))
    return "\n".join(lines) + "\n"


def _request_errors() -> str:
    lines: list[bytes] = [*BAD_BYTES, *(json.dumps(line).encode() for line in BAD_LINES)]
    for fields in BAD_FIELDS:
        lines.append(json.dumps({**_LINE, "body": {**_CHAT, **fields}}).encode())
    for fields in BAD_PROMPTS:
        lines.append(json.dumps({**_LINE, "url": "/v1/completions", "body": {**_TEXT, **fields}}).encode())
    found = []
    for raw in lines:
        bad = check_line(raw).error
        line = raw.decode(errors="backslashreplace")
        error = None if bad is None else {"status": bad.status, **bad.to_json()["error"]}
        found.append({"line": line if len(line) < 300 else f"{line[:60]}… ({len(raw)} bytes)", "error": error})
    return _pretty(found)


def _metrics() -> str:
    rows = [
        f"{series.full_name} {series.kind} {{{','.join(series.labels)}}} {' '.join(map(str, series.bounds))}".rstrip()
        for group_of in GROUPS.values()
        for series in group_of
    ]
    return "\n".join(rows) + "\n"


def _wire(folder: Path) -> str:
    """Control messages as they travel and their sealed frames; a step plan with one of everything; a configuration's
    digest, which ranks compare."""
    writer = frames.FrameWriter()
    writer.key = bytes(32)
    messages = []
    for message in SERVER_MESSAGES + RANK_MESSAGES:
        payload = to_wire(message)
        messages.append(
            {"payload": payload.decode(), "frame": hashlib.sha256(writer.frame(payload)).hexdigest()},
        )
    params = SamplingParams(
        9,
        2**64 - 1,
        1,
        0.5,
        0.9,
        7,
        0.1,
        -1.5,
        1.5,
        1.1,
        ((1, 2.0), (5, -100.0)),
        (7, 5),
        (5, 6),
        3,
        4,
        2,
        grammar='{"a": "é"}',
    )
    plain = NewSequence(1, 2, 1, (9,), SamplingParams(1, 0))
    batch = Batch(
        7, (1, 3), (NewSequence(0, 0, 2, (4, 5, 2**32 - 1), params), plain), ((0, (3, 4)), (1, ())), ((1, 2),),
        (Chunk(0, 0, 2, True, True), Chunk(1, 5, 1, False)),
    )  # fmt: skip
    file = folder / "deploy.yaml"
    file.write_text("model: {path: /srv/model}\ndaemon: {data_dir: /srv/data}\n", encoding="utf-8")
    deployment = load(file)
    return _pretty(
        {
            "messages": messages,
            "batch": encode(batch).hex(),
            "empty_batch": encode(Batch(0)).hex(),
            "deployment": {"digest": digest(deployment), "json": to_json(deployment)},
        }
    )


def _fields() -> str:
    """Every field of the request bodies, as docs/serving.md lists them: without a remark or ignored by name alone."""
    schemas = {
        "chat": json_schema(CHAT),
        "completions": json_schema(COMPLETIONS),
        "responses": schema_of(ResponsesFields),
    }
    endpoints: dict[tuple[str, str], list[str]] = {}  # by field and remark
    for endpoint, schema in schemas.items():
        for name, node in schema["properties"].items():
            remark = node.get("description", "")
            if remark.startswith("Ignored"):
                remark = "Ignored"
            elif remark.startswith("Not supported"):
                remark += f" Accepts: {', '.join(f'`{json.dumps(value)}`' for value in node['enum'])}."
            endpoints.setdefault((name, remark), []).append(endpoint)
    lists: dict[str, dict[str, list[str]]] = {"": {}, "Ignored": {}}
    rows = []
    for (name, remark), where in sorted(endpoints.items()):
        which = "all" if len(where) == len(schemas) else ", ".join(where)
        if remark in lists:
            lists[remark].setdefault(which, []).append(f"`{name}`")
        else:
            rows.append(f"| `{name}` | {which} | {remark} |")
    head = []
    for remark, said in (
        ("", "Implemented without restriction"),
        ("Ignored", "Accepted and ignored (`/docs` has reasons)"),
    ):
        head += [f"{said}:", *(f"- {which}: {', '.join(names)}." for which, names in lists[remark].items()), ""]
    return "\n".join([*head, "| field | endpoint | behaviour |", "|---|---|---|", *rows]) + "\n"


def test_the_documented_fields_are_the_schemas() -> None:
    """docs/serving.md's table is made from the schema (`make snapshots` writes it)."""
    page = TESTS.parent / "docs" / "serving.md"
    before, rest = page.read_text(encoding="utf-8").split(FIELDS_BEGIN)
    table, after = rest.split(FIELDS_END)
    if RENEW:
        table = _fields()
        page.write_text(before + FIELDS_BEGIN + table + FIELDS_END + after, encoding="utf-8")
    assert table == _fields(), "docs/serving.md: the fields changed; where that is meant: make snapshots"


def _check(name: str, text: str) -> None:
    file = GOLDEN / name
    if RENEW:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8"), f"{name} changed; where that is meant: make snapshots"


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("cli_help.txt", _helps),
        ("openapi.txt", _api),
        ("request_errors.json", _request_errors),
        ("metrics.txt", _metrics),
    ],
)
def test_what_others_see_is_as_committed(name: str, made: Callable[[], str]) -> None:
    _check(name, made())


@pytest.mark.parametrize(
    ("name", "made"),
    [("config_errors.json", _config_errors), ("model_errors.txt", _model_errors), ("wire.json", _wire)],
)
def test_files_and_messages_are_as_committed(name: str, made: Callable[[Path], str], tmp_path: Path) -> None:
    _check(name, made(tmp_path))


def test_a_difference_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "RENEW", False)
    with pytest.raises(AssertionError, match="make snapshots"):
        _check("metrics.txt", _metrics().replace("gauge", "counter", 1))


def test_a_bound_of_the_api_is_in_its_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    """openapi.txt names fields; what it does not spell out, as a field's maximum, changes the operation's digest."""
    document = make_api(Mock(), Mock(), "0").openapi()
    before = _api().splitlines()
    body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    body["properties"]["user"]["description"] = "changed"
    monkeypatch.setitem(globals(), "make_api", Mock(return_value=Mock(openapi=lambda: document)))
    changed = [line for line, old in zip(_api().splitlines(), before, strict=True) if line != old]
    assert len(changed) == 1
    assert changed[0].startswith("POST /v1/chat/completions ")
