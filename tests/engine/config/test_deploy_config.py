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
from config_cases import RULE_CASES, complete
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


@pytest.mark.parametrize(("text", "key"), RULE_CASES)
def test_rules_between_keys(tmp_path: Path, text: str, key: str) -> None:
    """Broken alone, each rule is the only fault, at the line of the key that it names."""
    [fault] = faults(tmp_path, complete(text))
    assert f": {key}: " in fault
    assert key.rpartition(".")[2] in complete(text).splitlines()[int(fault.split(":")[1]) - 1]


def test_every_rule_has_a_case(tmp_path: Path) -> None:
    """A row of the table that none of the cases above breaks fails here."""
    drafts = [draft(write(tmp_path, complete(text))) for text, _ in RULE_CASES]
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
