"""Products and embeddings that add to a segment, when they do, and what an overflow in them does to a window."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import accumkernels as ak
from accumkernels.ops import native, products
from accumkernels.ops.products import add_rows
from tests.support.backends import same_bits
from tests.support.made import weight_gradients
from tests.support.models import fused_elements, relative_error

pytestmark = pytest.mark.usefixtures("one_thread")

# The last one is more than a block of the library's own kernel in each direction.
SHAPES = [(1, 1, 1), (5, 7, 3), (33, 64, 17), (64, 33, 30), (16, 48, 0), (53, 1100, 301)]
OWN = [dtype for dtype in (torch.float32, torch.bfloat16) if native.multiplies(dtype)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
WAYS = ["own", "MKL", "neither"]


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    """What multiplies: processors have AVX2, AVX512_BF16 or neither, and torch's wheels for x86 have MKL."""
    if request.param == "own" and not OWN:
        pytest.skip("this processor has no AVX2")
    if request.param == "MKL" and products.mkl_gemm(torch.bfloat16) is None:
        pytest.skip("this build of torch exports no MKL")
    set_way(monkeypatch, request.param)
    return request.param


def set_way(monkeypatch, way):
    """As if the machine had that alone."""
    monkeypatch.setattr(native, "multiplies", lambda dtype: way == "own" and dtype in OWN)
    monkeypatch.setattr(products, "_mkl_widens", lambda: way == "own" and torch.bfloat16 in OWN)
    if way != "MKL":
        monkeypatch.setattr(products, "mkl_gemm", lambda dtype: None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_adds_the_product(shape, dtype, way):
    """alpha * grad.T @ input on top, or in the place, of what was there; operands that are no contiguous rows too."""
    rows, columns, tokens = shape
    generator = torch.Generator().manual_seed(0)
    grad = torch.randn(rows, tokens, generator=generator).to(dtype).t()
    input = torch.randn(tokens, 2 * columns, generator=generator).to(dtype)[:, ::2]
    start = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    for beta in (0.0, 1.0):
        view = start.clone().to(torch.promote_types(dtype, torch.float32))
        if beta == 0:
            view.fill_(float("nan"))  # what is overwritten is never read
        add = products.choose(view, dtype, tokens) or products.widened
        few = tokens <= products._FEW_TOKENS or torch.bfloat16 in OWN
        assert (add is products.native) == (way == "own" and dtype in OWN and few)
        add(view, grad, input, 0.375, beta)
        expected = 0.375 * grad.double().t() @ input.double() + (start if beta else 0)
        if expected.any():
            # Products and sums in fp32, whatever the operands: a 16-bit result would be off by 2**-9.
            assert relative_error([view], [expected]) < (1e-12 if dtype == torch.float64 else 1e-6)
        else:
            assert not view.any()


@pytest.mark.parametrize("dtype", OWN)
@pytest.mark.parametrize("shape", [(65, 130, 9), (97, 1030, 257)])
def test_own_kernel_writes_the_view_alone(shape, dtype):
    """Tiles that the view ends in go no further; what is not finite stays, and does not spread to other rows."""
    rows, columns, tokens = shape
    memory = torch.full((rows * columns + 200,), 7.0)
    view = memory[100:-100].view(rows, columns)
    grad, input = torch.randn(tokens, rows).to(dtype), torch.randn(tokens, columns).to(dtype)
    grad[3, 5] = float("inf")
    input[4, 6] = float("nan")
    native.add_product_(view, grad, input, 1.0, 1.0)
    assert (memory[:100] == 7).all() and (memory[-100:] == 7).all()
    bad = ~view.isfinite()
    assert bad[5].all() and bad[:, 6].all() and bad.sum() == rows + columns - 1


@pytest.mark.parametrize("dtype", OWN)
def test_own_kernel_repeats_whatever_the_threads(dtype):
    """Bit for bit: the order of sums is that of tokens."""
    grad, input = torch.randn(300, 100).to(dtype), torch.randn(300, 1100).to(dtype)
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        view = torch.ones(100, 1100)
        native.add_product_(view, grad, input, 0.3, 1.0)
        found.append(view)
    assert same_bits(found[0], found[1]) and same_bits(found[0], found[2])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("processor", ["AVX512_BF16", "AMX", "neither"])
def test_the_choice_is_by_shape_and_dtype(way, processor, monkeypatch):
    """With many tokens what only torch multiplies fast is faster as an ordinary gradient: fp16 with AMX, bf16."""
    mkl_widens = products._mkl_widens.__wrapped__  # not what it said of this machine
    set_way(monkeypatch, way)
    monkeypatch.setattr(native, "multiplies", lambda dtype: way == "own")
    monkeypatch.setattr(products, "_mkl_widens", mkl_widens)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: processor != "neither")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: processor == "AMX")
    view = torch.zeros(8, 8)
    many, few = (products.choose(view, torch.bfloat16, tokens) for tokens in (4096, 8))
    if processor == "AVX512_BF16":
        assert many is few is (products.native if way == "own" else None)
    else:
        assert few is products.mkl
        assert many is (products.mkl if way == "MKL" else None)
    many, few = (products.choose(view, torch.float32, tokens) for tokens in (4096, 8))
    assert few is (products.native if way == "own" else products.same_dtype)
    assert many is (products.native if way == "own" and processor == "AVX512_BF16" else products.same_dtype)
    for instructions, most in (("avx512", 64), ("avx2", 32)):
        monkeypatch.setattr(native, "cpu_instruction_set", lambda found=instructions: found)
        for tokens in (most, most + 1):
            own = way == "own" and (tokens == most or processor == "AVX512_BF16")
            assert products.choose(view, torch.float32, tokens) is (products.native if own else products.same_dtype)
    assert products.choose(view, torch.float16, 4096) is (None if processor == "AMX" else products.mkl)
    assert products.choose(view, torch.float16, 8) is products.mkl
    assert products.choose(view.t()[:4], torch.float32, 8) is None
    assert products.choose(view, torch.float64, 8) is None
    assert products.choose(torch.zeros(0, 8), torch.float32, 8) is None


# ---- rows of embeddings


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


# ---- when weights are fused

LARGE = 512  # a weight of LARGE * LARGE elements is fused by default
INF = float("inf")


def net(width=LARGE, dtype=torch.float32):
    """A large embedding, a large linear layer and a small one."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(width + 1, width), nn.Linear(width, width), nn.Linear(width, 3)).to(dtype)


def loss_of(model, factor=1.0, autocast=None):
    """A scalar that `factor` multiplies, so that gradients are as large as it."""
    with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        return (model(torch.tensor([[1, 2, 2, 5]])).float() * factor).sum()


def ones():
    """An input whose gradient is wanted, without which a product does not save its weight, and is not fused."""
    return torch.ones(2, 4, requires_grad=True)


EMBEDDING, LINEAR, SMALL = (LARGE + 1) * LARGE, LARGE * LARGE, 3 * LARGE
RULES = [  # options, elements that are fused in the second micro-batch
    ({}, EMBEDDING + LINEAR),  # two large weights are more than the default's bucket
    ({"bucket_bytes": 2**22}, 0),  # whole micro-batches: a model below a bucket's size is as it always was
    ({"release": "auto", "bucket_bytes": 1000}, EMBEDDING + LINEAR),
    ({"release": "backward"}, EMBEDDING + LINEAR),
    ({"release": "microbatch"}, 0),
    ({"release": "microbatch", "fuse_weight_gradients": True}, EMBEDDING + LINEAR + SMALL),
    ({"release": "backward", "fuse_weight_gradients": True}, EMBEDDING + LINEAR + SMALL),
    ({"release": "backward", "fuse_weight_gradients": False}, 0),
    ({"release": "backward", "overflow": None}, EMBEDDING + LINEAR),
    ({"fuse_weight_gradients": True, "overflow": "microbatch", "release": "microbatch"}, 0),
    ({"fuse_weight_gradients": True, "overflow": "raise", "release": "microbatch"}, 0),
    ({"fuse_weight_gradients": True, "noise_scale": True, "release": "microbatch"}, 0),
    ({"release": "backward", "scaler": 2.0**3}, EMBEDDING),
    ({"release": "backward", "scaler": 2.0**3, "fuse_weight_gradients": True}, EMBEDDING + LINEAR + SMALL),
]


@pytest.mark.parametrize(("options", "elements"), RULES, ids=str)
def test_what_is_fused(options, elements):
    """By default large weights, where gradients are added while backward runs, and no GradScaler decides."""
    options = dict(options)
    if "scaler" in options:
        options["scaler"] = torch.amp.GradScaler("cpu", init_scale=options["scaler"])
    model = net()
    acc = ak.FusedAccumulator(model, **options)
    acc.backward(loss_of(model), weight=2)
    loss = loss_of(model)
    made = weight_gradients(model, lambda: acc.backward(loss, weight=2))
    sizes = {"0.weight": EMBEDDING, "1.weight": LINEAR, "2.weight": SMALL}
    assert sum(sizes.values()) - sum(sizes[name] for name in made) == elements == fused_elements(acc)
    twin = copy.deepcopy(model).double()
    loss_of(twin).backward()
    found = [acc.main_grad(p) / acc.weight for p in model.parameters()]
    assert relative_error(found, [p.grad for p in twin.parameters()]) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("demand", [False, True])
@pytest.mark.native
def test_dtypes(dtype, demand):
    """By default linear weights of bf16 and fp32; fp16 and fp64 only on demand. Embeddings of every dtype."""
    model = net(dtype=dtype)
    acc = ak.FusedAccumulator(model, release="backward", fuse_weight_gradients=demand or "auto")
    acc.backward(loss_of(model, 2**-6))
    linear = LINEAR if demand or dtype == torch.bfloat16 else 0
    assert fused_elements(acc) == EMBEDDING + linear + (SMALL if demand else 0)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(("amx", "fits"), [(True, True), (True, False), (False, True)])
@pytest.mark.native
def test_sums_that_stay_in_a_cache(monkeypatch, amx, fits, autocast):
    """With AMX, bf16 gradients of linear weights are made and added then; not embeddings', fp32, nor on demand."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    options = {"release": "backward"}
    param_dtype, cast = (torch.float32, torch.bfloat16) if autocast else (torch.bfloat16, None)
    model = net(dtype=param_dtype)
    nbytes = sum(b.nbytes for b in ak.FusedAccumulator(net(dtype=param_dtype)).flat_buffers)
    monkeypatch.setattr(products, "last_level_cache", lambda: 4 * nbytes - (0 if fits else 4))
    with ak.FusedAccumulator(model, **options) as acc:
        acc.backward(loss_of(model, autocast=cast))
        assert fused_elements(acc) == EMBEDDING + (0 if amx and fits else LINEAR)
    model = net()
    with ak.FusedAccumulator(model, **options) as acc:
        acc.backward(loss_of(model))
        assert fused_elements(acc) == EMBEDDING + LINEAR
    model = net(dtype=torch.bfloat16)
    with ak.FusedAccumulator(model, fuse_weight_gradients=True, **options) as acc:
        acc.backward(loss_of(model))
        assert fused_elements(acc) == EMBEDDING + LINEAR + SMALL


def test_noise_scale_later():
    """From the window on in which it is measured, micro-batches have gradients of their own."""
    model = net(8)
    acc = ak.FusedAccumulator(model, fuse_weight_gradients=True, release="microbatch")
    acc.noise_scale()
    loss = loss_of(model)
    assert len(weight_gradients(model, lambda: acc.backward(loss))) == 3


@pytest.mark.parametrize("scale", [2.0**4, 3.0])
@pytest.mark.parametrize("changes", [False, True])
def test_weights_and_loss_scales(scale, changes):
    """Fused sums are in the unit of all others, also when the scale changes inside the window."""
    model = net(8)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    acc = ak.FusedAccumulator(model, scaler=scaler, fuse_weight_gradients=True)
    twin = copy.deepcopy(model).double()
    expected = [torch.zeros_like(p) for p in twin.parameters()]
    for step, weight in enumerate((3.0, 0.25, torch.tensor(5.0))):
        acc.backward(loss_of(model, step + 1.0), weight=weight)
        for total, g in zip(
            expected, torch.autograd.grad(loss_of(twin, step + 1.0), list(twin.parameters())), strict=True
        ):
            total += float(weight) * g
        if changes:
            scaler.update(scale * 2)
    assert relative_error([acc.main_grad(p) for p in model.parameters()], expected) < 1e-6


def test_equal_weights_keep_their_bits():
    """A power of two times the sums, and the mean bit for bit."""
    means = []
    for weight in (1.0, 64.0):
        model = net(8)
        acc = ak.FusedAccumulator(model, fuse_weight_gradients=True)
        for step in range(4):
            acc.backward(loss_of(model, step + 0.3), weight=weight)
        acc.finalize(torch.optim.SGD(model.parameters(), lr=0.0))
        means.append([p.grad for p in model.parameters()])
    assert all(map(same_bits, *means))


@pytest.mark.parametrize("where", ["linear", "embedding"])
@pytest.mark.parametrize("ending", ["step", "clipped step", "finalize", "look", "state_dict"])
@pytest.mark.parametrize("scaled", [False, True])
def test_overflow_is_found_at_the_end(where, ending, scaled):
    """In the pass that ends the window: the step is skipped, the scale backs off once, and the report names the weight.

    Only a fused weight's gradient overflows: its layer's output is multiplied by infinity in one micro-batch of three.
    """
    torch.manual_seed(0)
    layer = nn.Linear(4, 5, bias=False) if where == "linear" else nn.Embedding(6, 5)
    model = nn.ModuleDict({"other": nn.Linear(4, 5), "layer": layer})
    before = copy.deepcopy(model.state_dict())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**3) if scaled else None
    acc = ak.FusedAccumulator(model, scaler=scaler, fuse_weight_gradients=True)
    optimizer = torch.optim.AdamW(acc.parameters(), lr=0.1)
    x = ones() if where == "linear" else torch.tensor([1, 3])
    for factor in (1.0, INF, 1.0):
        acc.backward(model["other"](ones()).sum() + (model["layer"](x) * factor).sum())
        assert fused_elements(acc) == 20 + layer.weight.numel()
    if ending == "look":
        assert acc.found_inf == 1
    if ending == "state_dict":
        twin = copy.deepcopy(model)
        state = acc.state_dict()
        acc = ak.FusedAccumulator(twin, scaler=scaler, fuse_weight_gradients=True)
        acc.load_state_dict(state)
        optimizer, model = torch.optim.AdamW(acc.parameters(), lr=0.1), twin
    if ending == "finalize":
        acc.finalize(optimizer)
        assert acc.found_inf == 1
        if scaled:
            scaler.step(optimizer)
            scaler.update()
        acc.zero_()
    else:
        acc.step(optimizer, max_norm=1.0 if ending == "clipped step" else None)
        assert acc.step_was_skipped
    assert acc.overflow_report() == ["layer.weight"]
    assert all(map(same_bits, model.state_dict().values(), before.values()))
    if scaled:
        assert scaler.get_scale() == 4.0
    acc.backward(model["other"](ones()).sum() + model["layer"](x).sum())
    acc.step(optimizer)
    assert not acc.step_was_skipped


def test_the_report_names_all_of_the_window():
    """An ordinary gradient that was not finite in an earlier micro-batch, and a fused one."""
    model = nn.Linear(4, 5)
    acc = ak.FusedAccumulator(model, fuse_weight_gradients=True)
    for factor in (1.0, INF, 1.0):
        acc.backward((model(ones()) * factor).sum())
    acc.step(torch.optim.SGD(model.parameters(), lr=0.1))
    assert acc.overflow_report() == ["weight", "bias"]
    assert acc.step_was_skipped
    acc.backward(model(ones()).sum())  # a window later, neither counts
    acc.step(torch.optim.SGD(model.parameters(), lr=0.1))
    assert not acc.step_was_skipped


def test_an_overflow_that_was_dropped_is_forgotten():
    """With its window; the next one does not touch that layer, whose sum is still there."""
    model = nn.ModuleList([nn.Linear(4, 5), nn.Linear(4, 5)])
    acc = ak.FusedAccumulator(model, fuse_weight_gradients=True)
    acc.backward((model[0](ones()) * INF).sum())
    acc.zero_()
    acc.backward(model[1](ones()).sum())
    acc.step(torch.optim.SGD(model.parameters(), lr=0.1))
    assert not acc.step_was_skipped


def test_overflow_none_looks_at_nothing():
    """As everywhere: found_inf stays 0."""
    model = nn.Linear(4, 5)
    acc = ak.FusedAccumulator(model, overflow=None, fuse_weight_gradients=True)
    acc.backward((model(ones()) * INF).sum())
    assert acc.found_inf == 0
    acc.step(torch.optim.SGD(model.parameters(), lr=0.1))
    assert not acc.step_was_skipped


def test_weight_zero_still_counts_its_overflow():
    """Nothing is fused then: BLAS does not look at what it multiplies by zero."""
    model = nn.Linear(4, 5)
    acc = ak.FusedAccumulator(model, fuse_weight_gradients=True)
    acc.backward(model(ones()).sum())
    acc.backward((model(ones()) * INF).sum(), weight=0)
    assert acc.found_inf == 1


def test_a_sum_in_fp16_that_overflows_is_finite_here():
    """The documented difference of True: an fp16 gradient is never rounded to fp16, so only the sum can overflow."""
    results = {}
    for demand in (False, True):
        model = nn.Linear(8, 8, bias=False)
        with torch.no_grad():
            model.weight.fill_(1.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        acc = ak.FusedAccumulator(model, scaler=scaler, fuse_weight_gradients=demand)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with torch.autocast("cpu", torch.float16):
            y = model(torch.full((32, 8), 16.0, requires_grad=True))
        acc.backward((y.float() * 0.25).sum())
        results[demand] = acc.main_grad(model.weight).clone()
        acc.step(optimizer)
        assert acc.step_was_skipped != demand  # 32 * 16 * 256 is more than fp16 holds
    assert results[True].eq(32 * 16 * 0.25).all()


def test_default_never_changes_what_a_scaler_decides():
    """The same scales as stock's loop, through overflows, with large weights and buckets."""
    decisions = []
    for ours in (False, True):
        model = net()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        acc = ak.FusedAccumulator(model, scaler=scaler, release="backward") if ours else None
        scales = []
        for factor in (1.0, 1.0, 2.0**5, 1.0, 1.0, 1.0):
            for _ in range(2):
                loss = loss_of(model, factor, torch.float16)
                acc.backward(loss) if ours else scaler.scale(loss).backward()
            if ours:
                acc.step(optimizer)
            else:
                for p in model.parameters():
                    p.grad /= 2
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            scales.append(scaler.get_scale())
        decisions.append(scales)
    assert decisions[0] == decisions[1]
    assert len(set(decisions[0])) > 1


def test_arguments():
    """Anything but the four values; a list of parameters will do, since graphs tell what they are used for."""
    with pytest.raises(ValueError, match="fuse_weight_gradients must be 'auto', 'deferred', True or False, got 'yes'"):
        ak.FusedAccumulator(net(2), fuse_weight_gradients="yes")
    model = net(8)
    acc = ak.FusedAccumulator(list(model.parameters()), fuse_weight_gradients=True)
    acc.backward(loss_of(model))
    assert fused_elements(acc) == 9 * 8 + 8 * 8 + 3 * 8


def test_the_report_stays_where_fused_sums_are_finite():
    """Of the last bad micro-batch alone: no product has overflowed that could have been in any of them."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"w": nn.Linear(64, 64, bias=False), "a": nn.Linear(1, 1), "b": nn.Linear(1, 1)})
    acc = ak.FusedAccumulator(model, fuse_weight_gradients=True, release="backward", bucket_bytes=1)
    x = torch.randn(8, 64, requires_grad=True)
    for name in ("a", "b"):
        acc.backward(model["w"](x).square().mean() + (model[name].weight * torch.inf).sum())
    assert acc.overflow_report() == ["b.weight"]
    acc.finalize()
    assert acc.overflow_report() == ["b.weight"]
