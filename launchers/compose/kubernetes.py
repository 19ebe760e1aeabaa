"""A deployment as Kubernetes manifests: an MPIJob (Kubeflow's operator, v2beta1) or a LeaderWorkerSet. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import PurePosixPath
from typing import Any

import yaml

from ...engine import child
from ...engine.config.load import Deployment
from ...topology.hardware.fabric import Fabric
from ...topology.json_codec import unbuild
from .hosts import LaunchError
from .slurm import node_shape

MOUNT = "/etc/laddertron"
CONFIG = f"{MOUNT}/deploy.yaml"
_SSH_CONFIG = "Host *\n  StrictHostKeyChecking accept-new\n  LogLevel ERROR\n"
# a mounted Secret's folder is writable by all as sshd sees it: StrictModes would refuse its keys
_SSHD = "ssh-keygen -A && {exec}/usr/sbin/sshd {flags}-o StrictModes=no"
_SSHD_BESIDE, _SSHD_ALONE = _SSHD.format(exec="", flags=""), _SSHD.format(exec="exec ", flags="-De ")


_PROBES = 9464
GPU_RESOURCE, RDMA_COUNT = "nvidia.com/gpu", 8
SSH_SECRET, KEYS_SECRET = "laddertron-ssh", "laddertron-keys"
SHM_BYTES = 64 << 30
"""The port of /health, /ready and /metrics if metrics.port is not set."""
_PATHS = (
    "model.tokenizer",
    "parallel.tuning_file",
    "launch.fabric",
    "daemon.export_dir",
    "daemon.tls_cert",
    "daemon.tls_key",
)


def gaps(deployment: Deployment, arguments: Sequence[str]) -> list[str]:
    """Settings of the deployment that the manifests leave out, each with its fix."""
    kube, daemon = deployment.launch.kubernetes, deployment.daemon
    serves = arguments[0] == "serve"
    messages = []
    if kube.model_claim is None:
        messages.append(f"launch.kubernetes.model_claim is null: the image must contain {deployment.model.path}")
    if serves and kube.data_claim is None:
        messages.append("launch.kubernetes.data_claim is null: batches and answers are lost with the pod")
    if deployment.parallel.require_transport == "ib" and kube.rdma_resource is None:
        messages.append(
            "parallel.require_transport=ib, and launch.kubernetes.rdma_resource is null: pods see no InfiniBand "
            "device, and every start is refused"
        )
    if serves and daemon.api_key_file is None:
        messages.append(
            "daemon.api_key_file is null: the daemon listens on its pod's loopback, and no Service is created"
        )
    mounted = [PurePosixPath(mount["mountPath"]) for mount in _mounts(deployment, serves)[0]]
    for key in _PATHS:
        path = attrgetter(key)(deployment)
        if path is not None and not any(PurePosixPath(path).is_relative_to(place) for place in mounted):
            messages.append(f"{key}={path} is in no volume of the pods: the image must contain it")
    return messages


def changed(deployment: Deployment) -> dict[str, Any]:
    """The deployment's keys that differ from the defaults, as in a deployment file."""
    keys: dict[str, Any] = _without_empty(unbuild(deployment))
    return keys


def _without_empty(value: Any) -> Any:
    """Removes empty sections."""
    if not isinstance(value, dict):
        return value
    return {key: section for key, item in value.items() if (section := _without_empty(item)) != {}}


def _config_map(deployment: Deployment, launch: Mapping[str, Any]) -> dict[str, Any]:
    keys = changed(deployment)
    section = {k: v for k, v in keys.get("launch", {}).items() if k not in ("hosts", "hostfile", "launcher", "slurm")}
    keys["launch"] = {k: v for k, v in section.items() if k != "kubernetes"} | {"launcher": "openmpi", **launch}
    kube = deployment.launch.kubernetes
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{kube.name}-config"},
        "data": {
            "deploy.yaml": yaml.safe_dump(keys, sort_keys=False, allow_unicode=True),
            "ssh_config": _SSH_CONFIG,
        },
    }


def _mounts(deployment: Deployment, serves: bool) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(mounts, volumes) of claims, and of the Secret with a daemon's keys. Raises LaunchError."""
    kube, keys = deployment.launch.kubernetes, deployment.daemon.api_key_file
    mounts: list[dict[str, Any]] = []
    volumes: list[dict[str, Any]] = []
    for name, claim, path, read_only in (
        ("model", kube.model_claim, str(PurePosixPath(deployment.model.path).parent), True),
        ("data", kube.data_claim, deployment.daemon.data_dir, False),
    ):
        if claim is not None:
            mounts.append({"name": name, "mountPath": path, "readOnly": read_only})
            volumes.append({"name": name, "persistentVolumeClaim": {"claimName": claim, "readOnly": read_only}})
    if serves and keys is not None:
        folder = str(PurePosixPath(keys).parent)
        if folder in [MOUNT, *(mount["mountPath"] for mount in mounts)]:
            raise LaunchError(f"daemon.api_key_file={keys}: its folder is already a volume: use a separate folder")
        mounts.append({"name": "keys", "mountPath": folder, "readOnly": True})
        volumes.append({"name": "keys", "secret": {"secretName": KEYS_SECRET, "defaultMode": 0o400}})
    return mounts, volumes


def _pod(
    deployment: Deployment, command: Sequence[str], per_node: int, ranks: bool, ssh: bool, serves: bool = False
) -> dict[str, Any]:
    """A pod's spec. `ranks`: it runs ranks and needs devices; `ssh`: it mounts ssh keys (an MPIJob's operator does so
    itself); `serves`: it runs the daemon."""
    kube = deployment.launch.kubernetes
    limits: dict[str, Any] = {}
    if ranks and deployment.engine.device != "cpu":
        limits[GPU_RESOURCE] = per_node
    if ranks and kube.rdma_resource is not None:
        limits[kube.rdma_resource] = RDMA_COUNT
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
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": str(SHM_BYTES)}},
    ]
    if ssh:
        mounts.append({"name": "ssh", "mountPath": "/root/.ssh", "readOnly": True})
        volumes.append({"name": "ssh", "secret": {"secretName": SSH_SECRET, "defaultMode": 0o400}})
    for own, more in zip((mounts, volumes), _mounts(deployment, serves), strict=True):
        own.extend(more)
    container: dict[str, Any] = {
        "name": "laddertron",
        "image": kube.image,
        "command": list(command),
        "env": [
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": child.SAFE_PATH, "value": "1"},
        ],
        "volumeMounts": mounts,
        # registering memory with an HCA locks it
        "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
    }
    if limits:
        container["resources"] = {"limits": limits}
    if serves:
        port = deployment.metrics.port or _PROBES
        container["ports"] = [{"name": "probes", "containerPort": port}]
        scheme = {"scheme": "HTTPS"} if deployment.daemon.tls_cert is not None else {}
        alive = {"httpGet": {"path": "/health", "port": port, **scheme}}
        # an older version's store is brought up to date before the door opens
        container["startupProbe"] = {**alive, "failureThreshold": 360}
        container["livenessProbe"] = {**alive, "failureThreshold": 6}
        container["readinessProbe"] = {"httpGet": {"path": "/ready", "port": port, **scheme}, "periodSeconds": 5}
    return {"containers": [container], "volumes": volumes}


def _program(deployment: Deployment, arguments: Sequence[str]) -> tuple[str, ...]:
    # $(POD_IP) is expanded by the kubelet: ranks in other pods, probes and clients must reach the daemon
    overrides = ["daemon.control_host=$(POD_IP)"]
    if arguments[0] == "serve":
        overrides += ["metrics.host=$(POD_IP)", f"metrics.port={deployment.metrics.port or _PROBES}"]
        if deployment.daemon.api_key_file is not None:
            overrides.append("daemon.host=$(POD_IP)")
    tail = (word for override in overrides for word in ("--set", override))
    return child.laddertron(arguments[0], CONFIG, *arguments[1:], *tail, python=deployment.launch.python or "python3")


def _service(deployment: Deployment, arguments: Sequence[str], selector: Mapping[str, str]) -> list[dict[str, Any]]:
    """The Service for clients of the daemon, if it has keys and therefore listens beyond its pod."""
    kube = deployment.launch.kubernetes
    if arguments[0] != "serve" or deployment.daemon.api_key_file is None:
        return []
    spec = {"selector": dict(selector), "ports": [{"name": "api", "port": deployment.daemon.port}]}
    # a LeaderWorkerSet's controller makes a Service of the set's own name
    metadata = {"name": f"{kube.name}-api"}
    return [{"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec}]


def mpijob(deployment: Deployment, fabric: Fabric | None, arguments: Sequence[str]) -> str:
    """The manifests for `laddertron <arguments>` in an MPIJob's launcher pod. Raises LaunchError."""
    nodes, per_node = node_shape(deployment, fabric)
    kube = deployment.launch.kubernetes
    launcher = _pod(deployment, _program(deployment, arguments), per_node, False, False, arguments[0] == "serve")
    worker = _pod(deployment, ("sh", "-c", _SSHD_ALONE), per_node, True, False)
    job = {
        "apiVersion": "kubeflow.org/v2beta1",
        "kind": "MPIJob",
        "metadata": {"name": kube.name},
        "spec": {
            "slotsPerWorker": per_node,
            "mpiImplementation": "OpenMPI",
            "runPolicy": {"cleanPodPolicy": "Running"},
            "mpiReplicaSpecs": {
                "Launcher": {"replicas": 1, "restartPolicy": "OnFailure", "template": {"spec": launcher}},
                "Worker": {"replicas": nodes, "template": {"spec": worker}},
            },
        },
    }
    labels = {"training.kubeflow.org/job-name": kube.name, "training.kubeflow.org/job-role": "launcher"}
    config_map = _config_map(deployment, {"hostfile": "/etc/mpi/hostfile"})
    return _documents(config_map, job, *_service(deployment, arguments, labels))


def leader_worker_set(deployment: Deployment, fabric: Fabric | None, arguments: Sequence[str]) -> str:
    """The manifests for `laddertron <arguments>` in the leader's pod, which holds ranks itself. Raises LaunchError."""
    nodes, per_node = node_shape(deployment, fabric)
    kube = deployment.launch.kubernetes
    if len(f"{kube.name}-0-{nodes}") > 63:
        raise LaunchError(
            f"launch.kubernetes.name={kube.name}: pod names would exceed 63 characters: use a shorter name"
        )
    pods = [f"{kube.name}-0", *(f"{kube.name}-0-{index}" for index in range(1, nodes))]
    leader = ("sh", "-c", f'{_SSHD_BESIDE} && exec "$@"', "sh", *_program(deployment, arguments))
    worker = ("sh", "-c", _SSHD_ALONE)
    group = {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": {"name": kube.name},
        "spec": {
            "replicas": 1,
            "leaderWorkerTemplate": {
                "size": nodes,
                # the daemon relaunches ranks itself; recreating the group would end the daemon as well
                "restartPolicy": "None",
                "leaderTemplate": {"spec": _pod(deployment, leader, per_node, True, True, arguments[0] == "serve")},
                "workerTemplate": {"spec": _pod(deployment, worker, per_node, True, True)},
            },
        },
    }
    hosts = [f"{pod}.{kube.name}:{per_node}" for pod in pods]
    labels = {
        "leaderworkerset.sigs.k8s.io/name": kube.name,
        "leaderworkerset.sigs.k8s.io/worker-index": "0",
    }
    return _documents(_config_map(deployment, {"hosts": hosts}), group, *_service(deployment, arguments, labels))


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as a readable block."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def _documents(*documents: Mapping[str, Any]) -> str:
    return "---\n".join(yaml.dump(d, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120) for d in documents)
