"""`check`: what it reads, what it refuses as a start would, and what it says that it has not looked at."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import checkpoints
import predictors
import pytest
from laddertron.launchers.cli import __main__ as cli
from laddertron.launchers.cli.commands import check
from laddertron.models.config.experts import MISSING
from laddertron.topology.hardware.cuda_stack import look
from test_cli import CONFIGS, write_model


@pytest.mark.parametrize("hosts", [(), ("n1", "n2")])
def test_check_names_what_it_has_not_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], hosts: tuple[str, ...]
) -> None:
    """The commands in its last line exist; a deployment on this host alone has no network to measure."""
    overrides = ["--set", f"launch.hosts=[{', '.join(hosts)}]"] if hosts else []
    assert cli.main(["check", str(CONFIGS / "demo-standard.yaml"), "--no-model", *overrides]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("not checked: ")
    assert "the model" in last
    assert ("preflight" in last) == bool(hosts)
    assert set(re.findall(r"laddertron (\w+)", last)) <= set(cli.group.list_commands(None))  # type: ignore[arg-type]


def test_check_without_the_weights(capsys: pytest.CaptureFixture[str]) -> None:
    """Every shipped config passes --no-model where there are no weights; without the flag the folder is missed."""
    for file in sorted(CONFIGS.glob("*.yaml")):
        assert cli.main(["check", str(file), "--no-model"]) == 0
        assert "OK" in capsys.readouterr().out
    assert cli.main(["check", str(CONFIGS / "llama-3.1-8b.yaml")]) == 2
    assert ":3: model.path: /models/Llama-3.1-8B-Instruct: no such folder" in capsys.readouterr().err


def test_check_warns_where_cuda_meets_a_host_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ranks on this host would not start; those on hosts that are named may."""
    monkeypatch.setattr(check, "look", lambda: replace(look(), gpus=0))
    real = ("parallel.collective=auto", "parallel.emulated_delay=0s")
    words = ["check", str(CONFIGS / "demo.yaml"), *(word for key in real for word in ("--set", key)), "--set"]
    for sets, warned in (
        (["engine.device=cuda"], True),
        (["engine.device=auto"], False),
        (["engine.device=cpu"], False),
    ):
        assert cli.main([*words, *sets]) == 0
        assert ("warning: engine.device: cuda, and this host shows no NVIDIA GPU" in capsys.readouterr().err) == warned
    assert cli.main([*words, "engine.device=cuda", "--set", "launch.hosts=[gpu-a:2]"]) == 0
    assert "NVIDIA" not in capsys.readouterr().err


def test_check_asks_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model folder's config.json is held against the deployment: ranks, length, layers, files; each at its line."""
    write_model(tmp_path / "m")
    file = tmp_path / "d.yaml"
    file.write_text(
        "model:\n  path: ./m\n  max_model_len: 256\n  wiring: hybrid\n  ladder_layers: [0, 2]\n"
        "parallel:\n  tensor_parallel_size: 3\n  tuning_file: t.json\n",
        encoding="utf-8",
    )
    assert cli.main(["check", str(file)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.replace(f"error: {file}:", "").split(": ")[:2] for line in lines] == [
        ["3", "model.max_model_len"],
        ["5", "model.ladder_layers"],
        ["7", "parallel.tensor_parallel_size"],
        ["8", "parallel.tuning_file"],
    ]
    assert "4 heads % 3 = 1" in lines[2]
    assert "use 1, 2 or 4" in lines[2]
    assert cli.main(["check", str(file), "--set", "parallel.tensor_parallel_size=2"]) == 2
    assert "heads" not in capsys.readouterr().err
    file.write_text("model: {path: ./m}\nparallel: {tensor_parallel_size: 4}\n", encoding="utf-8")
    assert cli.main(["check", str(file)]) == 0
    assert "tp 4 x 1 = 4 ranks" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("hosts", "keys", "key", "said"),
    [
        ("[a:2, b:2]", "{tensor_parallel_size: 4, expert_layout: spread}", "expert_layout", "would cross 2 nodes"),
        ("[a:8]", "{tensor_parallel_size: 8, expert_layout: spread}", "expert_layout", "4 experts < 8 ranks"),
        ("[a:1, b:1, c:1, d:1]", "{tensor_parallel_size: 2, pipeline_parallel_size: 2, dense_path: node}", "", ""),
        ("[a:4]", "{tensor_parallel_size: 4, expert_layout: spread}", "", ""),
        ("[a:2, b:2]", "{tensor_parallel_size: 4, dense_path: node}", "", ""),
        ("[a:1, b:1, c:1]", "{tensor_parallel_size: 3, dense_path: node}", "", ""),
    ],
)
def test_check_refuses_layouts_of_experts_that_a_start_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], hosts: str, keys: str, key: str, said: str
) -> None:
    """By the hosts of the file. Three nodes of one rank each serve whole copies of 4 heads."""
    write_model(
        tmp_path / "m",
        model_type="qwen3_moe",
        architectures=["Qwen3MoeForCausalLM"],
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        norm_topk_prob=True,
        head_dim=16,
    )
    file = tmp_path / "d.yaml"
    file.write_text(f"model: {{path: ./m}}\nlaunch: {{hosts: {hosts}}}\nparallel: {keys}\n", encoding="utf-8")
    code, faults = cli.main(["check", str(file)]), capsys.readouterr().err.splitlines()
    assert (code, len(faults)) == ((2, 1) if key else (0, 0)), faults
    assert not key or f":3: parallel.{key}: " in faults[0]
    assert not key or said in faults[0]


def test_check_asks_the_draft_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Other ids, too few positions, no folder: refused at its line."""
    write_model(tmp_path / "m")
    write_model(tmp_path / "d")
    file = tmp_path / "d.yaml"
    file.write_text("model:\n  path: ./m\nengine:\n  speculation: model\n  draft_model: ./d\n", encoding="utf-8")
    assert cli.main(["check", str(file)]) == 0
    config = json.loads((tmp_path / "d" / "config.json").read_text())
    for key, says in (("vocab_size", "drafts are the model's ids"), ("max_position_embeddings", "positions")):
        (tmp_path / "d" / "config.json").write_text(json.dumps(config | {key: config[key] // 2}))
        capsys.readouterr()
        assert cli.main(["check", str(file)]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"error: {file}:5: engine.draft_model: a draft model")
        assert says in said
    assert cli.main(["check", str(file), "--set", "engine.draft_model=./none"]) == 2
    assert "engine.draft_model: " in capsys.readouterr().err


def test_check_asks_for_the_predicting_layer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model that has none, and a folder without its tensors: refused, with what to do. With it, and among ranks and
    stages: accepted."""
    write_model(tmp_path / "m")
    file = tmp_path / "d.yaml"
    file.write_text("model:\n  path: ./m\nengine:\n  speculation: mtp\n", encoding="utf-8")
    assert cli.main(["check", str(file)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {file}:4: engine.speculation: mtp: this llama has no layer that predicts")
    assert "use ngram, or model with a draft_model" in said
    folder = predictors.save(tmp_path / "p", "deepseek_v3")
    given = ["check", str(file), "--set", f"model.path={folder}"]
    assert cli.main([*given, "--set", "parallel.pipeline_parallel_size=2"]) == 0
    gone = "model.layers.3.eh_proj.weight"
    checkpoints.edit_tensors(folder, lambda tensors: {n: t for n, t in tensors.items() if n != gone})
    capsys.readouterr()
    assert cli.main(given) == 2
    said = capsys.readouterr().err
    assert f"tensor {gone} (64, 128) is missing" in said
    assert "use another engine.speculation than mtp" in said
    assert cli.main([*given, "--set", "engine.speculation=ngram"]) == 0


def test_check_tells_everything_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    """405B over 12 ranks of nodes of 8: what the nodes say and the shape's arithmetic with the nearest sizes, although
    the weights are not here."""
    config = str(CONFIGS.parent / "tests/fixtures/deployments/llama-3.1-405b-tp16.yaml")
    for flags in ([], ["--no-model"]):
        assert cli.main(["check", config, "--set", "parallel.tensor_parallel_size=12", *flags]) == 2
        said = capsys.readouterr().err
        assert "launch.ranks_per_node: 12 ranks are not a multiple of 8 per node" in said
        assert "128 heads % 12 = 8" in said
        assert "use 1, 2, 4, 8, 16, 32, 64 or 128 (llama-3.1-405b by its folder's name)" in said
        assert ("no such folder" in said) == (not flags)
    assert cli.main(["check", config, "--no-model", "--set", "parallel.tensor_parallel_size=none"]) == 2
    assert "heads" not in capsys.readouterr().err  # a value that is none is not judged as another


def test_check_splits_no_wiring_that_overlaps_by_itself(capsys: pytest.CaptureFixture[str]) -> None:
    always = ["--no-model", "--set", "parallel.split_steps=always"]
    assert (
        cli.main(["check", str(CONFIGS / "405b/stock.yaml"), *always, "--set", "parallel.pipeline_parallel_size=1"])
        == 0
    )
    for wiring in ("ladder", "hybrid"):
        capsys.readouterr()
        folder = ["--set", f"model.path=/models/Llama-3.1-405B-{wiring}"]
        assert cli.main(["check", str(CONFIGS / "405b/ladder.yaml"), *always, *folder]) == 2
        assert f"parallel.split_steps: split_steps=always: wiring {wiring}" in capsys.readouterr().err


def test_check_counts_the_ports_of_a_host(capsys: pytest.CaptureFixture[str]) -> None:
    """A range that is too small for the host with most ranks: the line has the sum, and that many are enough."""
    words = ["--set", "launch.launcher=openmpi", "--set", "launch.hosts=[a:4, b:4]"]
    words += ["--set", "parallel.replicas=4", "--set"]
    assert cli.main(["check", str(CONFIGS / "demo.yaml"), *words, "launch.port_range=40000-40010"]) == 2
    line = next(one for one in capsys.readouterr().err.splitlines() if "launch.port_range" in one)
    assert "11 ports" in line
    need = int(line.partition(" needs ")[2].partition(":")[0])
    assert f"4 ranks x {need // 2 // 4 - 1} + 4" in line
    for ports, code in ((need, 0), (need - 1, 2)):
        last = f"launch.port_range=40000-{39999 + ports}"
        assert cli.main(["check", str(CONFIGS / "demo.yaml"), *words, last]) == code


def test_check_counts_the_work_items_of_latents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """DeepSeek-V3 by its folder's name: 128 heads over 8 ranks, in steps that FlashInfer cannot plan."""
    file = tmp_path / "d.yaml"
    text = "model: {path: ./deepseek-v3}\nparallel: {tensor_parallel_size: 8}\nengine: {device: cuda}\n"
    file.write_text(text, encoding="utf-8")
    most = ["--no-model", "--set", "engine.max_num_batched_tokens=131072"]
    assert cli.main(["check", str(file), *most]) == 2
    assert "a step of 16 heads a rank could need 16" in (said := capsys.readouterr().err)
    assert said.count("\n") == 1
    for fits in (["--set", "engine.attention=torch"], ["--set", "engine.device=cpu"]):
        assert cli.main(["check", str(file), *most, *fits]) == 0


def test_check_reads_a_broken_model_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An architecture that is not computed, or no config.json, is a fault of model.path, on one line."""
    write_model(tmp_path / "m", model_type="mamba")
    (tmp_path / "empty").mkdir()
    file = tmp_path / "d.yaml"
    for folder, says in (("m", "mamba"), ("empty", "config.json")):
        file.write_text(f"model: {{path: ./{folder}}}", encoding="utf-8")
        assert cli.main(["check", str(file)]) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: {file}:1: model.path: ")
        assert says in line


@pytest.mark.parametrize("family", [*MISSING, "qwen3_5_text", "mimo", "gemma3"])
def test_a_family_that_is_not_served_is_refused_before_a_start(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By every command that would read the model, from config.json alone, quantised or not."""
    write_model(tmp_path / "m", model_type=family, quantization_config={"quant_method": "awq"})
    for file in (tmp_path / "m").glob("*.safetensors"):
        file.write_bytes(b"not to be read")
    (tmp_path / "in.jsonl").touch()
    (deployment := tmp_path / "d.yaml").write_text("model: {path: ./m}", encoding="utf-8")
    batch = ["-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]
    for words in (["check"], ["serve"], ["run", *batch], ["plan"], ["shard"]):
        assert cli.main([words[0], str(deployment), *words[1:]]) != 0
        assert f"model_type '{family}' is not computed here" in capsys.readouterr().err


def test_check_misses_the_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What `run` would refuse is said before: no tokenizer.json where the deployment says that it is. The folder may be
    named, or the file."""
    write_model(tmp_path / "m")
    (tmp_path / "m/tokenizer.json").rename(tmp_path / "tokenizer.json")
    file = tmp_path / "d.yaml"
    file.write_text("model:\n  path: ./m\n", encoding="utf-8")
    assert cli.main(["check", str(file)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {file}:2: model.path: {tmp_path}/m/tokenizer.json is missing: save it there")
    assert cli.main(["check", str(file), "--no-model"]) == 0
    for named in (".", "./tokenizer.json"):
        file.write_text(f"model:\n  path: ./m\n  tokenizer: {named}\n", encoding="utf-8")
        assert cli.main(["check", str(file)]) == 0
    file.write_text("model:\n  path: ./m\n  tokenizer: ./m\n", encoding="utf-8")
    capsys.readouterr()
    assert cli.main(["check", str(file)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {file}:3: model.tokenizer: ")


WEIGHTS = "model.safetensors"
EMPTY = b'{"model": {"type": "BPE", "vocab": {}, "merges": []}}'


def cut_header(data: bytes) -> bytes:
    return data[:60]


def move_offsets(data: bytes) -> bytes:
    return data.replace(b'"data_offsets": [0, ', b'"data_offsets": [4, ', 1)


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        (WEIGHTS, lambda data: b"", "truncated, or not a safetensors file"),
        (WEIGHTS, cut_header, "truncated, or not a safetensors file"),
        (WEIGHTS, lambda data: data[:-1], "cut within tensor"),
        (WEIGHTS, lambda data: data + b"x", "more than its tensors"),
        (WEIGHTS, lambda data: data[:8] + b"[" + data[9:], "bad safetensors header"),
        (WEIGHTS, move_offsets, "bytes, "),
        (WEIGHTS, lambda data: data.replace(b"model.norm.weight", b"model.nrom.weight"), "model.norm.weight (64,)"),
        (WEIGHTS, lambda data: data.replace(b"F32", b"Z32"), "dtype Z32 is not one of"),
        (WEIGHTS, lambda data: b"version https://git-lfs", "git lfs pull"),
        (WEIGHTS, lambda data: data[:-4] + b"\0\0\xc0\x7f", "has a value that is NaN or infinite"),
        (WEIGHTS, lambda data: data[:-4] + b"\0\0\x80\xff", "has a value that is NaN or infinite"),
        ("model.safetensors.index.json", lambda data: b"{}", "bad index: weight_map is missing"),
        ("model.safetensors.index.json", lambda data: b'{"weight_map": {"a": "../x.safetensors"}}', "only bare"),
        ("tokenizer.json", lambda data: b"{}", "cannot be read as a tokenizer"),
        ("tokenizer.json", lambda data: data[:-20], "cannot be read as a tokenizer"),
        ("tokenizer.json", lambda data: EMPTY, "has an empty vocabulary"),
        ("tokenizer_config.json", lambda data: b"[]", "holds a list"),
        ("tokenizer_config.json", lambda data: b'{"chat_template": "{% for m in %}"}', "does not compile"),
        ("config.json", lambda data: b'{"bos_token_id": 999999, ' + data.strip()[1:], "bos_token_id"),
    ],
)
def test_check_reads_the_weights_and_the_tokenizer_as_a_start_would(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, change: Callable[[bytes], bytes], says: str
) -> None:
    write_model(tmp_path / "m")
    path, file = tmp_path / "m" / name, tmp_path / "d.yaml"
    file.write_text("model: {path: ./m}\n", encoding="utf-8")
    assert cli.main(["check", str(file)]) == 0
    path.write_bytes(change(path.read_bytes() if path.exists() else b""))
    capsys.readouterr()
    assert cli.main(["check", str(file)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {file}:1: model.path: ")
    assert says in line
    assert cli.main(["check", str(file), "--no-model"]) == 0


def test_check_is_quick_and_imports_no_torch(tmp_path: Path) -> None:
    """An editor's save hook can call it: a fifth of a second from the shell, without torch or MPI in the process."""
    write_model(tmp_path / "m")
    file = tmp_path / "d.yaml"
    file.write_text("model: {path: ./m}\n", encoding="utf-8")
    script = (
        "import sys; from laddertron.launchers.cli.__main__ import main; code = main(['check', sys.argv[1]]);"
        "heavy = {'torch', 'mpi4py', 'numpy', 'megatron', 'transformers'} & set(sys.modules);"
        "print(sorted(heavy)); sys.exit(code)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", script, str(file)], capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
    # of processor time, which on an idle machine is the wall time; the bound leaves room for a slow one
    assert after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime < 2.0
