"""Which nodes of a graph read and write which of its inputs, found by watching storages, not op names.

The graph is replayed once on fake tensors under a dispatch mode that sees every aten op with its schema.
A tensor argument that the schema marks as written is a write, any other argument of an op that is not a
pure view is a read, and storages are traced back to the placeholder they entered through.  The replay
starts from the fake ``example_value`` of the placeholders: the example inputs that Dynamo passes to a
backend are the user's real tensors, and replaying a write on those writes into the user's cache.

Only nodes that touch a tensor which may be a cache are run, one in ten of a model's; the others keep the
fake value that Dynamo left on them.  (Running all of them took 150 ms for eight layers.)
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from .dynamo_contract import source_frames, untransformed
from .names import function_name
from .write_ops import schema_of


@dataclasses.dataclass(frozen=True)
class Extent:
    """The elements of a storage that a view can touch: ``[low, high)``, or None where a size is symbolic.

    Attributes:
        steps: ``(size, stride)`` of the view's axes, the longest stride first.
    """

    low: int | None
    high: int | None
    steps: tuple[tuple[int, int], ...] = dataclasses.field(default=(), compare=False)

    def overlaps(self, other: Extent) -> bool:
        if self.low is None or self.high is None or other.low is None or other.high is None:
            return True
        within = self.low < other.high and other.low < self.high
        if within and self.steps and self.steps == other.steps:
            return _differs_by_steps(other.low - self.low, self.steps)
        return within


def _differs_by_steps(distance: int, steps: tuple[tuple[int, int], ...]) -> bool:
    """Whether two views of one shape, so many elements apart, share one: K and V that lie in turns do not."""
    if not steps:
        return distance == 0
    (size, stride), rest = steps[0], steps[1:]
    if not stride:
        return _differs_by_steps(distance, rest)
    least = distance // stride
    return any(abs(n) < size and _differs_by_steps(distance - n * stride, rest) for n in (least, least + 1))


def extent_of(tensor: torch.Tensor) -> Extent:
    """The extent of a view inside its storage, in elements."""
    sizes, strides, offset = tensor.size(), tensor.stride(), tensor.storage_offset()
    if not isinstance(offset, int) or not all(isinstance(x, int) for x in (*sizes, *strides)):
        return Extent(None, None)
    span = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    steps = sorted(((n, s) for n, s in zip(sizes, strides, strict=True) if n > 1), key=lambda step: -step[1])
    return Extent(offset, offset + span + 1 if 0 not in sizes else offset, tuple(steps))


@dataclasses.dataclass(frozen=True)
class Access:
    """One node touching one graph input."""

    node: fx.Node
    order: int  # index of the node in the graph
    root: fx.Node  # the placeholder
    writes: bool
    extent: Extent
    inner: fx.Node | None = None  # the node inside a higher-order op's subgraph, if that is where


@dataclasses.dataclass
class Accesses:
    """The result of :func:`trace_accesses`."""

    accesses: list[Access]
    values: dict[fx.Node, Any]  # every node's value in the replay: fake tensors, sizes, subgraphs
    inner_values: dict[fx.Node, Any]  # the same for nodes of subgraphs
    roots: dict[Any, fx.Node]  # storage key -> placeholder
    born: dict[Any, fx.Node]  # storage key -> the node that made it and that something wrote to later
    writers: dict[Any, list[fx.Node]]  # storage key -> nodes that wrote to it later

    def root_of(self, node: fx.Node) -> fx.Node | None:
        """The placeholder whose storage ``node``'s value lives in; None if it is not an input's."""
        value = self.values.get(node)
        return self.roots.get(storage_key(value)) if isinstance(value, torch.Tensor) else None

    def writers_of(self, node: fx.Node) -> list[fx.Node]:
        """What writes to the tensor that ``node`` makes, if that is a copy of an input."""
        value = self.values.get(node)
        return self.writers.get(storage_key(value), []) if isinstance(value, torch.Tensor) else []

    def of(self, root: fx.Node) -> list[Access]:
        return [a for a in self.accesses if a.root is root]

    def written_roots(self) -> list[fx.Node]:
        """Placeholders that the graph writes, in the order of their first write."""
        return list(dict.fromkeys(a.root for a in self.accesses if a.writes))


#: Functions that make a tensor to be filled: a cache may be created by one inside the graph.
FACTORIES = ("zeros", "empty", "full", "new_zeros", "new_empty", "zeros_like", "empty_like")

#: Ops that return their first argument with some slots written.
UPDATES = (
    "index_copy",
    "index_put",
    "_unsafe_index_put",
    "scatter",
    "slice_scatter",
    "select_scatter",
    "index_add",
    "index_fill",
    "scatter_add",
)

#: Likewise, but common for any tensor: only where the input has a cache's name.
MASKED_UPDATES = ("where", "masked_scatter", "masked_fill")

#: Ops that may return an updated input in a new tensor: a cache that the graph returns instead of writing.
COPIES = ("clone", *MASKED_UPDATES, *UPDATES)


def storage_key(tensor: torch.Tensor) -> StorageWeakRef | None:
    """Identity of a tensor's storage; None for tensors without one (sparse, some subclasses)."""
    try:
        return StorageWeakRef(untransformed(tensor).untyped_storage())
    except (NotImplementedError, RuntimeError):
        return None


class _Recorder(TorchDispatchMode):
    """Collects the tensors that ops read and write while one node runs."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[torch.Tensor] = []
        self.writes: list[torch.Tensor] = []

    def clear(self) -> None:
        self.reads, self.writes = [], []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.HigherOrderOperator):
            self.reads += [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        elif func.namespace != "prim" and not _is_pure_view(func):
            named = {argument.name: argument for argument in func._schema.arguments}
            for argument, value in [*zip(func._schema.arguments, args, strict=False)]:
                self._note(argument, value)
            for name, value in kwargs.items():
                self._note(named[name], value)
        return func(*args, **kwargs)

    def _note(self, argument: Any, value: Any) -> None:
        written = argument.alias_info is not None and argument.alias_info.is_write
        for tensor in pytree.tree_leaves(value):
            if isinstance(tensor, torch.Tensor):
                (self.writes if written else self.reads).append(tensor)


def _is_pure_view(func: Any) -> bool:
    schema = func._schema
    return not schema.is_mutable and any(r.alias_info is not None for r in schema.returns)


class DependsOnDataError(Exception):
    """A call needs a number out of a tensor, which a fake tensor does not have.

    Seen of ``cache[rows, :, pos] = k`` with a 0-d ``pos``: Dynamo puts it in a graph without running it.
    """

    def __init__(self, node: fx.Node):
        places = [f" ({place})" for place in source_frames(node)[-1:]]
        self.what = f"{function_name(node)}{''.join(places)} needs a number out of a tensor"  # fx adds to the message
        super().__init__(self.what)


class _Replay(fx.Interpreter):
    """Runs a graph node by node and turns what the recorder saw into accesses."""

    def __init__(self, gm: fx.GraphModule, recorder: _Recorder, roots: dict[Any, fx.Node], found: Accesses):
        super().__init__(gm, garbage_collect_values=False)
        self.recorder, self.roots, self.found = recorder, roots, found
        self.order = {node: i for i, node in enumerate(gm.graph.nodes)}
        self.made: dict[Any, fx.Node] = {}  # storage key -> the node that made it
        self.outer: fx.Node | None = None  # set while a subgraph of that node is replayed

    def run_node(self, n: fx.Node) -> Any:
        self.recorder.clear()
        if _is_number(n) or self._touches_nothing(n):
            # a second run may lack a number: `item()` of a fake tensor has no value
            value = n.meta["example_value"]
        elif n.op == "call_function" and isinstance(n.target, torch._ops.HigherOrderOperator):
            value = self._run_higher_order(n)
        else:
            value = self._run(n)
        (self.found.values if self.outer is None else self.found.inner_values)[n] = self.env[n] = value
        if n.op not in ("placeholder", "get_attr", "output"):
            self._collect(n)
        return value

    def _run(self, n: fx.Node) -> Any:
        try:
            return super().run_node(n)
        except (DataDependentOutputException, DynamicOutputShapeException) as e:
            raise DependsOnDataError(n) from e
        except GuardOnDataDependentSymNode as e:
            if n.target is not operator.setitem:  # Dynamo has run all other calls itself: this one is our fault
                raise
            raise DependsOnDataError(n) from e

    def _touches_nothing(self, n: fx.Node) -> bool:
        """Whether a call involves no tensor whose writes we look for, so that Dynamo's own value suffices."""
        if not n.op.startswith("call") or "example_value" not in n.meta or function_name(n) in FACTORIES:
            return False
        inputs = [t for i in n.all_input_nodes for t in pytree.tree_leaves(self.env.get(i))]
        keys = [storage_key(t) for t in inputs if isinstance(t, torch.Tensor)]
        return not any(key in self.roots or key in self.made for key in keys)

    def _collect(self, n: fx.Node) -> None:
        written = {id(t) for t in self.recorder.writes}
        if self.outer is None:
            self._note_births(n)
        for tensor in (*self.recorder.writes, *self.recorder.reads):
            root = self.roots.get(storage_key(tensor))
            if root is not None:
                node = n if self.outer is None else self.outer
                access = Access(
                    node=node,
                    order=self.order[node] if self.outer is None else -1,
                    root=root,
                    writes=id(tensor) in written,
                    extent=extent_of(tensor),
                    inner=None if self.outer is None else n,
                )
                self.found.accesses.append(access)

    def _note_births(self, n: fx.Node) -> None:
        """Remember tensors made here, and which of those made before are written here."""
        for tensor in self.recorder.writes:
            maker = self.made.get(storage_key(tensor))
            if maker is not None and maker is not n:
                self.found.born[storage_key(tensor)] = maker
                self.found.writers.setdefault(storage_key(tensor), []).append(n)
        if function_name(n) in FACTORIES or (self.recorder.reads and _may_return_a_cache(n)):
            for tensor in pytree.tree_leaves(self.env[n]):
                if isinstance(tensor, torch.Tensor) and storage_key(tensor) not in self.roots:
                    self.made[storage_key(tensor)] = n

    def _run_higher_order(self, n: fx.Node) -> Any:
        """Replay the subgraphs of a higher-order op on its operands; its own outputs come from metadata."""
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        name = getattr(n.target, "_name", "")
        if name.startswith("auto_functionalized"):
            return n.target(*args, **kwargs)  # type: ignore[operator]
        outer = n if self.outer is None else self.outer
        subgraphs = [a for a in args if isinstance(a, fx.GraphModule)]
        reads = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        first = len(self.found.accesses)
        for subgraph in subgraphs:
            operands = _operands(args, len(subgraph.graph.find_nodes(op="placeholder")))
            if operands is not None:
                inner = _Replay(subgraph, self.recorder, self.roots, self.found)
                inner.outer = outer
                inner.run(*operands)
        if self.outer is None:  # accesses made inside happen at this node
            made = self.found.accesses[first:]
            self.found.accesses[first:] = [dataclasses.replace(a, order=self.order[n]) for a in made]
        self.recorder.clear()
        self.recorder.reads = reads
        self.recorder.writes = _written_by_triton(name, kwargs)
        return _fresh_like(example_value(n))


def _may_return_a_cache(node: fx.Node) -> bool:
    """Whether a call may return an updated argument."""
    schema = schema_of(node.target)
    custom = schema is not None and schema.name.split("::")[0] not in ("aten", "prims")
    return custom or function_name(node) in COPIES


def _is_number(node: fx.Node) -> bool:
    """Whether a call returns a size or another number, not a tensor."""
    known = node.meta.get("example_value")
    return node.op.startswith("call") and isinstance(known, int | float | torch.SymInt | torch.SymFloat | torch.SymBool)


def _operands(args: Sequence[Any], count: int) -> list[Any] | None:
    """The operands of a higher-order op's subgraphs: what follows the last subgraph, flattened."""
    last = max(i for i, a in enumerate(args) if isinstance(a, fx.GraphModule))
    flat = [leaf for leaf in pytree.tree_leaves(list(args[last + 1 :])) if not isinstance(leaf, str)]
    return flat if len(flat) == count else None


def _written_by_triton(name: str, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The arguments that a user's Triton kernel in the graph writes."""
    if name != "triton_kernel_wrapper_mutation":
        return []
    from torch._higher_order_ops.triton_kernel_wrap import get_mutated_tensors

    mutated = get_mutated_tensors(
        kwargs["kernel_idx"], kwargs["constant_args_idx"], kwargs["kwargs"], kwargs["tma_descriptor_metadata"]
    )
    return [kwargs["kwargs"][m] for m in mutated]


def _fresh_like(value: Any) -> Any:
    """New fake tensors with the metadata of ``value``, so that outputs alias nothing."""
    return pytree.tree_map_only(torch.Tensor, _empty_like, value)


def _empty_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _fake_mode(placeholders: Sequence[fx.Node], example_inputs: Sequence[Any]) -> FakeTensorMode:
    """The mode of the graph's fake values; a new one for a graph that has none.

    Not ``detect_fake_mode``: when Dynamo calls a backend, the mode of its context is a new one already.  In that
    mode the values on the graph's nodes are foreign, and are converted as if they were real.  Seen: the conversion
    of a complex view fails, with a size that is a symbol.
    """
    fakes = (v for v in map(example_value, placeholders) if isinstance(v, FakeTensor))
    known = next(fakes, None)
    if known is not None:
        return known.fake_mode
    mode = FakeTensorMode(shape_env=ShapeEnv())
    for node, given in zip(placeholders, example_inputs, strict=True):
        node.meta["example_value"] = mode.from_tensor(given) if isinstance(given, torch.Tensor) else given
    return mode


def _may_be_a_cache(value: Any, given: Any) -> bool:
    """Whether an input can be written by a forward, and be looked at: a weight that is being trained is not, and the
    bytes of a DTensor are in a tensor inside it.
    """
    trained = isinstance(given, torch.nn.Parameter) and given.requires_grad
    return isinstance(value, torch.Tensor) and not trained and not is_traceable_wrapper_subclass(value)


def _same_storage_offset(tensor: torch.Tensor) -> torch.Tensor:
    """A fresh fake with the sizes, strides and storage offset of ``tensor``, in a storage of its own."""
    offset = tensor.storage_offset()
    if isinstance(offset, int) and offset == 0:
        return _empty_like(tensor)
    span = offset + sum((s - 1) * st for s, st in zip(tensor.size(), tensor.stride(), strict=True)) + 1
    base = torch.empty(span, dtype=tensor.dtype, device=tensor.device)
    return base.as_strided(tensor.size(), tensor.stride(), offset)


@contextlib.contextmanager
def _replay_mode(mode: FakeTensorMode) -> Iterator[None]:
    """Fake mode for a second run of a graph: data-dependent sizes must not count as new."""
    env = mode.shape_env
    with contextlib.ExitStack() as stack:
        stack.enter_context(mode)
        stack.enter_context(torch.no_grad())
        # as Dynamo does: on torch 2.11 the C++ decomposition of linear fails on symbolic sizes
        stack.enter_context(enable_python_dispatcher())
        stack.enter_context(mock.patch.object(mode, "allow_non_fake_inputs", True))
        if env is not None:
            stack.enter_context(env.ignore_fresh_unbacked_symbols())
        yield


def trace_accesses(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Accesses:
    """Replay ``gm`` on fake tensors and list every access to inputs that may be caches, in graph order."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    mode = _fake_mode(placeholders, example_inputs)
    roots: dict[Any, fx.Node] = {}
    shared: dict[Any, fx.Node] = {}  # inputs that share a storage have one root, the first of them
    inputs = []
    recorder = _Recorder()
    with _replay_mode(mode):
        for node, given in zip(placeholders, example_inputs, strict=True):
            value = example_value(node)
            if _may_be_a_cache(value, given):
                root = shared.setdefault(storage_key(value), node)
                value = _same_storage_offset(value)
                roots[storage_key(value)] = root
            inputs.append(value)
        found = Accesses([], {}, {}, roots, {}, {})
        with recorder:
            _Replay(gm, recorder, roots, found).run(*inputs)
    found.accesses.sort(key=lambda a: a.order)
    return found


def example_value(node: fx.Node) -> Any:
    """The fake value that Dynamo (or AOTAutograd) left on a node."""
    return node.meta.get("example_value", node.meta.get("val"))
