"""Bugs of the life of slots: use after free, double free (C)."""

from __future__ import annotations

from cases import Outcome, bug
from toy import Toy

from kvcanary_fx import KVPool

TOKENS = [5, 6, 7, 8, 9, 10]


def stored(*slots: int) -> Toy:
    """A toy whose request A holds these slots."""
    toy = Toy()
    toy.add("A", TOKENS)
    toy.run({"A": list(slots)})
    return toy


def in_tree(*slots: int) -> Toy:
    """A toy whose prefix tree owns these slots, filled by a request that is gone."""
    toy = stored(*slots)
    toy.pool.share(slots, owner="tree")
    toy.done("A")
    return toy


@bug("C1", "vllm-project/vllm#45357", check="owner", also=("content",))
def blocks_freed_while_the_next_step_still_writes_them(faulty: bool) -> Outcome:
    """A's slot is freed and filled for B while A's step that writes it is in flight."""
    toy = stored(1, 2)
    toy.take("A", [3])
    batch = toy.plan({"A": [3]})
    if not faulty:
        toy.forward(batch)
    toy.pool.release([3], owner="A")
    toy.add("B", TOKENS)
    toy.run({"B": [3]})
    if faulty:
        toy.forward(batch)
    return Outcome((toy.session,), slot=3, request="A")


@bug("C3", "sgl-project/sglang#29353", check="owner", also=("content",))
def slot_reused_on_the_schedule_stream_before_the_queued_forward_ran(faulty: bool) -> Outcome:
    """The scheduler frees what a queued forward reads, and the next request's write overtakes it."""
    toy = stored(3, 4)
    toy.take("A", [5])
    queued = toy.plan({"A": [5]})
    if not faulty:
        toy.forward(queued)
    toy.pool.release([4], owner="A")
    toy.add("B", TOKENS)
    toy.run({"B": [4]})
    if faulty:
        toy.forward(queued)
    return Outcome((toy.session,), slot=4, request="A")


@bug("C5", "sgl-project/mini-sglang#142", check="owner", also=("chain",))
def duplicate_pages_freed_without_remapping_the_row(faulty: bool) -> Outcome:
    """The tree has the same prefix already; the request's copy is freed, and its row still names the copy."""
    toy = in_tree(1)
    request = toy.add("r", TOKENS)
    toy.run({"r": [3]})
    toy.pool.release([3], owner="r")
    if not faulty:
        toy.pool.share([1], owner="r")
        toy.table[request.row, 0] = 1
    toy.run({"r": [4]})
    return Outcome((toy.session,), slot=3, request="r")


@bug("C6", "sgl-project/sglang#24193 (#23392)", check="owner", also=("chain", "sweep"))
def shared_prefix_freed_as_the_requests_own(faulty: bool) -> Outcome:
    """After a second match the protected length is stale, so the request frees what it only shares."""
    toy = in_tree(1, 2, 3, 4)
    toy.pool.share([1, 2, 3, 4], owner="R")
    toy.add("R", TOKENS, prefix=[1, 2, 3, 4])
    toy.run({"R": [5]})
    toy.pool.release([5], owner="R")
    toy.pool.release([1, 2, 3, 4], owner="R")
    if faulty:
        toy.pool.release([1, 2, 3, 4], owner="R")
        toy.session.sweep.run([1, 2, 3, 4])
    return Outcome((toy.session,), slot=1)


@bug("C7", "sgl-project/sglang#38941", check="owner")
def page_split_in_its_middle_is_freed_twice(faulty: bool) -> Outcome:
    """Two frees meet in the middle of a page, and each rounds to whole pages."""
    toy = stored(4, 5, 6, 7)
    pages = [[4, 5, 6, 7], [4, 5, 6, 7]] if faulty else [[4, 5, 6, 7]]
    for slots in pages:
        toy.pool.release(slots, owner="A")
    return Outcome((toy.session,), slot=4, request="A")


@bug("C8", "sgl-project/sglang-jax#1618", check="owner", also=("sweep",))
def tree_adopts_the_slots_and_the_caller_frees_them(faulty: bool) -> Outcome:
    """A revived tombstone takes the slots over; the caller does not know, and frees them."""
    toy = stored(2, 3)
    if faulty:
        toy.pool.release([2, 3], owner="A")
    toy.pool.share([2, 3], owner="n")
    toy.add("n", TOKENS, prefix=[2, 3])
    return Outcome((toy.session,), slot=2, request="n")


@bug("C9", "sgl-project/sglang#27586", check="owner")
def stale_map_frees_a_live_slot_of_the_window_pool(faulty: bool) -> Outcome:
    """The map still leads from a dead slot of the full pool to a window slot that is B's by now."""
    toy = Toy(pools=lambda t: (KVPool(t.kv, t.table, name="swa"),))
    full_to_window = {7: 3}
    toy.pool.allocate([3], owner="A")
    toy.pool.release([full_to_window[7]], owner="A")
    toy.add("B", TOKENS)
    toy.run({"B": [3]})
    if not faulty:
        del full_to_window[7]
    toy.pool.release([w for f, w in full_to_window.items() if f == 7], owner="A")
    return Outcome((toy.session,), slot=3, request="A")


@bug("C11", "sgl-project/sglang#31486", check="owner", also=("sweep", "chain"))
def slots_that_left_the_window_go_back_into_the_tree(faulty: bool) -> Outcome:
    """The window freed the oldest slots; at its end the request inserts them into the prefix tree all the same."""
    toy = stored(1, 2, 3, 4)
    toy.pool.release([1, 2], owner="A")
    tree = [1, 2, 3, 4] if faulty else [3, 4]
    toy.session.sweep.run(tree)
    return Outcome((toy.session,), slot=1)


@bug("C14", "vllm-project/vllm#4761", check="owner", also=("chain",))
def popped_block_left_in_the_index_of_cached_blocks(faulty: bool) -> Outcome:
    """The block was evicted and filled by B, and the index still serves it for A's prompt."""
    toy = stored(1)
    toy.done("A")
    index = {"hash of A's prompt": 1}
    toy.add("B", [20, 21])
    toy.run({"B": [1]})
    if not faulty:
        index.clear()
    prefix = list(index.values())
    toy.add("C", TOKENS, prefix=prefix)
    toy.run({"C": [2]})
    return Outcome((toy.session,), slot=1, request="C")
