"""`python -m accumkernels`: the doctor's report, its exit status, and the self-test that it relies on."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import accumkernels
from accumkernels import doctor, ops
from accumkernels.__main__ import main
from accumkernels.doctor import advice, self_test

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _forget_warnings(monkeypatch):
    """The doctor silences the fallback's warning, which is given only once: leave it to the other tests."""
    monkeypatch.setattr(ops, "_warned", set())


def _without_library(monkeypatch):
    monkeypatch.setattr(ops.native, "load_error", "_native.so is on holiday")
    monkeypatch.setattr(ops.native, "_library", None)


@pytest.mark.native
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


@pytest.mark.native
def test_for_programs(capsys):
    """--json prints one document with the versions, what the library was built with, and each backend's state."""
    assert main(["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is True
    assert found["problems"] == []
    assert found["versions"]["torch"] == torch.__version__
    assert {"python", "platform", "torch_cuda", "triton", "driver"} <= found["versions"].keys()
    library = found["library"]
    assert library["loaded"] is True
    assert Path(library["path"]) == ops.native.LIBRARY_PATH
    assert {"version", "cuda", "nvcc", "archs", "compiler", "commit", "cpu_instruction_set"} <= library.keys()
    cpu = found["devices"][0]
    assert (cpu["device"], cpu["backend"]) == ("cpu", "native")
    assert [backend["name"] for backend in cpu["backends"]] == ["native", "triton", "reference"]


def test_missing_library(monkeypatch, capsys):
    """The cause is printed, plain torch takes over on the CPU, and the status is 1."""
    _without_library(monkeypatch)
    assert main([]) == 1
    out = capsys.readouterr().out
    assert "  not loaded: _native.so is on holiday" in out
    assert "native: not available: _native.so is on holiday" in out
    assert "cpu: " in out
    assert "backend: reference" in out
    assert "problem: the native library does not load: _native.so is on holiday" in out
    assert main(["--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False
    assert found["library"]["error"] == "_native.so is on holiday"


@pytest.mark.starts
def test_library_deleted_from_an_installation(tmp_path):
    """The package still imports, and its doctor says so with status 1 and one line of advice."""
    package = tmp_path / "accumkernels"
    shutil.copytree(
        Path(accumkernels.__file__).parent, package, ignore=shutil.ignore_patterns("_native.so", "__pycache__")
    )
    result = subprocess.run(
        [sys.executable, "-m", "accumkernels"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 1, result.stderr
    assert "not loaded: _native.so is missing" in result.stdout
    assert result.stdout.count("advice: reinstall the wheel") == 1
    assert "Traceback" not in result.stderr


@pytest.mark.native
def test_library_of_another_version(monkeypatch, capsys):
    """A library left behind by an older checkout is a problem, a version suffix is not."""
    info = ops.native.build_info()
    monkeypatch.setattr(ops.native, "build_info", lambda: {**info, "version": f"{accumkernels.__version__}+cu130"})
    assert main([]) == 0
    older = {key: value for key, value in info.items() if key != "nvcc"} | {"version": "0.0.1", "cuda": "12.8"}
    monkeypatch.setattr(ops.native, "build_info", lambda: older)
    assert main([]) == 1
    assert "problem: the native library is built from version 0.0.1" in capsys.readouterr().out


@pytest.mark.native
@pytest.mark.parametrize(
    ("torch_cuda", "visible", "said", "status"),
    [
        (None, None, "note: the NVIDIA driver 580.65.06 is loaded, but this torch is built without CUDA", 0),
        ("13.0", None, "problem: the NVIDIA driver 580.65.06 is loaded, but torch cannot use it: too old", 1),
        ("13.0", "", "no problems found", 0),
    ],
    ids=["CPU torch", "driver too old", "hidden on purpose"],
)
def test_driver_without_a_gpu_in_torch(torch_cuda, visible, said, status, monkeypatch, tmp_path, capsys):
    """A GPU that torch does not use: of no concern to a CPU torch or when hidden, else something is wrong."""

    def init():
        raise RuntimeError("too old\nmore lines")

    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27\n")
    monkeypatch.setattr(doctor, "_DRIVER", tmp_path / "version")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.version, "cuda", torch_cuda)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert main([]) == status
    out = capsys.readouterr().out
    assert "NVIDIA driver 580.65.06" in out
    assert said in out


@pytest.mark.parametrize("limit", ["nonsense", "AVX2", "avx2", ""])
def test_an_unknown_instruction_set_is_named(limit, monkeypatch, capsys):
    """The kernels take the best one then, as if nothing had been set."""
    monkeypatch.setenv("ACCUMKERNELS_CPU", limit)
    assert main([]) == 0
    out = capsys.readouterr().out
    assert (f"note: ACCUMKERNELS_CPU={limit!r} is no instruction set" in out) == (limit not in ("avx2", ""))
    assert ("advice: set it to avx2 or portable" in out) == (limit not in ("avx2", ""))


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        ("_native.so is missing: accumkernels was installed without its compiled library", "reinstall"),
        ("_native.so is missing: /home/me/accumkernels has sources, which hide what is installed", "another folder"),
        ("_native.so is built for aarch64, and this is x86_64", "reinstall"),
        ("_native.so is cut short: 32 bytes", "reinstall"),
        ("_native.so does not load with torch 2.13.0: undefined symbol: aoti_torch_new", "reinstall"),
        ("_native.so does not load with torch 2.13.0: version `GLIBC_2.38' not found", "newer Linux"),
        ("the native library needs torch 2.10 or newer, and this is torch 2.9.1", "upgrade torch"),
        ("the driver supports CUDA 12.8; this build needs 13.0 (driver R580 or newer)", "older CUDA toolkit"),
        ("no NVIDIA driver found; this build needs R580 or newer", "driver"),
        ("this build has no kernel image for sm_70 (cudaErrorNoKernelImageForDevice)", "ACCUMKERNELS_CUDA_ARCHS"),
        ("built without CUDA", "ACCUMKERNELS_BUILD_CUDA=1"),
        ("this torch is built without CUDA", "CUDA build of torch"),
        ("the package triton is not installed", "pip install triton"),
        ("TRITON_INTERPRET was changed after triton was imported", "unset TRITON_INTERPRET"),
        ("something nobody thought of", "report"),
    ],
)
def test_advice(cause, words):
    """One line for each cause that the library, Triton and the loader can give."""
    found = advice(cause)
    assert words in found
    assert "\n" not in found


@pytest.mark.native
def test_backend_that_counts_wrong(monkeypatch, capsys):
    """A backend that loads but adds nothing fails its self-test: status 1."""
    monkeypatch.setattr(ops.native, "accumulate_", lambda *args, **kwargs: None)
    assert main([]) == 1
    out = capsys.readouterr().out
    assert "native: FAILS its self-test: the sum of torch.float16 gradients is off" in out
    assert "native on cpu fails its self-test" in out


def test_gpu_left_with_plain_torch(monkeypatch, capsys):
    """A GPU on which neither native nor Triton kernels work is a problem."""
    monkeypatch.setattr("accumkernels.doctor.devices", lambda: [torch.device("cuda", 0)])
    monkeypatch.setattr("accumkernels.doctor.describe", lambda device: "a GPU")
    monkeypatch.setattr("accumkernels.doctor.self_test", lambda backend, device: None)
    monkeypatch.setattr(ops.native, "unavailable", lambda device: "the driver is too old")
    monkeypatch.setattr(ops.triton, "unavailable", lambda device: "not installed")
    assert main([]) == 1
    out = capsys.readouterr().out
    assert "the driver is too old" in out
    assert "neither native nor Triton kernels work on cuda:0" in out


@pytest.mark.native
def test_gpu_served_by_triton(monkeypatch, capsys):
    """Where the driver is too old for the library, Triton's kernels are the documented way: no problem."""
    monkeypatch.setattr("accumkernels.doctor.devices", lambda: [torch.device("cuda", 0)])
    monkeypatch.setattr("accumkernels.doctor.describe", lambda device: "a GPU")
    monkeypatch.setattr("accumkernels.doctor.self_test", lambda backend, device: None)
    monkeypatch.setattr(ops.native, "unavailable", lambda device: "the driver is too old")
    monkeypatch.setattr(ops.triton, "unavailable", lambda device: None)
    assert main([]) == 0
    out = capsys.readouterr().out
    assert "backend: triton" in out
    assert "note: native kernels do not work on cuda:0: the driver is too old" in out
    assert "problem:" not in out


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


def _takes_nan_for_finite(buffer, state, grads, *args, **kwargs):
    before = state.clone()
    ops.reference.accumulate_(buffer, state, grads, *args, **kwargs)
    if any(grad.isnan().any() for grad in grads):
        state[1], state[3] = before[1], before[3]


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
        ({"accumulate_": _takes_nan_for_finite}, "nan in element 0 goes unnoticed"),
        ({"accumulate_": _fails}, "RuntimeError: no kernel image"),
        ({"norm_": lambda *args: None}, "the norm is off"),
        ({"scaled_copy_": _truncates}, "rounding to torch.float16 is wrong"),
    ],
    ids=["no scale", "no weight", "overwrites", "no check", "no nan", "raises", "no norm", "truncates"],
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


@pytest.mark.native
def test_every_accelerator_is_listed(monkeypatch, capsys):
    """Plain torch is what serves those that no kernels are for: no problem; one without fp64 is named, and why."""
    from accumkernels import doctor

    monkeypatch.setattr(doctor, "accelerators", lambda: [torch.device("xpu", 0), torch.device("mps", 0)])
    monkeypatch.setattr(doctor, "obstacle", lambda device: "mps:0 has no fp64" if device.type == "mps" else None)
    monkeypatch.setattr(doctor, "self_test", lambda backend, device: None)
    monkeypatch.setattr(torch.xpu, "get_device_name", lambda device: "Intel Arc B580", raising=False)
    assert main([]) == 0
    out = capsys.readouterr().out
    assert "xpu:0: Intel Arc B580\n  backend: reference" in out
    assert "advice: none needed: plain torch serves it" in out
    assert "note: FusedAccumulator refuses mps:0: mps:0 has no fp64" in out
    assert "neither native nor Triton" not in out
