"""Graphs whose checks may run beside the model end with a join, or keep their checks in the model's stream."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from opaque_engine import Model
from render import render

from kvcanary_fx.passes.graph_plan import GraphPlan
from kvcanary_fx.passes.join_side_streams import join_side_streams
from kvcanary_fx.passes.pipeline import passes, run_passes

_LIBRARY = torch.library.Library("join_test", "FRAGMENT")
_LIBRARY.define("stores(Tensor x, str layer) -> Tensor")
_LIBRARY.impl("stores", lambda x, layer: x.clone(), "CompositeExplicitAutograd")
for _name, _tags in (("cuts", (torch.Tag.cudagraph_unsafe,)), ("plain", ())):
    _LIBRARY.define(f"{_name}(Tensor x) -> Tensor", tags=_tags)
    _LIBRARY.impl(_name, lambda x: x.clone(), "CompositeExplicitAutograd")


def guarded(model: Any, dynamic: bool = False) -> tuple[torch.fx.GraphModule, GraphPlan]:
    """The rewritten graph, its state passed off as a GPU's: what a machine without one can see of it."""
    made = []

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        made.append(run_passes(gm, example_inputs, passes(pools_in=lambda _: 0)))
        return lambda *args: (args[0],)

    with torch.no_grad():
        torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)(torch.randn(2, 8))
    (gm, plan) = made[0]
    plan.devices[:] = [torch.device("cuda")]
    return gm, plan


def attention_and_checks(gm: torch.fx.GraphModule) -> list[str]:
    """Attention and the ops around it, each K and V by the number of its layer."""
    lines = [line.split(" = ", 1)[1] for line in render(gm).splitlines() if "canary." in line or "attention" in line]
    recorded = [re.findall(r"\((\w+), (\w+), (\w+), state, ", line)[0] for line in lines if "record_at" in line]
    for number, names in enumerate(recorded):
        for name, short in zip(names, ("out", "k", "v"), strict=True):
            lines = [re.sub(rf"\b{name}\b", f"{short}{number}", line) for line in lines]
    lines = [re.sub(r"\[\w+, (k\d, v\d)\]", r"[q, \1]", line) for line in lines]  # what attention takes
    lines = [re.sub(r"^attention\w*\(.*", "attention", line) for line in lines]
    return [re.sub(r"_at_opaque\w+", "_at", line).replace(".name)", ")") for line in lines]


@pytest.mark.parametrize("hoisted", [False, True], ids=["name is a constant", "name is an input"])
def test_a_layer_is_checked_beside_the_record_of_the_last_and_the_last_op_joins_only_once(hoisted):
    gm, plan = guarded(Model(3, hoisted=hoisted))
    for _ in range(2):
        join_side_streams(gm, [], plan)
    gm.graph.lint()
    assert attention_and_checks(gm)[1:] == [
        "canary.verify_at(out0, state, layers.0)",
        "attention",
        "canary.record_at(out0, k0, v0, state, layers.0)",
        "canary.verify_at(out0, state, layers.1)",
        "canary.join_at(out1, [k0, v0], [q, k1, v1], state)",
        "attention",
        "canary.record_at(out1, k1, v1, state, layers.1)",
        "canary.verify_at(out1, state, layers.2)",
        "canary.join_at(out2, [k1, v1], [q, k2, v2], state)",
        "attention",
        "canary.record_at(out2, k2, v2, state, layers.2)",
        "canary.join([k2, v2], state)",
    ]
    assert plan.joins
    assert plan.ops == 1 + 2 * 3  # what coverage counts is what checks


def test_a_check_stays_behind_an_op_that_is_given_its_layer():
    """Such as one that stores K and V before attention: by the layer's name it may write other slots, too."""
    first, second = Model(1, hoisted=False), Model(2, hoisted=False)
    second.layers = torch.nn.ModuleList(list(second.layers)[1:])
    gm, plan = guarded(lambda x: second(torch.ops.join_test.stores(first(x), "layers.1")))
    join_side_streams(gm, [], plan)
    called = re.findall(r" = (?:canary\.)?(verify_at|record_at|stores|join_at|join)\(", render(gm))
    assert called == ["verify_at", "record_at", "stores", "join_at", "verify_at", "record_at", "join"]


def test_each_device_waits_for_its_own():
    gm, plan = guarded(Model(2, hoisted=False))
    (state,) = [n for n in gm.graph.nodes if n.name == "kvcanary_state"]
    with gm.graph.inserting_after(state):
        other = gm.graph.placeholder("kvcanary_state_1")
    for node in [n for n in gm.graph.nodes if "layers.1" in n.args]:
        node.replace_input_with(state, other)
    plan.devices.append(torch.device("cuda", 1))
    join_side_streams(gm, [], plan)
    assert attention_and_checks(gm)[3:] == [
        "canary.record_at(out0, k0, v0, state, layers.0)",
        "canary.verify_at(out1, state, layers.1)",
        "attention",
        "canary.record_at(out1, k1, v1, state, layers.1)",
        "canary.join([k0, v0], state)",
        "canary.join([k1, v1], state)",
    ]


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
