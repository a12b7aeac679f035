"""Processes to measure in, which return what they measured; ranks share one import."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import pickle
import socket
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.multiprocessing as mp

_T = TypeVar("_T")


def in_new_process(function: Callable[..., _T], *arguments: object) -> _T:
    """Return what a function does in a new process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(function, *arguments).result()


def start(
    function: Callable[..., object], arguments: tuple[Any, ...], count: int, imports: Sequence[str] = ()
) -> list[Any]:
    """Run `function(index, *arguments)` in several processes at once, and return what each has returned.

    They are forked from one that has imported `function`'s module and `imports`, and nothing else: torch and a trainer
    take seconds to import. Where there is a CUDA device each imports for itself, since none can be used after a fork
    once anything has asked for it.

    Raises:
        torch.multiprocessing.ProcessException: One of them failed; with its traceback.
    """
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_import_and_start, ((function, arguments, folder), count, imports))
        return [pickle.loads(Path(folder, str(index)).read_bytes()) for index in range(count)]


def _import_and_start(_: int, work: tuple[Any, ...], count: int, imports: Sequence[str]) -> None:
    for name in imports:
        importlib.import_module(name)
    mp.start_processes(_run, work, count, start_method="spawn" if torch.cuda.is_available() else "fork")


def _run(index: int, function: Callable[..., object], arguments: tuple[Any, ...], folder: str) -> None:
    Path(folder, str(index)).write_bytes(pickle.dumps(function(index, *arguments)))


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nobody listens on."""
    with contextlib.ExitStack() as sockets:
        found = [sockets.enter_context(socket.socket()) for _ in range(count)]
        for free in found:
            free.bind(("127.0.0.1", 0))
        return [free.getsockname()[1] for free in found]
