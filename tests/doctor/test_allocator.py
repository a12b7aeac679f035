"""Advice about the settings of CUDA's allocator."""

from __future__ import annotations

import pytest

from accumkernels.doctor import NEW, OLD, allocator_advice


@pytest.fixture
def settings(monkeypatch):
    """What is advised in an environment, with an NVIDIA GPU or without."""

    def advice(environ, on_gpu=True):
        for name in (NEW, OLD):
            monkeypatch.delenv(name, raising=False)
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("accumkernels.doctor.is_available", lambda device: on_gpu)
        return allocator_advice()

    return advice


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ["expandable_segments:True"]),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, []),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64, expandable_segments: true"}, []),
        ({"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}, []),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, ["is the old name: set PYTORCH_ALLOC_CONF"]),
        ({"PYTORCH_CUDA_ALLOC_CONF": ""}, ["is the old name", "expandable_segments:True"]),
    ],
)
def test_allocator_advice(settings, environ, expected):
    """Expandable segments where they are not on, the new name where the old is used; nothing without a GPU."""
    advice = settings(environ)
    assert len(advice) == len(expected)
    for line, part in zip(advice, expected, strict=True):
        assert line.startswith("advice: ")
        assert part in line
    assert settings(environ, on_gpu=False) == []


@pytest.mark.native
def test_doctor_prints_the_advice(monkeypatch, capsys):
    """Advice is no problem."""
    from accumkernels.__main__ import main

    monkeypatch.setattr("accumkernels.doctor.allocator_advice", lambda: ["advice: set this"])
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "advice: set this" in lines
    assert lines[-1] == "no problems found"


def test_the_new_name_counts_where_both_are_set(settings):
    """As in torch, which reads the old one where the new one is not there."""
    both = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}
    assert settings(both) == []
