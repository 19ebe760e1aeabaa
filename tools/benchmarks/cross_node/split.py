"""What two streams hide of the link between two nodes, on nodes that tests/cluster makes on this machine: a Llama of
150M with the standard wiring, whole steps beside split ones, `auto` and *carried* (every message sent and taken, nobody
waits), all in turns.

    python tools/benchmarks/cross_node/split.py prefill         8 x 128 and 1 x 1,024 tokens; as root, three minutes
    python tools/benchmarks/cross_node/split.py decode          1, 8 and 64 sequences, two minutes
    python tools/benchmarks/cross_node/split.py cost  whole beside auto, 20 turns of 1 and 8 sequences, two minutes
    python tools/benchmarks/cross_node/split.py drafts  speculation, with drafts of a stated hit rate, five minutes

Prints a JSON line a case and then the table: medians with the least and the most, and of whole and split the share of
the gap between whole and carried that splitting closes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[2] / "tests"), str(HERE.parent)]

from cluster.nodes import why_not  # noqa: E402
from common import table  # noqa: E402
from cross_node import LLAMA150M, MS, on_cluster  # noqa: E402

KINDS = ("whole", "split", "auto", "carried")
PARTS: dict[str, dict[str, Any]] = {
    "prefill": {"positions": 1040, "seats": 8, "prompts": [(8, 128), (1, 1024)], "repeats": 5},
    "decode": {"positions": 128, "seats": 64, "decodes": [1, 8, 64], "turns": 3},
    "cost": {"positions": 256, "seats": 8, "decodes": [1, 8], "turns": 20},
    "drafts": {"positions": 720, "batches": [1, 8], "prompt": 16, "answer": 700, "steps": 24, "turns": 5},
}


def split_table(lines: list[dict[str, Any]]) -> list[str]:
    """Milliseconds."""
    rows = []
    for line in lines:
        cells = [f"{line[k][0] * 1e3:.1f} ({line[k][1] * 1e3:.1f} to {line[k][2] * 1e3:.1f})" for k in KINDS]
        whole, split, carried = (line[k][0] for k in ("whole", "split", "carried"))
        closed = f"{(whole - split) / (whole - carried):.0%}" if whole > carried else "-"
        rows.append((f"{line['delay_s'] / MS:g} ms, {line['case']}", *cells, f"{whole / split:.2f}", closed))
    return table("one way, case | whole | split | auto | carried | whole / split | gap closed", rows)


def drafts_table(lines: list[dict[str, Any]]) -> list[str]:
    """Tokens/s, and how many times as many as without drafts."""
    kinds = [name for name, value in lines[0].items() if isinstance(value, list)]
    rows = []
    for line in lines:
        off = line["off"][0]
        cells = [f"{line[k][0]:.1f} ({line[k][1]:.1f} to {line[k][2]:.1f}), {line[k][0] / off:.2f}x" for k in kinds]
        rows.append((f"{line['delay_s'] / MS:g} ms, {line['batch']}", *cells))
    return table(f"one way, sequences | {' | '.join(kinds)}", rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--delays", type=float, nargs="+", default=[0.0, 0.1, 1.0], help="one way, ms")
    args = parser.parse_args()
    if (why := why_not()) is not None:
        print(f"no emulated cluster here: {why}", file=sys.stderr)
        return 2
    task, spec = "drafts" if args.part == "drafts" else "split", dict(PARTS[args.part])
    spec |= {"task": task, "delays_s": [delay * MS for delay in args.delays]}
    spec["size"] = {**LLAMA150M, "positions": spec.pop("positions")}
    lines = on_cluster(2, 1, spec, 0)
    print("\n".join(drafts_table(lines) if task == "drafts" else split_table(lines)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
