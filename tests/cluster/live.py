"""A daemon with four ranks on two emulated nodes under a real Prometheus, and the ways to harm it.

Everything is what users run, but for: the rules' durations (rule_scale.py), a tree of port counters in the place of
/sys/class/infiniband, figures of GPUs as data from a second target, a disk whose fsync can be held up (slow_disk.c),
a wall clock that can be set (world.c), and ranks that obey two faults (rank_faults/).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from laddertron.launchers.cli.batch_client import BatchClient
from laddertron.tools.demos.demo import write_lines
from monitoring_queries import panel_queries
from rule_scale import scaled
from served_daemon import ask, wait_until
from world import World

from cluster.launching import ROOT, ranks_on
from cluster.live_parts import MONITORING, Gpus, Ports, poisoned_model, query
from cluster.nodes import Cluster

HERE = Path(__file__).parent
FACTOR = 30
"""Minutes of the rules become two seconds."""
NAN_TOKEN, DEADLY_TOKEN = 2001, 2002
"""A prompt with the first has NaN logits, one with the second kills rank 1."""
DAEMON, PROMETHEUS = "http://127.0.0.1:8000", "http://127.0.0.1:9090"
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}


def send_batch(daemon: str, lines: int, window: str = "24h", **more: Any) -> str:
    """Uploads a batch of the demo's prompts and starts it; its id. `more`: of each completion's body."""
    client = BatchClient(f"{daemon}/v1")
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
        write_lines(Path(file.name), lines, **more)
        uploaded = client.upload(Path(file.name))["id"]
    return str(client.create(uploaded, "/v1/completions", window, None, secrets.token_hex(8))["id"])


class Live:
    """What a test asks and harms. `seen`: panels' expressions that have found a series; `fired`: alerts that fired."""

    def __init__(self, cluster: Cluster, folder: Path, ports: Ports, gpus: Gpus, world: World, daemon: Any) -> None:
        self.cluster, self.folder, self.ports, self.gpus = cluster, folder, ports, gpus
        self.world, self.daemon = world, daemon
        self.seen: set[str] = set()
        self.fired: dict[str, float] = {}

    def firing(self) -> set[str]:
        found = ask(f"{PROMETHEUS}/api/v1/alerts")["data"]["alerts"]
        return {alert["labels"]["alertname"] for alert in found if alert["state"] == "firing"}

    def labels(self, alert: str) -> list[dict[str, str]]:
        """Of the alert's series that fire."""
        return [found["metric"] for found in query(PROMETHEUS, f'ALERTS{{alertname="{alert}", alertstate="firing"}}')]

    def look(self) -> list[tuple[str, str]]:
        """Asks every panel's expression; those that are empty now."""
        found = [(board, text, query(PROMETHEUS, text)) for board, text in panel_queries()]
        self.seen |= {text for _, text, series in found if series}
        return [(board, text) for board, text, series in found if not series]

    def quiet(self, *alerts: str, seconds: float = 120.0) -> None:
        """Waits until the daemon serves and none of the alerts (without any: no alert at all) fires."""
        wait_until("ready", lambda: ask(f"{DAEMON}/ready"), seconds)
        wanted = set(alerts)
        wait_until(
            f"no {', '.join(alerts) or 'alert'}",
            lambda: not (self.firing() & wanted if wanted else self.firing()),
            seconds,
        )

    def fires(self, *alerts: str, seconds: float = 90.0, beside: frozenset[str] = frozenset()) -> None:
        """Waits until each has fired. None but these and `beside` may begin to fire meanwhile."""
        began, before, met = time.monotonic(), self.firing(), set[str]()
        assert not before & set(alerts), f"{before & set(alerts)} fires before its fault"

        def all_met() -> bool:
            now = self.firing()
            strangers = now - before - set(alerts) - beside
            assert not strangers, f"{strangers} fires at the fault of {alerts}"
            for alert in now & set(alerts) - met:
                self.fired.setdefault(alert, time.monotonic() - began)
                print(f"  {alert}: fires after {time.monotonic() - began:.1f} s", flush=True)
            met.update(now & set(alerts))
            return met == set(alerts)

        try:
            wait_until("", all_met, seconds)
        except RuntimeError:
            raise AssertionError(f"{set(alerts) - met} did not fire within {seconds:g} s\n{self.tail()}") from None

    def ranks(self, node: int) -> list[int]:
        return sorted(ranks_on(self.cluster, node, "laddertron.launchers.rank.worker"))

    def rank_number(self, pid: int) -> str:
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return dict(item.split(b"=", 1) for item in environ if b"=" in item)[b"OMPI_COMM_WORLD_RANK"].decode()

    def restarts(self, reason: str) -> float:
        found = query(PROMETHEUS, f'sum(laddertron_engine_restarts_total{{reason="{reason}"}})')
        return float(found[0]["value"][1]) if found else 0.0

    def room(self, size: str) -> None:
        """The size of the data folder's disk, which is a tmpfs, from now on."""
        done = self.cluster.run(0, ["mount", "-o", f"remount,size={size}", str(self.folder / "data")])
        assert done.returncode == 0, done.stderr

    @contextlib.contextmanager
    def fault(self, name: str) -> Iterator[None]:
        """The file that slow_disk.c and rank_faults look for, inside the block."""
        path = self.folder / "faults" / name
        path.touch()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def traffic(self, clients: int = 3, **body: Any) -> Iterator[None]:
        """Interactive clients that repeat a request inside the block; `body`: fields of it."""
        end = threading.Event()

        def repeat(number: int) -> None:
            request = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 32, "seed": number, **body}
            while not end.wait(0.05 * (number + 1)):
                with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                    ask(f"{DAEMON}/v1/completions", request)

        threads = [threading.Thread(target=repeat, args=(number,)) for number in range(clients)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            end.set()
            for thread in threads:
                thread.join(35)

    def tail(self) -> str:
        return (self.folder / "daemon.log").read_text()[-3000:]


@contextlib.contextmanager
def held_back(pid: int, stop_s: float = 0.05, run_s: float = 0.005) -> Iterator[None]:
    """Inside the block the process runs a tenth of the time: stopped and let go again and again."""
    end = threading.Event()

    def hold() -> None:
        while not end.wait(run_s):
            os.kill(pid, signal.SIGSTOP)
            end.wait(stop_s)
            os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


@contextlib.contextmanager
def living(folder: Path) -> Iterator[Live]:
    """All of it, ready; this thread is on the first node's network until the block is left, and then nothing is
    left."""
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(Cluster(2))
        stack.enter_context(cluster.network(0))
        gpus = Gpus()
        stack.callback(gpus.close)
        ports = Ports(cluster, folder)
        (folder / "faults").mkdir()
        (folder / "data").mkdir()
        mounted = cluster.run(0, ["mount", "-t", "tmpfs", "-o", "size=40g", "tmpfs", str(folder / "data")])
        assert mounted.returncode == 0, mounted.stderr
        _write_configs(cluster, folder, gpus.target)
        library = folder / "slow_disk.so"
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, HERE / "slow_disk.c", "-ldl"], check=True)
        world = World(folder)
        faults = world.environment | {"LADDERTRON_DISK": str(folder / "faults")}
        faults["LD_PRELOAD"] += f":{library}"
        serve = [sys.executable, "-m", "laddertron.launchers.cli", "serve", str(folder / "deploy.yaml")]
        prometheus = ["prometheus", f"--config.file={folder / 'prometheus.yml'}", "--web.listen-address=127.0.0.1:9090"]
        prometheus.append(f"--storage.tsdb.path={folder / 'tsdb'}")
        with (folder / "daemon.log").open("w") as log:
            daemon = cluster.start(0, serve, {**QUIET, **faults}, stdout=log, stderr=log)
        live = Live(cluster, folder, ports, gpus, world, daemon)
        with _words(folder):
            wait_until("the daemon", lambda: ask(f"{DAEMON}/ready"), 120, daemon)
            with (folder / "prometheus.log").open("w") as log:
                scraper = cluster.start(0, prometheus, stdout=log, stderr=log)
            wait_until("prometheus", lambda: query(PROMETHEUS, 'up{job="laddertron"} == 1'), 60, scraper)
        yield live


@contextlib.contextmanager
def _words(folder: Path) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, urllib.error.URLError) as error:
        raise RuntimeError(f"{error}\n" + "".join(p.read_text()[-3000:] for p in folder.glob("*.log"))) from error


def _write_configs(cluster: Cluster, folder: Path, gpus: str) -> None:
    (folder / "hosts").write_text("".join(f"{name} slots=2\n" for name in cluster.names))
    env = {
        "PYTHONPATH": str(HERE / "rank_faults"),
        "LADDERTRON_FAULTS": str(folder / "faults"),
        "LADDERTRON_DEADLY": str(DEADLY_TOKEN),
    }
    model = poisoned_model(ROOT / "configs/demo/demo-ladder", folder / "model", NAN_TOKEN)
    deployment = {
        "model": {"path": str(model), "served_model_name": "demo", "dtype": "float32"},
        "parallel": {"tensor_parallel_size": 4},
        "launch": {"launcher": "openmpi", "hostfile": "./hosts", "rsh_agent": str(cluster.agent), "env": env},
        "engine": {
            "device": "cpu",
            "threads": 1,
            "max_num_seqs": 16,
            "max_num_batched_tokens": 256,
            "kv_cache_memory": "2MiB",
        },
        "daemon": {"data_dir": str(folder / "data"), "drain_timeout": "2s", "max_restarts": 8},
        "batch": {"deduplicate": False},  # greedy lines repeat the demo's prompts, and are to take their time
    }
    (folder / "deploy.yaml").write_text(yaml.safe_dump(deployment))
    (folder / "alerts.yml").write_text(scaled((MONITORING / "alerts.yml").read_text(), FACTOR))
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["scrape_configs"][0]["static_configs"][0]["targets"] = ["127.0.0.1:8000", gpus]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
