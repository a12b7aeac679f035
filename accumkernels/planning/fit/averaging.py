"""Averages gradients over ranks while backward runs, for a step on trial."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

_FIRST_BYTES, _BYTES = 2**20, 25 * 2**20  # DistributedDataParallel's bucket sizes


class Averaging:
    """Averages gradients as DistributedDataParallel does, except that a failed rank keeps no other waiting.

    Buckets are filled in the reverse order of parameters, and each is sent once its gradients, and those of the buckets
    before it, are complete. Whatever a backward raises, all are sent, so that every rank issues the same collectives.

    Args:
        params: The trained parameters, the same on all ranks.
        group: The ranks.
    """

    def __init__(self, params: Iterable[nn.Parameter], group: Any) -> None:
        self._group = group
        self._factor = 1 / torch.distributed.get_world_size(group)
        self._buckets = [_Bucket(bucket) for bucket in _bucketed(reversed(list(params)))]
        self._sent: list[Any] = []

    def run(self, backward: Callable[[], object]) -> None:
        """Run a backward, and average the gradients that it leaves in `.grad`; collective."""
        self._sent = []
        handles = []
        try:
            for bucket in self._buckets:
                bucket.missing = len(bucket.params)
                for param, view in zip(bucket.params, bucket.views, strict=True):
                    hook = functools.partial(self._take, bucket, view)
                    handles.append(param.register_post_accumulate_grad_hook(hook))
            backward()
        finally:
            for handle in handles:
                handle.remove()
            while len(self._sent) < len(self._buckets):
                self._send()
            for work in self._sent:
                work.wait()
        for bucket in self._buckets:
            for param, view in zip(bucket.params, bucket.views, strict=True):
                if param.grad is not None:
                    param.grad.copy_(view)

    def _take(self, bucket: _Bucket, view: Tensor, param: Tensor) -> None:
        assert param.grad is not None
        torch.mul(param.grad, self._factor, out=view)
        bucket.missing -= 1
        while len(self._sent) < len(self._buckets) and self._buckets[len(self._sent)].missing == 0:
            self._send()

    def _send(self) -> None:
        flat = self._buckets[len(self._sent)].flat
        self._sent.append(torch.distributed.all_reduce(flat, group=self._group, async_op=True))


class _Bucket:
    """Parameters of one kind, side by side."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.params = params
        self.flat = params[0].new_zeros(sum(param.numel() for param in params), requires_grad=False)
        parts = self.flat.split([param.numel() for param in params])
        self.views = [part.view(param.shape) for part, param in zip(parts, params, strict=True)]
        self.missing = 0


def _bucketed(params: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Group neighbours of one kind up to a bucket's bytes; the first is smaller, so that sending begins early."""
    buckets: list[list[nn.Parameter]] = []
    nbytes = 0
    for param in params:
        alike = bool(buckets) and (buckets[-1][0].device, buckets[-1][0].dtype) == (param.device, param.dtype)
        if not alike or nbytes >= (_FIRST_BYTES if len(buckets) == 1 else _BYTES):
            buckets.append([])
            nbytes = 0
        buckets[-1].append(param)
        nbytes += param.nbytes
    return buckets
