"""The fabric as data: it survives a file, refuses what cannot be, and says where."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from laddertron.topology.hardware.fabric import KIND, VERSION, Fabric, Link, differences, format_cpus, load, parse_cpus
from laddertron.topology.hardware.presets import GPU_MODELS, gpu_node, preset
from laddertron.topology.json_codec import ReadError, build, header, parse, write_file

HERE = Path(__file__).parents[2]
FILES = [*sorted((HERE / "fixtures/fabrics").glob("*.json")), *sorted((HERE.parent / "configs/fabrics").glob("*.json"))]
PAIR = HERE / "fixtures/fabrics/dgx-h100-pair.json"

PRESETS = ["2x8xH100", "1x4xA100", "8xA100-40GB", "4x8xH200", "2x8xB200", "1x8xL40S", "2x2xH100-PCIe", "3x16xcpu"]


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_every_file_says_itself_again(path: Path, tmp_path: Path) -> None:
    """Load a dump, save it, load that: the same fabric and, byte for byte, the same file."""
    fabric = load(path)
    fabric.save(tmp_path / "again.json")
    assert load(tmp_path / "again.json") == fabric
    assert (tmp_path / "again.json").read_bytes() == path.read_bytes()
    assert [p.name for p in tmp_path.iterdir()] == ["again.json"]


@pytest.mark.parametrize("spec", PRESETS)
def test_presets_round_trip(spec: str) -> None:
    fabric = preset(spec)
    assert build(Fabric, header(json.loads(fabric.to_json()), KIND, VERSION)) == fabric
    nodes, each = ([1, *map(int, spec.split("x")[:-1])])[-2:]
    assert len(fabric.nodes) == nodes
    assert all(len(n.devices or n.cores) == each for n in fabric.nodes)


def test_preset_figures() -> None:
    """The figures that step-time predictions stand on: H100 has 3.35 TB/s of HBM and 450 GB/s of NVLink each way."""
    h100 = preset("8xh100").nodes[0].devices[0]
    assert (h100.memory_bandwidth, h100.nvlink_bandwidth, h100.bf16_flops) == (3.35e12, 450e9, 989.4e12)
    assert h100.memory_bytes == 81559 << 20
    assert preset("2x8xH100").nodes[1].hcas[7].bytes_per_s == 50e9
    assert preset("8xL40S").nodes[0].nvlinks == 0
    assert preset("8xH100").nodes[0].nvlinks == 28 * 18


@pytest.mark.parametrize("spec", ["", "2x8", "H100", "2x8xH101", "0x8xH100", "2x0xH100", "2x17xH100", "99999x8xH100"])
def test_unknown_presets_name_what_is_known(spec: str) -> None:
    with pytest.raises(ValueError, match=r"such as 2x8xH100.*B200|at most 16 GPUs"):
        preset(spec)


Fault = Callable[[dict[str, Any]], object]


def _set(*path: str | int, value: Any) -> Fault:
    def change(data: dict[str, Any]) -> None:
        at: Any = data
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (_set("version", value=2), "version: this laddertron reads 1"),
        (_set("version", value=True), "version"),
        (_set("kind", value="laddertron.tuning"), "kind: expected 'laddertron.fabric'"),
        (_set("nodes", value={}), "nodes: expected a list, got an object"),
        (_set("nodes", value=[]), "at least one node"),
        (
            _set("nodes", 1, "hcas", 0, "gbit_per_s", value="fast"),
            r"nodes\[1\].hcas\[0\].gbit_per_s: expected a number",
        ),
        (_set("nodes", 1, "hcas", 0, "gbit_per_s", value=True), r"nodes\[1\].hcas\[0\].gbit_per_s: expected a number"),
        (
            _set("nodes", 0, "hcas", 2, "link_layer", value="Token Ring"),
            r"hcas\[2\].link_layer: expected 'InfiniBand' or",
        ),
        (_set("nodes", 0, "devices", 3, "index", value=3.0), r"devices\[3\].index: expected a whole number"),
        (_set("nodes", 0, "devices", 3, "index", value=2), "duplicate device GPU2"),
        (
            _set("nodes", 0, "devices", 3, "memory", value=1),
            r"devices\[3\].memory: unknown key: did you mean 'memory_b",
        ),
        (_set("nodes", 0, "devices", 3, "numa", value=7), r"GPU3 is on NUMA node 7, the host has \[0, 1\]"),
        (_set("nodes", 0, "links", 0, "path", value="NVX"), r"nodes\[0\].links\[0\]: path 'NVX'"),
        (_set("nodes", 0, "links", 0, "b", value="GPU9"), "link GPU0-GPU9 joins no two"),
        (_set("nodes", 0, "links", 0, "a", value="GPU1"), "link GPU1-GPU1 joins no two"),
        (_set("nodes", 0, "links", 1, "b", value="GPU1"), "duplicate link GPU0-GPU1"),
        (_set("nodes", 0, "numa", 0, "cores", value="0-x"), r"nodes\[0\].numa\[0\]: cores '0-x'"),
        (_set("nodes", 0, "numa", 0, "cores", value="0-99999999"), "numbers below 65536"),
        (_set("nodes", 0, "numa", 1, "cores", value="55-60"), "duplicate core 55"),
        (_set("nodes", 0, "hostname", value="dgx-02"), "duplicate host 'dgx-02' in the fabric: name each host once"),
        (_set("nodes", 0, "hostname", value=None), r"nodes\[0\].hostname: expected a string, got null"),
        (lambda d: d["nodes"][0].pop("numa"), r"nodes\[0\].numa: missing"),
        (
            lambda d: [d["nodes"][0].pop("numa"), d["nodes"][1]["hcas"][0].pop("name")],
            r"nodes\[0\].numa: missing; nodes\[1\].hcas\[0\].name: missing$",
        ),
    ],
)
def test_faults_are_named_by_their_path(fault: Fault, message: str, tmp_path: Path) -> None:
    """Every broken dump is refused, and the message leads to the place."""
    data = json.loads(PAIR.read_text())
    fault(data)
    (tmp_path / "fabric.json").write_text(json.dumps(data))
    with pytest.raises(ReadError, match=message):
        load(tmp_path / "fabric.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"a": 1, "a": 2}', "duplicate key 'a'"),
        (b'{"a": NaN}', "NaN is not JSON"),
        (b'{"a": ', "not JSON"),
        (b'"\xff"', "not UTF-8"),
        (b"[" * 100_000, "nested deeper than 64"),
    ],
)
def test_json_is_strict(text: bytes, message: str) -> None:
    with pytest.raises(ReadError, match=message):
        parse(text)


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    """A write that fails leaves the old file and no other."""
    target = tmp_path / "f.json"
    write_file(target, "old")
    with pytest.raises(UnicodeEncodeError):
        write_file(target, "new \ud800")
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_pipe_is_written_to_and_a_link_is_followed(tmp_path: Path) -> None:
    """By root /dev/stdout and /dev/null were replaced by files."""
    pipe, target, link = tmp_path / "pipe", tmp_path / "f.json", tmp_path / "link"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_file(pipe, "text")
        assert os.read(reader, 10) == b"text"
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    link.symlink_to(target)
    write_file(link, "text")
    assert (link.is_symlink(), target.read_text()) == (True, "text")


def test_a_large_file_is_not_read(tmp_path: Path) -> None:
    target = tmp_path / "f.json"
    with target.open("wb") as file:
        file.truncate((64 << 20) + 1)
    with pytest.raises(ReadError, match="larger than 64 MiB"):
        load(target)


def test_what_cannot_be_written_is_called_by_its_own_name(tmp_path: Path) -> None:
    """No folder, and a folder in the file's place: the error names the file that was asked for, not a temporary one."""
    absent, folder = tmp_path / "absent/f.json", tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(FileNotFoundError, match="absent does not exist, make it first") as nowhere:
        write_file(absent, "x")
    assert nowhere.value.filename == str(absent)
    with pytest.raises(IsADirectoryError) as taken:
        write_file(folder, "x")
    assert taken.value.filename == str(folder)
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def test_digest_knows_machines_not_names() -> None:
    """Another pair of the same machines, in any order, is the same fabric; one slower port is another one."""
    pair = load(PAIR)
    renamed = Fabric(tuple(replace(n, hostname=f"x{i}", nics=(replace(n.nics[0], addresses=()),))
                           for i, n in enumerate(reversed(pair.nodes))))  # fmt: skip
    same_nics = Fabric(tuple(replace(n, nics=n.nics[:1]) for n in pair.nodes))
    assert renamed.digest == same_nics.digest
    node = pair.nodes[0]
    slow = replace(node, hcas=(replace(node.hcas[0], gbit_per_s=200.0), *node.hcas[1:]))
    other = Fabric((slow, pair.nodes[1]))
    assert other.digest != pair.digest
    assert differences(tuple(n.traits() for n in pair.nodes), pair) == []
    (said,) = differences(tuple(n.traits() for n in pair.nodes), other)
    assert "hcas: " in said
    assert "7 x InfiniBand 400 Gb/s" in said


def test_digest_knows_how_far_gpus_are_from_hcas() -> None:
    """Each GPU across the sockets from its nearest port, on one host: another fabric, in words. A port that is down is
    near to nobody, and without any, the paths there are do not count."""
    pair = load(PAIR)
    first, second = pair.nodes
    ports = {h.key for h in first.hcas}
    far = replace(first, links=tuple(replace(k, path="SYS") if {k.a, k.b} & ports else k for k in first.links))
    other = Fabric((far, second))
    assert other.digest != pair.digest
    (said,) = differences(tuple(n.traits() for n in pair.nodes), other)
    assert said == "paths to hcas: 8 x PXB there, 8 x SYS here"
    down = replace(first, hcas=tuple(replace(h, state="DOWN") for h in first.hcas))
    assert down.traits()["paths to hcas"] == "none"
    assert replace(down, links=far.links).traits() == down.traits()


def test_differences_count_nodes() -> None:
    made_for = tuple(n.traits() for n in preset("4x8xH100").nodes)
    assert differences(made_for, preset("2x8xH100")) == ["nodes: 4 there, 2 here"]


def test_paths_fall_back_to_numa() -> None:
    """Without a recorded link, two ends of one NUMA node are NODE apart, others SYS."""
    node = replace(gpu_node("a", 0, GPU_MODELS["H100"], 4), links=(Link("GPU0", "GPU1", "NV4"),))
    assert [node.path("GPU0", f"GPU{i}") for i in (1, 2, 3)] == ["NV4", "SYS", "SYS"]
    assert node.path("GPU2", "GPU3") == "NODE"
    assert node.path("GPU1", "GPU0") == "NV4"


def test_only_takes_hosts_in_the_order_asked() -> None:
    fabric = preset("4x8xH100")
    assert [n.hostname for n in fabric.only(["node2", "node0"]).nodes] == ["node2", "node0"]
    with pytest.raises(
        ValueError, match="host 'node9' is not in the fabric, which has node0, node1, node2, node3: `laddertron launch"
    ):
        fabric.only(["node9"])


@given(st.sets(st.integers(0, 300)))
def test_cpu_lists_round_trip(cpus: set[int]) -> None:
    assert parse_cpus(format_cpus(cpus)) == tuple(sorted(cpus))
