"""A model on a device whose sums are offloaded, and its truth: stock gradients, added up on the CPU."""

from __future__ import annotations

import copy
import random
from contextlib import contextmanager, nullcontext

import torch
from torch import nn

from accumkernels import FusedAccumulator
from tests import simulated_device as sim

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CASES = {  # options of `Twins`
    "bf16": {"dtype": BF16},
    "fp32": {"dtype": FP32, "optimizer": "foreach Adam"},
    "fp64": {"dtype": torch.float64, "optimizer": "SGD"},
    "fp16, scaled": {"dtype": FP16, "scaled": True},
    "fp16, scaled, dropped": {"dtype": FP16, "scaled": True, "overflow": "microbatch", "optimizer": "SGD"},
    "autocast": {"dtype": FP32, "amp": BF16, "optimizer": "Adafactor"},
    "autocast, scaled": {"dtype": FP32, "amp": FP16, "scaled": True},
    "whole micro-batches": {"dtype": BF16, "release": "microbatch", "noise_scale": True, "optimizer": "Adafactor"},
    "unchecked": {"dtype": BF16, "overflow": None},
}


class Net(nn.Module):
    """Has all that windows meet: tied, frozen and unused parameters, norms, a convolution's weight in channels last."""

    def __init__(self, width: int = 16, words: int = 32):
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.mixed = nn.Linear(width, 3 * width)
        self.norm = nn.LayerNorm(3 * width)
        self.frozen = nn.Linear(3 * width, width).requires_grad_(False)
        self.conv = nn.Conv1d(width, width, 3, padding=1)
        self.unused = nn.Linear(width, width)
        self.head = nn.Linear(width, words, bias=False)
        self.tie()

    def tie(self):
        """Tie the embeddings, which a move to a device unties."""
        self.head.weight = self.embedding.weight
        return self

    def forward(self, tokens, skip=False):
        h = self.frozen(self.norm(torch.tanh(self.mixed(self.embedding(tokens)))))
        h = self.conv(h.transpose(1, 2)).transpose(1, 2)
        if skip:  # another set of parameters in some micro-batches
            h = h + self.unused(h)
        return self.head(h)


OPTIMIZERS = {
    "fused AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "foreach Adam": lambda params: torch.optim.Adam(params, lr=1e-2, foreach=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-2),
}


class Twins:
    """Trains both on the same batches, window by window.

    Args:
        dtype: Of the parameters.
        optimizer: A key of OPTIMIZERS.
        amp: Of autocast.
        scaled: Whether there are GradScalers.
        seed: Of everything random.
        make: Makes the model.
        device: Where it is trained; waits and races are looked for on the simulated one.
        **options: Of both accumulators.
    """

    def __init__(
        self, dtype, optimizer="fused AdamW", amp=None, scaled=False, seed=0, make=Net, device="sim:0", **options
    ):
        torch.manual_seed(seed)
        self.device = torch.device(device)
        self.random = random.Random(seed)
        self.amp, self.scaled = amp, scaled
        truth = make().to(dtype)
        self.model = copy.deepcopy(truth).to(self.device).tie()
        self.stock, self.truth = copy.deepcopy(self.model), truth
        self.scaler = torch.amp.GradScaler(self.device.type, init_scale=2.0**10, growth_interval=3) if scaled else None
        self.other = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3) if scaled else None
        options = {"bucket_bytes": 1000, **options}
        self.acc = FusedAccumulator(self.model, scaler=self.scaler, cpu_offload=True, **options)
        self.expected = FusedAccumulator(truth, scaler=self.other, master_weights=True, **options)
        self.optimizer = OPTIMIZERS[optimizer](list(self.acc.parameters()))
        self.its = OPTIMIZERS[optimizer](list(self.expected.parameters()))
        self.waits: list[tuple[str, str]] = []

    def loss(self, model, tokens, skip, factor=1.0):
        with torch.autocast(self.device.type, dtype=self.amp) if self.amp else nullcontext():
            out = model(tokens, skip)
        return nn.functional.cross_entropy(out.float().flatten(0, 1), tokens.flatten()) * factor

    def batches(self, count, overflows=0.0):
        """Make the micro-batches of a window: tokens on both devices, whether it skips, and a factor of its loss."""
        made = []
        for _ in range(count):
            tokens = torch.randint(32, (self.random.randint(1, 4), self.random.randint(2, 9)))
            factor = 1e30 if self.random.random() < overflows else 1.0
            made.append((tokens, tokens.to(self.device, non_blocking=True), self.random.random() < 0.3, factor))
        return made

    def train(self, batches):
        """Run the window's micro-batches offloaded. Nothing else happens on the device, and the host may not wait."""
        for _, tokens, skip, factor in batches:
            with waiting() if self.device.type == "sim" else nullcontext([]) as waits:
                self.acc.backward(self.loss(self.model, tokens, skip, factor), float(len(tokens)))
            self.waits += waits

    def train_truth(self, batches):
        """Add stock torch's gradients of the same micro-batches on the CPU."""
        for _, tokens, skip, factor in batches:
            loss = self.loss(self.stock, tokens, skip, factor)
            if self.other is not None:
                self.other.scale(torch.zeros(()))
                loss = loss * self.other._scale.to(self.device)
            loss.backward()
            for mine, theirs in zip(self.truth.parameters(), self.stock.parameters(), strict=True):
                mine.grad, theirs.grad = None if theirs.grad is None else theirs.grad.cpu(), None
            self.expected.accumulate(float(len(tokens)))

    def window(self, count, overflows=0.0, max_norm=None, grows=False):
        """Train both for a window, and compare all that they hold.

        Args:
            count: Micro-batches.
            overflows: How probably one of them overflows.
            max_norm: Of `step`.
            grows: Whether parameters were unfrozen, whose values are copied to the host once.
        """
        batches = self.batches(count, overflows)
        simulated = self.device.type == "sim"
        with sim.watch() if simulated else nullcontext(sim.Seen()) as seen:
            self.train(batches)
            norm = self.acc.step(self.optimizer, max_norm=max_norm)
        seen.check()
        if grows:
            self.waits = [wait for wait in self.waits if not wait[1].endswith("_copy")]
        self.train_truth(batches)
        expected = self.expected.step(self.its, max_norm=max_norm)
        with torch.no_grad():
            for theirs, mine in zip(self.stock.parameters(), self.truth.parameters(), strict=True):
                theirs.copy_(mine)
        if max_norm is not None:
            assert_same(norm, expected, "the norm")
        self.check()

    def check(self):
        """Everything has the same bits, and the host has waited for nothing in forward and backward."""
        assert not self.waits, self.waits
        for (name, p), q in zip(self.model.named_parameters(), self.truth.parameters(), strict=True):
            assert_same(p, q, name)
        for p, q in zip(self.acc.parameters(), self.expected.parameters(), strict=True):
            assert p.device.type == "cpu"
            if not q.requires_grad:
                continue  # a master has no memory before its parameter is unfrozen
            assert_same(p, q, "a master")
            mine, theirs = self.optimizer.state.get(p, {}), self.its.state.get(q, {})
            assert mine.keys() == theirs.keys()
            for key, value in mine.items():
                if isinstance(value, torch.Tensor):
                    assert_same(value, theirs[key], f"state {key}")
        if self.scaler is not None:
            assert self.scaler.state_dict() == self.other.state_dict()
        assert self.acc.step_was_skipped == self.expected.step_was_skipped
        mine, theirs = self.acc.metrics(), self.expected.metrics()
        assert mine.pop("offload_wait") >= 0
        mine.pop("loss"), theirs.pop("loss", None)  # the truth was not told
        assert {k: repr(float(v)) for k, v in mine.items()} == {k: repr(float(v)) for k, v in theirs.items()}


def assert_same(found, expected, name):
    """The same bits; NaNs too."""
    found, expected = found.detach().cpu(), expected.detach().cpu()
    assert found.dtype == expected.dtype and found.shape == expected.shape, name
    same = torch.equal(bits(found), bits(expected))
    assert same, f"{name} differs by {(found.double() - expected.double()).abs().max()}"


@contextmanager
def waiting():
    """Collect the host's waits outside of the worker."""
    waits: list[tuple[str, str]] = []
    seen = sim._watching[-1].waits
    before = len(seen)
    yield waits
    waits += [wait for wait in seen[before:] if not (wait[1].endswith(" wait") and "offload/sink.py" in wait[1])]


def bits(tensor):
    """Its bytes."""
    return tensor.contiguous().flatten().view(torch.uint8)
