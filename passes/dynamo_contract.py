"""The private contracts between Dynamo, AOTAutograd and a graph, all in this file, each pinned by a test.

Seen on the versions of torch that pyproject.toml allows:

* A module of a graph has its own class, named ``GraphModuleImpl``; the requested class is its base.
* Dynamo reads the placeholders' metadata of *its* graph again after the backend returned, so a pass
  edits a clone.
* AOTAutograd needs ``_dynamo_source`` on every placeholder, including appended ones, and accepts None.
* An object of a registered opaque type can be an input of a graph and an argument of an op, whose schema names the
  type by a name of torch's own making.
* ``torch._dynamo.mark_dynamic`` leaves an attribute on the tensor, which is the example of a placeholder's
  ``grapharg``; a guard that makes such a size a number is an error.
* What a function under torch.vmap is given is a wrapper without a storage, around a tensor with one.  Dynamo leaves
  such wrappers on the nodes, after their level has ended.
* An appended input counts as static for CUDA graphs only with ``tensor_dict`` metadata that says so.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode

_CARRIED = ("_param_name_to_source", "compile_subgraph_reason", "_backend_id")


def clone_graph_module(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy whose graph may be edited; shares parameters, subgraphs and metadata values with ``gm``."""
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    output = graph.graph_copy(gm.graph, mapping, return_output_node=True)
    graph.output(output[0] if isinstance(output, tuple) else output)
    clone = _class_of(gm)(gm, graph)
    clone.meta = dict(gm.meta)
    for old, new in mapping.items():
        new.meta = dict(old.meta)
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source  # type: ignore[attr-defined]
    for name in _CARRIED:
        if hasattr(gm, name):
            setattr(clone, name, getattr(gm, name))
    graph_output, clone_output = (next(iter(reversed(g.nodes))) for g in (gm.graph, graph))
    clone_output.meta = dict(graph_output.meta)
    return clone


def is_transformed(value: Any) -> bool:
    """Whether a value is a tensor as a function under torch.vmap or torch.func sees it: without the axis that it is
    mapped over, and without an address."""
    return isinstance(value, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(value)


def untransformed(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor whose memory a tensor under a transform has; others are themselves."""
    while is_transformed(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def marked_dynamic(placeholder: fx.Node) -> bool:
    """Whether the user said of an input that its sizes are dynamic."""
    given = placeholder.meta.get("grapharg")
    return given is not None and bool(getattr(given.example, "_dynamo_dynamic_indices", None))


def _class_of(gm: fx.GraphModule) -> type[fx.GraphModule]:
    """What Dynamo made its graph a module with: it writes the module's code when that is first called.

    Plain modules write it at every change, 667 nodes in 28 ms, and Inductor reads none of it.
    """
    made: type[fx.GraphModule] = next(c for c in type(gm).__mro__ if not c.__qualname__.endswith(".GraphModuleImpl"))
    return made if made.__init__ is fx.GraphModule.__init__ else fx.GraphModule


def append_static_input(gm: fx.GraphModule, name: str, example: torch.Tensor) -> fx.Node:
    """A new last placeholder, static for CUDA graphs and without a guard."""
    last = gm.graph.find_nodes(op="placeholder")[-1]
    with gm.graph.inserting_after(last):
        node = gm.graph.placeholder(name)
    mode = detect_fake_mode([n.meta.get("example_value") for n in gm.graph.find_nodes(op="placeholder")])
    node.meta["example_value"] = example if mode is None else mode.from_tensor(example, static_shapes=True)
    node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}
    node._dynamo_source = None  # type: ignore[attr-defined]
    return node


def graph_name(gm: fx.GraphModule) -> str:
    """Where a graph comes from: Dynamo's compile id and the first user line in it."""
    compile_id = gm.meta.get("dynamo_compile_id")
    place = next((frames[0] for node in gm.graph.nodes if (frames := source_frames(node))), "")
    return f"graph {compile_id if compile_id is not None else '?'}" + (f" ({place})" if place else "")


def frame_number(gm: fx.GraphModule) -> int:
    """Dynamo's number of the frame that a graph comes from: what follows a graph break has a higher one."""
    number = getattr(gm.meta.get("dynamo_compile_id"), "frame_id", None)
    return -1 if number is None else int(number)


def source_frames(node: fx.Node) -> list[str]:
    """Where in the user's code a node comes from, the outermost function first: ``forward, model.py:12``."""
    trace = node.meta.get("stack_trace") or ""
    return [_short(line.strip()) for line in trace.splitlines() if line.strip().startswith("File ")]


def _short(frame: str) -> str:
    """``File "/a/b/model.py", line 12, in forward`` as ``forward, model.py:12``."""
    parts = frame.split('"')
    path = parts[1].rsplit("/", 1)[-1] if len(parts) > 1 else "?"
    rest = parts[2] if len(parts) > 2 else ""
    line = rest.partition("line ")[2].partition(",")[0]
    function = rest.partition(" in ")[2].strip()
    return f"{function}, {path}:{line}"


def is_fragment(gm: fx.GraphModule) -> bool:
    """Whether a graph ends, or may begin, in the middle of a function: at a graph break."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    stack = any("___stack" in _raw_source(n) for n in gm.graph.find_nodes(op="placeholder"))
    return stack or bool(getattr(reason, "graph_break", False))


def is_kept_by_someone(placeholder: fx.Node) -> bool:
    """Whether an input was an attribute of an object or in a container, and no argument by itself."""
    return re.fullmatch(r"[LG]\['(kwargs'\]\[')?\w+'\]|", _raw_source(placeholder)) is None


def _raw_source(placeholder: fx.Node) -> str:
    """Dynamo's expression of where an input comes from, ``L['past'][0]``; empty if it has none."""
    name = getattr(getattr(placeholder, "_dynamo_source", None), "name", "")
    name = name() if callable(name) else name
    return name if isinstance(name, str) else ""


def fake_values(nodes: Sequence[fx.Node]) -> list[Any]:
    """The example values that Dynamo left on nodes."""
    return [n.meta.get("example_value", n.meta.get("val")) for n in nodes]


def opaque_type_name(value: Any) -> str:
    """What a schema calls the opaque type of an object.

    Raises:
        TypeError: the object's type is not registered as opaque.
    """
    from torch._library.opaque_object import get_opaque_type_name, is_opaque_type

    if not is_opaque_type(type(value)):
        raise TypeError(
            f"a layer's name is a string or an object of a registered opaque type, not {type(value).__name__}"
        )
    name: str = get_opaque_type_name(type(value))
    return name
