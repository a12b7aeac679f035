"""Matrix products of weight gradients that add their fp32 result into the accumulator, so that no gradient exists.

Such a layer has to be written for it; biases, norms and embeddings still accumulate otherwise. Each is shown beside
the plain product to 16 bit, which a backward pass does anyway. Megatron-Core calls apex's kernel, and TransformerEngine
has layers of its own; both are measured where they are installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..harness.case import Case
from ..harness.shapes import Shapes
from .compute import matrices
from .prepared import Prepared

PRODUCT, FUSED_PRODUCT = "weight-gradient products to 16 bit", "addmm(out_dtype=float32) into the accumulator"
APEX = "apex wgrad_gemm_accum_fp32 into the accumulator"
TE_LINEAR = "TransformerEngine Linear, forward and weight gradient"
TE_FUSED = "TransformerEngine Linear, the same with fuse_wgrad_accumulation"


def operands(case: Case, tokens: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Of each matrix in turn, what came back to the layer's outputs `[tokens, rows]`, and its inputs."""
    shapes: Shapes = [tuple(g.shape) for g in case.grads]
    for (rows, columns), count in matrices(shapes).items():
        generator = torch.Generator(case.device).manual_seed(rows * 31 + columns)
        outputs = torch.randn(tokens, rows, device=case.device, generator=generator).to(case.dtype)
        inputs = torch.randn(tokens, columns, device=case.device, generator=generator).to(case.dtype)
        for _ in range(count):
            yield outputs, inputs


def _accumulating(case: Case, tokens: int, add: Callable[[Tensor, Tensor, Tensor], object]) -> Prepared:
    """A method that is called with accumulator, outputs' gradient and inputs of one matrix."""
    work = [(torch.zeros(y.shape[1], x.shape[1], device=case.device), y, x) for y, x in operands(case, tokens)]

    def whole() -> None:
        for accumulator, outputs, inputs in work:
            add(accumulator, outputs, inputs)

    return Prepared(whole, [accumulator for accumulator, _, _ in work])


def products(case: Case, tokens: int) -> Prepared:
    """What a backward pass does anyway."""
    work = list(operands(case, tokens))

    def whole() -> None:
        for outputs, inputs in work:
            torch.mm(outputs.t(), inputs)

    return Prepared(whole, [])


def addmm(case: Case, tokens: int) -> Prepared:
    """The same products with beta=1, in stock torch.

    Raises:
        RuntimeError: this torch has no such product on this device.
    """

    def add(accumulator: Tensor, outputs: Tensor, inputs: Tensor) -> None:
        torch.addmm(accumulator, outputs.t(), inputs, out_dtype=torch.float32, out=accumulator)

    return _accumulating(case, tokens, add)


def apex(case: Case, tokens: int) -> Prepared:
    """NVIDIA apex's extension `fused_weight_gradient_mlp_cuda`, as Megatron-Core calls it.

    Raises:
        ImportError: it is not installed.
    """
    from fused_weight_gradient_mlp_cuda import wgrad_gemm_accum_fp32

    return _accumulating(case, tokens, lambda accumulator, y, x: wgrad_gemm_accum_fp32(x, y, accumulator))


def _transformer_engine(fused: bool) -> Callable[[Case, int], Prepared]:
    def prepare(case: Case, tokens: int) -> Prepared:
        """Raises ImportError where it is not installed."""
        import transformer_engine.pytorch as te

        layers, accumulators = [], []
        for outputs, inputs in operands(case, tokens):
            layer = te.Linear(
                inputs.shape[1],
                outputs.shape[1],
                bias=False,
                params_dtype=case.dtype,
                device=case.device,
                fuse_wgrad_accumulation=fused,
            )
            accumulators.append(torch.zeros(outputs.shape[1], inputs.shape[1], device=case.device))
            layer.weight.main_grad = accumulators[-1]
            layers.append((layer, outputs, inputs))

        def whole() -> None:
            for layer, outputs, inputs in layers:
                layer(inputs, is_first_microbatch=False).backward(outputs)  # False: adds to what there is
                layer.weight.grad = None

        return Prepared(whole, accumulators if fused else [])

    return prepare


WAYS: dict[str, Callable[[Case, int], Prepared]] = {
    PRODUCT: products,
    FUSED_PRODUCT: addmm,
    APEX: apex,
    TE_LINEAR: _transformer_engine(fused=False),
    TE_FUSED: _transformer_engine(fused=True),
}
