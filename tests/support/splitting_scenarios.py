"""Whole batches on two ranks: functions of rank and size, which check what they find against all data in float64."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import accumkernels as ak
from accumkernels.splitting.memory import LiveBytes
from tests.support.fsdp2_scenarios import data, net, shard
from tests.support.models import batch, grads_of, mlp, relative_error
from tests.support.ranks import message
from tests.support.splitting import Lengths, truth

EXACT = 1e-12  # of float64
SINGLE = 1e-5  # of float32, in which sums are


def one_rank_runs_out(rank, size):
    """Ranks split as they must, in windows that mark their last batch, too; one has memory errors."""
    for release, marked in (("microbatch", False), ("backward", False), ("backward", True)):
        model = mlp(torch.float64)
        acc = ak.FusedAccumulator(model, process_group=torch.distributed.group.WORLD, release=release, bucket_bytes=8)
        for window in range(3):
            data = [batch(5 + 4 * r + window, torch.float64, seed=10 * window + r) for r in range(size)]
            fails = [torch.OutOfMemoryError("planted")] * (rank == 1 and not window)

            def loss_fn(part, fails=fails, model=model):
                if fails:
                    raise fails.pop()
                return mse_loss(model(part[0]), part[1])

            cut = [data[rank]] if not marked else [tuple(t[:3] for t in data[rank]), tuple(t[3:] for t in data[rank])]
            for part in acc.window(cut) if marked else cut:
                acc.backward_batch(part, loss_fn, micro_batch=[3, 4][rank])
            acc.finalize()
            x, y = (torch.cat(parts) for parts in zip(*data, strict=True))
            _, grads = truth(model, lambda twin, x=x, y=y: mse_loss(twin(x), y))
            assert relative_error(grads_of(acc), grads) < EXACT
            acc.zero_()
        acc.remove()


def lengths_jump(rank, size):
    """200 windows under a limit that the longest sample fits, on each rank; DistributedDataParallel is kept silent."""
    model = DistributedDataParallel(Lengths())
    inner = model.module
    acc = ak.FusedAccumulator(model, memory_limit=2**20)
    optimizer = torch.optim.AdamW(acc.parameters(), lr=1e-3)
    device = LiveBytes(300_000)
    device.add([*inner.parameters(), *acc.flat_buffers])
    generator = torch.Generator().manual_seed(rank)
    sizes = []
    for window in range(200):
        longest = [8, 64, 3, 30][(window // 3 + rank) % 4]
        lengths = [longest, *torch.randint(1, longest + 1, (6,), generator=generator).tolist()]
        with device:
            report = acc.backward_batch(Lengths.samples(lengths, window), inner.loss, collate=Lengths.collate)
        sizes.append(len(report.sizes))
        assert sum(report.sizes) == 7
        acc.step(optimizer)
    assert min(sizes) < max(sizes)


def fsdp2_agrees(rank, size):
    """Equal numbers of micro-batches; what a rank runs beyond its samples adds nothing, though its loss be NaN."""
    model, single = shard(net()), net()
    acc = ak.FusedAccumulator(model)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
    plain = torch.optim.SGD(single.parameters(), lr=0.1)
    for window, counts in enumerate([(7, 2), (1, 5), (4, 4)]):
        batches = [data(count, 10 * window + r) for r, count in enumerate(counts)]
        x, y = batches[rank]
        calls = []

        def loss_fn(part, calls=calls, own=counts[rank]):
            calls.append(len(part[0]))
            loss = mse_loss(model(part[0]), part[1])
            return loss * float("nan") if len(calls) > own else loss

        report = acc.backward_batch((x, y), loss_fn, micro_batch=2)
        assert len(calls) == -(-max(counts) // 2)
        assert sum(report.sizes) == counts[rank]
        acc.step(optimizer)
        plain.zero_grad()
        mse_loss(single(torch.cat([b[0] for b in batches])), torch.cat([b[1] for b in batches])).backward()
        plain.step()
        for sharded, p in zip(model.parameters(), single.parameters(), strict=True):
            torch.testing.assert_close(sharded.full_tensor(), p, rtol=1e-11, atol=1e-13)
    kind, text = message(acc.backward_batch, data(4, 0), loss_fn)
    assert kind == "ValueError" and "accumkernels.memory_report of the model before fully_shard says" in text
    kind, text = message(ak.memory_report, model, optimizer, lambda n: data(n, 0), 2, loss_fn=mse_loss, fake=True)
    assert kind == "ValueError" and "is sharded (DTensor)" in text
    kind, text = message(acc.backward_batch, data(4 * rank, 0), loss_fn, micro_batch=2)
    assert kind == "ValueError" and "a rank's batch has no samples" in text


def synchronised_batchnorm_is_refused(rank, size):
    """For "auto": one rank that splits would leave the other waiting."""
    model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5)))
    acc = ak.FusedAccumulator(model, process_group=torch.distributed.group.WORLD)
    kind, text = message(acc.backward_batch, batch(4), lambda part: model(part[0]).sum())
    assert kind == "ValueError" and "micro_batch='auto' where ranks communicate" in text


TWO_RANKS = [one_rank_runs_out, lengths_jump, fsdp2_agrees, synchronised_batchnorm_is_refused]
