"""`python -m tests.support.notebook_run FILE`: accelerate's loop as a notebook launches it, in two processes.

The process has no process group and no environment of a launcher, as that of a notebook has none.
"""

from __future__ import annotations

import socket
import sys

import torch
from torch.nn.functional import mse_loss

from tests.support.models import mlp
from tests.support.trainer_data import STEPS, item, items, parameters, sgd


def train(path: str) -> None:
    """A whole window; the main process writes the parameters."""
    from accumkernels.integrations.accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=STEPS)
    model = mlp()
    model, optimizer = accelerator.prepare(model, sgd(model.parameters()))
    for i in items(2)[0][accelerator.process_index :: accelerator.num_processes]:
        x, y = item(i)
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(x), y), weight=len(x))
            optimizer.step()
            optimizer.zero_grad()
    assert accelerator.num_processes == 2
    if accelerator.is_main_process:
        torch.save(parameters(model), path)


if __name__ == "__main__":
    from accelerate import notebook_launcher

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    notebook_launcher(train, (sys.argv[1],), num_processes=2, use_port=str(port))
