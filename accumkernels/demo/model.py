"""A byte-level GPT with pre-norm blocks, learned positions, and an output layer tied to the byte embedding."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .data import CONTEXT, IGNORE

VOCABULARY = 256
WIDTH = 128
DEPTH = 2
HEADS = 4


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.norm_feed_forward = nn.LayerNorm(width)
        self.feed_forward_in = nn.Linear(width, 4 * width)
        self.feed_forward_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[samples, length, width]` to the same shape."""
        samples, length, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(samples, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        # Padding is at the end of a sample, so the causal mask alone keeps it out of real positions.
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(attention.transpose(1, 2).reshape(samples, length, width))
        return x + self.feed_forward_out(F.gelu(self.feed_forward_in(self.norm_feed_forward(x))))


class GPT(nn.Module):
    """`forward(inputs, targets)` is the mean cross entropy over the targets that are not padding, in nats per byte.

    Args:
        vocabulary, width, depth, heads, context: Its size; small enough for tests by default.
    """

    def __init__(
        self,
        vocabulary: int = VOCABULARY,
        width: int = WIDTH,
        depth: int = DEPTH,
        heads: int = HEADS,
        context: int = CONTEXT,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.empty(context, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.position, std=0.02)
        for name, parameter in self.blocks.named_parameters():
            if parameter.dim() == 2:
                # Layers that add to the residual stream start smaller: its variance then does not grow with depth.
                residual = name.endswith("_out.weight")
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * depth) if residual else 0.02)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Loss of int64 `inputs` and `targets`, both `[samples, length]`."""
        x = self.embedding(inputs) + self.position[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE)
