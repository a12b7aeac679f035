"""Compiles the Triton kernels, specialised as `accumkernels.ops.triton` launches them, for GPUs that are absent."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from accumkernels.ops import triton_kernels as kernels
from accumkernels.ops.triton import BLOCK, NUM_WARPS, TOTAL_BLOCK

_SHORT = {tl.float16: "fp16", tl.bfloat16: "bf16", tl.float32: "fp32", tl.float64: "fp64"}
_TABLES = {"table": "*i64", "blocks": "*i32", "rows": "*i64", "n": "i32"}
_FLAGS = {"flags": "*i32", "tag": "i32"}
_STATE = {"state": "*fp64", "weight": "*fp64", "loss_scale": "*fp32", "drop": "*fp64"}
_PARTIALS = {"partials": "*fp64", "partial_base": "i32"}


class Variant(NamedTuple):
    """A kernel with the types of its arguments; an argument that is absent is None."""

    kernel: Any
    name: str  # such as accumulate_kernel[bf16,fp32]
    types: dict[str, str]
    constants: dict[str, object]


def variants() -> Iterator[Variant]:
    """Yield every kernel: each aligned with all gradient dtypes, and bf16 (the fiddliest) in its other forms."""
    yield Variant(
        kernels.account_kernel,
        "account_kernel",
        {**_STATE, **_TABLES, "sq_norm": "*fp64", "partials": "*fp64", "num_partials": "i32"},
        {"COUNT": True, "BLOCK": TOTAL_BLOCK},
    )
    yield Variant(kernels.check_weight_kernel, "check_weight_kernel", {"weight": "*fp64", "found_inf": "*fp64"}, {})
    arguments = dict.fromkeys(("verdict", "state", "divisor", "norm", "max_norm", "overflow"), "*fp64")
    yield Variant(kernels.decide_kernel, "decide_kernel", {**arguments, "single": "*fp32"}, {})
    for inf in (False, True):
        types = {"out": "*fp64", "partials": "*fp64", "num_partials": "i32"}
        constants: dict[str, object] = {"INF": inf, "BLOCK": TOTAL_BLOCK}
        yield Variant(kernels.norm_total_kernel, f"norm_total_kernel[{'inf' if inf else '2'}]", types, constants)

    def variant(name: str, form: str, types: dict[str, str], aligned: bool = True, **constants: object) -> Variant:
        form += "" if aligned else ",unaligned"
        constants.update(ALIGNED=aligned, BLOCK=BLOCK)
        return Variant(getattr(kernels, name), f"{name}[{form}]", {**_TABLES, **types}, constants)

    checked = {"buffer": "*fp32", **_STATE, **_FLAGS, "partial_base": "i32", "num_partials": "i32"}
    bf16 = tl.bfloat16
    for dtype, short in _SHORT.items():
        yield variant("accumulate_kernel", f"{short},fp32", checked, DTYPE=dtype)
        yield variant("check_finite_kernel", short, {"found_inf": "*fp64", **_FLAGS}, DTYPE=dtype)
        yield variant("norm_kernel", f"{short},2", _PARTIALS, DTYPE=dtype, INF=False)
    yield variant("accumulate_kernel", "fp64,fp64", {**checked, "buffer": "*fp64"}, DTYPE=tl.float64)
    yield variant("accumulate_kernel", "bf16,fp64", {**checked, "buffer": "*fp64"}, DTYPE=bf16)
    yield variant("accumulate_kernel", "bf16,fp32", checked, aligned=False, DTYPE=bf16)
    unchecked = {name: value for name, value in checked.items() if name != "flags"}
    yield variant("accumulate_kernel", "bf16,fp32,unchecked", unchecked, DTYPE=bf16)
    yield variant("accumulate_kernel", "bf16,fp32,sq_norm", {**checked, "partials": "*fp64"}, DTYPE=bf16)
    yield variant("norm_kernel", "bf16,inf", _PARTIALS, DTYPE=bf16, INF=True)
    scaled = {"divisor": "*fp64", "found_inf": "*fp64"}
    fp16, fp32, fp64 = tl.float16, tl.float32, tl.float64
    for output, input in [(fp16, fp32), (bf16, fp32), (fp32, fp32), (fp32, bf16), (fp32, fp16), (bf16, fp64)]:
        form = f"{_SHORT[output]},{_SHORT[input]}"
        yield variant("scaled_copy_kernel", form, scaled, OUTPUT=output, INPUT=input)


def threads_per_warp(arch: int | str) -> int:
    """As launched by Triton: 64 on AMD's data center GPUs, 32 on all others."""
    return 64 if str(arch).startswith("gfx9") else 32


def compile_variant(variant: Variant, arch: int | str) -> Any:
    """Compile for a compute capability such as 90, or an architecture of AMD's such as "gfx942".

    `asm` of the result has the code: "ptx" and "cubin", or "amdgcn" and "hsaco".
    """
    arguments = list(inspect.signature(variant.kernel.fn).parameters)
    signature = {name: variant.types.get(name, "constexpr") for name in arguments}
    constants = {name: variant.constants.get(name) for name, kind in signature.items() if kind == "constexpr"}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(arguments) if signature[name].startswith("*")}
    source = ASTSource(fn=variant.kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": NUM_WARPS, "enable_fp_fusion": False}
    target = GPUTarget("cuda" if isinstance(arch, int) else "hip", arch, threads_per_warp(arch))
    return triton.compile(source, target=target, options=options)
