"""The sbatch script of a deployment; it drains five minutes before its time limit and is requeued. The script runs
`laddertron serve` or `run` on the first node, which starts ranks with srun.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence

from ...engine import child
from ...engine.config.load import Deployment
from ...topology.hardware.fabric import Fabric, counted
from .host_allocation import divide
from .hosts import Host, HostAllocation, LaunchError

DRAIN_NOTICE_S = 300
WALL_TIME = "--time=1-00:00:00"
"""Unless `launch.slurm.extra_args` has another."""


def node_shape(deployment: Deployment, fabric: Fabric | None) -> tuple[int, int]:
    """(nodes, ranks per node) to request. Raises LaunchError where the ranks per node are unknown."""
    world, launch = deployment.parallel.world, deployment.launch
    devices = {len(n.devices) for n in fabric.nodes} - {0} if fabric is not None else set()
    per_node = launch.ranks_per_node or (devices.pop() if len(devices) == 1 else None)
    if per_node is None and launch.hosts and all(":" in h for h in launch.hosts):
        per_node = min(int(h.partition(":")[2]) for h in launch.hosts)
    if per_node is None and world.size == 1:
        per_node = 1
    if per_node is None:
        raise LaunchError(
            f"{world.size} ranks on how many nodes? Set launch.ranks_per_node (8 on a node of 8 GPUs), or launch.fabric"
        )
    tp, groups = world.tp, world.groups
    count = groups * -(-tp // per_node) if tp > per_node else -(-groups // (per_node // tp))
    hosts = tuple(Host(f"node{i}", per_node) for i in range(count))
    shares = divide(HostAllocation(hosts, f"launch.ranks_per_node={per_node}"), world, None)
    per_host = Counter(host.name for share in shares for host in share.hosts for _ in range(host.slots))
    return len(per_host), max(per_host.values())


def sbatch(deployment: Deployment, fabric: Fabric | None, program: Sequence[str], service: bool) -> str:
    """The script that runs the laddertron command `program`; `service`: without end. Raises LaunchError."""
    nodes, per_node = node_shape(deployment, fabric)
    slurm = deployment.launch.slurm
    head = [
        f"--job-name=laddertron-{deployment.served_model_name}",
        f"--nodes={nodes}",
        f"--ntasks-per-node={per_node}",
        *([f"--gpus-per-node={per_node}"] if deployment.engine.device != "cpu" else []),
        *([] if any(word.startswith("--time") for word in slurm.extra_args) else [WALL_TIME]),
        "--exclusive",
        "--requeue",
        "--open-mode=append",
        f"--signal=B:USR1@{DRAIN_NOTICE_S}",
        *slurm.extra_args,
    ]
    for line in head:
        if "\n" in line:
            raise LaunchError(f"launch.slurm: {line!r}: a #SBATCH option must be one line")
    again = "" if service else ' && [ "$code" -ne 0 ]'
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {line}" for line in head),
            "",
            f"# {counted(nodes, 'node')} x {counted(per_node, 'rank')}; laddertron starts them with srun from the "
            "first node.",
            "# USR1 arrives before the time limit: admission stops, running requests finish, results are committed,",
            "# and the job is requeued and resumes. Keep daemon.export_dir and output files on a shared disk.",
            f"export {child.SAFE_PATH}=1  # no Python program imports from the working directory",
            "set -u",
            "draining=0 stopping=0 asked=0 child=",
            'stop() { stopping=1; asked=1; [ -z "$child" ] || kill -TERM "$child" 2>/dev/null; }',
            """trap 'draining=1; echo "the time limit is near: draining" >&2; stop' USR1""",
            "trap stop TERM INT",
            "",
            f"{shlex.join(program)} &",
            "child=$!",
            "# a signal that came before the command had a number",
            '[ "$stopping" -eq 0 ] || kill -TERM "$child" 2>/dev/null',
            "# a signal ends `wait` early: wait again until the command itself has ended",
            'while asked=0; wait "$child"; code=$?; [ "$asked" -eq 1 ]; do :; done',
            "",
            f'if [ "$draining" -eq 1 ]{again}; then',
            '  exec scontrol requeue "$SLURM_JOB_ID"',
            "fi",
            'exit "$code"',
            "",
        ]
    )
