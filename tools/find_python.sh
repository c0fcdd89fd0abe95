#!/bin/sh
# Print a Python between 3.8 and 3.13 that can make a virtual environment.
# Usage: tools/find_python.sh [PYTHON]. With an argument only that one is tried.
set -u

NAMES="python3.11 python3.10 python3.9 python3.8 python3.12 python3.13 python3 python"
PROBE='import sys
print(sys.executable if (3, 8) <= sys.version_info[:2] <= (3, 13) else "")'
seen=""

# Run each one: a version manager may put a name on PATH that fails when it is run.
probe() {
    found=$("$1" -c "$PROBE" 2>/dev/null </dev/null) || return 1
    [ -n "$found" ]
}

accept() {
    probe "$1" || return 1
    if "$found" -c 'import venv, ensurepip' >/dev/null 2>&1; then
        echo "$found"
        exit 0
    fi
    seen="$seen $found"
}

say() { echo "$*" >&2; }

explain_and_fail() {
    if [ -n "$seen" ]; then
        say "Found$seen, but without the venv and ensurepip modules."
        say "On Debian or Ubuntu: apt-get install python3-venv"
    else
        say "No Python from 3.8 to 3.13 found."
        say "Install one, or name one: make PYTHON=/path/to/python3.11 ..."
    fi
    exit 1
}

if [ -n "${1:-}" ]; then
    accept "$1"
    [ -z "$seen" ] || explain_and_fail
    say "PYTHON=$1 does not run, or is not a Python from 3.8 to 3.13."
    exit 1
fi
for name in $NAMES; do
    command -v "$name" >/dev/null 2>&1 && accept "$name"
done
for minor in 11 10 9 8 12 13; do
    for path in "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3."$minor".*/bin/python; do
        [ -x "$path" ] && accept "$path"
    done
done
explain_and_fail
