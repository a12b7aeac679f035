"""What sums in host memory cannot be combined with, and whether there is memory for them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..buffers.flat import buffer_dtype
from ..buffers.parameters import NamedParameter, is_dtensor

_POLICY = "its CPUOffloadPolicy keeps shards, their gradients and the optimizer's state in host memory"
_CGROUPS = Path("/sys/fs/cgroup")


def check_parameters(named: Sequence[NamedParameter], group: object, is_stage: bool) -> None:
    """Refuse parameters and ranks that sums in host memory are not for.

    Args:
        named: All parameters.
        group: The process group of the sums; None: this process is alone.
        is_stage: Whether they belong to a stage of a pipeline.

    Raises:
        ValueError: says why, and what to do instead.
    """
    if any(is_dtensor(entry.param) for entry in named):
        raise ValueError(f"cpu_offload=True with FSDP2: {_POLICY}; leave cpu_offload out, and shard with that policy")
    if is_stage:
        raise ValueError(
            "cpu_offload=True with the stages of a pipeline: their schedules end a window together, and none waits for "
            "gradients on their way to host memory; leave cpu_offload out, or split the model over more stages"
        )
    if group is not None:
        raise ValueError(
            "cpu_offload=True with a process group (or DistributedDataParallel): sums are reduced over ranks where "
            f"they are, and in host memory that would be slow. Leave cpu_offload out and use FSDP2: {_POLICY}"
        )
    trainable = [entry.param for entry in named if entry.param.requires_grad] or [entry.param for entry in named]
    if all(param.device.type == "cpu" for param in trainable):
        raise ValueError(
            "cpu_offload=True with a model on the CPU, whose sums and optimizer state are in host memory anyway: move "
            "the model to its device before, or pass master_weights=True for fp32 masters alone"
        )


def host_bytes(params: Sequence[torch.Tensor]) -> int:
    """Bytes of host memory that sums, masters and slots of parameters take, without the optimizer's state."""
    wide = {p: buffer_dtype(p.dtype).itemsize for p in params}
    return sum(p.numel() * (2 * wide[p] + p.dtype.itemsize) for p in params)


def check_memory(params: Sequence[torch.Tensor]) -> None:
    """Refuse what would fill the machine's memory, before the system ends a process for it.

    Raises:
        RuntimeError: has the bytes needed and available.
    """
    needed, available = host_bytes(params), available_bytes()
    if available is not None and needed > available:
        count = sum(p.numel() for p in params)
        raise RuntimeError(
            f"cpu_offload=True: sums, masters and slots of {count:,} trainable parameters take "
            f"{needed / 2**30:,.1f} GiB of host memory ({needed:,} bytes), and the optimizer's state comes on top; "
            f"{available / 2**30:,.1f} GiB are available ({available:,} bytes). Train fewer parameters (freeze layers, "
            "LoRA), add memory, or close what else uses it"
        )


def available_bytes() -> int | None:
    """Bytes of host memory that this process may still take; None if nothing says so."""
    found = [_free_of_machine(), _free_of_group()]
    return min((number for number in found if number is not None), default=None)


def _free_of_machine() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        names: Any = os.sysconf_names if hasattr(os, "sysconf_names") else {}
        if "SC_AVPHYS_PAGES" not in names:
            return None
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def _free_of_group() -> int | None:
    """What a container's limit leaves (cgroups v2); its page cache can be freed."""
    try:
        limit, used = (int((_CGROUPS / name).read_text()) for name in ("memory.max", "memory.current"))
        cached = (_CGROUPS / "memory.stat").read_text().split()
        return limit - used + int(cached[cached.index("inactive_file") + 1])
    except (OSError, ValueError):  # the first number is "max" where there is no limit
        return None
