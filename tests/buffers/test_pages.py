"""Large CPU tensors ask for huge pages, before their first write, and for no byte that is not theirs."""

from __future__ import annotations

import mmap

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from accumkernels.buffers import flat
from accumkernels.doctor import examine, render


@pytest.fixture
def asked(monkeypatch):
    """What the system is asked, as (start, bytes, advice), where its setting is "madvise"."""
    calls = []

    class Libc:
        def __init__(self, name):
            assert name is None

        def madvise(self, start, nbytes, advice):
            calls.append((start.value, nbytes.value, advice))
            return 0

    monkeypatch.setattr(flat, "setting", lambda: "madvise")
    monkeypatch.setattr(flat.ctypes, "CDLL", Libc)
    return calls


def test_whole_pages_of_a_large_tensor(asked):
    """All but what shares a page with something else."""
    tensor = flat.zeros(3 * 2**20 + 5, torch.float32, torch.device("cpu"))
    ((start, nbytes, advice),) = asked
    assert advice == 14
    assert start % mmap.PAGESIZE == nbytes % mmap.PAGESIZE == 0
    assert 0 <= start - tensor.data_ptr() < mmap.PAGESIZE
    assert 0 <= tensor.data_ptr() + tensor.nbytes - (start + nbytes) < mmap.PAGESIZE
    assert tensor.shape == (3 * 2**20 + 5,)
    assert not tensor.any()


def test_not_asked(asked, monkeypatch):
    """Small tensors, tensors without memory, and systems with another setting."""
    assert not flat.zeros(1000, torch.float64, torch.device("cpu")).any()
    flat.zeros(2**24, torch.float32, torch.device("meta"))
    with FakeTensorMode():
        flat.zeros(2**24, torch.float32, torch.device("cpu"))
    monkeypatch.setattr(flat, "setting", lambda: "never")
    assert not flat.zeros(2**21, torch.float32, torch.device("cpu")).any()
    assert asked == []


@pytest.mark.parametrize(
    ("text", "setting"), [("always [madvise] never", "madvise"), ("always madvise [never]", "never"), ("", None)]
)
def test_setting(tmp_path, monkeypatch, text, setting):
    """As the kernel writes it; the doctor says it and what it means."""
    path = tmp_path / "enabled"
    monkeypatch.setattr(flat, "_SETTING", path)
    assert flat.setting() is None
    path.write_text(text + "\n")
    assert flat.setting() == setting
    assert (f"transparent huge pages: {setting} (" in render(examine())) == (setting is not None)
