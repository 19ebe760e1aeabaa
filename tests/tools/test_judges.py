"""`make judges`: requests are counted by the daemon, and an unknown tool is refused before anything is installed."""

from __future__ import annotations

import http.server
import json
import re
import threading
from pathlib import Path

import checkpoints
import judges
import pytest
import scripted_model
import torch
from laddertron.engine.text.tokenizer import ChatOptions, TextModel

METRICS = b"""\
laddertron_http_requests_total{code="200",route="/v1/completions"} 7.0
laddertron_http_requests_total{code="200",route="/v1/files"} 2.0
laddertron_http_requests_total{code="429",route="/v1/completions"} 1.0
laddertron_http_requests_total{code="200",route="/metrics"} 9.0
"""


NGINX = """\
user www-data;
pid /run/nginx.pid;
error_log /var/log/nginx/error.log;
include /etc/nginx/modules-enabled/*.conf;
events {
}
http {
	include /etc/nginx/mime.types;
	access_log /var/log/nginx/access.log;
	gzip on;
	include /etc/nginx/sites-enabled/*;
}
"""


class _Metrics(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(METRICS)

    def log_message(self, *words: object) -> None: ...


def test_requests_to_the_api_are_counted_by_code() -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), _Metrics) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        assert judges.counted(f"http://127.0.0.1:{server.server_port}") == {"200": 9.0, "429": 1.0}
        thread.join()


def test_an_unknown_tool_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["judges.py", "openai", "curl"])
    with pytest.raises(SystemExit, match="curl: no such tool; there are openai"):
        judges.main()


def test_what_cannot_be_installed_is_skipped_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """An interpreter that is not there, and pip's last words."""
    monkeypatch.setattr(judges, "ROOT", tmp_path)
    monkeypatch.setitem(judges.JUDGES, "a", judges.agent_judge("a", "a", python="python-that-is-not-there"))
    refusing = tmp_path / "python"
    refusing.write_text("#!/bin/sh\necho first >&2; echo no such release >&2; exit 1\n")
    refusing.chmod(0o755)
    monkeypatch.setitem(judges.JUDGES, "b", judges.agent_judge("b", "b", python=str(refusing)))
    for name, reason in (("a", "python-that-is-not-there"), ("b", "no such release")):
        assert judges.judged(name, "", "") == (name, "-", "0", "0", "skipped", "-")
        assert re.search(f"{name}: skipped.*{reason}", capsys.readouterr().err)


def test_nginx_keeps_its_configuration_but_for_the_sites(tmp_path: Path) -> None:
    made = judges.site(NGINX, "127.0.0.1:81", 82, tmp_path)
    assert made == (
        f"user www-data;\npid {tmp_path}/pid;\nerror_log {tmp_path}/error.log;\n\nevents {{\n}}\nhttp {{\n"
        "server { listen 127.0.0.1:81; location / { proxy_pass http://127.0.0.1:82; } }\n"
        f"\tinclude /etc/nginx/mime.types;\n\taccess_log {tmp_path}/access.log;\n\tgzip on;\n\n}}\n"
    )


def test_agents_and_their_names_agree() -> None:
    script = judges.AGENTS.read_text()
    names = [name for name, judge in judges.JUDGES.items() if judge.agent and judge.python != "node"]
    assert all(f"\nasync def {name}() -> None:" in script for name in names)
    says, calls = (judges.SCRIPTS[mark].replace("|", "") for mark in ("<|says|>", "<|calls|>"))
    assert f'SAYS, CITY = "{says}", "Rome"' in script
    assert json.loads(calls[len("<tool_call>") : -len("</tool_call>")]) == {
        "name": "weather",
        "arguments": {"city": "Rome"},
    }


def test_the_agents_model_says_what_is_written(tmp_path: Path) -> None:
    """By transformers, after the template's prompt, with tools and without."""
    folder = scripted_model.save(tmp_path / "model", judges.SCRIPTS)
    text, oracle = TextModel.from_folder(folder), checkpoints.oracle(folder)
    assert text.chat.tool_format == "hermes"
    tools = [{"type": "function", "function": {"name": "weather"}}]
    for mark, variables in (("<|says|>", {}), ("<|calls|>", {"tools": tools})):
        prompt = text.encode_chat([{"role": "user", "content": "hi"}], ChatOptions(variables=variables))
        said = oracle.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=30)[0, len(prompt) :]
        assert text.decode(said.tolist()) == judges.SCRIPTS[mark].replace("|", "")
