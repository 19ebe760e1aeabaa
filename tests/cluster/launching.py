"""What tests of real launchers share: a deployment of the demo model on emulated nodes, its batch, who is left."""

from __future__ import annotations

import json
import os
from pathlib import Path

from cluster.nodes import Cluster

ROOT = Path(__file__).parent.parent.parent


class Job:
    """A YAML file and a batch of seeded lines in `folder`; `launch`: the lines of its launch section."""

    def __init__(self, folder: Path, launch: str, tp: int, lines: int = 24, tokens: int = 16, more: str = "") -> None:
        self.config, self.input = folder / "deploy.yaml", folder / "in.jsonl"
        self.output = folder / "out.jsonl"
        self.config.write_text(
            _CONFIG.format(model=ROOT / "configs" / "demo" / "demo-ladder", launch=launch, tp=tp, more=more)
        )
        body = {"model": "demo", "prompt": "class threading.Barrier\n", "max_tokens": tokens, "ignore_eos": True}
        envelope = {"method": "POST", "url": "/v1/completions"}
        asked = [{"custom_id": f"r-{i}", **envelope, "body": {**body, "seed": i}} for i in range(lines)]
        self.names = sorted(f"r-{i}" for i in range(lines))
        self.input.write_text("".join(json.dumps(line) + "\n" for line in asked))
        self.files = ("-i", str(self.input), "-o", str(self.output))

    def command(self, python: str, *, launch: bool, arguments: tuple[str, ...] = ()) -> list[str]:
        """`laddertron launch CONFIG run …` or `laddertron run CONFIG …`."""
        words = ["launch", str(self.config), "run"] if launch else ["run", str(self.config)]
        return [python, "-m", "laddertron.launchers.cli", *words, *self.files, *arguments]

    def answered(self) -> list[str]:
        """custom_ids of the whole lines, sorted: duplicates show."""
        data = self.output.read_bytes() if self.output.exists() else b""
        return sorted(json.loads(line)["custom_id"] for line in data.splitlines(True) if line.endswith(b"\n"))


def running(cluster: Cluster) -> dict[int, str]:
    """Command lines by pid (this process's view) of what runs on the nodes; zombies and the nodes' keepers left out."""
    inside, found = os.readlink(f"/proc/{cluster.init}/ns/pid"), {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            if os.readlink(f"/proc/{name}/ns/pid") == inside:
                words = Path(f"/proc/{name}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                if words and not words.startswith(str(cluster.scratch / "cluster")):
                    found[int(name)] = words
        except OSError:
            continue
    return found


def processes(cluster: Cluster) -> list[str]:
    """The command lines alone."""
    return list(running(cluster).values())


def ranks_on(cluster: Cluster, node: int, words: str) -> list[int]:
    """Pids of Python processes on one node whose command line holds `words`."""
    network = cluster.run(node, ["readlink", "/proc/self/ns/net"]).stdout.strip()
    return [
        pid
        for pid, line in running(cluster).items()
        if words in line and "python" in line.split()[0] and os.readlink(f"/proc/{pid}/ns/net") == network
    ]


_CONFIG = """\
model: {{path: {model}, served_model_name: demo, dtype: float32}}
parallel: {{tensor_parallel_size: {tp}{more}}}
launch: {{{launch}}}
engine: {{device: cpu, threads: 1, max_num_seqs: 8, max_num_batched_tokens: 256, kv_cache_memory: 64MiB}}
daemon: {{data_dir: ./data}}
"""
