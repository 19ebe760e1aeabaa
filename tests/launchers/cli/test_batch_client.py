"""The client of the Batch API: what it says of a key that a server refuses, and of one that no header can carry."""

from __future__ import annotations

import http.server
import threading
from typing import Any

import pytest
from laddertron.launchers.cli.batch_client import ApiError, BatchClient


def test_a_refused_key_names_where_it_is_read_from() -> None:
    class Refusing(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(401)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Refusing) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        with pytest.raises(ApiError, match=r"^401: .*; it is read from LADDERTRON_API_KEY") as refused:
            BatchClient(f"http://127.0.0.1:{server.server_address[1]}/v1", "lt-1").models()
        thread.join()
    assert refused.value.status == 401
    with pytest.raises(ApiError, match=r"^the API key in LADDERTRON_API_KEY"):
        BatchClient("http://127.0.0.1:1/v1", "lt-…")
