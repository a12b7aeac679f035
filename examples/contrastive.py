"""Contrastive training in chunks: two towers learn which caption belongs to which picture, as CLIP does.

    python examples/contrastive.py --out contrastive.png

The loss of a pair depends on all other pairs of the batch, its negatives, so the loss of a chunk is another loss than
that of the batch. The same towers are trained three times: with the whole batch at once, with plain accumulation, where
each chunk has a loss of its own, and with `FusedAccumulator.backward_coupled`, which needs the activations of one chunk
and gets the gradient of the whole batch. The data are synthetic: a hidden vector is seen as a noisy picture, and told
as a caption of words. Accuracy is how often a picture of the test set is nearest to its own caption among all of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

import accumkernels as ak

HIDDEN, PIXELS, WORDS, LEVELS, WIDTH = 12, 48, 12, 16, 96
TEST_PAIRS = 512
EVALUATIONS = 20  # points of a curve
Pairs = tuple[Tensor, Tensor]


class World:
    """Makes pairs: pictures `[n, PIXELS]`, and captions, int64 `[n, WORDS]`."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        fixed = torch.Generator().manual_seed(0)  # the same world whatever the seed of the data
        self._camera = torch.randn(HIDDEN, PIXELS, generator=fixed)
        self._language = torch.randn(HIDDEN, WORDS, generator=fixed)

    def pairs(self, n: int) -> Pairs:
        """Return n pairs that nobody has seen."""
        hidden = torch.randn(n, HIDDEN, generator=self._generator)
        pictures = torch.tanh(hidden @ self._camera) + 0.3 * torch.randn(n, PIXELS, generator=self._generator)
        levels = (torch.sigmoid(hidden @ self._language / 2) * LEVELS).long()
        return pictures, levels + LEVELS * torch.arange(WORDS)


class Towers(nn.Module):
    """A tower for pictures, one for captions, and the temperature of their similarities."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.picture = nn.Sequential(nn.Linear(PIXELS, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.words = nn.EmbeddingBag(WORDS * LEVELS, WIDTH)
        self.caption = nn.Sequential(nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.log_scale = nn.Parameter(torch.tensor(2.0))

    def encode(self, pairs: Pairs) -> Pairs:
        """Return a vector of length 1 for every picture and every caption."""
        pictures, captions = pairs
        return normalize(self.picture(pictures), dim=1), normalize(self.caption(self.words(captions)), dim=1)

    def loss(self, pictures: Tensor, captions: Tensor) -> Tensor:
        """InfoNCE in both directions: in each row of similarities, the pair's own is to be the largest."""
        similarities = self.log_scale.exp() * pictures @ captions.T
        own = torch.arange(len(similarities))
        return (cross_entropy(similarities, own) + cross_entropy(similarities.T, own)) / 2


def chunks(pairs: Pairs, size: int) -> list[Pairs]:
    """Cut a batch into chunks."""
    return list(zip(*(part.split(size) for part in pairs), strict=True))


def whole(acc: ak.FusedAccumulator, towers: Towers, pairs: Pairs, size: int) -> None:
    """Take the gradient of the whole batch, with all of its activations."""
    acc.backward(towers.loss(*towers.encode(pairs)))


def plain(acc: ak.FusedAccumulator, towers: Towers, pairs: Pairs, size: int) -> None:
    """Give each chunk a loss of its own: its pairs have no negatives but those of the chunk."""
    for chunk in chunks(pairs, size):
        acc.backward(towers.loss(*towers.encode(chunk)), weight=len(chunk[0]))


def coupled(acc: ak.FusedAccumulator, towers: Towers, pairs: Pairs, size: int) -> None:
    """Take the gradient of the whole batch, chunk by chunk."""
    acc.backward_coupled(chunks(pairs, size), towers.encode, towers.loss)


Method = Callable[[ak.FusedAccumulator, Towers, Pairs, int], None]
METHODS: dict[str, Method] = {
    "the whole batch": whole,
    "plain accumulation": plain,
    "backward_coupled": coupled,
}


@torch.no_grad()
def accuracy(towers: Towers, pairs: Pairs) -> float:
    """Return the share of pictures that are nearest to their own caption."""
    pictures, captions = towers.encode(pairs)
    return ((pictures @ captions.T).argmax(1) == torch.arange(len(pictures))).double().mean().item()


def train(method: Method, windows: int, batch_size: int, chunk_size: int) -> tuple[Towers, list[tuple[int, float]]]:
    """Train new towers; return them and their accuracy after some of the windows."""
    towers, world, test = Towers(), World(seed=1), World(seed=2).pairs(TEST_PAIRS)
    acc = ak.FusedAccumulator(towers)
    optimizer = torch.optim.AdamW(acc.parameters(), lr=5e-3, fused=True)
    curve = []
    for window in range(1, windows + 1):
        method(acc, towers, world.pairs(batch_size), chunk_size)
        acc.step(optimizer, max_norm=1.0)
        if window % max(1, windows // EVALUATIONS) == 0 or window == windows:
            curve.append((window, accuracy(towers, test)))
    acc.remove()
    return towers, curve


def draw(path: Path, curves: dict[str, list[tuple[int, float]]], batch_size: int, chunk_size: int) -> None:
    """Write the picture, a PNG of 720 x 420 pixels."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.2), dpi=100, layout="constrained")
    axes = figure.subplots()
    styles = ("#999999", 5.0, "-"), ("#0072B2", 1.8, "-"), ("#D55E00", 1.8, (0, (3, 2)))
    for (name, curve), (colour, width, line) in zip(curves.items(), styles, strict=True):
        axes.plot(*zip(*curve, strict=True), color=colour, linewidth=width, linestyle=line, label=name)
    axes.set_xlabel("window (optimizer step)")
    axes.set_ylabel(f"accuracy among {TEST_PAIRS} captions")
    axes.set_title(f"Contrastive training: batch of {batch_size}, in chunks of {chunk_size}")
    axes.set_ylim(0, 1)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, format="png")


def flat(towers: Towers) -> Tensor:
    """Concatenate all parameters."""
    return torch.cat([p.detach().flatten() for p in towers.parameters()])


def main(argv: list[str] | None = None) -> int:
    """Train three times, print a table and draw the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--windows", type=int, default=100, help="optimizer steps (default: 100)")
    parser.add_argument("--batch-size", type=int, default=128, help="pairs in a window (default: 128)")
    parser.add_argument("--chunk-size", type=int, default=8, help="pairs that fit at once (default: 8)")
    parser.add_argument("--out", type=Path, default=Path("contrastive.png"), help="default: contrastive.png")
    arguments = parser.parse_args(argv)
    start, found = flat(Towers()), {}
    for name, method in METHODS.items():
        found[name] = train(method, arguments.windows, arguments.batch_size, arguments.chunk_size)
    truth = flat(found["the whole batch"][0])
    print(f"{'':<20} accuracy   parameters, from those of the whole batch")
    for name, (towers, curve) in found.items():
        distance = (flat(towers) - truth).norm() / (truth - start).norm()
        print(f"{name:<20} {curve[-1][1]:8.1%}   {distance:.1e} of the way it went")
    draw(arguments.out, {name: curve for name, (_, curve) in found.items()}, arguments.batch_size, arguments.chunk_size)
    print(f"{arguments.out} written")
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)  # the towers are small: threads would wait for each other
    raise SystemExit(main())
