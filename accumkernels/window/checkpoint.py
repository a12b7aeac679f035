"""An accumulator's state as a dict of tensors and plain numbers by parameter name; `weights_only=True` loads it.

Entries have names, not offsets: the layout where the dict is loaded may differ in order, devices or frozen parameters.
For DTensors, sums and masters are DTensors, and all ranks always have the same keys and plain values, because
`torch.distributed.checkpoint` fills in a dict of the same keys and keeps one rank's plain values. The same holds where
data parallel ranks sum their buffers for the dict. Any other state belongs to one rank, which it names.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..buffers.flat import FlatBuffer, Segment
from ..buffers.parameters import is_dtensor, local, shaped_like, strip_prefixes
from ..buffers.store import Store
from ..ops.schema import State
from ..ranks.base import Ranks
from .state import Window

VERSION = 3  # 2 has the number of ranks as "world_size" of a state of all ranks, too
ALL_RANKS = -1  # as "rank": the state covers all ranks together

# The type of each entry of a state dict, or the types of the entries inside it.
_NUMBER = (int, float)
_FORM: dict[str, Any] = {
    "version": int,
    "shapes": Mapping,
    "rank": int,
    "world_size": int,
    "window": {"number": int, "micro_batches": int, "host_weight": _NUMBER, "decided_on_device": bool,
               "averaged": bool, "dropped": bool},
    "serial": int,
    "loss": list,
    "state": Tensor,
    "touched": list,
    "sums": Mapping,
    "masters": Mapping,
    "flags": list,
    "step_was_skipped": bool,
    "last_norm": (*_NUMBER, type(None)),
    "noise_scale": {"on": bool, "measuring": bool, "averages": (list, type(None)), "squares": (list, type(None))},
}  # fmt: skip


def saved_by_dcp() -> bool:
    """Whether `torch.distributed.checkpoint` calls, to save what it then takes from one rank."""
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict_saver":
            return True
        frame = frame.f_back
    return False


def save(store: Store, ranks: Ranks, window: Window, serial: int, *, reduced: bool, sums: bool) -> dict[str, Any]:
    """Save the window, its sums, the masters, and which gradients were not finite; synchronises.

    Args:
        store: Holds the sums.
        ranks: Sum their buffers.
        window: The open window.
        serial: Number of micro-batches ever accumulated.
        reduced: Whether the state covers all ranks; for DTensors it always does. Saving is collective then.
        sums: Whether to copy the window's sums.

    Raises:
        RuntimeError: the state should cover all ranks, but they accumulate different parameters.
    """
    masters = {} if store.masters is None else store.masters.values()
    of_all = reduced or store.sharded
    state, flags, of_window = store.state().clone(), [b.flags.clone() for b in store.buffers], window.state_dict()
    loss = window.loss.sums()
    losses = torch.zeros_like(state[:2]) if loss is None else loss
    touched = [buffer.touched if sums else bytearray(len(buffer.touched)) for buffer in store.buffers]
    tensors = [buffer.tensor for buffer in store.buffers]

    if of_all:
        placed = sum(len(buffer.segments) for buffer in store.buffers)
        counts = of_window["micro_batches"], of_window["dropped"], serial
        done, dropped, serial, most, fewest = ranks.largest([*counts, placed, -placed], store.layout.device)
        if -fewest != most:
            raise RuntimeError(
                f"parameters were unfrozen on some ranks only: by rank, from {-fewest} to {most} are accumulated"
            )
        flags = [ranks.joined(tags, largest=True) for tags in flags]
        of_window |= {"micro_batches": done, "dropped": bool(dropped)}
    if of_all and not of_window["averaged"]:
        state, losses = ranks.joined(state), ranks.joined(losses)
        both = [State.FOUND_INF, State.POISONED]
        state[both] = (state[both] > 0).double()
        of_window |= {"host_weight": state[State.WEIGHT].item(), "decided_on_device": False}
    if of_all and ranks.reduces_sums and not of_window["averaged"]:
        tensors, touched = _joined(store, ranks)

    rows = [
        (buffer, segment, tensor, is_touched[segment.index])
        for buffer, tensor, is_touched in zip(store.buffers, tensors, touched, strict=True)
        for segment in buffer.segments
    ]
    return {
        "version": VERSION,
        "shapes": {entry.name: list(entry.param.shape) for entry in store.named},
        "rank": ALL_RANKS if of_all else ranks.rank,
        "stage": ranks.stage,
        "world_size": ranks.averaged_over if of_all else ranks.size,
        "window": of_window,
        "serial": serial,
        "loss": losses.tolist(),
        "state": state,
        "touched": [segment.name for _, segment, _, is_touched in rows if is_touched],
        "sums": {row[1].name: _sum(*row) for row in rows if row[-1] or (of_all and row[1].param.requires_grad)},
        "masters": {e.name: masters[id(e.param)].detach().clone() for e in store.named if id(e.param) in masters},
        "flags": [
            [s.name, tag]
            for buffer, tags in zip(store.buffers, flags, strict=True)
            for tag, s in zip(tags.tolist(), buffer.segments, strict=True)
            if tag
        ],
    }


def without_window(state: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what a state has of an open window: it then is as if saved before that began, with the same masters."""
    empty = {"micro_batches": 0, "host_weight": 0.0, "decided_on_device": False, "averaged": False, "dropped": False}
    return {
        **state,
        "window": {**state["window"], **empty},
        "loss": [0.0, 0.0],
        "state": torch.zeros_like(state["state"]),
        "touched": [],
        "sums": {},
        "flags": [],
        "noise_scale": {**state["noise_scale"], "measuring": False, "squares": None},
    }


def _joined(store: Store, ranks: Ranks) -> tuple[list[Tensor], list[bytearray]]:
    """Copy the flat buffers, summed over ranks, and what any rank has touched."""
    tensors, touched = [], []
    for buffer in store.buffers:
        tensor = torch.zeros(buffer.numel, dtype=buffer.dtype, device=buffer.device)
        for segment in buffer.touched_segments():
            range_ = slice(segment.offset, segment.offset + segment.numel)
            tensor[range_] = buffer.tensor[range_]
        tensors.append(ranks.joined(tensor))
        counts = torch.tensor(list(buffer.touched), dtype=torch.int64, device=buffer.device)
        touched.append(bytearray(ranks.joined(counts, largest=True).tolist()))
    return tensors, touched


def _sum(buffer: FlatBuffer, segment: Segment, tensor: Tensor, touched: int) -> Tensor:
    if touched:
        part = tensor.as_strided(segment.shape, segment.stride, segment.offset).clone()
    else:
        part = torch.zeros(segment.shape, dtype=buffer.dtype, device=buffer.device)
    return shaped_like(part, segment.param)


def check(store: Store, ranks: Ranks, state: Mapping[str, Any]) -> dict[str, Any]:
    """Check everything before anything changes.

    Returns:
        The state, under names without wrappers' prefixes.

    Raises:
        RuntimeError: lists names that are missing, unexpected or of another shape, or says what else does not fit.
    """
    version = state.get("version")
    if isinstance(version, int) and version not in (2, VERSION):
        raise RuntimeError(f"load_state_dict: format {version}, this version reads {VERSION} (AK34)")
    fault = _fault(state, _FORM, "")
    if fault is None and tuple(state["state"].shape) != (len(State),):
        fault = f"'state' has shape {tuple(state['state'].shape)}"
    if fault is not None:
        raise RuntimeError(f"load_state_dict: this is not the state_dict() of a FusedAccumulator: {fault} (AK34)")
    renamed = dict(zip(state["shapes"], strip_prefixes(list(state["shapes"])), strict=True))
    checked = dict(state)
    if version == 2 and state["rank"] == ALL_RANKS:  # and was saved by ranks of this kind
        checked["world_size"] = ranks.averaged_over * (state["world_size"] / ranks.size if store.sharded else 1)
    for key in ("shapes", "sums", "masters"):
        checked[key] = {renamed.get(name, name): value for name, value in state[key].items()}
    checked["flags"] = {renamed.get(name, name): tag for name, tag in state["flags"]}
    touched = {renamed.get(name, name) for name in state["touched"]}
    checked["sums"] = {name: tensor for name, tensor in checked["sums"].items() if name in touched}

    params = {entry.name: entry.param for entry in store.named}
    ours = {name: tuple(param.shape) for name, param in params.items()}
    placed = {segment.name for buffer in store.buffers for segment in buffer.segments}
    theirs = {name: tuple(shape) for name, shape in checked["shapes"].items()}
    problems = [
        _listed("missing", (name for name in ours if name not in theirs)),
        _listed("unexpected", (name for name in theirs if name not in ours)),
        _listed(
            "of another shape",
            (f"{n} (saved {theirs[n]}, here {ours[n]})" for n in ours if n in theirs and ours[n] != theirs[n]),
        ),
        _listed("sums of unknown names", (n for n in sorted(touched) if n not in theirs or n not in checked["sums"])),
        *(
            _listed(
                f"{key} of another shape",
                (n for n, t in checked[key].items() if n in ours and tuple(getattr(t, "shape", ())) != ours[n]),
            )
            for key in ("sums", "masters")
        ),
        _listed("frozen here, accumulated when saved", (n for n in checked["sums"] if n in ours and n not in placed)),
    ]
    if store.masters is None:
        if checked["masters"]:
            problems.append("it has masters: build the accumulator with master_weights=True")
    else:
        masters = store.masters.values()
        trained = [e for e in store.named if id(e.param) in masters and e.param.requires_grad]
        wanting = [e.name for e in trained if e.name not in checked["masters"]]
        what = "without a master, frozen or fp32 when saved (to take the model's values, freeze them while you load)"
        problems.append(_listed(what, wanting))
    for key in ("sums", "masters"):
        tensors = checked[key].items()
        problems.append(
            _listed(
                f"{key} that are sharded differently (load them with torch.distributed.checkpoint)",
                (name for name, tensor in tensors if name in params and not _cut_alike(tensor, params[name])),
            )
        )
    problems.append(_of_other_ranks(store, ranks, checked))
    problems = [problem for problem in problems if problem]
    if problems:
        raise RuntimeError("load_state_dict: " + "; ".join(problems) + " (AK34)")
    return checked


def _of_other_ranks(store: Store, ranks: Ranks, state: Mapping[str, Any]) -> str:
    """Say why this rank cannot load its part of the window from the state; empty where it can."""
    stage = state.get("stage", 0)
    if stage != ranks.stage:
        return f"saved by rank {stage} of a pipeline, and this is rank {ranks.stage}: each stage loads its own state"
    done = state["window"]["micro_batches"]
    if not done or state["window"]["averaged"]:
        return ""
    ours = {entry.name: entry.param for entry in store.named}
    coordinates = [
        (sum_.device_mesh.get_coordinate(), ours[name].device_mesh.get_coordinate())  # type: ignore[attr-defined]
        for name, sum_ in state["sums"].items()
        if is_dtensor(sum_) and name in ours and is_dtensor(ours[name])
    ]
    saved_by = next((f"the rank at {theirs} of the mesh" for theirs, here in coordinates if theirs != here), None)
    if state["rank"] != ALL_RANKS:
        if state["world_size"] != ranks.size:
            return (
                f"saved after {done} micro-batches of a window that {state['world_size']} ranks shared, here are "
                f"{ranks.size}: resume it with as many ranks as then, or from state_dict(reduced=True), or from a "
                "state saved between windows"
            )
        if state["rank"] != ranks.rank:
            saved_by = f"rank {state['rank']}"
    if saved_by is None:
        return ""
    return (
        f"saved by {saved_by} after {done} micro-batches of a window, and this is rank {ranks.rank}: inside a window "
        "each rank loads the file that it saved; for one file for all, save state_dict(reduced=True) or between windows"
    )


def share(ranks: Ranks, state: Mapping[str, Any]) -> dict[str, Any]:
    """Compute this rank's share of a checked state; the shares of all ranks sum to the window."""
    if state["rank"] != ALL_RANKS or state["window"]["averaged"]:
        return dict(state)
    factor = ranks.portion(state["world_size"])
    if factor == 1:
        return dict(state)
    if factor != 0:
        window, counts = state["window"], state["state"].clone()
        counts[State.WEIGHT] *= factor
        return {
            **state,
            "sums": {name: sum_ * factor for name, sum_ in state["sums"].items()},
            "state": counts,
            "loss": [sum_ * factor for sum_ in state["loss"]],
            "window": {**window, "host_weight": window["host_weight"] * factor},
            "noise_scale": {**state["noise_scale"], "measuring": False},
        }
    squares = state["noise_scale"]["squares"]
    return {
        **state,
        "touched": [],
        "sums": {},
        "state": torch.zeros_like(state["state"]),
        "loss": [0.0, 0.0],
        "window": {**state["window"], "host_weight": 0.0},
        "noise_scale": {**state["noise_scale"], "squares": squares and [[0.0] * len(row) for row in squares]},
    }


def _fault(found: Any, form: Any, path: str) -> str | None:
    """Say where `found` differs from `form`; None where it does not."""
    if not isinstance(form, dict):
        kinds = form if isinstance(form, tuple) else (form,)
        return None if isinstance(found, kinds) else f"{path} is {type(found).__name__}"
    if not isinstance(found, Mapping):
        return f"{path or 'it'} is {type(found).__name__}"
    for key, part in form.items():
        if key not in found:
            return f"{path}[{key!r}] is missing"
        fault = _fault(found[key], part, f"{path}[{key!r}]")
        if fault is not None:
            return fault
    return None


def _listed(what: str, names: Iterable[str]) -> str:
    names = list(names)
    return f"{what}: {', '.join(names)}" if names else ""


def _cut_alike(saved: Any, param: Any) -> bool:
    if not (is_dtensor(saved) and is_dtensor(param)):
        return is_dtensor(saved) == is_dtensor(param)
    return saved.placements == param.placements and saved.device_mesh == param.device_mesh


def load(store: Store, state: Mapping[str, Any]) -> None:
    """Load a checked state into an open, empty window."""
    for buffer in store.buffers:
        for segment in buffer.segments:
            saved = state["sums"].get(segment.name)
            if saved is not None:
                buffer.views[segment.index].copy_(local(saved))
                buffer.touch(segment.index)
        tags = [state["flags"].get(segment.name, 0) for segment in buffer.segments]
        buffer.flags.copy_(torch.tensor(tags, dtype=torch.int32))
    saved_state: Tensor = state["state"]
    store.states[store.layout.device].copy_(saved_state)
    for device, tensor in store.states.items():
        if device != store.layout.device:
            tensor[State.FOUND_INF] = saved_state[State.FOUND_INF].item()
    if store.masters is not None:
        store.masters.refresh()  # a state leaves out those that have no more bits than their parameters
        for entry in store.named:
            store.masters.load(entry.param, state["masters"].get(entry.name))
        store.masters.round()
