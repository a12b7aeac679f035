"""Takes gradients where the autograd graph of the backward that is about to run shows that nobody else needs them.

The graph is read from the loss, and nothing else is looked at or changed: neither modules nor what earlier backwards
did. For each large parameter all ways on which its gradient comes are known then:

* through a cast to 16 bits, as autocast makes it: a hook takes the 16-bit gradient before the cast's backward widens
  it. Bytes per element and micro-batch: stock 18 (6 to widen, 12 to add), here 10, and the sum has the same bits;
* from products and embeddings alone: the parameter is left out of what the engine computes (`inputs`), and a hook on
  each of them adds `grad.T @ input` to the flat buffer, so that the gradient never exists;
* on any other way: autograd makes `.grad`, as it always does.

Hooks are on nodes of the graph, for the length of one backward.
"""

from __future__ import annotations

import functools
import inspect
import operator
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.nn import Parameter

from ..buffers.flat import FlatBuffer, Segment
from ..buffers.store import Store
from ..devices import bytes_per_second, is_accelerator, keep_until_done
from ..ops.products import Gemm, add_product, add_rows, choose, widened
from .inbox import Inbox, MicroBatch, SegmentKey, Sink, has_only_our_hooks, have_hooks, in_compiled_autograd

_NODES: Any = torch._C._functions
_LEAF, _CAST, _TRANSPOSE = _NODES.AccumulateGrad, _NODES.ToCopyBackward0, _NODES.TBackward0
_ADDMM, _MM, _EMBEDDING = _NODES.AddmmBackward0, _NODES.MmBackward0, _NODES.EmbeddingBackward0
_WEIGHT_SIDE = frozenset({_LEAF, _CAST, _TRANSPOSE})  # nodes whose users are noted
_HALF = (torch.float16, torch.bfloat16)

# Elements. Reading the graph, a hook and looking for those of others take 25 microseconds for each weight, and widening
# its gradient as long at 2**17 (benchmarks.defaults: with 2**14, windows of the smallest model took 12 % more).
SMALLEST_CAST = 2**17
_OF_BANDWIDTH = 45e9  # bytes per second: that of a CPU's memory
_KEPT_PART = 16  # operands of products that were not added yet take at most this part of the sums' memory
EVERY = 32  # backwards between two looks for casts, where none are found

_FUSED, _IN_16_BITS = _WAYS = "fused", "taken in 16 bits"

Node = Any
Users = dict[Node, list[tuple[Node, int]]]  # of a node: those that its output goes into, at which position


class _Operands(NamedTuple):
    """The operands of a product of micro-batch `tag`, with their versions."""

    left: Tensor
    left_version: int
    right: Tensor
    right_version: int
    tag: int


class FusionPolicy(NamedTuple):
    """Which weight gradients may be added by the op that computes them; see `choice.fusion_policy`.

    Attributes:
        fuses: Whether any may.
        min_numel: Weights of fewer elements are not fused; nor, unless it is 0, are those that gain nothing by a hook.
        linear: The dtypes of products that are fused.
        embedding: The dtypes of embeddings that are fused.
        deferred: Whether short products of several micro-batches are multiplied together.
    """

    fuses: bool
    min_numel: int
    linear: Set[torch.dtype]
    embedding: Set[torch.dtype]
    deferred: bool


class _Weight:
    """A parameter large enough to gain, and the hook on the nodes that make its gradient. Made once.

    Attributes:
        param: The parameter.
        key: Its segment.
        numel: Its elements.
        casts: Whether it gains where its gradient is taken in 16 bits.
        fuses: Whether it gains where its gradient is never made.
        products: The way to add a product, by dtype and number of tokens.
        way: How its gradient came in the last backward whose graph was read, one of `_WAYS`; None: by autograd.
    """

    __slots__ = ("_capture", "casts", "fuses", "key", "numel", "param", "products", "way")

    def __init__(
        self, capture: GraphCapture, buffer: FlatBuffer, segment: Segment, *, casts: bool, fuses: bool
    ) -> None:
        self._capture = weakref.ref(capture)
        self.casts, self.fuses = casts, fuses
        self.param, self.key, self.numel = segment.param, (buffer, segment.index), segment.numel
        self.products: dict[tuple[torch.dtype, int], Gemm | None] = {}
        self.way: str | None = None

    def __call__(self, grads: tuple[Tensor | None, ...]) -> tuple[None] | None:
        """Take what a node is about to compute, or has as its gradient, before the node runs."""
        capture = self._capture()
        run = None if capture is None else capture.run
        if capture is None or run is None or torch._C._current_graph_task_id() != run.task:
            return None  # a hook of the user's runs another backward over this graph
        node, (grad, *_) = torch._C._current_autograd_node(), grads
        taken = type(node) is _CAST
        if grad is not None:
            if taken:
                if grad.layout is not torch.strided and self.way == _IN_16_BITS:
                    return None
                capture.inbox.put(self.key, _unshared(grad))
            elif type(node) is _EMBEDDING:
                capture.add_embedding(self, run, node, grad)
            else:
                capture.add_product(self, run, node, grad)
        run.nodes[self] -= 1
        if run.nodes[self] == 0 and self.way == _FUSED and run.micro_batch.last:
            if run.sink.leaf_ran(self.key, capture.inbox.holds(self.key)):
                capture.inbox.flush(self.key[0].grad_device)
        return (None,) if taken else None


class _Backward:
    """A backward whose graph was read.

    Args:
        micro_batch: The micro-batch.
        sink: Says what products are multiplied by.

    Attributes:
        hooks: On nodes of its graph.
        nodes: How many nodes have yet to make their part of each weight's gradient.
        task: The number that the engine gives it; -1 until it runs.
    """

    def __init__(self, micro_batch: MicroBatch, sink: Sink) -> None:
        self.micro_batch, self.sink = micro_batch, sink
        self.hooks: list[Any] = []
        self.nodes: dict[_Weight, int] = {}
        self.task = -1

    @functools.cached_property
    def factor(self) -> float | Tensor | None:
        """The factor of gradients that products add; asked for only where it is needed."""
        return self.sink.multiplier(self.micro_batch)

    def begin(self, *_: Any) -> None:
        """Note its number, at its first node."""
        if self.task < 0:
            self.task = torch._C._current_graph_task_id()


class _Kept:
    """Operands of short products of one window that were not added yet.

    Args:
        factor: Of all of these products.
    """

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.nbytes = 0
        self.operands: dict[_Weight, list[_Operands]] = {}

    def add(self, weight: _Weight, left: Tensor, right: Tensor, tag: int) -> int:
        """Keep a product of micro-batch `tag`; return how many rows are kept for its weight."""
        kept = self.operands.setdefault(weight, [])
        kept.append(_Operands(left, left._version, right, right._version, tag))
        self.nbytes += left.nbytes + right.nbytes
        return sum(left.shape[0] for left, *_ in kept)

    def take(self, weight: _Weight) -> list[_Operands]:
        """Take a weight's products out."""
        kept = self.operands.pop(weight)
        self.nbytes -= sum(left.nbytes + right.nbytes for left, _, right, *_ in kept)
        return kept


class GraphCapture:
    """Reads the graph of each backward, and puts hooks on the nodes that make gradients of large parameters.

    Args:
        store: Flat buffers of the parameters.
        inbox: Gets gradients that the hooks take.
        policy: Decides which products may add to the buffers.

    Attributes:
        inbox: As the argument.
        weights: Parameters large enough to gain, by their id.
        run: The backward that runs, or will.
    """

    def __init__(self, store: Store, inbox: Inbox, policy: FusionPolicy) -> None:
        self.inbox = inbox
        self._store = store
        self._policy = policy
        self.weights: dict[int, _Weight] = {}
        self.run: _Backward | None = None
        self._until_walk = 0  # number of backwards
        self._kept: _Kept | None = None
        self._lock = threading.RLock()  # of what is kept: a backward over several devices has a thread for each

    def follow(self, buffers: Iterable[FlatBuffer]) -> None:
        """Look for the parameters of new buffers, too."""
        policy = self._policy
        for buffer in buffers:
            smallest_cast = self._smallest_cast(buffer.device)
            smallest_fused = max(policy.min_numel, smallest_cast) if policy.min_numel else 0
            for segment in buffer.segments:
                casts = segment.dtype == torch.float32 and segment.numel >= smallest_cast
                fuses = policy.fuses and len(segment.shape) == 2 and segment.numel >= smallest_fused
                if type(segment.param) in (Tensor, Parameter) and (casts or fuses):
                    self.weights[id(segment.param)] = _Weight(self, buffer, segment, casts=casts, fuses=fuses)

    def _smallest_cast(self, device: torch.device) -> float:
        """Elements of the smallest weight that gains, where sums are in a device's memory.

        An accelerator moves more bytes in the time that a hook takes the host. But a gradient that fills a bucket is
        taken on any: it would be alive besides the buckets, and that of a tied weight from its first use to its last.
        """
        if not is_accelerator(device):
            return SMALLEST_CAST
        return min(SMALLEST_CAST * bytes_per_second(device) / _OF_BANDWIDTH, self.inbox.bucket_bytes / 4)

    # ---- before a backward

    def plan(
        self, roots: Sequence[Tensor], micro_batch: MicroBatch, sink: Sink, excludes: bool
    ) -> tuple[GradientEdge, ...]:
        """Read the graph, and put hooks on its nodes.

        Args:
            roots: The tensors that backward starts from.
            micro_batch: The micro-batch.
            sink: Says what products are multiplied by.
            excludes: Whether the backward can be told which leaves to fill.

        Returns:
            What the engine has to run, its `inputs`; empty if that is everything.
        """
        if not self.inbox.listening or not self.weights or torch._C._are_functorch_transforms_active():
            return ()
        if self._until_walk:
            self._until_walk -= 1
            return ()
        if in_compiled_autograd(enabled=True):
            return ()
        self.end()  # of a backward that never ran
        nodes = [root.grad_fn for root in roots if root.grad_fn is not None]
        users, ends, nested = _read(nodes)
        run = _Backward(micro_batch, sink)
        fuses = excludes and not nested and self._policy.fuses and not torch.is_anomaly_enabled()
        for known in self.weights.values():
            known.way = None
        found = []
        excluded = set()
        for leaf in [node for node in users if type(node) is _LEAF]:
            weight = self.weights.get(id(leaf.variable))
            sources = None if weight is None else self._sources(weight, run, leaf, users, fuses)
            if weight is None or sources is None:
                continue
            found.append((weight, sources))
            weight.way = _IN_16_BITS if len(sources) == 1 and type(sources[0]) is _CAST else _FUSED
            run.nodes[weight] = len(sources)
            if weight.way == _FUSED:
                excluded.add(leaf)
                ends += sources  # else what leads only to an excluded leaf would not run
        if not found:
            if not self._policy.fuses:  # fused gradients have bits of their own, which no earlier backward may change
                self._until_walk = EVERY - 1
            return ()
        self.run = run
        # The first node may itself be one of the sources.
        run.hooks += [node.register_prehook(run.begin) for node in nodes]
        run.hooks += [node.register_prehook(weight) for weight, sources in found for node in sources]
        if not excluded:
            return ()
        make = tuple.__new__  # a third of the constructor's time
        return tuple([make(GradientEdge, (node, 0)) for node in ends if node not in excluded])

    def _sources(self, weight: _Weight, run: _Backward, leaf: Node, users: Users, fuses: bool) -> list[Node] | None:
        """Find the nodes that make a weight's gradient, of which each can be taken; None: leave it to autograd."""
        if not has_only_our_hooks(weight.param):
            return None
        fuses = fuses and weight.fuses
        found: list[Node] = []
        passed = [leaf]  # nodes between the leaf and those
        for node, position in users[leaf]:
            if type(node) is _CAST:
                products = self._products(weight, run, users.get(node, ()), users, passed) if fuses else None
                if products is None and not _casts(weight, node):
                    return None
                found += products or [node]
                if products:
                    passed.append(node)
            elif not fuses:
                return None
            elif type(node) is _EMBEDDING:
                if not self._embeds(weight, run, node):
                    return None
                found.append(node)
            else:
                products = self._products(weight, run, [(node, position)], users, passed)
                if products is None:
                    return None
                found += products
        if {_CAST}.issuperset(map(type, found)) and (len(found) > 1 or weight.param.grad is not None):
            return None  # autograd adds them up in fp32 before they are added to the sum
        return None if have_hooks(passed + found) else found

    def _products(
        self, weight: _Weight, run: _Backward, uses: Iterable[tuple[Node, int]], users: Users, passed: list[Node]
    ) -> list[Node] | None:
        """Find the products that a weight or its cast goes into, directly or transposed; None if it goes elsewhere."""
        found, transposes = [], []
        for node, position in uses:
            if type(node) is _TRANSPOSE:
                transposes.append(node)
                products = users.get(node, [])
            else:
                products = [(node, position)]
            for product, at in products:
                if not self._multiplies(weight, run, product, at):
                    return None
                found.append(product)
        passed += transposes
        return found or None

    def _multiplies(self, weight: _Weight, run: _Backward, node: Node, position: int) -> bool:
        """Whether a node multiplies something by a weight, in a way that a faster one can replace."""
        if type(node) is _ADDMM:
            expected, other = (2, node._raw_saved_mat1) if node._saved_alpha == 1 else (-1, None)
        elif type(node) is _MM:
            expected, other = 1, node._raw_saved_self
        else:
            return False
        if position != expected or other is None or not (other.unpack_hook is None or _can_read_twice(other)):
            return False
        meta = node._input_metadata[0]
        if meta.dtype not in self._policy.linear or self._way(weight, meta.dtype, meta.shape[0]) is None:
            return False
        # The weight as the product has it: hooks on a cast or transposed tensor of the user's are the tensor's own.
        mat2 = node._raw_saved_mat2
        operand = mat2.data if mat2.unpack_hook is None else None
        if mat2.unpack_hook is None and (operand is None or _tensor_has_hooks(operand)):
            return False
        return isinstance(run.factor, float)

    def _embeds(self, weight: _Weight, run: _Backward, node: Node) -> bool:
        """Whether rows of an embedding's gradient can be added one by one."""
        return (
            weight.param.dtype in self._policy.embedding
            and not node._saved_sparse
            and _can_read_twice(node._raw_saved_indices)
            and run.factor is not None
        )

    def _way(self, weight: _Weight, dtype: torch.dtype, tokens: int) -> Gemm | None:
        buffer, index = weight.key
        if (dtype, tokens) not in weight.products:
            weight.products[dtype, tokens] = choose(buffer.views[index], dtype, tokens)
        return weight.products[dtype, tokens]

    # ---- while it runs

    def add_product(self, weight: _Weight, run: _Backward, node: Node, grad: Tensor) -> None:
        """Add the weight's part of a product's gradient to its segment."""
        of_addmm = type(node) is _ADDMM
        transposed = type(node.next_functions[2 if of_addmm else 1][0]) is _TRANSPOSE
        input = _read_saved(node, "mat1" if of_addmm else "self")
        left, right = (grad, input) if transposed else (input, grad)
        way = self._way(weight, grad.dtype, grad.shape[0])
        if way is None or grad.dtype != input.dtype or not _are_plain(grad, input):
            self.inbox.put(weight.key, left.t().mm(right))
            return
        assert isinstance(run.factor, float)
        most = _deferred_tokens(weight.param) if self._policy.deferred else 0
        if left.shape[0] > most // 2:
            self._add(weight, way, left, right, run.factor, run.micro_batch.tag)
            return
        with self._lock:
            if self._kept is None or self._kept.factor != run.factor:
                self.flush()
                self._kept = _Kept(run.factor)
            left, right = (_unshared(left), right) if left is grad else (left, _unshared(right))
            tokens = self._kept.add(weight, left, right, run.micro_batch.tag)
            if weight.key[0].queues:  # whoever multiplies them waits for this stream, too
                self.inbox.order.take(weight.key[0].device)
            self.inbox.note_added()
            too_many = self._kept.nbytes > sum(b.tensor.nbytes for b in self._store.buffers) // _KEPT_PART
            if too_many or run.micro_batch.last or tokens >= most:
                self._flush(self._kept, weight)

    def _add(self, weight: _Weight, way: Gemm, left: Tensor, right: Tensor, factor: float, tag: int) -> None:
        buffer, index = weight.key
        begins = self._write(weight, tag)
        add_product(way, buffer.views[index], left, right, factor, 0.0 if begins else 1.0)

    # ---- short products, which cost as much as reading and writing the sum: of several micro-batches at once

    def flush(self) -> None:
        """Add all products that were kept, before anybody reads the sums.

        Raises:
            RuntimeError: names the parameter of an operand that was changed in place since its backward.
        """
        if self._kept is not None:
            with torch.no_grad():
                for weight in list(self._kept.operands):
                    self._flush(self._kept, weight)

    def _flush(self, products: _Kept, weight: _Weight) -> None:
        kept = products.take(weight)
        if any(left._version != a or right._version != b for left, a, right, b, _ in kept):
            name = weight.key[0].segments[weight.key[1]].name
            raise RuntimeError(
                f"an operand of the gradient of {name!r} was changed in place after its backward, before it was "
                "multiplied (fuse_weight_gradients='deferred'): drop the window by acc.zero_(), and use 'auto' where "
                "inputs or activations are written to again"
            )
        lefts, rights = [one.left for one in kept], [one.right for one in kept]
        left, right = (lefts[0], rights[0]) if len(kept) == 1 else (torch.cat(lefts), torch.cat(rights))
        way = self._way(weight, left.dtype, left.shape[0]) or widened
        self._add(weight, way, left, right, products.factor, kept[-1].tag)
        if weight.key[0].queues:
            keep_until_done(lefts + rights)

    def drop_kept(self) -> None:
        """Drop products that were kept, with their window."""
        self._kept = None

    # ---- embeddings

    def add_embedding(self, weight: _Weight, run: _Backward, node: Node, grad: Tensor) -> None:
        """Add an embedding's rows to its segment."""
        indices, padding = _read_saved(node, "indices"), node._saved_padding_idx
        options = -1 if padding >= 2**63 else padding, node._saved_scale_grad_by_freq
        if not _are_plain(grad):
            rows = weight.param.shape[0]
            self.inbox.put(weight.key, torch.ops.aten.embedding_dense_backward(grad, indices, rows, *options))
            return
        buffer, index = weight.key
        view, factor = buffer.views[index], run.factor
        assert factor is not None
        if self._write(weight, run.micro_batch.tag):
            view.zero_()
        add_rows(view, grad, indices, *options, factor.to(view.device) if isinstance(factor, Tensor) else factor)

    def _write(self, weight: _Weight, tag: int) -> bool:
        """Announce an addition of micro-batch `tag` to a segment; return whether it holds no sum of this window yet."""
        buffer, index = weight.key
        if self.run is not None:
            self.run.sink.check_writable(weight.key)
            if not self.inbox.added:
                self.inbox.note_added()
        first = not buffer.touched[index]
        buffer.touch_unchecked(index, tag)
        if buffer.queues:
            self.inbox.order.take(buffer.device)
        return first

    def reports(self, key: SegmentKey) -> bool:
        """Whether `Sink.leaf_ran` will report when all gradients of a segment have come."""
        weight = self.weights.get(id(key[0].params[key[1]]))
        return weight is not None and weight.way == _FUSED

    # ---- after it

    def end(self) -> None:
        """End a backward, also one that raised: take the hooks off."""
        for hook in () if self.run is None else self.run.hooks:
            hook.remove()
        self.run = None

    def __str__(self) -> str:
        """Count the elements that were added on each way in the last backward whose graph was read."""
        counts = dict.fromkeys(_WAYS, 0)
        for weight in self.weights.values():
            if weight.way is not None:
                counts[weight.way] += weight.numel
        return ", ".join(f"{count:,} {way}" for way, count in counts.items())


def _casts(weight: _Weight, node: Node) -> bool:
    """Whether a node casts from fp32 to 16 bits on the same device, and the gradient is worth a hook."""
    meta = node._input_metadata[0]
    return weight.casts and meta.dtype in _HALF and meta.device == weight.param.device


def _read(roots: Sequence[Node]) -> tuple[Users, list[Node], bool]:
    """Read a graph.

    Returns:
        The users of leaves, casts and transposes; the nodes that lead nowhere, leaves among them; and whether a custom
        function's backward runs a backward of its own.
    """
    users: Users = {root: [(None, 0)] for root in roots if type(root) in _WEIGHT_SIDE}
    ends: list[Node] = []
    seen = set(roots)
    stack = list(seen)
    nested = False
    while stack:
        node = stack.pop()
        leads = False
        for position, (child, _) in enumerate(node.next_functions):
            if child is None:
                continue
            leads = True
            if type(child) in _WEIGHT_SIDE:
                users.setdefault(child, []).append((node, position))
            if child not in seen:
                seen.add(child)
                stack.append(child)
        if not leads:
            ends.append(node)
        elif type(node) not in _TORCHS_OWN:
            function = getattr(type(node), "_forward_cls", None)
            if function is None:
                _TORCHS_OWN.add(type(node))
            elif not nested:
                if type(node) not in _NESTED:
                    _NESTED[type(node)] = _runs_backward(function.backward, set())
                nested = _NESTED[type(node)]
    return users, ends, nested


_TORCHS_OWN: set[type] = set()  # types of nodes that are no custom functions, seen so far


_NESTED: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()  # types that are; see `_runs_backward`


def _runs_backward(backward: Callable[..., Any], seen: set[Any]) -> bool:
    """Whether a custom function's backward runs another, as reentrant checkpoints do, which refuse `inputs`.

    Helpers that it calls, and what a decorator has wrapped, are looked at too, except torch's own.

    Args:
        backward: A function.
        seen: Functions that were looked at.
    """
    backward = inspect.unwrap(backward)
    if not inspect.isfunction(backward):
        return True
    seen.add(backward)
    try:
        names = inspect.getclosurevars(backward)
    except ValueError:  # a variable of an enclosing function that is not there any more
        return True
    if not {"backward", "_is_checkpoint_valid"}.isdisjoint(backward.__code__.co_names):
        return True
    called = filter(inspect.isfunction, (*names.nonlocals.values(), *names.globals.values()))
    return any(_runs_backward(f, seen) for f in called if f not in seen and not _is_torchs(f))


def _is_torchs(function: Callable[..., Any]) -> bool:
    return (function.__module__ or "").startswith("torch.")


def _deferred_tokens(weight: Tensor) -> int:
    """How many tokens of short products are multiplied together.

    On a CPU, nothing is gained from 64 on. On a GPU a product takes as long as reading and writing the sum up to some
    1,000 tokens, and operands of a sixteenth of the weight's rows or columns take a sixteenth of the sum's memory (a
    model of an H100; not measured).
    """
    return 64 if weight.device.type == "cpu" else min(1024, min(weight.shape) // 16)


def _tensor_has_hooks(tensor: Tensor) -> bool:
    """Whether a tensor, or what it is a view of, has hooks, or keeps its gradient, unless it is a leaf."""
    while tensor is not None and not tensor.is_leaf:
        if tensor._backward_hooks or tensor.retains_grad:
            return True
        tensor = tensor._base  # type: ignore[assignment]
    return False


def _are_plain(*tensors: Tensor) -> bool:
    """Whether products may read tensors by their addresses."""
    for tensor in tensors:
        if type(tensor) not in (Tensor, Parameter) or tensor.layout is not torch.strided or tensor.is_neg():
            return False
    return True


_uses_of = operator.methodcaller("_use_count")
_USES_OF_OWN = 2  # of a gradient in a hook that nobody else has: the engine's, and the hook's


def _unshared(grad: Tensor) -> Tensor:
    """Copy a gradient that others have, too, as behind an addition: they may write to it before it is added.

    Kernels that make the gradient of their input in place (Liger's RMSNorm) do, and show it in no version counter.
    """
    base = grad._base  # a view keeps what it is a view of
    shared = _uses_of(grad) > _USES_OF_OWN or (base is not None and _uses_of(base) > _USES_OF_OWN)
    return grad.clone() if shared else grad


# ---- saved tensors, which a hook reads before the node itself does


def _can_read_twice(saved: Any) -> bool:
    """Whether a saved tensor is saved as it is, or by torch's checkpoint; other hooks may give it out only once."""
    return saved.unpack_hook is None or _frame_of(saved) is not None


def _frame_of(saved: Any) -> Any:
    """The recomputation that will fill in a tensor saved by `torch.utils.checkpoint`; None if it is saved otherwise."""
    hook = saved.unpack_hook
    names = getattr(getattr(hook, "__code__", None), "co_freevars", ())
    if hook is None or hook.__module__ != "torch.utils.checkpoint" or "frame" not in names:
        return None
    frame = hook.__closure__[names.index("frame")].cell_contents
    known = hasattr(frame, "recomputed") and hasattr(saved.data, "handles")
    return frame if known and hasattr(torch.utils.checkpoint, "_Handle") else None


def _read_saved(node: Node, name: str) -> Tensor:
    """Read a tensor that a node has saved, and leave it to the node; checkpoint gives each out once: put it back."""
    saved, tensor = getattr(node, f"_raw_saved_{name}"), getattr(node, f"_saved_{name}")
    if saved.unpack_hook is not None:
        frame, handles = _frame_of(saved), saved.data.handles
        group = next(key for key in reversed(handles) if handles[key] is None)
        handles[group] = torch.utils.checkpoint._Handle()
        frame.recomputed[group][handles[group]] = tensor
    return tensor
