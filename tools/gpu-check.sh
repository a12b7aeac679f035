#!/usr/bin/env bash
# What only a machine with a GPU can check: `make gpu-check` calls it with the environment's Python.
# Results go to benchmarks/results, and a copy to $OUT where that is set.
set -euo pipefail
python=$1

device=$("$python" -c 'import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else "")')
if [[ -z "$device" ]]; then
  echo "gpu-check: torch sees no CUDA GPU on this machine" >&2
  exit 1
fi
echo "gpu-check: $device"
ACCUMKERNELS_BUILD_CUDA=1 "$python" setup.py -q build_ext --inplace

"$python" -m pytest -q -m gpu
"$python" -m pytest -q -m "not gpu" tests/test_ops_*.py

# A short set: every access of a kernel is watched. Some virtual machines let nobody watch, not even an empty program.
sanitizer=$(PATH="$PATH:${CUDA_HOME:-/usr/local/cuda}/bin" type -p compute-sanitizer || true)
if [[ -z "$sanitizer" ]]; then
  echo "gpu-check: compute-sanitizer is not installed: left out"
elif ! "$sanitizer" --error-exitcode 1 "$python" -c 'import torch; torch.ones(8, device="cuda").sum().item()'; then
  echo "gpu-check: compute-sanitizer does not work on this machine: left out"
else
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 "$sanitizer" --error-exitcode 1 \
    "$python" -m pytest -q -m gpu -k "native and (sizes or layouts or mixed or tiny)" tests/test_ops_*.py
fi

mkdir -p benchmarks/results
"$python" -m benchmarks.accumulate --device cuda --csv benchmarks/results/accumulate-cuda.csv
if [[ -n "${OUT:-}" ]]; then
  cp benchmarks/results/*-cuda.* "$OUT"
fi
