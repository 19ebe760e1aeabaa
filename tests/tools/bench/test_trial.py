"""`laddertron trial`: what rounds of two servers show, and when nothing follows from them; then against daemons."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from daemon_tools import deployment, line, served
from laddertron.launchers.cli import __main__ as cli
from laddertron.launchers.cli.batch_client import ApiError
from laddertron.tools.bench.commands.trial import Server
from laddertron.tools.bench.trial import Reply, Request, Round, Spread, Trial, cost, deal, mix, play, verdict
from tiny_text import write_folder


def rounds(rates: list[float], first: float = 0.1, text: str = "t", tokens: int = 100) -> tuple[Round, ...]:
    """One request a round, of so many tokens, at these rates."""
    return tuple(Round(tokens / rate, (Reply(tokens / rate, first, tokens, text),)) for rate in rates)


def answer(ours: tuple[Round, ...], theirs: tuple[Round, ...], prices: tuple[float, float] | None = None) -> str:
    return verdict(Trial(ours, theirs, prices), "THERE")[0]


EVEN = [100.0, 101.0, 99.0, 102.0, 100.0]
MORE = [120.0, 130.0, 125.0, 121.0, 128.0]


def test_what_the_verdict_follows_from() -> None:
    """Better in every round by more than is noticed, in tokens for the money and in the first token; each by itself."""
    assert answer(rounds(MORE), rounds(EVEN)).startswith("take this deployment: more for the money, and the first")
    assert answer(rounds(EVEN), rounds(MORE)).startswith("keep THERE: it gives more for the money")
    assert answer(rounds(EVEN), rounds(EVEN)).startswith("keep THERE unless")
    assert answer(rounds([*MORE[:4], 80.0]), rounds(EVEN)).startswith("keep THERE unless")  # one round went otherwise
    assert answer(rounds([104.0] * 5), rounds([100.0] * 5)).startswith("keep THERE unless")  # too little to notice
    late, soon = 0.3, 0.1
    assert "keep THERE for chat" in answer(rounds(MORE, late), rounds(EVEN, soon))
    assert "earlier first token" in answer(rounds(MORE, soon), rounds(EVEN, late))
    assert "take this deployment for chat" in answer(rounds(EVEN, soon), rounds(EVEN, late))
    assert answer(rounds(EVEN, late), rounds(EVEN, soon)).startswith("keep THERE: its first token")
    assert "take it for chat" in answer(rounds(EVEN, soon), rounds(MORE, late))
    assert "and the first token comes earlier" in answer(rounds(EVEN, late), rounds(MORE, soon))


def test_the_price_turns_the_verdict() -> None:
    """A quarter more tokens for twice the money is no bargain, nor is it at the other's."""
    assert answer(rounds(MORE), rounds(EVEN), (98.0, 49.0)).startswith("keep THERE")
    assert answer(rounds(EVEN), rounds(MORE), (49.0, 98.0)).startswith("take this deployment")
    assert Trial(rounds(MORE), rounds(EVEN), (98.0, 49.0)).thrift.middle == pytest.approx(0.625, abs=0.02)
    assert cost(Spread(1000.0, 900.0, 1100.0), 98.4) == pytest.approx(27.33, abs=0.01)


def test_when_there_is_no_verdict() -> None:
    failed = (*rounds(EVEN[:4]), Round(1.0, (Reply(0.0, error="503: not ready"),)))
    assert answer(rounds(EVEN), failed) == "no verdict: 1 requests failed at THERE, first: 503: not ready"
    assert answer(failed, rounds(EVEN)).startswith("no verdict: 1 requests failed at this deployment")
    assert answer(rounds(MORE[:4]), rounds(EVEN[:4])).startswith("no verdict from 4 rounds")
    said = verdict(Trial(rounds(MORE, tokens=200), rounds(EVEN, tokens=100)), "THERE")
    assert any("2.00 times THERE's tokens: the two did not do the same work" in text for text in said)


def test_each_server_gets_the_same_requests_and_begins_in_turns() -> None:
    asked: list[tuple[str, Request]] = []

    def ask(who: str) -> Callable[[Request], Reply]:
        def answered(request: Request) -> Reply:
            asked.append((who, request))
            return Reply(1.0, 0.5, 10, who)

        return answered

    sets = mix(3, 2, 20, 8, seed=1)
    pairs = list(play(sets, ask("ours"), ask("theirs"), 1))
    assert [who for who, _ in asked] == ["ours"] * 2 + ["theirs"] * 4 + ["ours"] * 4 + ["theirs"] * 2
    for who in ("ours", "theirs"):
        assert [request for name, request in asked if name == who] == [request for part in sets for request in part]
    assert [{reply.text for reply in found.replies} for pair in pairs for found in pair] == [{"ours"}, {"theirs"}] * 3
    assert Trial(*map(tuple, zip(*pairs, strict=True))).same_text == 0.0
    prompts = [body["messages"][0]["content"] for part in sets for _, body in part]
    assert len({prompt[:8] for prompt in prompts}) == 6
    assert mix(3, 2, 20, 8, seed=1) == sets
    assert [len(part) for part in deal(sets[0] + sets[1] + sets[2], 4)] == [1] * 4
    with pytest.raises(ValueError, match="2 requests are too few for 3 rounds"):
        deal(sets[0], 3)


# against servers


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli.group, ["trial", *words], standalone_mode=False)
    if result.exception is not None:
        return getattr(result.exception, "exit_code", 99), str(result.exception)
    return result.return_value or 0, result.output


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("tiny"))


def test_two_daemons(folder: Path, tmp_path: Path) -> None:
    """Two daemons with the same engine answer alike, whatever the verdict is; then a file with a line that neither can
    answer, and a server that is not there."""
    config = tmp_path / "deploy.yaml"
    with served(deployment(tmp_path / "a"), folder) as one, served(deployment(tmp_path / "b"), folder) as two:
        config.write_text(f"model: {{path: {folder}, served_model_name: tiny}}\ndaemon: {{port: {one.port}}}\n")
        file = tmp_path / "in.jsonl"
        file.write_bytes(b"\n".join(line(f"r-{n}", f"say {n}", seed=n) for n in range(12)))
        words = (str(config), "--against", f"{two.url}/v1", "-i", str(file), "--at-once", "2", "--rounds", "6")
        code, said = run(*words, "--price", "98", "49")
        assert code == 0, said
        assert f"6 rounds of 2 requests, 2 at once: from {file}" in said
        assert "answers that are the same  100%" in said
        assert "cost of a million tokens" in said
        assert "tokens for the same money" in said
        assert max(map(len, said.splitlines()[1:])) <= 80  # the first line has the file's path
        file.write_bytes(b"".join(line(f"r-{n}", "x" * (5 if n else 3000)) for n in range(12)))
        code, said = run(*words)
        assert code == 1
        assert "400" in said
        file.write_bytes(b"".join(line(f"r-{n}", "x" * (5 if n != 3 else 3000)) for n in range(12)))
        assert "no verdict: 1 requests failed at this deployment" in run(*words)[1]
        assert run(*words, "--price", "0", "1")[0] == 2
    code, said = run(*words)
    assert code == 1
    assert "Connection refused" in said


@contextmanager
def plain_server(text: list[str]) -> Iterator[str]:
    """A server that knows neither `stream_options` nor usage, and has one model."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(200, json.dumps({"data": [{"id": "theirs"}]}).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if "stream_options" in body:
                return self._send(422, b'{"error": {"message": "stream_options: unknown"}}')
            assert body["model"] == "theirs"
            chunks: list[Any] = [{"choices": [{"text": piece}]} for piece in text]
            return self._send(
                200, b"".join(b"data: " + json.dumps(c).encode() + b"\n\n" for c in chunks) + b"data: [DONE]\n\n"
            )

        def _send(self, status: int, data: bytes) -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_server_that_does_not_count_tokens(folder: Path, tmp_path: Path) -> None:
    """Then both are counted by the same tokenizer, from their text; pieces are no tokens."""
    file, config = tmp_path / "in.jsonl", tmp_path / "deploy.yaml"
    file.write_bytes(b"".join(line(f"r-{n}", f"say {n}") for n in range(6)))
    with plain_server(["the whole answer ", "in two pieces"]) as url, served(deployment(tmp_path), folder) as daemon:
        config.write_text(f"model: {{path: {folder}, served_model_name: tiny}}\ndaemon: {{port: {daemon.port}}}\n")
        code, said = run(str(config), "--against", url, "-i", str(file), "--rounds", "6")
        assert code == 0, said
        assert "both servers' are counted from their text" in said
        assert "answers that are the same  0%" in said
        config.write_text(f"model: {{path: {tmp_path}, served_model_name: tiny}}\ndaemon: {{port: {daemon.port}}}\n")
        code, said = run(str(config), "--against", url, "-i", str(file), "--rounds", "6")
        assert code == 1
        assert "does not count tokens" in said


@pytest.mark.parametrize("variable", ["LADDERTRON_API_KEY", "OPENAI_API_KEY"])
def test_a_refused_key_names_its_own_variable(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(401)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Refusing) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        with pytest.raises(ApiError, match=f"^401: .*; it is read from {variable}$"):
            Server("there", f"http://127.0.0.1:{server.server_address[1]}/v1", variable, None)
        thread.join()
    monkeypatch.setenv(variable, "lt-…")
    with pytest.raises(ApiError, match=f"^the API key in {variable} must be"):
        Server("there", "http://127.0.0.1:1/v1", variable, None)
