"""memory_limit is a limit, from the first micro-batch on; and impossible ones are errors that name both numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import accumkernels as ak
from accumkernels.splitting.memory import CountedMemory, LiveBytes
from tests.support.models import batch, grads_of, relative_error
from tests.support.splitting import room, truth

pytestmark = pytest.mark.usefixtures("one_thread")

SINGLE = 2e-6  # of float32, in which sums are
PARAMETERS = 4 * (5 * 800 + 800 + 800 * 3 + 3)  # bytes; as many are gradients and sums, and twice as many AdamW's state
SAMPLE = 9_650  # bytes of one more sample: three tensors of 800 activations, and little else
ONE = PARAMETERS + 5_000 + SAMPLE  # bytes of a micro-batch of one, with its gradients


def wide():
    """A model whose activations take more than everything else."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 800), nn.Tanh(), nn.Linear(800, 3))


class Run:
    """Windows of 64 samples under a limit, beside an independent count of what is alive."""

    def __init__(self, nbytes, **options):
        self.model = wide()
        self.x, self.y = batch(64)
        self.acc = ak.FusedAccumulator(self.model, memory_limit=room(PARAMETERS + nbytes), **options)
        self.optimizer = torch.optim.AdamW(self.acc.parameters())
        self.limit = self.acc.engine.options.memory_limit

    def window(self, **split):
        """The report, the most bytes alive, and the error of the gradient."""
        live = LiveBytes()
        live.add(CountedMemory(torch.device("cpu"), None)._tensors())
        with live:
            report = self.acc.backward_batch((self.x, self.y), self.loss, **split)
        _, grads = truth(self.model, lambda twin: mse_loss(twin(self.x.double()), self.y.double()))
        self.acc.finalize(self.optimizer)
        error = relative_error(grads_of(self.acc), grads)
        self.optimizer.step()
        self.acc.zero_()
        return report, live.peak, error

    def loss(self, part):
        """A mean over samples."""
        return mse_loss(self.model(part[0]), part[1])


@pytest.mark.parametrize("options", [{}, {"release": "backward", "bucket_bytes": 64}], ids=["auto", "buckets"])
@pytest.mark.parametrize("fit", [2, 40])
@pytest.mark.native
def test_never_exceeded(options, fit):
    """Not in the first window either, nor by the optimizer's state, which is there from the second on."""
    run = Run(2 * PARAMETERS + ONE + fit * SAMPLE, **options)
    for window in range(4):
        report, peak, error = run.window()
        assert peak <= run.limit
        assert error < SINGLE
        assert sum(report.sizes) == 64
        assert max(report.sizes) <= fit + 8  # room for gradients, too, where buckets hold none
        assert report.out_of_memory == 0 or window < 2
        assert report.peak_bytes is None or report.peak_bytes <= run.limit
    assert "micro-batches of backward_batch: cost" in repr(run.acc)


@pytest.mark.parametrize("split", [{"micro_batch": 64}, {"budget": 64}], ids=str)
def test_holds_for_a_budget_too(split):
    """What fitted in the first window does not fit beside the optimizer's state, and is split then."""
    run = Run(ONE + 63 * SAMPLE + PARAMETERS)
    first, peak, _ = run.window(**split)
    assert first.sizes == [64] and peak <= run.limit
    second, peak, error = run.window(**split)
    assert len(second.sizes) > 1 and peak <= run.limit
    assert error < SINGLE


class Transient(nn.Module):
    """Needs more memory in forward than autograd keeps."""

    def forward(self, x):
        """Return the input."""
        with torch.no_grad():
            x.repeat_interleave(20, 1).sum()
        return x


def test_holds_for_samples_that_are_asked():
    """Those whose losses are compared do not fit at once: also later, where what is known to fit is not measured."""
    run = Run(3 * PARAMETERS + ONE + 20 * SAMPLE)
    run.model.insert(2, Transient())
    asked = []
    run.model.register_forward_pre_hook(lambda module, args: asked.append(len(args[0])))
    for _ in range(3):
        report, peak, error = run.window(micro_batch=1)
        assert peak <= run.limit
        assert error < SINGLE
        assert report.sizes == [1] * 64
    assert max(asked[64:]) > 1


def test_below_what_is_alive():
    """Both numbers are named; nothing has run, and nothing is learnt from it."""
    run = Run(1_000_000)
    held = torch.zeros(2**20)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        run.window()
    assert "memory_limit is" in str(raised.value) and "tensors of 4." in str(raised.value)
    assert run.acc.micro_batches == 0
    del held, raised
    assert run.window()[0].sizes == [64]


def test_below_what_one_sample_takes():
    """The limit, what was alive and what the sample takes are named; a larger limit goes on."""
    run = Run(ONE // 2)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        run.window()
    taken = r"one sample of cost 1, which takes [\d.]+ KiB or more, does not fit in memory of [\d.]+ KiB, "
    raised.match(taken + r"of which [\d.]+ KiB were taken before it: out of the memory limit: .* KiB of tensors alive")
    assert run.acc.micro_batches == 0


@pytest.mark.native
def test_one_sample_whose_gradients_do_not_fit_together():
    """It runs again, and its gradients are added in buckets while its backward goes on."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(100, 100) for _ in range(8)))
    gradients = 4 * sum(p.numel() for p in model.parameters())  # bytes; as many are sums
    options = {"release": "backward", "bucket_bytes": gradients // 16, "fuse_weight_gradients": False}
    acc = ak.FusedAccumulator(model, memory_limit=room(gradients + gradients // 2), **options)
    x, y = torch.randn(1, 100), torch.randn(1, 100)
    report = acc.backward_batch((x, y), lambda part: mse_loss(model(part[0]), part[1]))
    assert (report.sizes, report.out_of_memory) == ([1], 1)
    assert report.peak_bytes <= acc.engine.options.memory_limit
    _, grads = truth(model, lambda twin: mse_loss(twin(x.double()), y.double()))
    acc.finalize()
    assert relative_error(grads_of(acc), grads) < SINGLE


# ---- the count that keeps it


class Ran(LiveBytes):
    """Notes what ran."""

    def __init__(self, limit):
        super().__init__(limit)
        self.ops = []

    def call(self, func, args, kwargs):
        self.ops.append(func.overloadpacket.__name__)
        return super().call(func, args, kwargs)


def test_refused_before_it_runs():
    """A tensor that would be too large is never made, whoever asks for it; views and ops in place go on."""
    x = torch.ones(100, 10)
    with Ran(20_000) as live:
        live.add([x])
        for too_large in (
            lambda: torch.zeros(10_000),
            lambda: x @ torch.ones(10, 1).expand(10, 100),
            lambda: x.repeat(5, 1),
            lambda: torch.randn(100, 60),
            lambda: nn.functional.one_hot(torch.arange(60), 60),
        ):
            live.ops.clear()
            with pytest.raises(torch.OutOfMemoryError, match="out of the memory limit: .* KiB of tensors alive"):
                too_large()
            assert not {"zeros", "mm", "repeat", "randn", "scatter_"} & set(live.ops)
        assert x.mul_(2).expand(5, 100, 10).sum(2)[0, 0] == 20


def test_random_numbers_are_not_used_up():
    """By finding out how large the result would be."""
    torch.manual_seed(0)
    expected = torch.nn.functional.dropout(torch.ones(100)), torch.rand(3)
    torch.manual_seed(0)
    with LiveBytes(10_000):
        found = torch.nn.functional.dropout(torch.ones(100)), torch.rand(3)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


class Sub(torch.Tensor):
    """Of a library's: what its ops return is not known before."""


def test_of_unknown_size():
    """An op whose result depends on values, or takes another class, runs, and what it has made counts."""
    x = torch.ones(1000)
    for make in (x.nonzero, x.as_subclass(Sub).exp):
        with LiveBytes(7_000) as live:
            live.add([x])
            with pytest.raises(torch.OutOfMemoryError):
                make()


def test_in_place_beyond_the_limit():
    """Its work is done, and it must not seem to have failed."""
    x = torch.zeros(1000)
    live = LiveBytes(4_000)
    live.add([x])
    with live:
        x.add_(1)
    assert x.sum() == 1000
