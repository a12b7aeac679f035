"""Frozen parameters give their segments back: at `release_buffers`, and when a window ends and they are half of all."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import accumkernels as ak
from accumkernels.window import end as window_end
from tests.support.models import batch, grads_of, mlp, relative_error

LAYERS, WIDTH = 6, 32
LAYER_BYTES = 4 * (WIDTH * WIDTH + WIDTH)  # a multiple of a segment's alignment
TURNS = [0, 1, 2, 5, 1, 1, 3, 0, 4, 2]  # the layer that is trained in each window


def stack():
    """Layers of the same size."""
    torch.manual_seed(0)
    layers = [(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
    return nn.Sequential(*itertools.chain.from_iterable(layers))


def only(model, *indices):
    """Freeze all layers but these."""
    for index, layer in enumerate(model[::2]):
        layer.requires_grad_(index in indices)


def data(window, step):
    """Inputs of a micro-batch."""
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * window + step))


def loss_of(model, x):
    """Not zero in any layer."""
    return (model(x) - 1).square().mean()


def held(acc):
    """Bytes of flat buffers, in layers."""
    return sum(buffer.nbytes for buffer in acc.flat_buffers) / LAYER_BYTES


def trained_by_stock():
    """The parameters after stock training in float64, one layer at a time, and the bytes of `.grad`."""
    model = stack().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for window, turn in enumerate(TURNS):
        only(model, turn)
        for step in range(2):
            (loss_of(model, data(window, step).double()) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


OPTIONS = {
    "auto": {},
    "buckets": {"bucket_bytes": 512},
    "microbatch": {"release": "microbatch"},
    "backward": {"release": "backward", "bucket_bytes": 512},
    "fused": {"fuse_weight_gradients": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("own", [False, True], ids=["acc.backward", "loss.backward"])
@pytest.mark.parametrize("start", ["trainable", "frozen", "released"])
def test_one_layer_at_a_time(start, own, options):
    """At most two layers are held, or one with `release_buffers`, and AdamW trains as in a stock loop (LISA, BAdam)."""
    model = stack()
    if start == "frozen":
        only(model, TURNS[0])
    acc = ak.FusedAccumulator(model, **options)
    optimizer = torch.optim.AdamW(acc.parameters(), lr=0.01)
    found = []
    for window, turn in enumerate(TURNS):
        only(model, turn)
        if start == "released":
            acc.release_buffers()
            assert acc.flat_buffers == []
        for step in range(2):
            loss = loss_of(model, data(window, step))
            if own:
                loss.backward()
                acc.accumulate()
            else:
                acc.backward(loss)
        found.append(held(acc))
        acc.step(optimizer)
    assert relative_error(list(model.parameters()), trained_by_stock()) < 1e-5
    if start == "released":
        assert found == [1] * len(TURNS)
    else:
        assert found[0] == (LAYERS if start == "trainable" else 1)  # what was trainable at construction
        assert found[1:] == [1 if turn == before else 2 for before, turn in itertools.pairwise(TURNS)]
    acc.remove()
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def window_of(acc, model, optimizer, seed=0):
    """A window of two micro-batches; the error of its gradient against float64."""
    trained = [p for p in model.parameters() if p.requires_grad]
    twin = stack().double()
    twin.load_state_dict(model.state_dict())
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        q.requires_grad_(p.requires_grad)
    for step in range(2):
        acc.backward(loss_of(model, data(seed, step)))
        (loss_of(twin, data(seed, step).double()) / 2).backward()
    acc.finalize(optimizer)
    error = relative_error([p.grad for p in trained], [q.grad for q in twin.parameters() if q.requires_grad])
    optimizer.step()
    acc.zero_()
    return error


@pytest.fixture
def trained():
    """A stack that was trained as a whole for a window."""
    model = stack()
    acc = ak.FusedAccumulator(model, bucket_bytes=512)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
    assert window_of(acc, model, optimizer) < 1e-5
    return model, acc, optimizer


def test_half_of_a_buffer_is_laid_out_anew(trained):
    """Other layers go on in a new buffer; old views keep the old memory."""
    model, acc, optimizer = trained
    only(model, 0, 2, 4)
    view = acc.main_grad(model[0].weight)
    for _ in range(2):
        assert window_of(acc, model, optimizer) < 1e-5
        assert held(acc) == 3
    assert acc.main_grad(model[0].weight).data_ptr() != view.data_ptr()
    assert view.isfinite().all()
    with pytest.raises(ValueError, match="trainable"):
        acc.main_grad(model[2].weight)
    assert "12 parameters, 6 trainable" in repr(acc)


def test_less_than_half_stays(trained):
    """Nothing moves."""
    model, acc, optimizer = trained
    only(model, 0, 1, 2, 3)
    pointers = [acc.main_grad(p).data_ptr() for p in model.parameters()]
    assert window_of(acc, model, optimizer) < 1e-5
    assert [acc.main_grad(p).data_ptr() for p in model.parameters()] == pointers
    only(model, *range(LAYERS))
    assert window_of(acc, model, optimizer) < 1e-5
    assert [acc.main_grad(p).data_ptr() for p in model.parameters()] == pointers


def test_other_buffers_stay():
    """A buffer that loses all of its segments leaves the others where they are."""
    model = stack()
    only(model, 0)
    acc = ak.FusedAccumulator(model, bucket_bytes=512)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
    assert window_of(acc, model, optimizer) < 1e-5
    only(model, 0, 1, 2)
    assert window_of(acc, model, optimizer) < 1e-5
    only(model, 0)
    pointer = acc.main_grad(model[0].weight).data_ptr()
    assert window_of(acc, model, optimizer) < 1e-5
    assert held(acc) == 1
    assert acc.main_grad(model[0].weight).data_ptr() == pointer


@pytest.mark.parametrize("end", ["step", "zero_", "finalize"])
def test_when(trained, end):
    """When a window is over that step or finalize ended; a window that is dropped shows nothing."""
    model, acc, optimizer = trained
    only(model, 0)
    acc.backward(loss_of(model, data(0, 0)))
    if end == "step":
        acc.step(optimizer)
    else:
        if end == "finalize":
            acc.finalize(optimizer)
            assert held(acc) == LAYERS
        acc.zero_()
    assert held(acc) == (LAYERS if end == "zero_" else 1)


def test_a_sum_is_not_given_back(trained):
    """A layer that is frozen after it got a gradient gets its `.grad` all the same, and goes a window later."""
    model, acc, optimizer = trained
    only(model, 0, 1, 2, 3, 4)
    acc.backward(loss_of(model, data(0, 0)))
    only(model, 0)
    acc.finalize(optimizer)
    assert [p.grad is None for p in model.parameters()] == [False] * 10 + [True] * 2
    acc.zero_()
    assert held(acc) == LAYERS
    assert window_of(acc, model, optimizer) < 1e-5
    assert held(acc) == 1


def test_everything_frozen(trained):
    """Nothing is held, and micro-batches are refused, until something is unfrozen."""
    model, acc, optimizer = trained
    only(model)
    acc.release_buffers()
    with pytest.raises(RuntimeError, match="no parameter requires a gradient"):
        acc.accumulate()
    acc.step(optimizer)
    assert acc.flat_buffers == []
    only(model, 3)
    assert window_of(acc, model, optimizer) < 1e-5
    assert held(acc) == 1


def test_unfreezing_inside_a_window_is_refused(trained):
    """As of a layer that never had a segment."""
    model, acc, optimizer = trained
    only(model, 0)
    assert window_of(acc, model, optimizer) < 1e-5
    acc.backward(loss_of(model, data(0, 0)))
    only(model, 0, 1)
    acc.backward(loss_of(model, data(0, 1)))
    with pytest.raises(RuntimeError, match=r"unfrozen inside a window.*acc.discard\(\)"):
        acc.step(optimizer)
    acc.discard()
    acc.step(optimizer)
    assert window_of(acc, model, optimizer) < 1e-5


def test_the_next_layer_needs_an_owner():
    """The layer that takes another's place in the layout is looked for in the optimizers anew."""
    model = stack()
    only(model, 0)
    acc = ak.FusedAccumulator(model)
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    acc.backward(loss_of(model, data(0, 0)))
    acc.step(optimizer)
    only(model, 1)
    acc.release_buffers()
    acc.backward(loss_of(model, data(0, 0)))
    with pytest.raises(RuntimeError, match=r"'2\.(weight|bias)'"):
        acc.step(optimizer)


def test_kept_grads_are_kept():
    """A `.grad` that somebody keeps is not lost with its buffer."""
    model = stack()
    acc = ak.FusedAccumulator(model)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
    acc.backward(loss_of(model, data(0, 0)))
    only(model, 0)
    acc.finalize(optimizer)
    kept = [p.grad for p in model.parameters()]
    values = [grad.clone() for grad in kept]
    acc.zero_()
    for seed in range(3):
        window_of(acc, model, optimizer, seed)
    assert held(acc) == 1
    assert all(map(torch.equal, kept, values))


def test_a_captured_window_keeps_its_addresses(trained, monkeypatch):
    """Once a window was captured in a CUDA graph, nothing is given back when windows end."""
    model, acc, optimizer = trained
    only(model, 0)
    with monkeypatch.context() as patch:
        patch.setattr(window_end, "is_capturing", lambda device: True)
        acc.backward(loss_of(model, data(0, 0)))
        acc.finalize(optimizer)
        acc.zero_()
    assert held(acc) == LAYERS
    assert window_of(acc, model, optimizer) < 1e-5
    assert held(acc) == LAYERS


def test_flags_of_layers_that_stay(trained):
    """`overflow_report` still names them when others have given their segments back."""
    model, acc, optimizer = trained
    only(model, 0, 3)
    acc.backward(loss_of(model, data(0, 0)) * float("inf"))
    expected = acc.overflow_report()
    assert set(expected) == {"0.weight", "0.bias", "6.weight", "6.bias"}
    acc.step(optimizer)
    assert held(acc) == 2
    assert acc.overflow_report() == expected


def test_masters_stay():
    """The master of a layer that is unfrozen again has bits that the 16-bit parameter has not."""
    model = stack().bfloat16()
    acc = ak.FusedAccumulator(model, master_weights=True)
    optimizer = torch.optim.SGD(acc.parameters(), lr=1e-3)

    masters = list(acc.parameters())
    for layers in (range(LAYERS), (0,)):
        only(model, *layers)
        acc.backward((model(data(0, 0).bfloat16()) - 1).float().square().mean())
        acc.step(optimizer)
    assert held(acc) == 1
    values = [master.detach().clone() for master in masters]
    assert not torch.equal(values[2], values[2].bfloat16().float())
    only(model, 1)
    acc.backward((model(data(0, 0).bfloat16()) - 1).float().square().mean())
    assert held(acc) == 2
    assert all(map(torch.equal, masters, values))
    acc.step(optimizer)
    assert all(a is b for a, b in zip(acc.parameters(), masters, strict=True))
    stepped = [not torch.equal(master, value) for master, value in zip(masters, values, strict=True)]
    assert stepped == [False, False, True, True] + [False] * (2 * LAYERS - 4)
    assert all(torch.equal(p, master.bfloat16()) for p, master in zip(model.parameters(), masters, strict=True))


@pytest.mark.parametrize("inside", [False, True])
def test_states_load_before_and_after(inside):
    """By name, from a layout with the frozen layers to one without them and back, inside a window too."""

    def run(saves, loads):
        model = stack()
        acc = ak.FusedAccumulator(model)
        optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
        only(model, 0, 1)
        if saves:  # given back
            acc.backward(loss_of(model, data(9, 0)))
            acc.step(optimizer)
        with torch.no_grad():
            for p, q in zip(model.parameters(), stack().parameters(), strict=True):
                p.copy_(q)
        if inside:
            acc.backward(loss_of(model, data(0, 0)))
        state, values = acc.state_dict(), model.state_dict()

        model = stack()
        model.load_state_dict(values)
        acc = ak.FusedAccumulator(model)
        optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
        only(model, 0, 1)
        if loads:
            acc.release_buffers()
        acc.load_state_dict(state)
        acc.backward(loss_of(model, data(0, 1)))
        acc.finalize(optimizer)
        return grads_of(acc)

    expected = run(False, False)
    for saves, loads in ((True, False), (False, True), (True, True)):
        found = run(saves, loads)
        assert [grad is None for grad in found] == [False] * 4 + [True] * (2 * LAYERS - 4)
        assert all(map(torch.equal, found[:4], expected[:4]))


def test_doubles_leave():
    """Norms get the dtype of what is left."""
    model = nn.ModuleList([nn.Linear(5, 5).double(), nn.Linear(5, 3)])
    acc = ak.FusedAccumulator(model)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
    model[0].requires_grad_(False)
    for expected in (torch.float64, torch.float32):
        acc.backward(model[1](model[0](torch.ones(2, 5).double()).float()).sum())
        assert acc.step(optimizer, max_norm=1.0).dtype == expected
    assert [buffer.dtype for buffer in acc.flat_buffers] == [torch.float32]


def test_noise_scale_goes_on():
    """Measured over windows with different layouts."""
    model = mlp()
    acc = ak.FusedAccumulator(model, noise_scale=True)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
    for window in range(4):
        model.requires_grad_(False)
        model[2 * (window % 3)].requires_grad_(True)
        for step in range(2):
            x, y = batch(4, seed=10 * window + step)
            acc.backward(mse_loss(model(x), y))
        acc.step(optimizer)
    assert acc.noise_scale().windows == 4
