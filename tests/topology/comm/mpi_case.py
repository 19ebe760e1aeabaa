"""What test_collectives.py starts under mpirun: the MPI bootstrap, and each backend over it. Prints a JSON line a rank.
Not a test module; takes backends (comma-separated) and a number of ranks a node.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time

import numpy as np
import torch
from laddertron.topology.comm.bootstrap import MpiBootstrap
from laddertron.topology.comm.groups import BackendName, CommOptions
from laddertron.topology.connect import connect
from laddertron.topology.placement.layout import GroupLayout
from waiting import HANG_S


def main(backend: BackendName, per_node: int, bootstrap: MpiBootstrap) -> None:
    began = time.monotonic()
    size = bootstrap.size
    layout = GroupLayout(tuple(tuple(range(at, at + per_node)) for at in range(0, size, per_node)))
    options = CommOptions(backend=backend, process_groups=backend == "gloo", timeout_s=HANG_S)
    digest = hashlib.sha256()
    with connect(bootstrap, layout, options) as comm:
        for count in (1, 4096, 100_003):
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                generator = torch.Generator().manual_seed(count)
                parts = [torch.randn(count, generator=generator).to(dtype) for _ in range(size)]
                x, y = parts[comm.rank].clone(), parts[comm.rank].clone()
                first, second = comm.all_reduce.start(x), comm.all_reduce.start(y)
                assert torch.equal(first.wait(), second.wait())
                assert first.wait() is x
                error = (x.double() - torch.stack(parts).double().sum(0)).abs().max().item()
                assert error < (1e-5 if dtype == torch.float32 else 0.1), error
                digest.update(x.view(torch.uint8).numpy().tobytes())
        for layer in ("ladder attention", "ladder mlp", "ladder mlp"):
            comm.all_reduce.start(torch.ones(8), layer).wait()
        layers = {e.layer: (e.count, e.bytes) for e in comm.ledger.entries() if e.layer}
        assert layers == {"ladder attention": (1, 32), "ladder mlp": (2, 64)}
        assert [r.layer for r in comm.ledger.history()][-3:] == ["ladder attention", "ladder mlp", "ladder mlp"]
        got = comm.gather(np.full(1000, comm.rank, dtype=np.uint8))
        assert got.shape == (size, 1000)
        assert (got == np.arange(size)[:, None]).all()
        if comm.rank == 0:
            comm.plans.send(b"plan")
        else:
            assert comm.plans.receive(120) == b"plan"
        ops = {entry.op for entry in comm.ledger.entries()}
        assert "all_reduce" in ops, comm.ledger.entries()
        answer = {"rank": bootstrap.rank, "digest": digest.hexdigest(), "backend": comm.backend}
    answer["seconds"] = round(time.monotonic() - began, 3)
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    ranks = MpiBootstrap()
    for name in sys.argv[1].split(","):
        main(name, int(sys.argv[2]), ranks)  # type: ignore[arg-type]
