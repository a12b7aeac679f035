# The interpreter that the environment is made from; its torch is used when it has one.
PYTHON ?= python3
# What is installed otherwise. Given on the command line it is installed in any case: make test TORCH=torch==2.10.0
TORCH ?= torch==2.13.0
VENV ?= .venv
# Of make gpu-check.
STAGE ?=
REHEARSE ?=
PARTS ?=
# Of make test-recipes; default: all.
RECIPE ?=
# Passed on: make demo ARGS="--device cuda", make test ARGS="-k overflow"
ARGS ?=

PY := $(abspath $(VENV))/bin/python
BOOTSTRAP := $(PYTHON) tools/bootstrap.py --venv '$(VENV)' --torch '$(TORCH)' \
	$(if $(filter file,$(origin TORCH)),,--replace-torch)
# One environment holds one torch: its name is part of the stamp's.
READY := $(VENV)/.ready-$(subst /,_,$(firstword $(TORCH)))
CHECKERS := $(VENV)/.checkers
DOCS := $(VENV)/.docs
TRAINERS := $(VENV)/.trainers
# Tests run in two processes, which take whole files: the tests of one share what is slow to set up.
WORKERS ?= 2
SIDE_BY_SIDE := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
CXX_SOURCES = $$(find csrc tests/cuda_host tests/cuda_device tests/simulated_device -name '*.h' -o -name '*.cpp' -o -name '*.cu')

# Tests start hundreds of processes, none of which is to compile the package, the tests and pytest's rewriting again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all test-kernels device-check simulated-device test-integrations test-recipes trainers-on-ranks test-trainers-own test-source-installs \
	test-toolkits test-torch-matrix bench wheel check docs gpu-check build clean

demo: build  ## train a small GPT three ways
	$(PY) -m accumkernels demo $(ARGS)

test: build  ## the tests that start no process and no compiler
	$(PY) -m pytest $(SIDE_BY_SIDE) -m "not starts and not integrations" --ignore=tests/cuda_host --ignore=tests/cuda_device $(ARGS)

test-all: build $(TRAINERS)  ## the whole suite, with ranks, compilers and trainers, as CI does
	$(PY) -m pytest $(SIDE_BY_SIDE) $(ARGS)

test-kernels: $(READY)  ## the CUDA sources, run on the host under sanitizers
	$(PY) tests/cuda_host/build.py --run $(ARGS)

device-check:  ## the CUDA kernels in a program without torch or Python; on the host where there is no device
	$(MAKE) -s -j $(WORKERS) -C tests/cuda_device $(ARGS)

simulated-device: $(READY)  ## what tests/simulated_device compiles, else with its first test
	$(PY) -c 'from tests.simulated_device import build; build.library()'

test-integrations: build $(TRAINERS)  ## inside accelerate, Lightning and transformers, which it installs, and the recipes
	$(PY) -m pytest $(SIDE_BY_SIDE) -m integrations $(ARGS)
	$(PY) -m tools.recipes

test-recipes: build $(TRAINERS)  ## the recipes, each in an environment of its own, from the package index: RECIPE=timm
	$(PY) -m tools.recipes $(RECIPE)

trainers-on-ranks: build $(TRAINERS)  ## the trainers' examples on two ranks, or RANKS, held to one process
	for trainer in accelerate_loop lightning_loop transformers_trainer; do \
		$(PY) -m torch.distributed.run --nproc-per-node $(or $(RANKS),2) examples/$$trainer.py || exit 1; \
	done

example-%: build $(TRAINERS)  ## examples/%.py, as make example-accelerate_loop; RANKS=2 runs it on two ranks
	$(PY) $(if $(RANKS),-m torch.distributed.run --nproc-per-node $(RANKS)) examples/$*.py $(ARGS)

test-source-installs: build  ## pip install from a folder, an sdist and in place, from the package index
	$(PY) -m pytest -s tests/network/test_source_installs.py $(ARGS)

test-trainers-own: build $(TRAINERS)  ## accelerate's own tests with our Accelerator, and ours beside the oldest and newest trainers
	$(PY) -m pytest -s tests/network/test_trainers_own.py tests/network/test_trainer_releases.py $(ARGS)

test-toolkits: build  ## wheels built with a CUDA toolkit from the package index: TOOLKIT=13.2
	$(PY) -m pytest -s tests/network/test_toolkits.py $(ARGS)

test-torch-matrix: build  ## one wheel beside several releases of torch, GBs each: TORCHES="2.10.0 newest"
	$(PY) -m pytest -s tests/network/test_torch_matrix.py $(ARGS)

bench: build  ## the kernels, against every peer and the memory's limit
	$(PY) -m benchmarks.kernels $(ARGS)

wheel: $(READY)  ## exactly one wheel in dist/
	rm -rf dist build/bdist.*
	$(PY) -W ignore setup.py -q bdist_wheel

check: $(READY) $(CHECKERS)  ## style, types, formatting
	$(PY) -m ruff check --output-format=concise .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -c 'import clang_format; clang_format.clang_format()' --dry-run -Werror $(CXX_SOURCES)

docs: $(READY) $(DOCS)  ## the guides and the reference as a site, build/docs
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs -q build --strict

# With the environment where there is one, else with what the machine has: it installs nothing.
gpu-check:  ## on a machine with a GPU: STAGE=1 to 4 (default: all); REHEARSE=1 on the CPU; PARTS=tests,memcheck
	$(if $(wildcard $(READY)),$(PY),$(PYTHON)) -m tools.gpu_check $(if $(STAGE),--stage $(STAGE)) \
		$(if $(REHEARSE),--rehearse) $(if $(PARTS),--parts $(PARTS)) $(ARGS)

build: $(READY)  ## accumkernels/_native.so
	$(PY) setup.py -q build_ext --inplace

clean:  ## what was built; the environment stays
	rm -rf build dist wheelhouse *.egg-info accumkernels/_native.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find accumkernels benchmarks tests tools -name __pycache__ -prune -exec rm -rf {} +

$(READY): pyproject.toml tools/bootstrap.py
	rm -f $(VENV)/.ready-*
	$(BOOTSTRAP) --stamp '$@' demo test

$(CHECKERS): $(READY)
	$(BOOTSTRAP) --stamp '$@' check

$(DOCS): $(READY)
	$(BOOTSTRAP) --stamp '$@' docs

$(TRAINERS): $(READY)
	$(BOOTSTRAP) --stamp '$@' accelerate lightning transformers models
