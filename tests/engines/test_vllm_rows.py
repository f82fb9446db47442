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


def with_pages(owners):
    """Rows of three requests in one group, of which all is on the device."""
    from kvcanary_fx.adapters.vllm.v2.rows import Rows

    rows, load = Rows(4, WIDTHS[:1], torch.device("cpu")), SimpleNamespace
    rows.owners = owners
    new = [load(req_id=name, block_ids=[[number]]) for number, name in enumerate("abc", 1)]
    cached = load(req_ids=[], new_block_ids=[], resumed_req_ids=set())
    rows.take(load(finished_req_ids=(), preempted_req_ids=(), scheduled_new_reqs=new, scheduled_cached_reqs=cached))
    sent(rows, "abc")
    return rows


@pytest.mark.parametrize(
    ("who", "blocks", "lengths", "told"),
    [
        (["a", "c"], [8, 9, 7], [2, 1], True),
        (["a", "b"], [8, 9, 7], [2, 1], False),  # another request
        (["a", None], [8, 9, 7], [2, 1], False),  # nobody knows whose
        (["a", "c"], [8, 9, 6], [2, 1], False),  # another block
        (["a", "c"], [8, 9, 7], [1, 2], False),  # each another number of them
        (["c", "a"], [7, 8, 9], [1, 2], False),  # another order
        (["a"], [8, 9], [2], False),
    ],
)
def test_pages_are_handed_out_where_allocator_and_scheduler_say_the_same(who, blocks, lengths, told):
    """Else nothing is noted, and each of them is told by itself."""
    rows = with_pages({"a": 11, "b": 12, "c": -13})
    pages = [([8, 9],), None, ([7],)]
    assert rows.handed_out("abc", pages, who, blocks, lengths) == told
    assert rows.added == ([0, 1, 8, 11, 0, 2, 9, 11, 0, 2 * WIDTHS[0] + 1, 7, -13] if told else [])
    assert [list(rows.pages(name, 0)) for name in "abc"] == [[1, 8, 9][: 1 + 2 * told], [2], [3, 7][: 1 + told]]
    if told:
        assert not rows.handed_out("abc", pages, who, blocks, lengths), "some wait for the tables"
        rows.new_pages()
        assert rows.handed_out("abc", [None, ([6, 5],), None], ["b"], [6, 5], [2])
        assert rows.new_pages() == [0, WIDTHS[0] + 1, 6, 12, 0, WIDTHS[0] + 2, 5, 12]


def test_pages_of_requests_whose_ids_have_no_hash_yet_are_not_handed_out_by_a_step():
    rows = with_pages({"a": 11})
    assert not rows.handed_out("abc", [None, ([7],), None], ["b"], [7], [1])
    assert rows.added == []
