"""Trainers as tests make them, in one process or on ranks: quiet, on the CPU, with what they have on GPUs only."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # models are random, nothing is to be looked up

import torch

SCALE = 2.0**10
VOCABULARY, LENGTH = 64, 12
# What ranks import before they are forked.
MODULES = [f"accumkernels.integrations.{name}" for name in ("accelerate", "lightning", "transformers")]


# ---- accelerate


def reset():
    """accelerate keeps its settings in singletons."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def make(cls, precision="no", steps=4, **options):
    """An accelerator; in fp16 with a scaler."""
    reset()
    accelerator = cls(cpu=True, gradient_accumulation_steps=steps, mixed_precision=precision, **options)
    if precision == "fp16":
        fp16_on_the_cpu(accelerator)
    return accelerator


def fp16_on_the_cpu(accelerator):
    """As accelerate has it on GPUs."""
    accelerator.native_amp = True
    accelerator.state._mixed_precision = "fp16"
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)


def fsdp2_on_the_cpu(accelerator, precision):
    """As accelerate has it on GPUs: parameters and gradients in 16 bit, reduced in fp32."""
    import accelerate
    from accelerate.state import PartialState
    from accelerate.utils import FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import MixedPrecisionPolicy

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    plugin.mixed_precision_policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    state = accelerator.state
    state.distributed_type = PartialState._shared_state["distributed_type"] = accelerate.DistributedType.FSDP
    state.fsdp_plugin = plugin


# ---- Lightning


def quiet_trainer(*callbacks, steps=4, epochs=1, **options):
    """On one device unless told."""
    import lightning.pytorch as pl

    quiet = {
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        accumulate_grad_batches=steps,
        callbacks=list(callbacks),
        **{**quiet, **options},
    )


def fp16_plugins():
    """On the CPU Lightning makes bf16 of precision="16-mixed", but for a plugin."""
    from lightning.pytorch.plugins.precision import MixedPrecision

    return [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=SCALE))]


# ---- transformers


def gpt2(dtype=torch.float32, layers=2):
    """Tiny, random, without dropout."""
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=16,
        n_layer=layers,
        n_head=2,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
        bos_token_id=0,
        eos_token_id=0,
        loss_type="ForCausalLM",
    )
    return transformers.GPT2LMHeadModel(config).to(dtype)


class Samples(torch.utils.data.Dataset):
    """Token ids with 2 to 12 labels each: prompts of other lengths are masked.

    With `masked=1` never all: the Trainer counts the first label of GPT-2, whose loss shifts labels and leaves it out.
    """

    def __init__(self, n, masked=0):
        generator = torch.Generator().manual_seed(0)
        self.samples = []
        for _ in range(n):
            ids = torch.randint(VOCABULARY, (LENGTH,), generator=generator)
            labels = ids.clone()
            labels[: int(torch.randint(masked, LENGTH - 2, (), generator=generator))] = -100
            self.samples.append({"input_ids": ids, "labels": labels})

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return dict(self.samples[index])

    def batch(self, start, end):
        """Of some samples."""
        return {key: torch.stack([s[key] for s in self.samples[start:end]]) for key in ("input_ids", "labels")}

    def all(self):
        """One batch."""
        return self.batch(0, len(self))
