"""Losses whose parts divide differently: which way gives the gradient of the whole batch, and which only looks like it.

    python examples/loss_parts.py

A small mixture of experts is trained on texts of unequal length, in unequal micro-batches. Its loss has parts that are
means over tokens (cross-entropy, z-loss), over rows (a KL term, the balance of experts within each sequence) and one
that couples all tokens of the batch (the balance over the batch). Each line is the error of one way to accumulate such
a loss: the distance of its gradient from that of the whole batch in fp64, over the length of the latter. The guide is
docs/guides/loss_parts.md.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

import accumkernels as ak

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EXPERTS, WIDTH, VOCABULARY, MASKED = 8, 32, 50, -100
LENGTHS, SPLIT = range(3, 27), (8, 4, 10, 2)  # of the rows, and the rows of each micro-batch
Z, KL, SEQUENCE, BATCH = 0.1, 0.5, 1.0, 1.0  # what the parts are multiplied by
CW = torch.linspace(0.2, 3.0, VOCABULARY, device=DEVICE)  # class weights
Batch = tuple[Tensor, Tensor]  # tokens and labels, int64 [rows, length]


class Rows(NamedTuple):
    """What a micro-batch adds to each part: sums over the tokens that have a label, by row."""

    labels: Tensor  # [rows]: how many
    cross_entropy: Tensor  # [rows]
    z: Tensor  # [rows]: the squared log-sum-exp of the router's logits
    kl: Tensor  # [rows]: one number per row, no sum over tokens
    balance: Tensor  # [rows]: E * sum_e f_e p_e of each sequence on its own
    chosen: Tensor  # [rows, EXPERTS]: tokens that each expert got
    probability: Tensor  # [rows, EXPERTS]


class Experts(nn.Module):
    """One layer of experts, of which the router chooses one per token."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.router = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH**0.5)
        self.latent, self.head = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, batch: Batch, class_weights: Tensor | None = None) -> Rows:
        """Return the sums of every part."""
        tokens, labels = batch
        real = (labels != MASKED).to(self.experts.dtype)
        hidden = self.embedding(tokens)
        logits = self.router(hidden)
        probability = logits.softmax(-1)
        best = probability.argmax(-1)
        mixed = torch.einsum("btd,btde->bte", hidden, self.experts[best]) * probability.gather(-1, best[..., None])
        scores = self.head(torch.tanh(hidden + mixed)).transpose(1, 2)
        losses = cross_entropy(scores, labels, class_weights, ignore_index=MASKED, reduction="none")
        count = real.sum(1)
        latent = self.latent((hidden * real[..., None]).sum(1) / count[:, None])
        chosen = (one_hot(best, EXPERTS) * real[..., None]).sum(1)
        probability = (probability * real[..., None]).sum(1)
        return Rows(
            labels=count,
            cross_entropy=losses.sum(1),
            z=(logits.logsumexp(-1).square() * real).sum(1),
            kl=latent.square().sum(1) / 2,
            balance=EXPERTS * (chosen * probability).sum(1) / count.square(),
            chosen=chosen,
            probability=probability,
        )


def batch() -> Batch:
    """Return one batch of rows from 3 to 26 tokens, padded."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (len(LENGTHS), max(LENGTHS)), generator=generator)
    labels = torch.randint(VOCABULARY, tokens.shape, generator=generator)
    labels[torch.arange(max(LENGTHS)) >= torch.tensor(LENGTHS)[:, None]] = MASKED
    return tokens.to(DEVICE), labels.to(DEVICE)


def micro_batches() -> list[Batch]:
    """Cut the batch into parts."""
    return list(zip(*(tensor.split(SPLIT) for tensor in batch()), strict=True))


# ---- the losses, of a whole batch or of a micro-batch as if it were one


def per_token(rows: Rows) -> Tensor:
    """Cross-entropy and z-loss: means over the same tokens."""
    return (rows.cross_entropy + Z * rows.z).sum() / rows.labels.sum()


def with_kl(rows: Rows) -> Tensor:
    """A mean over tokens and one over rows."""
    return per_token(rows) + KL * rows.kl.mean()


def with_sequence_balance(rows: Rows) -> Tensor:
    """A mean over tokens and another over rows."""
    return per_token(rows) + SEQUENCE * rows.balance.mean()


def balance(rows: Rows) -> Tensor:
    """Return E * sum_e f_e p_e over all tokens: a product of means is no mean."""
    chosen, probability = (sums.sum(0) / rows.labels.sum() for sums in (rows.chosen, rows.probability))
    return EXPERTS * (chosen * probability).sum()


def with_batch_balance(rows: Rows) -> Tensor:
    """All of it."""
    return with_kl(rows) + SEQUENCE * rows.balance.mean() + BATCH * balance(rows)


# ---- ways to accumulate them; each leaves the window to be ended


Way = Callable[[ak.FusedAccumulator, nn.Module], None]


def weighted(loss_fn: Callable[[Rows], Tensor], weight: Callable[[Batch], Tensor | float]) -> Way:
    """Accumulate the loss of each micro-batch, with one weight for all of its parts."""

    def way(acc: ak.FusedAccumulator, model: nn.Module) -> None:
        for part in micro_batches():
            acc.backward(loss_fn(model(part)), weight=weight(part))
        acc.finalize()

    return way


def labels_of(part: Batch) -> Tensor:
    """Count the labels."""
    return (part[1] != MASKED).sum()


def over_totals(parts: Callable[[Rows, Tensor, int], Tensor]) -> Way:
    """Divide sums by totals that are known before any forward: the losses of the window add up, with divisor=1."""

    def way(acc: ak.FusedAccumulator, model: nn.Module) -> None:
        window = micro_batches()
        labels, rows = sum(map(labels_of, window)), sum(len(x) for x, _ in window)
        for part in window:
            acc.backward(parts(model(part), labels, rows))
        acc.finalize(divisor=1)

    return way


def coupled(acc: ak.FusedAccumulator, model: nn.Module) -> None:
    """Compute the loss of the whole batch from rows, in two passes."""
    acc.backward_coupled(micro_batches(), model, lambda *rows: with_batch_balance(Rows(*rows)))
    acc.finalize()


def balance_apart(factor: float) -> Way:
    """Add the balance of each micro-batch, times a factor, to what is right otherwise."""
    return over_totals(
        lambda rows, labels, count: (
            (rows.cross_entropy + Z * rows.z).sum() / labels
            + (KL * rows.kl + SEQUENCE * rows.balance).sum() / count
            + factor * BATCH * balance(rows)
        )
    )


def class_weighted(weight: Callable[[Batch], Tensor | float]) -> Way:
    """Accumulate cross-entropy with class weights, as nn.CrossEntropyLoss(CW) averages it."""

    def way(acc: ak.FusedAccumulator, model: nn.Module) -> None:
        for part in micro_batches():
            y = part[1][part[1] != MASKED]
            acc.backward(model(part, CW).cross_entropy.sum() / CW[y].sum(), weight=weight(part))
        acc.finalize()

    return way


def class_weighted_whole(model: nn.Module, whole: Batch) -> Tensor:
    """Return its loss over the whole batch."""
    y = whole[1][whole[1] != MASKED]
    return model(whole, CW.to(model.experts.dtype)).cross_entropy.sum() / CW[y].sum()


def of(loss_fn: Callable[[Rows], Tensor]) -> Callable[[nn.Module, Batch], Tensor]:
    """Return its loss over the whole batch."""
    return lambda model, whole: loss_fn(model(whole))


CASES: dict[str, tuple[Callable[[nn.Module, Batch], Tensor], dict[str, Way]]] = {
    "cross-entropy and z-loss": (
        of(per_token),
        {"weight=labels": weighted(per_token, labels_of), "no weight": weighted(per_token, lambda part: 1)},
    ),
    "cross-entropy with class weights": (
        class_weighted_whole,
        {
            "weight=CW[y].sum()": class_weighted(lambda part: CW[part[1][part[1] != MASKED]].sum()),
            "weight=labels": class_weighted(labels_of),
        },
    ),
    "and KL per row": (
        of(with_kl),
        {
            "sums over totals, divisor=1": over_totals(
                lambda rows, labels, count: (
                    (rows.cross_entropy + Z * rows.z).sum() / labels + KL * rows.kl.sum() / count
                )
            ),
            "weight=labels": weighted(with_kl, labels_of),
            "weight=rows": weighted(with_kl, lambda part: len(part[0])),
        },
    ),
    "and balance per sequence": (
        of(with_sequence_balance),
        {
            "sums over totals, divisor=1": over_totals(
                lambda rows, labels, count: (
                    (rows.cross_entropy + Z * rows.z).sum() / labels + SEQUENCE * rows.balance.sum() / count
                )
            ),
            "weight=labels": weighted(with_sequence_balance, labels_of),
        },
    ),
    "and balance over the batch": (
        of(with_batch_balance),
        {
            "backward_coupled": coupled,
            "balance of each micro-batch": balance_apart(1.0),
            "balance of each micro-batch / K": balance_apart(1 / len(SPLIT)),
            "weight=labels": weighted(with_batch_balance, labels_of),
        },
    ),
}


def errors(name: str) -> dict[str, float]:
    """Return the error of each way to accumulate one of the losses."""
    whole_loss, ways = CASES[name]
    model = Experts().to(DEVICE)
    truth = copy.deepcopy(model).double()
    expected = torch.autograd.grad(whole_loss(truth, batch()), list(truth.parameters()), materialize_grads=True)
    found = {}
    for way, accumulate in ways.items():
        twin = copy.deepcopy(model)
        with ak.FusedAccumulator(twin) as acc:
            accumulate(acc, twin)
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in twin.parameters()]
        squares = sum((grad.double() - e).square().sum() for grad, e in zip(grads, expected, strict=True))
        found[way] = (squares / sum(e.square().sum() for e in expected)).sqrt().item()
    return found


def main() -> int:
    """Print the table."""
    print(f"{'loss':34}{'accumulated with':34}error of the gradient")
    for name in CASES:
        for way, error in errors(name).items():
            print(f"{name:34}{way:34}{error:.1e}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
