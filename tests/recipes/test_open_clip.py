"""docs/recipes/open_clip.md: its `train_one_epoch` against the big batch, beside open_clip's own."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace

import pytest
import torch

open_clip = pytest.importorskip("open_clip")
train = pytest.importorskip("open_clip_train.train")

import accumkernels as ak  # noqa: E402
from tests.support.recipes import check, difference, recipe, train_big  # noqa: E402

pytestmark = [pytest.mark.integrations, pytest.mark.usefixtures("one_thread")]

SIZES = [5, 5, 3, 4, 2]  # three batches to a step; the last step has two
FREQUENCY = 3
NORM = 0.5  # below the norms there are
SCALE_FACTOR = 0.01  # how exactly the gradient of open_clip's scale is FREQUENCY times ours


def clip_model(siglip=False):
    """Two tiny towers."""
    torch.manual_seed(0)
    biased = {"init_logit_scale": math.log(10), "init_logit_bias": -10.0} if siglip else {}
    return open_clip.model.CLIP(
        embed_dim=8,
        vision_cfg=open_clip.CLIPVisionCfg(layers=1, width=16, head_width=8, patch_size=4, image_size=8),
        text_cfg=open_clip.CLIPTextCfg(context_length=6, vocab_size=32, width=16, heads=2, layers=1),
        output_dict=True,
        **biased,
    )


def pairs(sizes):
    """Images and texts."""
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(n, 3, 8, 8, generator=generator), torch.randint(1, 32, (n, 6), generator=generator)) for n in sizes
    ]


def joined(window):
    """One batch."""
    return torch.cat([images for images, _ in window]), torch.cat([texts for _, texts in window])


def sgd(parameters, lr=0.5):
    """Moves parameters by the gradient itself."""
    return torch.optim.SGD(parameters, lr=lr)


def big_batch(model, windows, loss, max_norm=None, lr=0.5):
    """In float64."""

    def loss_of(twin, window):
        images, texts = joined(window)
        return loss(**twin(images.double(), texts))

    def clip(twin):
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(twin.parameters(), max_norm)

    return train_big(model, windows, loss_of, lambda parameters: sgd(parameters, lr), clip)


@pytest.mark.parametrize("siglip", [False, True], ids=["clip", "siglip"])
@pytest.mark.parametrize("max_norm", [None, NORM])
def test_two_steps(siglip, max_norm):
    """Batches of unequal sizes; the second step has fewer of them."""
    model, data = clip_model(siglip), pairs(SIZES)
    loss = open_clip.loss.SigLipLoss() if siglip else open_clip.ClipLoss()
    truth = big_batch(model, [data[:FREQUENCY], data[FREQUENCY:]], loss, max_norm)
    ours = copy.deepcopy(model)
    acc = ak.FusedAccumulator(ours)
    steps = recipe("open_clip")["train_one_epoch"](
        ours, acc, data, loss, sgd(acc.parameters()), lambda step: None, FREQUENCY, grad_clip_norm=max_norm
    )
    assert steps == 2
    check("open_clip", difference(model, ours, truth))


def test_open_clips_own():
    """Its towers' gradients are the big batch's, that of `logit_scale` is too large by the number of batches."""
    model, data = clip_model(), pairs([4] * FREQUENCY)
    lr = 0.1  # so small that the scale does not come to its limits
    truth = big_batch(model, [data], open_clip.ClipLoss(), lr=lr)
    stock = copy.deepcopy(model)
    loader = type("Loader", (list,), {"num_batches": FREQUENCY, "num_samples": 4 * FREQUENCY})(data)
    numbers = {
        "accum_freq": FREQUENCY,
        "batch_size": 4,
        "world_size": 1,
        "rank": 1,
        "local_rank": 1,
        "log_every_n_steps": 9,
    }
    off = dict.fromkeys(("distill", "horovod", "log_local", "wandb"), False)
    arguments = SimpleNamespace(
        device="cpu", precision="fp32", skip_scheduler=True, grad_clip_norm=None, **numbers, **off
    )
    shown = {"train": SimpleNamespace(set_epoch=lambda epoch: None, dataloader=loader)}
    loss, optimizer = open_clip.ClipLoss(), sgd(stock.parameters(), lr)
    train.train_one_epoch(stock, shown, loss, 0, optimizer, None, None, None, arguments)

    def way(trained):
        return (trained.logit_scale.double() - model.logit_scale.double()).item()

    assert way(stock) / way(truth) == pytest.approx(FREQUENCY, rel=SCALE_FACTOR)
    for trained in (stock, truth):  # towers agree
        trained.logit_scale.data.copy_(model.logit_scale)
    check("open_clip", difference(model, stock, truth))
