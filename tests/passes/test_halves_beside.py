"""Where the checks around writes go that may run beside the model, and where the model waits for them."""

from __future__ import annotations

import re
from typing import Any

import expecttest
import pytest
import torch
from render import render

from kvcanary_fx.adapters.huggingface.caches import cache_name
from kvcanary_fx.passes.graph_plan import GraphPlan
from kvcanary_fx.passes.halves_beside import check_halves_beside
from kvcanary_fx.passes.pipeline import passes, run_passes
from kvcanary_fx.proof import tiny


def guarded(
    model: Any, *inputs: Any, keep: bool = False, chain: bool = False, **others: Any
) -> tuple[torch.fx.GraphModule, GraphPlan]:
    """The rewritten graph, its state passed off as a GPU's: what a machine without one can see of it.

    Args:
        keep: Dynamo remembers what it compiled before.
    """
    made = []

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        made.append(run_passes(gm, example_inputs, passes(chain=chain)))
        return gm

    if not keep:
        torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(model, backend=backend, fullgraph=True)(*inputs, **others)
    (gm, plan) = made[0]
    plan.devices[:] = [torch.device("cuda")]
    return gm, plan


def canary_lines(gm: torch.fx.GraphModule) -> str:
    lines = [line.strip().split(" = ", 1)[-1] for line in render(gm).splitlines()]
    lines = [line for line in lines if "canary." in line or "index_copy_" in line or "matmul" in line]
    return "\n".join(re.sub(r"l_caches_(\d)__(\d)_", r"\2\1", line) for line in lines) + "\n"


def caches(layers: int) -> list[list[torch.Tensor]]:
    return [[torch.zeros(2, 2, 8, 4) for _ in range(2)] for _ in range(layers)]


def two_layers(x: torch.Tensor, position: torch.Tensor, caches: list[list[torch.Tensor]]) -> torch.Tensor:
    for k, v in caches:
        key, value = x + 1, x + 2
        k.index_copy_(2, position, key)
        v.index_copy_(2, position, value)
        x = torch.matmul(torch.softmax(torch.matmul(x, k.transpose(2, 3)), -1), v)
    return x


def reading_ahead(x: torch.Tensor, position: torch.Tensor, caches: list[list[torch.Tensor]]) -> torch.Tensor:
    caches[1][0][:, :, 7] *= 0.5  # a write of its own kind
    return two_layers(x, position, caches)


def any_length(x: torch.Tensor, position: torch.Tensor, caches: list[list[torch.Tensor]]) -> torch.Tensor:
    """What does not ask whether K and V are as long, as PyTorch's attention does not."""
    for k, v in caches:
        key, value = x + 1, x + 2
        k.index_copy_(2, position, key)
        v.index_copy_(2, position, value)
        x = x + k.sum(2, True) + v.sum(2, True)
    return x


INPUTS = torch.randn(2, 2, 1, 4), torch.tensor([3]), caches(2)


class Goldens(expecttest.TestCase):
    maxDiff = None

    def test_a_layer_is_checked_behind_the_record_of_the_last_and_waited_for_in_front_of_its_write(self) -> None:
        gm, plan = guarded(two_layers, *INPUTS)
        for _ in range(2):
            check_halves_beside(gm, [], plan)
        gm.graph.lint()
        assert (plan.joins, plan.halves_beside) == (True, True)
        self.assertExpectedInline(
            canary_lines(gm),
            """\
canary.begin(state)
canary.verify_halves([caches[0][0], caches[0][1]], [None, None], [position], [], state, [0, 1], [0, 1])
canary.join([caches[0][0], caches[0][1], key, value, position], state)
index_copy_(caches[0][0], 2, position, key)
index_copy_(caches[0][1], 2, position, value)
canary.record_halves([caches[0][0], caches[0][1]], [key, value], [position], [], None, state, [0, 1], [0, 1])
canary.verify_halves([caches[1][0], caches[1][1]], [None, None], [position], [], state, [2, 3], [2, 3])
matmul(x, transpose)
softmax(matmul, -1)
matmul(softmax, caches[0][1])
canary.join([caches[0][0], caches[0][1], key, value, position, caches[1][0], caches[1][1], key_1, value_1], state)
index_copy_(caches[1][0], 2, position, key_1)
index_copy_(caches[1][1], 2, position, value_1)
canary.record_halves([caches[1][0], caches[1][1]], [key_1, value_1], [position], [], None, state, [2, 3], [2, 3])
matmul(x, transpose_1)
softmax(matmul_2, -1)
matmul(softmax_1, caches[1][1])
canary.join([caches[1][0], caches[1][1], key_1, value_1, position], state)
""",
        )


@pytest.mark.parametrize("by_hand", [False, True], ids=["seen", "marked"])
def test_v_of_a_symbolic_size_is_checked_with_its_k(by_hand: bool) -> None:
    """As in transformers' static caches, where Dynamo has seen another length, of V."""
    x, position, pairs = INPUTS[0], INPUTS[1], caches(2)
    mark = torch._dynamo.mark_dynamic if by_hand else torch._dynamo.maybe_mark_dynamic
    for key, value in pairs:
        torch._dynamo.mark_static(key)
        mark(value, 2)
    gm, _ = guarded(any_length, x, position, pairs)
    assert [f"verify{half}" in canary_lines(gm) for half in ("_halves(", "(")] == [not by_hand, by_hand]


def counted(x: torch.Tensor, lengths: list[torch.Tensor], caches: list[list[torch.Tensor]]) -> torch.Tensor:
    """Each layer computes its slots from a count of its tokens, as in transformers."""
    for length, (k, v) in zip(lengths, caches, strict=True):
        position = torch.arange(1) + length
        length.add_(1)
        k.index_copy_(2, position, x)
        v.index_copy_(2, position, x)
        x = torch.matmul(torch.softmax(torch.matmul(x, k.transpose(2, 3)), -1), v)
    return x


def counted_together(x: torch.Tensor, lengths: list[torch.Tensor], caches: list[list[torch.Tensor]]) -> torch.Tensor:
    """The count of the second layer changes behind the record of the first."""
    x = counted(x, lengths[:1], caches[:1])
    lengths[1].add_(1)
    return counted(x, lengths[1:], caches[1:])


@pytest.mark.parametrize(("model", "ahead"), [(counted, 2), (counted_together, 1)])
def test_slots_that_a_layer_computes_go_ahead_with_its_check_unless_that_changes_them(model: Any, ahead: int) -> None:
    gm, plan = guarded(model, INPUTS[0], [torch.tensor(0), torch.tensor(0)], caches(2))
    check_halves_beside(gm, [], plan)
    gm.graph.lint()
    assert canary_lines(gm).count("[None, None]") == ahead


def test_a_decode_step_of_transformers_is_checked_ahead_in_each_layer() -> None:
    transformers = pytest.importorskip("transformers")
    model = tiny.build("llama")
    for length in 8, 12:  # of the second, Dynamo makes some sizes symbolic
        cache = transformers.StaticCache(config=model.config, max_cache_len=length)
        cache.early_initialization(1, model.config.num_key_value_heads, model.config.head_dim, torch.float32, "cpu")
        gm, plan = guarded(model, torch.tensor([[3]]), **{cache_name(model): cache}, keep=length == 12, chain=True)
        check_halves_beside(gm, [], plan)
        assert canary_lines(gm).count("[None, None]") == model.config.num_hidden_layers


def test_a_graph_with_checks_of_another_kind_stays_as_it_is() -> None:
    gm, plan = guarded(reading_ahead, *INPUTS)
    before = gm.print_readable(print_output=False)
    check_halves_beside(gm, [], plan)
    assert gm.print_readable(print_output=False) == before
    assert not plan.joins
