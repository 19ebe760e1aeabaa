"""MLPerf LoadGen (mlcommons-loadgen) against an OpenAI-compatible daemon: Offline or Server, with token latencies.

    python loadgen_sut.py URL LINES.jsonl Offline|Server FOLDER SECONDS QPS      started by judges.py

LINES: batch lines of completions. It shows that LoadGen's rules are kept; a submission to MLPerf takes its data set and
ten minutes. The last line is LoadGen's verdict; exit status 0 if it is VALID.
"""

import array
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import mlperf_loadgen as lg

TTFT_NS, TPOT_NS = 6_000_000_000, 175_000_000
"""Limits on the first token and on each later one."""


class Daemon:
    """Streams a completion per sample, and tells LoadGen the first token and the whole answer."""

    def __init__(self, url: str, file: Path) -> None:
        self._url = url
        lines = map(json.loads, file.read_text().splitlines())
        more = {"stream": True, "stream_options": {"include_usage": True}}
        self.bodies = [json.dumps(line["body"] | more).encode() for line in lines if line["url"] == "/v1/completions"]
        self._pool = ThreadPoolExecutor(64)
        self.failed: list[str] = []

    def issue(self, samples: list[Any]) -> None:
        for sample in samples:
            self._pool.submit(self._answer, sample.id, self.bodies[sample.index])

    def _answer(self, number: int, body: bytes) -> None:
        text, tokens = "", 0
        try:
            for event in self._events(body):
                if event["choices"] and not text:
                    self._tell(lg.FirstTokenComplete, number, event["choices"][0]["text"], 1)
                text += "".join(choice["text"] or "." for choice in event["choices"])
                tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
        except (OSError, HTTPException, ValueError, KeyError) as error:
            self.failed.append(repr(error))
        self._tell(lg.QuerySamplesComplete, number, text, tokens)

    def _events(self, body: bytes) -> Any:
        request = Request(f"{self._url}/v1/completions", body, {"content-type": "application/json"})
        with urlopen(request, timeout=600) as answer:  # HTTPError for what is refused
            for line in answer:
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])

    @staticmethod
    def _tell(call: Any, number: int, text: str, tokens: int) -> None:
        held = array.array("B", text.encode() or b".")
        at, size = held.buffer_info()
        call([lg.QuerySampleResponse(number, at, size, tokens)])


def settings(scenario: str, seconds: float, qps: float, count: int) -> Any:
    found = lg.TestSettings()
    found.scenario, found.mode = getattr(lg.TestScenario, scenario), lg.TestMode.PerformanceOnly
    found.min_duration_ms, found.min_query_count = int(seconds * 1000), max(count, 500)
    found.offline_expected_qps = found.server_target_qps = qps
    found.use_token_latencies, found.ttft_latency, found.tpot_latency = True, TTFT_NS, TPOT_NS
    return found


def main() -> int:
    url, lines, scenario, folder, seconds, qps = sys.argv[1:]
    daemon, logs = Daemon(url, Path(lines)), lg.LogSettings()
    logs.log_output.outdir, count = folder, len(daemon.bodies)
    sut = lg.ConstructSUT(daemon.issue, lambda: None)
    qsl = lg.ConstructQSL(count, count, lambda _: None, lambda _: None)
    lg.StartTestWithLogSettings(sut, qsl, settings(scenario, float(seconds), float(qps), count), logs)
    summary = Path(folder, "mlperf_log_summary.txt").read_text().splitlines()
    verdict = next(line for line in summary if line.startswith("Result is"))
    print(f"{verdict}; {len(daemon.failed)} failed {daemon.failed[:1]}")
    return 0 if verdict.endswith(": VALID") and not daemon.failed else 1


if __name__ == "__main__":
    sys.exit(main())
