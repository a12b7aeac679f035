"""A small GPT, and text for it that every machine has: sources of Python's standard library in unequal samples."""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# ---- The text

CONTEXT = 128  # bytes of the longest sample
LINE = 64  # the same of the demo, whose samples are lines of text: unequal, as samples are
SHORTEST = 8  # bytes; shorter paragraphs are left out
PADDING_STEP = 16  # padded lengths are multiples of this, so that few distinct shapes occur
IGNORE = -100  # target of padding, `ignore_index` of the loss
VALIDATION_SAMPLES = 128
START = 0  # the byte before a sample's first

# In every CPython from 3.10 on. A file that is missing is left out.
TRAINING_FILES = (
    "_collections_abc.py _pydecimal.py _pyio.py argparse.py ast.py asyncio/base_events.py bdb.py "
    "calendar.py codecs.py collections/__init__.py configparser.py contextlib.py copy.py csv.py "
    "dataclasses.py difflib.py dis.py doctest.py email/_header_value_parser.py enum.py fractions.py "
    "ftplib.py functools.py gzip.py heapq.py http/client.py imaplib.py inspect.py ipaddress.py "
    "json/encoder.py locale.py logging/__init__.py mailbox.py multiprocessing/pool.py optparse.py "
    "pickle.py pickletools.py platform.py plistlib.py pydoc.py random.py shutil.py smtplib.py socket.py "
    "statistics.py subprocess.py tarfile.py threading.py traceback.py typing.py unittest/mock.py "
    "urllib/request.py uuid.py"
).split()
VALIDATION_FILES = ("http/server.py", "json/decoder.py", "pstats.py", "tempfile.py", "textwrap.py", "unittest/case.py")


@dataclass(frozen=True)
class Batch:
    """Samples padded to one length.

    Attributes:
        inputs: int64 `[samples, length]`, the bytes up to the one to predict.
        targets: int64 `[samples, length]`, the bytes to predict, `IGNORE` where there is padding.
        tokens: Number of bytes to predict, without padding: the weight of the batch's mean loss.
    """

    inputs: Tensor
    targets: Tensor
    tokens: int

    @classmethod
    def collate(cls, samples: Sequence[bytes], device: torch.device) -> Batch:
        """Pad `samples` to their longest, rounded up to a multiple of `PADDING_STEP`."""
        longest = max(map(len, samples))
        length = -(-longest // PADDING_STEP) * PADDING_STEP
        inputs = torch.full((len(samples), length), START)
        targets = torch.full((len(samples), length), IGNORE)
        for row, sample in enumerate(samples):
            codes = torch.tensor(list(sample))
            targets[row, : len(sample)] = codes
            inputs[row, 1 : len(sample)] = codes[:-1]
        return cls(inputs.to(device), targets.to(device), sum(map(len, samples)))


class Window(NamedTuple):
    """The samples of one optimizer step, in batches whose `tokens` is what their mean loss averages over.

    Attributes:
        big_batch: All samples as one batch.
        micro_batches: The same samples in micro-batches; a partial window has fewer of them, and a smaller last one.
    """

    big_batch: Any
    micro_batches: Sequence[Any]


def read_samples(files: Sequence[str], longest: int = CONTEXT, separator: bytes = b"\n\n") -> list[bytes]:
    """Cut source files into samples, long ones into pieces.

    Args:
        files: Paths relative to the directory of Python's standard library; those that do not exist are left out.
        longest: Bytes of a piece.
        separator: What samples end with. Default: paragraphs, which are the text between blank lines.

    Raises:
        FileNotFoundError: None of `files` exists.
    """
    root = Path(sysconfig.get_path("stdlib"))
    texts = [path.read_bytes() for path in (root / name for name in files) if path.is_file()]
    if not texts:
        raise FileNotFoundError(f"no source of Python's standard library in {root}")
    paragraphs = (paragraph.strip(b"\n") for text in texts for paragraph in text.replace(b"\r", b"").split(separator))
    return [
        paragraph[start : start + longest]
        for paragraph in paragraphs
        for start in range(0, len(paragraph), longest)
        if len(paragraph) - start >= SHORTEST
    ]


class Corpus:
    """Training windows in a fixed order, and validation batches.

    Args:
        micro_batch_size: Samples of a micro-batch.
        accumulation_steps: Micro-batches of a full window.
        device: The device of the batches.
        seed: Determines the order of the samples.
    """

    def __init__(self, micro_batch_size: int, accumulation_steps: int, device: torch.device, seed: int = 0) -> None:
        self.micro_batch_size = micro_batch_size
        self.window_size = micro_batch_size * accumulation_steps
        self.device = device
        self._training, validation = (
            self._shuffled(read_samples(files, LINE, b"\n"), seed) for files in (TRAINING_FILES, VALIDATION_FILES)
        )
        self._validation = validation[:VALIDATION_SAMPLES]

    @staticmethod
    def _shuffled(samples: list[bytes], seed: int) -> list[bytes]:
        order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(seed))
        return [samples[index] for index in order.tolist()]

    def window(self, index: int, partial: bool = False) -> Window:
        """The window number `index` (the text repeats when it ends); a partial one has only 5/16 of the samples."""
        size = self.window_size * 5 // 16 if partial else self.window_size
        first = index * self.window_size
        samples = [self._training[(first + i) % len(self._training)] for i in range(size)]
        pieces = [samples[start : start + self.micro_batch_size] for start in range(0, size, self.micro_batch_size)]
        big_batch, *micro_batches = (Batch.collate(piece, self.device) for piece in (samples, *pieces))
        return Window(big_batch, micro_batches)

    def validation_batches(self) -> Iterator[Batch]:
        """Held-out samples, in batches of a window's size."""
        samples = sorted(self._validation, key=len)
        for start in range(0, len(samples), self.window_size):
            yield Batch.collate(samples[start : start + self.window_size], self.device)


# ---- A byte-level GPT with pre-norm blocks, learned positions, and an output layer tied to the byte embedding

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

    def logits(self, inputs: Tensor) -> Tensor:
        """Map int64 `[samples, length]` to `[samples, length, vocabulary]`."""
        x = self.embedding(inputs) + self.position[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Loss of int64 `inputs` and `targets`, both `[samples, length]`."""
        return F.cross_entropy(self.logits(inputs).flatten(0, 1), targets.flatten(), ignore_index=IGNORE)
