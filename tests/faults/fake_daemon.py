"""`laddertron serve` as it ships but for its ranks: `fake_daemon.py STARTS STEP_S CONFIG KEY=VALUE...`. Real daemon,
store, supervisor and keeper; a stand-in for mpirun, fake ranks that tell STARTS what they run. No torch: it starts at
once. POISON in the environment is a token id whose appearance kills a rank; FAULT=loading makes rank 1 fail to load."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "launchers" / "job"))

from job_tools import fake_mpirun
from laddertron.engine.config.load import Deployment, read
from laddertron.engine.identity import ModelIdentity, identity_of
from laddertron.launchers import serve
from laddertron.launchers.cli.commands.run import read_text
from laddertron.launchers.job import reload
from laddertron.launchers.job.detect import JobFailure
from laddertron.launchers.job.options import JobOptions
from laddertron.launchers.job.replica import JobHooks, ReplicaSpec
from laddertron.topology.placement.world import World


def main() -> int:
    starts, step_s, path, *overrides = sys.argv[1:]
    config: dict[str, object] = {"max_num_seqs": 8, "vocab": 2048, "step_s": float(step_s), "starts": starts}
    if "POISON" in os.environ:
        config["poison"] = [int(os.environ["POISON"])]
    if os.environ.get("FAULT") == "loading":
        config["raise_loading"] = 1
    loaded = read(path, overrides)
    daemon = loaded.deployment.daemon

    def specs(
        deployment: Deployment, failed: Callable[[int, JobFailure], None], in_use: dict[str, int] | None = None
    ) -> list[ReplicaSpec]:
        command = fake_mpirun()
        # a kill point every second would otherwise mostly hit the wait before a relaunch
        options = JobOptions(
            World(2),
            max_failures=daemon.max_restarts,
            longest_backoff_s=0.5 if daemon.max_restarts > 3 else 30,
            standby=daemon.standby > 0,
        )
        hooks = JobHooks(failed=lambda failure: failed(0, failure))
        return [ReplicaSpec(lambda excluded: command, json.dumps(config), options, hooks)]

    def identity(deployment: Deployment) -> ModelIdentity:
        """Without files and weights, which fake ranks do not read."""
        return ModelIdentity(identity_of(deployment).digest, {}, {})

    vars(serve)["replica_specs"] = specs
    vars(reload)["identity_of"] = identity
    serving = reload.Serving(os.getpid(), path, tuple(overrides), os.getcwd())
    try:
        return serve.serve(loaded, read_text(loaded), serving)
    except serve.ServeError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
