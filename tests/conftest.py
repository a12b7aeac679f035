"""What must happen before any test module is imported."""

import gc
import os
import signal
import sysconfig
from pathlib import Path

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:  # workers, and what they start, share the cores; read when torch is imported
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # where there are more threads all the same, none spins

import torch

from tests.support import starts

frozen = pytest.StashKey[Path]()  # the file of tests since which new objects are frozen

if not torch.cuda.is_available():
    # Triton reads it when it is first imported: without a GPU its kernels are tested in its interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as shells start what runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # or tests of Ctrl-C would wait for ever

if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
    collect_ignore = ["cuda_host"]  # pybind11 needs Python's headers (Debian: python3-dev)


@pytest.fixture
def one_thread():
    """For models so small that threads only wait for each other, the more the busier the machine is."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def casts_of_small_weights(monkeypatch):
    """The models of tests are too small for hooks on their casts to be worth it; they are tested all the same."""
    from accumkernels.capture import graph

    monkeypatch.setattr(graph, "SMALLEST_CAST", 0)


@pytest.fixture(autouse=True, scope="session")
def nothing_at_exit():
    """Tests leave windows open, which is worth a warning when other processes end."""
    from accumkernels.window import misuse

    yield
    misuse._never_ended.clear()


@pytest.fixture(autouse=True)
def no_cache(monkeypatch):
    """The sums of tests' models fit into any, where gradients in bf16 are made and added with AMX; they are fused."""
    from accumkernels.ops import products

    monkeypatch.setattr(products, "last_level_cache", lambda: 0)


def pytest_configure(config):
    """The interpreter is numpy, which warns of the infinities that tests put in on purpose."""
    if not torch.cuda.is_available():  # on a GPU, kernels and graphs are compiled all over
        starts.install()
    config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning:triton.runtime.interpreter")


def has_16_bit_lstm():
    """Whether oneDNN has its LSTM in bf16; not on processors with AVX2 alone, where stock raises."""
    try:
        with torch.autocast("cpu", torch.bfloat16):
            torch.nn.LSTM(4, 4)(torch.randn(2, 4))
    except RuntimeError:
        return False
    return True


def pytest_collection_modifyitems(config, items):
    """Tests that need a GPU, or the library, are not collected where there is none; what starts ranks is marked."""
    from accumkernels.ops import native

    starts.mark(items)
    lacking = {"gpu"} if not torch.cuda.is_available() else set()
    if not native.LIBRARY_PATH.exists():
        lacking.add("native")

    def needs(item):
        backend = item.callspec.params.get("backend") if hasattr(item, "callspec") else None
        return {mark.name for mark in item.iter_markers()} | ({backend} if isinstance(backend, str) else set())

    if not has_16_bit_lstm():
        for item in items:
            if "[lstm-bf" in item.name:
                item.add_marker(pytest.mark.skip(reason="torch has no LSTM in bf16 on this processor"))
    deselected = [item for item in items if lacking & needs(item)]
    config.hook.pytest_deselected(items=deselected)
    items[:] = [item for item in items if item not in set(deselected)]
    # Files that start processes have few tests and take long: workers that get them last would leave the other idle.
    starting = {item.path for item in items if item.get_closest_marker("starts")}
    items.sort(key=lambda item: item.path not in starting)


def pytest_runtest_setup(item):
    """Trainers and planning have garbage collected, which would look at all that was imported each time."""
    if item.path != item.session.stash.get(frozen, None):
        gc.collect()
        gc.freeze()
        item.session.stash[frozen] = item.path


def pytest_sessionfinish():
    """What is left is collected when the process ends; libraries report it as leaked otherwise."""
    gc.unfreeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """A test without the marker `starts` starts no process."""
    return (yield from starts.watched(item))
