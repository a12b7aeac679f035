"""Lists of parameter shapes to measure on."""

from __future__ import annotations


def gpt2(layers: int = 12, width: int = 768, vocabulary: int = 50257, context: int = 1024) -> list[tuple[int, ...]]:
    """GPT-2 124M: 148 tensors, 124,439,808 elements; the head is tied to the token embedding."""
    block: list[tuple[int, ...]] = [
        *[(width,), (width,)],  # layer norm
        *[(width, 3 * width), (3 * width,), (width, width), (width,)],  # attention
        *[(width,), (width,)],  # layer norm
        *[(width, 4 * width), (4 * width,), (4 * width, width), (width,)],  # MLP
    ]
    return [(vocabulary, width), (context, width), *block * layers, (width,), (width,)]


def tiny() -> list[tuple[int, ...]]:
    """1,500 tensors of 64 elements, where the cost per tensor is everything."""
    return [(64,)] * 1500


SHAPES = {"gpt2": gpt2, "tiny": tiny}
