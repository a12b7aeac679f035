"""What type checkers and IDEs see of the public interface: literals for modes, and step's result by its arguments."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.support.doc_blocks import ROOT

pytestmark = pytest.mark.starts

PROGRAM = """
import torch
from torch import Tensor, nn
from typing_extensions import assert_type

import accumkernels as ak

model = nn.Linear(2, 2)
acc = ak.FusedAccumulator(model, overflow=None, release="auto", fuse_weight_gradients="deferred", comm_dtype="auto")
optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
loader = [(torch.ones(1), 1)]


def trains(limit: float | None) -> float:
    for window in acc.windows(loader, 8):
        for x, y in window:
            assert_type(x, Tensor)
            acc.backward(model(x).sum(), weight=y)
        assert_type(acc.step(optimizer, max_norm=limit), Tensor | None)
    assert_type(acc.step(optimizer, max_norm=[(model.parameters(), 1.0)]), list[Tensor])
    acc.step(optimizer, optimizer, divisor=torch.ones(()))
    return float(acc.step(optimizer, max_norm=1.0))
"""

WRONG = {
    "float(acc.step(optimizer))": "No overload variant|incompatible type",
    "ak.FusedAccumulator(model, overflow='never')": "Literal['window', 'microbatch', 'raise']",
    "ak.FusedAccumulator(model, release='forward')": "Literal['auto', 'microbatch', 'backward']",
    "ak.FusedAccumulator(model, backend='cuda')": "Literal['auto', 'native', 'triton', 'reference']",
    "ak.FusedAccumulator(model, fuse_weight_gradients='never')": "Literal['auto', 'deferred']",
    "ak.FusedAccumulator(model, comm_dtype='fp16')": "Literal['auto']",
    "ak.FusedAccumulator(model, accumulation_steps=4)": "accumulation_steps",
    "ak.find_batch_size(model, 'cpu', dataset_size=8, mode='fast')": "Literal['power', 'binsearch']",
    "ak.suggest_learning_rate(0.1, 8, 16, 'cubic')": "Literal['linear', 'sqrt']",
    "acc.step(optimizer, 1.0)": "float",
}


def test_mypy_accepts_right_programs_and_no_wrong_ones(tmp_path):
    """One run: no error in the program, and one in each of the wrong lines below it, which names what is accepted."""
    pytest.importorskip("mypy")
    file = tmp_path / "program.py"
    file.write_text(PROGRAM + "\n".join(["", *WRONG]))
    first = PROGRAM.count("\n") + 2  # the line of the first wrong one
    command = [sys.executable, "-m", "mypy", "--hide-error-context", "--no-pretty", "--hide-error-codes", str(file)]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    said = {}
    for line in found.splitlines():
        if found_at := re.match(r".*program\.py:(\d+): error: (.*)", line):
            said.setdefault(int(found_at[1]), []).append(found_at[2])
    assert sorted(said) == list(range(first, first + len(WRONG))), found
    for number, expected in enumerate(WRONG.values(), first):
        assert any(part in message for message in said[number] for part in expected.split("|")), said[number]
