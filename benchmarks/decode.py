"""How fast a model of random weights decodes, by wiring: prints one JSON line a case.

    python benchmarks/decode.py --tp 2 --wirings standard,ladder,no-communication --batch 1,8
    python benchmarks/decode.py --tp 2 --wirings ladder --overlap true,false --delay-ms 0.5

Ranks come from mpirun on this host, one core each where there are enough; `--delay-ms` lays an emulated link under
every all-reduce (its lines say so). Wirings take turns in one set of ranks. comm_hidden_s and comm_exposed_s are rank
0's, over all decode steps; rss_mb is the largest rank's.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from laddertron.topology.comm.groups import Communicator

TURN = 8


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tp", type=int, default=2, help="ranks")
    parser.add_argument("--wirings", default="standard,parallel,ladder,no-communication")
    parser.add_argument("--overlap", default="true", help="true, false or true,false")
    parser.add_argument("--batch", default="1,8")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--gen", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--weights", default="stored", choices=["stored", "int8"], help="of the layers' matrices")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--ffn", type=int, default=2816)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--delay-ms", type=float, default=0.0, help="of an emulated link, one way")
    parser.add_argument("--threads", type=int, default=1, help="compute threads a rank")
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    args = parse()
    if args.as_rank:
        be_rank(args)
        return 0
    beside = Path(sys.executable).with_name("mpirun")
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    if mpirun is None:
        print("no mpirun beside this Python nor on PATH: make env installs one", file=sys.stderr)
        return 2
    cores = len(os.sched_getaffinity(0))
    place = ["--bind-to", "core"] if args.tp * args.threads <= cores and args.threads == 1 else ["--bind-to", "none"]
    words = [mpirun, "--allow-run-as-root", "--oversubscribe", *place, "-np", str(args.tp)]
    words += [sys.executable, "-W", "ignore", __file__, "--as-rank", *sys.argv[1:]]
    return subprocess.run(words, env={**os.environ, "OMP_NUM_THREADS": str(args.threads)}).returncode


def be_rank(args: argparse.Namespace) -> None:
    import torch
    from bench_model import Size, make_model, make_runner, rewired
    from laddertron.launchers.measure.lanes import Lane
    from laddertron.topology.comm.bootstrap import MpiBootstrap
    from laddertron.topology.comm.collectives import Blocking
    from laddertron.topology.comm.emulated import Emulated
    from laddertron.topology.comm.groups import CommOptions
    from laddertron.topology.connect import connect
    from laddertron.topology.emulation import Emulation
    from laddertron.topology.placement.layout import GroupLayout
    from lanes import Driver, play

    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    bootstrap = MpiBootstrap()
    batches = [int(b) for b in args.batch.split(",")]
    size = Size(
        "bench",
        args.hidden,
        args.layers,
        args.heads,
        args.kv_heads,
        args.ffn,
        args.vocab,
        args.dtype,
        positions=args.prompt + args.gen,
    )
    layout = GroupLayout((tuple(range(bootstrap.size)),))
    with connect(bootstrap, layout, CommOptions()) as communicator:
        all_reduce: Any = communicator.all_reduce
        if args.delay_ms:
            link = Emulation(f"link {args.delay_ms:g} ms", args.delay_ms * 1e-3)
            all_reduce = Emulated(all_reduce, link, communicator.ledger)
        model = make_model(size, communicator, weights=args.weights)
        lanes: list[Lane] = []
        cases = []
        for wiring in args.wirings.split(","):
            for overlap in args.overlap.split(","):
                collective = all_reduce if overlap == "true" else Blocking(all_reduce)
                runner, limits = make_runner(
                    rewired(model, wiring, collective), communicator, max(batches), max(batches) * args.prompt
                )
                lanes.append(Lane(len(lanes), wiring, runner, limits))
                cases.append((wiring, overlap == "true"))
        lines = []

        def lead() -> None:
            drivers = [Driver(lane, communicator) for lane in lanes]
            for driver in drivers:  # kernels and tables are warm, and so is the link
                driver.begin(1, args.prompt, 4)
                driver.end()
            for batch in batches:
                for driver in drivers:
                    driver.begin(batch, args.prompt, args.gen)
                left = args.gen - 2
                while left > 0:
                    for driver in drivers:
                        driver.turn(min(TURN, left))
                    left -= TURN
                for driver, (wiring, overlap) in zip(drivers, cases, strict=True):
                    steps = driver.end()
                    line = {
                        "model": f"random {args.hidden}x{args.layers}",
                        "dtype": args.dtype,
                        "weights": args.weights,
                        "tp": communicator.size,
                        "wiring": wiring,
                        "overlap": overlap,
                        "batch": batch,
                        "prompt": args.prompt,
                        "gen": args.gen,
                        "prefill_tok_s": round(batch * args.prompt / steps.prefill_s, 1),
                        "decode_tok_s": round(batch / statistics.median(steps.decode_s), 1),
                        "comm_hidden_s": round(steps.hidden_s, 4),
                        "comm_exposed_s": round(steps.exposed_s, 4),
                    }
                    if args.delay_ms:
                        line["link"] = f"emulated, {args.delay_ms:g} ms"
                    lines.append(line)

        play(lanes, communicator, lead)
        rss = report_memory(communicator)
        for line in lines:
            print(json.dumps({**line, "rss_mb": rss}), flush=True)


def report_memory(communicator: Communicator) -> int:
    """MB of the largest rank's resident memory at its peak; all ranks call it."""
    import numpy as np

    mine = np.array([resource.getrusage(resource.RUSAGE_SELF).ru_maxrss], np.int64)
    every = communicator.gather(mine.view(np.uint8))
    return int(np.ascontiguousarray(every).view(np.int64).max()) * 1024 // 1_000_000


if __name__ == "__main__":
    sys.exit(main())
