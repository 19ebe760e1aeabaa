"""`make judges`: requests are counted by the daemon, and an unknown tool is refused before anything is installed."""

from __future__ import annotations

import http.server
import threading

import judges
import pytest

METRICS = b"""\
laddertron_http_requests_total{code="200",route="/v1/completions"} 7.0
laddertron_http_requests_total{code="200",route="/v1/files"} 2.0
laddertron_http_requests_total{code="429",route="/v1/completions"} 1.0
laddertron_http_requests_total{code="200",route="/metrics"} 9.0
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
