"""Where the one check of all layers goes, the slots that it needs, and the graphs that keep a check in each layer."""

from __future__ import annotations

from typing import Any

import expecttest
import pytest
import torch
from test_halves_beside import caches, canary_lines, counted, counted_together, guarded, two_layers

from kvcanary_fx import CanaryBackend, CanaryConfig
from kvcanary_fx.adapters.huggingface.caches import cache_name
from kvcanary_fx.passes import held_values
from kvcanary_fx.passes.halves_beside import check_halves_beside
from kvcanary_fx.passes.layers_at_once import check_layers_at_once
from kvcanary_fx.passes.pipeline import passes
from kvcanary_fx.proof import tiny

INPUTS = torch.randn(2, 2, 1, 4), torch.tensor([3]), caches(2)
COUNTED = INPUTS[0], [torch.tensor(0), torch.tensor(0)], caches(2)


class Goldens(expecttest.TestCase):
    maxDiff = None

    def test_all_layers_are_checked_before_the_first_write_and_recorded_behind_the_last(self) -> None:
        gm, plan = guarded(two_layers, *INPUTS)
        for _ in range(2):
            check_layers_at_once(gm, [], plan)
            check_halves_beside(gm, [], plan)
        gm.graph.lint()
        assert (plan.joins, plan.halves_beside, plan.layers_at_once) == (True, True, 2)
        self.assertExpectedInline(
            canary_lines(gm),
            """\
canary.begin(state)
canary.verify_layers([caches[0][0], caches[0][1], caches[1][0], caches[1][1]], [position], [], False, state, [0, 1, 2, 3], [0, 1, 2, 3])
canary.join([caches[0][0], caches[0][1], caches[1][0], caches[1][1], position], state)
index_copy_(caches[0][0], 2, position, key)
index_copy_(caches[0][1], 2, position, value)
matmul(x, transpose)
softmax(matmul, -1)
matmul(softmax, caches[0][1])
index_copy_(caches[1][0], 2, position, key_1)
index_copy_(caches[1][1], 2, position, value_1)
canary.record_layers([caches[0][0], caches[0][1], caches[1][0], caches[1][1]], [as_strided, as_strided_1, as_strided_2, as_strided_3], [position], [], False, None, state, [0, 1, 2, 3], [0, 1, 2, 3])
matmul(x, transpose_1)
softmax(matmul_2, -1)
matmul(softmax_1, caches[1][1])
canary.join([caches[0][0], caches[0][1], caches[1][0], caches[1][1], as_strided, as_strided_1, as_strided_2, as_strided_3, position], state)
""",
        )

    def test_slots_that_each_layer_computes_are_stacked_in_front_of_the_check(self) -> None:
        gm, plan = guarded(counted, *COUNTED)
        check_layers_at_once(gm, [], plan)
        gm.graph.lint()
        (stack,) = (node for node in gm.graph.nodes if node.name == "stack")
        assert stack.meta["example_value"].shape == (2, 1)  # or its launches could not be compiled ahead
        names = [node.name for node in gm.graph.nodes if node.op.startswith("call")]
        self.assertExpectedInline(
            "\n".join(names[: names.index("join_default")]),
            """\
begin_default
arange
position
arange_1
position_1
stack
verify_layers_default
add_""",
        )
        self.assertExpectedInline(
            canary_lines(gm),
            """\
canary.begin(state)
canary.verify_layers([caches[0][0], caches[0][1], caches[1][0], caches[1][1]], [stack], [], True, state, [0, 1, 2, 3], [0, 1, 2, 3])
canary.join([caches[0][0], caches[0][1], caches[1][0], caches[1][1], stack], state)
index_copy_(caches[0][0], 2, position, x)
index_copy_(caches[0][1], 2, position, x)
matmul(x, transpose)
softmax(matmul, -1)
matmul(softmax, caches[0][1])
index_copy_(caches[1][0], 2, position_1, x)
index_copy_(caches[1][1], 2, position_1, x)
canary.record_layers([caches[0][0], caches[0][1], caches[1][0], caches[1][1]], [x, x, as_strided, as_strided], [stack], [], True, None, state, [0, 1, 2, 3], [0, 1, 2, 3])
matmul(x, transpose_1)
softmax(matmul_2, -1)
matmul(softmax_1, caches[1][1])
canary.join([caches[0][0], caches[0][1], caches[1][0], caches[1][1], x, as_strided, stack], state)
""",
        )


def halves_of_one(x: torch.Tensor, position: torch.Tensor, caches: list[list[torch.Tensor]]) -> torch.Tensor:
    """K is computed, V is a part of what one product gave."""
    for k, v in caches:
        query, key, value = (torch.cat([x, x * 2, x + 1], -1) * 0.5).chunk(3, -1)
        key, value = (key * 1.5 - query).to(k.dtype), value.to(v.dtype)
        k.index_copy_(2, position, key)
        v.index_copy_(2, position, value)
        read = torch.softmax(torch.matmul(query, k.to(x.dtype).transpose(2, 3)), -1)
        x = x + torch.matmul(read, v.to(x.dtype))
    return x


def test_a_part_of_a_larger_tensor_is_joined() -> None:
    """Where it begins in memory is Inductor's to choose."""
    gm, plan = guarded(halves_of_one, *INPUTS)
    check_layers_at_once(gm, [], plan)
    lines = canary_lines(gm).splitlines()
    joins = [line for line in lines if line.startswith("canary.join(")]
    halves = "caches[0][0], caches[0][1], caches[1][0], caches[1][1]"
    assert joins[:-1] == [f"canary.join([{halves}, position, value_1], state)", "canary.join([value_3], state)"]
    (record,) = (line for line in lines if line.startswith("canary.record_layers("))
    assert "[as_strided, value_1, as_strided_1, value_3]" in record


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_the_caches_get_what_was_recorded(dtype: torch.dtype) -> None:
    """By Inductor, which stores what is written for the check and the cache."""
    x = INPUTS[0].to(torch.float32 if dtype is torch.float8_e4m3fn else dtype)
    backend = CanaryBackend(CanaryConfig(mode="log", verify_fraction="1/2"))
    stored = []
    for compiled in torch.compile(halves_of_one, backend=backend), torch.compile(halves_of_one):
        torch._dynamo.reset()
        pairs = [[half.to(dtype) for half in layer] for layer in caches(2)]
        outs = [compiled(x * (i + 1), torch.tensor([i]), pairs) for i in range(4)]
        stored.append([half.view(torch.uint8) for layer in pairs for half in layer] + outs)
    assert [plan.layers_at_once for plan in backend.session.plans] == [2]
    assert all(map(torch.equal, *stored))
    assert backend.session.violations() == []
    assert backend.session.stats().recorded > 0


def single(x: torch.Tensor, position: torch.Tensor, caches: list[list[torch.Tensor]]) -> torch.Tensor:
    return two_layers(x, position, caches[:1])


def place_that_moves(x: torch.Tensor, position: torch.Tensor, caches: list[list[torch.Tensor]]) -> torch.Tensor:
    """The second layer writes elsewhere: a record behind it would look for the first layer's token there."""
    x = two_layers(x, position, caches[:1])
    position.add_(1)
    return two_layers(x, position, caches[1:])


def values_reused(x: torch.Tensor, position: torch.Tensor, caches: list[list[torch.Tensor]]) -> torch.Tensor:
    """What the first layer wrote is overwritten in place, which the caches are not."""
    for k, v in caches:
        key, value = x + 1, x + 2
        k.index_copy_(2, position, key)
        v.index_copy_(2, position, value)
        x = torch.matmul(torch.softmax(torch.matmul(x, k.transpose(2, 3)), -1), v)
        key.mul_(2)
    return x


def unlike(x: torch.Tensor, position: torch.Tensor, caches: list[list[torch.Tensor]]) -> torch.Tensor:
    """The second layer writes two tokens."""
    x = two_layers(x, position, caches[:1])
    k, v = caches[1]
    both = torch.cat([position, position + 1])
    k.index_copy_(2, both, torch.cat([x, x], 2))
    v.index_copy_(2, both, torch.cat([x, x], 2))
    return x + k.sum() + v.sum()


@torch.library.custom_op("test_layers_at_once::touch", mutates_args=["cache"])
def touch(cache: torch.Tensor) -> None:
    """May write to what it is given."""


@touch.register_fake
def _(cache: torch.Tensor) -> None:
    pass


def touched_between(x: torch.Tensor, position: torch.Tensor, caches: list[list[torch.Tensor]]) -> torch.Tensor:
    x = two_layers(x, position, caches[:1])
    touch(position)
    return two_layers(x, position, caches[1:])


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (single, INPUTS),
        (place_that_moves, INPUTS),
        (values_reused, INPUTS),
        (unlike, INPUTS),
        (touched_between, INPUTS),
        (counted_together, COUNTED),
    ],
)
def test_a_graph_whose_checks_have_to_be_where_they_are_stays_as_it_is(model: Any, inputs: Any) -> None:
    gm, plan = guarded(model, *inputs)
    before = gm.print_readable(print_output=False)
    check_layers_at_once(gm, [], plan)
    assert gm.print_readable(print_output=False) == before
    assert not plan.joins
    assert not plan.layers_at_once


def test_what_would_be_held_too_long_is_recorded_in_each_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt's K and V of all layers are gigabytes."""
    monkeypatch.setattr(held_values, "HELD", 4 * INPUTS[0].numel() * INPUTS[0].element_size() - 1)
    gm, plan = guarded(two_layers, *INPUTS)
    check_layers_at_once(gm, [], plan)
    assert not plan.layers_at_once


def test_a_length_that_nobody_knows_is_recorded_in_each_layer() -> None:
    """A graph of a short prompt is that of the long one to come."""
    x, _, pairs = INPUTS
    x = torch.cat([x, x], 2)
    torch._dynamo.mark_dynamic(x, 2)
    position = torch.tensor([3, 4])
    torch._dynamo.mark_dynamic(position, 0)
    gm, plan = guarded(two_layers, x, position, pairs)
    check_layers_at_once(gm, [], plan)
    assert not plan.layers_at_once


def test_a_device_that_compares_everything_keeps_a_check_in_each_layer() -> None:
    gm, plan = guarded(two_layers, *INPUTS)
    check_layers_at_once(gm, [], plan, wanted=lambda device: False)
    assert not plan.layers_at_once


def test_inline_all_layers_are_checked_at_once_and_nothing_runs_beside_the_model() -> None:
    gm, plan = guarded(two_layers, *INPUTS)
    check_layers_at_once(gm, [], plan, side=False)
    assert (plan.layers_at_once, plan.halves_beside) == (2, False)
    named = [[name for name, _ in passes(at_once=lambda _: True, side=side)] for side in (True, False)]
    assert named[0] == [*named[1], "check_halves_beside"]
    assert named[1][-1] == "check_layers_at_once"


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3", "mixtral"])
def test_a_decode_step_of_transformers_has_two_checks(architecture: str) -> None:
    transformers = pytest.importorskip("transformers")
    model = tiny.build(architecture)
    config = model.config
    for length in 8, 12:  # of the second, Dynamo makes some sizes symbolic
        cache = transformers.StaticCache(config=config, max_cache_len=length)
        cache.early_initialization(1, config.num_key_value_heads, config.head_dim, torch.float32, "cpu")
        gm, plan = guarded(model, torch.tensor([[3]]), **{cache_name(model): cache}, keep=length == 12, chain=True)
        check_layers_at_once(gm, [], plan)
        assert plan.layers_at_once == config.num_hidden_layers
        lines = canary_lines(gm)
        assert [lines.count(f"canary.{op}_layers(") for op in ("verify", "record")] == [1, 1]
        assert "_halves(" not in lines
