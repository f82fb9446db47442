"""Where the checks around writes go that may run beside the model, and where the model waits for them."""

from __future__ import annotations

import re
from typing import Any

import expecttest
import torch
from render import render

from kvcanary_fx.passes.graph_plan import GraphPlan
from kvcanary_fx.passes.halves_beside import check_halves_beside
from kvcanary_fx.passes.pipeline import passes, run_passes


def guarded(model: Any, *inputs: Any) -> tuple[torch.fx.GraphModule, GraphPlan]:
    """The rewritten graph, its state passed off as a GPU's: what a machine without one can see of it."""
    made = []

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        made.append(run_passes(gm, example_inputs, passes(chain=False)))
        return gm

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(model, backend=backend, fullgraph=True)(*inputs)
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
canary.verify_halves([caches[0][0], caches[0][1]], [key, value], [position], [], state, [0, 1], [0, 1])
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


def test_a_graph_with_checks_of_another_kind_stays_as_it_is() -> None:
    gm, plan = guarded(reading_ahead, *INPUTS)
    before = gm.print_readable(print_output=False)
    check_halves_beside(gm, [], plan)
    assert gm.print_readable(print_output=False) == before
    assert not plan.joins
