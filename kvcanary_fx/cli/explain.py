"""Show which KV writes of a model are guarded, which are not and why.

The target is FILE.py:NAME, where NAME is a function that returns (model, inputs), or a module or function
with an attribute example_inputs.  inputs is a tuple of positional arguments or a dict of keywords.  The
model is called once on copies of the inputs, compiled with our passes only, so nothing is checked or
changed.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import fx, nn

from ..config import CanaryConfig
from ..errors import UnloadableTargetError
from ..passes.graph_plan import GraphPlan
from ..passes.pipeline import passes, run_passes
from ..reports import summary


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", help="FILE.py:NAME")
    parser.add_argument("--no-graph", action="store_true", help="leave out the rewritten graphs")
    parser.add_argument("--rewrite-writes", action="store_true", help="show the graph with all KV writes replaced")
    parser.add_argument("--dynamic", action="store_true", help="compile with dynamic shapes")


def run(args: argparse.Namespace) -> int:
    model, positional, keywords = load_target(args.target)
    rewrite = True if args.rewrite_writes else CanaryConfig().rewrite
    graphs = explain(model, positional, keywords, rewrite=rewrite, dynamic=args.dynamic)
    config = CanaryConfig()
    if not graphs:
        print("The call compiled no graph: it ran eagerly, so nothing can be guarded.")
        return 1
    for plan, gm in graphs:
        print("\n".join(summary.describe_plan(plan, config)).strip())
        for name in plan.functional:
            print(f"    {name}: use a preallocated cache, such as Hugging Face's StaticCache")
        if not args.no_graph and plan.guarded:
            print("\n" + gm.print_readable(print_output=False) + "\n")
    guarded = sum(len(plan.sites) for plan, _ in graphs)
    print(f"{len(graphs)} graph{'s' * (len(graphs) != 1)}, {guarded} halves guarded")
    return 0 if guarded else 1


def explain(
    model: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    rewrite: bool | Literal["parts"] = "parts",
    dynamic: bool | None = None,
) -> list[tuple[GraphPlan, fx.GraphModule]]:
    """The plan and the rewritten graph of every graph that one call compiles.

    Args:
        model: a module or function; called once, on copies of the arguments.
    """
    graphs: list[tuple[GraphPlan, fx.GraphModule]] = []

    def collect(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        rewritten, plan = run_passes(gm, example_inputs, passes(rewrite=rewrite, recorded=lambda _: False))
        graphs.append((plan, rewritten))
        return gm.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=collect, dynamic=dynamic or None)
    with torch.no_grad():
        compiled(*copy.deepcopy(tuple(args)), **copy.deepcopy(kwargs))
    return graphs


def load_target(target: str) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """``(model, args, kwargs)`` of FILE.py:NAME.

    Raises:
        UnloadableTargetError: saying what is wrong with it.
    """
    path, separator, name = target.rpartition(":")
    if not separator or not path.endswith(".py"):
        raise UnloadableTargetError(target, "it is not of the form FILE.py:NAME")
    if not Path(path).is_file():
        raise UnloadableTargetError(target, f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(Path(path).resolve().parent))
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    if not hasattr(module, name):
        raise UnloadableTargetError(target, f"the file defines no {name}")
    found = getattr(module, name)
    if hasattr(found, "example_inputs"):
        return (found, *_arguments(found.example_inputs, target))
    if isinstance(found, nn.Module) or not callable(found):
        raise UnloadableTargetError(target, f"{name} has no attribute example_inputs")
    made = found()
    if not isinstance(made, tuple) or len(made) != 2 or not callable(made[0]):
        raise UnloadableTargetError(target, f"{name}() did not return (model, inputs)")
    return (made[0], *_arguments(made[1], target))


def _arguments(inputs: Any, target: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, dict):
        return (), inputs
    if isinstance(inputs, tuple | list):
        return tuple(inputs), {}
    raise UnloadableTargetError(target, f"its inputs are a {type(inputs).__name__}, not a tuple or a dict")
