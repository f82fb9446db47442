"""The fuzzer's own parts: every idiom writes what a plain assignment writes."""

from __future__ import annotations

import pytest
import torch

from fuzz.execute import Side
from fuzz.layouts import FAMILIES, PACKINGS, Layout, Sizes
from fuzz.program import Program
from fuzz.write_idioms import ALL, Idiom


def cells_after_a_step(way: str, layout: Layout) -> list[torch.Tensor]:
    """The cells of every half after two tokens at positions 1 and 2."""
    program = Program(way, layout, Sizes(2, 2, 2, 6, 4))
    side, table = Side(program), program.table()
    at = torch.arange(1, 3)
    index = table[:, 1:3].reshape(-1) if layout.of.pool else at
    x = torch.randn(2, 2, 2, 4, generator=torch.Generator().manual_seed(0))
    mask = torch.arange(6) <= at.unsqueeze(1)
    with torch.no_grad():
        side.forward((x, at.expand(2, 2), index, 1, table, mask))
    return list(side.cells(table).values())


@pytest.mark.parametrize("way", [w for w in ALL if not w.rolls], ids=lambda w: w.name)
def test_every_idiom_writes_what_an_assignment_writes(way: Idiom):
    expected = cells_after_a_step("setitem", Layout("bhsd", "pair"))
    for family in way.families:
        for packing in way.packings:
            if not (packing == "kv1" and FAMILIES[family].axis == 0 and FAMILIES[family].batch is not None):
                found = cells_after_a_step(way.name, Layout(family, packing))
                assert all(map(torch.equal, found, expected)), (family, packing)


def test_the_layouts_are_as_many_as_they_seem():
    assert len(FAMILIES) * len(PACKINGS) > 50
    assert len(ALL) >= 60
