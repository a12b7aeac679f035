"""Models people train, tiny and random: each with a loss over some of its samples, and what their mean is a mean of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import accumkernels as ak

SAMPLES = 6
LENGTH = 10  # tokens of a sequence, of which the later ones are padding
VOCABULARY = 48


@dataclasses.dataclass
class Case:
    """A model and how to train it.

    Attributes:
        model: In the mode it is trained in, without dropout.
        loss: (model, indices of samples) -> mean loss, and how many samples or tokens that is the mean of.
        untouched: Prefixes of the names of parameters that get no gradient.
    """

    model: nn.Module
    loss: Callable[[nn.Module, Sequence[int]], tuple[Tensor, int]]
    untouched: tuple[str, ...] = ()


def _dtype(model: nn.Module) -> torch.dtype:
    return next(p.dtype for p in model.parameters())


def _device(model: nn.Module) -> torch.device:
    return next(p.device for p in model.parameters())


def regression(shape: Sequence[int], outputs: int) -> Callable[[nn.Module, Sequence[int]], tuple[Tensor, int]]:
    """Mean squared error over samples of a shape."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, *shape, generator=generator, dtype=torch.float64)
    y = torch.randn(SAMPLES, outputs, generator=generator, dtype=torch.float64)

    def loss(model: nn.Module, rows: Sequence[int]) -> tuple[Tensor, int]:
        inputs = x[rows].to(_device(model), _dtype(model))
        output = model(inputs)
        return F.mse_loss(output.to(_dtype(model)), y[rows].to(output.device, _dtype(model))), len(rows)

    return loss


def _tokens() -> tuple[Tensor, Tensor]:
    """Token ids of sequences of different lengths, and which of them are none of padding."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=generator)
    lengths = torch.tensor([LENGTH, 3, 7, LENGTH, 4, 5])
    return ids, torch.arange(LENGTH) < lengths[:, None]


def language(shift: bool = True) -> Callable[[nn.Module, Sequence[int]], tuple[Tensor, int]]:
    """Mean cross entropy over tokens that are no padding, of models called as those of transformers.

    Args:
        shift: The next token is to be told (GPT); else the one that is there (BERT, masked).
    """
    ids, real = _tokens()

    def loss(model: nn.Module, rows: Sequence[int]) -> tuple[Tensor, int]:
        inputs, mask = ids[rows].to(_device(model)), real[rows].to(_device(model))
        logits = model(input_ids=inputs, attention_mask=mask.long()).logits
        if shift:
            logits, targets, mask = logits[:, :-1], inputs[:, 1:], mask[:, 1:]
        else:
            targets = (inputs * 7 + 3) % VOCABULARY
        return F.cross_entropy(logits[mask].to(_dtype(model)), targets[mask]), int(mask.sum())

    return loss


# ---- models of plain torch


class Residual(nn.Module):
    """ResNet's basic block."""

    def __init__(self, channels: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, 2 * channels, 3, stride, 1, bias=False),
            nn.BatchNorm2d(2 * channels),
            nn.ReLU(),
            nn.Conv2d(2 * channels, 2 * channels, 3, 1, 1, bias=False),
            nn.BatchNorm2d(2 * channels),
        )
        self.shortcut = nn.Conv2d(channels, 2 * channels, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def resnet() -> Case:
    """Convolutions in channels_last, with group norms: a batch norm's statistics are those of a micro-batch."""
    stem = nn.Conv2d(3, 8, 3, 1, 1, bias=False)
    model = nn.Sequential(
        stem, Residual(8, 1), Residual(16, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 3)
    )
    assert ak.replace_batchnorm(model, num_groups=4) == 4
    return Case(model.to(memory_format=torch.channels_last), regression((3, 8, 8), 3))


class Recurrent(nn.Module):
    """A bidirectional LSTM of two layers: on a GPU its weights are views of one flat tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 7, num_layers=2, bidirectional=True, batch_first=True)
        self.out = nn.Linear(14, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(x)[0][:, -1])


def lstm() -> Case:
    """Recurrent weights, in cuDNN's flat layout where there is one."""
    return Case(Recurrent(), regression((4, 5), 3))


def weight_norm() -> Case:
    """Weights that are computed from two parameters each."""
    layers = [parametrizations.weight_norm(nn.Linear(5, 9)), nn.Tanh(), parametrizations.weight_norm(nn.Linear(9, 3))]
    return Case(nn.Sequential(*layers), regression((5,), 3))


def old_weight_norm() -> Case:
    """The form of weight_norm that recomputes the weight in a hook before each forward."""
    with pytest.warns(FutureWarning):
        layer = nn.utils.weight_norm(nn.Linear(5, 9))
    return Case(nn.Sequential(layer, nn.Tanh(), nn.Linear(9, 3)), regression((5,), 3))


def spectral_norm() -> Case:
    """In eval mode: in training mode each forward moves its vectors, so that micro-batches see other weights."""
    layer = parametrizations.spectral_norm(nn.Linear(5, 9))
    return Case(nn.Sequential(layer, nn.Tanh(), nn.Linear(9, 3)).eval(), regression((5,), 3))


class Symmetric(nn.Module):
    """A parametrisation of a user's own."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


def parametrized() -> Case:
    """A symmetric matrix, cached in forward as torch recommends, and an orthogonal one."""
    symmetric = nn.Linear(5, 5)
    nn.utils.parametrize.register_parametrization(symmetric, "weight", Symmetric())
    orthogonal = parametrizations.orthogonal(nn.Linear(5, 5, bias=False), "weight", "householder")

    class Cached(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            with nn.utils.parametrize.cached():
                return super().forward(x)

    return Case(Cached(symmetric, nn.Tanh(), orthogonal, nn.Linear(5, 3)), regression((5,), 3))


class MixtureOfExperts(nn.Module):
    """A router in fp32 sends a sample to one expert. Experts are used by some micro-batches, and one by none."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(6, experts)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)) for _ in range(experts))
        self.out = nn.Linear(6, 3)
        with torch.no_grad():
            self.router.bias[-1] = -1e4

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            gates = self.router(x).softmax(-1)
        best = gates.argmax(-1)
        parts = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (best == index).nonzero()[:, 0]
            if len(rows):
                parts = parts.index_add(0, rows, gates[rows, index, None] * expert(x[rows]).to(x.dtype))
        return self.out(x + parts)


def mixture_of_experts() -> Case:
    """The expert that no sample chooses keeps `.grad` None."""
    return Case(MixtureOfExperts(), regression((6,), 3), untouched=("experts.3",))


class Checkpointed(nn.Module):
    """Blocks whose activations are computed again in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 6)) for _ in "ab"
        )
        self.out = nn.Linear(6, 3)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in (*self.blocks, self.blocks[0]):  # one of them used twice
            x = x + checkpoint(block, x, use_reentrant=self.reentrant)
        return self.out(x)


def checkpointed(reentrant: bool) -> Case:
    """Gradient checkpointing in both forms."""
    return Case(Checkpointed(reentrant), regression((6,), 3))


# ---- models of transformers and peft


def gpt2(**kwargs: Any) -> Any:
    """Tied embeddings, Conv1D weights."""
    transformers = pytest.importorskip("transformers")
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": LENGTH, "vocab_size": VOCABULARY}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **dropout, use_cache=False, **kwargs))


def llama() -> Any:
    """RMSNorm, rotary embeddings, grouped key-value heads, a gated MLP."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": LENGTH}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, use_cache=False))


def bert() -> Any:
    """A masked language model, whose pooler is not there."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(**sizes, **dropout, vocab_size=VOCABULARY, max_position_embeddings=LENGTH)
    return transformers.BertForMaskedLM(config)


def mixtral() -> Any:
    """Experts that are slices of one parameter: those not used get zeros of it, as in torch."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": LENGTH}
    config = transformers.MixtralConfig(**sizes, **heads, num_local_experts=4, num_experts_per_tok=2, use_cache=False)
    model = transformers.MixtralForCausalLM(config)
    model.set_experts_implementation("eager")  # the others do not know fp64, in which the truth is computed
    return model


def gpt2_checkpointed(reentrant: bool) -> Case:
    """transformers' own switch."""
    model = gpt2()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()  # as transformers says for this form
    return Case(model.train(), language())


def lora() -> Case:
    """Adapters on a frozen base."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    return Case(peft.get_peft_model(llama(), config), language())


PLAIN = {
    "resnet": resnet,
    "lstm": lstm,
    "weight_norm": weight_norm,
    "weight_norm_old": old_weight_norm,
    "spectral_norm": spectral_norm,
    "parametrize": parametrized,
    "moe": mixture_of_experts,
    "checkpoint": lambda: checkpointed(False),
    "checkpoint_reentrant": lambda: checkpointed(True),
}
INTEGRATIONS = {
    "gpt2": lambda: Case(gpt2(), language()),
    "llama": lambda: Case(llama(), language()),
    "bert": lambda: Case(bert(), language(shift=False)),
    "mixtral": lambda: Case(mixtral(), language()),
    "gpt2_checkpoint": lambda: gpt2_checkpointed(False),
    "gpt2_checkpoint_reentrant": lambda: gpt2_checkpointed(True),
    "lora": lora,
}


def make(name: str) -> Case:
    """The case of that name, always the same one."""
    torch.manual_seed(0)
    case: Case = {**PLAIN, **INTEGRATIONS}[name]()
    return case
