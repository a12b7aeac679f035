"""What ranks run in Lightning."""

from __future__ import annotations

import torch
from torch.nn.functional import mse_loss

from tests.support.models import mlp
from tests.support.trainer_data import KINDS, LR, MAX_NORM, STEPS, environment, items, loader, parameters, sgd
from tests.support.trainers import fp16_plugins, quiet_trainer


def lightning_module(precision="fp32", **attributes):
    """The same model and loss; `configure_model` shards it where it is given a mesh."""
    import lightning.pytorch as pl

    class Regression(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = mlp()
            self.norms = []

        def configure_model(self):
            if attributes.get("shard") and not hasattr(self.net, "set_requires_gradient_sync"):
                from torch.distributed.fsdp import fully_shard

                fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

        def training_step(self, data, index):
            attributes.get("before", lambda index: None)(index)
            x, y = data
            loss = mse_loss(self.net(x).float(), y)
            return loss * torch.inf if (self.global_rank, index) in attributes.get("bad", ()) else loss

        def configure_optimizers(self):
            return attributes.get("optimizer", sgd)(self.parameters())

    return Regression()


def lightning_trainer(rank, size, callback, precision="fp32", clip=None, strategy=None, **keywords):
    """In the process group that is there."""
    from lightning.pytorch.strategies import DDPStrategy

    if precision == "fp16":
        keywords["plugins"] = fp16_plugins()
    return quiet_trainer(
        callback,
        *keywords.pop("callbacks", ()),
        steps=keywords.pop("steps", STEPS),
        epochs=keywords.pop("max_epochs", 1),
        devices=size,
        strategy=DDPStrategy(process_group_backend="gloo") if strategy is None else strategy,
        gradient_clip_val=clip,
        precision="bf16-mixed" if precision == "bf16" else None,
        use_distributed_sampler=False,
        **keywords,
    )


def lightning_loop(rank, size, precision="fp32", clip=None, strategy=None, **attributes):
    """Parameters, None, and the scale."""
    from accumkernels.integrations.lightning import FusedAccumulation

    callback = FusedAccumulation(weight=lambda data: len(data[0]), **attributes.pop("options", {}))
    trainer = lightning_trainer(rank, size, callback, precision, clip, strategy)
    module = lightning_module(precision, **attributes)
    trainer.fit(module, loader(items(size, rank, uneven=False)))  # Lightning communicates in every batch
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return parameters(module), [], None if scaler is None else scaler.get_scale()


def lightning_ddp(rank, size):
    """Every precision; and with parameters that may be unused."""
    from lightning.pytorch.strategies import DDPStrategy

    environment(rank, size)
    found = {kind: lightning_loop(rank, size, *kind) for kind in KINDS}
    strategy = DDPStrategy(process_group_backend="gloo", find_unused_parameters=True)
    found["find_unused_parameters"] = lightning_loop(rank, size, strategy=strategy)
    found["fused"] = lightning_loop(rank, size, clip=MAX_NORM, optimizer=lambda p: torch.optim.SGD(p, LR, fused=True))
    return found


def sharded(size):
    """Keywords of `lightning_loop` for ModelParallelStrategy, which Lightning has on GPUs only."""
    from lightning.pytorch.strategies import ModelParallelStrategy

    strategy = ModelParallelStrategy(data_parallel_size=size, tensor_parallel_size=1, process_group_backend="gloo")
    return {"strategy": strategy, "shard": True}


def lightning_fsdp2(rank, size):
    """ModelParallelStrategy."""
    environment(rank, size)
    found = {kind: lightning_loop(rank, size, *kind, **sharded(size)) for kind in KINDS}
    found["overflow"] = lightning_loop(rank, size, "fp16", bad={(size - 1, 1)}, **sharded(size))
    return found


def lightning_overflow(rank, size):
    """On the last rank: all skip."""
    environment(rank, size)
    return {kind: lightning_loop(rank, size, kind, bad={(size - 1, 1)}) for kind in ("fp32", "fp16")}


class Gan:
    """Two optimizers over two networks in one module, as Lightning's documentation has it."""

    @staticmethod
    def module(usual):
        import lightning.pytorch as pl

        class Manual(pl.LightningModule):
            def __init__(self):
                super().__init__()
                self.automatic_optimization = False
                self.one, self.two = mlp(), mlp(seed=1)

            def training_step(self, data, index):
                x, y = data
                ends = (index + 1) % STEPS == 0 or index + 1 == self.trainer.num_training_batches
                for place, optimizer in enumerate(self.optimizers()):
                    self.toggle_optimizer(optimizer)
                    # Each looks through both networks, and is to move its own.
                    out = self.one(x) + self.two(x)
                    self.manual_backward(mse_loss(out, y if place else -y))
                    if ends:
                        self.clip_gradients(optimizer, MAX_NORM, "norm")
                        optimizer.step()
                    self.untoggle_optimizer(optimizer)

            def configure_optimizers(self):
                return sgd(self.one.parameters()), sgd(self.two.parameters())

        return Manual()


def lightning_two_optimizers(rank, size):
    """Manual optimization with toggle_optimizer."""
    from accumkernels.integrations.lightning import FusedAccumulation

    environment(rank, size)
    trainer = lightning_trainer(rank, size, FusedAccumulation(weight=lambda data: len(data[0])))
    trainer.accumulate_grad_batches = 1
    module = Gan.module(False)
    trainer.fit(module, loader(items(size, rank, uneven=False)))
    return parameters(module)


def lightning_resumed(rank, size):
    """A checkpoint at the end of the first window, which rank 0 writes; test_resumed_on_one_rank loads it."""
    from accumkernels.integrations.lightning import FusedAccumulation
    from tests.support import ranks

    environment(rank, size)
    trainer = lightning_trainer(
        rank, size, FusedAccumulation(weight=lambda data: len(data[0]), master_weights=True), limit_train_batches=STEPS
    )
    module = lightning_module()
    module.net = module.net.to(torch.bfloat16)
    module.net.register_forward_pre_hook(lambda _, args: (args[0].bfloat16(),))
    module.on_train_end = lambda: trainer.save_checkpoint(ranks.shared / f"window-{size}.ckpt")
    trainer.fit(module, loader(items(size, rank)))
    return parameters(module)


def lightning_inside_a_window(rank, size):
    """Saved after two of four micro-batches, on all ranks together; rank 0's is what is written."""
    from accumkernels.integrations.lightning import FusedAccumulation

    environment(rank, size)
    callback = FusedAccumulation(weight=lambda data: len(data[0]))
    trainer = lightning_trainer(rank, size, callback)
    module = lightning_module()
    states = []
    module.on_train_batch_end = lambda out, data, index: states.append(callback.state_dict()) if index == 1 else None
    trainer.fit(module, loader(items(size, rank, uneven=False)))
    return states[0]
