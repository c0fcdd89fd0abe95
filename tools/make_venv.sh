#!/bin/sh
# Make or update the virtual environment $VENV with this package and the given extras.
# Usage: VENV=.venv [PYTHON=python3.11] tools/make_venv.sh cpu,bench,test
set -eu

extras=$1
tools=$(dirname "$0")
run="$VENV/bin/python"

# A directory without a working pip is what an interrupted run leaves behind. One with
# another Python than the one asked for is made anew, too.
works() {
    "$run" -m pip --version >/dev/null 2>&1 || return 1
    [ -z "${PYTHON:-}" ] || [ "$(base "$run")" = "$(base "$python")" ]
}

base() { "$1" -c 'import os, sys; print(os.path.realpath(sys.executable))'; }

python=$("$tools/find_python.sh" "${PYTHON:-}")
if ! works; then
    if [ -e "$VENV" ] && [ ! -f "$VENV/pyvenv.cfg" ]; then
        echo "VENV=$VENV exists and is not a virtual environment" >&2
        exit 1
    fi
    echo "Making $VENV with $python"
    "$python" -m venv --clear "$VENV"
fi
echo "Installing gluon_amp[$extras] and what it needs into $VENV (a few minutes the first time)"
export PIP_DISABLE_PIP_VERSION_CHECK=1
"$run" -m pip install --quiet --upgrade pip
# MXNet's metadata forbids NumPy 2, and Python 3.13 has no other: there the extras leave MXNet out.
case ",$extras," in
    *,cpu,*) "$run" -m pip install --quiet --no-deps mxnet==1.9.1 ;;
    *,cu112,*) "$run" -m pip install --quiet --no-deps mxnet-cu112==1.9.1 ;;
esac
# The build warns that an editable install is one.
install() { PYTHONWARNINGS=ignore "$run" -m pip install --quiet --editable ".[$1]"; }
case ",$extras," in
    *,test,*) install "$extras,nlp" || {
        echo "GluonNLP cannot be built here: its tests will be skipped" >&2
        install "$extras"
    } ;;
    *) install "$extras" ;;
esac
"$run" "$tools/check_libs.py"
