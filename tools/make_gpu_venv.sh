#!/bin/sh
# Make or update a virtual environment with the CUDA build of MXNet, for the null GPU.
# Usage: tools/make_gpu_venv.sh FOLDER GIGABYTES SECONDS
# Exits with 75 where there is less disk, or the download takes longer: try again later, or elsewhere.
set -eu

venv=$1 gigabytes=$2 seconds=$3
tools=$(dirname "$0")
# The tests import the package from the tree: what is installed need not be up to date.
wanted=$(cat pyproject.toml tools/make_gpu_venv.sh | cksum)

if [ "$(cat "$venv/.ready" 2>/dev/null)" = "$wanted" ] && "$venv/bin/python" -c 'import numpy' 2>/dev/null; then
    exit 0
fi
mkdir -p "$venv"
free=$(df -Pk "$venv" | awk 'NR == 2 {print int($4 / 1048576)}')
if [ "$free" -lt "$gigabytes" ] && [ ! -x "$venv/bin/python" ]; then
    echo "THE TESTS ON THE NULL GPU ARE LEFT OUT: they need $gigabytes GB in $venv, and $free GB are free" >&2
    exit 75
fi
echo "Making $venv with the CUDA build of MXNet: a download of 2 GB, once, at most $seconds seconds"
python=$("$tools/find_python.sh" "${PYTHON:-}")
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
export PIP_DISABLE_PIP_VERSION_CHECK=1
if ! timeout "$seconds" "$venv/bin/python" -m pip install --quiet --no-cache-dir '.[cu112]' \
    'gluoncv==0.10.5.post0' matplotlib 'opencv-python<4.12' pillow 'pytest>=7.4'; then
    echo "THE TESTS ON THE NULL GPU ARE LEFT OUT: the CUDA build of MXNet could not be installed within $seconds s" >&2
    exit 75
fi
"$venv/bin/python" "$tools/check_libs.py"
echo "$wanted" > "$venv/.ready"
