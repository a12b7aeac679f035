"""`python -m accumkernels`: the doctor's report, its exit status, and the self-test that it relies on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import accumkernels
from accumkernels import ops
from accumkernels.__main__ import main
from accumkernels.selftest import self_test

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _forget_warnings(monkeypatch):
    """The doctor silences the fallback's warning, which is given only once: leave it to the other tests."""
    monkeypatch.setattr(ops, "_warned", set())


def _without_library(monkeypatch):
    monkeypatch.setattr(ops.native, "load_error", "_native.so is on holiday")
    monkeypatch.setattr(ops.native, "_library", None)


def test_healthy(capsys):
    """Where all works: versions, library, backend and self-test of each device, status 0."""
    assert main([]) == 0
    out = capsys.readouterr().out
    for part in (
        f"accumkernels {accumkernels.__version__}",
        f"torch {torch.__version__}",
        "python ",
        "triton ",
        str(ops.native.LIBRARY_PATH),
        f"CPU kernels: {ops.native.cpu_instruction_set()}",
        "cpu: ",
        "backend: native",
        "native: works",
        "reference: works",
        "no problems found",
    ):
        assert part in out


def test_missing_library(monkeypatch, capsys):
    """The cause is printed, plain torch takes over on the CPU, and the status is 1."""
    _without_library(monkeypatch)
    assert main([]) == 1
    out = capsys.readouterr().out
    assert "native library: not loaded: _native.so is on holiday" in out
    assert "native: not available: _native.so is on holiday" in out
    assert "cpu: " in out
    assert "backend: reference" in out
    assert "problems: the native library does not load" in out


@pytest.mark.parametrize("content", [None, b"", b"not a library"], ids=["missing", "empty", "junk"])
def test_library_that_does_not_load(content, tmp_path):
    """A package whose library is missing or broken still imports, and its doctor says so with status 1."""
    package = tmp_path / "accumkernels"
    shutil.copytree(
        Path(accumkernels.__file__).parent, package, ignore=shutil.ignore_patterns("_native.so", "__pycache__")
    )
    if content is not None:
        (package / "_native.so").write_bytes(content)
    result = subprocess.run(
        [sys.executable, "-m", "accumkernels"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 1, result.stderr
    assert "native library: not loaded: _native.so" in result.stdout
    assert "Traceback" not in result.stderr


def test_backend_that_counts_wrong(monkeypatch, capsys):
    """A backend that loads but adds nothing fails its self-test: status 1."""
    monkeypatch.setattr(ops.native, "accumulate_", lambda *args, **kwargs: None)
    assert main([]) == 1
    out = capsys.readouterr().out
    assert "native: FAILS its self-test: the sum of torch.float16 gradients is off" in out
    assert "native on cpu fails its self-test" in out


def test_gpu_left_with_plain_torch(monkeypatch, capsys):
    """A GPU on which neither native nor Triton kernels work is a problem."""
    monkeypatch.setattr("accumkernels.doctor._devices", lambda: [torch.device("cuda", 0)])
    monkeypatch.setattr("accumkernels.doctor._describe", lambda device: "a GPU")
    monkeypatch.setattr("accumkernels.doctor.self_test", lambda backend, device: None)
    monkeypatch.setattr(ops.native, "unavailable", lambda device: "the driver is too old")
    monkeypatch.setattr(ops.triton, "unavailable", lambda device: "not installed")
    assert main([]) == 1
    out = capsys.readouterr().out
    assert "the driver is too old" in out
    assert "neither native nor Triton kernels work on cuda:0" in out


def test_gpu_served_by_triton(monkeypatch, capsys):
    """Where the driver is too old for the library, Triton's kernels are the documented way: no problem."""
    monkeypatch.setattr("accumkernels.doctor._devices", lambda: [torch.device("cuda", 0)])
    monkeypatch.setattr("accumkernels.doctor._describe", lambda device: "a GPU")
    monkeypatch.setattr("accumkernels.doctor.self_test", lambda backend, device: None)
    monkeypatch.setattr(ops.native, "unavailable", lambda device: "the driver is too old")
    monkeypatch.setattr(ops.triton, "unavailable", lambda device: None)
    assert main([]) == 0
    out = capsys.readouterr().out
    assert "backend: triton" in out
    assert "the driver is too old" in out


def _backend(**replaced):
    """The reference with some functions replaced."""
    functions = {
        name: getattr(ops.reference, name) for name in ("accumulate_", "check_finite_", "norm_", "scaled_copy_")
    }
    return types.SimpleNamespace(**{**functions, **replaced})


def _forgets_the_scale(*args, loss_scale=None, **kwargs):
    ops.reference.accumulate_(*args, **kwargs)


def _forgets_the_weight(*args, weight=1.0, **kwargs):
    ops.reference.accumulate_(*args, **kwargs)


def _overwrites_always(buffer, state, grads, segments, overwrite, *args, **kwargs):
    ops.reference.accumulate_(buffer, state, grads, segments, [True] * len(grads), *args, **kwargs)


def _checks_nothing(*args, flags=None, **kwargs):
    ops.reference.accumulate_(*args, **kwargs)


def _fails(*args, **kwargs):
    raise RuntimeError("no kernel image\nmore lines")


def _truncates(outputs, inputs, *, divisor):
    for output, value in zip(outputs, inputs, strict=True):
        exact = value / divisor.float()
        rounded = exact.to(output.dtype)
        toward_zero = torch.nextafter(rounded, torch.zeros_like(rounded))
        output.copy_(torch.where(rounded.float().abs() > exact.abs(), toward_zero, rounded))


@pytest.mark.parametrize(
    ("replaced", "said"),
    [
        ({"accumulate_": _forgets_the_scale}, "the sum of torch.float16 gradients is off"),
        ({"accumulate_": _forgets_the_weight}, "the sum of torch.float16 gradients is off"),
        ({"accumulate_": _overwrites_always}, "the sum of torch.float16 gradients is off"),
        ({"accumulate_": _checks_nothing}, "goes unnoticed"),
        ({"accumulate_": _fails}, "RuntimeError: no kernel image"),
        ({"norm_": lambda *args: None}, "the norm is off"),
        ({"scaled_copy_": _truncates}, "rounding to torch.float16 is wrong"),
    ],
    ids=["no scale", "no weight", "overwrites", "no check", "raises", "no norm", "truncates"],
)
def test_self_test_sees(replaced, said):
    """Each way to be wrong is told from the others, in one line."""
    found = self_test(_backend(**replaced), CPU)
    assert found is not None
    assert said in found
    assert "\n" not in found


def test_self_test_passes_the_reference():
    """Plain torch is right."""
    assert self_test(ops.reference, CPU) is None
