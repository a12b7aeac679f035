"""The process group of data parallel training: its checks, broadcasts and sums."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..buffers.parameters import NamedParameter, devices_of
from .own_group import own_group

_BROADCAST_BYTES = 32 * 2**20  # tensors are broadcast together up to about this many bytes


class Group:
    """The process group of an accumulator: its collectives, on the caller's values.

    Args:
        group: A `torch.distributed.ProcessGroup`.
        comm_dtype: The dtype in which fp32 sums are sent; "auto": bf16 for bf16 parameters.
        shared: Lists the tensors that every rank takes from rank 0 after each window: a module's buffers.

    Attributes:
        own: Whether this is a group of the library's own, so that the user's collectives may come in between.
    """

    def __init__(self, group: Any, comm_dtype: torch.dtype | str, shared: Callable[[], list[Tensor]]) -> None:
        self.size: int = torch.distributed.get_world_size(group)
        self.rank: int = torch.distributed.get_rank(group)
        self._group = group
        self.own = False
        self.comm_dtype = comm_dtype
        self._shared = shared
        self._source = torch.distributed.get_global_rank(group, 0)

    def __str__(self) -> str:
        narrow = "" if self.comm_dtype == torch.float32 else f", sums sent in {self.comm_dtype}"
        return f"rank {self.rank} of {self.size}{narrow}"

    # ---- at construction

    def check_alike(self, named: Sequence[NamedParameter], **options: object) -> None:
        """Check that all ranks build the same accumulator, and train on devices that the group supports; collective.

        Args:
            named: The parameters.
            **options: Arguments that decide what is communicated, and when.

        Raises:
            RuntimeError: on all ranks, with the first difference; or the group cannot reduce tensors of a device.
        """
        description = [f"{key}={value!r}" for key, value in {**options, "comm_dtype": self.comm_dtype}.items()]
        description += [
            f"{e.name!r} {tuple(e.param.shape)} {e.param.dtype}{'' if e.param.requires_grad else ' frozen'}"
            for e in named
        ]
        digest = int.from_bytes(hashlib.blake2b("\n".join(description).encode(), digest_size=7).digest(), "big")
        alike = True
        for device in devices_of(named):
            both = torch.tensor([digest, -digest], dtype=torch.int64, device=device)
            try:
                torch.distributed.all_reduce(both, torch.distributed.ReduceOp.MAX, group=self._group)
            except RuntimeError as error:
                backend = torch.distributed.get_backend(self._group)
                raise RuntimeError(
                    f"process_group ({backend}): a tensor on {device} was not reduced: {error}"
                ) from error
            largest, smallest = both.tolist()
            alike = alike and largest == -smallest
        if alike:
            return
        everyones: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(everyones, [*description, "no more parameters"], group=self._group)
        for rank, theirs in enumerate(everyones):
            for a, b in zip(everyones[0], theirs, strict=False):
                if a != b:
                    raise RuntimeError(f"process_group: rank 0 has {a}, rank {rank} has {b}; all ranks must be alike")

    def separate(self, device: torch.device) -> None:
        """Switch to a group of the library's own, which supports tensors on `device` too; collective."""
        group = own_group(torch.distributed.get_process_group_ranks(self._group), self._group, device, self)
        if group is not None:
            self._group, self.own = group, True

    def broadcast_parameters(self, named: Sequence[NamedParameter]) -> None:
        """Copy rank 0's parameters, frozen ones too, into those of all ranks; collective.

        What is sparse, on the meta device, or where nothing is trained, which the group may not reach, stays as it is.
        """
        devices = devices_of(named)
        params = (entry.param for entry in named)
        self.broadcast(p for p in params if p.layout is torch.strided and p.device in devices)

    @torch.no_grad()
    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Copy rank 0's values into the tensors of all ranks; collective."""
        batches: dict[tuple[torch.device, torch.dtype], list[list[Tensor]]] = {}
        for tensor in tensors:
            of_kind = batches.setdefault((tensor.device, tensor.dtype), [[]])
            if sum(t.nbytes for t in of_kind[-1]) >= _BROADCAST_BYTES:
                of_kind.append([])
            of_kind[-1].append(tensor.detach())
        for batch in (batch for of_kind in batches.values() for batch in of_kind):
            flat = torch.cat([tensor.reshape(-1) for tensor in batch])
            if flat.numel():  # send bytes: gloo does not know every dtype
                torch.distributed.broadcast(flat.view(torch.uint8), self._source, group=self._group)
            if self.rank != 0:
                for tensor, part in zip(batch, flat.split([t.numel() for t in batch]), strict=True):
                    tensor.copy_(part.view(tensor.shape))

    def share_from(self, shared: Callable[[], list[Tensor]]) -> None:
        """Share other tensors than those that the group was made with."""
        self._shared = shared

    def share(self) -> None:
        """Give all ranks rank 0's module buffers; collective if there are any."""
        self.broadcast(self._shared())

    # ---- sums

    def sum(self, vector: Tensor, largest: bool = False) -> None:
        """Take the sum or maximum over all ranks, in place."""
        ops = torch.distributed.ReduceOp
        torch.distributed.all_reduce(vector, ops.MAX if largest else ops.SUM, group=self._group)

    def send(self, piece: Tensor, dtype: torch.dtype) -> tuple[Tensor, Any]:
        """Begin to sum a range of a flat buffer over all ranks; returns the tensor sent, and the work to wait for."""
        sent = piece.to(dtype)
        return sent, torch.distributed.all_reduce(sent, group=self._group, async_op=True)
