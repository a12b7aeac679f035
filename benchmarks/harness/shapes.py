"""Lists of parameter shapes to measure on."""

from __future__ import annotations

import math
from collections.abc import Callable

Shapes = list[tuple[int, ...]]


def gpt2(layers: int = 12, width: int = 768, vocabulary: int = 50257, context: int = 1024) -> Shapes:
    """GPT-2 124M: 148 tensors, 124,439,808 elements; the head is tied to the token embedding."""
    block: Shapes = [
        *[(width,), (width,)],  # layer norm
        *[(width, 3 * width), (3 * width,), (width, width), (width,)],  # attention
        *[(width,), (width,)],  # layer norm
        *[(width, 4 * width), (4 * width,), (4 * width, width), (width,)],  # MLP
    ]
    return [(vocabulary, width), (context, width), *block * layers, (width,), (width,)]


def llama1b() -> Shapes:
    """Llama 3.2 1B: 146 tensors, 1,235,814,400 elements; no biases, grouped keys and values, tied head."""
    width, inner, keys = 2048, 8192, 512
    block: Shapes = [
        *[(width, width), (keys, width), (keys, width), (width, width)],  # attention
        *[(inner, width), (inner, width), (width, inner)],  # MLP
        *[(width,), (width,)],  # RMS norms
    ]
    return [(128256, width), *block * 16, (width,)]


def resnet50() -> Shapes:
    """ResNet-50: 161 tensors, 25,557,032 elements, from 64 to 2.4 million in one."""
    shapes: Shapes = [(64, 3, 7, 7), (64,), (64,)]
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            for out, inputs, size in ((width, channels, 1), (width, width, 3), (4 * width, width, 1)):
                shapes += [(out, inputs, size, size), (out,), (out,)]
            if block == 0:
                shapes += [(4 * width, channels, 1, 1), (4 * width,), (4 * width,)]
            channels = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


def tiny() -> Shapes:
    """1,500 tensors of 64 elements, where the cost per tensor is everything."""
    return [(64,)] * 1500


def uniform(elements: int, tensors: int = 16) -> Shapes:
    """Equal matrices: what the rate does with size."""
    return [(max(1, elements // (tensors * 64)), 64)] * tensors


UNIFORM_SIZES = tuple(2**power for power in (14, 16, 18, 20, 22, 24, 26))
SHAPES: dict[str, Callable[[], Shapes]] = {"gpt2": gpt2, "llama1b": llama1b, "resnet50": resnet50, "tiny": tiny}
NAMES = (*SHAPES, "uniform")


def numel(shapes: Shapes) -> int:
    """Elements of all tensors together."""
    return sum(math.prod(shape) for shape in shapes)


def lists(name: str, most_elements: int | None = None) -> list[Shapes]:
    """The lists that a name stands for: one, or for "uniform" one per size.

    Args:
        name: One of `NAMES`.
        most_elements: For quick runs: larger lists keep their tensors, with fewer rows each; of "uniform", larger
            sizes are left out.
    """
    if name == "uniform":
        sizes = [size for size in UNIFORM_SIZES if most_elements is None or size <= most_elements]
        return [uniform(size) for size in sizes or UNIFORM_SIZES[:1]]
    shapes = SHAPES[name]()
    if most_elements is None or numel(shapes) <= most_elements:
        return [shapes]
    share = most_elements / numel(shapes)
    return [[(max(1, int(shape[0] * share)), *shape[1:]) for shape in shapes]]
