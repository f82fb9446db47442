"""What tells a running state from a cache: what it is computed from, and the axis along which it moves."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from kvcanary_fx.passes.states import _is_computed_from, rolled_axis


def traced(function) -> tuple[fx.Node, fx.Node]:
    """The first input of a function, and what it returns."""
    graph = fx.symbolic_trace(function).graph
    return next(iter(graph.nodes)), graph.output_node().args[0]


@pytest.mark.parametrize(
    ("function", "axis"),
    [
        (lambda x: torch.roll(x, -1, 1), 1),
        (lambda x: x.roll(-1, dims=-1), 2),
        (lambda x: torch.roll(x, (-1,), (1,)), 1),
        (lambda x: torch.cat([x[:, 1:], x], 1), 1),
        (lambda x: torch.cat([x, x], dim=-1), 2),
        (lambda x: torch.roll(x, -1, 1) * 2 + 1, 1),
        (lambda x: torch.roll(x, -1), None),  # over all axes at once
        (lambda x: x * 2, None),
    ],
)
def test_the_axis_along_which_a_value_moves(function, axis):
    assert rolled_axis(traced(function)[1], 3) == axis


@pytest.mark.parametrize(
    ("function", "computed"),
    [
        (lambda state, x: state * 0.9 + x, True),
        (lambda state, x: (state.transpose(0, 1).clone() * x).contiguous(), True),
        (lambda state, x: x * 2, False),  # a state that starts anew is computed from something else
        (lambda state, x: state.transpose(0, 1).clone(), False),
    ],
)
def test_what_a_state_is_computed_from(function, computed):
    root, value = traced(function)
    assert _is_computed_from(value, root) is computed
