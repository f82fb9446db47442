"""Whether the tokens in damaged slots are those of the request that reads them, as an incident's file says it."""

from __future__ import annotations

import pytest
import torch

from kvcanary_fx import Batch, KVPool, install_canary
from kvcanary_fx.runtime import prefix_fit


@pytest.mark.parametrize("reach", [dict(chunk=4), dict(window=2)], ids=["chunk", "window"])
def test_an_entry_that_attention_has_left_says_nothing_of_the_slots_next_request(reach):
    """The tables of engines keep the entries of pages that they gave away."""
    kv = torch.zeros(16, 2, 8), torch.zeros(16, 2, 8)
    table = torch.tensor([[1, 2, 3, 4, 5, 6], [2, 3, 1, 7, 8, 9]], dtype=torch.int32)
    session = install_canary(KVPool([kv], table, **reach), mode="log", max_requests=2, max_tokens=8)
    session.mark_ready()
    pool = session.pool

    def step(*requests):
        """Each: its name, row, how many tokens it has and how many it adds."""
        names, rows, stored, added = zip(*requests, strict=True)
        slots = [int(s) for _, row, n, more in requests for s in table[row, n : n + more]]
        batch = Batch(
            input_ids=[10 * slot for slot in slots], slots=slots, request_rows=list(rows), prefix_lens=list(stored),
            extend_lens=list(added), request_ids=list(names),
        )  # fmt: skip
        with session.step(batch), session.forward():
            (plan,) = session._stepping.running.plans.values()
            return prefix_fit.fits(pool.space, plan, [2, 5])

    pool.allocate([1, 2, 3, 4, 5, 6], owner="x")
    step(("x", 0, 0, 5))
    pool.release([1, 2, 3, 4], owner="x")
    pool.allocate([2, 3, 1, 7], owner="y")
    step(("y", 1, 0, 3))
    found = step(("x", 0, 5, 1), ("y", 1, 3, 1))
    assert session.violations() == []
    assert found.get(2, True)  # y's own; a window of two has left it, too
    assert ("chunk" in reach) == (2 in found)
