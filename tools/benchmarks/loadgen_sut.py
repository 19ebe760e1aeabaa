"""MLPerf LoadGen (mlcommons-loadgen) against an OpenAI-compatible daemon: Offline or Server, with token latencies.

    python loadgen_sut.py URL LINES.jsonl offline|server FOLDER [--seconds 60] [--qps 10] [--ttft 6] [--tpot 0.175]

LINES: batch lines of completions. It shows that LoadGen's rules are kept; a submission to MLPerf takes its data set and
ten minutes. The last line is LoadGen's verdict; exit status 0 if it is VALID.
"""

import argparse
import array
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import mlperf_loadgen as lg


class Daemon:
    """Streams a completion per sample, and tells LoadGen the first token and the whole answer."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._url = options.url
        lines = map(json.loads, Path(options.lines).read_text().splitlines())
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


def settings(options: argparse.Namespace, count: int) -> Any:
    found, scenarios = lg.TestSettings(), lg.TestScenario
    found.scenario = scenarios.Server if options.scenario == "server" else scenarios.Offline
    found.mode, found.use_token_latencies = lg.TestMode.PerformanceOnly, True
    found.min_duration_ms, found.min_query_count = int(options.seconds * 1000), max(count, 500)
    found.offline_expected_qps = found.server_target_qps = options.qps
    found.ttft_latency, found.tpot_latency = int(options.ttft * 1e9), int(options.tpot * 1e9)
    return found


def main() -> int:
    parser = argparse.ArgumentParser()
    for name in ("url", "lines", "scenario", "outdir"):
        parser.add_argument(name, choices=["offline", "server"] if name == "scenario" else None)
    for name, default in (("seconds", 60.0), ("qps", 10.0), ("ttft", 6.0), ("tpot", 0.175)):
        parser.add_argument(f"--{name}", type=float, default=default)
    options = parser.parse_args()
    try:
        urlopen(f"{options.url}/ready", timeout=10).close()
    except OSError as error:
        sys.exit(f"{options.url}/ready: {error}: wait until the daemon is ready")
    daemon = Daemon(options)
    count, logs = len(daemon.bodies), lg.LogSettings()
    sut, qsl = (
        lg.ConstructSUT(daemon.issue, lambda: None),
        lg.ConstructQSL(count, count, lambda _: None, lambda _: None),
    )
    logs.log_output.outdir = options.outdir
    lg.StartTestWithLogSettings(sut, qsl, settings(options, count), logs)
    summary = (Path(options.outdir) / "mlperf_log_summary.txt").read_text().splitlines()
    verdict = next(line for line in summary if line.startswith("Result is"))
    print(f"{verdict}; {len(daemon.failed)} failed {daemon.failed[:1]}")
    return 0 if verdict.endswith(": VALID") and not daemon.failed else 1


if __name__ == "__main__":
    sys.exit(main())
