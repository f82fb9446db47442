"""WritePlan against PyTorch's own indexing: the slots and operand rows it names are what indexing writes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcanary_fx.kernels.content import cpu, gpu
from kvcanary_fx.kernels.slots.positions import last_of_rows, per_row
from kvcanary_fx.kernels.writes.layout import SlotLayout
from kvcanary_fx.kernels.writes.plan import Resolved, Select, Selector, WritePlan

ALL, INT, RANGE, TENSOR, FLAT, GRID = (Select.ALL, Select.INT, Select.RANGE, Select.TENSOR, Select.FLAT, Select.GRID)


#: Where the kernels run here; without a GPU they are interpreted.
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def resolve(plan: WritePlan, layout: SlotLayout, index: list[torch.Tensor], extent: list[int]) -> Resolved:
    """What the CPU and the kernels both say."""
    expected = plan.resolve(layout, index, extent, torch.device("cpu"))
    on_cpu = cpu.resolve(plan, layout, index, extent, torch.device("cpu"))
    for got in on_cpu, gpu.resolve(plan, layout, [i.to(DEVICE) for i in index], extent, DEVICE):
        assert (got.slots.tolist(), got.raw.tolist()) == (expected.slots.tolist(), expected.raw.tolist())
        assert got.grid == expected.grid
    inside = torch.equal(expected.slots, expected.raw) and bool((expected.slots >= 0).all())
    quick = plan.resolve_in_range(layout, index, extent, torch.device("cpu"))
    assert quick is None or inside
    return expected


def _check(layout: SlotLayout, plan: WritePlan, index, extent, torch_index, value):
    """Write with PyTorch and by the plan; both pools must be equal."""
    by_torch, by_plan = torch.zeros(layout.shape), torch.zeros(layout.shape)
    by_torch[torch_index] = value
    resolved = resolve(plan, layout, index, extent)
    rows = plan.rows(layout, value, resolved)
    first = layout.slots_first(by_plan)
    for slot, row in zip(resolved.slots.tolist(), rows, strict=True):
        first[divmod(slot, layout.positions) if layout.two_axes else slot] = row
    assert torch.equal(by_torch, by_plan)


@st.composite
def cases(draw):
    """A layout, a selection on its slot axes, and the same selection as a Python index."""
    ndim = draw(st.integers(2, 4))
    shape = tuple(draw(st.integers(2, 4)) for _ in range(ndim))
    axes = tuple(sorted(draw(st.sets(st.integers(0, ndim - 1), min_size=1, max_size=min(2, ndim - 1)))))
    layout = SlotLayout(shape, axes, torch.float32)
    dims = draw(st.integers(0, 2))
    broadcast = tuple(draw(st.integers(1, 2)) for _ in range(dims))
    selectors, index, extent, python = [], [], [], [slice(None)] * ndim
    for axis in axes:
        kind = draw(st.sampled_from([ALL, RANGE, INT, TENSOR]))
        if kind is TENSOR:
            values = draw(st.permutations(range(shape[axis])))
            count = 1
            for size in broadcast:
                count *= size
            index.append(torch.tensor((values * 4)[:count]).reshape(broadcast))
            python[axis] = index[-1]
            selectors.append(Selector(TENSOR, len(index) - 1))
        elif kind is RANGE:
            start = draw(st.integers(0, shape[axis] - 1))
            stop = draw(st.integers(start, shape[axis] + 2))
            selectors.append(Selector(RANGE, len(extent)))
            extent += [start, stop]
            python[axis] = slice(start, stop)
        elif kind is INT:
            selectors.append(Selector(INT, len(extent)))
            extent.append(draw(st.integers(0, shape[axis] - 1)))
            python[axis] = extent[-1]
        else:
            selectors.append(Selector(ALL))
    return layout, WritePlan(tuple(selectors), 0), index, extent, tuple(python)


@settings(max_examples=300, deadline=None)
@given(cases())
def test_slots_and_rows_are_what_indexing_writes(case):
    layout, plan, index, extent, python = case
    kinds = {s.kind for s in plan.selectors}
    if INT in kinds and TENSOR in kinds:
        return  # the passes make the integer part of the region
    target = torch.zeros(layout.shape)[python]
    resolved = resolve(plan, layout, index, extent)
    if len(set(resolved.slots.tolist())) != resolved.slots.numel():
        return  # PyTorch does not say which of two writes to one place wins
    _check(layout, plan, index, extent, python, torch.randn(target.shape))


def test_negative_index_wraps_and_is_told():
    plan = WritePlan((Selector(TENSOR, 0),), 0)
    layout = SlotLayout((5, 2), (0,), torch.float32)
    resolved = resolve(plan, layout, [torch.tensor([0, -1, 5, -6])], [])
    assert resolved.slots.tolist() == [0, 4, -1, -1]
    assert resolved.raw.tolist() == [0, -1, 5, -6]


def test_index_copy_does_not_wrap():
    plan = WritePlan((Selector(TENSOR, 0),), 0, wraps=False)
    layout = SlotLayout((5, 2), (0,), torch.float32)
    assert resolve(plan, layout, [torch.tensor([-1])], []).slots.tolist() == [-1]


def test_slot_mapping_minus_one_means_not_stored():
    plan = WritePlan((Selector(FLAT, 0),), 0, skips=True)
    layout = SlotLayout((2, 3, 4), (0, 1), torch.float32, paged=True)
    resolved = resolve(plan, layout, [torch.tensor([5, -1, 6])], [])
    assert resolved.slots.tolist() == [5, -1, -1]
    assert resolved.raw.tolist() == [5, -1, 6]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_more_tokens_than_a_program_takes_and_wild_ones(dtype):
    layout = SlotLayout((3, 2, 700, 4), (0, 2), torch.float32)
    index = torch.randint(-800, 800, (600,), dtype=dtype)
    for wraps in (True, False):
        plan = WritePlan((Selector(ALL), Selector(TENSOR, 0)), 0, wraps=wraps)
        resolved = resolve(plan, layout, [index], [])
        first = cpu.first_positions(layout, resolved.slots)
        assert gpu.first_positions(layout, resolved.slots.to(DEVICE)).tolist() == first.tolist()
        strided = resolve(plan, layout, [index.repeat_interleave(2)[::2]], [])
        assert torch.equal(strided.slots, resolved.slots)


def test_pages_and_offsets_of_two_index_tensors():
    layout = SlotLayout((5, 8, 2, 4), (0, 1), torch.float32, paged=True)
    pages, offsets = torch.tensor([[0], [4], [9]]), torch.tensor([[7, -1], [0, 3], [1, 8]])
    resolve(WritePlan((Selector(TENSOR, 0), Selector(TENSOR, 1)), 0), layout, [pages, offsets], [])


def test_no_token_at_all():
    layout = SlotLayout((3, 5, 2), (0, 1), torch.float32)
    plan = WritePlan((Selector(ALL), Selector(RANGE, 0)), 0)
    assert resolve(plan, layout, [], [2, 2]).slots.tolist() == []


def test_scatter_with_an_index_per_row():
    layout = SlotLayout((2, 3, 5, 4), (0, 2), torch.float32)
    index = torch.tensor([[1, 2], [4, 0]]).view(2, 1, 2, 1).expand(2, 3, 2, 4)
    plan = WritePlan((Selector(ALL), Selector(GRID, 0)), 0, wraps=False)
    value = torch.randn(2, 3, 2, 4)
    by_torch, by_plan = torch.zeros(layout.shape), torch.zeros(layout.shape)
    by_torch.scatter_(2, index, value)
    resolved = resolve(plan, layout, [index], [])
    by_plan.permute(0, 2, 1, 3)[resolved.slots // 5, resolved.slots % 5] = plan.rows(layout, value, resolved)
    assert torch.equal(by_torch, by_plan)


def test_first_positions_of_each_row():
    layout = SlotLayout((3, 4, 2), (0, 1), torch.float32)
    for kernels, device in ((cpu, "cpu"), (gpu, DEVICE)):
        first = kernels.first_positions(layout, torch.tensor([6, 5, -1, 8], device=device))
        assert first.tolist() == [2**31 - 1, 1, 0]
        none = SlotLayout((12, 2), (0,), torch.float32)
        assert kernels.first_positions(none, torch.tensor([1], device=device)) is None


@pytest.mark.parametrize(
    ("positions", "rows", "tokens", "expected"),
    [
        (torch.tensor([[4, 5], [7, 8]]), 2, 2, [[4, 5], [7, 8]]),
        (torch.tensor([[4, 5]]), 2, 2, [[4, 5], [4, 5]]),
        (torch.tensor([4, 5]), 2, 2, [[4, 5], [4, 5]]),
        (torch.tensor([4, 9]), 2, 1, [[4], [9]]),
        (torch.tensor([4]), 3, 1, [[4], [4], [4]]),
        (torch.tensor([4, 5, 6]), 2, 1, None),
        (torch.zeros(3, 2, 1), 2, 1, None),
        (None, 2, 1, None),
    ],
)
def test_position_inputs_are_read_by_their_shape(positions, rows, tokens, expected):
    got = per_row(positions, rows, tokens)
    assert (None if got is None else got.tolist()) == expected


def test_last_position_of_a_rolled_window_comes_from_the_position_input():
    assert last_of_rows(torch.tensor([[11], [14]]), 2, written=16).tolist() == [11, 14]
