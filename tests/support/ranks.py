"""Runs scenarios on several gloo ranks: many in one start, all forked from a process that has imported torch."""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import pickle
import socket
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

import accumkernels.ranks.sender

Scenario = Callable[[int, int], Any]
shared = Path()  # a folder that scenarios may use, also from one run to the next
CHUNK_BYTES = 512  # small, so that buffers of small models have many chunks, and segments lie in several


def _rank(rank: int, size: int, port: int, folder: str, scenarios: Sequence[Scenario]) -> None:
    global shared
    shared = Path(folder)
    torch.set_num_threads(1)
    accumkernels.ranks.sender.CHUNK_BYTES = CHUNK_BYTES
    torch.distributed.init_process_group(
        "gloo", f"tcp://127.0.0.1:{port}", timedelta(seconds=60), world_size=size, rank=rank
    )
    found = {}
    for scenario in scenarios:
        try:
            found[scenario.__name__] = scenario(rank, size)
        except (Exception, pytest.fail.Exception):  # that of pytest.raises is no Exception
            found[scenario.__name__] = traceback.format_exc()
        Path(folder, f"{size}.{rank}").write_bytes(pickle.dumps(found))  # now: the next one may end this process
        if isinstance(found[scenario.__name__], str):
            break  # the others wait for this rank, or are ahead of it: nothing after is worth anything
    torch.distributed.destroy_process_group()


def _start(_: int, size: int, port: int, folder: str, scenarios: Sequence[Scenario], modules: Sequence[str]) -> None:
    torch.set_num_threads(1)
    for module in modules:
        importlib.import_module(module)
    gc.freeze()  # trainers and torch collect often, and need not look at all modules each time
    mp.start_processes(_rank, (size, port, folder, scenarios), nprocs=size, start_method="fork")


def run(size: int, folder: Path, scenarios: Sequence[Scenario], modules: Sequence[str] = ()) -> dict[str, list[Any]]:
    """What each scenario returned, by rank; the traceback where it raised.

    Args:
        size: How many ranks.
        folder: For what they find; `ranks.shared` for scenarios.
        scenarios: Functions of a module, called with rank and size, in this order.
        modules: What takes seconds to import, to be imported once for all ranks.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_start, (size, port, str(folder), list(scenarios), list(modules)))
    files = [folder / f"{size}.{rank}" for rank in range(size)]
    by_rank = [pickle.loads(file.read_bytes()) for file in files]
    return {s.__name__: [found.get(s.__name__, "not reached") for found in by_rank] for s in scenarios}


def check(found: dict[str, list[Any]], name: str) -> None:
    """Fail with the tracebacks of all ranks on which a scenario raised."""
    texts = [f"rank {rank}:\n{text}" for rank, text in enumerate(found[name]) if isinstance(text, str)]
    if texts:
        pytest.fail("\n".join(texts), pytrace=False)


def message(call: Callable[..., object], *args: Any, **kwargs: Any) -> tuple[str, str]:
    """The class and text of what a call raises."""
    try:
        call(*args, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """What the package logs meanwhile."""
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("accumkernels")
    logger.addHandler(handler)
    try:
        yield texts
    finally:
        logger.removeHandler(handler)


def parameters(module: torch.nn.Module) -> list[torch.Tensor]:
    """Copies of the parameters' values."""
    return [p.detach().clone() for p in module.parameters()]
