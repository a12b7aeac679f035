"""The process group of data parallel training: its checks, broadcasts and sums."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..buffers.parameters import NamedParameter, devices_of

_living: weakref.WeakSet[Group] = weakref.WeakSet()
_BROADCAST_BYTES = 32 * 2**20  # tensors are broadcast together up to about this many bytes


class Group:
    """A process group: its collectives, on the caller's values.

    Args:
        group: A `torch.distributed.ProcessGroup`.
        comm_dtype: The dtype in which fp32 sums are sent; "auto": bf16 for bf16 parameters.
        shared: Lists the tensors that every rank takes from rank 0 after each window: a module's buffers.

    Attributes:
        own: Whether this is a group of the library's own, so that the user's collectives may come in between.
    """

    def __init__(
        self, group: Any, comm_dtype: torch.dtype | str = torch.float32, shared: Callable[[], list[Tensor]] = list
    ) -> None:
        self.size: int = torch.distributed.get_world_size(group)
        self.rank: int = torch.distributed.get_rank(group)
        self._group = group
        self.own = False
        self.comm_dtype = comm_dtype
        self._shared = shared
        self._source = torch.distributed.get_global_rank(group, 0)
        _living.add(self)

    def __str__(self) -> str:
        narrow = "" if self.comm_dtype == torch.float32 else f", sums sent in {self.comm_dtype}"
        return f"rank {self.rank} of {self.size}{narrow}"

    def let_go(self) -> None:
        """Forget the process group, which ends its threads if nobody else has it."""
        self._group = None

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
            try:
                alike = self.alike(digest, device) and alike
            except RuntimeError as error:
                backend = torch.distributed.get_backend(self._group)
                raise RuntimeError(
                    f"process_group ({backend}): a tensor on {device} was not reduced: {error}"
                ) from error
        if not alike and (found := difference(self.gather([*description, "no more parameters"]))):
            rank, first, other = found
            raise RuntimeError(f"process_group: rank 0 has {first}, rank {rank} has {other}; all ranks must be alike")

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

    def share(self) -> None:
        """Give all ranks rank 0's values of what they share; collective if there is anything."""
        self.broadcast(self._shared())

    # ---- questions to all ranks

    def alike(self, number: int, device: torch.device | None) -> bool:
        """Whether an integer is the same on all ranks; collective."""
        both = torch.tensor([number, -number], dtype=torch.int64, device=device)
        return self.sum(both, largest=True).sum().item() == 0

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, which are pickled; collective."""
        everyones: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(everyones, value, group=self._group)
        return everyones

    # ---- sums

    def sum(self, tensor: Tensor, largest: bool = False) -> Tensor:
        """Take the sum or the elementwise maximum over all ranks, in place."""
        ops = torch.distributed.ReduceOp
        torch.distributed.all_reduce(tensor, ops.MAX if largest else ops.SUM, group=self._group)
        return tensor

    def send(self, piece: Tensor, dtype: torch.dtype) -> tuple[Tensor, Any]:
        """Begin to sum a range of a flat buffer over all ranks; returns the tensor sent, and the work to wait for."""
        sent = piece.to(dtype)
        return sent, torch.distributed.all_reduce(sent, group=self._group, async_op=True)


def difference(everyones: Sequence[Sequence[Any]]) -> tuple[int, Any, Any] | None:
    """Return the first rank that has other values than rank 0, and the first that differs, of rank 0 and of it."""
    pairs = ((rank, *pair) for rank, theirs in enumerate(everyones) for pair in zip(everyones[0], theirs, strict=False))
    return next((found for found in pairs if found[1] != found[2]), None)


# ---- Process groups of the library's own, besides the user's

# By ranks and their properties: the world at that time, and the group. Held weakly: a group that outlives
# destroy_process_group() would end with the interpreter, and its threads with a crash.
_groups: dict[tuple[Any, ...], tuple[weakref.ref[Any], Callable[[], Any]]] = {}
_MOST = 64  # groups of the same ranks; further users share the last
_users: dict[tuple[Any, ...], weakref.ref[Any]] = {}  # the user of each group, by the same keys


@atexit.register
def _end() -> None:
    """End groups that nobody has ended, while their threads can still be joined.

    An accumulator of the main module outlives the interpreter. Its group would, too, also after the program has called
    destroy_process_group(); a thread of it that then drops the last reference to a tensor ends the process by a crash.
    """
    for _, made in _groups.values():
        group = made()
        if group is not None and group in dist.distributed_c10d._world.pg_map:
            with contextlib.suppress(Exception):  # another rank may be gone
                dist.destroy_process_group(group)
        del group
    for user in list(_living):
        user.let_go()


def own_group(ranks: Sequence[int], like: Any = None, device: torch.device | None = None, user: Any = None) -> Any:
    """Return a group of the library's own of these ranks, made if there is none yet; collective over them.

    Args:
        ranks: Global ranks, this one among them.
        like: A group of the same ranks, whose backend and timeout to use instead of the default's.
        device: A device that `like` communicates from.
        user: Has the group for itself as long as it lives; the ranks' users come in one order. Two users' collectives
            may come in different orders on different ranks: one may have nothing to send in its last backward.

    Returns:
        The group; None if it cannot be made, because the ranks have made different numbers of groups before, from which
        torch makes the names of new ones.
    """
    world = dist.group.WORLD
    backend, timeout = (None, None) if like is None else (dist.get_backend_config(like), _timeout(like, device))
    # Key by the user's group, so that a user who makes a new one after a failure gets a new one here too.
    key: tuple[Any, ...] = (tuple(ranks), backend, timeout, None if like is None else like.group_name)
    if user is not None:
        key = (*key, _free(key, like, device))
        _users[key] = weakref.ref(user)
    if key in _groups and _groups[key][0]() is world:
        find = _groups[key][1]
        made = find()
        if find is _none or (made is not None and made in dist.distributed_c10d._world.pg_map):
            return made
    if len(ranks) == dist.get_world_size():
        group = dist.new_group(backend=backend, timeout=timeout)
    elif like is not None and not Group(like).alike(len(dist.distributed_c10d._world.pg_names), device):
        group = None
    else:  # other ranks do not call this
        group = dist.new_group(list(ranks), backend=backend, timeout=timeout, use_local_synchronization=True)
    if like is not None:
        # A rank that has connected may end before it communicates; others would then fail to connect to it.
        dist.all_reduce(torch.zeros(1, device=device), group=like)
    _groups[key] = (weakref.ref(world), _none if group is None else weakref.ref(group))
    return group


def _free(key: tuple[Any, ...], group: Any, device: torch.device | None) -> int:
    """Find the first number without a living user on any rank: objects do not die at the same time on all of them."""
    slots = [(*key, number) for number in range(_MOST)]
    taken = torch.tensor([p in _users and _users[p]() is not None for p in slots], dtype=torch.uint8, device=device)
    dist.all_reduce(taken, dist.ReduceOp.MAX, group)
    numbers = taken.tolist()
    return numbers.index(0) if 0 in numbers else _MOST - 1


def _none() -> None:
    """Stand in for a group that could not be made."""


def _timeout(group: Any, device: torch.device | None) -> Any:
    options = getattr(group._get_backend(device), "options", None)
    return getattr(options, "_timeout", None)
