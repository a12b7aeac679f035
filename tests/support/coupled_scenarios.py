"""What tests/ranks run of `backward_coupled` on every rank: losses over the encodings of all ranks, gathered."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.nn.functional import all_gather
from torch.nn.functional import cross_entropy, normalize
from torch.nn.parallel import DistributedDataParallel

import accumkernels as ak
from tests.support.models import relative_error
from tests.support.ranks import logged
from tests.support.towers import PassOn, Towers, chunked, data

EXACT = 1e-12  # fp64 rounding
WEIGHTS = [1.0, 3.0]  # of the micro-batches of a window
UNEQUAL, EQUAL = [4, 3], [4, 4]  # samples of a chunk, by rank: with 3 and 4 chunks, or the same number


def pairs(step, rank, sizes=UNEQUAL):
    """A rank's chunks of a micro-batch."""
    return chunked(*data(seed=10 * step + rank), sizes[rank])


def seed(step, rank):
    """Dropout differs between ranks."""
    torch.manual_seed(100 + 10 * step + rank)


def truth(model, size, sizes=UNEQUAL):
    """Gradients of the weighted mean of losses over the samples of all ranks, by one process, and that mean."""
    mean = 0.0
    for step, weight in enumerate(WEIGHTS):
        encoded = []
        for rank in range(size):
            seed(step, rank)
            encoded += [model.encode(pair) for pair in pairs(step, rank, sizes)]
        images, texts = (torch.cat(parts) for parts in zip(*encoded, strict=True))
        mean = mean + model.loss(images, texts) * (weight / sum(WEIGHTS))
    mean.backward()
    return [p.grad for p in model.parameters() if p.requires_grad], mean.item()


def global_loss(model):
    """The loss of all samples, the same on every rank."""
    return lambda images, texts: model.loss(torch.cat(all_gather(images)), torch.cat(all_gather(texts)))


def own_rows(model):
    """The part of the loss that belongs to this rank's samples: its mean over ranks is the loss of all samples."""

    def loss(images, texts):
        all_images, all_texts = (normalize(torch.cat(all_gather(part)), dim=1) for part in (images, texts))
        images, texts = normalize(images, dim=1), normalize(texts, dim=1)
        targets = torch.arange(len(images)) + len(images) * dist.get_rank()
        scale = model.scale.exp()
        to_texts, to_images = scale * images @ all_texts.T, scale * texts @ all_images.T
        return (cross_entropy(to_texts, targets) + cross_entropy(to_images, targets)) / 2

    return loss


def gathered_encodings(rank, size):
    """One process on all data, to fp64 rounding: both forms of the loss, in DistributedDataParallel and without."""
    expected, mean = truth(Towers(), size)
    options = {}, {"release": "microbatch"}, {"release": "backward", "bucket_bytes": 64}
    for make_loss, ddp, kwargs in itertools.product((global_loss, own_rows), (False, True), options):
        model = Towers()
        model.forward = model.encode
        whole = DistributedDataParallel(model) if ddp else model
        if not ddp:
            kwargs = {**kwargs, "process_group": dist.group.WORLD}
        acc = ak.FusedAccumulator(whole, **kwargs)
        for step, weight in enumerate(WEIGHTS):
            seed(step, rank)
            acc.backward_coupled(pairs(step, rank), whole, make_loss(model), weight=weight)
        acc.finalize()
        name = make_loss.__name__, ddp, kwargs
        assert relative_error([p.grad for p in model.parameters()], expected) < EXACT, name
        assert abs(acc.metrics()["loss"].item() / mean - 1) < EXACT, name
        acc.remove()


def gathered_without_gradients(rank, size):
    """What the guide warns of: with the rank's own encodings alone differentiable, all but the temperature is 1/N."""
    expected, _ = truth(Towers(), size)

    def gather(own):
        parts = [torch.empty_like(own) for _ in range(size)]
        dist.all_gather(parts, own.detach())
        parts[rank] = own
        return torch.cat(parts)

    model = Towers()
    acc = ak.FusedAccumulator(model, process_group=dist.group.WORLD)
    for step, weight in enumerate(WEIGHTS):
        seed(step, rank)
        chunks = pairs(step, rank)
        acc.backward_coupled(chunks, model.encode, lambda x, y: model.loss(gather(x), gather(y)), weight=weight)
    acc.finalize()
    factors = [1 if p is model.scale else size for p in model.parameters()]
    grads = [p.grad * factor for p, factor in zip(model.parameters(), factors, strict=True)]
    assert relative_error(grads, expected) < EXACT


def gathered_encodings_of_shards(rank, size):
    """The same over FSDP2, whose forwards and backwards are collective: every rank has as many chunks."""
    head, twin = Towers(), Towers()  # the temperature is whole on every rank, and frozen
    for frozen in (head, twin):
        frozen.scale.requires_grad_(False)
    expected, mean = truth(twin, size, EQUAL)
    for release in ("microbatch", "backward"):
        model = Towers()
        model.forward = model.encode
        del model.scale
        mesh = init_device_mesh("cpu", (size,))
        for tower in (model.images, model.texts):
            fully_shard(tower, mesh=mesh)
        fully_shard(model, mesh=mesh)
        acc = ak.FusedAccumulator(model, release=release)
        for step, weight in enumerate(WEIGHTS):
            seed(step, rank)
            acc.backward_coupled(pairs(step, rank, EQUAL), model, global_loss(head), weight=weight)
        acc.finalize()
        grads = [p.grad.full_tensor() for p in model.parameters()]
        assert relative_error(grads, expected) < EXACT, release
        assert abs(acc.metrics()["loss"].item() / mean - 1) < EXACT, release


def functions_of_encoders(rank, size):
    """Are named once by a warning if the loss has a part of the weight in it, as those of a plain loss are."""
    for release, weight in itertools.product(("microbatch", "backward"), (4, 3)):
        model = Towers()
        acc = ak.FusedAccumulator(model, process_group=dist.group.WORLD, release=release, bucket_bytes=64)
        with logged() as texts:
            for step in range(2):
                encode = lambda pair, model=model: tuple(map(PassOn.apply, model.encode(pair)))  # noqa: E731
                acc.backward_coupled(pairs(step, rank, EQUAL), encode, model.loss, weight=weight)
        assert len(texts) == (weight == 3)
        assert all("has PassOn: " in text for text in texts)
        acc.zero_()


TWO_RANKS = [gathered_encodings, gathered_without_gradients, functions_of_encoders]
TWO_RANKS_FSDP2 = [gathered_encodings_of_shards]
