#!/usr/bin/env bash
# What only a machine with a GPU can check: `make gpu-check` calls it with the environment's Python.
# Results go to benchmarks/results, and a copy to $OUT where that is set. Needs no network.
# GPU_CHECK=quick: small benchmarks, to see that everything works; their results go to build/quick instead.
set -euo pipefail
python=$1

device=$("$python" -c 'import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else "")')
if [[ -z "$device" ]]; then
  echo "gpu-check: torch sees no CUDA GPU on this machine" >&2
  exit 1
fi
echo "gpu-check: $device"
ACCUMKERNELS_BUILD_CUDA=1 "$python" setup.py -q build_ext --inplace

ops=(tests/ops/test_{accumulate,check_finite,errors,norm,scaled_copy}.py)
"$python" -m pytest -q -m gpu
"$python" -m pytest -q -m "not gpu" "${ops[@]}"

# A short set: every access of a kernel is watched. Some virtual machines let nobody watch, not even an empty program.
sanitizer=$(PATH="$PATH:${CUDA_HOME:-/usr/local/cuda}/bin" type -p compute-sanitizer || true)
if [[ -z "$sanitizer" ]]; then
  echo "gpu-check: compute-sanitizer is not installed: left out"
elif ! "$sanitizer" --error-exitcode 1 "$python" -c 'import torch; torch.ones(8, device="cuda").sum().item()'; then
  echo "gpu-check: compute-sanitizer does not work on this machine: left out"
else
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 "$sanitizer" --error-exitcode 1 \
    "$python" -m pytest -q -m gpu -k "native and (sizes or layouts or mixed or tiny)" "${ops[@]}"
fi

results=benchmarks/results
kernels=(--shapes "gpt2,tiny,resnet50,uniform")
training=(--dtype "bf16,fp16")
autocast=()
buckets=(--dtype "bf16,fp16")
memory=()
ranks=()
if [[ "${GPU_CHECK:-}" == quick ]]; then
  results=build/quick
  kernels=(--shapes "gpt2,tiny" --elements 4000000 --repetitions 3 --micro-batches 2 --dtype bf16)
  training=(--windows 3 --micro-batches 1,2)
  autocast=(--windows 3 --micro-batches 2)
  buckets=(--elements 4000000 --repetitions 3)
  memory=(--models "demo GPT")
  ranks=(--windows 3 --micro-batches 2)
fi
mkdir -p "$results"
"$python" -m benchmarks.compile_report --json "$results/compile_report.json" >/dev/null
"$python" -m benchmarks.kernels --device cuda "${kernels[@]}" --csv "$results/kernels_cuda.csv"
"$python" -m benchmarks.training --device cuda "${training[@]}" --csv "$results/training_cuda.csv"
"$python" -m benchmarks.autocast --device cuda "${autocast[@]}" --csv "$results/autocast_cuda.csv"
"$python" -m benchmarks.buckets --device cuda "${buckets[@]}" --csv "$results/buckets_cuda.csv"
if "$python" -c "import sys, torch; sys.exit(torch.cuda.device_count() < 2)"; then
  "$python" -m benchmarks.ranks --device cuda "${ranks[@]}" --csv "$results/ranks_cuda.csv"
fi
"$python" -m benchmarks.memory --device cuda "${memory[@]}" --csv "$results/memory_cuda.csv" \
  --timeline "$results/timeline_cuda.csv"
for name in kernels training timeline; do
  "$python" -m benchmarks.pictures "$results/${name}_cuda.csv"
done
if [[ -n "${OUT:-}" ]]; then
  # At most 8 files come back from some machines: the tables before the pictures.
  cp "$results"/*_cuda*.csv "$results"/compile_report.json "$results"/*_cuda*.png "$OUT"
fi
