"""Bugs of the life of slots: use after free, double free (C)."""

from __future__ import annotations

from cases import Outcome, bug
from index_spaces import place, with_window_pool
from toy import Toy
from transfers import expect, send

TOKENS, OTHERS = [5, 6, 7, 8, 9, 10], [20, 21, 22, 23]


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
    """A's slot is freed and filled for B by the network while A's step that writes it is in flight."""
    sender, toy = Toy(), stored(1, 2)
    sender.add("B", OTHERS)
    sender.run({"B": [5]})
    toy.take("A", [3])
    in_flight = toy.plan({"A": [3]})
    if not faulty:
        toy.forward(in_flight)
    toy.pool.release([3], owner="A")
    expect(toy, "B", OTHERS, [3])
    send(sender, [5], toy, [3])
    if faulty:
        toy.forward(in_flight)
    toy.run({"B": [4]})
    return Outcome((sender.session, toy.session), slot=3, request="A")


@bug("C3", "sgl-project/sglang#29353", check="owner", also=("content",))
def slot_reused_on_the_schedule_stream_before_the_queued_forward_ran(faulty: bool) -> Outcome:
    """The scheduler frees what a queued forward reads, and the next request's write overtakes it."""
    toy = stored(3, 4)
    toy.take("A", [5])
    queued = toy.plan({"A": [5]})
    if not faulty:
        toy.forward(queued)
    toy.pool.release([4], owner="A")
    toy.add("B", OTHERS)
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
    toy.pool.share([1], owner="r")
    toy.pool.release([3], owner="r")
    if not faulty:
        toy.table[request.row, 0] = 1
    toy.add("B", OTHERS)
    toy.run({"B": [3]})
    toy.run({"r": [4]})
    return Outcome((toy.session,), slot=3, request="r")


@bug("C6", "sgl-project/sglang#24193 (#23392)", check="owner", also=("chain", "sweep"))
def shared_prefix_freed_as_the_requests_own(faulty: bool) -> Outcome:
    """After a second match the protected length is stale, so the request frees what it only shares."""
    toy, tree = in_tree(1, 2, 3, 4), [1, 2, 3, 4]
    toy.pool.share(tree, owner="R")
    request = toy.add("R", TOKENS, prefix=tree)
    toy.run({"R": [5]})
    toy.pool.release(tree, owner="R")  # its lock on the prefix
    protected = 0 if faulty else len(tree)
    toy.pool.release(toy.table[request.row, protected : request.stored], owner="R")
    toy.session.sweep.run(tree)
    return Outcome((toy.session,), slot=1)


@bug("C7", "sgl-project/sglang#38941", check="owner")
def page_split_in_its_middle_is_freed_twice(faulty: bool) -> Outcome:
    """Two frees meet in the middle of a page, and the allocator frees whole pages."""
    toy, page = stored(4, 5, 6, 7, 8, 9), 4
    toy.pool.allocate([10, 11], owner="A")  # the rest of the second page
    split = 6 if faulty else 8
    for part in (range(4, split), range(split, 12)):
        for number in sorted({slot // page for slot in part}):
            toy.pool.release(range(number * page, (number + 1) * page), owner="A")
    return Outcome((toy.session,), slot=4, request="A")


@bug("C8", "sgl-project/sglang-jax#1618", check="owner", also=("sweep",))
def tree_adopts_the_slots_and_the_caller_frees_them(faulty: bool) -> Outcome:
    """A revived tombstone takes the request's slots over; the caller does not know, and frees them."""
    toy = stored(2, 3)
    tree = toy.table[toy.requests.pop("A").row, :2].tolist()  # A's references are the tree's from here on
    if faulty:
        toy.pool.release(tree, owner="A")
    toy.pool.share(tree, owner="n")
    toy.add("n", TOKENS, prefix=tree)
    toy.run({"n": [4]})
    return Outcome((toy.session,), slot=2, request="n")


@bug("C9", "sgl-project/sglang#27586", check="owner")
def stale_map_frees_a_live_slot_of_the_window_pool(faulty: bool) -> Outcome:
    """The map still leads from a dead slot of the full pool to a window slot that is B's by now."""
    toy, full_to_window = with_window_pool()
    toy.add("A", TOKENS)
    place(toy, full_to_window, "A", [(7, 3)])
    toy.pool.release([3], owner="A")  # it left the window
    if not faulty:
        full_to_window[7] = 0
    toy.add("B", OTHERS)
    place(toy, full_to_window, "B", [(9, 3)])
    toy.forward(toy.plan({"B": [9]}), slots=[3])
    toy.requests["B"].stored = 1
    window_slots = full_to_window[[7]]  # a tombstone of the tree frees full slot 7; whose it was it does not know
    toy.pool.release(window_slots[window_slots > 0])
    place(toy, full_to_window, "B", [(10, 4)])
    toy.forward(toy.plan({"B": [10]}), slots=[4])
    return Outcome((toy.session,), slot=3, request="B")


@bug("C11", "sgl-project/sglang#31486", check="owner", also=("sweep", "chain"))
def slots_that_left_the_window_go_back_into_the_tree(faulty: bool) -> Outcome:
    """The window freed the oldest slots; at its end the request inserts them into the prefix tree all the same."""
    toy, evicted = stored(1, 2, 3, 4), 2
    row = toy.table[toy.requests["A"].row, :4].tolist()
    toy.pool.release(row[:evicted], owner="A")
    tree = row[0 if faulty else evicted :]
    toy.session.sweep.run(tree)
    return Outcome((toy.session,), slot=1)


# Another request's block may be shared, so the owner is no clue: what shows is that it never followed this prefix.
@bug("C14", "vllm-project/vllm#4761", check="owner", also=("chain",))
def popped_block_left_in_the_index_of_cached_blocks(faulty: bool) -> Outcome:
    """The second block was evicted and filled by B, and the index still serves it for A's prompt."""
    toy = Toy(history=False)
    toy.add("A", TOKENS)
    toy.run({"A": [1, 2]})
    index = {"A's first block": 1, "A's second block": 2}
    toy.pool.release([2], owner="A")
    if not faulty:
        del index["A's second block"]
    toy.add("B", OTHERS)
    toy.run({"B": [3, 2]})
    hit = list(index.values())
    toy.pool.share(hit, owner="C")
    toy.add("C", TOKENS, prefix=hit)
    toy.run({"C": [4]})
    return Outcome((toy.session,), slot=2, request="C")
