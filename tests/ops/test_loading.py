"""Import never fails: whatever became of the library, there is a cause in one sentence and training goes on."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import accumkernels
from accumkernels.ops import native
from accumkernels.ops import native as loading
from tests.support.environments import clean_environ

LIBRARY = native.LIBRARY_PATH
OTHER, MACHINE = ("x86_64", 62) if platform.machine() == "aarch64" else ("aarch64", 183)


def for_machine(number: int) -> Callable[[bytes], bytes]:
    """Change the processor in the header of a library."""
    return lambda content: content[:18] + number.to_bytes(2, "little") + content[20:]


FAULTS = {
    "empty": (lambda content: b"", "_native.so is not a shared library (0 bytes that do not begin as one)"),
    "junk": (lambda content: b"not a library", "_native.so is not a shared library"),
    "header cut": (lambda content: content[:32], "_native.so is cut short: 32 bytes"),
    "cut short": (lambda content: content[: len(content) // 2], "_native.so is cut short"),
    "last byte lost": (lambda content: content[:-1], "_native.so is cut short"),
    "another processor": (for_machine(MACHINE), f"_native.so is built for {OTHER}, and this is {platform.machine()}"),
    "an unknown one": (for_machine(8), f"_native.so does not load with torch {torch.__version__}: "),
    "torch's symbols": (
        lambda content: content.replace(b"aoti_torch_delete_tensor_object", b"aoti_torch_no_such_function_now"),
        "undefined symbol: aoti_torch_no_such_function_now",
    ),
}


@pytest.mark.native
@pytest.mark.parametrize("fault", FAULTS)
def test_says_what_is_wrong_with_the_file(fault: str, tmp_path: Path) -> None:
    """One sentence with the cause, where the system's loader would mislead or kill the process."""
    change, cause = FAULTS[fault]
    content = change(LIBRARY.read_bytes())
    assert content != LIBRARY.read_bytes()
    (tmp_path / LIBRARY.name).write_bytes(content)
    library, found = loading.load(tmp_path / LIBRARY.name)
    assert library is None
    assert found is not None
    assert cause in found
    assert "\n" not in found


def test_says_that_the_file_is_missing_or_cannot_be_read(tmp_path: Path) -> None:
    """Neither is an exception."""
    assert "is missing" in str(loading.load(tmp_path / "_native.so")[1])
    (tmp_path / "setup.py").touch()
    (tmp_path / "accumkernels").mkdir()
    assert f"{tmp_path} has sources" in str(loading.load(tmp_path / "accumkernels" / "_native.so")[1])
    (tmp_path / "_native.so").mkdir()
    assert "cannot be read" in str(loading.load(tmp_path / "_native.so")[1])


@pytest.mark.native
@pytest.mark.parametrize(
    ("version", "loads"), [("2.9.1+cu128", False), ("1.13.0", False), ("2.10.0", True), ("3.0.0a0+git1", True)]
)
def test_a_torch_too_old_is_the_cause(version: str, loads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library is not even tried with one: it would be bound to functions that are not there."""
    monkeypatch.setattr(torch, "__version__", version)
    library, cause = loading.load(LIBRARY)
    assert (library is not None) == loads
    assert cause == (None if loads else f"the native library needs torch 2.10 or newer, and this is torch {version}")


TRAIN = """
import json, warnings
import torch
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import accumkernels
    for _ in range(2):
        model = torch.nn.Linear(2, 2)
        accumulator = accumkernels.FusedAccumulator(model)
        accumulator.backward(model(torch.ones(3, 2)).sum())
        accumulator.step(torch.optim.SGD(accumulator.parameters(), lr=0.1))
try:
    accumkernels.FusedAccumulator(torch.nn.Linear(2, 2), backend="native")
    forced = None
except RuntimeError as error:
    forced = str(error)
print(json.dumps({"warned": [str(w.message) for w in caught if w.category is RuntimeWarning], "forced": forced}))
"""


@pytest.mark.starts
@pytest.mark.parametrize("fault", [None, "cut short"], ids=["missing", "cut short"])
def test_training_goes_on_with_one_warning(fault: str | None, tmp_path: Path) -> None:
    """The warning has the word native and the cause; a forced backend raises with the same cause."""
    package = Path(accumkernels.__file__).parent
    copy = shutil.copytree(package, tmp_path / "accumkernels", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    cause = "_native.so is missing"
    if fault is not None:
        change, cause = FAULTS[fault]
        (copy / LIBRARY.name).write_bytes(change(LIBRARY.read_bytes()))
    environ = clean_environ(PYTHONPATH=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", TRAIN], cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found["warned"]) == 1, found
    assert "native" in found["warned"][0]
    assert cause in found["warned"][0]
    assert "backend='native' is not available on cpu" in found["forced"]
    assert cause in found["forced"]


ELSEWHERE = """
import os, platform, sys
import numpy, torch, torch._dynamo, torch.distributed.fsdp, torch.distributed.tensor  # with what torch asks the system
system, name = sys.argv[1:]

def forbid(event, arguments):
    if event == "open" and str(arguments[0]).startswith(("/sys/", "/proc/")):
        raise FileNotFoundError(2, "there is no such folder here", arguments[0])
    if event == "ctypes.dlopen" and (arguments[0] is None or arguments[0].endswith(".so")):
        raise OSError("there is no such library here")
    if event in ("os.fork", "os.forkpty"):
        raise OSError("there is no fork here")

sys.addaudithook(forbid)
sys.platform = system
platform.system = lambda: name
if system == "win32":
    for missing in ("sysconf", "fork", "register_at_fork", "uname", "sched_getaffinity", "getloadavg"):
        delattr(os, missing)

import importlib, json, pkgutil
import accumkernels
from accumkernels.__main__ import main
for module in pkgutil.walk_packages(accumkernels.__path__, "accumkernels."):
    if "integrations" not in module.name and not module.name.endswith(("__main__", "triton_kernels")):
        importlib.import_module(module.name)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(600, 600), torch.nn.Linear(600, 1))  # with a weight on huge pages
accumulator = accumkernels.FusedAccumulator(model, cache_casts=True, fuse_weight_gradients=True)
optimizer = torch.optim.AdamW(accumulator.parameters())
for _ in range(2):
    for batch in accumulator.window([torch.randn(4, 600), torch.randn(2, 600)]):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(batch).square().mean()
        accumulator.backward(loss, weight=len(batch))
    accumulator.step(optimizer, max_norm=1.0)
    accumulator.backward_batch(torch.randn(5, 600), lambda batch: model(batch).square().mean(), micro_batch=2)
    accumulator.step(optimizer)
assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
accumulator.remove()
shapes = dict(input_shape=600, output_shape=1, dataset_size=2, num_iterations=2)
assert accumkernels.find_batch_size(model, "cpu", **shapes) == 2
try:
    accumkernels.find_batch_size(model, "cpu", **shapes, margin=0.1)
    margin = None
except ValueError as error:
    margin = str(error)
status = main(["--json"])
print(json.dumps({"status": status, "margin": margin, "error": accumkernels.ops.native.load_error}))
"""


@pytest.mark.starts
@pytest.mark.parametrize(("system", "name"), [("darwin", "Darwin"), ("win32", "Windows")])
def test_another_system_trains(system: str, name: str, tmp_path: Path) -> None:
    """Nothing but the library needs Linux: neither its folders and C library, nor fork. The doctor finds no fault."""
    package = Path(accumkernels.__file__).parent
    shutil.copytree(package, tmp_path / "accumkernels", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    environ = clean_environ(PYTHONPATH=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ELSEWHERE, system, name],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["error"] == f"_native.so is missing: compiled kernels are for Linux, and this is {name}"
    assert found["status"] == 0, done.stdout
    assert (found["margin"] is None) == (system == "darwin")  # Windows does not say how much memory there is
    assert found["margin"] is None or "needs memory_limit" in found["margin"]


@pytest.mark.starts
def test_triton_needs_no_numpy() -> None:
    """A torch from its own wheels brings Triton and no numpy: the backend must not be lost for that."""
    ask = """
import sys
sys.modules["numpy"] = None  # whoever imports it gets ImportError
import torch
from accumkernels.ops import triton
print(triton.unavailable(torch.device("cpu")))
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ask], env=clean_environ(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Triton runs on the CPU only with TRITON_INTERPRET=1")
