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


def reading(
    toy: Toy,
    batch: Batch,
    pages: torch.Tensor,
    lengths: Sequence[int],
    size: int = 1,
    slots: Sequence[int] | None = None,
) -> None:
    """A forward whose metadata builder hands this page table and these lengths to the attention kernel."""
    compiled = toy.model

    def model(*args: object) -> torch.Tensor:
        toy.session.check_reads(pages, torch.tensor(lengths), page_size=size)
        return compiled(*args)

    toy.model = model
    toy.forward(batch, slots=slots)
    toy.model = compiled


def spill(toy: Toy, row: int, column: int, entries: Sequence[int]) -> None:
    """Write entries into a row as a kernel does, that knows its address but not its width."""
    start = row * toy.table.shape[1] + column
    toy.table.view(-1)[start : start + len(entries)] = torch.tensor(entries, dtype=torch.int32)


@bug("B1", "sgl-project/sglang#19107", check="operand", also=("index",))
def window_pool_written_with_slots_of_the_full_pool(faulty: bool) -> Outcome:
    """The fused write takes the table's slot 9 for a slot of the window pool, where it means slot 3."""
    toy, full_to_window = with_window_pool()
    toy.add("r", TOKENS)
    place(toy, full_to_window, "r", [(9, 3)])
    toy.forward(toy.plan({"r": [9]}), slots=[9 if faulty else int(full_to_window[9])])
    return Outcome((toy.session,), slot=3, request="r")


@bug("B2", "sgl-project/sglang#26531", check="index", also=("bounds",))
def draft_attention_reads_a_window_pool_with_full_pages(faulty: bool) -> Outcome:
    """What kind of pool it is was cached at start-up, so the page table holds slots of the other, larger pool."""
    toy, full_to_window = with_window_pool(slots=5)
    toy.add("r", TOKENS)
    place(toy, full_to_window, "r", [(9, 3)])
    toy.forward(toy.plan({"r": [9]}), slots=[3])
    toy.requests["r"].stored = 1
    place(toy, full_to_window, "r", [(10, 4)])
    pages = torch.tensor([[9, 10]])
    reading(toy, toy.plan({"r": [10]}), pages if faulty else full_to_window[pages], [2], slots=[4])
    return Outcome((toy.session,), slot=3, request="r")


@bug("B5", "NVIDIA/TensorRT-LLM#13124", check="index", also=("bounds",))
def block_ids_taken_for_pool_indices(faulty: bool) -> Outcome:
    """After swaps with the host, block 12 lives in page 2 of the pool; the draft's replay uses 12."""
    toy, block, pool_index = Toy(slots=32, pools=lambda t: (KVPool(t.kv, t.table, table_page_size=4),)), 12, {12: 2}
    request = toy.add("r", TOKENS)
    toy.table[request.row, 0] = pool_index[block]
    toy.pool.allocate([8, 9, 10, 11], owner="r")
    toy.forward(toy.plan({"r": [8, 9]}))
    request.stored = 2
    reading(toy, toy.plan({"r": [10]}), torch.tensor([[block if faulty else pool_index[block]]]), [3], size=4)
    return Outcome((toy.session,), slot=8, request="r")


@bug("B8", "sgl-project/sglang#18803 (#18744)", check="owner", also=("index", "chain"))
def row_of_the_request_table_recycled_under_a_running_forward(faulty: bool) -> Outcome:
    """The row is given back and filled for the next request before the forward that reads it has run."""
    toy = Toy()
    toy.add("A", TOKENS)
    toy.run({"A": [1, 2]})
    toy.take("A", [3])
    in_flight = toy.plan({"A": [3]})
    if not faulty:
        toy.forward(in_flight)
    toy.free_rows.insert(0, toy.requests.pop("A").row)
    toy.add("B", TOKENS)
    toy.take("B", [7, 8])
    if faulty:
        toy.forward(in_flight)
    toy.forward(toy.plan({"B": [7, 8]}))
    return Outcome((toy.session,), slot=7, request="A")


@bug("B9", "sgl-project/sglang#33579 / #33581", check="bounds", also=("chain", "owner"))
def row_narrower_than_the_speculative_reserve(faulty: bool) -> Outcome:
    """Two draft tokens beyond a row of six spill into the row of the neighbour."""
    toy = Toy(width=6 if faulty else 8)
    request = toy.add("r", TOKENS)
    toy.add("neighbour", TOKENS[::-1])
    toy.run({"r": [1, 2, 3, 4, 5, 6], "neighbour": [11, 12]})
    toy.pool.allocate([7, 8], owner="r")
    spill(toy, request.row, 6, [7, 8])
    toy.forward(toy.plan({"r": [7, 8]}))
    toy.run({"neighbour": [13]})
    return Outcome((toy.session,), request="r")


@bug("B10", "sgl-project/sglang#27338", check="bounds", also=("index",))
def index_buffer_sized_without_the_topk_factor(faulty: bool) -> Outcome:
    """A draft of two branches writes twice the indices that their buffer has room for, over the slots behind it."""
    toy, length, topk = Toy(), 4, 2
    toy.add("r", TOKENS)
    toy.run({"r": [1, 2, 3]})
    toy.pool.share([1, 2, 3], owner="r'")
    toy.add("r'", TOKENS, prefix=[1, 2, 3])
    toy.take("r", [4])
    toy.take("r'", [5])
    room = length if faulty else length * topk
    memory = torch.zeros(length * topk + topk, dtype=torch.int64)  # of a captured graph: the indices, then the slots
    memory[room : room + topk] = torch.tensor([4, 5])
    memory[: length * topk] = torch.tensor([1, 2, 3, 4, 1, 2, 3, 5])
    pages, slots = memory[: length * topk].view(topk, length), memory[room : room + topk].tolist()
    reading(toy, toy.plan({"r": [4], "r'": [5]}), pages, [length] * topk, slots=slots)
    return Outcome((toy.session,), slot=4, request="r")


@bug("B11", "sgl-project/sglang#27360", check="index")
def replay_does_not_trim_the_locations_to_the_decode_length(faulty: bool) -> Outcome:
    """The page table of a replay is built from all four columns, of which two are from a longer step."""
    toy, length = Toy(), 2
    toy.add("r", TOKENS)
    toy.run({"r": [1]})
    toy.take("r", [2])
    locations = torch.tensor([[1, 2, 9, 8]])
    pages = locations if faulty else locations[:, :length]
    reading(toy, toy.plan({"r": [2]}), pages, [pages.shape[1]])
    return Outcome((toy.session,), request="r")


@bug("B12", "sgl-project/sglang#26972", check="bounds", also=("chain",))
def row_length_ignores_the_page_that_each_decode_may_need(faulty: bool) -> Outcome:
    """The request fills its last page, and the page for the next token has no column in its row."""
    toy = Toy(width=1 if faulty else 2, pools=lambda t: (KVPool(t.kv, t.table, table_page_size=4),))
    request = toy.add("r", TOKENS)
    toy.pool.allocate(range(4, 12), owner="r")
    spill(toy, request.row, 0, [1])
    toy.forward(toy.plan({"r": [4, 5, 6, 7]}))
    request.stored = 4
    spill(toy, request.row, 1, [2])
    toy.forward(toy.plan({"r": [8]}))
    return Outcome((toy.session,), request="r")


@bug("B14", "flashinfer-ai/flashinfer#3904 (vllm#48167)", check="index")
def captured_wrapper_replays_the_plan_of_an_earlier_step(faulty: bool) -> Outcome:
    """The plan was baked into the graph: each replay reads the two slots of the step that was captured."""
    toy = Toy()
    request = toy.add("r", TOKENS)
    toy.run({"r": [1]})
    baked = None
    for slot in (2, 3):
        toy.take("r", [slot])
        planned = toy.table[request.row, : request.stored + 1].clone().unsqueeze(0)
        baked = planned if baked is None or not faulty else baked
        reading(toy, toy.plan({"r": [slot]}), baked, [baked.shape[1]])
        request.stored += 1
    return Outcome((toy.session,), request="r")


@bug("B15", "tenstorrent/tt-xla#4190", check="owner", also=("chain", "content"))
def suffix_filled_in_from_the_shared_block_on(faulty: bool) -> Outcome:
    """The fill of B's suffix starts at the first block of its row, which it shares with A."""
    toy, block = Toy(), [1, 2, 3]
    toy.add("A", TOKENS)
    toy.run({"A": block})
    toy.pool.share(block, owner="B")
    request = toy.add("B", TOKENS, prefix=block)
    toy.take("B", [4, 5])
    fill = toy.table[request.row, 0 if faulty else request.stored :][:2].tolist()
    toy.forward(toy.plan({"B": fill}))
    toy.run({"A": [6]})
    return Outcome((toy.session,), slot=1, request="B")
