"""`make monitoring-demo`: the demo model's daemon under load, and a real Prometheus (Debian's package) with the shipped
rules. All on loopback and in a temporary folder; ^C or `--seconds` ends it.
"""

from __future__ import annotations

import argparse
import contextlib
import secrets
import shutil
import signal
import sys
import tempfile
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ...launchers.cli.batch_client import BatchClient
from .serving import ROOT, ask, free_port, serving, started, wait_until, write_lines

MONITORING = ROOT / "configs/monitoring"


@dataclass(frozen=True, slots=True)
class Addresses:
    daemon: str
    prometheus: str


def query(prometheus: str, expression: str) -> list[dict[str, Any]]:
    """An instant query's series. Raises URLError where Prometheus refuses it."""
    text = urllib.parse.urlencode({"query": expression})
    found: list[dict[str, Any]] = ask(f"{prometheus}/api/v1/query?{text}")["data"]["result"]
    return found


@contextlib.contextmanager
def monitored(folder: Path) -> Iterator[Addresses]:
    """The daemon, ready, and Prometheus, ready, each on a port of its own."""
    binary = shutil.which("prometheus")
    if binary is None:
        raise RuntimeError("prometheus is not installed (Debian: apt-get install prometheus)")
    shutil.copyfile(MONITORING / "alerts.yml", folder / "alerts.yml")
    settings = {"daemon.data_dir": folder / "data", "daemon.drain_timeout": "5s"}
    with serving(ROOT / "configs/demo.yaml", folder / "daemon.log", settings) as daemon:
        (folder / "prometheus.yml").write_text(_prometheus_config(daemon.port))
        at = Addresses(daemon.url, f"http://127.0.0.1:{(port := free_port())}")
        scrape = [binary, f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'tsdb'}"]
        with started([*scrape, f"--web.listen-address=127.0.0.1:{port}"], folder / "prometheus.log") as prometheus:
            wait_until("prometheus", lambda: query(at.prometheus, 'up{job="laddertron"} == 1'), 60, prometheus)
            yield at


def _prometheus_config(port: int) -> str:
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    target = {"targets": [f"127.0.0.1:{port}"], "labels": {"deployment": "demo"}}
    config["scrape_configs"][0]["static_configs"] = [target]
    return yaml.safe_dump(config)


def send_batch(daemon: str, lines: int, window: str = "24h", **more: Any) -> str:
    """Uploads a batch of the demo prompts and starts it; its id. `more`: of each completion's body."""
    client = BatchClient(f"{daemon}/v1")
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
        write_lines(Path(file.name), lines, **more)
        uploaded = client.upload(Path(file.name))["id"]
    return str(client.create(uploaded, "/v1/completions", window, None, secrets.token_hex(8))["id"])


class DemoClients:
    """Interactive clients that repeat requests until `close`. `body` overrides fields of a completion."""

    def __init__(self, daemon: str, clients: int = 3, body: Mapping[str, Any] | None = None) -> None:
        self._daemon, self._body, self._end = daemon, body or {}, threading.Event()
        self._threads = [threading.Thread(target=self._ask_on, args=(i,)) for i in range(clients)]
        for thread in self._threads:
            thread.start()

    def _ask_on(self, number: int) -> None:
        while not self._end.wait(0.05 * (number + 1)):
            with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                body = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 32, "seed": number, **self._body}
                ask(f"{self._daemon}/v1/completions", body)

    def close(self) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join(35)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make monitoring-demo")
    parser.add_argument("--seconds", type=float, default=0.0, help="end after so long; 0: at ^C")
    wanted = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="laddertron-monitoring-") as name:
        try:
            with monitored(Path(name)) as at:
                send_batch(at.daemon, 5000)
                traffic = DemoClients(at.daemon)
                try:
                    print(f"metrics      {at.daemon}/metrics\nprometheus   {at.prometheus}/alerts")
                    print(f"             {at.prometheus}/graph?g0.expr=laddertron:overlap_ratio:rate5m&g0.tab=0")
                    print("dashboards   configs/monitoring/grafana/*.json (with Docker: docker compose up there)")
                    print(f"logs         {name}\n^C ends it", flush=True)
                    threading.Event().wait(wanted.seconds or None)
                finally:
                    traffic.close()
        except RuntimeError as error:
            for log in sorted(Path(name).glob("*.log")):
                print(f"--- {log.name}\n{log.read_text()[-3000:]}", file=sys.stderr)
            print(f"monitoring-demo: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
