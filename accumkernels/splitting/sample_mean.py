"""Finds out whether a loss is a mean over samples, so that the number of samples is the weight of a micro-batch."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from ..errors import is_oom_error, logger
from ..hooks import eagerly
from ..snapshots import RandomState, Snapshot
from .batches import Samples, TreeSamples, form, is_list_of_tensors, tree_leaves
from .memory import Memory, let_go
from .run import returned_by

_log = logger(__name__)
_UNEQUAL = 2  # times as expensive as the cheapest samples are those that they are compared with, where there are any
_ROUNDING = 1e-5  # of a loss: what another order of its sum may change; samples are computed in equal shapes
_EPS = 8  # the same in units of the loss's dtype
_GROWTH = 0.1  # of a loss; half as many samples more have half as large a sum more
_LAST_NODES = 8
Items = Sequence[float] | Mapping[int, float]  # of samples, by their index in the batch
Take = Callable[[Sequence[int]], Any]  # collates some samples


class SampleMean:
    """Compares the loss of a few samples with those of either half of them twice, once for each kind of samples.

    In a mean over samples it is half the sum of theirs; a mean over tokens counts the half with the longer ones more.
    All three have the same shapes, so that a sample's loss is the same number in each of them. A sum would pass, but
    grows with the number of samples.

    Args:
        is_plain_mean: Whether the graph of a loss of so many samples, and marked items, proves that it is one; None if
            it looks so, and is no proof.
        has_class_weights: Whether the graph of a loss shows that its mean divides by weights that differ by class.
        memory: Of the accumulator's device, and no one else's: its limit holds for what is asked here, too.
    """

    def __init__(
        self,
        is_plain_mean: Callable[[Tensor, int, float], bool | None],
        has_class_weights: Callable[[Tensor], bool],
        memory: Memory,
    ) -> None:
        self._is_plain_mean = is_plain_mean
        self._has_class_weights = has_class_weights
        self._memory = memory
        self._known: set[Any] = set()
        self._tries: dict[Any, tuple[int, int]] = {}  # by kind, tries that told nothing and batches since the last
        self._warned = False

    def check(
        self,
        loss_fn: Callable[[Any], Any],
        samples: Samples,
        costs: Sequence[float],
        part: Any,
        indices: Sequence[int],
        loss: Tensor,
    ) -> None:
        """Refuse a loss that is neither a mean over samples nor comes with a weight.

        `loss_fn` is called without gradients, on four to six samples. The modules that it calls run in eval mode; their
        buffers and attributes, and the random state, are kept. If the samples tell nothing, since they have the same
        loss or the same cost, later batches are asked, ever more rarely. A tree of tensors is not asked where its rows
        have as many items each (see `TreeSamples.items`) and the loss's graph proves a mean over them; where it only
        looks like one, no warning says that samples could not tell. A mean with class weights is refused without being
        asked, since a few samples, of one class as likely as not, could not tell.

        Args:
            loss_fn: The user's.
            samples: The batch, two samples at least.
            costs: Of each sample of a list.
            part: Some of them, collated; a few are cut out of it, or others are collated if these tell less.
            indices: Which they are.
            loss: Of this part, with its graph.

        Raises:
            ValueError: The loss is another mean, or a sum.
        """
        function: Any = loss_fn
        while isinstance(function, functools.partial):
            function = function.func
        if self._has_class_weights(loss):
            raise _refusal()
        items = samples.items()
        shows = items is not None and len(set(items)) > 1
        proven: bool | None = False
        if not (samples.padded or shows):
            number = len(indices)
            proven = self._is_plain_mean(loss, number, number if items is None else sum(items[i] for i in indices))
            if proven:
                return
        kind = getattr(function, "__code__", type(function)), form(samples.sample(0)), _last_nodes(loss), shows
        if kind in self._known:
            return
        tries, since = self._tries.get(kind, (0, 0))
        if tries and since < 2 ** (tries - 1) - 1:
            self._tries[kind] = tries, since + 1
            return
        costs = items or costs
        outer = sys.exc_info()[1]
        found: bool | str | None = None  # whether it is one; None if these samples cannot tell, or why none could
        try:
            # The limit holds also where a part that is known to fit is not measured.
            limited = self._memory.measured() if self._memory.counts_ops else contextlib.nullcontext()
            with limited, _untouched() as begin_anew:
                for chosen, take, items_of in _selections(samples, costs, indices, part):
                    found = _compare(loss_fn, take, _halves(chosen, items_of), items_of, begin_anew)
                    if found is not None:
                        break
        except Exception as error:  # of code that is not made for two samples, or needs gradients; training will tell
            reason = type(error).__name__ if is_oom_error(error) else f"{type(error).__name__}: {error}"
            let_go(error, outer)
            found = f"its loss of a few samples could not be computed ({reason})"
        finally:
            torch.clear_autocast_cache()  # some releases of torch keep copies without a graph in it
        if found is False:
            raise _refusal()
        if found is True:
            self._known.add(kind)
            return
        self._tries[kind] = tries + 1, 0
        if found is not None and proven is False and not self._warned:
            self._warned = True
            _log.warning(
                "backward_batch(): no weight was given, and whether the loss is a mean over samples could not be found "
                "out: %s. If it is a mean over tokens, return their number with the loss: `return loss, (labels != "
                "-100).sum()`. If it is a mean over samples, `return loss, len(labels)` says so",
                found,
            )


def _compare(
    loss_fn: Callable[[Any], Any], take: Take, halves: list[list[int]], items: Items, begin_anew: Callable[[], None]
) -> bool | str | None:
    """Whether the loss is a mean over the samples of these halves; `take` collates some of them. See `check`."""
    one_half, other_half = halves

    def loss_of(*chosen: int) -> Tensor:
        return returned_by(loss_fn(take(chosen)))[0]

    begin_anew()
    first = loss_of(*one_half, *other_half)
    found = [float(first)]
    for half, times in ((one_half, 2), (other_half, 2), (other_half, 3)):
        begin_anew()
        found.append(float(loss_of(*half * times)))
    both, one, other, grown = found
    if not all(map(math.isfinite, found)):
        # The mean over no label is NaN. The half that has none spoils it alone, but not with the other together.
        return False if math.isfinite(both) else None
    eps = _EPS * torch.finfo(first.dtype).eps

    def cancels(difference: float) -> bool:
        """Whether it is the rounding of samples whose losses cancel, as those of advantages do."""
        alone = (abs(float(loss_of(*[index] * 2 * len(half)))) for half in halves for index in half)
        return difference <= eps * max(filter(math.isfinite, alone), default=0.0)

    rounding = max(eps, _ROUNDING) * max(map(abs, found))
    difference = abs(both - (one + other) / 2)
    if difference > rounding:
        random = abs(float(loss_of(*one_half, *other_half)) - both) > rounding  # with other random numbers
        if random:
            return "it is random, also in eval mode"
        return None if cancels(difference) else False
    if abs(grown - other) > _GROWTH * abs(other):
        return None if cancels(abs(grown)) else False  # a sum
    of_one, of_both = (sum(items[index] for index in half) for half in (one_half, one_half + other_half))
    share = of_one / of_both if of_both else 0.5
    return True if abs(share - 0.5) * abs(one - other) > 2 * rounding else None


@contextlib.contextmanager
def _untouched() -> Iterator[Callable[[], None]]:
    """Compute without gradients and leave no trace; yields a function that restores the random state."""
    state = RandomState()
    met: set[int] = set()
    snapshots: list[Snapshot] = []

    def meet(module: nn.Module, inputs: Any) -> None:
        if id(module) not in met:
            snapshots.append(Snapshot(module, parameters=False))
            met.update(map(id, module.modules()))
            module.eval()

    hook = register_module_forward_pre_hook(meet)
    try:
        with torch.no_grad(), eagerly(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Using `torch.compile\\(module\\)` when there are global hooks")
            yield state.restore
    finally:
        hook.remove()
        for snapshot in reversed(snapshots):
            snapshot.restore()
        state.restore()


def _refusal() -> ValueError:
    return ValueError(
        "backward_batch(): the loss is not a mean over samples, so that each part of the batch must say what it "
        "weighs. Return that with the loss: of a mean over tokens it is their number, `return loss, (labels != "
        "-100).sum()`; with class weights `class_weights[labels].sum()`; of a sum 1, with acc.step(optimizer, "
        "divisor=...). A loss that couples samples needs acc.backward_coupled"
    )


def _last_nodes(loss: Tensor) -> tuple[str, ...]:
    """The last nodes of a loss's graph: one function may compute several losses."""
    nodes: list[Any] = [loss.grad_fn]
    names: list[str] = []
    while nodes and len(names) < _LAST_NODES:
        node = nodes.pop()
        if node is not None:
            names += [node.name()] if node.name() != "ToCopyBackward0" else []  # which autocast inserts
            nodes += [child for child, _ in reversed(node.next_functions)]
    return tuple(names)


def _halves(indices: Sequence[int], items: Items) -> list[list[int]]:
    """Two expensive samples and the two cheapest, or one of each: samples that weigh alike have no class weights, too.

    The expensive ones are no more so than they must, since all are padded to them.
    """
    order = sorted(indices, key=lambda index: -items[index])
    number = min(2, len(order) // 2)
    others, cheap = order[:-number], order[-number:]
    unequal = [index for index in others if 0 < items[index] >= _UNEQUAL * items[cheap[0]]]
    return [unequal[-number:] if len(unequal) >= number else others[:number], cheap]


def _selections(
    samples: Samples, costs: Sequence[float], indices: Sequence[int], part: Any
) -> Iterator[tuple[Sequence[int], Take, Items]]:
    """Samples to compare, with what collates them: of a part, as it is, and then the most unequal of the whole batch.

    Before training, long texts have nearly the same mean, and only short ones another.
    """
    extremes = sum(_halves(range(len(costs)), costs), [])
    differ = len(set(costs)) > 1
    take, items = _rows_of(part, indices, costs) if samples.padded else (samples.part, costs)
    if take is not None and len(indices) > 1 and (not differ or len({items[index] for index in indices}) > 1):
        yield indices, take, items
        if set(extremes) <= set(indices):
            return
    if samples.padded:
        take, items = _rows_of(samples.part(extremes), extremes, costs)
    yield extremes, take or samples.part, items


def _rows_of(part: Any, indices: Sequence[int], costs: Sequence[float]) -> tuple[Take | None, Items]:
    """A function that takes some samples out of the part that these have been collated to; None if it has no rows.

    With their items, as far as the rows show them: of a text with a prompt, its labels are fewer than its tokens. Of
    lists of tensors, as of boxes, a part does not tell whether their items are samples, or rows of each are.
    """
    lists = (leaf for _, leaf in tree_leaves(part, is_leaf=lambda tree: is_list_of_tensors(tree) and tree is not part))
    if any(map(is_list_of_tensors, lists)):
        return None, costs
    with contextlib.suppress(TypeError, ValueError):
        rows = TreeSamples(part)
        if len(rows) == len(indices):
            rows_of = {index: row for row, index in enumerate(indices)}
            items = rows.items()
            found = dict(zip(indices, items, strict=True)) if items else costs
            return lambda chosen: rows.part([rows_of[index] for index in chosen]), found
    return None, costs
