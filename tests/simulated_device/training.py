"""A small model and windows of unequal micro-batches, trained with one set of options on any device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import accumkernels as ak

ROWS = [3, 1, 2]  # of the micro-batches of a window
TOKENS = 7
WORDS = 13
WIDTH = 16

# What users choose, and what the loop does besides. "amp": autocast's dtype; "scaled": with a GradScaler; "dtype": of
# the parameters; "long": the loop's own calls; "marked": acc.window; "wait": how often a micro-batch may wait.
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "whole": {"release": "microbatch", "fuse_weight_gradients": False},
    "buckets": {"release": "backward", "bucket_bytes": 1, "fuse_weight_gradients": False},
    "fused": {"release": "backward", "bucket_bytes": 1, "fuse_weight_gradients": True},
    "deferred": {"fuse_weight_gradients": "deferred"},
    "unchecked": {"overflow": None},
    "noise scale": {"noise_scale": True, "release": "backward", "bucket_bytes": 1},
    "autocast": {"amp": torch.bfloat16},
    "autocast, fused": {"amp": torch.bfloat16, "release": "backward", "bucket_bytes": 1, "fuse_weight_gradients": True},
    "casts are kept": {"amp": torch.bfloat16, "cache_casts": True},
    "scaled": {"amp": torch.float16, "scaled": True},
    "scaled, in buckets": {"amp": torch.float16, "scaled": True, "release": "backward", "bucket_bytes": 1},
    "scaled, per micro-batch": {"amp": torch.float16, "scaled": True, "overflow": "microbatch"},
    "raises": {"overflow": "raise", "wait": 1},
    "masters": {"dtype": torch.bfloat16, "master_weights": True},
    "no masters": {"dtype": torch.bfloat16},
    "fp64": {"dtype": torch.float64},
    "long form": {"long": True},
    "long form, in buckets": {"long": True, "release": "backward", "bucket_bytes": 1},
    "long form, scaled": {"long": True, "amp": torch.float16, "scaled": True},
    "last is marked": {"marked": True, "release": "backward", "bucket_bytes": 1},
}


class Model(nn.Module):
    """Tokens in, cross entropy out; the embedding is the head, too, and each half may be on a device of its own."""

    def __init__(self, devices: tuple[Any, Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        first, second = devices
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.mix = nn.Linear(WIDTH, 2 * WIDTH)
        self.norm = nn.LayerNorm(2 * WIDTH)
        self.out = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.embedding.to(first)
        self.mix.to(first)
        self.norm.to(second)
        self.out.to(second)
        self.scale = nn.Parameter(torch.ones((), device=first))

    def forward(self, ids: Tensor) -> Tensor:
        x = F.gelu(self.mix(self.embedding(ids)))
        x = self.out(self.norm(x.to(self.norm.weight.device)))
        logits = F.linear(x.to(ids.device), self.embedding.weight) * self.scale
        return F.cross_entropy(logits.flatten(0, 1).float(), ids.roll(1, 1).flatten())


class Training:
    """A model, its accumulator and its optimizer.

    Args:
        device: Of the model; a pair: of its halves.
        name: Of the options.
        stage: A context manager, called with "forward", "backward", "accumulate" or "step" around what these do.
        **options: Further options of the accumulator.
    """

    def __init__(
        self,
        device: Any,
        name: str = "default",
        stage: Callable[[str], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
        **options: Any,
    ) -> None:
        options = {**OPTIONS[name], **options}
        self.devices = tuple(map(torch.device, device if isinstance(device, tuple) else (device, device)))
        self.amp, self.long, self.marked = (options.pop(key, None) for key in ("amp", "long", "marked"))
        self.waits, self.weighs = options.pop("wait", 0), options.get("release") != "backward" or not self.long
        self.stage = stage
        kind = self.devices[0].type
        self.model = Model(self.devices).to(options.pop("dtype", torch.float32))
        self.scaler = torch.amp.GradScaler(kind, init_scale=64.0) if options.pop("scaled", False) else None
        options = {"backend": "reference", **options}
        self.acc = ak.FusedAccumulator(self.model, scaler=self.scaler, **options)
        self.optimizer = torch.optim.AdamW(self.acc.parameters(), lr=0.5, eps=1.0, fused=True)  # smooth

    def batches(self, window: int) -> list[Tensor]:
        """The micro-batches of a window."""
        draw = torch.Generator().manual_seed(window)
        return [torch.randint(WORDS, (rows, TOKENS), generator=draw).to(self.devices[0]) for rows in ROWS]

    def windows(self, count: int, first: int = 0) -> None:
        """Train."""
        for batches in [self.batches(window) for window in range(first, first + count)]:
            self.window(batches)

    def window(self, batches: list[Tensor]) -> None:
        """One window."""
        for ids in self.acc.window(batches) if self.marked else batches:
            self.micro_batch(ids)
        self.step()

    def micro_batch(self, ids: Tensor) -> None:
        """One micro-batch, weighted by its tokens."""
        with self.stage("forward"):
            loss = self.loss(ids)
        if not self.long:
            with self.stage("backward"):
                self.acc.backward(loss, weight=ids.numel())
            return
        with self.stage("backward"):
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        with self.stage("accumulate"):
            self.acc.accumulate(ids.numel() if self.weighs else 1.0)

    def loss(self, ids: Tensor) -> Tensor:
        """The mean over tokens."""
        with torch.autocast(self.devices[0].type, self.amp, enabled=self.amp is not None):
            return self.model(ids)

    def step(self) -> None:
        """The optimizer's, in the short or the long form."""
        with self.stage("step"):
            if not self.long:
                self.acc.step(self.optimizer, max_norm=1.0)
                return
            self.acc.finalize(self.optimizer)
            self.acc.clip_grad_norm_(1.0)
            if self.scaler is None:
                self.optimizer.step()
            else:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            self.acc.zero_()

    def parameters(self) -> list[Tensor]:
        """Copies of the model's, on the CPU in fp64."""
        return [p.detach().cpu().double() for p in self.model.parameters()]


def stock(name: str, windows: int) -> list[Tensor]:
    """The parameters that the same training has on the CPU."""
    training = Training("cpu", name)
    training.windows(windows)
    return training.parameters()


def error(found: list[Tensor], expected: list[Tensor]) -> float:
    """The L2 norm of the difference between parameters, relative to how far training has moved them."""
    start = [p.detach().double() for p in Model(("cpu", "cpu")).parameters()]
    found, expected, start = (torch.cat([p.flatten() for p in parts]) for parts in (found, expected, start))
    return ((found - expected).norm() / (expected - start).norm()).item()


@contextlib.contextmanager
def on(stream: Any) -> Iterator[None]:
    """Work on a stream that waits for the current one, which waits for it afterwards: as torch asks of its users."""
    current = torch.accelerator.current_stream(stream.device)
    stream.wait_stream(current)
    with stream:
        yield
    current.wait_stream(stream)
