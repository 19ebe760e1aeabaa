"""`make rehearse`: the deployment of Llama 3.1 405B from `check` to `acceptance`, on two emulated nodes of eight ranks
and a spare, with the shipped files and a model scaled down. Faults are real: a rank is killed, a node cut off.

    PYTHONPATH=tests:tests/helpers python -m cluster.rehearsal
        --write       as root; renews docs/rehearsal.md and its pictures
        --per-node 1  the same steps with a rank on each node

Everything is in one temporary folder and ends with this process.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml
from laddertron.topology.hardware.sysfs import Sysfs, available_bytes
from openai import OpenAI

from cluster import bad_morning, rehearsal_model
from cluster.draw_board import draw
from cluster.launching import ROOT, ranks_on, running
from cluster.live_parts import MONITORING, query
from cluster.nodes import Cluster, why_not

sys.path[:0] = [str(ROOT / "tests" / "monitoring"), str(ROOT / "tools" / "benchmarks")]

from common import renewed  # noqa: E402
from rule_scale import scaled  # noqa: E402

PAGE = ROOT / "docs" / "rehearsal.md"
DRAWN = ("overview", "fabric", "reliability")
"""Dashboards that are drawn."""
MODEL = "llama-3.1-405b"
DAEMON, PROMETHEUS = "http://127.0.0.1:8000", "http://127.0.0.1:9090"
RANK = "laddertron.launchers.rank.worker"
RANK_BYTES = 400 << 20
"""Of a rank, most of it Python and torch."""
FACTOR = 30
"""The durations of the alert rules are divided by this."""
WAIT_S = 1800.0
LIMITS = {"min_speed": 0, "max_load": 1, "recovery_margin": "1h", "max_spread": 100}
"""Of acceptance and preflight: many ranks share two cores here, so that no speed is measured and ranks differ."""
"""For any event: only a defect lasts so long."""
TOKENS, STREAM_TOKENS = 6, 24
PREFLIGHT = r"ranks on|^. (?:32 K|8 M)iB|slowest|saved|no tuning"
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}


class Failed(RuntimeError):
    """A step did not do what it should."""


class Transcript:
    """What an operator would see, step by step: on stdout as it comes, and shortened as lines for the page."""

    def __init__(self, names: dict[str, str]) -> None:
        self._names, self.lines = names, list[str]()
        self._began = time.monotonic()

    def say(self, text: str) -> None:
        for path, name in self._names.items():
            text = text.replace(path, name)
        print(text, flush=True)
        self.lines += text.splitlines()

    @contextlib.contextmanager
    def step(self, title: str) -> Iterator[None]:
        began = time.monotonic()
        self.say(title if title.startswith("#") else f"$ {title}")
        yield
        self.say(f"({time.monotonic() - began:.0f} s)\n")

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began


class Rehearsal:
    """The nodes, the deployment file and the daemon; each method is a few steps."""

    def __init__(self, cluster: Cluster, folder: Path, per_node: int, lines: int) -> None:
        self.cluster, self.folder, self.per_node, self.lines = cluster, folder, per_node, lines
        self.config = folder / "deploy.yaml"
        self.show = Transcript({f"{folder}/": "", str(cluster.agent): "ssh", f"{Path(sys.executable).parent}/": ""})
        self._streams: list[StreamReader] = []

    def write(self, shipped: str, **parallel: Any) -> None:
        """The shipped file for these nodes and this model: what differs from a site's is written over it."""
        found = yaml.safe_load((ROOT / shipped).read_text())
        slots = [f"{name}:{self.per_node}" for name in self.cluster.names]
        stages = found["parallel"].get("pipeline_parallel_size", 1)
        size = 2 * self.per_node // stages
        found["model"] |= {"path": str(self.folder / "model"), "served_model_name": MODEL, "max_model_len": 2048}
        found["parallel"] |= {"tensor_parallel_size": size, "require_transport": "any", **parallel}
        found["launch"] = {
            "launcher": "openmpi", "hosts": slots[:2], "spare_hosts": slots[2:], "oversubscribe": True,
            "rsh_agent": str(self.cluster.agent), "ranks_per_node": self.per_node, "env": QUIET,
        }  # fmt: skip
        if (fabric := self.folder / "fabric.json").exists():
            found["launch"]["fabric"] = str(fabric)
        found["engine"] |= {"device": "cpu", "threads": 1, "kv_cache_memory": "64MiB"}
        found["daemon"] = {
            "data_dir": str(self.folder / "data"), "export_dir": str(self.folder / "export"), "drain_timeout": "5m",
            "heartbeat_timeout": "60s",
        }  # fmt: skip
        found.pop("metrics", None)
        found["acceptance"] = LIMITS
        self.config.write_text(yaml.safe_dump(found, sort_keys=False))

    def laddertron(self, *words: str, shown: int | str = 4, codes: tuple[int, ...] = (0,)) -> int:
        """Runs a command on the first node; its exit code. `shown`: of its output, the first lines or those that match.
        Raises Failed for another code than `codes`."""
        with self.show.step(f"laddertron {' '.join(words)}"):
            argv = [sys.executable, "-m", "laddertron.launchers.cli", *words]
            done = self.cluster.run(0, argv, QUIET, timeout=WAIT_S)
            lines = (done.stdout + done.stderr * (done.returncode > 0)).splitlines()
            if done.returncode not in codes:
                raise Failed(f"laddertron {words[0]}: exit code {done.returncode}:\n{done.stdout}{done.stderr}")
            self.show.say(
                "\n".join(lines[:shown] if isinstance(shown, int) else [x for x in lines if re.search(shown, x)])
            )
            if done.returncode:
                self.show.say(f"exit code {done.returncode}")
        return int(done.returncode)

    def plan_and_measure(self) -> None:
        config = str(self.config)
        self.show.say(f"# {2 * self.per_node} ranks on 2 nodes, {rehearsal_model.LAYERS} layers\n")
        self.write("tests/fixtures/deployments/llama-3.1-405b-tp16.yaml")
        self.laddertron("check", config)
        self.laddertron("plan", config)
        self.laddertron("launch", config, "serve", "--dry-run", shown=r"^(/| +-)")
        self.laddertron("launch", config, "topo", "--save", str(self.folder / "fabric.json"), shown="group|saved")
        self.write("tests/fixtures/deployments/llama-3.1-405b-tp16.yaml")
        tuning = str(self.folder / "tuning.json")
        self.laddertron("preflight", config, "--save", tuning, shown=PREFLIGHT)
        self.write("tests/fixtures/deployments/llama-3.1-405b-tp16.yaml", tuning_file=tuning)

    # the daemon

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """The daemon on the first node, ready, and Prometheus beside it with the shipped rules."""
        argv = [sys.executable, "-m", "laddertron.launchers.cli", "serve", str(self.config)]
        with (self.folder / "serve.log").open("w") as log, self.show.step(f"laddertron serve {self.config} &"):
            self.daemon = self.cluster.start(0, argv, QUIET, stdout=log, stderr=log)
            self.until("ready", lambda: self.ready()["status"] == "ready")
            self.show.say(f"/ready: {self.ready()['status']}")
        (self.folder / "alerts.yml").write_text(scaled((MONITORING / "alerts.yml").read_text(), FACTOR))
        settings = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
        settings["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        settings["scrape_configs"][0]["static_configs"][0]["targets"] = ["127.0.0.1:8000"]
        (self.folder / "prometheus.yml").write_text(yaml.safe_dump(settings))
        argv = ["prometheus", f"--config.file={self.folder / 'prometheus.yml'}", "--web.listen-address=127.0.0.1:9090"]
        with (self.folder / "prometheus.log").open("w") as log:
            self.cluster.start(0, [*argv, f"--storage.tsdb.path={self.folder / 'tsdb'}"], stdout=log, stderr=log)
        ranks = 2 * self.per_node
        up = f"count(laddertron_rank_up == 1) == {ranks}"
        with self.show.step("prometheus --config.file=prometheus.yml &"):
            self.until("scraped metrics of every rank", lambda: bool(query(PROMETHEUS, up)))
            self.show.say(f"count(laddertron_rank_up == 1): {ranks}")
        yield

    def ready(self) -> dict[str, Any]:
        """The body of /ready."""
        try:
            with urllib.request.urlopen(f"{DAEMON}/ready", timeout=30) as answer:
                found: dict[str, Any] = json.load(answer)
        except urllib.error.HTTPError as error:
            found = json.load(error)
        return found

    def until(self, what: str, condition: Callable[[], object]) -> None:
        """Asks five times a second. Raises Failed with the end of the daemon's log."""
        deadline = time.monotonic() + WAIT_S
        while True:
            with contextlib.suppress(OSError, KeyError):
                if condition():
                    return
            if self.daemon.poll() is not None or time.monotonic() > deadline:
                log = (self.folder / "serve.log").read_text()[-6000:]
                raise Failed(f"{what}: {'not in time' if self.daemon.poll() is None else 'the daemon exited'}\n{log}")
            time.sleep(0.2)

    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{DAEMON}/v1", api_key="none", timeout=WAIT_S)

    def stream(self, count: int) -> None:
        """Opens so many, and waits until each has tokens."""
        opened = [StreamReader(self.client(), len(self._streams) + n) for n in range(count)]
        self._streams += opened
        self.until("tokens of every stream", lambda: all(s.tokens > 1 for s in opened))

    def faults(self) -> None:
        """A batch during which a rank is killed and a node cut off, with streams open each time."""
        client = self.client()
        chats = ([{"role": "user", "content": f"{n}: what crosses the nodes?"}] for n in range(self.lines))
        rows = (
            {
                "custom_id": f"line-{n}", "method": "POST", "url": "/v1/chat/completions",
                "body": {"model": MODEL, "messages": chat, "max_tokens": TOKENS, "seed": n},
            }
            for n, chat in enumerate(chats)
        )  # fmt: skip
        data = "".join(json.dumps(row) + "\n" for row in rows).encode()
        with self.show.step(f"client.batches.create(...)                 # openai, {self.lines} lines"):
            file = client.files.create(file=("lines.jsonl", data), purpose="batch").id
            batch = client.batches.create(
                input_file_id=file, endpoint="/v1/chat/completions", completion_window="24h"
            ).id

            def completed() -> int:
                counts = client.batches.retrieve(batch).request_counts
                return counts.completed if counts else 0

            self.until("lines of the batch", lambda: completed() >= self.lines // 10)
            self.show.say(f"{completed()} of {self.lines} lines completed")
        self.kill_a_rank()
        self.until("more lines", lambda: completed() >= self.lines // 2)
        self.cut_a_node()
        with self.show.step("client.batches.retrieve(...)"):
            self.until(
                "the end of the batch",
                lambda: client.batches.retrieve(batch).status not in ("in_progress", "finalizing"),
            )
            ended = client.batches.retrieve(batch)
            text = client.files.content(ended.output_file_id).text if ended.output_file_id else ""
            ids = [json.loads(row)["custom_id"] for row in text.splitlines()]
            lost, twice = self.lines - len(set(ids)), len(ids) - len(set(ids))
            for one in self._streams:
                one.join(WAIT_S)
            broken = sum(one.end != "length" for one in self._streams)
            self.show.say(
                f"{ended.status}: {len(ids)} answers, {lost} lost, {twice} duplicate; "
                f"{len(self._streams)} streams, {broken} broken"
            )
            if ended.status != "completed" or lost or twice or broken:
                raise Failed(f"{ended}, streams: {[one.end for one in self._streams]}")

    def kill_a_rank(self) -> None:
        """The last rank of the second node: the alert names it."""
        self.stream(2)
        pid = sorted(ranks_on(self.cluster, 1, RANK))[-1]
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        number = dict(e.split(b"=", 1) for e in environ if b"=" in e)[b"OMPI_COMM_WORLD_RANK"].decode()
        with self.show.step(f"kill -9 {pid}                                  # rank {number}, on n1"):
            restarts = self.ready()["replicas"][0]["restarts"]
            os.kill(pid, signal.SIGKILL)
            alert = f'ALERTS{{alertname="LaddertronRankDown", alertstate="firing", rank="{number}", node="n1"}}'
            self.until(f"an alert about rank {number}", lambda: query(PROMETHEUS, alert))
            self.show.say(f"alert: LaddertronRankDown, rank {number} on n1")
            self.until("a relaunch", lambda: self.ready()["replicas"][0]["restarts"] > restarts)
            self.until("ready", lambda: self.ready()["status"] == "ready")
            self.show.say("/ready: ready")

    def cut_a_node(self) -> None:
        """No frame reaches the second node: it is named, and the spare takes its place."""
        self.stream(2)
        with self.show.step("# no frame reaches n1 any more"):
            for other in (0, 2):
                self.cluster.control.cut(1, other)
            began = time.monotonic()
            self.until("a reason that names n1", lambda: "n1" in self.ready()["reason"])
            if (seconds := time.monotonic() - began) > bad_morning.NAMED_S:
                raise Failed(f"a cut node was noticed after {seconds:.1f} s, allowed are {bad_morning.NAMED_S:g} s")
            self.show.say(f"/ready: {self.ready()['status']}: {self.ready()['reason'][:150]}")
            self.until("ranks on the spare", lambda: ranks_on(self.cluster, 2, RANK))
            self.until("ready", lambda: self.ready()["status"] == "ready")
            self.show.say(f"/ready: ready, {len(ranks_on(self.cluster, 2, RANK))} ranks on n2")
            for other in (0, 2):
                self.cluster.control.fix(1, other)

    def draw(self, began: float) -> None:
        """The dashboards from `began`, seconds of the epoch, to now, as files in the folder."""
        for board in DRAWN:
            empty = draw(PROMETHEUS, board, began, time.time(), self.folder / f"{board}.png")
            print(f"{board}: panels without data: {', '.join(empty) or 'none'}", flush=True)

    def leave(self) -> None:
        """Another layout without a restart, equal bits, and a drain with a stream open."""
        self.write("configs/405b/stock.yaml")
        self.laddertron("reload", str(self.config))
        short = ("--requests", "3", "--longest", "16", "--cases", "1")
        self.laddertron("verify", str(self.config), "--set", "parallel.deterministic=true", *short)
        self.stream(1)
        with self.show.step("kill -TERM $(pidof -x laddertron)           # drain"):
            (pid,) = ranks_on(self.cluster, 0, "laddertron.launchers.cli serve")
            os.kill(pid, signal.SIGTERM)
            code = self.daemon.wait(WAIT_S)
            self._streams[-1].join(WAIT_S)
            self.show.say(f"exit code {code}; the open stream ended with {self._streams[-1].end!r}")
            if code or self._streams[-1].end != "length":
                raise Failed(
                    f"exit code {code}, {self._streams[-1].end}\n{(self.folder / 'serve.log').read_text()[-4000:]}"
                )

    def accept(self) -> None:
        """The page is kept in build/. Raises Failed unless it is accepted."""
        page = self.folder / "acceptance.md"
        sizes = ("--prompt", "16", "--generate", "4", "--repeats", "1", "--cases", "1")
        self.laddertron("acceptance", str(self.config), "-o", str(page), *sizes, codes=(0, 1))
        text = page.read_text()
        (ROOT / "build").mkdir(exist_ok=True)
        (ROOT / "build" / "acceptance.md").write_text(text)
        (verdict,) = (line for line in text.splitlines() if line.startswith(("**Accepted", "**Not")))
        self.show.say(verdict)
        if verdict != "**Accepted.**":
            raise Failed(text)

    def bad_morning(self) -> None:
        """Each fault of a first morning, with the demo model: the line that names it, in time."""
        for fault in bad_morning.FAULTS:
            with self.show.step(f"# {fault.name}"), tempfile.TemporaryDirectory(dir=self.folder) as name:
                try:
                    line, seconds = bad_morning.meet(fault, self.cluster, Path(name))
                except AssertionError as error:
                    raise Failed(f"{fault.name}: {error}") from None
                self.show.say(f"{line[:160]}\n(named after {seconds:.1f} s)")
                if seconds > fault.limit_s:
                    raise Failed(f"{fault.name}: named after {seconds:.1f} s, allowed are {fault.limit_s:g} s")


class StreamReader(threading.Thread):
    """A streamed completion: its tokens so far, and how it ended."""

    def __init__(self, client: OpenAI, seed: int) -> None:
        super().__init__(daemon=True)
        self._client, self._seed = client, seed
        self.tokens, self.end = 0, "open"
        self.start()

    def run(self) -> None:
        try:
            events = self._client.completions.create(
                model=MODEL, prompt="Once upon a time", max_tokens=STREAM_TOKENS, seed=self._seed, stream=True,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            for event in events:
                self.tokens += 1
                self.end = str(event.choices[0].finish_reason)
        except Exception as error:  # every way in which a stream may break
            self.end = f"{type(error).__name__}: {error}"


def refusal(per_node: int) -> str | None:
    """Why there can be no rehearsal here."""
    if (reason := why_not()) is not None:
        return reason
    need, free = 4 * per_node * RANK_BYTES, available_bytes(Sysfs())
    if free < need:
        return (
            f"{2 * per_node} ranks, twice during a reload, need {need / 2**30:.1f} GiB; {free / 2**30:.1f} GiB are free"
        )
    if not any(Path(folder, "prometheus").exists() for folder in os.get_exec_path()):
        return "prometheus is not installed (Debian: apt-get install prometheus)"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(prog="make rehearse")
    parser.add_argument("--per-node", type=int, choices=(1, 2, 4, 8), default=8, help="ranks of a node")
    parser.add_argument("--lines", type=int, default=500, help="of the batch")
    parser.add_argument("--write", action="store_true", help="renew docs/rehearsal.md and the pictures of dashboards")
    wanted = parser.parse_args()
    per_node = wanted.per_node
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if (reason := refusal(per_node)) is not None:
        print(f"error: rehearse: {reason}", file=sys.stderr)
        return 2
    try:
        with tempfile.TemporaryDirectory(prefix="laddertron-rehearse-") as name, Cluster(3) as cluster:
            rehearsal = Rehearsal(cluster, Path(name), per_node, wanted.lines)
            rehearsal_model.write(rehearsal.folder / "model")
            with cluster.network(0):
                rehearsal.bad_morning()
                rehearsal.plan_and_measure()
                with rehearsal.serving():
                    began = time.time()
                    rehearsal.faults()
                    rehearsal.draw(began)
                    rehearsal.leave()
                rehearsal.accept()
            left = [words for words in running(cluster).values() if RANK in words]
            if left:
                raise Failed(f"processes are left: {left}")
            show = rehearsal.show
            for board in DRAWN if wanted.write else ():
                shutil.copy(rehearsal.folder / f"{board}.png", ROOT / "docs" / "pictures")
    except Failed as error:
        print(f"error: rehearse: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(f"{show.seconds:.0f} s in all")
    if wanted.write:
        PAGE.write_text(renewed(PAGE.read_text(), (f"    {line}".rstrip() for line in show.lines)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
