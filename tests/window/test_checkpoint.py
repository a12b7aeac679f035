"""state_dict(): a run that is cut anywhere and resumed with new objects ends with the same bits."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.nn.functional import mse_loss

import accumkernels as ak
from tests.support.models import batch, mlp

WINDOWS, MICRO_BATCHES = 4, 3


class Run:
    """Model, scaler, accumulator, optimizer, and everything that happened."""

    def __init__(self, dtype=torch.float32, seed=0, **kwargs):
        self.model = mlp(seed=seed).to(dtype)
        self.dtype = dtype
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        self.acc = ak.FusedAccumulator(self.model, scaler=self.scaler, **kwargs)
        self.optimizer = torch.optim.AdamW(self.acc.parameters(), lr=0.01)
        self.norms = []

    def micro_batch(self, window, step):
        size = 1 + (window + step) % 4
        x, y = batch(size, seed=100 * window + step)
        factor = float("inf") if (window, step) == (1, 1) else 1.0
        weight = torch.tensor(float(size)) if step == 2 else size
        self.acc.backward(mse_loss(self.model(x.to(self.dtype)).float(), y) * factor, weight)

    def step(self):
        self.norms.append(self.acc.step(self.optimizer, max_norm=0.5).item())

    def state(self):
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "acc": self.acc.state_dict(),
        }

    def load(self, state):
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        self.acc.load_state_dict(state["acc"])


def through_a_file(state):
    """As torch.save and torch.load(weights_only=True) hand it back."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


VARIANTS = {
    "window": {},
    "microbatch": {"overflow": "microbatch", "noise_scale": True},
    "backward": {"release": "backward", "bucket_bytes": 100},
    "masters": {"dtype": torch.bfloat16, "master_weights": True},
    "16 bit": {"dtype": torch.bfloat16},
}


@pytest.mark.parametrize("cut", range(WINDOWS * MICRO_BATCHES + 1))
@pytest.mark.parametrize("variant", VARIANTS)
def test_resumed_anywhere(variant, cut):
    """Parameters, masters, scaler, norms, noise scale and counters after a cut behind any micro-batch."""
    whole = Run(**VARIANTS[variant])
    first = Run(**VARIANTS[variant])
    resumed, done = None, 0
    for window in range(WINDOWS):
        for step in range(MICRO_BATCHES):
            run = resumed or first
            whole.micro_batch(window, step)
            if done == cut:
                resumed = run = Run(seed=9, **VARIANTS[variant])
                run.load(through_a_file(first.state()))
                run.norms = list(first.norms)
            run.micro_batch(window, step)
            done += 1
            assert run.acc.micro_batches == whole.acc.micro_batches
            assert run.acc.weight.item() == whole.acc.weight.item()
            assert run.acc.found_inf.item() == whole.acc.found_inf.item()
        whole.step()
        run.step()
        assert run.acc.step_was_skipped == whole.acc.step_was_skipped
        assert run.acc.overflow_report() == whole.acc.overflow_report()
    if cut == done:
        resumed = Run(seed=9, **VARIANTS[variant])
        resumed.load(through_a_file(first.state()))
        resumed.norms = list(first.norms)
    assert str(resumed.norms) == str(whole.norms)  # nan where a window overflowed
    assert resumed.scaler.state_dict() == whole.scaler.state_dict()
    assert repr(resumed.acc) == repr(whole.acc)
    for ours, theirs in zip(
        [*resumed.model.parameters(), *resumed.acc.parameters()],
        [*whole.model.parameters(), *whole.acc.parameters()],
        strict=True,
    ):
        assert torch.equal(ours, theirs)
    if variant == "microbatch":
        assert float(resumed.acc.noise_scale()) == float(whole.acc.noise_scale())
        assert resumed.acc.noise_scale().windows == WINDOWS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_between_finalize_and_zero(dtype):
    """The averages are kept: finalize again, and .grad is what it was; nothing is averaged twice."""
    run = Run(dtype)
    for step in range(2):
        run.micro_batch(0, step)
    run.acc.finalize(run.optimizer)
    expected = [p.grad.clone() for p in run.model.parameters()]
    other = Run(dtype, seed=9)
    other.load(through_a_file(run.state()))
    with pytest.raises(RuntimeError, match="the window was loaded as finalized"):
        other.micro_batch(0, 2)
    other.acc.discard()
    other.acc.finalize(other.optimizer)
    assert all(torch.equal(p.grad, e) for p, e in zip(other.model.parameters(), expected, strict=True))
    assert other.acc.weight.item() == run.acc.weight.item()
    other.acc.zero_()
    other.micro_batch(0, 2)


def test_masters_and_model_agree_after_loading():
    """The masters are exact, the model is rounded from them, whatever it held."""
    run = Run(torch.bfloat16, master_weights=True)
    run.micro_batch(0, 0)
    run.step()
    other = Run(torch.bfloat16, seed=9, master_weights=True)
    other.acc.load_state_dict(run.acc.state_dict())
    for p, master, truth in zip(other.model.parameters(), other.acc.parameters(), run.acc.parameters(), strict=True):
        assert torch.equal(master, truth)
        assert torch.equal(p, truth.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_masters_are_the_values_of_wider_parameters(dtype):
    """A model that is fp32 by now takes them: its own state has been rounded to 16 bit."""
    run = Run(torch.bfloat16, master_weights=True)
    run.micro_batch(0, 0)
    run.step()
    other = Run(dtype, master_weights=True)
    other.model.load_state_dict(run.model.state_dict())
    other.acc.load_state_dict(run.acc.state_dict())
    for p, rounded, master in zip(other.model.parameters(), run.model.parameters(), run.acc.parameters(), strict=True):
        assert torch.equal(p, master.to(dtype))
        assert not torch.equal(p, rounded.to(dtype))


def test_a_snapshot_does_not_follow():
    """Going on after state_dict() changes nothing in it."""
    run = Run(torch.bfloat16, master_weights=True, noise_scale=True)
    run.micro_batch(0, 0)
    state = run.acc.state_dict()
    before = through_a_file(state)
    run.micro_batch(0, 1)
    run.step()
    for key in ("sums", "masters"):
        assert all(torch.equal(state[key][name], tensor) for name, tensor in before[key].items())
    assert torch.equal(state["state"], before["state"])
    assert state["noise_scale"]["squares"] == before["noise_scale"]["squares"]


def test_wrappers_and_order_do_not_count():
    """Saved from a compiled or DDP-named model, loaded into parameters in another order."""
    run = Run()
    run.micro_batch(0, 0)
    state = run.acc.state_dict()
    state["touched"] = [f"module._orig_mod.{name}" for name in state["touched"]]
    for key in ("shapes", "sums"):
        state[key] = {f"module._orig_mod.{name}": value for name, value in state[key].items()}
    other = mlp(seed=9)
    acc = ak.FusedAccumulator(reversed(list(other.named_parameters())))
    acc.load_state_dict(state)
    for p, q in zip(other.parameters(), run.model.parameters(), strict=True):
        assert torch.equal(acc.main_grad(p), run.acc.main_grad(q))


def broken(change):
    """A state_dict with one thing wrong."""
    run = Run(torch.bfloat16, master_weights=True)
    run.micro_batch(0, 0)
    state = run.acc.state_dict()
    change(state)
    return state


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s["shapes"].pop("0.bias"), "missing: 0.bias"),
        (lambda s: s["shapes"].update(extra=[2]), "unexpected: extra"),
        (lambda s: s["shapes"].update({"0.bias": [3]}), r"of another shape: 0.bias \(saved \(3,\), here \(9,\)\)"),
        (lambda s: s["masters"].pop("0.bias"), "without a master, .*: 0.bias"),
        (lambda s: s.pop("sums"), r"this is not the state_dict\(\) of a FusedAccumulator"),
        (lambda s: s.update(version=99), "format 99, this version reads 3"),
        (lambda s: s["window"].pop("micro_batches"), r"\['window'\]\['micro_batches'\] is missing"),
        (lambda s: s.update(serial="7"), r"\['serial'\] is str"),
        (lambda s: s.update(state=torch.zeros(2)), r"'state' has shape \(2,\)"),
        (lambda s: s.update(noise_scale=None), r"\['noise_scale'\] is NoneType"),
        (lambda s: s["touched"].append("nobody"), "sums of unknown names: nobody"),
        (lambda s: s["sums"].update({"0.bias": torch.zeros(3)}), "sums of another shape: 0.bias"),
        (lambda s: s["sums"].update({"0.bias": None}), "sums of another shape: 0.bias"),
        (lambda s: s["masters"].update({"0.bias": torch.zeros(3)}), "masters of another shape: 0.bias"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_fit_is_listed(change, message):
    """And nothing is changed."""
    run = Run(torch.bfloat16, seed=9, master_weights=True)
    run.micro_batch(0, 0)
    sums = [run.acc.main_grad(p).clone() for p in run.model.parameters()]
    with pytest.raises(RuntimeError, match=f"load_state_dict: .*{message}"):
        run.acc.load_state_dict(broken(change))
    assert run.acc.micro_batches == 1
    assert all(torch.equal(run.acc.main_grad(p), s) for p, s in zip(run.model.parameters(), sums, strict=True))


def test_masters_need_master_weights():
    """A state with masters is no use without them."""
    run = Run(torch.bfloat16)
    with pytest.raises(RuntimeError, match="build the accumulator with master_weights=True"):
        run.acc.load_state_dict(broken(lambda s: None))


@pytest.mark.parametrize("finalized", [False, True])
def test_distributed_checkpoint_in_one_process(finalized, tmp_path):
    """It would save entries that it does not load; those of a reduced state are always the same."""
    run = Run()
    run.micro_batch(0, 0)
    if finalized:
        run.acc.finalize(run.optimizer)
    with pytest.raises(RuntimeError, match=r"loads only entries that are there between windows.*reduced=True"):
        dcp.save({"acc": run.acc}, checkpoint_id=tmp_path / "refused", no_dist=True)
    dcp.save({"acc": run.acc.state_dict(reduced=True)}, checkpoint_id=tmp_path / "inside", no_dist=True)
    other = Run(seed=9)
    state = other.acc.state_dict(reduced=True)
    dcp.load({"acc": state}, checkpoint_id=tmp_path / "inside", no_dist=True)
    other.acc.load_state_dict(state)
    for p, q in zip(run.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(run.acc.main_grad(p), other.acc.main_grad(q))
    run.acc.zero_()
    dcp.save({"acc": run.acc}, checkpoint_id=tmp_path / "between", no_dist=True)
    dcp.load({"acc": Run(seed=9).acc}, checkpoint_id=tmp_path / "between", no_dist=True)


def test_gradients_under_way():
    """With release="backward" there is no state between a backward and its accumulate."""
    run = Run(release="backward", bucket_bytes=1)
    x, y = batch(3)
    run.scaler.scale(mse_loss(run.model(x), y)).backward()
    with pytest.raises(RuntimeError, match=r"gradients of a backward that was not counted"):
        run.acc.state_dict()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("overflow", [None, "window", "microbatch", "raise"])
def test_an_overflow_that_was_saved(overflow, fused):
    """Its sums are not finite, and no optimizer gets them, also where overflows are not checked."""
    model = mlp()
    with ak.FusedAccumulator(model) as acc:
        acc.backward(model(batch(3)[0]).square().mean() * float("inf"))
        state = through_a_file(acc.state_dict())
    acc = ak.FusedAccumulator(model, overflow=overflow)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.1, fused=fused)
    acc.load_state_dict(state)
    before = [p.detach().clone() for p in model.parameters()]
    acc.step(optimizer)
    assert acc.step_was_skipped
    assert all(map(torch.equal, model.parameters(), before))
    acc.backward(model(batch(3)[0]).square().mean())
    acc.step(optimizer)
    assert not acc.step_was_skipped


def test_a_dropped_window_stays_dropped():
    """Saved after discard(window=True), it ends without a step where it is loaded."""
    run, resumed = Run(), Run()
    run.micro_batch(0, 0)
    run.acc.discard(window=True)
    resumed.acc.load_state_dict(run.acc.state_dict())
    before = [p.detach().clone() for p in resumed.model.parameters()]
    resumed.acc.step(resumed.optimizer)
    assert resumed.acc.step_was_skipped
    assert all(map(torch.equal, resumed.model.parameters(), before))


def test_a_window_saved_as_finalized_counts_once():
    """In the noise scale, which had it when the state was saved."""
    found = []
    for reload in (False, True):
        model = mlp(torch.float64)
        acc = ak.FusedAccumulator(model, noise_scale=True)
        optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
        for window in range(3):
            for i in range(3):
                x, y = batch(3 + i, torch.float64, seed=10 * window + i)
                acc.backward(mse_loss(model(x), y), weight=len(x))
            acc.finalize(optimizer)
            if reload and window == 1:
                acc.load_state_dict(acc.state_dict())
                acc.finalize(optimizer)
            optimizer.step()
            acc.zero_()
        found.append((float(acc.noise_scale()), acc.noise_scale().windows))
    assert found[1] == found[0]
    assert found[0][1] == 3


def test_a_sum_of_what_was_unfrozen_has_a_place():
    """Before the first micro-batch too, which would have made room for it."""
    run = Run()
    run.micro_batch(0, 0)
    model = mlp()
    model[0].requires_grad_(False)
    acc = ak.FusedAccumulator(model)
    model[0].requires_grad_(True)
    acc.load_state_dict(run.acc.state_dict())
    assert torch.equal(acc.main_grad(model[0].weight), run.acc.main_grad(run.model[0].weight))


def layers(trained):
    """A bf16 model with masters, of which these layers are trained."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)).bfloat16()
    for index, layer in enumerate(model):
        layer.requires_grad_(index in trained)
    acc = ak.FusedAccumulator(model, master_weights=True)
    return model, acc, torch.optim.AdamW(acc.parameters(), lr=0.1)


def train_layers(model, acc, optimizer):
    """One window."""
    x = torch.linspace(-1, 1, 12).view(4, 3).bfloat16()
    acc.backward(model(x).float().square().mean())
    acc.step(optimizer)


@pytest.mark.parametrize("trained", [(0, 1), (1,)])
def test_masters_of_a_layer_that_is_frozen_again(trained):
    """They outlive runs in which the layer is frozen, from the beginning too, until it is unfrozen."""
    model, acc, optimizer = straight = layers((0, 1))
    train_layers(*straight)
    model[0].requires_grad_(False)
    train_layers(*straight)
    for _ in range(2):  # saved by a run that has only loaded them
        resumed = layers(trained)
        for one, other in zip(resumed, (model, acc, optimizer), strict=True):
            one.load_state_dict(copy.deepcopy(other.state_dict()))
        model, acc, optimizer = resumed
        acc.zero_()
    for run in (straight, resumed):
        run[0][0].requires_grad_(True)
        train_layers(*run)
    for p, q in zip(straight[1].parameters(), resumed[1].parameters(), strict=True):
        assert torch.equal(p, q)
    assert not torch.equal(next(iter(acc.parameters())), next(iter(acc.parameters())).bfloat16().float())


def test_loaded_masters_of_a_frozen_layer_give_way():
    """To what is written to its weights meanwhile, and to the model's values by `refresh_masters`."""
    straight = layers((0, 1))
    train_layers(*straight)
    state = straight[1].state_dict()
    for edits in (True, False):
        model, acc, optimizer = layers((1,))
        model.load_state_dict(straight[0].state_dict())
        acc.load_state_dict(state)
        with torch.no_grad():
            if edits:
                model[0].weight[0] = 0.25
            else:
                acc.refresh_masters()
        model[0].requires_grad_(True)
        acc.backward(model(torch.ones(1, 3).bfloat16()).sum())
        master, before = acc.param_groups([{"params": [model[0].weight]}])[0]["params"][0], state["masters"]["0.weight"]
        assert torch.equal(master.bfloat16(), model[0].weight)
        assert torch.equal(master[1:], before[1:]) is edits


def test_unfrozen_since():
    """As the error advises: frozen while the state is loaded, the layer then gets masters of the model's values."""
    trained = layers((1,))
    train_layers(*trained)
    state = trained[1].state_dict()
    model, acc, optimizer = layers((0, 1))
    with pytest.raises(RuntimeError, match=r"without a master, .*freeze them while you load\): 0.weight, 0.bias"):
        acc.load_state_dict(state)
    model[0].requires_grad_(False)
    acc.load_state_dict(state)
    before = model[0].weight.float()
    model[0].requires_grad_(True)
    optimizer.param_groups[0]["lr"] = 0.0
    train_layers(model, acc, optimizer)
    masters = acc.state_dict()["masters"]
    assert torch.equal(masters["0.weight"], before)
    assert torch.equal(masters["1.weight"], state["masters"]["1.weight"])


def test_saved_between_unfreezing_and_training():
    """What is trainable has a master in the state."""
    model, acc, optimizer = layers((1,))
    train_layers(model, acc, optimizer)
    model[0].requires_grad_(True)
    resumed = layers((0, 1))
    for one, other in zip(resumed, (model, acc, optimizer), strict=True):
        one.load_state_dict(copy.deepcopy(other.state_dict()))
    for run in ((model, acc, optimizer), resumed):
        train_layers(*run)
    for p, q in zip(acc.parameters(), resumed[1].parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_sum_of_what_is_frozen_here_has_no_place():
    """It would be lost without a word."""
    run = Run()
    run.micro_batch(0, 0)
    model = mlp()
    model[0].requires_grad_(False)
    acc = ak.FusedAccumulator(model)
    with pytest.raises(RuntimeError, match="frozen here, accumulated when saved: 0.bias, 0.weight"):
        acc.load_state_dict(run.acc.state_dict())


@pytest.mark.parametrize("inside", [False, True])
def test_windows_are_counted_on(inside):
    """A loaded run goes on with the number of the window that was saved, dropped ones not counted."""

    def number(acc):
        return acc.state_dict()["window"]["number"]

    def micro_batch(acc, model):
        acc.backward(model(torch.ones(2, 4)).square().mean())

    def made():
        model = torch.nn.Linear(4, 1)
        return ak.FusedAccumulator(model), model, torch.optim.SGD(model.parameters(), lr=0.01)

    acc, model, optimizer = made()
    for _ in range(3):
        micro_batch(acc, model)
        acc.step(optimizer)
    if inside:
        micro_batch(acc, model)
    assert number(acc) == 3

    resumed, model, optimizer = made()
    resumed.load_state_dict(acc.state_dict())
    assert number(resumed) == 3
    resumed.zero_()
    assert number(resumed) == 3
    micro_batch(resumed, model)
    resumed.step(optimizer)
    assert number(resumed) == 4


def test_micro_batches_are_numbered_on():
    """An overflow after resuming is later than one before it: the report names the new one's parameter."""
    model = mlp()
    x, y = batch(3)

    def overflow(acc, param):
        handle = param.register_hook(lambda grad: grad * float("inf"))
        acc.backward(mse_loss(model(x), y))
        handle.remove()
        return acc.overflow_report()

    with ak.FusedAccumulator(model) as acc:
        for _ in range(2):
            acc.backward(mse_loss(model(x), y))
        assert overflow(acc, model[0].bias) == ["0.bias"]
        state = through_a_file(acc.state_dict())
    with ak.FusedAccumulator(model) as acc:
        acc.load_state_dict(state)
        assert overflow(acc, model[2].bias) == ["2.bias"]
