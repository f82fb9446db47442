"""Graphs whose checks may run beside the model end with a join, or keep their checks in the model's stream."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from opaque_engine import Model
from render import render

from kvcanary_fx.passes.graph_plan import GraphPlan
from kvcanary_fx.passes.join_side_streams import join_side_streams
from kvcanary_fx.passes.pipeline import passes, run_passes

_LIBRARY = torch.library.Library("join_test", "FRAGMENT")
for _name, _tags in (("cuts", (torch.Tag.cudagraph_unsafe,)), ("plain", ())):
    _LIBRARY.define(f"{_name}(Tensor x) -> Tensor", tags=_tags)
    _LIBRARY.impl(_name, lambda x: x.clone(), "CompositeExplicitAutograd")


def guarded(model: Any) -> tuple[torch.fx.GraphModule, GraphPlan]:
    """The rewritten graph, its state passed off as a GPU's: what a machine without one can see of it."""
    made = []

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        made.append(run_passes(gm, example_inputs, passes(pools_in=lambda _: 0)))
        return lambda *args: (args[0],)

    with torch.no_grad():
        torch.compile(model, backend=backend, fullgraph=True)(torch.randn(2, 8))
    (gm, plan) = made[0]
    plan.devices[:] = [torch.device("cuda")]
    return gm, plan


def test_each_layer_holds_what_the_last_was_given_and_the_last_op_joins_only_once():
    gm, plan = guarded(Model(2, hoisted=False))
    for _ in range(2):
        join_side_streams(gm, [], plan)
    gm.graph.lint()
    lines = render(gm).splitlines()
    first, second = [line for line in lines if "canary.verify_at" in line]
    written, last = [line.split("(")[1].split(", ")[1:3] for line in lines if "canary.record_at" in line]
    assert "(output, [], state, layers.0)" in first
    assert f"[{', '.join(written)}], state, layers.1)" in second
    assert [line for line in lines if "join" in line] == [f"join_default = canary.join([{', '.join(last)}], state)"]
    assert lines[-1].startswith("join_default")
    assert plan.joins
    assert plan.ops == 1 + 2 * 2  # what coverage counts is what checks


@pytest.mark.parametrize(("op", "joins"), [("cuts", False), ("plain", True)])
def test_a_graph_that_is_captured_in_parts_keeps_its_checks_inline(op, joins):
    model = Model(1, hoisted=False)
    gm, plan = guarded(lambda x: getattr(torch.ops.join_test, op)(model(x)))
    join_side_streams(gm, [], plan)
    assert plan.joins is joins
    assert ("join_default" in render(gm)) is joins


def test_a_graph_on_the_cpu_has_no_join():
    gm, plan = guarded(Model(1, hoisted=False))
    plan.devices[:] = [torch.device("cpu")]
    join_side_streams(gm, [], plan)
    assert not plan.joins
