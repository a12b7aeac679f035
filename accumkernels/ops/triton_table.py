"""The tables that Triton kernels read on the device: each block's tensor, and sizes, offsets and addresses.

Sizes, offsets and the block map do not change between calls: they are uploaded once and kept. Addresses, first-touch
flags and the weight travel in one small asynchronous copy per call.

That copy reads a pinned buffer, which is reused afterwards. A CUDA graph would read it again at every replay, when it
holds other values. Even a buffer kept for the graph would be right only if the gradients' addresses never change, with
the weight and the first-touch flags of the capture. So inside a capture the ops raise. Capture the native backend
instead, whose tables travel in the launch itself.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .keep_alive import keep_until_done

# 16 elements per thread of 8 warps of 32: four loads of each operand in flight, of 16 bytes of fp32 and 8 of 16 bit.
BLOCK = 4096
NUM_WARPS = 8

# The dtypes that one launch works on: (gradient,) or (output, input), and whether all its pointers are 16-byte aligned.
Kind = tuple[tuple[torch.dtype, ...], bool]


class LaunchGroup(NamedTuple):
    """The tensors of a list that one launch works on."""

    dtypes: tuple[torch.dtype, ...]
    aligned: bool
    blocks: Tensor  # int32: the list index of each program's tensor
    first_program: int  # the number of programs in earlier groups


class Plan(NamedTuple):
    """The tables that calls with the same sizes, offsets, segments and kinds share."""

    rows: Tensor  # int64 [n, 4]: numel, offset, segment, first program; on the device, as all tables
    groups: list[LaunchGroup]
    num_programs: int
    ready: torch.cuda.Event | None  # the tables have arrived; None on the CPU

    def use(self) -> None:
        """Let the current stream wait for the tables, and keep them, even if evicted, until it has read them."""
        if self.ready is not None:
            torch.cuda.current_stream().wait_event(self.ready)
            keep_until_done([self.rows, *(group.blocks for group in self.groups)])


@functools.lru_cache(maxsize=256)
def plan(
    device: torch.device,
    numels: tuple[int, ...],
    offsets: tuple[int, ...],
    segments: tuple[int, ...],
    kinds: tuple[Kind, ...],
) -> Plan:
    """Group tensors by kind and map programs to them; kept on `device`, for any stream."""
    numel = torch.tensor(numels, dtype=torch.int64, device="cpu")
    num_blocks = (numel + BLOCK - 1) // BLOCK
    first = torch.zeros_like(numel)
    groups = []
    num_programs = 0
    for kind in dict.fromkeys(kinds):
        members = torch.tensor([i for i, other in enumerate(kinds) if other == kind], device="cpu")
        counts = num_blocks[members]
        first[members] = counts.cumsum(0) - counts
        blocks = members.repeat_interleave(counts).int()
        if len(blocks):
            groups.append(LaunchGroup(*kind, _send(blocks, device), num_programs))
        num_programs += len(blocks)
    rows = torch.stack(
        [numel, torch.tensor(offsets, device="cpu").long(), torch.tensor(segments, device="cpu").long(), first], dim=1
    )
    rows = _send(rows, device)
    ready = torch.cuda.current_stream().record_event() if device.type == "cuda" else None
    return Plan(rows, groups, num_programs, ready)


def _send(table: Tensor, device: torch.device) -> Tensor:
    """Copy to the device without waiting: torch reuses a pinned buffer only when the copies from it are done."""
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


def upload(
    device: torch.device,
    addresses: Sequence[int],
    second: Sequence[int] | None = None,
    overwrite: Sequence[bool] | None = None,
    weight: float = 1.0,
) -> Tensor:
    """Send the table of one call: addresses, second addresses, first-touch flags, the bits of the weight."""
    zeros = [0] * len(addresses)
    (bits,) = struct.unpack("<q", struct.pack("<d", weight))
    words = [*addresses, *(second or zeros), *(map(int, overwrite) if overwrite else zeros), bits]
    return _send(torch.tensor(words, dtype=torch.int64, device="cpu"), device)
