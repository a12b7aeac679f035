"""What is around windows whose sums are in host memory: states, weights and scales, refusals, misuse, threads."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import signal
import subprocess
import sys
import threading
import weakref

import pytest
import torch
from torch import nn

from accumkernels import FusedAccumulator, find_batch_size, memory_report
from accumkernels.offload import host, sink
from tests import simulated_device as sim
from tests.examples.test_planning import load
from tests.support.doc_blocks import ROOT, run_page
from tests.support.models import Lookahead
from tests.support.offloaded import Net, Twins, assert_same, waiting

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def mlp(dtype=BF16, seed=0, width=16):
    """A model on the device."""
    torch.manual_seed(seed)
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(4)]).to("sim:0", dtype)


def build(model, optimizer=torch.optim.AdamW, **options):
    """Its accumulator with small buckets, and an optimizer of the masters."""
    acc = FusedAccumulator(model, cpu_offload=True, bucket_bytes=600, **options)
    return acc, optimizer(acc.parameters())


def batch(number, dtype=BF16, width=16):
    """Always the same."""
    return torch.randn(3, width, generator=torch.Generator().manual_seed(number)).to("sim:0", dtype)


def loss_of(model, number):
    """The loss of a batch."""
    return model(batch(number, model[0].weight.dtype)).float().square().mean()


# ---- states


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_resume_inside_a_window(dtype):
    """A state saved after any micro-batch has all that was submitted, and a new process goes on bit for bit."""
    model = mlp(dtype)
    acc, optimizer = build(model)
    for number in range(8):
        acc.backward(loss_of(model, number), weight=number + 1.0)
        if number == 5:
            file = io.BytesIO()
            torch.save({"acc": acc.state_dict(), "model": model.state_dict(), "opt": optimizer.state_dict()}, file)
        if number % 4 == 3:
            acc.step(optimizer)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again = mlp(dtype, seed=1)
    acc, optimizer = build(again)
    again.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["opt"])
    acc.load_state_dict(saved["acc"])
    assert acc.micro_batches == 2
    for number in (6, 7):
        acc.backward(loss_of(again, number), weight=number + 1.0)
    acc.step(optimizer)
    for p, q in zip(again.parameters(), model.parameters(), strict=True):
        assert_same(p, q, "a weight")


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_a_run_moves_between_cards(dtype):
    """The state is the usual one: it moves to a card with room for everything, and back."""
    model = mlp(dtype)
    acc, optimizer = build(model)
    acc.backward(loss_of(model, 0))
    acc.step(optimizer)
    acc.backward(loss_of(model, 1))
    state, of_optimizer = acc.state_dict(), optimizer.state_dict()
    larger = mlp(dtype, seed=1).cpu()
    larger.load_state_dict({key: value.cpu() for key, value in model.state_dict().items()})
    other = FusedAccumulator(larger, master_weights=True)
    its = torch.optim.AdamW(other.parameters())
    its.load_state_dict(copy.deepcopy(of_optimizer))  # which would share its tensors
    other.load_state_dict(state)
    for mine, theirs in zip(acc.parameters(), other.parameters(), strict=True):
        assert_same(mine, theirs, "a master")
    back = mlp(dtype, seed=2)
    again, optimizer_again = build(back)
    back.load_state_dict(model.state_dict())
    optimizer_again.load_state_dict(copy.deepcopy(its.state_dict()))
    again.load_state_dict(other.state_dict())
    for one in ((acc, optimizer), (again, optimizer_again)):
        one[0].step(one[1])
    for p, q in zip(back.parameters(), model.parameters(), strict=True):
        assert_same(p, q, "a weight")


def test_edits_of_the_model():
    """What the loop writes to the weights is taken over into the masters, as without offload."""
    model = mlp()
    acc, optimizer = build(model, lambda params: torch.optim.SGD(params, lr=0.0))
    with torch.no_grad():
        model[0].weight[0].fill_(3.0)
    acc.backward(loss_of(model, 0))
    acc.step(optimizer)
    assert next(acc.parameters())[0].eq(3).all()
    assert model[0].weight[0].eq(3).all().item()
    model[0].weight.data.fill_(5.0)
    acc.refresh_masters()
    assert next(acc.parameters()).eq(5).all()


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_updates_that_no_hook_shows(dtype):
    """An update by hand, and a wrapper that moves weights after the step inside: the model has the masters' values."""
    model = mlp(dtype)
    acc, optimizer = build(model)
    outer = Lookahead(optimizer)
    for number, form in enumerate(("step", "long", "by hand", "step")):
        before = [p.detach().cpu() for p in model.parameters()]
        acc.backward(loss_of(model, number))
        if form == "step":
            acc.step(outer)
        elif form == "long":
            acc.finalize(outer)
            outer.step()
            acc.zero_()
        else:
            acc.finalize()
            with torch.no_grad():
                for master in acc.parameters():
                    master.data.sub_(master.grad, alpha=0.5)
            acc.zero_()
        for p, master, old in zip(model.parameters(), acc.parameters(), before, strict=True):
            assert_same(p, master.detach().to(dtype), "a weight")
            assert not torch.equal(p.detach().cpu(), old)


def test_sharpness_aware_minimization():
    """docs/swapping.md's, which climbs from gradients on the host: the steps of torch's big batch in float64."""
    page = run_page(ROOT / "docs" / "swapping.md")
    model = mlp(FP32)
    start, truth = (copy.deepcopy(model).to("cpu", torch.float64) for _ in range(2))
    acc = FusedAccumulator(model, cpu_offload=True)
    optimizer, stock = (torch.optim.SGD(p, lr=0.1) for p in (acc.parameters(), truth.parameters()))
    mse, rho = nn.functional.mse_loss, 0.5
    for number in range(2):
        x, y = batch(number, FP32), batch(number + 9, FP32)
        page["sam_step"](model, acc, optimizer, [(x[:2], y[:2]), (x[2:], y[2:])], rho)
        x, y = x.cpu().double(), y.cpu().double()
        grads = torch.autograd.grad(mse(truth(x), y), list(truth.parameters()))
        norm = torch.cat([g.flatten() for g in grads]).norm()
        climbed = {name: p + g * rho / norm for (name, p), g in zip(truth.named_parameters(), grads, strict=True)}
        stock.zero_grad()
        mse(torch.func.functional_call(truth, climbed, (x,)), y).backward()
        stock.step()
    moved, expected = (
        torch.cat([(p.cpu() - q).flatten() for p, q in zip(m.parameters(), start.parameters(), strict=True)])
        for m in (model, truth)
    )
    torch.testing.assert_close(moved, expected, rtol=1e-3, atol=1e-5 * expected.norm().item())


def test_dropped_windows():
    """`zero_` drops what is on its way, and `release_buffers` frees the sums."""
    model = mlp()
    acc, optimizer = build(model)
    for number in range(3):
        acc.backward(loss_of(model, number))
    acc.zero_()
    acc.release_buffers()
    assert acc.flat_buffers == []
    acc.backward(loss_of(model, 7), weight=2.0)
    assert acc.weight.item() == 2.0
    (expected,) = torch.autograd.grad(loss_of(model, 7), model[0].weight)
    assert_same(acc.main_grad(model[0].weight), 2 * expected.cpu().float(), "a sum")


# ---- weights, scales and losses


def test_a_weight_on_the_device():
    """It travels with the gradients, unread; a bad one counts as an overflow."""
    model = mlp()
    acc, optimizer = build(model)
    losses = [loss_of(model, number) for number in range(2)]
    with sim.watch() as seen, waiting() as waits:
        for loss, weight in zip(losses, (2.0, 3.0), strict=True):
            acc.backward(loss, weight=torch.full((), weight, device="sim:0"))
    seen.check()
    assert not waits, waits
    assert acc.weight.item() == 5.0
    acc.backward(loss_of(model, 2), weight=torch.full((), -1.0, device="sim:0"))
    acc.step(optimizer)
    assert acc.step_was_skipped
    assert acc.found_inf.item() == 0.0  # the next window's


def test_metrics_have_the_loss():
    """Losses are averaged on their device, unread; dropped micro-batches do not count."""
    model = mlp(FP16)
    acc, optimizer = build(model, overflow="microbatch")
    losses = []
    for number in range(3):
        losses.append(loss_of(model, number) * (float("inf") if number == 1 else 1.0))
        acc.backward(losses[-1], weight=number + 1.0)
    acc.step(optimizer)
    metrics = acc.metrics()
    expected = (losses[0].item() + 3 * losses[2].item()) / 4
    assert metrics["loss"].item() == pytest.approx(expected, rel=1e-12)
    assert metrics["micro_batches_used"].item() == 2
    assert metrics["offload_wait"] >= 0.0


def test_the_wait_is_that_of_the_last_finished_window(monkeypatch):
    """By a clock that goes on by a second at each look; a window that is dropped does not count."""
    seconds = itertools.count()
    monkeypatch.setattr("accumkernels.window.micro_batch.time.perf_counter", lambda: float(next(seconds)))
    model = mlp()
    acc, optimizer = build(model)
    assert acc.metrics()["offload_wait"] == 0.0
    acc.backward(loss_of(model, 0))
    acc.step(optimizer)
    waited = acc.metrics()["offload_wait"]
    assert waited > 0.0
    acc.backward(loss_of(model, 1))
    acc.zero_()
    assert acc.metrics()["offload_wait"] == waited


def test_the_scale_may_change_inside_a_window():
    """A micro-batch is unscaled by the scale that its loss had."""
    model = mlp(FP16)
    scaler = torch.amp.GradScaler("sim", init_scale=4.0)
    acc, _ = build(model, scaler=scaler)
    acc.backward(loss_of(model, 0))
    scaler.update(16.0)
    acc.backward(loss_of(model, 0))
    (grad,) = torch.autograd.grad(loss_of(model, 0) * 4.0, model[0].weight)
    torch.testing.assert_close(acc.main_grad(model[0].weight), 2 * grad.cpu().float() / 4, rtol=2**-9, atol=2**-20)


def test_a_scaler_lives_on_the_host():
    """From construction on; a loss that it has scaled already is refused, as elsewhere."""
    model = mlp(FP16)
    scaler = torch.amp.GradScaler("sim")
    scaler.scale(torch.ones((), device="sim:0"))
    acc, optimizer = build(model, scaler=scaler)
    assert scaler._scale.is_cpu and scaler._growth_tracker.is_cpu
    with pytest.raises(RuntimeError, match="would be scaled twice"):
        acc.backward(scaler.scale(loss_of(model, 0)))
    loss = loss_of(model, 0)
    scaler.scale(loss).backward()
    acc.accumulate()
    acc.finalize(optimizer)
    scaler.step(optimizer)
    scaler.update()
    acc.zero_()
    assert not acc.step_was_skipped


class Wide(nn.Module):
    """Its parameter's gradient is wider than itself, and another's memory is not in the order of its dimensions."""

    def __init__(self):
        super().__init__()
        self.narrow = nn.Parameter(torch.ones(8, 4))
        self.turned = nn.Parameter(torch.ones(4, 8).t())
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        return self.conv(x).square().sum() + (self.narrow * self.turned * x.sum()).sum()


def test_layouts_and_dtypes():
    """Gradients are ordered on the device, and copied from one dimension to one dimension."""
    torch.manual_seed(0)
    model = Wide().to("sim:0", memory_format=torch.channels_last)
    if hasattr(model.narrow, "grad_dtype"):
        model.narrow = nn.Parameter(model.narrow.detach().to(BF16))
        model.narrow.grad_dtype = None
    acc, optimizer = build(model, release="backward")
    x = torch.randn(2, 3, 5, 5).to("sim:0").contiguous(memory_format=torch.channels_last)
    grads = torch.autograd.grad(model(x), list(model.parameters()))
    with sim.watch() as seen, waiting() as waits:
        model(x).backward()
        model.narrow.grad = None
        acc.accumulate()
    seen.check()
    assert not waits, waits
    for p, grad in zip(model.parameters(), grads, strict=True):
        if p is not model.narrow:
            torch.testing.assert_close(acc.main_grad(p), grad.cpu().float(), rtol=0, atol=0)
    acc.step(optimizer)
    for p, master in zip(model.parameters(), acc.parameters(), strict=True):
        torch.testing.assert_close(p.detach().cpu(), master.detach().to(p.dtype), rtol=0, atol=0)


def test_two_devices_and_the_host():
    """A model over two devices, with parameters of the host beside them."""
    torch.manual_seed(0)
    first, second = nn.Linear(8, 8).to("sim:0", BF16), nn.Linear(8, 8).to("sim:1", BF16)
    bias = nn.Parameter(torch.zeros(8))
    params = [*first.parameters(), *second.parameters(), bias]
    acc = FusedAccumulator(params, cpu_offload=True, bucket_bytes=100, release="backward")
    optimizer = torch.optim.SGD(acc.parameters(), lr=1.0)

    def loss(number):
        h = second(first(batch(number, width=8)).to("sim:1"))
        return (h.float() + bias.to("sim:1")).square().sum()

    grads = [torch.autograd.grad(loss(number), params) for number in range(2)]
    with sim.watch() as seen:
        for number in range(2):
            acc.backward(loss(number))
        acc.step(optimizer)
    seen.check()
    masters = list(acc.parameters())
    assert masters[-1] is bias
    torch.testing.assert_close(bias.detach(), -sum(g[-1] for g in grads) / 2)
    for p, master in zip(params, masters, strict=True):
        assert_same(p, master.to(p.dtype), "a weight")


def test_streams_of_the_user():
    """A forward on a side stream: its gradients are copied, and their memory used again, in order."""
    model = mlp()
    acc, optimizer = build(model)
    side = torch.Stream("sim:0")
    with sim.watch() as seen:
        for number in range(4):
            side.wait_stream(torch.accelerator.current_stream())
            with side:
                loss = loss_of(model, number)
            torch.accelerator.current_stream().wait_stream(side)
            acc.backward(loss)
        acc.step(optimizer)
    seen.check()


# ---- what is refused


class OwnScale(torch.amp.GradScaler):
    """Scales in its own way."""

    def scale(self, outputs):
        return outputs


class Group:
    """Stands in for a process group."""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fuse_weight_gradients": True}, "fuse_weight_gradients=True with cpu_offload=True: .* leave it out"),
        ({"fuse_weight_gradients": "deferred"}, "fuse_weight_gradients='deferred' with cpu_offload=True"),
        ({"scaler": OwnScale("sim")}, "scaler of OwnScale, whose scale.. is not torch's: .* torch.amp.GradScaler"),
        ({"cpu_offload": 1}, "cpu_offload must be a bool, got 1"),
    ],
)
def test_refused_options(options, message):
    """Each with its reason and the way out, and nothing is left behind."""
    model = mlp()
    with pytest.raises((TypeError, ValueError), match=message):
        FusedAccumulator(model, **{"cpu_offload": True, **options})
    FusedAccumulator(model, cpu_offload=True).remove()


def test_refused_models(monkeypatch):
    """A model on the CPU; ranks, shards and stages."""
    with pytest.raises(ValueError, match="with a model on the CPU, .* pass master_weights=True"):
        FusedAccumulator(nn.Linear(2, 2), cpu_offload=True)
    named = [type("Entry", (), {"param": p, "name": n})() for n, p in mlp().named_parameters()]
    with pytest.raises(ValueError, match="with a process group .* use FSDP2: its CPUOffloadPolicy"):
        host.check_parameters(named, Group(), is_stage=False)
    with pytest.raises(ValueError, match="with the stages of a pipeline"):
        host.check_parameters(named, None, is_stage=True)
    monkeypatch.setattr(host, "is_dtensor", lambda param: True)
    with pytest.raises(ValueError, match="with FSDP2: its CPUOffloadPolicy"):
        host.check_parameters(named, None, is_stage=False)


def test_too_little_memory(monkeypatch):
    """A machine without room for sums and masters says so, with both numbers, before the system ends the process."""
    model = mlp()
    needed = sum(p.numel() for p in model.parameters()) * (4 + 4 + 2)
    assert host.host_bytes(list(model.parameters())) == needed
    monkeypatch.setattr(host, "available_bytes", lambda: needed - 1)
    with pytest.raises(RuntimeError, match=rf"{needed:,} bytes.*{needed - 1:,} bytes"):
        FusedAccumulator(model, cpu_offload=True)
    monkeypatch.setattr(host, "available_bytes", lambda: needed)
    FusedAccumulator(model, cpu_offload=True)


def test_available_memory(tmp_path, monkeypatch):
    """The smaller of what the machine has, and what a container's limit leaves."""
    machine = host.available_bytes()
    assert machine > 2**20
    for name, text in (("max", "3000000"), ("current", "2500000"), ("stat", "anon 5\ninactive_file 1000\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    monkeypatch.setattr(host, "_CGROUPS", tmp_path)
    assert host.available_bytes() == 501_000
    (tmp_path / "memory.max").write_text("max\n")
    assert host.available_bytes() > 2**20


def test_an_optimizer_over_the_model():
    """It would train nothing, and is refused by name."""
    model = mlp()
    acc, _ = build(model)
    acc.backward(loss_of(model, 0))
    with pytest.raises(RuntimeError, match="no optimizer named .* owns '3.bias'|owns '0.weight'.*acc.parameters"):
        acc.step(torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_step_inside_a_window(monkeypatch):
    """It is refused however late the worker is."""
    model = mlp()
    acc, optimizer = build(model)
    acc.backward(loss_of(model, 0))
    with pytest.raises(RuntimeError, match="step.. inside a window: the gradients of 1 micro-batches"):
        optimizer.step()
    acc.step(optimizer)


def test_no_memory_to_pin(monkeypatch, caplog):
    """Then memory is ordinary, which is said once; the sums are right."""
    real = torch.empty

    def empty(*args, **kwargs):
        if kwargs.get("pin_memory"):
            raise RuntimeError("cannot lock\nmore")
        return real(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", empty)
    model = mlp()
    acc, optimizer = build(model)
    acc.backward(loss_of(model, 0))
    (expected,) = torch.autograd.grad(loss_of(model, 0), model[0].weight)
    assert_same(acc.main_grad(model[0].weight), expected.cpu().float(), "a sum")
    acc.step(optimizer)
    (said,) = [r.getMessage() for r in caplog.records]
    assert said.startswith("accumkernels: cpu_offload: host memory cannot be pinned (cannot lock): copies are slower")


@pytest.mark.parametrize("sizes", [[1, 2, 3], [512] * 7, [2**20 + 1, 5, 3 * 2**19], [0, 4], [3000, 10, 10, 5000]])
def test_pieces_of_pinned_memory(sizes, monkeypatch):
    """Slots do not overlap, are aligned, and powers of two waste less than the largest slot."""
    made = []

    def pinned(self, nbytes):
        made.append(torch.empty(nbytes, dtype=torch.uint8))
        return made[-1]

    monkeypatch.setattr(host.Slots, "pinned", pinned)
    found = list(host.Slots()._memory(sizes))
    assert [len(memory) for memory in found] == sizes
    ranges = sorted((m.data_ptr(), m.data_ptr() + len(m)) for m in found if len(m))
    assert all(end <= start for (_, end), (start, _) in zip(ranges, ranges[1:], strict=False))
    assert all(memory.storage_offset() % 512 == 0 for memory in found)
    total = sum(len(piece) for piece in made)
    assert all(len(piece) & (len(piece) - 1) == 0 for piece in made)
    assert total <= sum(-(-size // 512) * 512 for size in sizes) + 2 * max(sizes) + 512


# ---- threads


def workers():
    """The threads of all accumulators."""
    return [thread for thread in threading.enumerate() if thread.name == "accumkernels-offload"]


def test_the_worker_ends():
    """With `remove`, and with an accumulator that is freed, which the thread does not keep alive."""
    gc.collect()  # of other tests
    before = len(workers())
    model = mlp()
    acc, optimizer = build(model)
    acc.backward(loss_of(model, 0))
    assert len(workers()) == before + 1
    acc.step(optimizer)
    acc.remove()
    assert len(workers()) == before
    acc, optimizer = build(model)
    acc.backward(loss_of(model, 0))
    runner = weakref.ref(acc.engine.runner)
    del acc, optimizer
    gc.collect()
    assert runner() is None
    assert len(workers()) == before


# ---- planning


def test_reports():
    """Measured on the device: no sums and no state, two buckets and a gradient at most, and what the host takes."""
    model = mlp(width=64)
    optimizer = torch.optim.Adam(model.parameters())
    state = [p.detach().cpu().clone() for p in model.parameters()]
    found = memory_report(
        model, optimizer, lambda n: (torch.randn(n, 64, dtype=BF16), torch.randn(n, 64, dtype=BF16)), 2,
        accumulate=2, cpu_offload=True,
    )  # fmt: skip
    count = sum(p.numel() for p in model.parameters())
    assert (found.accumulators, found.optimizer) == (0, 0)
    assert found.gradients <= 2 * count
    assert found.host == pytest.approx(count * (4 + 4 + 2 + 8), abs=100)
    assert f"{found.host:,}" in str(found)
    assert optimizer.state == {}
    assert {id(p) for p in optimizer.param_groups[0]["params"]} == {id(p) for p in model.parameters()}
    for p, before in zip(model.parameters(), state, strict=True):
        assert_same(p, before, "a weight")


def test_find_batch_size():
    """Trials train with sums in host memory, which do not count against the device's limit."""
    model = mlp(FP32, width=64)
    weights = sum(p.nbytes for p in model.parameters())
    limit = 3 * weights + 100_000  # weights, gradients, and not the 3 more of sums and state
    options = {"input_shape": 64, "output_shape": 64, "dataset_size": 8, "memory_limit": f"{limit} B", "accumulate": 2}
    found = find_batch_size(model, "sim:0", cpu_offload=True, **options)
    assert found == 8
    with pytest.raises(RuntimeError, match="not even the smallest batch fits"):
        find_batch_size(model, "sim:0", **options)


def test_backward_batch():
    """Batches are split where memory runs out, and nothing is lost; the limit is the device's."""
    model = mlp(width=32)
    acc, optimizer = build(model, memory_limit=2**20)
    x = torch.cat([batch(n, width=32) for n in range(8)])
    sim.fail_after(0, 60)
    try:
        report = acc.backward_batch(x, lambda part: model(part).float().square().mean(), micro_batch=8)
    finally:
        sim.fail_after(0, -1)
    assert sum(report.sizes) == 24
    expected = torch.autograd.grad(model(x).float().square().mean() * 24, model[0].weight)[0]
    torch.testing.assert_close(acc.main_grad(model[0].weight), expected.cpu().float(), rtol=0.05, atol=0.05)
    acc.step(optimizer)


def test_backward_batch_after_a_dropped_micro_batch(monkeypatch):
    """Its loss is that of what it has added, also where the worker drops the one before it only later."""
    model = mlp(FP32)
    acc, _ = build(model, overflow="microbatch")
    wait = sink.HostBucket.wait
    monkeypatch.setattr(sink.HostBucket, "wait", lambda bucket: (threading.Event().wait(0.1), wait(bucket)))
    x = torch.cat([batch(n, FP32) for n in range(2)])
    for infinite in (False, True):  # its loss is finite, its gradients are not
        loss = loss_of(model, 2)
        loss.register_hook(lambda grad, infinite=infinite: grad * (float("inf") if infinite else 1.0))
        acc.backward(loss, weight=3)
    report = acc.backward_batch(x, lambda part: model(part).square().mean())
    with torch.no_grad():
        torch.testing.assert_close(report.loss.cpu(), model(x).square().mean().cpu().double(), rtol=1e-6, atol=0)
    assert acc.weight == 3 + len(x)


def test_twins_are_told_apart():
    """The comparison itself sees one bit."""
    twins = Twins(BF16)
    twins.window(1)
    with torch.no_grad():
        next(iter(twins.acc.parameters())).view(torch.int32)[0, 0] ^= 1
    with pytest.raises(AssertionError, match="a master"):
        twins.check()
    assert isinstance(twins.model, Net)


def test_the_doctor():
    """It says how much host memory there is, and whether it can be pinned."""
    from accumkernels import doctor

    (line,) = [line for line in doctor.examine()["memory"] if line.startswith("host memory")]
    assert line.endswith("GiB available, which can be pinned")


def test_the_example(capsys):
    """examples/one_card.py trains on the simulated device, from the loss of a guess among 256 bytes on."""
    example = load("one_card")
    size = "--layers 1 --width 64 --tokens 16 --micro-batches 2 --windows 3 --lr 0.001"
    windows = example.main(["--simulated", *size.split()])
    assert [window.loss for window in windows] == [pytest.approx(5.55, abs=0.3)] * 3
    assert all(window.tokens_per_second > 0 < window.peak_bytes and window.offload_wait >= 0 for window in windows)
    assert "s waited for the host" in capsys.readouterr().out


@pytest.mark.skipif(not hasattr(torch.accelerator, "Graph"), reason="this torch captures graphs of CUDA alone")
def test_a_capture_is_refused():
    """A replay would copy gradients that nobody adds; the window is as it was."""
    model = mlp()
    acc, optimizer = build(model)
    acc.backward(loss_of(model, 0))
    x, before = batch(1), acc.flat_buffers[0].clone()
    stream = torch.Stream("sim:0")
    stream.wait_stream(torch.accelerator.current_stream())
    with pytest.raises(RuntimeError, match="inside the capture of a graph"), stream, torch.accelerator.Graph():
        acc.backward(model(x).float().square().mean())
    assert_same(acc.flat_buffers[0], before, "the sums")


def test_layers_that_are_frozen_again():
    """They give their sums back, keep their masters, and train on when they are unfrozen."""
    model = mlp()
    acc, optimizer = build(model)
    acc.backward(loss_of(model, 0))
    acc.step(optimizer)
    model[:3].requires_grad_(False)
    acc.release_buffers()
    acc.backward(loss_of(model, 1))
    assert sum(buffer.numel() for buffer in acc.flat_buffers) < 400
    acc.step(optimizer)
    model.requires_grad_(True)
    acc.backward(loss_of(model, 2))
    acc.step(optimizer)
    for p, master in zip(model.parameters(), acc.parameters(), strict=True):
        assert_same(p, master.to(BF16), "a weight")


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_layers(use_reentrant):
    """A layer that a reentrant checkpoint runs twice has two gradients, of which the second has memory of its own."""
    model = mlp()
    acc, _ = build(model, release="backward")

    def loss(x):
        for _ in range(2):
            x = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=use_reentrant)
        return x.float().square().mean()

    x = batch(0).requires_grad_()
    with sim.watch() as seen:
        acc.backward(loss(x))
        found = acc.main_grad(model[0].weight).clone()
    seen.check()
    exact = mlp(torch.float64)
    with torch.no_grad():
        for p, q in zip(exact.parameters(), model.parameters(), strict=True):
            p.copy_(q)
    h = x.detach().double()
    exact(exact(h)).square().mean().backward()
    torch.testing.assert_close(found.double(), exact[0].weight.grad.cpu(), rtol=0.05, atol=1e-3)  # bf16


def test_killed_inside_a_window(tmp_path):
    """SIGKILL while gradients are on their way: from the last state on, the run is that of one that was not killed."""
    command = [sys.executable, "-m", "tests.support.offload_resume"]
    folders = [tmp_path / name for name in ("whole", "killed")]
    runs = [("whole", 11), ("killed", 7, "kill"), ("killed", 11)]
    for folder in folders:
        folder.mkdir()
    codes = [subprocess.run([*command, str(tmp_path / name), *map(str, rest)]).returncode for name, *rest in runs]
    assert codes == [0, -signal.SIGKILL, 0]
    whole, killed = (torch.load(folder / "state.pt", weights_only=True) for folder in folders)
    assert whole["done"] == killed["done"] == 11
    for key in ("sums", "masters"):
        for name, value in whole["acc"][key].items():
            assert_same(killed["acc"][key][name], value, name)
    for name, value in whole["model"].items():
        assert_same(killed["model"][name], value, name)
