"""Who is in the slots: stored for reports, where the graph shows it; in rows a token's position follows the last."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvcanary_fx.kernels.buffers import Gate, IdentityBuffers, RowState
from kvcanary_fx.kernels.checks import Check
from kvcanary_fx.kernels.ring import UNKNOWN
from kvcanary_fx.kernels.slots.chain import SEED, mix_tensor
from kvcanary_fx.kernels.slots.identity import identify_with, name_slots
from kvcanary_fx.kernels.writes.layout import SlotLayout


def named(positions):
    identity = IdentityBuffers.allocate(4, torch.device("cpu"))
    name_slots(identity, torch.tensor([2, -1, 0]), torch.tensor([[7], [8], [9]]), positions)
    return identity.tokens[:-1].tolist(), identity.positions[:-1].tolist()


def test_tokens_and_positions_are_stored_and_skipped_slots_are_left_alone():
    assert named(torch.tensor([[5], [6], [3]])) == ([9, -1, 7, -1], [3, UNKNOWN, 5, UNKNOWN])


@pytest.mark.parametrize("positions", [None, torch.tensor([5])])
def test_positions_that_are_not_one_a_token_are_unknown(positions):
    assert named(positions) == ([9, -1, 7, -1], [UNKNOWN] * 4)


class Rows:
    """Two sequences in four slots each; the second holds tokens at the positions 5 and 6, decoded one by one."""

    def __init__(self, index: int = 2, tokens: int = 1):
        self.index, self.tokens = index, tokens
        self.identity = IdentityBuffers.allocate(8, torch.device("cpu"))
        self.identity.positions[4:6], self.identity.chain[4:6] = torch.tensor([5, 6]), torch.tensor([70, 80])
        self.rows = torch.zeros(2, len(RowState), dtype=torch.int32)
        self.rows[1, RowState.NEXT], self.rows[1, RowState.LENGTH] = 2, 1
        self.gate = torch.zeros(len(Gate), dtype=torch.int64)

    def told(self, position: int) -> list[list[int]]:
        """What is reported of a next token at this position: slot, position expected and found, token."""
        site = SimpleNamespace(
            layout=SlotLayout((2, 4, 3), (0, 1), torch.float32),
            half=SimpleNamespace(rows=self.rows),
            checks=Check.CHAIN,
            lenient=False,
            gate=self.gate,
        )
        told = []

        def report(site, phase, check, mask, *columns):
            told.extend(torch.stack([c[mask].long() for c in columns], 1).tolist())

        each = torch.arange(self.tokens).unsqueeze(0)
        identify_with(report, site, self.identity, 4 + self.index + each, 33 + each, position + each)
        return told


def test_a_decoded_token_whose_position_does_not_follow():
    assert Rows().told(7) == []
    assert Rows().told(9) == [[6, 7, 9, 33]]


def behind_a_prompt(rows):
    rows.rows[1, RowState.LENGTH] = 2


def behind_other_slots(rows):
    rows.rows[1, RowState.NEXT] = 3


def behind_nobody_knows_whom(rows):
    rows.identity.positions[5] = UNKNOWN


def where_others_may_have_written(rows):
    rows.gate[Gate.LENIENT_NOW] = 1


@pytest.mark.parametrize(
    "change", [behind_a_prompt, behind_other_slots, behind_nobody_knows_whom, where_others_may_have_written]
)
def test_any_position_is_legal(change):
    rows = Rows()
    change(rows)
    assert rows.told(9) == []


def test_any_position_is_legal_for_the_first_of_a_row_and_for_several_tokens():
    first = Rows(index=0)
    first.rows[1, RowState.NEXT] = 0
    first.identity.positions[3] = 1  # of the other sequence
    assert first.told(9) == []
    assert Rows(tokens=2).told(9) == []


@pytest.mark.parametrize(("change", "start"), [(lambda rows: None, 80), (behind_nobody_knows_whom, SEED)])
def test_a_chain_goes_on_from_the_token_before(change, start):
    rows = Rows(tokens=2)
    change(rows)
    rows.told(7)
    links = mix_tensor(torch.tensor([33, 34]), torch.tensor([7, 8])).cumsum(0)
    assert rows.identity.chain[6:8].tolist() == (links + start).tolist()
    assert rows.identity.tokens[6:8].tolist() == [33, 34]
    assert rows.identity.positions[6:8].tolist() == [7, 8]
