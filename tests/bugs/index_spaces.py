"""Bugs of slot mappings and index spaces (B)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from cases import Outcome, bug
from toy import Toy

from kvcanary_fx import Batch, KVPool

TOKENS = [5, 6, 7, 8, 9, 10, 11, 12]


def with_window_pool(**settings) -> tuple[Toy, torch.Tensor]:
    """A toy whose pool has an index space of its own, and the map into it from the slots of the table."""
    full_to_window = torch.zeros(64, dtype=torch.int64)
    toy = Toy(pools=lambda t: (KVPool(t.kv, t.table, name="swa", slot_map=full_to_window),), **settings)
    return toy, full_to_window


def place(toy: Toy, full_to_window: torch.Tensor, name: str, pairs: Sequence[tuple[int, int]]) -> None:
    """Give a request slots: in the table's index space, and in the pool's own."""
    request = toy.requests[name]
    for i, (full, own) in enumerate(pairs):
        full_to_window[full] = own
        toy.table[request.row, request.stored + i] = full
    toy.pool.allocate([own for _, own in pairs], owner=name)


def reading(toy: Toy, batch: Batch, pages: Sequence[Sequence[int]], lengths: Sequence[int], size: int = 1) -> None:
    """A forward whose attention kernel gets this page table and these lengths."""
    with toy.session.step(batch), toy.session.forward():
        toy.session.check_reads(torch.tensor(pages), torch.tensor(lengths), page_size=size)


@bug("B1", "sgl-project/sglang#19107", check="operand", also=("index",))
def window_pool_written_with_slots_of_the_full_pool(faulty: bool) -> Outcome:
    """The fused write takes the table's slot 9 for a slot of the window pool, where it means slot 3."""
    toy, full_to_window = with_window_pool()
    toy.add("r", TOKENS)
    place(toy, full_to_window, "r", [(9, 3)])
    toy.forward(toy.plan({"r": [9]}), slots=[9 if faulty else 3])
    return Outcome((toy.session,), slot=3, request="r")


@bug("B2", "sgl-project/sglang#26531", check="index", also=("bounds",))
def draft_attention_reads_a_window_pool_with_full_pages(faulty: bool) -> Outcome:
    """What kind of pool it is was cached at start-up, so the page table holds slots of the other index space."""
    toy, full_to_window = with_window_pool()
    toy.add("r", TOKENS)
    place(toy, full_to_window, "r", [(9, 3)])
    toy.forward(toy.plan({"r": [9]}), slots=[3])
    toy.requests["r"].stored = 1
    place(toy, full_to_window, "r", [(10, 4)])
    reading(toy, toy.plan({"r": [10]}), [[9, 10] if faulty else [3, 4]], [2])
    return Outcome((toy.session,), slot=3, request="r")


@bug("B5", "NVIDIA/TensorRT-LLM#13124", check="index", also=("bounds",))
def block_ids_taken_for_pool_indices(faulty: bool) -> Outcome:
    """After swaps with the host, block 12 lives in page 2 of the pool; the draft's replay uses 12."""
    toy = Toy(pools=lambda t: (KVPool(t.kv, t.table, table_page_size=4),))
    request = toy.add("r", TOKENS)
    toy.table[request.row, 0] = 2
    toy.pool.allocate([8, 9, 10, 11], owner="r")
    toy.forward(toy.plan({"r": [8, 9]}))
    request.stored = 2
    reading(toy, toy.plan({"r": [10]}), [[12 if faulty else 2]], [3], size=4)
    return Outcome((toy.session,), slot=8, request="r")


@bug("B8", "sgl-project/sglang#18803 (#18744)", check="owner", also=("index", "chain"))
def row_of_the_request_table_recycled_under_a_running_forward(faulty: bool) -> Outcome:
    """The row is filled for the next request before the forward that reads it has run."""
    toy = Toy()
    request = toy.add("A", TOKENS)
    toy.run({"A": [1, 2]})
    toy.take("A", [3])
    batch = toy.plan({"A": [3]})
    toy.pool.allocate([7, 8], owner="B")
    if faulty:
        toy.table[request.row, :2] = torch.tensor([7, 8])
    toy.forward(batch)
    toy.table[request.row, :2] = torch.tensor([7, 8])
    return Outcome((toy.session,), slot=7, request="A")


@bug("B9", "sgl-project/sglang#33579 / #33581", check="bounds", also=("chain", "owner"))
def row_narrower_than_the_speculative_reserve(faulty: bool) -> Outcome:
    """Two draft tokens beyond a row of six spill into the row of the neighbour."""
    width = 6 if faulty else 8
    toy = Toy(width=width)
    request = toy.add("r", TOKENS)
    toy.run({"r": [1, 2, 3, 4, 5, 6]})
    toy.pool.allocate([7, 8], owner="r")
    end = request.row * width + 6
    toy.table.view(-1)[end : end + 2] = torch.tensor([7, 8], dtype=torch.int32)
    toy.forward(toy.plan({"r": [7, 8]}))
    return Outcome((toy.session,), request="r")


@bug("B10", "sgl-project/sglang#27338", check="bounds", also=("index",))
def index_buffer_sized_without_the_topk_factor(faulty: bool) -> Outcome:
    """A draft that follows two branches reads twice the entries that its index buffer has room for."""
    toy = Toy()
    toy.add("r", TOKENS)
    toy.run({"r": [1, 2, 3]})
    toy.take("r", [4])
    topk = 2 if faulty else 1
    reading(toy, toy.plan({"r": [4]}), [[1, 2, 3, 4]], [topk * 4])
    return Outcome((toy.session,), request="r")


@bug("B11", "sgl-project/sglang#27360", check="index")
def replay_does_not_trim_the_locations_to_the_decode_length(faulty: bool) -> Outcome:
    """The page table of a replay is built from four columns, of which two are from a longer step."""
    toy = Toy()
    toy.add("r", TOKENS)
    toy.run({"r": [1]})
    toy.take("r", [2])
    reading(toy, toy.plan({"r": [2]}), [[1, 2, 9, 8]], [4 if faulty else 2])
    return Outcome((toy.session,), request="r")


@bug("B12", "sgl-project/sglang#26972", check="bounds", also=("chain",))
def row_length_ignores_the_page_that_each_decode_may_need(faulty: bool) -> Outcome:
    """The request fills its last page, and the page for the next token has no column in its row."""
    width = 1 if faulty else 2
    toy = Toy(width=width, pools=lambda t: (KVPool(t.kv, t.table, table_page_size=4),))
    request = toy.add("r", TOKENS)
    toy.table[request.row, 0] = 1
    toy.pool.allocate(range(4, 8), owner="r")
    toy.forward(toy.plan({"r": [4, 5, 6, 7]}))
    request.stored = 4
    toy.pool.allocate(range(8, 12), owner="r")
    toy.table.view(-1)[request.row * width + 1] = 2
    toy.forward(toy.plan({"r": [8]}))
    return Outcome((toy.session,), request="r")


@bug("B14", "flashinfer-ai/flashinfer#3904 (vllm#48167)", check="index")
def captured_wrapper_replays_the_plan_of_an_earlier_step(faulty: bool) -> Outcome:
    """The plan was baked into the graph: each replay reads the two slots of the step that was captured."""
    toy = Toy()
    toy.add("r", TOKENS)
    toy.run({"r": [1]})
    toy.take("r", [2])
    reading(toy, toy.plan({"r": [2]}), [[1, 2]], [2])
    toy.forward(toy.plan({"r": [2]}))
    toy.requests["r"].stored = 2
    toy.take("r", [3])
    reading(toy, toy.plan({"r": [3]}), [[1, 2, 0]] if faulty else [[1, 2, 3]], [2 if faulty else 3])
    return Outcome((toy.session,), request="r")


@bug("B15", "tenstorrent/tt-xla#4190", check="owner", also=("chain", "content"))
def suffix_filled_in_from_the_shared_block_on(faulty: bool) -> Outcome:
    """The first token of B's suffix goes to the last slot of the block that A and B share."""
    toy = Toy()
    toy.add("A", TOKENS)
    toy.run({"A": [1, 2, 3]})
    toy.pool.share([1, 2, 3], owner="B")
    request = toy.add("B", TOKENS, prefix=[1, 2, 3])
    if faulty:
        toy.table[request.row, 3] = 3
        toy.forward(toy.plan({"B": [3]}))
    else:
        toy.run({"B": [4]})
    return Outcome((toy.session,), slot=3, request="B")
