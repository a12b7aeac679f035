"""Which parameters to accumulate, their names, devices and local shards."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from .. import devices
from ..errors import expect, wrong_type

# ---- Device scalars on several devices: moving them, and the worst of them


def move(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Copy to another device without waiting, except to the CPU, where the host would read the copy too early."""
    return tensor.to(device=device, dtype=dtype, non_blocking=device.type != "cpu")


def worst(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """The elementwise maximum of tensors of one shape on any devices, as a copy on `device`."""
    return torch.stack([move(tensor, device) for tensor in tensors]).amax(0)


# ---- DTensors and their local shards


def is_dtensor(tensor: object) -> bool:
    """Whether this is a `torch.distributed.tensor.DTensor`."""
    module = sys.modules.get("torch.distributed.tensor")  # the import takes a second, and before it no DTensor exists
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """The local shard of a DTensor, the tensor that it holds itself; any other tensor unchanged."""
    # to_local() would return a new tensor.
    return tensor._local_tensor if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def whole(tensor: Any) -> Tensor | None:
    """A tensor's value as a plain tensor; None if it is a DTensor of which this rank does not hold all."""
    if not is_dtensor(tensor):
        return tensor
    return tensor.detach().to_local() if all(p.is_replicate() for p in tensor.placements) else None


def is_offloaded(tensor: Any) -> bool:
    """Whether this is a DTensor whose shard is on the host while its mesh is not, as by FSDP2's CPUOffloadPolicy."""
    return is_dtensor(tensor) and tensor._local_tensor.device.type != tensor.device_mesh.device_type


def local_grad(param: Tensor) -> Tensor | None:
    """The local shard of `param.grad`, placed on the mesh as the parameter is.

    FSDP2's gradients already are. Gradients of other DTensors may have to be reduced or sharded first, a collective
    call.
    """
    grad: Any = param.grad
    if grad is None or not is_dtensor(param):
        return grad
    like: Any = param
    if grad.placements != like.placements:
        grad = grad.redistribute(like.device_mesh, like.placements)
    return local(grad)


def shaped_like(part: Tensor, param: Any) -> Tensor:
    """`part`, a local shard, as a DTensor on the mesh of `param`; `part` itself if `param` is not a DTensor.

    It stays where it is, as FSDP2's own gradients do: `DTensor.from_local` would move it to the mesh's kind of device,
    from which CPUOffloadPolicy keeps it.
    """
    if not is_dtensor(param):
        return part
    spec = copy.copy(param._spec)
    spec.tensor_meta = spec.tensor_meta._replace(dtype=part.dtype)
    return sys.modules["torch.distributed.tensor"].DTensor(part, spec, requires_grad=False)


# ---- Turns what a user passes as the parameters into a list of named, checked leaf tensors

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class NamedParameter:
    """A parameter, its name, and the places of the module tree where it must still be found."""

    name: str
    param: Tensor
    owners: list[tuple[dict[str, Any], str]] = field(default_factory=list, repr=False)

    def obstacle(self) -> str | None:
        """Say in words why no gradient of this parameter can be accumulated; None if one can."""
        p = self.param
        if p.layout is not torch.strided:
            return f"{self.name!r} has layout {p.layout}; only dense parameters can be accumulated"
        if p.dtype not in FLOAT_DTYPES:
            real = "; keep a real parameter and call torch.view_as_complex on it in forward" if p.is_complex() else ""
            accepted = "float16, bfloat16, float32, float64"
            return f"{self.name!r} is {p.dtype}; gradients are accumulated for {accepted} only{real}"
        if p.is_meta:
            return f"{self.name!r} is on the meta device; materialize the model first"
        cause = devices.obstacle(p.device)
        return None if cause is None else f"{self.name!r} cannot be trained here: {cause}"

    def check_identity(self) -> str | None:
        """Say in words that the module tree holds another tensor in this parameter's place; None if it does not.

        What is frozen may be replaced by what is frozen: offloading does that in every forward.
        """
        for owner, key in self.owners:
            found = owner.get(key)
            if found is self.param or _unsharded(found, self.param):
                continue
            if not self.param.requires_grad and (found is None or not found.requires_grad):
                continue
            renamed = next((other for other, p in owner.items() if p is self.param), None)
            if renamed is not None:
                return f"{self.name!r} was renamed to {renamed!r} since construction"
            return f"{self.name!r} was replaced by another tensor since construction (AK06)"
        return None


def _unsharded(found: Any, param: Any) -> bool:
    """Whether `found` may be the tensor by which FSDP2 replaces `param` from a forward to its backward, or longer."""
    return is_dtensor(param) and not (is_dtensor(found) and found.device_mesh == param.device_mesh)


def strip_prefixes(names: list[str]) -> list[str]:
    """Parameter names without the prefixes of torch.compile, Lightning Fabric and DistributedDataParallel.

    `_orig_mod.` is removed anywhere, `_forward_module.` and `module.` only if all names begin with them, since a
    submodule may have that name.
    """
    names = [".".join(part for part in name.split(".") if part != "_orig_mod") for name in names]
    for prefix in ("_forward_module.", "module."):
        if all(name.startswith(prefix) for name in names):
            names = [name.removeprefix(prefix) for name in names]
    return names


def _from_module(module: nn.Module) -> list[NamedParameter]:
    named = {id(p): NamedParameter(name, p) for name, p in module.named_parameters()}
    for submodule in module.modules():
        if not isinstance(submodule._parameters, dict):  # TorchScript keeps them in C++, where nobody sees one replaced
            continue
        for key, p in submodule._parameters.items():
            if p is not None:
                named[id(p)].owners.append((submodule._parameters, key))
    return list(named.values())


def check_group(group: Any, index: int) -> None:
    """Refuse what torch.optim would not accept as a param group.

    Raises:
        TypeError, ValueError: Says which group it is.
    """
    if "params" not in expect(group, dict, f"params: group {index}", "a dict"):
        raise ValueError(f"params: group {index} has no 'params' key")


def _from_items(items: Iterable[Any], prefix: str = "") -> list[NamedParameter]:
    named: list[NamedParameter] = []
    for i, item in enumerate(items):
        if isinstance(item, dict):
            check_group(item, i)
            group = item["params"]
            named += _from_items([group] if isinstance(group, Tensor) else group, f"group{i}.")
        elif isinstance(item, Tensor):
            named.append(NamedParameter(f"{prefix}param{i}", item))
        elif isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str) and isinstance(item[1], Tensor):
            named.append(NamedParameter(item[0], item[1]))
        else:
            raise wrong_type(f"params: item {i}", "a Parameter, a (name, Parameter) pair or a group (dict)", item)
    return named


def _refuse_sharded(name: str, param: Tensor) -> None:
    """Refuse a parameter that FSDP1 or DeepSpeed ZeRO-3 has sharded."""
    if getattr(param, "_is_flat_param", False) or getattr(param, "_fsdp_flattened", False):
        raise ValueError(f"params: {name!r} is sharded by FullyShardedDataParallel (FSDP1); use fully_shard (FSDP2)")
    if hasattr(param, "ds_id"):
        raise ValueError(f"params: {name!r} is sharded by DeepSpeed ZeRO-3, which reduces gradients itself")


def named_parameters(params: Any) -> list[NamedParameter]:
    """List the parameters that a FusedAccumulator should accumulate.

    Args:
        params: A module, or an iterable of parameters, of (name, parameter) pairs, or of param groups as
            torch.optim takes them.

    Raises:
        TypeError: `params`, or one of its items, is of another type.
        ValueError: There are no parameters, one appears twice, two share a name, or one cannot be accumulated (not a
            leaf; lazy; or trainable and not fp16, bf16, fp32 or fp64, on the meta device or sparse).
    """
    if isinstance(params, nn.Module):
        named = _from_module(params)
    elif isinstance(params, Tensor) or not isinstance(params, Iterable):
        raise wrong_type("params", "a module or an iterable of parameters", params)
    else:
        named = _from_items(params)
    if not named:
        raise ValueError("params: there are no parameters to accumulate (AK01)")
    stripped = strip_prefixes([entry.name for entry in named])
    named = [replace(entry, name=name) for entry, name in zip(named, stripped, strict=True)]

    seen: dict[int, str] = {}
    names: set[str] = set()
    for entry in named:
        name, p = entry.name, entry.param
        if id(p) in seen:
            raise ValueError(f"params: {name!r} and {seen[id(p)]!r} are the same parameter, given twice")
        if name in names:
            raise ValueError(f"params: two parameters are called {name!r}")
        _refuse_sharded(name, p)
        seen[id(p)] = name
        names.add(name)
        if nn.parameter.is_lazy(p):
            raise ValueError(f"params: {name!r} is lazy and has no shape yet; run the model once first")
        if p.requires_grad and (obstacle := entry.obstacle()) is not None:
            raise ValueError(f"params: {obstacle}")
        if not p.is_leaf:
            raise ValueError(f"params: {name!r} is not a leaf tensor; only leaves receive a .grad")
    return named


def devices_of(named: Sequence[NamedParameter]) -> list[torch.device]:
    """List the devices of trainable parameters; with all frozen, that of the first which has memory, or the CPU."""
    trainable = dict.fromkeys(entry.param.device for entry in named if entry.param.requires_grad)
    with_memory = (entry.param.device for entry in named if not entry.param.is_meta)
    return list(trainable) or [next(with_memory, torch.device("cpu"))]
