"""AMD's GPUs, which a torch built for ROCm calls CUDA devices, and Intel's. What torch says of them is faked."""

import contextlib
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses import FakeTensorMode, fake_tensor

from accumkernels import ops
from accumkernels.__main__ import main
from accumkernels.doctor import allocator_advice
from accumkernels.ops import products

GPU = torch.device("cuda", 0)


@pytest.fixture
def rocm(monkeypatch):
    """A torch built for ROCm that finds a GPU, beside Triton's compiler; asking the CUDA runtime is an error."""
    monkeypatch.setattr(torch.version, "hip", "7.0.51831")
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(ops.native, "_probe", lambda index: pytest.fail("the CUDA runtime was asked for an AMD GPU"))
    monkeypatch.setattr(ops.triton, "_interpreted", lambda: (False, False))
    monkeypatch.setattr(ops, "_warned", set())


@pytest.mark.native
def test_auto_takes_triton(rocm):
    """Native kernels are CUDA's, even if an NVIDIA GPU is there too; the warning says why."""
    said = r"^accumkernels: the triton backend is used on cuda:0 .*no native kernels for AMD GPUs .*ROCm 7\.0"
    with pytest.warns(RuntimeWarning, match=said):
        assert ops.select("auto", GPU) is ops.triton
    assert ops.select("triton", GPU) is ops.triton
    with pytest.raises(RuntimeError, match="backend='native' is not available on cuda:0: .* AMD GPUs"):
        ops.select("native", GPU)


def test_the_cpu_keeps_native_kernels(rocm):
    """CPU kernels do not depend on torch's GPUs."""
    assert ops.native.unavailable(torch.device("cpu")) == ops.native.load_error


def test_a_capture_names_what_can_be_captured(rocm, monkeypatch):
    """On an AMD GPU, plain torch; native kernels on NVIDIA's."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for hip, capturable in (("7.0", "reference"), (None, "native")):
        monkeypatch.setattr(torch.version, "hip", hip)
        with pytest.raises(RuntimeError, match=f"cannot replay; the backend to capture is '{capturable}'"):
            with ops.triton._launching("accumulate_", GPU):
                pass


def test_fused_products(rocm, monkeypatch):
    """Of 16-bit operands they are off, since none has run on ROCm; those of fp32 ones are plain addmm."""
    # Which needs a driver in torch 2.10.
    monkeypatch.setattr(fake_tensor, "init_gpu_context", lambda device: None, raising=False)
    with FakeTensorMode():
        view = torch.zeros(8, 8, device="cuda")
    for dtype in (torch.float16, torch.bfloat16):
        assert products.choose(view, dtype, 64) is None
    assert products.choose(view, torch.float32, 64) is products.same_dtype
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert products.choose(view, torch.bfloat16, 64) is products.widening


@pytest.mark.native
def test_doctor(rocm, monkeypatch, capsys):
    """The GPU's architecture, ROCm's version and Triton, which is no problem and needs no NVIDIA driver."""
    properties = SimpleNamespace(name="AMD Instinct MI300X", gcnArchName="gfx942:sramecc+:xnack-", major=9, minor=4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr("accumkernels.doctor.self_test", lambda backend, device: None)
    assert main([]) == 0
    out = capsys.readouterr().out
    assert "built for ROCm 7.0.51831" in out
    assert "cuda:0: AMD Instinct MI300X, gfx942\n  backend: triton" in out
    assert "advice: none needed" in out
    assert "\nNVIDIA driver" not in out
    assert allocator_advice() == []  # expandable segments


def test_intel_gpus_get_plain_torch(monkeypatch):
    """Triton's wheel has no backend for them."""
    monkeypatch.setattr(ops, "_warned", set())
    with pytest.warns(RuntimeWarning, match="the reference backend is used on xpu"):
        assert ops.select("auto", torch.device("xpu")) is ops.reference
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ops.select("auto", torch.device("xpu")) is ops.reference
