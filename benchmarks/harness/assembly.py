"""What the text of a compiled Triton kernel says of it: NVIDIA's PTX, or the machine code of AMD's GPUs."""

from __future__ import annotations

import re

_PTX_WIDE = r"\.global[\w.:]*\.(?:v4\.b32|v2\.b64|v8\.b32|v4\.b64)"  # 128 bits or more
_PTX_HALF = r"\.global[\w.:]*\.v2\.b32"
_PTX_PRODUCT = r"\bmul\.(?:rn\.)?f(?:32|64)\b"

_AMD_WIDE = r"\b(?:buffer|global)_%s_(?:dwordx4|b128)\b"
_AMD_HALF = r"\bbuffer_load_(?:dwordx2|b64)\b"  # 64-bit numbers in tables are read otherwise
_AMD_PRODUCT = r"\bv_(?:pk_|dual_)?mul_f32"
_AMD_MULTIPLY_ADD = r"\bv_(?:pk_|dual_)?(?:fma|fmac|mad|mac)(?:_mix|_mixlo|_mixhi)?_f(?:16|32|64)"
_AMD_WIDENED_PRODUCT = r"\bv_fma_mix_f32 [^,\n]+,[^,\n]+,[^,\n]+, neg\(0\)"  # adds -0, and so rounds once, as a product
_AMD_QUOTIENT = r"\bv_div_fixup_f(?:32|64)"  # the last instruction of a division that rounds correctly
_AMD_MULTIPLY_ADDS_OF_A_QUOTIENT = 5  # besides v_div_fmas, which rounds


def ptx(text: str) -> dict[str, int]:
    """Counts of PTX, by the names of `compile_report.Code`."""
    return {
        "vector_loads": _count("ld" + _PTX_WIDE, text),
        "vector_stores": _count("st" + _PTX_WIDE, text),
        "half_loads": _count("ld" + _PTX_HALF, text),
        "fused": _count(r"\bfma\.rn\.f(?:32|64)", text),
        "flushed": text.count(".ftz"),
        "approximate": _count(r"\bdiv\.(?:full|approx)", text),
        "late_loads": _late(re.split(r"^\$L__BB\w+:", text, flags=re.MULTILINE), "ld" + _PTX_WIDE, _PTX_PRODUCT),
    }


def amdgcn(text: str) -> dict[str, int]:
    """The same counts of AMD's machine code, its registers per thread and its bytes of stack."""
    quotients = _count(_AMD_QUOTIENT, text)
    products = _count(_AMD_WIDENED_PRODUCT, text)
    wide = _AMD_WIDE % "load"
    return {
        "regs": _metadata("vgpr_count", text) + _metadata("agpr_count", text),
        "spills": _metadata("private_segment_fixed_size", text),
        "vector_loads": _count(wide, text),
        "vector_stores": _count(_AMD_WIDE % "store", text),
        "half_loads": _count(_AMD_HALF, text),
        "fused": _count(_AMD_MULTIPLY_ADD, text) - products - _AMD_MULTIPLY_ADDS_OF_A_QUOTIENT * quotients,
        "flushed": _count(r"\.amdhsa_float_denorm_mode_\w+ [^3]", text),
        "approximate": _count(r"\bv_rcp_(?:iflag_)?f(?:32|64)", text) - quotients + _count(r"\bv_cvt_\w*rtz", text),
        "late_loads": _late(re.split(r"^\.LBB\w+:", text, flags=re.MULTILINE), wide, _AMD_PRODUCT),
    }


def _count(pattern: str, text: str) -> int:
    return len(re.findall(pattern, text))


def _metadata(name: str, text: str) -> int:
    found = re.search(rf"^\s*(?:- )?\.{name}:\s+(\d+)", text, re.MULTILINE)
    return int(found[1]) if found else 0


def _late(blocks: list[str], load: str, product: str) -> int:
    """Wide loads of other basic blocks than the first that has any, and those in it behind a product."""
    first = next((block for block in blocks if re.search(load, block)), "")
    in_time = re.split(product, first, maxsplit=1)[0]
    return sum(_count(load, block) for block in blocks) - _count(load, in_time)
