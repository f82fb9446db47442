"""What the fuzzer expects, where docs/pools.md leaves a choice."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from fuzz.execute import judged_by_layer
from fuzz.layouts import Layout, Sizes
from fuzz.oracle import Cell, Oracle
from fuzz.program import Program
from fuzz.reports import Names


@pytest.mark.parametrize("rows", [True, False], ids=["rows", "no rows"])
def test_new_tokens_of_which_one_was_recorded_may_be_reported(rows):
    """Without rows, what code outside wrote is not recorded, and one token of a half says nothing alone."""
    cells = {(0, half): torch.ones(1, 4, 2, dtype=torch.uint8) for half in range(2)}
    oracle = Oracle(cells, rows=rows, merged=True, written_whole=False, later_asked=rows)
    oracle.one_layer = True
    oracle.after(cells, 1, 1, set())  # the first token was written outside
    cells = {key: torch.cat((now[:, :2] + 1, now[:, 2:]), 1) for key, now in cells.items()}
    oracle.legal(cells, counted=True)
    must, may = oracle.before(cells, 2)
    assert (must, Cell(0, 0, 0, 1) in may) == (set(), not rows)


def test_a_reported_cell_that_an_op_of_the_same_forward_hits_again_is_reported_again():
    """What was reported are the bytes that the check saw, not those after the op's stray write."""
    right = {(0, half): torch.ones(1, 4, 2, dtype=torch.uint8) for half in range(2)}
    oracle = Oracle(right, rows=False, merged=False, written_whole=False, later_asked=False)
    oracle.after(right, 0, 2, set())
    cell, damaged = Cell(0, 0, 0, 1), {key: now.clone() for key, now in right.items()}
    damaged[0, 0][0, 1] = 2
    assert oracle.before(damaged, 2)[0] == {cell}
    again = {key: now.clone() for key, now in damaged.items()}
    again[0, 0][0, 1] = 3
    oracle.after(again, 2, 1, {cell}, checked=damaged)
    assert oracle.before(again, 3)[0] == {cell}


@pytest.mark.parametrize("alike", [True, False])
def test_a_row_with_the_tokens_of_another_one_may_have_been_reordered(alike):
    """K and V of its only token are swapped, which looks like a new prompt, and back one step later."""
    right = {(0, half): torch.full((2, 4, 2), half + 1, dtype=torch.uint8) for half in range(2)}
    right[0, 0][1, 1] += not alike
    oracle = Oracle(right, rows=True, merged=False, written_whole=False, later_asked=True)
    oracle.after(right, 0, 1, set())
    swapped = {key: now.clone() for key, now in right.items()}
    swapped[0, 0][0, 0], swapped[0, 1][0, 0] = right[0, 1][0, 0], right[0, 0][0, 0]
    oracle.counted = True
    assert oracle.before(swapped, 1)[0] == set()
    oracle.after(swapped, 1, 1, set())
    oracle.counted = True
    assert oracle.before(right, 2)[0] == (set() if alike else {Cell(0, half, 0, 0) for half in range(2)})


@pytest.mark.parametrize(("idiom", "second"), [("narrow_copy", True), ("index_copy", False)])
def test_graphs_of_one_half_each_that_are_compiled_anew_are_judged_one_by_one(idiom, second):
    """Where the position is an int, the second forward has other graphs than the first."""
    program = Program(
        idiom, Layout("bhsd", "pair"), Sizes(layers=2, batch=1, heads=1, length=12, dim=4), breaks="between"
    )
    assert [judged_by_layer(program, steps) for steps in range(3)] == [False, second, False]


def test_heads_are_slots_of_a_flat_pool_that_is_returned_whole():
    sizes = Sizes(layers=1, batch=2, heads=3, length=12, dim=4)
    program = Program("new_where", Layout("flat", "pair"), sizes, breaks="between")
    table, names = program.table(), Names(program, 2)
    told = SimpleNamespace(layer="", half="K", pool=names.base[0, 0], slot=int(table[1, 5]) * 3 + 2)
    assert Cell(0, 0, 1, 5) in names.cells(cast(Any, told), table)
