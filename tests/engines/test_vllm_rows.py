"""The pages of requests in rows of tables on the device: those of any step, sent once."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace

import pytest
import torch

WIDTHS = 60, 50


class RandomRequests:
    """Requests with pages in two groups come, go, fill pages, are preempted and resumed."""

    def __init__(self, seed):
        self.rng, self.numbers = random.Random(seed), itertools.count(1)
        self.alive, self.held, self.began = [], [], 0

    def _pages(self):
        return [[next(self.numbers) for _ in range(self.rng.randint(0, 2))] for _ in WIDTHS]

    def step(self):
        """A ``SchedulerOutput``, and whether requests only filled pages."""
        rng, new, resumed, ended, preempted = self.rng, {}, {}, set(), set()
        drawn = rng.random()
        if self.alive and drawn < 0.15:
            rng.shuffle(self.alive)
            gone = self.alive.pop()
            (self.held if drawn < 0.07 else []).append(gone)
            (preempted if drawn < 0.07 else ended).add(gone)
        elif len(self.alive) < 4 and drawn < 0.4:
            if self.held and rng.random() < 0.5:
                resumed[self.held.pop()] = self._pages()
            else:
                new[f"r{self.began}"] = self._pages()
                self.began += 1
        more = {request: self._pages() if rng.random() < 0.5 else None for request in self.alive}
        self.alive += [*new, *resumed]
        scheduled = SimpleNamespace(
            finished_req_ids=ended,
            preempted_req_ids=preempted or None,
            scheduled_new_reqs=[SimpleNamespace(req_id=r, block_ids=pages) for r, pages in new.items()],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[*more, *resumed], new_block_ids=[*more.values(), *resumed.values()], resumed_req_ids={*resumed}
            ),
        )
        return scheduled, not (new or resumed or ended or preempted)


def sent(rows, requests):
    """A forward of the requests begins: what the tables got for it, group, place and page of each."""
    rows.rows_of(requests)
    pages = rows.new_pages()
    rows.write(pages)
    return list(zip(pages[::4], pages[1::4], pages[2::4], strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_pages_that_are_all_that_is_new_are_those_of_any_step_and_each_place_is_written_once(seed):
    from kvcanary_fx.adapters.vllm.v2.rows import Rows

    load, (one, other) = RandomRequests(seed), (Rows(4, WIDTHS, torch.device("cpu")) for _ in "ab")
    for _ in range(60):
        scheduled, only_pages = load.step()
        cached = scheduled.scheduled_cached_reqs
        if only_pages:
            one.more(cached.req_ids, cached.new_block_ids)
        else:
            one.take(scheduled)
        other.take(scheduled)
        if load.rng.random() < 0.6:  # else no forward comes
            pages, expected = sent(one, load.alive), sent(other, load.alive)
            assert sorted(pages) == sorted(expected)
            assert len({page[:2] for page in pages}) == len(pages)
            assert not one.added
            assert not one.behind
    sent(one, load.alive)
    sent(other, load.alive)
    for mine, others in zip(one.tables, other.tables, strict=True):
        assert torch.equal(mine, others)
