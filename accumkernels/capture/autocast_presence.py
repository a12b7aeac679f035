"""Decides whether autocast casts a model's parameters, and so whether to put the autocast route on its modules."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..buffers.store import Store
from .autocast import AutocastRoute
from .captures import Capture
from .compiled import split

# Backwards between two looks at the graph. Looking at a node takes 0.3 microseconds, running it 10 or more.
EVERY = 32
# Elements. A module with only smaller parameters is left to autocast unless the user asks for the route: its hooks take
# longer than the bytes that they save. On a CPU (benchmarks.defaults, micro-batches of 32 tokens) the route made the
# window of a GPT with 2**16 in its largest layers 3 to 8 % longer; 1.1 * 2**17 made no difference, 2**18 a third less.
SMALLEST = 2**17


def may_route(module: nn.Module, asked: str | bool) -> bool:
    """Whether the route can ever be on a module, for FusedAccumulator's argument `autocast_route`.

    A compiled part may use it whatever the size of its modules, because one hook serves all of them.
    """
    large = any(p.numel() >= SMALLEST for p in module.parameters())
    return asked is True or (asked == "auto" and (large or bool(split(module)[1])))


class AutocastPresence:
    """Puts the route among an accumulator's captures when a backward's graph shows that autocast casts parameters.

    Hooks put every `Module.__call__` on its slow path, so a model that autocast leaves alone gets none. The first
    backward is inspected, then every so many, because autocast may be turned on later. After a whole window without
    autocast, the route is removed, with its copy of the weights.

    Args:
        module: The model, held weakly.
        store: Holds the segments of its parameters.
        captures: The captures in use, in order; the route comes last.
        always: Whether the route stays from beginning to end, as it must for a model with compiled parts: their graphs
            do not show casts, and would be recompiled when the route came.
        make: Makes the route from the module and the fewest elements of a module's largest parameter.

    Attributes:
        route: The route, while it is there.
    """

    def __init__(
        self,
        module: nn.Module,
        store: Store,
        captures: list[Capture],
        always: bool,
        make: Callable[[nn.Module, int], AutocastRoute],
    ) -> None:
        self._module = weakref.ref(module)
        self._store = store
        self._captures = captures
        self._smallest = 0 if always else SMALLEST
        self._make = make
        self._stays = always or bool(split(module)[1])
        self._until_look = 0  # number of backwards
        self._every = EVERY
        self.route: AutocastRoute | None = None
        if self._stays:
            self.put_on()

    def put_on(self, keeps_whole: bool = False) -> None:
        """Put the route on the modules.

        Args:
            keeps_whole: Whether no gradient of the open window may come in several parts.
        """
        module = self._module()
        if module is not None:
            self.route = self._make(module, self._smallest)
            self.route.renew(keeps_whole)
            self._captures.append(self.route)

    def finds_casts(self, loss: Tensor) -> bool:
        """Whether the graph of a backward that will run without the route shows that the route would help.

        The route is put on after that backward, because a rerun checkpoint needs the modules of its first forward.
        """
        if self._until_look:
            self._until_look -= 1
            return False
        self._until_look = self._every - 1
        return _casts(loss.grad_fn, self._store, self._smallest)

    def take_off(self, route: AutocastRoute) -> None:
        """Remove the route after a window whose backwards did not use autocast."""
        if not self._stays:
            route.remove()
            self._captures.remove(route)
            self.route = None
            self._every *= 2  # casts by the user, or outside of modules, look the same in the graph
            self._until_look = self._every


def _casts(root: Any, store: Store, smallest: int) -> bool:
    """Whether a graph casts a large parameter of the store, or hides that (reentrant checkpoints)."""
    seen = {root}
    stack = [] if root is None else [root]
    while stack:
        node = stack.pop()
        name = node.name()
        if name == "CheckpointFunctionBackward":
            return True
        for child, _ in node.next_functions:
            if child is None or child in seen:
                continue
            if name == "ToCopyBackward0":
                leaf = getattr(child, "variable", None)
                if leaf is not None and leaf.numel() >= smallest and store.place(leaf) is not None:
                    return True
            seen.add(child)
            stack.append(child)
    return False
