"""Embeddings: rows are added to the buffer, for every option as torch sums them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import accumkernels as ak
from accumkernels.capture.fused.rows import add_rows
from tests.support.backends import same_bits
from tests.support.made import weight_gradients

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIONS = [
    {},
    {"padding_idx": 2},
    {"padding_idx": -1},
    {"scale_grad_by_freq": True},
    {"padding_idx": 0, "scale_grad_by_freq": True},
]
IDS = (torch.tensor([[1, 2, 2], [0, 2, 8]]), torch.tensor([[8, 8, 0], [3, 1, 1]]))
WEIGHTS = (0.5, 3.0)


def net(dtype=torch.float32, **options):
    """An embedding, and weights that make every row's gradient another."""
    torch.manual_seed(0)
    embedding = nn.Embedding(9, 4, dtype=dtype, **options)
    factors = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1))
    return embedding, lambda e, ids: (e(ids).to(e.weight.dtype) * factors.to(e.weight.dtype)).sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_equals_torchs_dense_gradient(options, dtype):
    """Repeated tokens, padding, and rows divided by their frequency; what the segment held before is gone."""
    embedding, loss = net(dtype, **options)
    acc = ak.FusedAccumulator(embedding, fuse_weight_gradients=True)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.0)
    twin = net(torch.float64, **options)[0]
    twin.load_state_dict(embedding.state_dict())
    expected = torch.zeros(9, 4, dtype=torch.float64)
    for ids, weight in zip(IDS, WEIGHTS, strict=True):
        expected += weight * torch.autograd.grad(loss(twin, ids), twin.weight)[0]
    for _ in range(2):
        for ids, weight in zip(IDS, WEIGHTS, strict=True):
            value = loss(embedding, ids)
            made = weight_gradients(embedding, lambda value=value, weight=weight: acc.backward(value, weight=weight))
            assert (
                made == set() or acc.micro_batches == 1
            )  # numbers of rows in which they would be counted are no gradient
        tolerance = {torch.float64: 1e-12, torch.float32: 1e-6}.get(dtype, 2**-7)  # factors are rounded to 16 bit
        torch.testing.assert_close(acc.main_grad(embedding.weight).double(), expected, rtol=tolerance, atol=tolerance)
        acc.step(optimizer)


@pytest.mark.parametrize("option", ["sparse", "max_norm"])
def test_options_that_keep_their_way(option):
    """Sparse gradients are refused by name, as ever; rows that max_norm shrinks in place have ordinary gradients."""
    embedding, loss = net(**{option: 0.5 if option == "max_norm" else True})
    acc = ak.FusedAccumulator(embedding, fuse_weight_gradients=True)
    value = loss(embedding, IDS[0])
    if option == "sparse":
        with pytest.raises(RuntimeError, match="the gradient of 'weight' is sparse"):
            acc.backward(value)
        return
    assert weight_gradients(embedding, lambda: acc.backward(value)) == {"weight"}
    assert (embedding.weight[IDS[0]].norm(dim=-1) < 0.51).all()
    assert "0 fused" in repr(acc)


def test_rows_of_other_tokens_are_zero():
    """The first touch of a window zeroes the segment, once: the second micro-batch adds."""
    embedding, loss = net()
    acc = ak.FusedAccumulator(embedding, fuse_weight_gradients=True)
    acc.main_grad(embedding.weight).fill_(7)
    for ids in IDS:
        acc.backward(loss(embedding, ids))
    unused = [4, 5, 6, 7]
    assert not acc.main_grad(embedding.weight)[unused].any()
    assert acc.main_grad(embedding.weight)[[0, 1, 2, 3, 8]].all()


def test_deterministic_in_the_order_of_tokens():
    """Bit for bit the sum of a loop over tokens, with more than one thread too."""
    generator = torch.Generator().manual_seed(0)
    indices = torch.randint(7, (500,), generator=generator)
    rows = torch.randn(500, 33, generator=generator)
    expected = torch.zeros(7, 33)
    for index, row in zip(indices, rows, strict=True):
        expected[index] += row * 0.75
    threads = torch.get_num_threads()
    try:
        for n in (1, 3):
            torch.set_num_threads(n)
            view = torch.zeros(7, 33)
            add_rows(view, rows, indices, -1, False, 0.75)
            assert same_bits(view, expected)
            view.zero_()
            add_rows(view, rows, indices, -1, False, torch.tensor(0.75, dtype=torch.float64))
            assert same_bits(view, expected)
    finally:
        torch.set_num_threads(threads)


def test_a_gradient_of_padding_that_is_not_finite_is_nobodys():
    """As in torch, where it is never looked at."""
    view = torch.zeros(3, 2)
    add_rows(view, torch.tensor([[float("nan"), 1], [1, 1]]), torch.tensor([0, 1]), 0, False, 1.0)
    assert view.tolist() == [[0, 0], [1, 1], [0, 0]]
