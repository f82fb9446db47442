"""Where the one check of all layers of opaque attention goes, and the graphs that keep one in each layer."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch
from opaque_engine import DIM, HEADS, Model
from render import render
from test_join_side_streams import guarded

from kvcanary_fx.passes import held_values
from kvcanary_fx.passes.attention_at_once import check_attention_at_once
from kvcanary_fx.passes.graph_plan import GraphPlan
from kvcanary_fx.passes.join_side_streams import join_side_streams


def lines_of(gm: torch.fx.GraphModule) -> str:
    """Attention, the ops of ours, and what K, V and outputs they are given."""
    lines = [line.strip() for line in render(gm).replace("contiguous", "c").splitlines()]
    return "\n".join(re.sub(r"^\w+ = ", "", line) for line in lines if re.search(r"canary\.|attention", line)) + "\n"


class Goldens(expecttest.TestCase):
    maxDiff = None

    def test_all_layers_are_checked_before_the_first_attention_and_recorded_behind_the_last(self) -> None:
        gm, plan = guarded(Model(2, hoisted=False))
        for _ in range(2):
            check_attention_at_once(gm, [], plan)
            join_side_streams(gm, [], plan)
        gm.graph.lint()
        assert (plan.joins, plan.layers_at_once, plan.ops) == (True, 2, 1 + 2 * 2)
        self.assertExpectedInline(
            lines_of(gm),
            """\
canary.begin(state)
canary.verify_layers_at(output, state, [layers.0, layers.1])
attention(c, c_1, c_2, output, layers.0)
attention(c_3, c_4, c_5, output_1, layers.1)
canary.record_layers_at(output_1, [c_1, c_4], [c_2, c_5], state, [layers.0, layers.1])
canary.join([c_1, c_4, c_2, c_5, x_1], state)
""",
        )

    def test_a_model_of_many_layers_waits_for_the_check_behind_a_few_of_them(self) -> None:
        gm, plan = guarded(Model(16, hoisted=False))
        for _ in range(2):
            check_attention_at_once(gm, [], plan)
        gm.graph.lint()
        self.assertExpectedInline(
            "".join(line + "\n" for line in lines_of(gm).splitlines()[2:7]),
            """\
attention(c, c_1, c_2, output, layers.0)
attention(c_3, c_4, c_5, output_1, layers.1)
canary.join_at(output_2, [], [c_6, c_7, c_8], state)
attention(c_6, c_7, c_8, output_2, layers.2)
attention(c_9, c_10, c_11, output_3, layers.3)
""",
        )
        assert lines_of(gm).count("join") == 2

    def test_inline_there_is_one_check_and_one_record_too_and_nothing_to_wait_for(self) -> None:
        gm, plan = guarded(Model(16, hoisted=False))
        for _ in range(2):
            check_attention_at_once(gm, [], plan, side=False)
        gm.graph.lint()
        assert (plan.joins, plan.layers_at_once) == (False, 16)
        ours = [line.split("(")[0] for line in lines_of(gm).splitlines() if "canary." in line]
        assert ours == ["canary.begin", "canary.verify_layers_at", "canary.record_layers_at"]

    def test_a_graph_on_the_cpu_has_no_join(self) -> None:
        gm, plan = guarded(Model(2, hoisted=False))
        plan.devices[:] = [torch.device("cpu")]
        check_attention_at_once(gm, [], plan)
        assert (plan.joins, plan.layers_at_once) == (False, 2)
        assert "canary.join" not in lines_of(gm)


def attend(name: str, x: torch.Tensor, value: torch.Tensor | None = None) -> torch.Tensor:
    key = x.view(-1, HEADS, DIM) + 1
    output = torch.empty_like(key)
    torch.ops.opaque_engine.attention(key * 2, key, key * 3 if value is None else value, output, name)
    return output.flatten(1)


def apart(x: torch.Tensor) -> torch.Tensor:
    """Neither attention needs the other."""
    return attend("layers.0", x) + attend("layers.1", x)


def twice(x: torch.Tensor) -> torch.Tensor:
    return attend("layers.0", attend("layers.0", x))


def overwritten(x: torch.Tensor) -> torch.Tensor:
    """What the first layer wrote is changed before the second has written."""
    value = (x * 3).view(-1, HEADS, DIM)
    x = attend("layers.0", x, value)
    value.add_(1)
    return attend("layers.1", x, value)


def stored_by_name(x: torch.Tensor) -> torch.Tensor:
    return attend("layers.1", torch.ops.join_test.stores(attend("layers.0", x), "layers.1"))


def cut(x: torch.Tensor) -> torch.Tensor:
    return attend("layers.1", torch.ops.join_test.cuts(attend("layers.0", x)))


@pytest.mark.parametrize(
    "model",
    [Model(1, hoisted=False), Model(2, hoisted=True), apart, twice, overwritten, stored_by_name, cut],
    ids=["one layer", "names are objects", "apart", "one twice", "overwritten", "given by name", "cut"],
)
def test_a_graph_whose_checks_have_to_be_where_they_are_stays_as_it_is(model: Callable[..., Any]) -> None:
    unchanged(*guarded(model))


def test_what_would_be_held_too_long_is_recorded_in_each_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_values, "HELD", 2 * 2 * (2 * HEADS * DIM) * 4 - 1)
    unchanged(*guarded(Model(2, hoisted=False)))


def test_a_number_of_tokens_that_nobody_knows_is_recorded_in_each_layer() -> None:
    unchanged(*guarded(Model(2, hoisted=False), dynamic=True))


def test_a_device_that_compares_everything_keeps_a_check_in_each_layer() -> None:
    unchanged(*guarded(Model(2, hoisted=False)), wanted=lambda device: False)


def unchanged(gm: torch.fx.GraphModule, plan: GraphPlan, **how: Any) -> None:
    before = gm.print_readable(print_output=False)
    check_attention_at_once(gm, [], plan, **how)
    assert gm.print_readable(print_output=False) == before
    assert (plan.joins, plan.layers_at_once) == (False, 0)
