"""Ranks on nodes that tests/cluster makes on this machine, a core each: what the benchmarks here measure on.

`on_nodes` runs a generator of a script on the first node (by `python two_nodes.py SCRIPT FUNCTION JSON`), where it may
set the link and start sets of ranks, and yields its rows here. As root.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from runpy import run_path
from tempfile import TemporaryDirectory
from typing import Any

HERE = Path(__file__).resolve().parent
TESTS = HERE.parents[2] / "tests"
sys.path[:0] = [str(TESTS), str(HERE.parent), str(HERE)]

from cluster.nodes import CONTROL, Cluster, Control, kill, why_not  # noqa: E402
from laddertron.engine.config import schema as keys  # noqa: E402
from laddertron.launchers.measure.rank_job import BenchJob  # noqa: E402
from laddertron.models.config.dialects import dialect_of, stock_json, to_dialect  # noqa: E402
from laddertron.models.config.model_config import from_folder, make_wiring  # noqa: E402
from peers.model import LLAMA_150M  # noqa: E402

RANK = "laddertron.tools.benchmarks.cross_node.law_rank"
MS = 1e-3
MTU = 65000
"""A message of a decode step is one frame: an InfiniBand adapter, too, is given it whole."""
Row = dict[str, Any]
SHAPE: Row = {
    **LLAMA_150M, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16",
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "eos_token_id": 1,
}  # fmt: skip
"""config.json of the Llama of 150M."""
LANES: Row = {
    **SHAPE, "model_type": "laneformer_tp", "architectures": ["LaneformerTPForCausalLM"], "norm_eps": 1e-5,
    "num_lanes": 2, "broadcast_delay": 2,
}  # fmt: skip
ROOM = keys.EngineConfig(
    device="cpu", threads=1, max_num_seqs=32, max_num_batched_tokens=256, speculation=False,
    enable_prefix_caching=False, kv_cache_memory=128 << 20,
)  # fmt: skip


def declaring(fields: Row, wiring: str, ranks: int | None = None) -> Row:
    """config.json of the same shape for weights of this wiring; ranks: those that a desync wiring is for."""
    with TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(fields))
        config = from_folder(Path(folder))
    made = make_wiring(wiring, config.num_layers, tensor_parallel_size=ranks)
    config = replace(config, wiring=made, declares_wiring=True)
    return to_dialect(config, stock_json(config, {}), dialect_of(config))


@dataclass(frozen=True)
class Site:
    """The first node. `folder` has a folder for each model, and the host file; `agent` stands in for ssh."""

    folder: Path
    agent: str

    @cached_property
    def switch(self) -> Control:
        return Control(os.environ[CONTROL])

    def deployment(
        self, model: str, wiring: str = "auto", parallel: Mapping[str, Any] | None = None, **engine: Any
    ) -> keys.Deployment:
        """A deployment with random weights. parallel: overrides two ranks that never split a step; engine: overrides
        ROOM."""
        return keys.Deployment(
            keys.ModelSection(str(self.folder / model), wiring=wiring, load_format="dummy"),
            keys.ParallelConfig(**{"tensor_parallel_size": 2, "split_steps": "never", **(parallel or {})}),
            keys.LaunchConfig(hostfile=str(self.folder / "hosts"), rsh_agent=self.agent, interface="eth0"),
            replace(ROOM, **engine),
        )

    def job(self, name: str, deployment: keys.Deployment, **asked: Any) -> BenchJob:
        """asked: what law_rank.py lets one change."""
        return BenchJob(deployment, name, RANK, [json.dumps(asked)])


def rate(job: BenchJob, batch: int, prompt: int, generate: int) -> float:
    """Decoded tokens/s of one run."""
    timing = job.ask("case", batch=batch, prompt=prompt, generate=generate)
    return float(timing["decode_tokens"] / timing["decode_s"])


def insist() -> None:
    """Exits with 2 where there can be no emulated nodes."""
    if (why := why_not()) is not None:
        print(f"no emulated nodes here: {why}", file=sys.stderr)
        sys.exit(2)


def lines_of(process: Any) -> Iterator[Row]:
    """The JSON lines among what it says, all of which is shown; then it has ended."""
    try:
        for line in process.stdout:
            print(line, end="", flush=True)
            if line.startswith("{"):
                yield json.loads(line)
        if process.wait(60.0) != 0:
            raise RuntimeError(f"the ranks ended with status {process.returncode}")
    finally:
        kill(process)


def on_nodes(
    work: Callable[..., Iterator[Row]], models: Mapping[str, Row], *words: Any, nodes: int = 2
) -> Iterator[Row]:
    """The rows of `work`, a script's function, called on the first node with its Site and `words`. models: fields of
    config.json by the model's folder."""
    cores = sorted(os.sched_getaffinity(0))
    with Cluster(nodes, cores=[[cores[-i % len(cores)]] for i in range(nodes)], mtu=MTU) as cluster:
        for name, fields in models.items():
            (cluster.scratch / name).mkdir()
            (cluster.scratch / name / "config.json").write_text(json.dumps(fields))
        (cluster.scratch / "hosts").write_text("".join(f"{name} slots=1\n" for name in cluster.names))
        called = [inspect.getfile(work), work.__name__, json.dumps([str(cluster.scratch), str(cluster.agent), *words])]
        yield from lines_of(
            cluster.start(
                0, [sys.executable, "-W", "ignore", __file__, *called],
                {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}, stdout=subprocess.PIPE,
            )
        )  # fmt: skip


def main() -> None:
    script, function, words = sys.argv[1:]
    folder, agent, *rest = json.loads(words)
    for row in run_path(script)[function](Site(Path(folder), agent), *rest):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
