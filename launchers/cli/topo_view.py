"""Formats a fabric and a placement: a tree, the matrix of `nvidia-smi topo -m`, the explain table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from ...topology.cost.cost import Shape
from ...topology.hardware.fabric import Device, Fabric, Hca, Nic, Node, counted
from ...topology.placement.mapping import explain, matrix
from ...topology.placement.placement import Placement

_INDENT = 3
LEGEND = """\
NV#   that many NVLinks
PIX   PCIe, over one bridge or switch
PXB   PCIe, over several of them
PHB   PCIe, through the CPU's host bridge
NODE  between host bridges of one NUMA node
SYS   between NUMA nodes"""


def fabric_view(fabric: Fabric, width: int) -> RenderableType:
    """One tree and matrix for each kind of host, with the names of equal hosts together, in `width` columns."""
    kinds: dict[Node, list[int]] = {}
    for i, node in enumerate(fabric.nodes):
        kinds.setdefault(_kind(node), []).append(i)
    parts: list[RenderableType] = []
    for members in kinds.values():
        nodes = [fabric.nodes[i] for i in members]
        parts.append(_tree(nodes))
        if nodes[0].devices:
            tables = _matrix(matrix(fabric, members[0]), width - _INDENT)
            parts += [Padding(Group(table, ""), (0, 0, 0, _INDENT), expand=False) for table in tables]
    if any(n.devices for n in fabric.nodes):
        parts.append(Text(LEGEND, style="dim"))
    return Group(*parts)


def _kind(node: Node) -> Node:
    """The node without values that differ between machines of one kind: names, addresses, PCI and serial numbers, the
    memory reserved by the kernel, and virtual interfaces."""
    nics = sorted((n for n in node.nics if n.physical), key=lambda n: n.name)
    return replace(
        node,
        hostname="any",
        memory_bytes=_rounded(node.memory_bytes),
        numa=tuple(replace(n, memory_bytes=_rounded(n.memory_bytes)) for n in node.numa),
        devices=tuple(replace(d, pci="", uuid="") for d in node.devices),
        hcas=tuple(replace(h, pci="", interface="") for h in node.hcas),
        nics=tuple(replace(n, name=str(i), addresses=(), pci="") for i, n in enumerate(nics)),
        links=tuple(sorted(node.links, key=lambda k: (k.a, k.b))),
    )


def _rounded(count: int) -> int:
    step = 1 << max(count.bit_length() - 5, 0)
    return (count + step // 2) // step * step


def _tree(nodes: Sequence[Node]) -> Tree:
    node = nodes[0]
    names = [n.hostname for n in nodes]
    label = ", ".join(names) if len(names) <= 8 else f"{names[0]} … {names[-1]}"
    alike = f"  ({len(names)} hosts alike)" if len(names) > 1 else ""
    tree = Tree(Text.assemble((label, "bold"), alike, "  ", (_host_words(node), "dim")))
    for numa in node.numa:
        cores = counted(len(numa.core_ids), "core")
        branch = tree.add(f"NUMA {numa.index}  {cores} ({numa.cores})  {_gib(numa.memory_bytes)}")
        _hang(branch, node, numa.index)
    if None in {d.numa for d in node.devices} | {h.numa for h in node.hcas}:
        _hang(tree.add("NUMA node not known"), node, None)
    nics = [(n, nic) for n in nodes for nic in n.nics if nic.addresses and nic.up and nic.name != "lo"]
    if nics:
        branch = tree.add("network")
        for owner, nic in nics[:16]:
            branch.add(Text.assemble((f"{owner.hostname} " if len(nodes) > 1 else "") + _nic_words(nic)))
        if len(nics) > 16:
            branch.add(Text(f"… {len(nics) - 16} more interfaces", style="dim"))
    return tree


def _hang(branch: Tree, node: Node, numa: int | None) -> None:
    for device in (d for d in node.devices if d.numa == numa):
        branch.add(Text(_device_words(device), style="green"))
    for hca in (h for h in node.hcas if h.numa == numa):
        branch.add(Text(_hca_words(hca), style="cyan" if hca.active else "red"))


def _host_words(node: Node) -> str:
    words = [node.cpu] if node.cpu else []
    words += [f"CPU tier {node.cpu_tier}"] if node.cpu_tier else []
    words += [f"{len(node.cores)} cores", _gib(node.memory_bytes)]
    if node.devices:
        words.append("NVSwitch" if node.nvswitch else "NVLink" if node.nvlinks else "no NVLink")
    if node.driver:
        words.append(f"driver {node.driver}")
    return " · ".join(words)


def _device_words(device: Device) -> str:
    pci = f"  {device.pci}" if device.pci else ""
    return f"{device.key}  {device.name}  {_gib(device.memory_bytes)}{pci}"


def _hca_words(hca: Hca) -> str:
    via = f"  {hca.interface}" if hca.interface else ""
    return f"{hca.key}  {hca.link_layer} {hca.gbit_per_s:g} Gb/s {hca.state}{via}"


def _nic_words(nic: Nic) -> str:
    speed = f"{nic.gbit_per_s:g} Gb/s" if nic.gbit_per_s else "speed not known"
    return f"{nic.name}  {', '.join(nic.addresses)}  {speed}  mtu {nic.mtu}"


def _matrix(rows: Sequence[tuple[str, ...]], width: int) -> list[Table]:
    """The matrix as tables of some of its columns each, every one with the rows' names: no row is cut."""
    tables: list[Table] = []
    widths = [max(map(len, column)) + 2 for column in zip(*rows, strict=True)]
    begin = 1
    while begin < len(widths):
        too_far = (n for n in range(begin + 1, len(widths)) if widths[0] + sum(widths[begin : n + 1]) > width)
        end = next(too_far, len(widths))
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for name in (rows[0][0], *rows[0][begin:end]):
            table.add_column(name, no_wrap=True)
        for row in rows[1:]:
            table.add_row(*(Text(cell, style=_path_style(cell)) for cell in (row[0], *row[begin:end])))
        tables.append(table)
        begin = end
    return tables


def _path_style(cell: str) -> str:
    if cell.startswith("NV"):
        return "bold green"
    return {"PIX": "green", "PXB": "green", "PHB": "yellow", "NODE": "yellow", "SYS": "red", "X": "dim"}.get(cell, "")


def placement_view(
    placement: Placement, shapes: Sequence[Shape], predicted: Sequence[str], bound: bool = False
) -> RenderableType:
    """The explain table, one for each group; `predicted` is a line about each group's all-reduce. `bound`: ranks keep
    to the cores; else these are only near their devices."""
    rows = explain(placement)
    parts: list[RenderableType] = []
    for g, (shape, line) in enumerate(zip(shapes, predicted, strict=True)):
        (replica, stage), stages = placement.world.replica_and_stage(g), placement.world.stages
        here = [row for row in rows if (row["group"], row["stage"]) == (replica, stage)]
        name = f"group {replica}" + (f" stage {stage} of {stages}" if stages > 1 else "")
        parts.append(_group_table(name, shape, here, bound))
        parts += [Text(line, style="dim"), ""] if line else [""]
    parts += [Text(f"note: {note}", style="yellow") for note in placement.notes]
    return Group(*parts)


def _group_table(name: str, shape: Shape, rows: Sequence[dict[str, Any]], bound: bool) -> Table:
    title = f"{name}: {counted(shape.size, 'rank')} = {counted(shape.nodes, 'node')} x {shape.per_node}"
    if shape.per_node > 1:
        title += f", {shape.intra} inside"
    if shape.nodes > 1:
        rails = f" over {counted(shape.rails, 'rail')}" if shape.inter != "tcp" else ""
        title += f", {shape.inter} between{rails}"
    columns = {
        "tp": "tp_rank", "rank": "rank", "host": "hostname", "local": "local_rank", "device": "device", "HCA": "hca",
        "path": "path", "NUMA": "numa", "cores" if bound else "near cores": "cores", "interface": "interface",
    }  # fmt: skip
    cells = {name: [str(row[key]) for row in rows] for name, key in columns.items()}
    shown = {name: column for name, column in cells.items() if any(column)}
    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )
    for name in shown:
        table.add_column(name, justify="right" if name in ("tp", "rank", "local", "NUMA") else "left", no_wrap=True)
    for row, after, *texts in zip(rows, (*rows[1:], rows[-1]), *shown.values(), strict=True):
        table.add_row(*texts, end_section=after["hostname"] != row["hostname"])
    return table


def _gib(count: int) -> str:
    return f"{count / 2**40:.3g} TiB" if count >= 1000 * 2**30 else f"{count / 2**30:.3g} GiB"
