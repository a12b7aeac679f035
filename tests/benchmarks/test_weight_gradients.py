"""Products that add weight gradients into fp32: what each is called with, against fp64."""

import importlib.util
import sys
import types

import pytest
import torch
from torch import nn

from benchmarks.harness.case import Case
from benchmarks.kernel_jobs import Job, run
from benchmarks.methods import other_jobs, weight_gradients

CPU = torch.device("cpu")
SHAPES = [(5, 3), (7,), (5, 3), (2, 2, 2)]
TOKENS = 11
PACKAGES = {
    weight_gradients.FUSED_PRODUCT: "torch",
    weight_gradients.APEX: "fused_weight_gradient_mlp_cuda",
    weight_gradients.TE_FUSED: "transformer_engine",
}


def check(name: str, device: torch.device) -> None:
    """Two calls leave twice the product in each accumulator."""
    case = Case(SHAPES, torch.bfloat16, device)
    prepared = weight_gradients.WAYS[name](case, TOKENS)
    prepared.whole()
    prepared.whole()
    truth = [2 * y.double().t() @ x.double() for y, x in weight_gradients.operands(case, TOKENS)]
    assert len(prepared.accumulators) == len(truth) == 3  # vectors have no product
    for actual, expected in zip(prepared.accumulators, truth, strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)  # fp32 sums of 22 products


def test_apex(monkeypatch):
    """Inputs, gradient of the outputs, accumulator: as the extension takes them."""

    def wgrad_gemm_accum_fp32(inputs, outputs, accumulator):
        accumulator += outputs.float().t() @ inputs.float()

    module = types.SimpleNamespace(wgrad_gemm_accum_fp32=wgrad_gemm_accum_fp32)
    monkeypatch.setitem(sys.modules, "fused_weight_gradient_mlp_cuda", module)
    check(weight_gradients.APEX, CPU)


class TeLinear(nn.Linear):
    """Adds into `weight.main_grad` in backward, unless it is the first micro-batch's."""

    def __init__(self, columns, rows, *, bias, params_dtype, device, fuse_wgrad_accumulation):
        super().__init__(columns, rows, bias=bias, dtype=params_dtype, device=device)
        self.fused = fuse_wgrad_accumulation

    def forward(self, x, is_first_microbatch):
        out = super().forward(x)
        if self.fused:

            def add(grad):
                product = grad.float().t() @ x.float()
                self.weight.main_grad.copy_(product if is_first_microbatch else self.weight.main_grad + product)

            out.register_hook(add)
        return out


def test_transformer_engine(monkeypatch):
    """Its layer, with the accumulator as `main_grad`."""
    engine = types.ModuleType("transformer_engine")
    engine.pytorch = types.ModuleType("transformer_engine.pytorch")
    engine.pytorch.Linear = TeLinear
    monkeypatch.setitem(sys.modules, "transformer_engine", engine)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", engine.pytorch)
    check(weight_gradients.TE_FUSED, CPU)


def test_what_is_not_installed_is_said():
    """A row with the cause, and the other methods are measured."""
    names = (weight_gradients.APEX, weight_gradients.PRODUCT, weight_gradients.TE_FUSED)
    assert set(names) < set(other_jobs.JOBS)
    measured = run(Job("other jobs", names, SHAPES, "bf16", "cpu", 1, 1, 1.0, tokens=TOKENS))
    assert [bool(m.seconds) for m in measured] == [False, True, False]
    assert "fused_weight_gradient_mlp_cuda" in str(measured[0].unavailable)


if torch.cuda.is_available():
    INSTALLED = [name for name, package in PACKAGES.items() if importlib.util.find_spec(package) is not None]

    @pytest.mark.gpu
    @pytest.mark.parametrize("name", INSTALLED)
    def test_on_a_gpu(name):
        """What is installed adds."""
        check(name, torch.device("cuda", 0))
