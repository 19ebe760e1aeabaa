"""`make gpu-dry`: the GPU path on a machine without a GPU, 26 minutes on two busy cores.

Runs every case of cases.py in a process of its own (run_case.py), two at a time, compares the collectives of all ranks,
runs the tests that need Triton or FlashInfer, and compares the figures with the table in docs/gpu_dry.md; --write
renews it. `gpu_dry.py NAME…` runs these cases and their rows alone. Exits with 1 for a fault or a figure that is not in
the table.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from io import BufferedRandom
from pathlib import Path
from typing import Any

from cases import CASES, RANKS

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs" / "gpu_dry.md"
BEGIN, END = "<!-- make gpu-dry writes this -->", "<!-- up to here -->"
TESTS = (
    "tests/models/cuda",
    "tests/tools/gpu_dry",
    "tests/engine/sampling/test_noise_kernel.py",
    "tests/engine/sampling/test_filters.py",
    "tests/tools/benchmarks/test_hold_kernel.py",
    "tests/topology/comm/test_one_shot.py",
    "tests/topology/comm/test_stream_order.py",
)
COLUMNS = (
    "case", "recorded step: launches, collectives", "recorded draw: launches",
    "outside them, greedy / temperature / top_p: launches",
    "copies to, from the device", "waits", "prompts: launches, waits", "with drafts: launches, waits",
    "step, of reserved [MiB]", "graphs, of reserved [MiB]",
)  # fmt: skip
HEAD = f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}"
_LIMIT_S = 3600


def run_all(jobs: Sequence[tuple[str, Callable[[], dict[str, Any]]]]) -> list[dict[str, Any]]:
    """Runs each job in a fork of this process, two at a time, and returns their results; a failed job's result is a
    fault."""
    waiting, running = deque(enumerate(jobs)), dict[int, tuple[int, float, BufferedRandom]]()
    results = [dict[str, Any]()] * len(jobs)
    while waiting or running:
        if waiting and len(running) < 2:
            number, (_, job) = waiting.popleft()
            out = tempfile.TemporaryFile()  # noqa: SIM115
            running[_fork(job, out.fileno())] = number, time.monotonic(), out
            continue
        pid, status = os.wait()
        number, began, out = running.pop(pid)
        out.seek(0)
        output = out.read().decode(errors="replace").strip()
        out.close()
        code = os.waitstatus_to_exitcode(status)
        failed = f"exit status {code}" if code >= 0 else signal.strsignal(-code)
        results[number] = {"faults": [f"{failed}\n{output[-2000:]}"]} if code else json.loads(output.splitlines()[-1])
        faults = results[number]["faults"]
        print("\n  ".join([f"{jobs[number][0]}: {time.monotonic() - began:.0f} s", *faults]), flush=True)
    return results


def _fork(job: Callable[[], dict[str, Any]], out: int) -> int:
    if pid := os.fork():
        return pid
    code = 1
    try:
        signal.alarm(_LIMIT_S)
        for stream in (1, 2):
            os.dup2(out, stream)
        os.write(out, f"\n{json.dumps(job())}\n".encode())
        code = 0
    except BaseException:
        os.write(out, traceback.format_exc().encode())
    finally:
        os._exit(code)


def row(result: dict[str, Any]) -> str:
    """The table's line of a case."""
    r, memory = result["rows"], result["memory"]
    draws = ("greedy", "temperature", "top_p")

    def each(kind: str) -> str:
        values = [f"{r[f'{draw} {kind}']:g}" for draw in draws]
        return values[0] if len(set(values)) == 1 else " / ".join(values)

    def of(name: str) -> str:
        return f"{memory[name] >> 20}, {memory[f'{name} kept'] >> 20}"

    parts = (
        result["name"], f"{r['recorded launch']}, {r['recorded collective']}", f"{r['drawn launch']}", each("launch"),
        f"{each('to_device')}, {each('to_host')}", each("wait"), f"{r['prompts launch']}, {r['prompts wait']}",
        f"{r['drafted launch']:g}, {r['drafted wait']:g}" if "drafted wait" in r else "-", of("step"), of("recorded"),
    )  # fmt: skip
    return f"| {' | '.join(parts)} |"


def table(rows: Iterable[str]) -> str:
    return "\n".join([HEAD, *rows])


def renewed(old: str, new: Iterable[str]) -> str:
    """The table with these rows in place of the old ones of their names, in the order of CASES."""
    rows = {line.split(" | ")[0]: line for line in (*old.splitlines()[2:], *new)}
    return table(rows[key] for case in CASES if (key := f"| {case.name}") in rows)


def written() -> tuple[str, str, str]:
    """The page before the table, the table, the page after it."""
    before, rest = DOCS.read_text().split(f"{BEGIN}\n", 1)
    now, after = rest.split(f"\n{END}", 1)
    return f"{before}{BEGIN}\n", now, f"\n{END}{after}"


def run_tests() -> dict[str, Any]:
    """The tests that skip where Triton or FlashInfer is absent; none of them may skip for that here."""
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", *TESTS]
    command += ["-k", "not test_a_case_of_gpu_dry"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S - 60, check=False, cwd=ROOT)
    absent = re.findall(r"^SKIPPED.*(?:not installed|no Triton|no FlashInfer).*$", done.stdout, re.MULTILINE)
    return {"faults": absent + ([done.stdout[-3000:]] if done.returncode else [])}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    every_name = "; ".join(case.name for case in CASES)
    parser.add_argument("names", nargs="*", metavar="NAME", help=every_name)
    parser.add_argument("--write", action="store_true", help=f"renew the table in {DOCS.name}")
    args = parser.parse_args()
    names: list[str] = args.names
    if unknown := set(names) - {case.name for case in CASES}:
        parser.error(f"no case is called {', '.join(unknown)}: {every_name}")
    cases = [case.name for case in CASES if not names or case.name in names]
    os.environ |= {"TRITON_CACHE_DIR": str(ROOT / "build" / "gpu-dry-triton"), "OMP_NUM_THREADS": "1"}
    warnings.simplefilter("ignore")
    import run_case  # once: it takes as long as a case

    orders = [name for name in RANKS if name in cases]
    jobs = [] if names else [("tests of kernels and of the order of streams", run_tests)]
    jobs += [(f"{name}, every rank", partial(run_case.run, name, every_rank=True)) for name in orders]
    jobs += [(name, partial(run_case.run, name)) for name in cases]
    every = run_all(jobs)
    faults = [f"{name}: {fault}" for (name, _), one in zip(jobs, every, strict=True) for fault in one["faults"]]
    latest = every[-len(cases) :]
    if all(f.get("rows") for f in latest):
        print(table(new := [row(f) for f in latest]))
        before, old, after = written()
        now = renewed(old, new)
        if args.write:
            DOCS.write_text(before + now + after)
        elif old != now:
            news = [line for line in new if line not in old.splitlines()]
            faults.append(f"not as in {DOCS.name}; `make gpu-dry WRITE=yes` renews it:\n" + "\n".join(news))
    print("\n".join(faults) or f"{len(cases)} cases, {len(orders)} orders of collectives: no fault")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
