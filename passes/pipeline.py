"""The ordered list of passes, and the one wrapper that times, logs, lints and dumps every pass.

Each pass has the signature ``(gm, example_inputs, plan) -> gm``.  The runner knows no pass by name.

What passes did is logged at level DEBUG on the logger ``kvcanary.passes``; set
``KVCANARY_DUMP=<directory>`` to get the graph before the first and after every pass as text.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import fx

from .attention_at_once import check_attention_at_once
from .attention_ops import guard_attention_ops
from .dynamo_contract import clone_graph_module, frame_number, graph_name
from .functional_cache import find_functional_caches
from .graph_lint import check_canary_rules
from .graph_plan import GraphPlan
from .halves import DeclaredAxes
from .halves_beside import check_halves_beside
from .insert_canaries import insert_canaries
from .join_side_streams import join_side_streams
from .layers_at_once import check_layers_at_once
from .names import function_name
from .only_read import Recorded
from .rewrite_writes import rewrite_writes
from .scalar_indices import unsqueeze_scalar_indices

log = logging.getLogger("kvcanary.passes")

Pass = Callable[[fx.GraphModule, Sequence[Any], GraphPlan], fx.GraphModule]


def passes(
    chain: bool = True,
    rewrite: bool | Literal["parts"] = False,
    pools_in: Callable[[Any], int] | None = None,
    side: bool = False,
    at_once: Callable[[torch.device], bool] | None = None,
    recorded: Recorded | None = None,
    declared_axes: DeclaredAxes | None = None,
) -> list[tuple[str, Pass]]:
    """The passes in the order they run.

    Args:
        chain: insert the chain check where the graph shows token ids.
        rewrite: replace KV writes by an op that writes in place: all of them, or with ``"parts"`` those
            to a part of an input.
        pools_in: of an engine's session, which knows its pools: how many are in an input of a graph.  Opaque
            attention ops are guarded then, too.
        side: the checks may run on a stream beside the model's.
        at_once: whether the checks of all layers on a device may be one before the first write and one behind the last;
            None: never.
        recorded: guard also what a graph only reads; says of an input whether another graph records it.
        declared_axes: gives the slot axes of views of inputs that an engine declared.
    """
    insert = functools.partial(
        insert_canaries,
        chain=chain,
        pools_in=pools_in or (lambda _: 0),
        recorded=recorded if pools_in is None else None,
        declared_axes=declared_axes or (lambda _given, _view: None),
    )
    ordered: list[tuple[str, Pass]] = [
        ("unsqueeze_scalar_indices", unsqueeze_scalar_indices),
        ("find_functional_caches", find_functional_caches),
        ("insert_canaries", insert),
    ]
    if pools_in is not None:
        ordered.append(("guard_attention_ops", guard_attention_ops))
        if at_once is not None:
            joined = functools.partial(check_attention_at_once, wanted=at_once, side=side)
            ordered.append(("check_attention_at_once", joined))
        if side:
            ordered.append(("join_side_streams", join_side_streams))
    else:
        if at_once is not None and rewrite is not True:
            ordered.append(("check_layers_at_once", functools.partial(check_layers_at_once, wanted=at_once, side=side)))
        if side:
            ordered.append(("check_halves_beside", check_halves_beside))
    if rewrite:
        ordered.append(("rewrite_writes", functools.partial(rewrite_writes, parts_only=rewrite == "parts")))
    return ordered


def run_passes(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    ordered: Sequence[tuple[str, Pass]],
    dump: str | os.PathLike[str] | None = None,
) -> tuple[fx.GraphModule, GraphPlan]:
    """Run the passes on a clone of ``gm``, which stays as it is.

    Args:
        dump: directory for the graph's text before the first and after every pass; one that cannot be written to is
            logged.
    """
    plan = GraphPlan(graph_name(gm), frame_number(gm))
    gm = clone_graph_module(gm)
    _dump(gm, plan, dump, 0, "before")
    for number, (name, run) in enumerate(ordered, start=1):
        before = _op_counts(gm) if log.isEnabledFor(logging.DEBUG) else None
        started = time.perf_counter()
        gm = run(gm, example_inputs, plan)
        plan.seconds[name] = time.perf_counter() - started
        check_canary_rules(gm, plan, name)
        if before is not None:
            log.debug("%s: %s in %.1f ms, %s", plan.name, name, 1e3 * plan.seconds[name], _diff(before, gm))
        _dump(gm, plan, dump, number, name)
    return gm, plan


def _op_counts(gm: fx.GraphModule) -> Counter[str]:
    return Counter(function_name(n) for n in gm.graph.nodes if n.op.startswith("call"))


def _diff(before: Counter[str], gm: fx.GraphModule) -> str:
    after = _op_counts(gm)
    changed = {k: after[k] - before[k] for k in after | before if after[k] != before[k]}
    return ", ".join(f"{n:+d} {op}" for op, n in sorted(changed.items())) or "no change"


def _dump(
    gm: fx.GraphModule, plan: GraphPlan, directory: str | os.PathLike[str] | None, number: int, name: str
) -> None:
    """Write the graph's text; a failure is logged, and the graph is still guarded."""
    if directory is None:
        return
    text = gm.print_readable(print_output=False)
    stem = re.sub(r"\W+", "_", plan.name).strip("_")
    path = os.path.join(directory, f"{stem}.{number}_{name}.txt")
    try:
        os.makedirs(directory, exist_ok=True)
        with open(path, "w", encoding="utf-8") as out:
            out.write(text)
    except OSError as e:
        log.warning(
            "kvcanary.dump %s is not written, only guarded (%s): give the setting dump another directory", plan.name, e
        )
