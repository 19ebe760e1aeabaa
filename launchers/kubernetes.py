"""A deployment as Kubernetes manifests: an MPIJob (Kubeflow's operator, v2beta1) or a LeaderWorkerSet. Pure.

Both hold the deployment in a ConfigMap, its hosts rewritten to the pods' names; ranks are started by mpirun over the
pods' sshd, as on any cluster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

import yaml

from ..engine.config import Deployment, from_json, to_json
from ..topology.fabric import Fabric
from .hosts import LaunchError
from .slurm import node_shape

MOUNT = "/etc/laddertron"
CONFIG = f"{MOUNT}/deploy.yaml"
_SSH_CONFIG = "Host *\n  StrictHostKeyChecking accept-new\n  LogLevel ERROR\n"
# a mounted Secret's folder is writable by all as sshd sees it: StrictModes would refuse its keys
_SSHD = "ssh-keygen -A && {exec}/usr/sbin/sshd {flags}-o StrictModes=no"
_SSHD_BESIDE, _SSHD_ALONE = _SSHD.format(exec="", flags=""), _SSHD.format(exec="exec ", flags="-De ")


def changed(deployment: Deployment) -> dict[str, Any]:
    """What the deployment says beyond the defaults, as a deployment file would."""
    mine = to_json(deployment)
    usual = to_json(from_json({"model": {"path": deployment.model.path}}))

    def beyond(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in ours.items():
            if isinstance(value, dict) and isinstance(theirs.get(key), dict) and key != "env":
                if inner := beyond(value, theirs[key]):
                    found[key] = inner
            elif value != theirs.get(key):
                found[key] = value
        return found

    found = beyond(mine, usual)
    return {"model": {"path": deployment.model.path} | found.pop("model", {})} | found


def _config_map(deployment: Deployment, launch: Mapping[str, Any]) -> dict[str, Any]:
    said = changed(deployment)
    section = {k: v for k, v in said.get("launch", {}).items() if k not in ("hosts", "hostfile", "launcher", "slurm")}
    said["launch"] = {k: v for k, v in section.items() if k != "kubernetes"} | {"launcher": "openmpi", **launch}
    kube = deployment.launch.kubernetes
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{kube.name}-config", "namespace": kube.namespace},
        "data": {
            "deploy.yaml": yaml.safe_dump(said, sort_keys=False, allow_unicode=True),
            "ssh_config": _SSH_CONFIG,
        },
    }


def _pod(deployment: Deployment, command: Sequence[str], per_node: int, ranks: bool, ssh: bool) -> dict[str, Any]:
    """A pod's spec. `ranks`: it holds devices; `ssh`: it brings its own keys (an MPIJob's operator mounts them)."""
    kube = deployment.launch.kubernetes
    limits: dict[str, Any] = {}
    if ranks and deployment.engine.device != "cpu":
        limits[kube.gpu_resource] = per_node
    if ranks and kube.rdma_resource is not None:
        limits[kube.rdma_resource] = kube.rdma_count
    mounts: list[dict[str, Any]] = [
        {"name": "config", "mountPath": MOUNT, "readOnly": True},
        {
            "name": "config",
            "mountPath": "/etc/ssh/ssh_config.d/laddertron.conf",
            "subPath": "ssh_config",
            "readOnly": True,
        },
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    volumes: list[dict[str, Any]] = [
        {"name": "config", "configMap": {"name": f"{kube.name}-config"}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": str(kube.shm_size)}},
    ]
    if ssh:
        mounts.append({"name": "ssh", "mountPath": "/root/.ssh", "readOnly": True})
        volumes.append({"name": "ssh", "secret": {"secretName": kube.ssh_secret, "defaultMode": 0o400}})
    for name, claim, path, read_only in (
        ("model", kube.model_claim, str(PurePosixPath(deployment.model.path).parent), True),
        ("data", kube.data_claim, deployment.daemon.data_dir, False),
    ):
        if claim is not None:
            mounts.append({"name": name, "mountPath": path, "readOnly": read_only})
            volumes.append({"name": name, "persistentVolumeClaim": {"claimName": claim, "readOnly": read_only}})
    container: dict[str, Any] = {
        "name": "laddertron",
        "image": kube.image,
        "command": list(command),
        "env": [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
        "volumeMounts": mounts,
        # registering memory with an HCA locks it
        "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
    }
    if limits:
        container["resources"] = {"limits": limits}
    return {"containers": [container], "volumes": volumes}


def _program(deployment: Deployment, arguments: Sequence[str]) -> tuple[str, ...]:
    # $(POD_IP) is expanded by the kubelet: ranks in other pods must reach the daemon
    return (
        deployment.launch.python or "python3",
        "-m",
        "laddertron.launchers.cli",
        *arguments,
        "--set",
        "daemon.control_host=$(POD_IP)",
    )


def _subcommand(arguments: Sequence[str]) -> tuple[str, ...]:
    return (arguments[0], CONFIG, *arguments[1:])


def mpijob(deployment: Deployment, fabric: Fabric | None, arguments: Sequence[str]) -> str:
    """The manifests for `laddertron <arguments>` in an MPIJob's launcher pod. Raises LaunchError."""
    nodes, per_node = node_shape(deployment, fabric)
    kube = deployment.launch.kubernetes
    job = {
        "apiVersion": "kubeflow.org/v2beta1",
        "kind": "MPIJob",
        "metadata": {"name": kube.name, "namespace": kube.namespace},
        "spec": {
            "slotsPerWorker": per_node,
            "mpiImplementation": "OpenMPI",
            "runPolicy": {"cleanPodPolicy": "Running"},
            "mpiReplicaSpecs": {
                "Launcher": {
                    "replicas": 1,
                    "restartPolicy": "OnFailure",
                    "template": {
                        "spec": _pod(deployment, _program(deployment, _subcommand(arguments)), per_node, False, False)
                    },
                },
                "Worker": {
                    "replicas": nodes,
                    "template": {
                        "spec": _pod(
                            deployment,
                            ("sh", "-c", _SSHD_ALONE),
                            per_node,
                            True,
                            False,
                        )
                    },
                },
            },
        },
    }
    return _documents(_config_map(deployment, {"hostfile": "/etc/mpi/hostfile"}), job)


def leader_worker_set(deployment: Deployment, fabric: Fabric | None, arguments: Sequence[str]) -> str:
    """The manifests for `laddertron <arguments>` in the leader's pod, which holds ranks itself. Raises LaunchError."""
    nodes, per_node = node_shape(deployment, fabric)
    kube = deployment.launch.kubernetes
    if len(f"{kube.name}-0-{nodes}") > 63:
        raise LaunchError(f"launch.kubernetes.name={kube.name}: pod names would pass 63 letters: use a shorter one")
    pods = [f"{kube.name}-0", *(f"{kube.name}-0-{index}" for index in range(1, nodes))]
    leader = ("sh", "-c", f'{_SSHD_BESIDE} && exec "$@"', "sh", *_program(deployment, _subcommand(arguments)))
    worker = ("sh", "-c", _SSHD_ALONE)
    group = {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": {"name": kube.name, "namespace": kube.namespace},
        "spec": {
            "replicas": 1,
            "leaderWorkerTemplate": {
                "size": nodes,
                # the daemon relaunches ranks itself; recreating the group would end the daemon as well
                "restartPolicy": "None",
                "leaderTemplate": {"spec": _pod(deployment, leader, per_node, True, True)},
                "workerTemplate": {"spec": _pod(deployment, worker, per_node, True, True)},
            },
        },
    }
    hosts = [f"{pod}.{kube.name}.{kube.namespace}:{per_node}" for pod in pods]
    return _documents(_config_map(deployment, {"hosts": hosts}), group)


class _Dumper(yaml.SafeDumper):
    """Text of several lines as a block, so that people can read it."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def _documents(*documents: Mapping[str, Any]) -> str:
    return "---\n".join(yaml.dump(d, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120) for d in documents)
