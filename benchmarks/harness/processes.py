"""Processes to measure in: each is new, and all share one import."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.multiprocessing as mp


def start(function: Callable[..., None], arguments: tuple[Any, ...], count: int, imports: Sequence[str] = ()) -> None:
    """Run `function(index, *arguments)` in several processes at once, and wait for them.

    They are forked from one that has imported `function`'s module and `imports`, and nothing else: torch and a trainer
    take seconds to import. Where there is a CUDA device each imports for itself, since none can be used after a fork
    once anything has asked for it.

    Raises:
        torch.multiprocessing.ProcessException: One of them failed; with its traceback.
    """
    mp.spawn(_import_and_start, (function, arguments, count, imports))


def _import_and_start(
    _: int, function: Callable[..., None], arguments: tuple[Any, ...], count: int, imports: Sequence[str]
) -> None:
    for name in imports:
        importlib.import_module(name)
    mp.start_processes(function, arguments, count, start_method="spawn" if torch.cuda.is_available() else "fork")
