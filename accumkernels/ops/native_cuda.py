"""The ops of native.py for CUDA tensors: gradients stay alive until the kernels that read them have run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..ops import native
from .keep_alive import keep_until_done
from .native import judge_, norm_, scaled_copy_

__all__ = ["accumulate_", "check_finite_", "judge_", "norm_", "scaled_copy_"]


def accumulate_(buffer: Tensor, state: Tensor, grads: Sequence[Tensor], *rest: Any, **options: Any) -> None:
    native.accumulate_(buffer, state, grads, *rest, **options)
    keep_until_done(grads)


def check_finite_(grads: Sequence[Tensor], *rest: Any, **options: Any) -> None:
    native.check_finite_(grads, *rest, **options)
    keep_until_done(grads)
