"""accelerate's loop with FusedAccumulator: one import and one weight change. Compared with stock and the truth.

make example-accelerate_loop        # or, with accumkernels[accelerate] installed: python examples/accelerate_loop.py
make example-accelerate_loop RANKS=2        # the same on two ranks: torchrun --nproc-per-node 2 examples/...
"""

from __future__ import annotations

from typing import Any

import accelerate
from big_batch import STEPS, LanguageModel, make_loader, make_optimizer, report, tokens
from torch import nn

from accumkernels.integrations.accelerate import Accelerator


def train(accelerator: Any, weighted: bool) -> nn.Module:
    """The loop of accelerate's documentation; `weight` is the only argument that its own Accelerator lacks."""
    model = LanguageModel()
    model, optimizer, loader = accelerator.prepare(model, make_optimizer(model), make_loader())
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch)["loss"]
            if weighted:
                accelerator.backward(loss, weight=tokens(batch))
            else:
                accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 100.0)
            optimizer.step()
            optimizer.zero_grad()
    return model


def main() -> int:
    """Train three times."""
    stock = train(accelerate.Accelerator(cpu=True, gradient_accumulation_steps=STEPS), weighted=False)
    fused = train(Accelerator(cpu=True, gradient_accumulation_steps=STEPS), weighted=True)
    report("accelerate", stock, fused)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
