"""What the live test has in the place of what its machine does not: RDMA ports in a tree of files, GPUs as a page of
figures; a model with a poisoned token; queries of its Prometheus.
"""

from __future__ import annotations

import http.server
import shutil
import threading
import time
import urllib.parse
from pathlib import Path
from typing import Any

from laddertron.engine.job import MetricRow, RankHeartbeat
from laddertron.engine.metrics.observer import Observer
from prometheus_client import CollectorRegistry
from safetensors.torch import load_file, save_file
from served_daemon import ask

from cluster.launching import ROOT
from cluster.nodes import Cluster

_GPU = "laddertron_gpu_"
MONITORING = ROOT / "configs/monitoring"


def query(prometheus: str, expression: str) -> list[dict[str, Any]]:
    """An instant query's series. Raises URLError where Prometheus refuses it."""
    text = urllib.parse.urlencode({"query": expression})
    found: list[dict[str, Any]] = ask(f"{prometheus}/api/v1/query?{text}")["data"]["result"]
    return found


def poisoned_model(source: Path, folder: Path, token: int) -> Path:
    """A copy of a model with tied heads, with a head of its own and the token's embedding NaN."""
    shutil.copytree(source, folder)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"tie_word_embeddings": true', '"tie_word_embeddings": false'))
    tensors = load_file(folder / "model.safetensors")
    table = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = table.clone()
    table[token] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


class Ports:
    """One RDMA port a node as the kernel would show it, to be changed from outside."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self._folders = []
        for node, name in enumerate(cluster.names):
            tree = folder / f"class-{name}"
            port = tree / "infiniband/mlx5_0/ports/1"
            (port / "counters").mkdir(parents=True)
            (tree / "net").mkdir()
            self._folders.append(port)
            self.set(node, "state", "4: ACTIVE")
            for counter in ("port_rcv_data", "port_xmit_data", "port_xmit_wait", "symbol_error", "link_downed"):
                self.set(node, f"counters/{counter}", "0")
            # the real network devices stay where they were, inside the tree that hides them
            words = f"mount --bind /sys/class/net {tree}/net && mount --rbind {tree} /sys/class"
            done = cluster.run(node, ["sh", "-c", words])
            if done.returncode:
                raise RuntimeError(f"{name}: /sys/class cannot be replaced: {done.stderr}")

    def set(self, node: int, file: str, value: str) -> None:
        (self._folders[node] / file).write_text(value + "\n")


class Gpus(http.server.ThreadingHTTPServer):
    """A target that tells of four ranks' GPUs, which this machine does not have. `throttled`, `ecc`: what it tells."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _GpuPage)
        self.throttled, self.ecc = 0.0, 0.0
        self._metrics = Observer(CollectorRegistry())
        self._thread = threading.Thread(target=self.serve_forever)
        self._thread.start()

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.server_port}"

    def page(self) -> bytes:
        figures = {
            "gpu_memory_used_bytes": 7e10, "gpu_memory_total_bytes": 8e10, "gpu_utilization_ratio": 0.9,
            "gpu_sm_clock_hertz": 1.7e9, "gpu_temperature_celsius": 70.0, "gpu_power_watts": 600.0,
        }  # fmt: skip
        rows = (
            *(MetricRow(name, (), value) for name, value in figures.items()),
            MetricRow("gpu_throttled", ("thermal",), self.throttled),
            MetricRow("gpu_ecc_errors_total", ("uncorrected",), self.ecc),
        )
        for rank in range(4):
            report = RankHeartbeat(rank, f"n{rank // 2}", 1, 1, time.time(), rows)
            self._metrics.report(0, report)
        lines = self._metrics.render("")[0].decode().splitlines(True)
        return "".join(line for line in lines if line.split()[-2 if line[0] != "#" else 2].startswith(_GPU)).encode()

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()


class _GpuPage(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = self.server.page()  # type: ignore[attr-defined]
        self.send_response(200)
        self.send_header("content-type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: object) -> None: ...
