"""Batch scripts and manifests: golden files, the schema that controllers expect, the sbatch script under signals."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from kubernetes_schema import CONFIG_MAP, LWS, MPIJOB, SERVICE, pods
from laddertron.engine.config.load import Deployment, from_json, load, to_json
from laddertron.launchers.cli import __main__ as cli
from laddertron.launchers.compose.hosts import LaunchError
from laddertron.launchers.compose.kubernetes import changed, gaps, leader_worker_set, mpijob
from laddertron.launchers.compose.slurm import node_shape, sbatch
from laddertron.topology.hardware.presets import preset

CONFIGS = Path(__file__).parents[3] / "configs"
DEPLOYMENTS = Path(__file__).parents[2] / "fixtures/deployments"
GOLDEN = Path(__file__).parents[2] / "golden"


def golden(name: str, text: str) -> None:
    file = GOLDEN / name
    text = text.replace(str(CONFIGS.parent), "/deploy")
    if os.environ.get("LADDERTRON_GOLDEN") == "write":
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")


def deployment(name: str, *overrides: str) -> Deployment:
    file = DEPLOYMENTS / name
    return load(file if file.exists() else CONFIGS / name, overrides)


# Slurm


def test_sbatch_of_405b() -> None:
    """Nodes, tasks and GPUs from the deployment; requeue and the drain signal always; partition and account as said."""
    d = deployment("llama-3.1-405b-tp16.yaml", "launch.slurm.extra_args=[--partition=h100, --account=science]")
    golden("405b-serve.sbatch", sbatch(d, None, ("/opt/venv/bin/laddertron", "serve", "/shared/d.yaml"), True))
    run = ("/opt/venv/bin/laddertron", "run", "/shared/d.yaml", "-i", "in put.jsonl", "-o", "out.jsonl", "--resume")
    d = deployment("llama-3.1-405b-tp16-x2.yaml", "launch.slurm.extra_args=[--time=0-01:30:00, --mem=0]")
    golden("405b-x2-run.sbatch", sbatch(d, None, run, False))


def test_shape_of_an_allocation() -> None:
    """How many nodes to ask for, and that nobody guesses how many ranks a node takes."""
    assert node_shape(deployment("llama-3.1-405b-tp16-x2.yaml"), None) == (4, 8)
    assert node_shape(deployment("llama-3.1-70b-tp8.yaml", "parallel.tensor_parallel_size=4"), None) == (1, 4)
    assert node_shape(
        deployment("llama-3.1-70b-tp8.yaml", "parallel.tensor_parallel_size=4", "parallel.replicas=4"), None
    ) == (2, 8)
    assert node_shape(deployment("llama-3.1-8b.yaml"), None) == (1, 1)
    assert node_shape(deployment("demo.yaml"), preset("2x8xH100")) == (1, 2)
    assert node_shape(deployment("demo.yaml", "launch.hosts=['a:1', 'b:1']"), None) == (2, 1)
    with pytest.raises(LaunchError, match=r"Set launch\.ranks_per_node"):
        node_shape(deployment("demo.yaml"), None)


def test_a_directive_cannot_smuggle_a_line() -> None:
    """A newline in extra_args would begin a line of shell in the script."""
    d = deployment("llama-3.1-70b-tp8.yaml", 'launch.slurm.extra_args=["--mem=0\\ntouch x"]')
    with pytest.raises(LaunchError, match="one line"):
        sbatch(d, None, ("prog",), True)


def run_script(
    folder: Path, service: bool, child: str, ready: str, sent: signal.Signals | None
) -> tuple[int, str, str]:
    """Runs the emitted script with `child` in place of laddertron and a recording scontrol; sends `sent` once the child
    has printed `ready`. Returns (exit code, stdout, what scontrol was told)."""
    d = deployment("llama-3.1-70b-tp8.yaml")
    (folder / "child.sh").write_text(child, encoding="utf-8")
    script = folder / "job.sbatch"
    script.write_text(sbatch(d, None, ("bash", str(folder / "child.sh")), service), encoding="utf-8")
    scontrol = folder / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" > "{folder}/requeued"\n', encoding="utf-8")
    scontrol.chmod(0o755)
    environ = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "77"}
    with subprocess.Popen(
        ["bash", str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environ,
        start_new_session=True,
    ) as job:
        assert job.stdout is not None
        deadline = threading.Timer(120, os.killpg, (job.pid, signal.SIGKILL))
        deadline.start()
        lines = []
        for line in job.stdout:
            lines.append(line)
            if sent is not None and ready in line:
                job.send_signal(sent)
                sent = None
        code = job.wait()
        deadline.cancel()
    told = folder / "requeued"
    return code, "".join(lines), told.read_text(encoding="utf-8").strip() if told.exists() else ""


DRAINS = """
trap 'echo draining; for i in 1 2 3; do echo line $i; done; exit 3' TERM
echo ready
while :; do sleep 0.05; done
"""


def test_the_drain_signal_is_passed_on_and_the_job_requeued(tmp_path: Path) -> None:
    """1. Slurm sends USR1 to the batch script. 2. laddertron gets TERM, drains, ends by itself. 3. Only then is the job
    requeued."""
    code, output, told = run_script(tmp_path, False, DRAINS, "ready", signal.SIGUSR1)
    assert (code, told) == (0, "requeue 77")
    assert output.splitlines() == ["ready", "draining", "line 1", "line 2", "line 3"]


def test_a_run_that_finished_while_draining_is_not_requeued(tmp_path: Path) -> None:
    """All lines were answered before the time was up: nothing is left for another job. A service goes on."""
    done = DRAINS.replace("exit 3", "exit 0")
    assert run_script(tmp_path, False, done, "ready", signal.SIGUSR1)[::2] == (0, "")
    assert run_script(tmp_path, True, done, "ready", signal.SIGUSR1)[::2] == (0, "requeue 77")


def test_cancelled_or_failed_jobs_are_not_requeued(tmp_path: Path) -> None:
    """scancel (TERM) is passed on and obeyed; a command that fails by itself ends the job with its code."""
    assert run_script(tmp_path, True, DRAINS, "ready", signal.SIGTERM)[::2] == (3, "")
    assert run_script(tmp_path, True, "echo ready; exit 5", "never", None)[::2] == (5, "")


def test_run_is_emitted_with_resume(capsys: pytest.CaptureFixture[str]) -> None:
    """A requeued script begins again from its first line: `run` must not do finished lines twice."""
    file = str(CONFIGS / "llama-3.1-70b-tp8.yaml")
    assert cli.main(["launch", file, "run", "-i", "a", "-o", "b", "--emit", "slurm"]) == 0
    assert " -i a -o b --resume &\n" in capsys.readouterr().out
    assert cli.main(["launch", file, "serve", "--emit", "slurm", "--set", "engine.seed=3"]) == 0
    assert " --set engine.seed=3 &\n" in capsys.readouterr().out


# Kubernetes


def kubernetes_config() -> Deployment:
    return deployment(
        "llama-3.1-405b-tp16.yaml",
        "launch.kubernetes.image=registry.example/laddertron:1",
        "launch.kubernetes.model_claim=models",
        "launch.kubernetes.data_claim=store",
        "launch.kubernetes.rdma_resource=rdma/hca",
        "daemon.api_key_file=/etc/laddertron-keys/keys.json",
        "launch.python=/opt/venv/bin/python",
        "launch.env.NCCL_DEBUG=WARN",
        "launch.hosts=[these, are, elsewhere]",
    )


def documents(text: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(text))


@pytest.mark.parametrize(("kind", "schema"), [("mpijob", MPIJOB), ("lws", LWS)])
def test_manifests(kind: str, schema: dict[str, Any], tmp_path: Path) -> None:
    """Golden, of the controllers' schema, and the deployment inside is one that loads: its hosts are the pods."""
    d = kubernetes_config()
    text = (mpijob if kind == "mpijob" else leader_worker_set)(d, None, ("serve",))
    golden(f"405b-{kind}.yaml", text)
    config_map, job, service = documents(text)
    jsonschema.validate(config_map, CONFIG_MAP)
    jsonschema.validate(job, schema)
    jsonschema.validate(service, SERVICE)
    daemon, worker = (pod["containers"][0] for pod in pods(job))
    assert daemon["readinessProbe"]["httpGet"] == {"path": "/ready", "port": 9464}
    assert "metrics.port=9464" in daemon["command"]
    assert "daemon.host=$(POD_IP)" in daemon["command"]
    assert {"name": "keys", "mountPath": "/etc/laddertron-keys", "readOnly": True} in daemon["volumeMounts"]
    assert "keys" not in [mount["name"] for mount in worker["volumeMounts"]]
    for pod in pods(job):
        volumes = [volume["name"] for volume in pod["volumes"]]
        assert len(volumes) == len(set(volumes))
        for container in pod["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
            where = [mount["mountPath"] for mount in container["volumeMounts"]]
            assert len(where) == len(set(where))
        for volume in pod["volumes"]:
            assert volume.get("configMap", config_map["metadata"])["name"] == config_map["metadata"]["name"]
    (tmp_path / "deploy.yaml").write_text(config_map["data"]["deploy.yaml"], encoding="utf-8")
    inside = load(tmp_path / "deploy.yaml")
    assert (inside.model, inside.parallel, inside.engine) == (d.model, d.parallel, d.engine)
    assert inside.launch.launcher == "openmpi"
    assert "elsewhere" not in text
    if kind == "mpijob":
        assert inside.launch.hostfile == "/etc/mpi/hostfile"
    else:
        assert inside.launch.hosts == ("laddertron-0.laddertron:8", "laddertron-0-1.laddertron:8")
    # every pod that holds ranks asks for their devices and may lock memory
    limits = re.findall(r"nvidia.com/gpu: (\d+)", text)
    assert limits == ["8"] * (1 if kind == "mpijob" else 2)
    assert text.count("IPC_LOCK") == 2


def spoilt(value: Any) -> Iterator[Any]:
    """Copies of a manifest, each with one field's name a letter longer or one number or word of another type."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield {k + "s" * (k == key): v for k, v in value.items()}
            for other in spoilt(inner):
                yield value | {key: other}
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from ([*value[:i], other, *value[i + 1 :]] for other in spoilt(inner))
    else:
        yield None


@pytest.mark.parametrize(("make", "schema"), [(mpijob, MPIJOB), (leader_worker_set, LWS)])
def test_the_schemas_see_every_slip(make: Callable[..., str], schema: dict[str, Any]) -> None:
    """Whichever field is misspelt, or holds nothing: refused. Resources alone have names of their users' own."""
    job = documents(make(kubernetes_config(), None, ("serve",)))[1]
    check, tried = jsonschema.Draft202012Validator(schema), 0
    for bad in spoilt(job):
        text = json.dumps(bad)
        if "nvidia.com/gpus" in text or "rdma/hcas" in text:
            continue
        tried += 1
        assert not check.is_valid(bad), text
    assert tried > 150


def test_what_the_manifests_leave_out_is_named() -> None:
    """The shipped file as it is: no claim, no RDMA resource, no key, an export folder in no volume; nothing of a
    daemon for another command."""
    shipped = deployment("llama-3.1-405b-tp16.yaml")
    text = "\n".join(gaps(shipped, ("serve",)))
    for words in ("model_claim is null", "data_claim is null", "rdma_resource is null", "api_key_file is null"):
        assert words in text
    assert "daemon.export_dir=/shared/laddertron/export is in no volume" in text
    assert [gap.split()[0] for gap in gaps(kubernetes_config(), ("serve",))] == [
        "daemon.export_dir=/shared/laddertron/export"
    ]
    assert "data_claim" not in "\n".join(gaps(shipped, ("run",)))
    beside = deployment("llama-3.1-405b-tp16.yaml", "daemon.api_key_file=/etc/laddertron/keys.json")
    with pytest.raises(LaunchError, match="already a volume"):
        mpijob(beside, None, ("serve",))


def test_manifests_know_names_that_are_too_long() -> None:
    """A pod's name is a DNS label of at most 63 letters; longer deployments' names are refused when read."""
    with pytest.raises(Exception, match="DNS label of up to 40"):
        deployment("demo.yaml", f"launch.kubernetes.name={'x' * 41}")


def test_changed_is_the_deployment_again() -> None:
    """What goes into the ConfigMap is short, and says everything."""
    for file in sorted(CONFIGS.glob("*.yaml")):
        d = load(file)
        said = changed(d)
        assert from_json(said) == d
        assert len(str(said)) < len(str(to_json(d))) / 2 or file.name == "reference.yaml"
