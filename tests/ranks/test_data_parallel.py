"""Data parallel windows on 2, 3 and 4 gloo ranks, held to one process on all the data (stock torch in float64)."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn

import accumkernels as ak
from tests.support.frozen import NOT_SENT, Adapted
from tests.support.models import batch, mlp, relative_error
from tests.support.rank_failure_scenarios import (
    empty,
    errors,
    failures,
    last_is_last,
    overflow,
    overflow_in_step,
    removed,
)
from tests.support.rank_option_scenarios import (
    bf16_communication,
    frozen_kinds,
    fused_weights,
    masters,
    module_buffers,
    under_autocast,
)
from tests.support.rank_scenarios import (
    HEADS,
    MAX_NORM,
    TRAINED,
    WINDOWS,
    Heads,
    adamw,
    data_of,
    distributed_data_parallel,
    divides,
    equals_one_process,
    freezing,
    frozen_on_one_rank,
    long_form,
    micro_batches,
    mixed_dtypes,
    noise,
    sgd,
    unfreezing,
    unused,
)
from tests.support.ranks import parameters, run

pytestmark = pytest.mark.starts

SIZES = (2, 3, 4)
SCENARIOS = [
    distributed_data_parallel,
    long_form,
    overflow,
    module_buffers,
    masters,
    under_autocast,
    fused_weights,
    frozen_kinds,
    failures,
    divides,
    noise,
    last_is_last,
    unfreezing,
    freezing,
    frozen_on_one_rank,
    mixed_dtypes,
    removed,
    errors,
]
OF_EVERY_SIZE = [equals_one_process, overflow_in_step, unused, empty, bf16_communication]


def one_process(size, make_optimizer, model=None, keep=lambda window, rank, i: True):
    """Parameters and norms after stock training on the data of all ranks together, in float64."""
    model = mlp() if model is None else model
    model = copy.deepcopy(model).double()
    optimizer = make_optimizer(model.parameters())
    norms = []
    for window in range(WINDOWS):
        data = [
            pair
            for rank in range(size)
            for i, pair in enumerate(micro_batches(window, rank, torch.float64))
            if keep(window, rank, i)
        ]
        x, y = (torch.cat(parts) for parts in zip(*data, strict=True))
        nn.functional.mse_loss(model(x), y).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    return parameters(model), norms


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Per scenario, what each of two ranks found."""
    return run(2, tmp_path_factory.mktemp("ranks"), OF_EVERY_SIZE + SCENARIOS)


@pytest.fixture(scope="module", params=SIZES, ids=lambda size: f"{size} ranks")
def any_size(request, tmp_path_factory):
    """Per scenario of `OF_EVERY_SIZE`, what each rank found."""
    if request.param == 2:
        return request.getfixturevalue("found")
    return run(request.param, tmp_path_factory.mktemp("ranks"), OF_EVERY_SIZE)


def of(found, scenario):
    """A scenario's results; fails with the traceback of the rank that raised."""
    results = found[scenario.__name__]
    for rank, result in enumerate(results):
        if isinstance(result, str):
            pytest.fail(f"rank {rank}: {result}")
    return results


def assert_same(tensors):
    """Bit for bit the same on every rank."""
    for other in tensors[1:]:
        assert all(map(torch.equal, tensors[0], other))


# fp32: sums of some 60 products in another order; float64 likewise, with the same factor on its rounding unit.
RTOL = {torch.float64: 1e-12, torch.float32: 2e-5}


def test_equals_one_process(any_size):
    """Unequal micro-batches, an empty rank, every release, fused or not; the same bits on every rank."""
    results = of(any_size, equals_one_process)
    for name in results[0]:
        dtype, optimizer, _, _ = name
        expected, norms = one_process(len(results), {"adamw": adamw, "sgd": sgd}[optimizer])
        assert_same([result[name][0] for result in results])
        for values, own_norms, left in (result[name] for result in results):
            assert relative_error(values, expected) < RTOL[dtype], name
            assert own_norms == pytest.approx(norms, rel=RTOL[dtype]), name
            assert left == 0


def test_last_equals_not_last(any_size):
    """Sending in backward changes no bit."""
    for result in of(any_size, equals_one_process):
        for dtype, make_optimizer in itertools.product((torch.float64, torch.float32), ("adamw", "sgd")):
            assert_same([result[dtype, make_optimizer, "backward", last][0] for last in (False, True)])


def test_distributed_data_parallel(found):
    """Silent in every form, with no_sync or without."""
    results = of(found, distributed_data_parallel)
    expected, norms = one_process(len(results), sgd)
    for name in results[0]:
        assert_same([result[name][0] for result in results])
        assert relative_error(results[0][name][0], expected) < RTOL[torch.float64], name
        assert results[0][name][1] == pytest.approx(norms, rel=RTOL[torch.float64])
        assert results[-1][name][2] == 0


def test_long_form(found):
    """Two optimizers and a scaler; a divisor is that of all ranks."""
    results = of(found, long_form)
    expected, norms = one_process(len(results), sgd)
    for result, divisor in itertools.product(results, (False, True)):
        values, own_norms, scale = result[divisor]
        # Two optimizers clip together, as one would.
        assert relative_error(values, expected) < RTOL[torch.float64]
        assert own_norms == pytest.approx(norms, rel=RTOL[torch.float64])
        assert scale == 2.0**8


def test_overflow(found):
    """On one rank: all skip or all step, and their scales go together."""
    results = of(found, overflow)
    makers = {"adamw": adamw, "sgd": sgd}
    for name in results[0]:
        mode, with_scaler, optimizer = name
        assert results[0][name][2:] == results[-1][name][2:], name
        values, _, skipped, seen, scale = results[0][name]
        if mode is None:
            assert seen == [0, 0, 0]
            assert all(not value.isfinite().all() for result in results for value in result[name][0])
            continue
        assert_same([result[name][0] for result in results])
        assert skipped == [(mode == "window",) * 2, (False, False), (False, False)]
        assert seen == [float(mode != "raise"), 0, 0]
        if with_scaler:
            assert scale == (4.0 if mode == "raise" else 2.0)
        assert [result[name][1] for result in results] == [int(mode == "raise")] + [0] * (len(results) - 1)
        if mode != "window":  # everything else was used
            assert relative_error(values, one_process(len(results), makers[optimizer])[0]) < RTOL[torch.float64]


def test_overflow_in_step(any_size):
    """By step; and where the sum over ranks overflows though no rank's does."""
    for result in of(any_size, overflow_in_step):
        for skipped, scale in result.values():
            assert skipped == [(False, False), (True, True), (True, True), (False, False)]
            assert scale == 0.25


def test_divides(found):
    """Averages are what torch's division makes of the sum, bit for bit; one that is not finite counts as overflow."""
    for mode in ("window", None):
        (first, mean, skipped), (second, other, _) = (result[mode] for result in of(found, divides))
        assert torch.equal(mean, (first + 2 * second) / 3)
        assert torch.equal(mean, other)
        assert skipped is (mode == "window")


def test_unused(any_size):
    """`.grad` where any rank has one, and what earlier windows left counts nothing; momentum as in stock torch."""
    results = of(any_size, unused)
    model = Heads()
    optimizer = sgd(model.parameters())
    touched = []
    for window, heads in enumerate(HEADS):
        losses = []
        for rank in range(len(results)):
            x, y = batch(4 + rank, torch.float64, seed=10 * window + rank)
            losses.append(nn.functional.mse_loss(model(x, heads[min(rank, 1)]), y) * len(x))
        (sum(losses) / sum(4 + rank for rank in range(len(results)))).backward()
        touched.append([p.grad is not None for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    for release in ("microbatch", "backward"):
        assert_same([result[release][0] for result in results])
        for result in results:
            assert relative_error(result[release][0], parameters(model)) < RTOL[torch.float64]
            assert result[release][1] == touched


def test_empty(any_size):
    """Empty on all ranks, or of weight zero: no step, and the scale's growth goes on where it was."""
    for result in of(any_size, empty):
        for skipped, scale, has_state in result.values():
            assert skipped == [(True, True), (False, False), (True, True), (False, False)]
            assert scale == 8.0
            assert has_state


def test_module_buffers(found):
    """Rank 0's at construction and after every step, and in between each rank's own."""
    results = of(found, module_buffers)
    for form in results[0]:
        start, mid, end, mid_2, end_2 = zip(*(result[form][0] for result in results), strict=True)
        if form != "ddp without":
            assert_same(start)
            assert start[-1][0].tolist() == [0, 1]
        for middle, after in ((mid, end), (mid_2, end_2)):
            assert not torch.equal(middle[0][1], middle[-1][1])
            if form == "ddp without":
                assert all(map(torch.equal, middle[-1], after[-1]))
            else:
                assert_same(after)
                assert all(map(torch.equal, middle[0], after[-1]))
        assert_same([result[form][1] for result in results])


def test_frozen_kinds(found):
    """A frozen parameter of any kind is rank 0's, as in DistributedDataParallel; what is trained is right."""
    results = of(found, frozen_kinds)
    for kind, wrapped in results[0]:
        start = Adapted(kind)
        if kind not in NOT_SENT:
            values = start.base.view(torch.uint8).numpy().tobytes()
            assert [result[kind, wrapped][0] for result in results] == [values] * len(results)
        assert_same([result[kind, wrapped][1] for result in results])
        model = start if kind == "uint8" else nn.Sequential(start.a, start.b)  # torch copies no sparse parameter
        expected, _ = one_process(len(results), sgd, model)
        assert relative_error(results[0][kind, wrapped][1], expected[-4:]) < RTOL[torch.float32], kind


def test_bf16_communication(any_size):
    """Within the bound that the docstring states, and not exact; the same bits on all ranks."""
    results = of(any_size, bf16_communication)
    for release in ("microbatch", "backward"):
        for result in results:
            for actual, exact, bound in zip(*result[release], strict=True):
                error = (actual - exact).abs()
                assert (error <= ((1 + 2.0**-8) ** len(results) - 1) * bound + 1e-5 * bound).all()
                assert (error > 1e-4 * bound).any()  # fp32 would be nearer
        assert_same([result[release][0] for result in results])


def test_masters(found):
    """fp32 masters and bf16 parameters are the same everywhere, rounded once; at construction too."""
    results = of(found, masters)
    for i in range(3):
        assert_same([result[i] for result in results])
    values, rounded, fresh = results[-1]
    assert all(map(torch.equal, [v.bfloat16() for v in values], rounded))
    assert all(map(torch.equal, fresh, [p.float() for p in mlp(torch.bfloat16).parameters()]))
    assert not torch.equal(values[0], fresh[0])


def test_autocast(found):
    """Gradients are taken in 16 bits inside DistributedDataParallel, as without it: the bits of fp32 ones."""
    results = of(found, under_autocast)
    assert_same([result[hooked][0] for result in results for hooked in (False, True)])
    assert "148 taken in 16 bits" in results[0][False][1]
    assert "0 taken in 16 bits" in results[0][True][1]


def test_fused_weights(found):
    """What backward adds is reduced once, chunk by chunk while it runs, a tied weight when both its parts are there."""
    results = of(found, fused_weights)
    for autocast, fused, wrapped in results[0]:
        mine = [result[autocast, fused, wrapped] for result in results]
        assert_same([values for values, _ in mine])
        expected, _ = results[0][autocast, False, False]
        # Three steps: sums in another order, and with autocast one rounding to 16 bit less.
        assert relative_error(mine[0][0], expected) < (1e-2 if autocast else 1e-5)
        assert mine[0][1][-1]  # sums were sent in the last window's backward


def test_failures(found):
    """An exception drops the micro-batch, or with release="backward" the window, on all ranks; the scale stays."""
    results = of(found, failures)
    for name in results[0]:
        release, how = name
        assert_same([result[name][0] for result in results])
        window = release == "backward" or how == "window"
        for _, skipped, scale, _ in (result[name] for result in results):
            assert skipped == [False, window, False]
            assert scale == 4.0
        messages = results[0][name][3]
        if how != "window":
            assert messages[0] == ("RuntimeError", "planted")
            if release == "backward":
                assert "discard()" in messages[1][1]
        if how == "last":
            assert "discard(window=True)" in messages[2][1]
            assert "state_dict()" in messages[3][1]
        if not window:
            expected, _ = one_process(len(results), sgd, keep=lambda w, rank, i: (w, rank, i) != (1, 0, 1))
            assert relative_error(results[0][name][0], expected) < RTOL[torch.float64]


def test_noise_scale(found):
    """The same as that of one process with all micro-batches."""
    results = of(found, noise)
    model = mlp(torch.float64)
    acc = ak.FusedAccumulator(model, noise_scale=True)
    optimizer = sgd(acc.parameters())
    for window in range(WINDOWS):
        for rank in range(len(results)):
            for x, y in micro_batches(window, rank, torch.float64):
                acc.backward(nn.functional.mse_loss(model(x), y), weight=len(x))
        acc.step(optimizer)
    for value, windows in results:
        assert value == pytest.approx(float(acc.noise_scale()), rel=1e-9)
        assert windows == acc.noise_scale().windows == 3


def test_last_is_last(found):
    """Nothing can be added after it, not in silence either; `discard` ends the window on all ranks."""
    for messages, dropped, text in of(found, last_is_last):
        for round_ in (messages[:4], messages[4:8]):
            assert "backward() after last=True" in round_[0][1]
            assert "accumulate() after last=True" in round_[1][1]
            assert "state_dict()" in round_[2][1]
            assert "discard(window=True)" in round_[3][1]
        assert messages[8] == ("", "")
        assert "got a gradient after last=True" in messages[9][1]
        assert dropped
        assert messages[10][0] == "ValueError"
        assert "release='auto' or 'backward'" in messages[10][1]
        assert "rank " in text


def test_unfreezing(found):
    """The layout grows on all ranks, also on one that is empty in that window and had freed its buffers."""
    results = of(found, unfreezing)
    model = mlp(torch.float64)
    optimizer = sgd(model.parameters())
    for window in range(3):
        ranks = range(1 if window == 1 else len(results))
        losses = []
        for rank in ranks:
            x, y = batch(4, torch.float64, seed=window * 10 + rank)
            losses.append(nn.functional.mse_loss(model(x), y))
        (sum(losses) / len(losses)).backward()
        if window == 0:
            for p in model[2].parameters():
                p.grad = None
        optimizer.step()
        optimizer.zero_grad()
    for values, buffers in results:
        assert relative_error(values, parameters(model)) < RTOL[torch.float64]
        assert buffers == 2


def test_freezing(found):
    """All ranks give the same layers back, when a window ends, and train as one process on all their data."""
    results = of(found, freezing)
    model = mlp(torch.float64)
    optimizer = sgd(model.parameters())
    for window, layers in enumerate(TRAINED):
        parts = [part for rank in range(len(results)) for part in data_of(window, rank)]
        for index in (0, 2, 4):
            model[index].requires_grad_(index in layers)
        (sum(nn.functional.mse_loss(model(x), y) for x, y in parts) / len(parts)).backward()
        optimizer.step()
        optimizer.zero_grad()
    of_layer = {index: sum(p.numel() for p in model[index].parameters()) for index in (0, 2, 4)}
    # After windows 1 and 3 at least half is frozen, and goes; after window 4 it is 24 of 94.
    layers = [(0, 2, 4), (0,), (0,), (4,), (2, 4), (2, 4), (0, 2, 4)]
    for by_options in zip(*results, strict=True):
        assert_same([values for values, _, _ in by_options])
        for values, elements, names in by_options:
            assert relative_error(values, parameters(model)) < RTOL[torch.float64]
            assert elements == [sum(map(of_layer.get, held)) for held in layers]
            assert names == sorted(name for name, _ in model.named_parameters())


def test_frozen_on_one_rank(found):
    """Nobody gives anything back, and what the others train is trained."""
    results = of(found, frozen_on_one_rank)
    assert_same([values for values, _ in results])
    for values, elements in results:
        assert elements >= sum(value.numel() for value in values)
        assert not any(map(torch.equal, values, parameters(mlp(torch.float64))))


def test_mixed_dtypes(found):
    """Every buffer is reduced, each in its dtype."""
    results = of(found, mixed_dtypes)
    grads, values = results[0]
    size = len(results)
    mean = (size + 1) / 2
    torch.testing.assert_close(grads[0], values[2].sum(0)[:, None].expand(5, 5) * mean, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(grads[3], torch.ones(3, dtype=torch.float64))
    assert_same([result[0] for result in results])


def test_removed(found):
    """Flags and hooks are as before, and gradients are averaged again."""
    results = of(found, removed)
    for flags, grads, hooks in results:
        assert flags == (False, False)
        assert hooks == 0
        assert all(map(torch.equal, grads, results[0][1]))


@pytest.mark.parametrize(
    ("case", "kind", "text"),
    [
        ("nothing said", "RuntimeError", "process_group=False if this rank is alone"),
        ("kind", "TypeError", "False or None, got '"),
        ("alone", "ValueError", "pass its .module"),
        ("other group", "ValueError", "leave it out"),
        ("wrapped", "ValueError", "pass that module itself"),
        ("inside", "ValueError", "'0' is a DistributedDataParallel module inside"),
        ("alike", "RuntimeError", "rank 0 has 'weight' (2, 2) torch.float32, rank 1 has 'weight' (3, 2)"),
        ("options", "RuntimeError", "rank 0 has overflow=None, rank 1 has overflow='window'"),
        ("hook", "ValueError", "use comm_dtype=, or for LocalSGD pass and call its .module"),
        ("ignored", "ValueError", "'0.weight' is one that DistributedDataParallel was told to ignore"),
        ("divisor", "RuntimeError", "by rank it is [1.0, 2.0"),
        ("after", "RuntimeError", "acc.zero_()"),
        ("clipping", "RuntimeError", "max_norm must be the same on all ranks; by rank it is 1.5, none"),
        ("limit", "RuntimeError", "by rank it is 1.0, 2.0"),
        ("unfrozen", "RuntimeError", "on some ranks only"),
    ],
)
def test_errors(found, case, kind, text):
    """Every rank says what is wrong."""
    for result in of(found, errors):
        assert result[case][0] == kind
        assert text in result[case][1]


def test_not_a_member(found):
    """A rank outside of the group."""
    for result in of(found, errors)[1:]:
        assert result["member"][0] == "ValueError"
        assert "not a member" in result["member"][1]
