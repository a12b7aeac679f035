"""The training loops that benchmarks compare, as data: what a user would write with each, and the models."""

from __future__ import annotations

import abc
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import accumkernels as ak
from accumkernels.demo.gpt import GPT

MAX_NORM = 1.0
Batch = tuple[Tensor, Tensor]


class Size(NamedTuple):
    """A model, and the micro-batches that it is trained with."""

    vocabulary: int
    width: int
    depth: int
    heads: int
    length: int  # tokens of a sample
    samples: int  # of a micro-batch

    def model(self) -> GPT:
        """A new model."""
        return GPT(*self[:5])

    @property
    def parameters(self) -> int:
        """Of the model."""
        with torch.device("meta"):
            return sum(p.numel() for p in self.model().parameters())

    @property
    def tokens(self) -> int:
        """Of a micro-batch."""
        return self.samples * self.length


SIZES = {
    "gpt2": Size(50257, 768, 12, 12, 1024, 8),
    "large": Size(256, 768, 4, 12, 64, 1),  # 29M parameters
    "medium": Size(256, 384, 6, 6, 128, 4),  # 11M
    "little": Size(256, 384, 2, 6, 128, 4),  # 3.7M
    "small": Size(256, 128, 2, 4, 128, 8),  # 0.4M
    "tiny": Size(64, 32, 1, 2, 16, 2),
}


class Loop(abc.ABC):
    """A model with its optimizer, trained in bf16 or fp16 under autocast, or in fp32; fp16 with a GradScaler.

    Args:
        model: fp32, becomes the loop's own.
        dtype: Of autocast; fp32: none.
        low_precision: Keep the model's parameters in `dtype`.
        scale_loss: Use a GradScaler; None: for fp16, since bf16 has the range of fp32.
    """

    def __init__(
        self, model: nn.Module, dtype: torch.dtype, low_precision: bool = False, scale_loss: bool | None = None
    ) -> None:
        self.model = model.to(dtype) if low_precision else model
        self.device, self.dtype = next(model.parameters()).device, dtype
        enabled = dtype == torch.float16 if scale_loss is None else scale_loss
        self.scaler = torch.amp.GradScaler(self.device.type, init_scale=2.0**12, enabled=enabled)

    def _adamw(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=1e-4, fused=True)

    def loss(self, batch: Batch) -> Tensor:
        """Mean loss of a micro-batch."""
        with torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32):
            return self.model(*batch)

    @abc.abstractmethod
    def window(self, batches: list[Batch]) -> None:
        """One optimizer step."""

    def ways(self) -> dict[str, float]:
        """Shares of the model's elements: `fused` and taken `in_16_bits`; nothing where no accumulator is."""
        return {}


class Stock(Loop):
    """fp32 parameters, `loss / K`, gradients added up in `.grad`."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, scale_loss: bool | None = None) -> None:
        super().__init__(model, dtype, scale_loss=scale_loss)
        self.optimizer = self._adamw(self.model.parameters())

    def window(self, batches: list[Batch]) -> None:
        """The usual recipe."""
        for batch in batches:
            self.scaler.scale(self.loss(batch) / len(batches)).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


class GradDtype(Loop):
    """16-bit parameters with `grad_dtype=torch.float32`, and fp32 masters kept by hand, as AdamW wants them."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__(model, dtype, low_precision=True)
        self.params = list(self.model.parameters())
        self.masters = [nn.Parameter(param.detach().float()) for param in self.params]
        for param in self.params:
            param.grad_dtype = torch.float32
        self.optimizer = self._adamw(self.masters)

    def window(self, batches: list[Batch]) -> None:
        """As stock, on the masters."""
        for batch in batches:
            self.scaler.scale(self.loss(batch) / len(batches)).backward()
        for param, master in zip(self.params, self.masters, strict=True):
            master.grad, param.grad = param.grad, None
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.masters, MAX_NORM)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(self.params, self.masters)


class Fused(Loop):
    """FusedAccumulator with some of its options."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, scale_loss: bool | None = None, **options: Any) -> None:
        super().__init__(model, dtype, bool(options.get("master_weights")), scale_loss)
        self.accumulator = ak.FusedAccumulator(self.model, scaler=self.scaler, **options)
        self.optimizer = self._adamw(self.accumulator.parameters())

    def window(self, batches: list[Batch]) -> None:
        """The short form."""
        for batch in batches:
            self.accumulator.backward(self.loss(batch))
        self.accumulator.step(self.optimizer, max_norm=MAX_NORM)

    def ways(self) -> dict[str, float]:
        """As the accumulator counts them in its last backward."""
        found = re.findall(r"(\d[\d,]*) (fused|taken in 16 bits)", repr(self.accumulator))
        counts = {way: int(number.replace(",", "")) for number, way in found}
        total = sum(p.numel() for p in self.model.parameters())
        ways = {"fused": "fused", "in_16_bits": "taken in 16 bits"}
        return {column: counts.get(way, 0) / total for column, way in ways.items()}


class Method(NamedTuple):
    """A loop and its options."""

    name: str
    loop: Callable[..., Loop]
    options: dict[str, object]


STOCK = "stock accumulation"
METHODS = (
    Method(STOCK, Stock, {}),
    Method("grad_dtype=float32, 16-bit model", GradDtype, {}),
    Method("FusedAccumulator, defaults", Fused, {}),
    Method("FusedAccumulator, fuse_weight_gradients=False", Fused, {"fuse_weight_gradients": False}),
    Method('FusedAccumulator, release="microbatch"', Fused, {"release": "microbatch"}),
    Method('FusedAccumulator, release="backward"', Fused, {"release": "backward"}),
    Method(
        'FusedAccumulator, release="backward", not fused',
        Fused,
        {"release": "backward", "fuse_weight_gradients": False},
    ),
    Method('FusedAccumulator, release="backward", 64 MiB', Fused, {"release": "backward", "bucket_bytes": 64 * 2**20}),
    Method("FusedAccumulator, fused weight gradients", Fused, {"fuse_weight_gradients": True}),
    Method("FusedAccumulator, masters", Fused, {"release": "microbatch", "master_weights": True}),
    Method('FusedAccumulator, masters, release="backward"', Fused, {"master_weights": True, "release": "backward"}),
)


def build(
    method: Method, model: Callable[[], nn.Module], dtype: torch.dtype, device: torch.device, compiled: bool = False
) -> Loop:
    """A method's loop on a new model, the same for all; `compiled`: by torch.compile."""
    torch.manual_seed(0)
    with torch.device(device):
        built = model()
    if compiled:
        built.compile()
    return method.loop(built, dtype, **method.options)


def batches(size: Size, micro_batches: int, device: torch.device, seed: int = 1) -> list[Batch]:
    """Random tokens: what they are makes no difference to the time."""
    generator = torch.Generator(device).manual_seed(seed)
    shape = (size.samples, size.length)
    return [
        tuple(torch.randint(size.vocabulary, shape, device=device, generator=generator) for _ in range(2))  # type: ignore[misc]
        for _ in range(micro_batches)
    ]
