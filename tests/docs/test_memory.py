"""The table of bytes per parameter in docs/memory.md is what tensors really take."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import accumkernels as ak
from accumkernels.splitting.memory import LiveBytes
from tests.support.doc_blocks import ROOT

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH, DEPTH = 128, 32  # one layer is 1/32 of the parameters: a single gradient adds 0.13 bytes at most
BUCKET = {"bucket_bytes": 2 * WIDTH * WIDTH}
WHOLE = {"release": "microbatch"}


def bytes_per_parameter(dtype, autocast, options):
    """Between windows, and at the peak of backward in the second window, when all state exists."""
    gc.collect()
    live = LiveBytes()
    with live:
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH))).to(dtype)
        acc = None if options is None else ak.FusedAccumulator(model, **options)
        optimizer = torch.optim.AdamW(model.parameters() if acc is None else acc.parameters(), fused=True)
        x = torch.randn(1, WIDTH, dtype=dtype)
        elements = sum(p.numel() for p in model.parameters())
        for window in range(2):
            if window == 1:
                gc.collect()
                between = live.live
                live.reset_peak()
            for _ in range(2):
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    loss = model(x).square().mean()
                if acc is None:
                    loss.backward()
                else:
                    acc.backward(loss)
                del loss
            peak = live.peak
            if acc is None:
                optimizer.step()
                optimizer.zero_grad()
            else:
                acc.step(optimizer)
    return between / elements, peak / elements


@pytest.mark.parametrize(
    ("name", "dtype", "autocast", "options"),
    [
        ("fp32, stock `.grad`", torch.float32, False, None),
        ("fp32", torch.float32, False, BUCKET),
        ('fp32, `release="microbatch"`', torch.float32, False, WHOLE),
        ("bf16 or fp16 autocast, stock `.grad`", torch.float32, True, None),
        ("bf16 or fp16 autocast", torch.float32, True, BUCKET),
        ('bf16 or fp16 autocast, `release="microbatch"`', torch.float32, True, WHOLE),
        ("16-bit parameters, stock `.grad` (sums in 16 bit)", torch.bfloat16, False, None),
        ("16-bit parameters", torch.bfloat16, False, BUCKET),
        ('16-bit parameters, `release="microbatch"`', torch.bfloat16, False, WHOLE),
        ("16-bit parameters, masters", torch.bfloat16, False, {"master_weights": True, **BUCKET}),
        (
            '16-bit parameters, masters, `release="microbatch"`',
            torch.bfloat16,
            False,
            {"master_weights": True, **WHOLE},
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.native
def test_table_of_memory(name, dtype, autocast, options):
    """Each row, to a quarter of a byte: activations of one sample, and one gradient or bucket, are less."""
    between, peak = bytes_per_parameter(dtype, autocast, options)
    rows = [line.strip("| ").split(" | ") for line in (ROOT / "docs/memory.md").read_text().splitlines()]
    cells = next(row[1:] for row in rows if row[0] == name)
    assert [float(cell.removesuffix(" + bucket")) for cell in cells] == pytest.approx([between, peak], abs=0.25)


def test_table_of_memory_is_complete():
    """No row of the table is left out above."""
    text = (ROOT / "docs/memory.md").read_text()
    table = text.partition("| | between windows | peak |\n|---|---|---|\n")[2].partition("\n\n")[0]
    assert table.count("\n") + 1 == len(
        next(mark for mark in test_table_of_memory.pytestmark if mark.name == "parametrize").args[1]
    )
