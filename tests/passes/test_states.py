"""What tells a running state from a cache: its name, what it is computed from, and the axis along which it moves."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from kvcanary_fx import CanaryBackend, CanaryConfig
from kvcanary_fx.passes.states import _is_computed_from, rolled_axis, updated_axis


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


ONE, SHAPE = torch.tensor([1]), (2, 3, 4)


@pytest.mark.parametrize(
    ("function", "axis"),
    [
        (lambda x: torch.roll(x, -1, 1), 1),
        (lambda x: x.roll(-1, dims=-1), 2),
        (lambda x: torch.roll(x, -1), None),  # over all axes at once
        (lambda x: torch.cat([x[:, 1:], x[:, :1]], 1) * 2 + 1, 1),
        (lambda x: torch.cat([x[1:], x[:1]]), 0),
        (lambda x: x.index_copy(1, ONE, x[:, :1]), 1),
        (lambda x: torch.slice_scatter(x, x[:, :, :1], 2, 1, 2), 2),
        (lambda x: torch.slice_scatter(x, x[:1], start=1, end=2), 0),
        (lambda x: torch.cat([x, x], 2)[:, :, 4:], None),  # made something larger of it
        (lambda x: x * 2, None),
    ],
)
def test_the_axis_along_which_all_of_a_cache_is_updated(function, axis):
    run, whole = fx.Interpreter(fx.symbolic_trace(function), garbage_collect_values=False), torch.zeros(SHAPE)
    value = run.graph.output_node().args[0]
    run.run(whole)
    assert updated_axis(value, whole) is None  # of values that nobody knows nothing is said
    for node, made in run.env.items():
        node.meta["example_value"] = made
    assert updated_axis(value, whole) == axis


def decay(cache, x):
    return cache * 0.9 + x


def shift_tokens(cache, x):
    return torch.cat([cache[:, 1:], x[:, :1]], 1)


def shift_taps(cache, x):
    return torch.cat([cache[:, :, 1:], x[:, :, :1]], 2)


@pytest.mark.parametrize(
    ("name", "update", "kind"),
    [
        ("conv_states", shift_tokens, "state"),
        ("keys", decay, "kv"),
        ("buffer", decay, "state"),
        ("buffer", shift_taps, "state"),
        ("buffer", shift_tokens, "kv"),
    ],
)
def test_a_name_decides_and_without_one_how_it_is_rewritten(name, update, kind):
    def step(x, caches):
        caches[name].copy_(update(caches[name], x))
        return caches[name].sum()

    backend = CanaryBackend(CanaryConfig(inner="eager"))
    with torch.no_grad():
        torch.compile(step, backend=backend, fullgraph=True)(torch.randn(SHAPE), {name: torch.zeros(SHAPE)})
    assert [site.kind for plan in backend.session.plans for site in plan.sites] == [kind]


def test_a_layer_written_from_attention_over_another_layer_of_its_tensor_is_no_state():
    def step(x, layers, pos):
        x = torch.nn.functional.scaled_dot_product_attention(x, layers[0], layers[0])
        layers[1].copy_(layers[1].index_copy(2, pos, x * 2))
        return layers[1].sum()

    backend = CanaryBackend(CanaryConfig(inner="eager"))
    with torch.no_grad():
        compiled = torch.compile(step, backend=backend, fullgraph=True)
        compiled(torch.randn(2, 3, 1, 4), torch.zeros(2, 2, 3, 8, 4), torch.tensor([1]))
    assert [site.kind for plan in backend.session.plans for site in plan.sites] == ["kv"]


def test_the_second_of_two_states_in_one_tensor_is_computed_from_itself():
    def step(x, layers):
        layers[1].copy_(decay(layers[1], x))
        return layers[1].sum()

    backend = CanaryBackend(CanaryConfig(inner="eager"))
    with torch.no_grad():
        torch.compile(step, backend=backend, fullgraph=True)(torch.randn(SHAPE), torch.zeros(2, *SHAPE))
    assert [site.kind for plan in backend.session.plans for site in plan.sites] == ["state"]
