#!/bin/sh
# Build Horovod with its MXNet binding and gloo, from its source package, into a virtual environment that has MXNet.
# Usage: tools/install_horovod.sh [PYTHON] (default: .venv/bin/python). Two to five minutes on two processors.
#
#   HOROVOD_WITH_MPI=1  build the MPI controller too (needs an MPI with headers)
set -eu

VERSION=0.28.1
python=${1:-.venv/bin/python}

works() { "$python" -c 'import horovod, horovod.mxnet; assert horovod.__version__ == "'"$VERSION"'"' >/dev/null 2>&1; }

needs() {
    command -v "$1" >/dev/null 2>&1 && return
    echo "Horovod is built from source, which needs $1. On Debian or Ubuntu: apt-get install g++ cmake make" >&2
    exit 1
}

if works; then
    echo "Horovod $VERSION is installed"
    exit 0
fi
needs c++
needs cmake
needs make
"$python" -c 'import gluon_amp' || { echo "$python has no MXNet that works: make venv first" >&2; exit 1; }

export PIP_DISABLE_PIP_VERSION_CHECK=1 HOROVOD_WITH_MXNET=1 HOROVOD_WITH_GLOO=1
export HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_PYTORCH=1
[ "${HOROVOD_WITH_MPI:-}" = 1 ] || export HOROVOD_WITHOUT_MPI=1
# g++ from 13 on no longer includes <cstdint> in passing, and CMake from 4 on refuses the minimum that gloo names.
export CXXFLAGS="${CXXFLAGS:-} -include cstdint" CMAKE_POLICY_VERSION_MINIMUM=3.5
"$python" -m pip install --quiet 'setuptools<81' wheel
echo "Building Horovod $VERSION with gloo (a few minutes)"
# Its build imports MXNet to find the headers, so it cannot be isolated; a cached wheel could be of another MXNet.
"$python" -m pip install --no-build-isolation --no-cache-dir "horovod==$VERSION"
works || { echo "Horovod was built but cannot be imported:" >&2; "$python" -c 'import horovod.mxnet'; exit 1; }
