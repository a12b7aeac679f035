"""What the ranks of test_trainers_on_ranks.py run: each trainer's own loop, on data that all of them share.

A micro-batch is an item of the data, so that sizes differ. Item `i` belongs to rank `i % size`, as accelerate shards.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import logging
import os
import unittest.mock
import warnings

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from tests.support.models import batch, mlp
from tests.support.ranks import message

STEPS = 4
LR = 0.5
MAX_NORM = 0.2  # clips in every window
SCALE = 2.0**10
KINDS = [("fp32", None), ("fp32", MAX_NORM), ("bf16", None), ("fp16", None), ("fp16", MAX_NORM)]


def item(i):
    """Micro-batch `i`, of 1 to 7 samples."""
    return batch(1 + (3 * i + i // 2) % 7, seed=100 + i)


def items(size, rank=None, uneven=True):
    """Numbers of the micro-batches of a rank; of windows of all ranks without one.

    Two windows; the second is short, and `uneven` gives the last rank one micro-batch less.
    """
    n = (STEPS + 2) * size - uneven
    if rank is not None:
        return list(range(rank, n, size))
    return [list(range(STEPS * size)), list(range(STEPS * size, n))]


class Items(torch.utils.data.Dataset):
    """Micro-batches; a loader that takes one at a time and no collation gives them as they are."""

    def __init__(self, numbers, keys=None):
        self.numbers, self.keys = numbers, keys

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, index):
        pair = item(self.numbers[index])
        return pair if self.keys is None else dict(zip(self.keys, pair, strict=True))


def loader(numbers):
    """One micro-batch at a time."""
    return torch.utils.data.DataLoader(Items(numbers), batch_size=1, collate_fn=lambda one: one[0])


def sgd(params):
    """Its parameters are sums of gradients."""
    return torch.optim.SGD(params, lr=LR)


def parameters(model):
    """Values by name, whole where they are sharded."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    return {
        name.removeprefix("net."): (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in inner.named_parameters()
    }


def environment(rank, size):
    """What `torchrun` sets; the process group is there already."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size), OMP_NUM_THREADS="1",
        MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", TORCHELASTIC_RUN_ID="here", GROUP_RANK="0", NODE_RANK="0",
    )  # fmt: skip


@contextlib.contextmanager
def counted():
    """Bytes that all-reduces send, and how many there are."""
    sent, original = [], torch.distributed.all_reduce

    def all_reduce(tensor, *args, **kwargs):
        sent.append(tensor.nbytes)
        return original(tensor, *args, **kwargs)

    torch.distributed.all_reduce = all_reduce
    try:
        yield sent
    finally:
        torch.distributed.all_reduce = original


# ---- accelerate


def accelerator(cls=None, precision="fp32", steps=STEPS, options=None, fsdp2=False, **keywords):
    """Ours, or stock's, anew; fp16 and FSDP2, which accelerate has on GPUs only, on the CPU."""
    import accelerate
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from accelerate.utils import DataLoaderConfiguration, FullyShardedDataParallelPlugin

    from accumkernels.integrations.accelerate import fuse

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    PartialState._reset_state()
    keywords.setdefault("dataloader_config", DataLoaderConfiguration(even_batches=False))
    one = accelerate.Accelerator(
        cpu=True,
        gradient_accumulation_steps=steps,
        mixed_precision="no" if precision in ("fp32", "fp16") else precision,
        **keywords,
    )
    if precision == "fp16":
        one.native_amp = True
        one.state._mixed_precision = "fp16"
        one.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    if fsdp2:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False)
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
        plugin.mixed_precision_policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        one.state.distributed_type = PartialState._shared_state["distributed_type"] = accelerate.DistributedType.FSDP
        one.state.fsdp_plugin = plugin
        one.native_amp = False
    return one if cls == "stock" else fuse(one, **(options or {}))


def accelerate_loop(rank, size, precision="fp32", clip=None, fsdp2=False, optimizer_fn=sgd, bad=(), **keywords):
    """The loop of accelerate's documentation, with weights; parameters, norms, skipped steps, scale."""
    one = accelerator(precision=precision, fsdp2=fsdp2, **keywords)
    model = mlp()
    numbers = items(size, rank, uneven=not fsdp2)
    model, optimizer = one.prepare(model, optimizer_fn(model.parameters()))
    data = loader(numbers)
    history = []
    for index, (x, y) in enumerate(data):
        with _ends(one, index + 1 == len(numbers)), one.accumulate(model):
            loss = mse_loss(model(x).float(), y)
            loss = loss * torch.inf if (rank, index) in bad else loss
            one.backward(loss, weight=len(x))
            if one.sync_gradients and clip is not None:
                history.append(float(_full(one.clip_grad_norm_(model.parameters(), clip))))
            optimizer.step()
            optimizer.zero_grad()
            if one.sync_gradients and bad:
                history.append(optimizer.step_was_skipped)
    scale = None if one.scaler is None else one.scaler.get_scale()
    values = parameters(model)
    one.free_memory()
    return values, history, scale


def _full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@contextlib.contextmanager
def _ends(one, last):
    """Whether accelerate is to believe that a loader, which it has sharded, has given its last micro-batch."""
    loader = argparse.Namespace(end_of_dataloader=last, remainder=-1)
    one.gradient_state._add_dataloader(loader)
    yield
    one.gradient_state._remove_dataloader(loader)


def accelerate_ddp(rank, size):
    """Every precision, clipped or not, in every release."""
    environment(rank, size)
    found = {kind: accelerate_loop(rank, size, *kind) for kind in KINDS}
    found["backward"] = accelerate_loop(rank, size, options={"release": "backward", "bucket_bytes": 64})
    found["fused"] = accelerate_loop(
        rank, size, clip=MAX_NORM, optimizer_fn=lambda p: torch.optim.SGD(p, LR, fused=True)
    )
    return found


def accelerate_fsdp2(rank, size):
    """Sharded."""
    environment(rank, size)
    found = {kind: accelerate_loop(rank, size, *kind, fsdp2=True) for kind in KINDS}
    found["overflow"] = accelerate_loop(rank, size, "fp16", fsdp2=True, bad={(size - 1, 1)})
    return found


def accelerate_overflow(rank, size):
    """On the last rank, in its second micro-batch: all skip the window, and step the next."""
    environment(rank, size)
    return {kind: accelerate_loop(rank, size, kind, bad={(size - 1, 1)}) for kind in ("fp32", "fp16")}


def accelerate_recipe(rank, size):
    """Their documented loop for token counts, by the import alone: sums, divided by the number over all ranks."""
    environment(rank, size)
    found = {}
    for name in ("stock", "ours"):
        one = accelerator("stock" if name == "stock" else None)
        model = mlp()
        model, optimizer = one.prepare(model, sgd(model.parameters()))
        for window in items(size, uneven=False):
            own = [item(i) for i in window[rank::size]]
            total = one.gather(torch.tensor(sum(len(x) for x, _ in own))).sum().item()
            for i, (x, y) in enumerate(own):
                with model.no_sync() if i + 1 < len(own) else contextlib.nullcontext():
                    loss = mse_loss(model(x), y, reduction="sum") / 3  # as many outputs as a sample has
                    one.backward(loss * STEPS * one.num_processes / total)
            assert next(model.parameters()).grad is not None
            optimizer.step()
            optimizer.zero_grad()
        found[name] = parameters(model)
        one.free_memory()
    return found


def accelerate_two_optimizers(rank, size):
    """One model, two optimizers, one clipping; and two models with one optimizer."""
    environment(rank, size)
    found = {}
    for kind in ("two optimizers", "two models"):
        one = accelerator()
        if kind == "two optimizers":
            model = mlp()
            parts = [
                [model[0].weight, model[4].weight],
                [p for p in model.parameters() if p.ndim == 1] + [model[2].weight],
            ]
            model, *optimizers = one.prepare(model, *(sgd(part) for part in parts))
            models = [model]
            call = model
        else:
            whole = mlp()
            first, second, optimizer = one.prepare(whole[:2], whole[2:], sgd(whole.parameters()))
            models, optimizers = [first, second], [optimizer]
            call = lambda x, first=first, second=second: second(first(x))  # noqa: E731
        norms = []
        numbers = items(size, rank)
        for index, i in enumerate(numbers):
            x, y = item(i)
            with _ends(one, index + 1 == len(numbers)), one.accumulate(*models):
                one.backward(mse_loss(call(x), y), weight=len(x))
                if one.sync_gradients:
                    norms.append(one.clip_grad_norm_([p for m in models for p in m.parameters()], MAX_NORM).item())
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        values = [value for m in models for value in parameters(m).values()]
        found[kind] = dict(zip(parameters(mlp()), values, strict=True)), norms, None
        one.free_memory()
    return found


def accelerate_bytes(rank, size):
    """What a window sends, with ours; a window of accelerate's `no_sync` sends each gradient once."""
    environment(rank, size)
    one = accelerator()
    model = mlp()
    model, optimizer = one.prepare(model, sgd(model.parameters()))
    with counted() as sent:
        for i in items(size)[0][rank::size]:
            x, y = item(i)
            with one.accumulate(model):
                before = len(sent)
                one.backward(mse_loss(model(x), y), weight=len(x))
                assert one.sync_gradients or len(sent) == before
                optimizer.step()
    one.free_memory()
    return sent, one.step


@contextlib.contextmanager
def chunks_sent():
    """A list that gets ("backward", bytes) for each chunk that goes out while a backward runs, "after" for others."""
    from accumkernels.ranks.group import Group

    sent, original = [], Group.send

    def send(self, piece, dtype):
        when = "after" if torch._C._current_graph_task_id() == -1 else "backward"
        sent.append((when, piece.nbytes))
        return original(self, piece, dtype)

    with unittest.mock.patch.object(Group, "send", send):
        yield sent


SMALL = {"release": "backward", "bucket_bytes": 256}  # of which the model's gradients fill several


def sent_in_backward(rank, size):
    """What each trainer sends while backward runs, by itself, and where it may not; and what comes out of it."""
    from lightning.pytorch.strategies import DDPStrategy

    from tests.support import ranks

    environment(rank, size)
    found = {}
    numbers = list(range((STEPS + 2) * size - 1))

    def transformers_loop():
        trainer = transformers_trainer(size, ranks.shared, Regressor(), Items(numbers, ("x", "y")))
        trainer.accelerator._accumulator_options = SMALL
        trainer.train()
        return parameters(trainer.model), [], None

    static = DDPStrategy(process_group_backend="gloo", static_graph=True)
    loops = {
        "accelerate": lambda: accelerate_loop(rank, size, options=SMALL),
        "lightning": lambda: lightning_loop(rank, size, options=SMALL),
        "transformers": transformers_loop,
        "without": lambda: accelerate_loop(rank, size, options={"release": "microbatch"}),
        "static graph": lambda: lightning_loop(rank, size, strategy=static, options=SMALL),
    }
    for name, loop in loops.items():
        with chunks_sent() as sent:
            found[name] = *loop(), sent
    return found


def accelerate_ends_otherwise(rank, size):
    """The last rank leaves out the backward of the micro-batch that ends the window, after others of its own."""
    environment(rank, size)
    one = accelerator(options=SMALL)
    model = mlp()
    model, optimizer = one.prepare(model, sgd(model.parameters()))
    for i in items(size)[0][rank::size]:
        x, y = item(i)
        with one.accumulate(model):
            if rank + 1 < size or not one.sync_gradients:
                one.backward(mse_loss(model(x), y), weight=len(x))
            optimizer.step()
            optimizer.zero_grad()
    values = parameters(model)
    one.free_memory()
    return values


class CalledTwice(nn.Module):
    """Its second layer is checkpointed twice, in a way in which its parameters get two gradients in one backward."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.layer = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x):
        x = self.first(x)
        for _ in range(2):
            x = torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=True)
        return x.square().mean()


def reentrant_checkpointing(rank, size):
    """A layer called twice, which DistributedDataParallel refuses; and what the option makes of it."""
    environment(rank, size)
    found = {}
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(rank))
    twin = DistributedDataParallel(CalledTwice())
    found["stock"] = message(lambda: twin(x).backward())
    for name, options in (("default", SMALL), ("microbatch", {"release": "microbatch"})):
        one = accelerator(options=options, steps=1)
        model = CalledTwice()
        model, optimizer = one.prepare(model, sgd(model.parameters()))
        found[name] = message(lambda one=one, model=model: one.backward(model(x)))
        if name == "microbatch":
            optimizer.step()
            found["values"] = parameters(model)
        one.free_memory()
        assert all(p.grad is None for p in model.parameters()) or name == "microbatch"
    return found


def accelerate_refuses(rank, size):
    """What would hang or be wrong, on all ranks alike."""
    environment(rank, size)
    one = accelerator(steps=1)
    model = mlp()
    model, optimizer = one.prepare(model, sgd(model.parameters()))
    found = {}

    def joins():
        with one.join_uneven_inputs([model], even_batches=False):
            pass

    with unittest.mock.patch.object(type(one), "multi_device", True):  # on CPUs, accelerate does not join anything
        found["join"] = message(joins)
    x, y = item(0)
    one.backward(mse_loss(model(x), y))
    found["two that sync"] = message(lambda: one.backward(mse_loss(model(x), y)))
    one.free_memory()
    both = mlp()
    found["shared"] = message(lambda: one.prepare(both, sgd(both.parameters()), sgd(both.parameters())))
    return found


# ---- Lightning


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
    import lightning.pytorch as pl
    from lightning.pytorch.plugins.precision import MixedPrecision
    from lightning.pytorch.strategies import DDPStrategy

    plugins = []
    if precision == "fp16":
        plugins = [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=SCALE))]
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(
        accelerator="cpu",
        devices=size,
        strategy=DDPStrategy(process_group_backend="gloo") if strategy is None else strategy,
        max_epochs=keywords.pop("max_epochs", 1),
        accumulate_grad_batches=STEPS,
        gradient_clip_val=clip,
        precision="bf16-mixed" if precision == "bf16" else None,
        plugins=plugins or None,
        use_distributed_sampler=False,
        callbacks=[callback, *keywords.pop("callbacks", ())],
        **{**quiet, **keywords},
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


def lightning_fsdp2(rank, size):
    """ModelParallelStrategy."""
    environment(rank, size)
    found = {}
    for kind in (("fp32", None), ("fp32", MAX_NORM), ("bf16", None)):
        found[kind] = lightning_loop(rank, size, *kind, strategy=cpu_model_parallel(size), shard=True)
    return found


def cpu_model_parallel(size):
    """Lightning has it on GPUs only."""
    from lightning.pytorch.strategies import ModelParallelStrategy

    return ModelParallelStrategy(data_parallel_size=size, tensor_parallel_size=1, process_group_backend="gloo")


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


# ---- transformers


class Regressor(nn.Module):
    """The same model, as the Trainer calls it."""

    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, x, y):
        return {"loss": mse_loss(self.net(x).float(), y)}


def transformers_trainer(
    size, folder, model, dataset, precision="fp32", clip=None, optimizer=sgd, fsdp2=False, **arguments
):
    """Without shuffling; fp16 and FSDP2 as in `accelerator`."""
    import transformers
    from accelerate.state import AcceleratorState, GradientState, PartialState

    from accumkernels.integrations.transformers import Trainer

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    PartialState._reset_state()

    class Weighted(Trainer):
        def micro_batch_weight(self, inputs):
            return len(inputs["x"]) if "x" in inputs else super().micro_batch_weight(inputs)

        def _get_train_sampler(self, *_):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    settings = {
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": STEPS,
        "num_train_epochs": 1,
        "max_grad_norm": clip or 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "ddp_backend": "gloo",
        "disable_tqdm": True,
        "lr_scheduler_type": "constant",
        "bf16": precision == "bf16",
        "remove_unused_columns": False,
        "accelerator_config": {"even_batches": False},
        **arguments,
    }
    trainer = Weighted(
        model=model,
        args=transformers.TrainingArguments(str(folder), **settings),
        train_dataset=dataset,
        optimizers=(optimizer(model.parameters()), None),
        data_collator=lambda one: one[0] if "x" in one[0] else {k: torch.stack([o[k] for o in one]) for k in one[0]},
    )
    trainer.remove_callback(transformers.PrinterCallback)
    if fsdp2:
        import accelerate
        from accelerate.utils import FullyShardedDataParallelPlugin

        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False)
        trainer.accelerator.state.distributed_type = accelerate.DistributedType.FSDP
        trainer.accelerator.state.fsdp_plugin = plugin
        trainer.is_fsdp_enabled = True
    if precision == "fp16":
        trainer.accelerator.native_amp = True
        trainer.accelerator.state._mixed_precision = "fp16"
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    return trainer


def transformers_ddp(rank, size):
    """Weighted means, in every precision."""
    from tests.support import ranks

    environment(rank, size)
    found = {}
    kinds = {kind: {} for kind in KINDS}
    kinds["fused"] = {"clip": MAX_NORM, "optimizer": lambda p: torch.optim.SGD(p, LR, fused=True)}
    for kind, keywords in kinds.items():
        precision, clip = kind if isinstance(kind, tuple) else ("fp32", None)
        numbers = list(range((STEPS + 2) * size - 1))
        trainer = transformers_trainer(
            size,
            ranks.shared,
            Regressor(),
            Items(numbers, ("x", "y")),
            **{"precision": precision, "clip": clip, **keywords},
        )
        trainer.train()
        norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
        scaler = trainer.accelerator.scaler
        found[kind] = parameters(trainer.model), norms, None if scaler is None else scaler.get_scale()
    return found


def transformers_fsdp2(rank, size):
    """Sharded by accelerate."""
    from tests.support import ranks

    environment(rank, size)
    found = {}
    for clip in (None, MAX_NORM):
        dataset = Items(list(range((STEPS + 2) * size)), ("x", "y"))
        trainer = transformers_trainer(size, ranks.shared, Regressor(), dataset, clip=clip, fsdp2=True)
        trainer.train()
        norms = [float(_full(entry["grad_norm"])) for entry in trainer.state.log_history if "grad_norm" in entry]
        found["fp32", clip] = parameters(trainer.model), norms, None
    return found


VOCABULARY, LENGTH = 64, 12


def gpt2():
    """Tiny, random, without dropout."""
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0, embd_pdrop=0,
        attn_pdrop=0, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM", use_cache=False,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


class Tokens(torch.utils.data.Dataset):
    """Samples with 2 to 11 labels."""

    def __init__(self, n):
        generator = torch.Generator().manual_seed(0)
        self.samples = []
        for _ in range(n):
            ids = torch.randint(VOCABULARY, (LENGTH,), generator=generator)
            labels = ids.clone()
            labels[: int(torch.randint(1, LENGTH - 2, (), generator=generator))] = -100
            self.samples.append({"input_ids": ids, "labels": labels})

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return dict(self.samples[index])


def transformers_tokens(rank, size):
    """A model that takes `num_items_in_batch`; two `train()`s, of which the second finds the model wrapped."""
    from tests.support import ranks

    environment(rank, size)
    model = gpt2()
    trainer = transformers_trainer(size, ranks.shared, model, Tokens(STEPS * size), logging_strategy="no")
    before = copy.deepcopy(dict(parameters(model)))
    trainer.train()
    once = parameters(trainer.model)
    trainer.train()
    return before, once, parameters(trainer.model)


def transformers_resumed(rank, size):
    """Saved by rank 0 after the first window, with masters; test_resumed_on_one_rank loads it."""
    from accumkernels.integrations.transformers import ACCUMULATOR_NAME
    from tests.support import ranks

    environment(rank, size)
    folder = ranks.shared / f"transformers-{size}"
    model = gpt2().to(torch.bfloat16)
    trainer = transformers_trainer(
        size, folder, model, Tokens(2 * STEPS * size), save_strategy="steps", save_steps=1, logging_strategy="no"
    )
    trainer.accelerator._accumulator_options = trainer._accumulator_options = {"master_weights": True}
    trainer.train()
    torch.distributed.barrier()
    return (folder / "checkpoint-1" / ACCUMULATOR_NAME).is_file(), parameters(trainer.model)


DDP = [
    accelerate_ddp,
    accelerate_overflow,
    accelerate_recipe,
    accelerate_two_optimizers,
    accelerate_bytes,
    accelerate_ends_otherwise,
    sent_in_backward,
    reentrant_checkpointing,
    accelerate_refuses,
    lightning_ddp,
    lightning_overflow,
    lightning_two_optimizers,
    lightning_resumed,
    lightning_inside_a_window,
    transformers_ddp,
    transformers_tokens,
    transformers_resumed,
]
FOUR = [
    accelerate_ddp,
    accelerate_two_optimizers,
    lightning_ddp,
    lightning_two_optimizers,
    transformers_ddp,
    transformers_tokens,
    sent_in_backward,
]
SHARDED = [accelerate_fsdp2, lightning_fsdp2, transformers_fsdp2]
