"""Train all of a GPT whose state does not fit on the card: fp32 sums, masters and AdamW's moments in host memory.

    python examples/one_card.py --layers 24 --width 2048          # 1.2 billion parameters, on a card of 6 GB
    python examples/one_card.py --layers 32 --width 2560          # 2.5 billion, on 12 GB
    python examples/one_card.py --simulated --layers 2 --width 64 # on the simulated device of the tests

It first predicts what the card and the host will hold, with sums on the card and without. Where there is no
accelerator, that is all it does, unless `--simulated` is given. The model learns to copy: each sequence is random bytes
and the same bytes again, so that the loss falls to half of where it began. See docs/cpu_offload.md.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WORDS = 256


class Block(nn.Module):
    """A transformer's layer, whose activations are computed again in backward."""

    def __init__(self, width: int, heads: int, **made: Any):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width, **made) for _ in range(2)])
        self.mixed, self.out = nn.Linear(width, 3 * width, **made), nn.Linear(width, width, **made)
        self.up, self.down = nn.Linear(width, 4 * width, **made), nn.Linear(4 * width, width, **made)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, tokens, width], as is the result."""
        parts = self.mixed(self.norms[0](x)).unflatten(2, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        x = x + self.out(F.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class GPT(nn.Module):
    """Predicts the next byte. Its parameters are made where they are to be: the host need not hold them in fp32."""

    def __init__(self, layers: int, width: int, tokens: int, device: torch.device | str):
        super().__init__()
        made: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
        self.words, self.places = nn.Embedding(WORDS, width, **made), nn.Embedding(tokens, width, **made)
        self.blocks = nn.ModuleList([Block(width, max(1, width // 64), **made) for _ in range(layers)])
        self.norm = nn.LayerNorm(width, **made)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next byte, [rows, tokens, words]."""
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return F.linear(self.norm(x), self.words.weight)


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean over all bytes."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def make_batch(rows: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Random bytes, and the same again."""
    half = torch.randint(WORDS, (rows, tokens // 2 + 1))
    both = torch.cat([half, half], 1)[:, : tokens + 1]
    return both[:, :-1], both[:, 1:]


def predict(arguments: argparse.Namespace) -> None:
    """Print what the card and the host would hold."""
    import accumkernels as ak

    model = GPT(arguments.layers, arguments.width, arguments.tokens, "meta")
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters in bf16\n")
    for offload in (False, True):
        report = ak.memory_report(
            model,
            torch.optim.AdamW(model.parameters()),
            lambda rows: make_batch(rows, arguments.tokens),
            arguments.rows,
            loss_fn=loss_fn,
            accumulate=2,
            cpu_offload=offload,
            device="cuda",
            fake=True,
        )
        print(f"cpu_offload={offload}: {report}\n")


class Window(NamedTuple):
    """What is known when a window has ended."""

    loss: float  # the mean over all bytes
    tokens_per_second: float
    offload_wait: float  # seconds that the device waited for the host
    peak_bytes: int  # of the card


def train(arguments: argparse.Namespace, device: torch.device, cpu_offload: bool = True) -> list[Window]:
    """Train, and return what there is to say of each window."""
    import accumkernels as ak

    torch.manual_seed(0)
    model = GPT(arguments.layers, arguments.width, arguments.tokens, device)
    state = {"cpu_offload": True} if cpu_offload else {"master_weights": True}
    acc = ak.FusedAccumulator(model, **state)
    optimizer = torch.optim.AdamW(acc.parameters(), lr=arguments.lr, fused=True)
    print(acc)
    windows: list[Window] = []
    torch.accelerator.reset_peak_memory_stats(device)
    for number in range(arguments.windows):
        begin = time.perf_counter()
        for _ in range(arguments.micro_batches):
            x, y = make_batch(arguments.rows, arguments.tokens)
            loss = loss_fn(model(x.to(device)), y.to(device))
            acc.backward(loss, weight=y.numel())
        acc.step(optimizer, max_norm=1.0)
        metrics = acc.metrics()
        loss = float(metrics["loss"])  # waits for the card
        tokens = arguments.micro_batches * arguments.rows * arguments.tokens
        window = Window(
            loss,
            tokens / (time.perf_counter() - begin),
            float(metrics.get("offload_wait", 0.0)),
            torch.accelerator.max_memory_allocated(device),
        )
        windows.append(window)
        print(
            f"window {number + 1}: loss {loss:.3f}, {window.tokens_per_second:,.0f} tokens/s, "
            f"{window.offload_wait:.2f} s waited for the host, peak {window.peak_bytes / 2**30:.2f} GiB on the card"
        )
    acc.remove()
    return windows


def parse(given: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=1024, help="of a sequence")
    parser.add_argument("--rows", type=int, default=2, help="sequences of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=8, help="of a window")
    parser.add_argument("--windows", type=int, default=20)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--simulated", action="store_true", help="train on the simulated device of the tests")
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> list[Window]:
    """Predict, and train if there is anything to train on."""
    arguments = parse(given)
    if arguments.simulated:  # it must be there before the first backward of the process, and so before the library
        from tests import simulated_device

        simulated_device.load()
        return train(arguments, torch.device("sim:0"))
    predict(arguments)
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        print("there is no accelerator: --simulated trains on one in memory, with small --layers and --width")
        return []
    return train(arguments, torch.device(device.type, torch.accelerator.current_device_index()))


if __name__ == "__main__":
    sys.exit(0 if main() is not None else 1)
