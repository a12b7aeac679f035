"""find_batch_size against devices whose limit is known: right, tested, and the same twice."""

from __future__ import annotations

import gc
import logging
import math
import pickle
import time
import weakref

import pytest
import torch
from torch import nn

import accumkernels as ak
from accumkernels.planning.batch_size import largest_that_fits

pytestmark = pytest.mark.usefixtures("one_thread")

LIMITS = (0, 1, 2, 3, 63, 64, 65, 5000, None)
CAP = 6000


class Device(nn.Module):
    """A model on a simulated device: out of memory beyond `limit` samples. Remembers every batch it was given."""

    def __init__(self, limit, norm=None):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.norm = norm or nn.Identity()
        self.limit = limit
        self.log = _log  # a list that a snapshot does not reach

    def forward(self, x):
        """Run, or run out."""
        _log.sizes.append(len(x))
        if self.limit is not None and len(x) > self.limit:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {len(x)} bytes")
        return self.norm(self.layer(x))


class _Log:
    sizes: list[int]


_log = _Log()


@pytest.fixture(autouse=True)
def _empty_log():
    _log.sizes = []


def fit(model, dataset_size=CAP, **kwargs):
    """On random inputs, with the fewest steps."""
    kwargs.setdefault("num_iterations", 2)
    shapes = () if "make_loader" in kwargs or "make_batch" in kwargs else ((2,), (2,))
    return ak.find_batch_size(model, "cpu", *shapes, dataset_size=dataset_size, **kwargs)


def expected(limit, cap, mode, start=1):
    """The contract's answer: None where nothing fits."""
    largest = cap if limit is None else min(limit, cap)
    if largest < start:
        return None
    return largest if mode == "binsearch" else 2 ** int(math.log2(largest))


@pytest.mark.parametrize("mode", ["power", "binsearch"])
@pytest.mark.parametrize("limit", LIMITS)
def test_limits(limit, mode):
    """Right, run before it is answered, nothing above the cap, and the same twice."""
    answer = expected(limit, CAP, mode)
    model = Device(limit)
    if answer is None:
        with pytest.raises(
            RuntimeError, match=r"not even the smallest batch fits on cpu: batch size 1 .* [\d,]+ bytes"
        ):
            fit(model, mode=mode)
        return
    found = fit(model, mode=mode)
    assert found == answer
    assert found.reason == ("oom" if any(not trial.ok for trial in found.tried) else "dataset")
    assert found.reason == "oom" or found == CAP or 2 * found > CAP
    assert max(_log.sizes) <= CAP
    assert [trial.size for trial in found.tried] == list(dict.fromkeys(_log.sizes))
    for size, ok, peak_bytes, samples_per_second in found.tried:
        assert ok == (limit is None or size <= limit)
        assert peak_bytes > 0
        assert (samples_per_second > 0) == ok
        assert _log.sizes.count(size) >= (2 if ok else 1)
    assert (int(found), True) in [trial[:2] for trial in found.tried]
    again = fit(model, mode=mode)
    assert again == found
    assert [trial[:2] for trial in again.tried] == [trial[:2] for trial in found.tried]


@pytest.mark.parametrize("mode", ["power", "binsearch"])
@pytest.mark.parametrize(
    ("limit", "dataset_size", "max_batch_size", "reason"),
    [
        (100, 50, None, "dataset"),
        (100, 50, 20, "max"),
        (100, 20, 50, "dataset"),
        (10, 50, 20, "oom"),
        (None, 1, None, "dataset"),
        (20, 50, 20, "max"),
        (None, 64, 64, "max"),
    ],
)
def test_caps(limit, dataset_size, max_batch_size, reason, mode):
    """The smaller bound is inclusive, is never exceeded, and is named."""
    cap = min(dataset_size, max_batch_size or dataset_size)
    found = fit(Device(limit), dataset_size, max_batch_size=max_batch_size, mode=mode)
    assert found == expected(limit, cap, mode)
    assert max(_log.sizes) <= cap
    assert found.reason == reason


@pytest.mark.parametrize("mode", ["power", "binsearch"])
def test_batchnorm(mode):
    """Starts at 2 where BatchNorm trains, since torch refuses 1; at 1 in evaluation mode."""
    for limit in (2, 3, 9):
        assert fit(Device(limit, nn.BatchNorm1d(2)), mode=mode) == expected(limit, CAP, mode, start=2)
    assert min(_log.sizes) == 2
    with pytest.raises(RuntimeError, match="batch size 2 ran out"):
        fit(Device(1, nn.BatchNorm1d(2)), mode=mode)
    with pytest.raises(ValueError, match=r"a batch of 1 cannot train BatchNorm \('norm' is in training\)"):
        fit(Device(None, nn.BatchNorm1d(2)), max_batch_size=1, mode=mode)
    assert fit(Device(1, nn.BatchNorm1d(2)).eval(), mode=mode) == 1


@pytest.mark.parametrize(
    ("mode", "limit", "answer"), [("power", 50, 32), ("binsearch", 50, 48), ("binsearch", 7, None)]
)
def test_multiple_of(mode, limit, answer):
    """Only multiples are run."""
    if answer is None:
        with pytest.raises(RuntimeError, match="batch size 8 ran out"):
            fit(Device(limit), mode=mode, multiple_of=8)
    else:
        assert fit(Device(limit), mode=mode, multiple_of=8) == answer
    assert all(size % 8 == 0 for size in _log.sizes)
    with pytest.raises(ValueError, match="multiple_of 8 is larger than the largest batch size allowed, 7"):
        fit(Device(None), 7, multiple_of=8)


@pytest.mark.parametrize("step", [1, 3, 8])
def test_search(step):
    """Every limit and cap up to 70, in few trials, none twice, none above the cap."""
    for cap in range(step, 70):
        for limit in range(70):
            asked = []

            def fits(size, asked=asked, limit=limit):
                asked.append(size)
                return size <= limit

            found = largest_that_fits(fits, step, cap, step, "binsearch")
            assert (found or 0) == min(limit, cap) // step * step
            assert len(asked) == len(set(asked)) <= 14
            assert all(size <= cap for size in asked)


def test_nothing_fits_holds_nothing():
    """The error is raised outside of except, and no frame of the failed trial lives on."""
    held = []

    class Activation:
        pass

    def loss_fn(output, target):
        local = Activation()
        held.append(weakref.ref(local))
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(RuntimeError, match="CUDA out of memory") as caught:
        fit(Device(None), loss_fn=loss_fn)
    assert caught.value.__context__ is None
    assert caught.value.__cause__ is None
    assert [reference() for reference in held] == [None]


def test_a_failed_trial_is_freed_before_the_next():
    """Also where the exception is kept by someone, and locals refer to themselves."""
    kept, references, alive = [], [], {}

    class Activation:
        pass

    def loss_fn(output, target):
        alive.setdefault(len(output), sum(reference() is not None for reference in references))
        local = Activation()
        local.itself = local
        references.append(weakref.ref(local))
        if len(output) > 4:
            kept.append(torch.OutOfMemoryError("CUDA out of memory"))
            raise kept[-1]
        return output.square().mean()

    assert fit(Device(None), 16, mode="binsearch", loss_fn=loss_fn) == 4
    assert list(alive) == [1, 2, 4, 8, 6, 5]
    assert (alive[6], alive[5]) == (0, 0)
    assert len(kept) == 3


def test_trials_are_whole_steps():
    """As many as asked for and two at least, each with the optimizer, whose state is there in the second."""
    states = []

    class Watched(torch.optim.Adam):
        def step(self, closure=None):
            states.append(len(self.state))
            return super().step(closure)

    fit(Device(None), dataset_size=1, num_iterations=1, optimizer_fn=Watched)
    assert len(states) >= 2
    assert states[:2] == [0, 2]
    states.clear()
    fit(Device(None), dataset_size=1, num_iterations=7, optimizer_fn=Watched)
    assert len(states) >= 7


def test_make_batch_and_loss():
    """Pairs with a loss function; dicts with `.loss`, with ["loss"], with a 0-d output, with a loss function."""

    class Keywords(nn.Module):
        def __init__(self, form):
            super().__init__()
            self.layer, self.form = nn.Linear(2, 2), form

        def forward(self, x, labels):
            loss = (self.layer(x) - labels).square().mean()
            kinds = {
                "attribute": type("Output", (), {"loss": loss}),
                "key": {"loss": loss},
                "tensor": loss,
                "none": [1],
            }
            return kinds[self.form]

    def make_batch(n):
        return {"x": torch.randn(n, 2), "labels": torch.randn(n, 2)}

    for form in ("attribute", "key", "tensor"):
        assert ak.find_batch_size(Keywords(form), "cpu", None, None, 4, make_batch=make_batch) == 4
    with pytest.raises(TypeError, match="the model's output has no loss .list."):
        ak.find_batch_size(Keywords("none"), "cpu", None, None, 4, make_batch=make_batch)
    seen = []

    def loss_fn(output, batch):
        seen.append(set(batch))
        return output["loss"]

    assert ak.find_batch_size(Keywords("key"), "cpu", None, None, 2, make_batch=make_batch, loss_fn=loss_fn) == 2
    assert seen[0] == {"x", "labels"}
    with pytest.raises(TypeError, match=r"make_batch returns must be \(input, target\) or a dict .* got tensor"):
        ak.find_batch_size(Keywords("key"), "cpu", None, None, 2, make_batch=torch.zeros)


def test_shapes_from_articles():
    """A class count in parentheses is an int."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 10))
    assert ak.find_batch_size(model, torch.device("cpu"), (3, 2, 2), (10), 8, None, 2) == 8


def test_loader():
    """A user's loader is drawn from, and begun again when it ends; a short last batch does not count."""
    data = torch.utils.data.TensorDataset(torch.randn(10, 2), torch.randn(10, 2))
    made = []

    def make_loader(n):
        made.append(n)
        return torch.utils.data.DataLoader(data, batch_size=n)

    found = fit(Device(6), 10, mode="binsearch", make_loader=make_loader)
    assert found == 6
    assert made == [trial.size for trial in found.tried]
    assert set(_log.sizes) == set(made)
    with pytest.raises(ValueError, match="make_batch or make_loader, not both"):
        fit(Device(None), make_loader=make_loader, make_batch=torch.zeros)


@pytest.mark.parametrize(
    ("limit", "mode", "answer"),
    [(None, "power", (8, "dataset")), (None, "binsearch", (10, "dataset")), (9, "binsearch", (9, "oom"))],
)
def test_the_end_of_the_loader_is_that_of_the_data(limit, mode, answer):
    """Sizes that it cannot fill do not fit, as those beyond dataset_size; the largest that fits is the answer."""
    data = torch.utils.data.TensorDataset(torch.randn(10, 2), torch.randn(10, 2))
    loader = lambda n: torch.utils.data.DataLoader(data, batch_size=n)  # noqa: E731
    found = fit(Device(limit), None, mode=mode, make_loader=loader)
    assert (int(found), found.reason) == answer
    assert all(trial.size <= 10 for trial in found.tried)


@pytest.mark.parametrize("batches", [1, 3, 6])
def test_generators(batches):
    """One ends for good: `make_loader` is asked for another, where it was an error, or an end of the data."""
    found = fit(Device(None), 4, make_loader=lambda n: ((torch.randn(n, 2), torch.randn(n, 2)) for _ in range(batches)))
    assert (found, found.reason) == (4, "dataset")


def test_batches_that_ignore_the_size():
    """Are refused, from a loader with more of them, too; other layouts of a batch are not."""
    data = torch.utils.data.TensorDataset(torch.randn(12, 2), torch.randn(12, 2))
    with pytest.raises(ValueError, match=r"make_loader\(8\): the loader's first batch does not have 8 samples"):
        ak.measure_step_costs(
            nn.Linear(2, 2), "cpu", 8, make_loader=lambda n: torch.utils.data.DataLoader(data, batch_size=4)
        )
    with pytest.raises(ValueError, match="the loader's first batch does not have 1 samples"):
        fit(Device(None), make_loader=lambda n: torch.utils.data.DataLoader(data, batch_size=4))
    with pytest.raises(ValueError, match="the loader's first batch does not have 2 samples"):
        fit(Device(None), make_loader=lambda n: torch.utils.data.DataLoader(data, batch_size=1))
    with pytest.raises(ValueError, match=r"make_batch\(8\) returned 4 samples: .* or pass dataset_size"):
        fit(Device(None), make_batch=lambda n: (torch.randn(4, 2), torch.randn(4, 2)))
    for layout in ((lambda n: (3, n, 2)), (lambda n: (5 * n, 2))):
        found = fit(
            Device(None), 8, make_batch=lambda n, layout=layout: (torch.randn(layout(n)), torch.randn(layout(n)))
        )
        assert found == 8


def test_batches_without_samples_to_count():
    """A model may make its samples itself, as many as it is told."""

    class Makes(nn.Linear):
        def forward(self, number):
            return super().forward(torch.ones(number, 2)).square().mean()

    assert ak.find_batch_size(Makes(2, 2), "cpu", max_batch_size=8, make_batch=lambda n: {"number": n}) == 8


@pytest.mark.parametrize("maker", ["make_batch", "make_loader"])
def test_shapes_beside_batches(maker):
    """One of them would be ignored."""
    for shape in ("input_shape", "output_shape"):
        with pytest.raises(ValueError, match=rf"give {maker} or {shape}, not both: got {shape}=\(2,\)"):
            ak.find_batch_size(nn.Linear(2, 2), "cpu", **{maker: lambda n: None, shape: (2,)})


def test_needs_no_shapes_beside_make_batch():
    """Nor a number of samples: 65,536 are the most, or max_batch_size."""
    model = nn.Linear(3, 2)

    def make_batch(n):
        return torch.randn(n, 3), torch.randn(n, 2)

    found = ak.find_batch_size(model, "cpu", make_batch=make_batch, max_batch_size=8, num_iterations=2)
    assert (found, found.reason) == (8, "max")
    found = ak.find_batch_size(model, "cpu", make_batch=make_batch, num_iterations=2)
    assert (found, found.reason) == (2**16, "max")


@pytest.mark.native
def test_memory_limit():
    """On the CPU a budget takes the place of out of memory; the peak of what fits is within it, margin and all."""
    model = nn.Linear(1000, 10)

    def run(**kwargs):
        return ak.find_batch_size(model, "cpu", (1000,), (10,), 4096, mode="binsearch", num_iterations=2, **kwargs)

    found = run(memory_limit=2_000_000)
    assert found.reason == "oom"
    # 10,010 parameters: weights, gradients, two moments; a sample has 1,000 inputs, and 10 each of outputs, targets and
    # the gradients of the loss.
    fixed = 4 * 10_010 * 4
    assert (2_000_000 - fixed) / (4 * 1040) - 20 <= found <= (2_000_000 - fixed) / (4 * 1010)
    assert found.peak_bytes <= 2_000_000
    smaller = run(memory_limit=2_000_000, margin=0.25)
    assert smaller.peak_bytes <= 1_500_000 < run(memory_limit=1_510_000).peak_bytes + 20_000
    assert smaller < found
    sgd = {"optimizer_fn": lambda params: torch.optim.SGD(params, lr=0.1), "memory_limit": "500000 B"}
    fewer = run(**sgd) - run(**sgd, accumulate=2)  # the flat buffer is there beside the gradients
    assert fewer == pytest.approx(40_040 / 4040, abs=2)
    assert run(margin=0.5) == 4096  # of this machine's memory


def test_amp():
    """The model runs under autocast to the dtype given, and not without."""
    dtypes = []

    class Probe(Device):
        def forward(self, x):
            output = super().forward(x)
            dtypes.append(output.dtype)
            return output

    fit(Probe(None), 1, amp_dtype=torch.bfloat16)
    assert set(dtypes) == {torch.bfloat16}
    dtypes.clear()
    fit(Probe(None), 1)
    assert set(dtypes) == {torch.float32}


def test_fastest(monkeypatch):
    """The size with the most samples per second, which need not be the largest."""
    clock = iter(range(10**6))
    now = [0.0]

    def loss_fn(output, target):
        now[0] += 1.0 if len(output) <= 4 else 10.0  # seconds per step
        next(clock)
        return output.square().mean()

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    found = fit(Device(None), 8, loss_fn=loss_fn)
    assert found == 8
    assert found.fastest == 4
    assert {trial.size: trial.samples_per_second for trial in found.tried} == pytest.approx({1: 1, 2: 2, 4: 4, 8: 0.8})


def test_is_an_int():
    """Prints, formats, counts and pickles as one, and says more when asked."""
    found = fit(Device(5), 8)
    assert f"{found} {found:>3} {found * 2}" == "4   4 8"
    assert isinstance(found, int)
    assert repr(found) == "BatchSize(4, reason='oom', 4 sizes tried)"
    copied = pickle.loads(pickle.dumps(found))
    assert (copied, copied.tried, copied.reason, copied.peak_bytes) == (4, found.tried, "oom", found.peak_bytes)
    assert list(range(10))[found] == 4
    assert ak.BatchSize(3).fastest == 3


def test_a_batch_maker_is_enough():
    """With make_batch no shapes are needed, and no limit of samples where a limit of memory is known."""
    made = {"num_iterations": 2, "make_batch": lambda n: (torch.ones(n, 2), torch.ones(n, 2))}
    found = ak.find_batch_size(Device(5), "cpu", memory_limit=2**30, **made)
    assert (int(found), found.reason, [trial.size for trial in found.tried]) == (4, "oom", [1, 2, 4, 8])
    assert int(ak.find_batch_size(Device(None), "cpu", max_batch_size=3, **made)) == 2
    assert int(ak.find_batch_size(Device(5), "cpu", **made)) == 4


def test_log(caplog):
    """One line for each trial."""
    caplog.set_level(logging.INFO, "accumkernels")
    found = fit(Device(3), 8)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == len(found.tried) == 3
    assert messages[0].startswith("accumkernels: batch size 1 fits: peak ")
    assert messages[2] == "accumkernels: batch size 4 does not fit: CUDA out of memory. Tried to allocate 4 bytes"


def test_progress_bar(capsys):
    """On request it is drawn on stderr; without it nothing is."""
    fit(Device(3), 8)
    assert capsys.readouterr() == ("", "")
    fit(Device(3), 8, progress=True)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        ({"dataset_size": 0}, ValueError, "dataset_size must be at least 1, got 0"),
        ({"dataset_size": 2.5}, TypeError, "dataset_size must be an int, got 2.5"),
        ({"max_batch_size": 0}, ValueError, "max_batch_size must be at least 1, got 0"),
        ({"num_iterations": 0}, ValueError, "num_iterations must be at least 1, got 0"),
        ({"mode": "linear"}, ValueError, "mode must be one of 'power', 'binsearch', got 'linear'"),
        ({"margin": 1.0}, ValueError, "margin must be at least 0 and less than 1, got 1.0"),
        ({"margin": "0"}, TypeError, "margin must be a number, got '0'"),
        ({"amp_dtype": "bf16"}, TypeError, "amp_dtype must be a torch.dtype or None, got 'bf16'"),
        ({"loss_fn": 3}, TypeError, "loss_fn must be callable, got 3"),
        ({"optimizer_fn": "Adam"}, TypeError, "optimizer_fn must be callable, got 'Adam'"),
        ({"memory_limit": 0}, ValueError, "memory_limit must be positive, got 0"),
        ({"memory_limit": 8}, ValueError, "memory_limit=8 is less than a mebibyte: add the unit that is meant"),
        ({"accumulate": 0}, ValueError, "accumulate must be at least 1, got 0"),
        ({"device": "gpu"}, ValueError, "device must name a device, got 'gpu'"),
        *(
            ()
            if torch.cuda.is_available()
            else [({"device": "cuda"}, ValueError, "'cuda', but torch finds no usable GPU")]
        ),
        ({"input_shape": "3"}, TypeError, "input_shape must be a tuple of ints, the shape of one sample, got '3'"),
        ({"output_shape": None}, TypeError, "output_shape must be a tuple of ints, the shape of one sample, got None"),
        ({"model": nn.LazyLinear(2)}, ValueError, "parameter 'weight' is lazy: run the model once first"),
        ({"model": nn.Linear(2, 2, device="meta")}, ValueError, "parameter 'weight' is on the meta device"),
        ({"model": nn.Identity()}, ValueError, "model has no trainable parameter"),
        ({"model": len}, TypeError, "model must be a torch.nn.Module, got <built-in function len>"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_wrong_arguments(kwargs, error, match):
    """Named with their value, before anything runs."""
    arguments = {"model": Device(None), "device": "cpu", "input_shape": (2,), "output_shape": (2,), "dataset_size": 8}
    with pytest.raises(error, match=match):
        ak.find_batch_size(**{**arguments, **kwargs})
    assert _log.sizes == []


def test_an_error_that_is_being_handled_keeps_its_traceback():
    """After a step that ran out of memory, the search for a size may end in re-raising that error."""

    def make_batch(size):
        if size > 2:
            raise torch.OutOfMemoryError("planted")
        return torch.randn(size, 2), torch.randn(size, 2)

    model = nn.Linear(2, 2)
    try:
        make_batch(3)
    except torch.OutOfMemoryError as error:
        before = error.__traceback__
        fit(Device(3), 8)
        ak.memory_report(model, torch.optim.SGD(model.parameters()), make_batch, 2)
        assert error.__traceback__ is before is not None


def test_the_collector_is_as_it_was():
    """Nothing stays set aside from garbage collection; what the program itself set aside does."""
    gc.unfreeze()  # what the tests set aside
    assert gc.get_freeze_count() == 0
    fit(Device(3), 8)
    assert gc.get_freeze_count() == 0
    mine = [[] for _ in range(100)]
    gc.freeze()
    try:
        # Not by counting all: others' objects may die by their last reference.
        fit(Device(3), 8)
        assert gc.get_freeze_count() >= len(mine)
        assert not set(map(id, mine)) & set(map(id, gc.get_objects()))
    finally:
        gc.freeze()  # as the tests have it
