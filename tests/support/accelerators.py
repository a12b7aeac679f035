"""accelerate's Accelerators and ours, one after another in a process."""

from __future__ import annotations

import torch
from accelerate.state import AcceleratorState, GradientState


def reset():
    """Forget the settings, which accelerate keeps in singletons."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def make(cls, precision="no", steps=4, **options):
    """An accelerator; fp16, which accelerate has on GPUs only, with a scaler for the CPU."""
    reset()
    accelerator = cls(cpu=True, gradient_accumulation_steps=steps, mixed_precision=precision, **options)
    if precision == "fp16":
        accelerator.native_amp = True
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    return accelerator
