"""The deployment file: what it accepts, and that every fault is one located line, all of them at once."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from laddertron.engine.config.bind import hints
from laddertron.engine.config.load import ConfigError, Deployment, digest, draft, from_json, load, read, to_json
from laddertron.engine.config.rules import RULES
from laddertron.engine.config.schema import REMOVED

CONFIGS = Path(__file__).parents[3] / "configs"


def write(folder: Path, text: str) -> Path:
    file = folder / "deploy.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def faults(folder: Path, text: str, *overrides: str) -> list[str]:
    """The fault lines, the folder's name left out."""
    with pytest.raises(ConfigError) as caught:
        load(write(folder, text), overrides)
    return [line.replace(f"{folder}/", "") for line in caught.value.faults]


def keys(section: Any, path: str = "") -> set[str]:
    """Every leaf key of the schema, dotted."""
    found: set[str] = set()
    for name, annotation in hints(section).items():
        here = f"{path}.{name}" if path else name
        found |= keys(annotation, here) if dataclasses.is_dataclass(annotation) else {here}
    return found


def leaves(data: dict[str, Any], path: str = "") -> set[str]:
    found: set[str] = set()
    for name, value in data.items():
        here = f"{path}.{name}" if path else name
        found |= leaves(value, here) if isinstance(value, dict) and value else {here}
    return found


# The reference


def test_reference_names_every_key_and_no_other() -> None:
    """A key that the schema gained and reference.yaml did not, or the other way round, fails here."""
    said = yaml.safe_load((CONFIGS / "reference.yaml").read_text(encoding="utf-8"))
    assert leaves(said) == keys(Deployment)


def test_reference_says_the_defaults(tmp_path: Path) -> None:
    """reference.yaml loads to exactly what a file with nothing but a model path loads to."""
    shutil.copy(CONFIGS / "reference.yaml", tmp_path / "reference.yaml")
    assert load(tmp_path / "reference.yaml") == load(write(tmp_path, "model: {path: ./model}"))


def test_reference_explains_every_key() -> None:
    """Above each key, or above the group of keys it stands in, is a comment."""
    lines = (CONFIGS / "reference.yaml").read_text(encoding="utf-8").splitlines()
    silent = []
    for number, line in enumerate(lines):
        if not line.startswith("  ") or line.lstrip().startswith("#") or line.rstrip().endswith(":"):
            continue
        above = number - 1
        while lines[above].strip() and not lines[above].lstrip().startswith("#") and not lines[above].endswith(":"):
            above -= 1
        if not lines[above].lstrip().startswith("#"):
            silent.append(line.strip())
    # these say it in their names
    assert set(silent) <= {"name: laddertron", "enabled: true", "namespace: default", "image: laddertron:latest"} | {
        "host: 127.0.0.1"
    }


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.yaml")), ids=lambda file: file.name)
def test_shipped_configs_load(file: Path) -> None:
    """What configs/ ships is what a user begins with."""
    assert from_json(to_json(load(file))) == load(file)


# Faults


def test_all_faults_at_once_each_with_its_line(tmp_path: Path) -> None:
    """One pass fixes them all: unknown, wrong type, out of range, twice, missing, and rules between keys."""
    text = """\
model:
  pathe: ./m
  dtype: bf16
  dtype: float16
parallel:
  tensor_parallel_size: 0
  colective: flat
engine: {max_num_seqs: lots, enable_prefix_caching: 1, kv_cache_memory: 5 parsecs}
launch:
  env: {GOOD: 1, BAD: on, "a b": x}
  hosts: [a:8, "b c"]
tensor_parallel_size: 3
daemon: {host: 0.0.0.0, tls_key: k.pem}
"""
    found = faults(tmp_path, text)
    heads = [": ".join(line.split(": ")[:2]) for line in found]
    assert sorted(heads) == sorted(
        [
            "deploy.yaml:1: model.path",
            "deploy.yaml:2: model.pathe",
            "deploy.yaml:3: model.dtype",
            "deploy.yaml:4: model.dtype",
            "deploy.yaml:6: parallel.tensor_parallel_size",
            "deploy.yaml:7: parallel.colective",
            "deploy.yaml:8: engine.max_num_seqs",
            "deploy.yaml:8: engine.enable_prefix_caching",
            "deploy.yaml:8: engine.kv_cache_memory",
            "deploy.yaml:10: launch.env.BAD",
            "deploy.yaml:10: launch.env.a b",
            "deploy.yaml:11: launch.hosts",
            "deploy.yaml:12: tensor_parallel_size",
            "deploy.yaml:13: daemon.host",
            "deploy.yaml:13: daemon.tls_key",
        ]
    )
    assert [int(line.split(":")[1]) for line in found] == sorted(int(line.split(":")[1]) for line in found)
    text = "\n".join(found)
    assert "(did you mean path?)" in text
    assert "(did you mean bfloat16?)" in text
    assert "(did you mean parallel.tensor_parallel_size?)" in text
    assert "an integer from 1 to 1024" in text
    assert "first at deploy.yaml:3" in text


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("engine: {max_num_seqs: 1.5}", "1.5 is not an integer from 1 to 4096"),
        ("engine: {max_num_seqs: true}", "true is not an integer"),
        ("engine: {max_num_seqs: '8'}", "'8' is not an integer"),
        ("engine: {max_num_seqs: 1:30}", "1:30 is not an integer"),
        ("engine: {max_num_seqs: [8]}", "a list is not allowed here"),
        ("engine: {gpu_memory_utilization: .nan}", ".nan is not a number"),
        ("engine: {gpu_memory_utilization: .inf}", ".inf is not a number"),
        ("engine: {kv_cache_memory: 512M}", "'512M' is not a size in bytes such as 512MiB or 200MB"),
        ("engine: {kv_cache_memory: -1MiB}", "out of range"),
        ("engine: {kv_cache_memory: 1e30GB}", "out of range"),
        ("engine: {kv_cache_memory: 0.3B}", "is not a size"),
        ("engine: {block_size: null}", "nothing (null) is not an integer"),
        ("engine: []", "a list is not a section"),
        ("engine: {attention: flash}", "(did you mean flashinfer?)"),
        ("engine: {enable_prefix_caching: 'yes'}", "'yes' is not true or false"),
        ("engine: {cuda_graphs: always}", "'always' is not auto or true or false"),
        ("engine: {cuda_graphs: 1}", "1 is not auto or true or false"),
        ("parallel: {emulated_delay: 1 fortnight}", "is not a time such as 1ms"),
        ("parallel: {emulated_delay: 11s, collective: emulated}", "out of range"),
        ("model: {path: 5}", 'write "5"'),
        ("model: {path: ''}", "is not a path"),
        ("model: {path: ~/models}", "~ is not expanded"),
        (
            "model: {path: !!python/object/apply:os.system [id]}",
            "the tag tag:yaml.org,2002:python/object/apply:os.system",
        ),
        ("model: {path: !!binary aGk=}", "the tag tag:yaml.org,2002:binary is not allowed"),
        ("model: {path: m, served_model_name: two words}", "a name without spaces"),
        ("launch: {hosts: node1}", "'node1' is not a list of"),
        ("launch: {hosts: ['-x']}", "is not a host name"),
        ("launch: {env: [A=1]}", "is not a table of NAME: text"),
        ("launch: {env: {A: ~}}", "put it in quotes"),
        ("launch: {bind_to: ''}", "is not text"),
        ("daemon: {port: 65536}", "an integer from 0 to 65535"),
        ("daemon: {limits: {max_lines: 0}}", "out of range"),
        ("daemon: {limits: {max_linse: 5}}", "(did you mean max_lines?)"),
        ("base: &b {max_num_seqs: 8}\nengine: {<<: *b}", "merge keys (<<) are not allowed"),
        ("? [a]\n: 1", "a key must be a word"),
        ('model: {path: "a\\udfff"}', r"not YAML: \udfff is half of a character"),
        ('"\\ud800": 1', r"not YAML: \ud800 is half of a character"),
        ("max_num_seqs: 8", "(did you mean engine.max_num_seqs?)"),
    ],
)
def test_a_value_that_a_key_cannot_hold(tmp_path: Path, setting: str, says: str) -> None:
    """Each is said in one line, with what is allowed."""
    head = "" if setting.startswith("model") else "model: {path: m}\n"
    found = faults(tmp_path, head + setting)
    assert any(says in line for line in found), found
    assert all("\n" not in line for line in found)


RULE_CASES = (
    ("model: {path: m, wiring: hybrid}", "model.wiring", "needs model.ladder_layers"),
    ("model: {path: m, wiring: ladder, ladder_layers: 4}", "model.ladder_layers", "set wiring: hybrid"),
    ("model: {path: m, weights: int8}\nengine: {device: cuda}", "model.weights", "int8 needs engine.device: cpu"),
    ("model: {path: m, weights: int8, dtype: float16}", "model.weights", "needs dtype bfloat16, not float16"),
    ("daemon: {tls_key: a}", "daemon.tls_key", "needs daemon.tls_cert too"),
    ("engine: {speculation: true}", "engine.speculation", "use ngram, model, mtp, auto or false"),
    ("engine: {speculation: model}", "engine.speculation", "model needs engine.draft_model"),
    ("model: {path: m}\nengine: {draft_model: ./d}", "engine.draft_model", "has no effect with speculation false"),
    (
        "model: {path: m}\nengine: {draft_model: ./d, speculation: ngram}",
        "engine.draft_model",
        "no effect with speculation ngram",
    ),
    ("engine: {speculation: mtp, device: cuda}", "engine.speculation", "need engine.device: cpu"),
    (
        "model: {path: m}\nengine: {speculation: auto, draft_model: ./d, device: cuda}",
        "engine.speculation",
        "use ngram, auto without engine.draft_model",
    ),
    (
        "parallel: {pipeline_parallel_size: 2, pipeline_layers: [3, 3, 3]}",
        "parallel.pipeline_layers",
        "names 3 stages, pipeline_parallel_size is 2",
    ),
    (
        "parallel: {pipeline_parallel_size: 3, pipeline_microbatches: 2}",
        "parallel.pipeline_microbatches",
        "2 < 3 stages",
    ),
    ("launch: {port_range: 41000-40000}", "launch.port_range", "write the lower port first"),
    ("launch: {port_range: 40000-70000}", "launch.port_range", "the last port is 65535"),
    ("parallel: {pipeline_microbatches: 2}", "parallel.pipeline_microbatches", "has no effect with one stage"),
    (
        "parallel: {pipeline_parallel_size: 4}\nengine: {max_num_seqs: 3}",
        "engine.max_num_seqs",
        "3 < 4 micro-batches",
    ),
    (
        "parallel: {pipeline_parallel_size: 2}\nengine: {cuda_graphs: true}",
        "engine.cuda_graphs",
        "stages are not recorded yet",
    ),
    ("parallel: {split_steps: always}", "parallel.split_steps", "tensor_parallel_size is 1"),
    (
        "parallel: {split_steps: always, tensor_parallel_size: 2, overlap: false}",
        "parallel.split_steps",
        "always needs overlap: true",
    ),
    ("parallel: {emulated_delay: 1ms}", "parallel.emulated_delay", "set collective: emulated"),
    ("parallel: {collective: emulated}\nengine: {device: cuda}", "parallel.collective", "needs engine.device: cpu"),
    ("parallel: {backend: nccl}\nengine: {device: cpu}", "parallel.backend", "nccl needs engine.device: cuda"),
    ("parallel: {collective: one_shot}\nengine: {device: cpu}", "parallel.collective", "one_shot needs engine.device"),
    ("parallel: {collective: one_shot, backend: gloo}", "parallel.collective", "one_shot needs engine.device: cuda"),
    ("parallel: {collective: one_shot, deterministic: true}", "parallel.collective", "no effect with deterministic"),
    (
        "parallel: {deterministic: everywhere}\nengine: {device: cuda, kv_cache_dtype: fp8}",
        "parallel.deterministic",
        "not fp8: use kv_cache_dtype: auto",
    ),
    (
        "parallel: {deterministic: true}\nengine: {device: cpu, attention: torch}",
        "parallel.deterministic",
        "use engine.attention: auto",
    ),
    ("engine: {kv_cache_dtype: fp8, device: cpu}", "engine.kv_cache_dtype", "fp8 needs"),
    ("engine: {attention: flashinfer, device: cpu}", "engine.attention", "flashinfer needs"),
    ("engine: {cuda_graphs: true, device: cpu}", "engine.cuda_graphs", "true needs engine.device: cuda"),
    ("engine: {max_num_batched_tokens: 8, max_num_seqs: 9}", "engine.max_num_batched_tokens", "8 < max_num_seqs=9"),
    ("daemon: {tls_cert: a}", "daemon.tls_cert", "needs daemon.tls_key too"),
    ("daemon: {host: 0.0.0.0}", "daemon.host", "set daemon.api_key_file"),
    ("daemon: {host: 10.0.0.1}", "daemon.host", "set daemon.api_key_file"),
    ("daemon: {limits: {max_line_bytes: 300MB}}", "daemon.limits.max_line_bytes", "a line is part of a file"),
    ("metrics: {port: 8000}", "metrics.port", "the daemon's"),
    ("launch: {hosts: [a], hostfile: f}", "launch.hostfile", "keep one of them"),
    ("launch: {bind_to: placement}", "launch.bind_to", "needs launch.fabric"),
    (
        "launch: {share_gpu: true}\nparallel: {require_transport: ib}\nengine: {device: cuda}",
        "launch.share_gpu",
        "ranks that share a GPU",
    ),
    ("launch: {hosts: [a, b], spare_hosts: [b]}", "launch.hosts", "duplicate host b"),
    ("launch: {ranks_per_node: 8}\nparallel: {tensor_parallel_size: 12}", "launch.ranks_per_node", "divisor of 12"),
    (
        "launch: {hosts: ['a:8', 'b:4']}\nparallel: {tensor_parallel_size: 16}",
        "launch.hosts",
        "8 + 4 = 12 slots for 16 x 1 = 16 ranks",
    ),
)


@pytest.mark.parametrize(("text", "key", "says"), RULE_CASES)
def test_rules_between_keys(tmp_path: Path, text: str, key: str, says: str) -> None:
    """Broken alone, each rule is the only fault, at the line of the key that it names."""
    whole = text if "model:" in text else f"model: {{path: m}}\n{text}"
    [found] = faults(tmp_path, whole)
    assert f": {key}: " in found
    assert says in found
    line = int(found.split(":")[1])
    assert key.rpartition(".")[2] in whole.splitlines()[line - 1]


def test_every_rule_has_a_case(tmp_path: Path) -> None:
    """A row of the table that none of the cases above breaks fails here."""
    drafts = [
        draft(write(tmp_path, text if "model:" in text else f"model: {{path: m}}\n{text}")) for text, *_ in RULE_CASES
    ]
    unbroken = [rule for rule in RULES if not any(rule.broken(found.loaded.deployment) for found in drafts)]
    assert unbroken == []


def test_what_is_not_a_deployment_file(tmp_path: Path) -> None:
    """Not YAML, not a table, not UTF-8, not there, empty: each one line."""
    assert faults(tmp_path, "model: {path: m\n")[0].startswith("deploy.yaml:2: not YAML: ")
    assert "table of sections" in faults(tmp_path, "- a\n")[0]
    assert faults(tmp_path, "") == ["deploy.yaml:1: model.path: missing: a path must be given"]
    assert "not YAML" in faults(tmp_path, "a: 1\n---\nb: 2\n")[0]
    assert "not YAML" in faults(tmp_path, "a: \x07\n")[0]
    assert "not YAML" in faults(tmp_path, "a: *nowhere\n")[0]
    (tmp_path / "bad.yaml").write_bytes(b"model:\n  path: \xff\n")
    with pytest.raises(ConfigError, match=r"bad.yaml:2: byte 15 is not UTF-8"):
        load(tmp_path / "bad.yaml")
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read: No such file"):
        load(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match=r": a folder without config\.json: give a deployment file"):
        load(tmp_path)


def test_a_model_in_place_of_a_deployment_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub's name, a config.json: what to give instead. A model folder's errors name it without a line."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigError, match=r"^meta-llama/Llama-3\.1-8B: no such file; models are not downloaded by name: "
    ):
        load("meta-llama/Llama-3.1-8B")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=rf"config\.json: a model's config\.json: give its folder, {tmp_path}"):
        load(tmp_path / "config.json")
    assert read(tmp_path).fault("model.path", "wrong") == f"{tmp_path}: model.path: wrong"
    assert read(tmp_path).fault("daemon.port", "wrong") == f"{tmp_path}: daemon.port: wrong"


@pytest.mark.parametrize(("setting", "meant"), [("engine.device=gpu", "cuda"), ("model.dtype=half", "float16")])
def test_what_others_call_it(tmp_path: Path, setting: str, meant: str) -> None:
    [found] = faults(tmp_path, "model: {path: m}", setting)
    assert f"(did you mean {meant}?)" in found


def test_bombs_are_bounded(tmp_path: Path) -> None:
    """Aliases that multiply, aliases into themselves, deep nesting, huge files and huge numbers: refused within a
    second, without being built."""
    begun = time.process_time()
    multiply = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9))
    assert "more than 5000 values" in faults(tmp_path, multiply)[0]
    assert "nested more than 8 deep" in faults(tmp_path, "model: &m [*m]\n")[0]
    assert "nested more than 8 deep" in faults(tmp_path, "a: " + "[" * 3000 + "]" * 3000)[0]
    assert "more than 262144 bytes" in faults(tmp_path, "# " + "x" * 300_000)[0]
    assert "is not an integer" in faults(tmp_path, f"model: {{path: m}}\nengine: {{seed: {'9' * 100_000}}}")[0]
    assert time.process_time() - begun < 5


# Overrides


def test_overrides(tmp_path: Path) -> None:
    """--set is read as YAML, wins over the file, reaches nested keys, and makes sections that the file has not."""
    file = write(tmp_path, "model: {path: m}\nengine: {max_num_seqs: 8}\n")
    deployment = load(
        file,
        [
            "engine.max_num_seqs=16",
            "daemon.limits.max_lines=10",
            "launch.hosts=[a, b]",
            "launch.env.NAME=x=y",
            "engine.kv_cache_memory=1GiB",
            "model.served_model_name=null",
        ],
    )
    assert deployment.engine.max_num_seqs == 16
    assert deployment.daemon.limits.max_lines == 10
    assert deployment.launch.hosts == ("a", "b")
    assert deployment.launch.env == {"NAME": "x=y"}
    assert deployment.engine.kv_cache_memory == 2**30
    assert deployment.served_model_name == "m"


def test_a_faulty_override_is_blamed_itself(tmp_path: Path) -> None:
    """`--set key: …` in place of a line; the file's own faults are still told."""
    found = faults(
        tmp_path,
        "model: {path: m}\nengine: {block_size: 0}\n",
        "engine.max_num_seqs=-1",
        "engine.blok_size=3",
        "nothing",
        "engine=8",
        "engine.seed=[",
        "parallel.emulated_delay=1ms",
    )
    assert found[0].startswith("deploy.yaml:2: engine.block_size: 0 is out of range")
    assert found[1].startswith("--set ")
    text = "\n".join(found)
    assert "--set engine.max_num_seqs: -1 is out of range, allowed: an integer from 1 to 4096" in text
    assert "--set engine.blok_size: unknown key" in text
    assert "--set nothing: not of the form section.key=value" in text
    assert "--set engine=8: not of the form section.key=value" in text
    assert "--set engine.seed: not YAML" in text
    assert "--set parallel.emulated_delay: has no effect with collective auto" in text
    assert len(found) == 7


@pytest.mark.parametrize("removed", REMOVED)
def test_what_was_removed_names_what_to_do(removed: str, tmp_path: Path) -> None:
    """A key, or one of its values, in a file and by --set; for a key any value will do."""
    path, _, value = removed.partition("=")
    tree: Any = value or "auto"
    for key in reversed(path.split(".")):
        tree = {key: tree}
    text = json.dumps({**tree, "model": {"path": "m"} | tree.get("model", {})})
    shown = f"{value!r} was removed" if value else "removed"
    (fault,) = faults(tmp_path, text)
    assert fault.endswith(f": {path}: {shown}: {REMOVED[removed]}")
    (fault,) = faults(tmp_path, "model: {path: m}\n", f"{path}={value or 'auto'}")
    assert fault == f"--set {path}: {shown}: {REMOVED[removed]}"


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file's stand against its folder, --set's against the working directory; programs are left to PATH."""
    folder = tmp_path / "deploy"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    file = write(folder, "model: {path: ../models/m/}\nlaunch: {mpirun: mpirun.openmpi, python: ./bin/python}\n")
    deployment = load(file, ["launch.hostfile=hosts"])
    assert deployment.model.path == f"{tmp_path}/models/m"
    assert deployment.launch.mpirun == "mpirun.openmpi"
    assert deployment.launch.python == f"{folder}/bin/python"
    assert deployment.launch.hostfile == f"{tmp_path}/hosts"
    assert deployment.daemon.data_dir == f"{folder}/laddertron-data"
    assert load("deploy/deploy.yaml").model.path == deployment.model.path


def test_quantities(tmp_path: Path) -> None:
    """Sizes and times as people write them."""
    for text, size in (
        ("512MiB", 2**29),
        ("1.5GiB", 3 * 2**29),
        ("200MB", 200_000_000),
        ("4096", 4096),
        ("2 kB", 2000),
    ):
        file = write(tmp_path, f"model: {{path: m}}\nengine: {{kv_cache_memory: {text}}}")
        assert load(file).engine.kv_cache_memory == size
    for text, seconds in (("250us", 250e-6), ("1ms", 1e-3), ("1e-3", 1e-3), ("0.5", 0.5), ("2s", 2.0)):
        file = write(tmp_path, f"model: {{path: m}}\nparallel: {{collective: emulated, emulated_delay: {text}}}")
        assert load(file).parallel.emulated_delay == pytest.approx(seconds)
    assert (
        load(write(tmp_path, "model: {path: m}\ndaemon: {retention: 7d, drain_timeout: 2m}")).daemon.retention == 604800
    )


# Travelling


def test_a_switch_may_be_left_to_the_program(tmp_path: Path) -> None:
    """cuda_graphs holds true, false or auto, as YAML and as an override, and survives JSON."""
    for text, value in (("true", True), ("false", False), ("auto", "auto")):
        file = write(tmp_path, f"model: {{path: m}}\nengine: {{cuda_graphs: {text}}}")
        deployment = load(file)
        assert deployment.engine.cuda_graphs == value
        assert from_json(to_json(deployment)).engine.cuda_graphs == value
        assert load(write(tmp_path, "model: {path: m}"), [f"engine.cuda_graphs={text}"]).engine.cuda_graphs == value


def test_json_round_trip_and_digest(tmp_path: Path) -> None:
    """What the ranks get over the control channel is what the file said; its digest sees every key."""
    deployment = load(CONFIGS / "demo.yaml", ["launch.hosts=[a, b]", "launch.env.X=1"])
    wire = json.dumps(to_json(deployment))
    assert from_json(json.loads(wire)) == deployment
    assert digest(from_json(json.loads(wire))) == digest(deployment)
    assert len(digest(deployment)) == 32
    assert digest(load(CONFIGS / "demo.yaml")) != digest(deployment)
    hybrid = load(CONFIGS / "demo.yaml", ["model.wiring=hybrid", "model.ladder_layers=[1, 3]"])
    assert from_json(to_json(hybrid)).model.ladder_layers == (1, 3)
    assert from_json(to_json(load(CONFIGS / "demo.yaml", ["model.wiring=hybrid", "model.ladder_layers=2"]))) != hybrid


def test_json_from_strangers_is_refused() -> None:
    """A control channel's peer cannot smuggle keys, types or depth."""
    good = to_json(load(CONFIGS / "demo.yaml"))
    mutations: tuple[Callable[[dict[str, Any]], object], ...] = (
        lambda d: d.update(extra=1),
        lambda d: d["engine"].update(max_num_seqs="8"),
        lambda d: d["engine"].update(max_num_seqs=10**9),
        lambda d: d.pop("model"),
        lambda d: d.update(model=[[[[[[[[[[1]]]]]]]]]]),
        lambda d: d["launch"].update(env={"A": None}),
    )
    for mutate in mutations:
        bad = json.loads(json.dumps(good))
        mutate(bad)
        with pytest.raises(ConfigError):
            from_json(bad)
    with pytest.raises(ConfigError):
        from_json([])  # type: ignore[arg-type]


def test_damaged_files_never_raise_anything_else(tmp_path: Path, run_seed: int) -> None:
    """60 random damages to reference.yaml: a Deployment or a ConfigError of single lines, nothing else. Every third has
    a byte that no YAML may have, and is refused."""
    source = random.Random(run_seed)
    lines = [
        line
        for line in (CONFIGS / "reference.yaml").read_text(encoding="utf-8").splitlines()
        if line.strip() and not line.lstrip().startswith("#")
    ]
    scraps = [
        "[",
        "]",
        "{",
        "}",
        ": ",
        "- ",
        "&a ",
        "*a",
        "!!x ",
        "'",
        '"',
        "\t",
        "null",
        "1e999",
        "~",
        "?",
        "|",
        "\x00",
        "é",
    ]
    for number in range(60):
        text = lines[: source.randrange(1, 30)]
        for _ in range(source.randrange(1, 4)):
            row = source.randrange(len(text))
            at = source.randrange(len(text[row]) + 1)
            text[row] = text[row][:at] + source.choice(scraps) + text[row][at + source.randrange(3) :]
        if number % 3 == 0:
            text[source.randrange(len(text))] += "\x00"
        found: tuple[str, ...] = ()
        try:
            load(write(tmp_path, "\n".join(text)))
        except ConfigError as error:
            found = error.faults
        assert all(fault and "\n" not in fault for fault in found)
        assert found or number % 3


def test_places_for_later_faults(tmp_path: Path) -> None:
    """Who finds a fault later can say where: at the key, or else at its section, or else at the file's first line."""
    loaded = read(write(tmp_path, "model:\n  path: m\nparallel:\n  tensor_parallel_size: 3\n"), ["engine.seed=1"])
    assert loaded.fault("parallel.tensor_parallel_size", "x") == f"{loaded.name}:4: parallel.tensor_parallel_size: x"
    assert loaded.fault("parallel.replicas", "x") == f"{loaded.name}:3: parallel.replicas: x"
    assert loaded.fault("daemon.port", "x") == f"{loaded.name}:1: daemon.port: x"
    assert loaded.fault("engine.seed", "x") == "--set engine.seed: x"
