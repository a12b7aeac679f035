"""Advice against fragmented memory, which keeps a batch from fitting although enough memory is free."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

NEW, OLD = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"  # torch >= 2.9 reads both, and warns about the old one


def allocator_advice(environ: Mapping[str, str] | None = None, on_gpu: bool | None = None) -> list[str]:
    """Lines of advice on the CUDA caching allocator's settings; empty without a GPU, or if nothing needs changing.

    The allocator carves tensors out of segments that it gets from the driver. Batches of varying size leave gaps
    between tensors that fit no other tensor, so that memory runs out although the gaps together would be enough. With
    expandable segments, one segment grows instead of many being cut up.

    Args:
        environ: The environment; default: the process's.
        on_gpu: Whether there is a CUDA GPU; default: whether torch finds one.
    """
    environ = os.environ if environ is None else environ
    if not (torch.cuda.is_available() if on_gpu is None else on_gpu):
        return []
    advice = []
    name = NEW if NEW in environ else OLD
    settings = dict(part.strip().partition(":")[::2] for part in environ.get(name, "").split(",") if part.strip())
    if name == OLD and OLD in environ:
        advice.append(f"advice: {OLD} is the old name: set {NEW}")
    backend = settings.get("backend", "native").strip()
    if backend == "native" and settings.get("expandable_segments", "").strip().lower() != "true":
        advice.append(
            "advice: when memory runs out though much is 'reserved but unallocated', set "
            f"{NEW}=expandable_segments:True"
        )
    return advice
