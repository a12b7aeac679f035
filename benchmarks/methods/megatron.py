"""Megatron-Core's gradient buffer, from the package itself (tried with 0.16.1). It is for GPUs only."""

from __future__ import annotations

import os
import sys
import tempfile

import torch
from torch import Tensor, nn

from ..harness.case import Case
from .prepared import Prepared


def prepare(case: Case) -> Prepared | None:
    """Its DistributedDataParallel on one rank, with fp32 gradients; None where it is not installed or does not work."""
    try:
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.transformer import TransformerConfig
    except ImportError:
        return None
    if case.device.type != "cuda":
        return None
    try:
        if not torch.distributed.is_initialized():
            meeting_point = os.path.join(tempfile.mkdtemp(), "store")
            torch.distributed.init_process_group("nccl", init_method=f"file://{meeting_point}", rank=0, world_size=1)
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel()
        module = nn.Module()
        module.weights = nn.ParameterList(case.parameters(case.dtype))
        buffers = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False)
        ddp = DistributedDataParallel(
            TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=1), buffers, module
        )
        ddp.zero_grad_buffer()
    except Exception as error:  # any version, any cause: the method is then measured without the package
        print(f"the package megatron-core does not work here, its hook is imitated: {error}", file=sys.stderr)
        return None
    params = list(module.weights)
    accumulators: list[Tensor] = [param.main_grad for param in params]

    def whole() -> None:
        assert ddp is not None  # its hooks must stay alive
        torch.autograd.backward(params, case.grads)

    return Prepared(whole, accumulators)
