"""What tests/recipes/test_torchtitan.py runs on every rank: torchtitan's own `train_step` over a tiny model.

torchtitan's Trainer makes its model, data and processes from a configuration that wants a GPU. Here it gets what
`train_step` reads, and nothing else.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

from tests.support.recipes import classifier, recipe, train_big

IGNORED = -100
WINDOWS = 2
STEPS = 3
RATE = 0.5


def micro_batch(rank, number):
    """Between 2 and 9 samples, some of them without a label."""
    generator = torch.Generator().manual_seed(100 * rank + number)
    n = int(torch.randint(2, 10, (), generator=generator))
    x, y = torch.randn(n, 5, generator=generator), torch.randint(3, (n,), generator=generator)
    y[1:][torch.rand(n - 1, generator=generator) < 0.3] = IGNORED
    return x, y


def of_all_ranks(size):
    """The windows of all ranks, as one batch each, in float64."""
    for window in range(WINDOWS):
        pairs = [micro_batch(rank, STEPS * window + i) for rank in range(size) for i in range(STEPS)]
        yield torch.cat([x for x, _ in pairs]).double(), torch.cat([y for _, y in pairs])


def truth(size, max_norm):
    """Parameters by one process, in plain torch."""
    return train_big(
        classifier(),
        of_all_ranks(size),
        lambda twin, window: cross_entropy(twin(window[0]), window[1], ignore_index=IGNORED),
        lambda parameters: torch.optim.SGD(parameters, lr=RATE),
        lambda twin: nn.utils.clip_grad_norm_(twin.parameters(), max_norm),
    )


class Optimizers(list):
    """As torchtitan's container: it steps all of them."""

    def zero_grad(self, set_to_none=True):
        for optimizer in self:
            optimizer.zero_grad(set_to_none)

    def step(self):
        for optimizer in self:
            optimizer.step()


def sum_loss(pred, labels, global_valid_tokens):
    """As torchtitan's."""
    total = cross_entropy(pred, labels, ignore_index=IGNORED, reduction="sum")
    return total / global_valid_tokens, {}


def built(kind, model, mesh, max_norm):
    """A Trainer with what its `train_step` reads."""
    trainer = kind.__new__(kind)
    trainer.model_parts = [model]
    trainer.optimizers = Optimizers([torch.optim.SGD(model.parameters(), lr=RATE)])
    trainer.lr_schedulers, trainer.checkpointer = MagicMock(), MagicMock()
    trainer.metrics_processor = SimpleNamespace(should_log=lambda step: False)
    trainer.config = SimpleNamespace(training=SimpleNamespace(disable_cuda_graphs=True, max_norm=max_norm))
    trainer.device = torch.device("cpu")
    trainer.step, trainer.gradient_accumulation_steps, trainer.num_pipeline_parallel_microbatches = 1, STEPS, 1
    trainer.parallel_dims = SimpleNamespace(
        dp_enabled=True, pp_enabled=False, ep_enabled=False, dp_cp_enabled=True,
        get_mesh=lambda name: mesh, get_optional_mesh=lambda name: None,
    )  # fmt: skip
    trainer.train_context = contextlib.nullcontext
    trainer.loss_fn = sum_loss
    trainer.fwd_bwd_fn = trainer._forward_backward_body
    trainer.post_dataloading_process = lambda inputs, labels: (inputs["input"], labels, {})
    return trainer


def loop(model, rank, max_norm, weighted):
    """The page's loop: sums divided by the tokens of all ranks, or means with weights."""
    import accumkernels as ak

    acc = ak.FusedAccumulator(model)
    optimizer = torch.optim.SGD(acc.parameters(), lr=RATE)
    for window in range(WINDOWS):
        pairs = [micro_batch(rank, STEPS * window + i) for i in range(STEPS)]
        tokens = sum((labels != IGNORED).sum() for _, labels in pairs)
        dist.all_reduce(tokens)
        for inputs, labels in pairs:
            if weighted:
                loss = cross_entropy(model(inputs), labels, ignore_index=IGNORED)
                acc.backward(loss, weight=(labels != IGNORED).sum())
            else:
                acc.backward(sum_loss(model(inputs), labels, tokens)[0])
        acc.step(optimizer, divisor=None if weighted else 1, max_norm=max_norm)


def trains_as_one_process(rank, size):
    """Parameters after two steps, by who trains them, and whether they are clipped."""
    from torchtitan.distributed.fsdp import disable_fsdp_gradient_division
    from torchtitan.trainer import Trainer

    import accumkernels as ak

    found = {}
    trainers = {"torchtitan's Trainer": Trainer, "ours": recipe("torchtitan")["FusedTrainer"]}
    for max_norm in (0.1, 1e9):
        for who in (*trainers, "loop", "loop with weights"):
            mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("batch",))
            model = fully_shard(classifier(), mesh=mesh)
            disable_fsdp_gradient_division(model)
            model.set_force_sum_reduction_for_comms(True)  # gloo has no other
            if who in trainers:
                trainer = built(trainers[who], model, mesh, max_norm)
                if who == "ours":
                    trainer.acc = ak.FusedAccumulator(model)
                batches = (micro_batch(rank, number) for number in range(STEPS * WINDOWS))
                data = iter([({"input": x}, y) for x, y in batches])
                for _ in range(WINDOWS):
                    trainer.train_step(data)
            else:
                loop(model, rank, max_norm, weighted="weights" in who)
            found[who, max_norm] = [p.detach().full_tensor() for p in model.parameters()]
    return found
