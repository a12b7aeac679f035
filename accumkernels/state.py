"""An accumulator's state as a dict by parameter name, of tensors and plain numbers: `weights_only=True` loads it.

Names, not offsets: the layout may differ where the dict is loaded, in order, devices or what is frozen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from .ops.schema import State
from .parameters import strip_prefixes
from .store import Store

VERSION = 1


def save(store: Store) -> dict[str, Any]:
    """The window's sums, the masters, and which gradients were not finite; synchronises."""
    masters = {} if store.masters is None else store.masters.values()
    flags = {
        segment.name: tag
        for buffer in store.buffers
        for tag, segment in zip(buffer.flags.tolist(), buffer.segments, strict=True)
        if tag
    }
    return {
        "version": VERSION,
        "shapes": {entry.name: list(entry.param.shape) for entry in store.named},
        "state": store.state().clone(),
        "sums": {segment.name: buffer.views[segment.index].clone() for buffer, segment in store.touched()},
        "masters": {e.name: masters[id(e.param)].detach().clone() for e in store.named if id(e.param) in masters},
        "flags": flags,
    }


def check(store: Store, state: Mapping[str, Any]) -> dict[str, Any]:
    """Check everything before anything is changed.

    Returns:
        The state, its names without what wrappers add.

    Raises:
        RuntimeError: lists names that are missing, unexpected or of another shape; or says what else does not fit.
    """
    wanted = {"version", "shapes", "window", "serial", "state", "sums", "masters", "flags"}
    if not isinstance(state, Mapping) or not wanted <= set(state):
        raise RuntimeError("load_state_dict: this is not the state_dict() of a FusedAccumulator")
    if state["version"] != VERSION:
        raise RuntimeError(f"load_state_dict: format {state['version']}, this version reads {VERSION}")
    renamed = dict(zip(state["shapes"], strip_prefixes(list(state["shapes"])), strict=True))
    checked = dict(state)
    for key in ("shapes", "sums", "masters", "flags"):
        checked[key] = {renamed.get(name, name): value for name, value in state[key].items()}

    ours = {entry.name: tuple(entry.param.shape) for entry in store.named}
    theirs = {name: tuple(shape) for name, shape in checked["shapes"].items()}
    problems = [
        _listed("missing", (name for name in ours if name not in theirs)),
        _listed("unexpected", (name for name in theirs if name not in ours)),
        _listed(
            "of another shape",
            (f"{n} (saved {theirs[n]}, here {ours[n]})" for n in ours if n in theirs and ours[n] != theirs[n]),
        ),
        _listed(
            "frozen here, accumulated when saved", (n for n in checked["sums"] if n in ours and not _placed(store, n))
        ),
    ]
    if store.masters is None:
        if checked["masters"]:
            problems.append("it has masters: build the accumulator with master_weights=True")
    else:
        masters = store.masters.values()
        wanting = [e.name for e in store.named if id(e.param) in masters and e.name not in checked["masters"]]
        problems.append(_listed("without a master", wanting))
    problems = [problem for problem in problems if problem]
    if problems:
        raise RuntimeError("load_state_dict: " + "; ".join(problems))
    return checked


def _listed(what: str, names: Iterable[str]) -> str:
    names = list(names)
    return f"{what}: {', '.join(names)}" if names else ""


def _placed(store: Store, name: str) -> bool:
    return any(segment.name == name for buffer in store.buffers for segment in buffer.segments)


def load(store: Store, state: Mapping[str, Any]) -> None:
    """Put a checked state into an open, empty window."""
    for buffer in store.buffers:
        for segment in buffer.segments:
            saved = state["sums"].get(segment.name)
            if saved is not None:
                buffer.views[segment.index].copy_(saved)
                buffer.touched[segment.index] = True
        tags = [state["flags"].get(segment.name, 0) for segment in buffer.segments]
        buffer.flags.copy_(torch.tensor(tags, dtype=torch.int32))
    if store.states:
        saved_state: Tensor = state["state"]
        store.states[store.device].copy_(saved_state)
        for device, tensor in store.states.items():
            if device != store.device:
                tensor[State.FOUND_INF] = saved_state[State.FOUND_INF].item()
    if store.masters is not None:
        masters = store.masters.values()
        for entry in store.named:
            if id(entry.param) in masters:
                masters[id(entry.param)].copy_(state["masters"][entry.name])
        store.masters.round()
