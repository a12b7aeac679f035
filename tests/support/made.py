"""What a backward makes: tensors as large as a weight, which fused gradients never are."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Made(TorchDispatchMode):
    """Collects the shapes of all outputs that are in new memory, not in that of an op's arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        before = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in before:
                self.shapes |= {tuple(tensor.shape), tuple(reversed(tensor.shape))}
        return result


def weight_gradients(model: nn.Module, run: Callable[[], object]) -> set[str]:
    """Names of the matrices whose gradients existed at some moment while `run` ran. No two may have one shape."""
    matrices = {name: p for name, p in model.named_parameters() if p.dim() == 2 and p.requires_grad}
    shapes = [frozenset([tuple(p.shape), tuple(reversed(p.shape))]) for p in matrices.values()]
    assert len(set(shapes)) == len(shapes)
    with _Made() as made:
        run()
    return {name for name, p in matrices.items() if tuple(p.shape) in made.shapes}
