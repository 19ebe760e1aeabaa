"""What two streams hide of the link between two nodes, on nodes that tests/cluster makes on this machine: a Llama of
150M with the standard wiring, whole steps beside split ones, `auto` and *carried* (every message sent and taken, nobody
waits), all in turns.

    python benchmarks/cross_node/split.py prefill         8 x 128 and 1 x 1,024 tokens; as root, three minutes
    python benchmarks/cross_node/split.py decode          1, 8 and 64 sequences, two minutes
    python benchmarks/cross_node/split.py cost            whole beside auto, 20 turns of 1 and 8 sequences, two minutes
    python benchmarks/cross_node/split.py drafts          speculation, with drafts of a stated hit rate, five minutes

Prints a JSON line a case and then the table: medians with the least and the most, and of whole and split the share of
the gap between whole and carried that splitting closes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "tests"))

from cluster.nodes import why_not  # noqa: E402
from cross_node import LLAMA150M, MS, on_cluster  # noqa: E402

KINDS = ("whole", "split", "auto", "carried")
PARTS: dict[str, dict[str, Any]] = {
    "prefill": {
        "size": {**LLAMA150M, "positions": 1040},
        "seats": 8,
        "prompts": [[8, 128], [1, 1024]],
        "decodes": [],
        "repeats": 5,
        "turns": 0,
    },
    "decode": {
        "size": {**LLAMA150M, "positions": 128},
        "seats": 64,
        "prompts": [],
        "decodes": [1, 8, 64],
        "repeats": 0,
        "turns": 3,
    },
    "cost": {
        "size": {**LLAMA150M, "positions": 256},
        "seats": 8,
        "prompts": [],
        "decodes": [1, 8],
        "repeats": 0,
        "turns": 20,
    },
}
DRAFTS = {
    "task": "drafts",
    "size": {**LLAMA150M, "positions": 720},
    "batches": [1, 8],
    "prompt": 16,
    "answer": 700,
    "steps": 24,
    "turns": 5,
}


def table(lines: list[dict[str, Any]]) -> list[str]:
    """Markdown; milliseconds."""
    rows = [
        "| one way, case | whole | split | auto | carried | whole / split | gap closed |",
        "|---|---|---|---|---|---|---|",
    ]
    for line in lines:
        cells = [f"{line[k][0] * 1e3:.1f} ({line[k][1] * 1e3:.1f} to {line[k][2] * 1e3:.1f})" for k in KINDS]
        whole, split, carried = (line[k][0] for k in ("whole", "split", "carried"))
        closed = f"{(whole - split) / (whole - carried):.0%}" if whole > carried else "-"
        rows.append(
            f"| {line['delay_s'] / MS:g} ms, {line['case']} | {' | '.join(cells)} | {whole / split:.2f} | {closed} |"
        )
    return rows


def drafts_table(lines: list[dict[str, Any]]) -> list[str]:
    """Markdown; tokens/s, and how many times as many as without drafts."""
    kinds = [name for name, value in lines[0].items() if isinstance(value, list)]
    rows = [f"| one way, sequences | {' | '.join(kinds)} |", "|---" * (1 + len(kinds)) + "|"]
    for line in lines:
        off = line["off"][0]
        cells = [f"{line[k][0]:.1f} ({line[k][1]:.1f} to {line[k][2]:.1f}), {line[k][0] / off:.2f}x" for k in kinds]
        rows.append(f"| {line['delay_s'] / MS:g} ms, {line['batch']} | {' | '.join(cells)} |")
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", choices=[*PARTS, "drafts"])
    parser.add_argument("--delays", type=float, nargs="+", default=[0.0, 0.1, 1.0], help="one way, ms")
    parser.add_argument("--repeats", type=int, default=None, help="prefills of a case")
    args = parser.parse_args()
    if (why := why_not()) is not None:
        print(f"no emulated cluster here: {why}", file=sys.stderr)
        return 2
    delays = {"delays_s": [delay * MS for delay in args.delays]}
    if args.part == "drafts":
        print("\n".join(drafts_table(on_cluster(2, 1, DRAFTS | delays, 0))))
        return 0
    spec = {"task": "split", **PARTS[args.part], **delays}
    if args.repeats is not None:
        spec["repeats"] = args.repeats
    print("\n".join(table(on_cluster(2, 1, spec, 0))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
