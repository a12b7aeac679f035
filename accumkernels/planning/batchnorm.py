"""BatchNorm and accumulation: the one layer for which micro-batches are not one big batch.

In training, BatchNorm normalizes with the mean and variance of the batch it sees, which is the micro-batch.
Accumulation matches the big batch's gradients for every layer whose output depends on one sample alone; with BatchNorm
it matches a model that normalizes over micro-batches ("ghost batches"; Hoffer et al. 2017, arXiv:1705.08741). Such a
model trains well with some 16 samples or more and badly with fewer (Wu and He 2018, "Group Normalization",
arXiv:1803.08494, figure 1). GroupNorm normalizes within a sample and has no such limit.
"""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..batch_statistics import batchnorms
from .training import positive_int


def batchnorm_modules(model: nn.Module) -> list[str]:
    """List a model's BatchNorm modules by name, in training or not, with SyncBatchNorm and lazy ones; "" is `model`.

    Raises:
        TypeError: `model` is no module.
    """
    return [name for name, _ in batchnorms(model)]


# The fewest channels in a group. Over images a channel is many values and two channels are plenty; over (N, C) it is
# one value, and a group of two is normalized to its signs, (+1, -1) or (-1, +1), which nothing can learn from.
_LEAST_CHANNELS = 2
_LEAST_CHANNELS_1D = 8


def _groups(channels: int, most: int, least_channels: int) -> int:
    """Return the largest divisor of `channels` up to `most` with so many channels per group; 1 if there is none."""
    most = min(most, channels // least_channels)
    return max((groups for groups in range(1, most + 1) if channels % groups == 0), default=1)


def _group_norm(name: str, module: _BatchNorm, most: int) -> nn.GroupNorm:
    if isinstance(module, nn.modules.lazy.LazyModuleMixin) and module.has_uninitialized_params():
        raise ValueError(f"replace_batchnorm: {name!r} is lazy: run the model once first")
    channels = module.num_features
    if channels == 1 and isinstance(module, nn.BatchNorm1d):
        raise ValueError(
            f"replace_batchnorm: {name!r} has a single channel: GroupNorm would have one value per group and return 0"
        )
    # The module does not know whether its inputs are (N, C) or (N, C, L): assume the former for a BatchNorm1d, since
    # larger groups cost sequences little.
    least = _LEAST_CHANNELS_1D if isinstance(module, nn.BatchNorm1d) else _LEAST_CHANNELS
    norm = nn.GroupNorm(_groups(channels, most, least), channels, eps=module.eps, affine=False)
    if module.affine:
        norm.affine = True
        norm.weight, norm.bias = module.weight, module.bias
    return norm.train(module.training)


def replace_batchnorm(model: nn.Module, num_groups: int = 32) -> int:
    """Replace every BatchNorm with a GroupNorm, which treats micro-batches like the big batch. Do it before training.

    The affine parameters stay the same objects, with their values, dtype, device and `requires_grad`, so an optimizer
    may exist already. Running statistics and hooks on the modules are lost; a trained model must be trained again. A
    module used in several places is replaced by one.

    Args:
        model: Changed in place.
        num_groups: Upper bound. Each layer takes the largest divisor of its channels up to it that leaves enough values
            to a group: at least 2 channels, and at least 8 for `BatchNorm1d` (one group for fewer than 16 channels),
            whose channels are single values if inputs are `[N, C]`. A `BatchNorm1d` over `[N, C, L]` is treated
            likewise, since the module cannot tell. A SyncBatchNorm counts as one over images: replace `BatchNorm1d`
            before `convert_sync_batchnorm`.

    Returns:
        How many were replaced.

    Raises:
        TypeError, ValueError: an argument is wrong; `model` is itself a BatchNorm; a BatchNorm is lazy, or a
            BatchNorm1d of one channel. Nothing is replaced then.
    """
    most = positive_int(num_groups, "num_groups")
    found = batchnorms(model)
    if isinstance(model, _BatchNorm):
        raise ValueError("replace_batchnorm: the model is itself a BatchNorm and cannot be replaced in place")
    norms = {id(module): _group_norm(name, module, most) for name, module in found}
    for module in list(model.modules()):
        for key, child in module._modules.items():
            if id(child) in norms:
                module._modules[key] = norms[id(child)]
    return len(norms)


def correct_batchnorm_momentum(model: nn.Module, accumulation_steps: int) -> int:
    """Slow the running statistics down so that they move per window of K micro-batches as they did per batch.

    A BatchNorm updates `running = (1 - m) running + m batch` in every forward pass: K times per window, after which
    the old value counts `(1 - m)**K` instead of `1 - m`. With

        m' = 1 - (1 - m)**(1 / K)

    it counts `(1 - m')**K = 1 - m`, exactly, and the K micro-batches count m together. Among themselves they count
    `m' (1 - m')**(K - 1 - j)`, j = 0 ... K - 1: nearly equally (for m = 0.1 the first counts 0.9 of what one after the
    last would). Micro-batch means average to the big batch's mean, and unbiased variances to the population's, so for
    independent samples the expected running statistics match the big batch's. The normalization in training itself
    still sees micro-batches.

    Args:
        model: Changed in place; call it once.
        accumulation_steps: K.

    Returns:
        How many modules were changed. Modules with `momentum=None`, which weigh all batches equally, and modules
        without running statistics need no change.
    """
    steps = positive_int(accumulation_steps, "accumulation_steps")
    changed = 0
    for _, module in batchnorms(model):
        if module.momentum is not None and module.track_running_stats:
            module.momentum = 1 - (1 - module.momentum) ** (1 / steps)
            changed += 1
    return changed
