"""Who got the blocks that vLLM's block pool hands out: by the tables of its manager, or by the frames of callers."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from kvcanary_fx.adapters.vllm import plugin

PAGE = 16


def _blocks():
    from kvcanary_fx.adapters.vllm import blocks  # it imports vLLM

    return blocks


class Cache:
    """A block pool with its manager, as a scheduler has them; in each step requests get tokens, and some end."""

    def __init__(self, blocks_in_all=40, window=None, connector=None):
        from vllm.v1.core.block_pool import BlockPool
        from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SlidingWindowManager
        from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

        plugin.register()
        shape = dict(block_size=PAGE, num_kv_heads=1, head_size=8, dtype=torch.float32)
        self.pool = BlockPool(num_gpu_blocks=blocks_in_all, enable_caching=False, hash_block_size=PAGE)
        given = dict(block_pool=self.pool, enable_caching=False, kv_cache_group_id=0, scheduler_block_size=PAGE)
        if window is None:
            self.manager = FullAttentionManager(FullAttentionSpec(**shape), **given)
        else:
            spec = SlidingWindowSpec(**shape, sliding_window=window)
            self.manager = SlidingWindowManager(spec, **given, max_admission_blocks_per_request=100)
        coordinator = SimpleNamespace(single_type_managers=(self.manager,))
        manager = SimpleNamespace(block_pool=self.pool, coordinator=coordinator)
        self.scheduler = SimpleNamespace(kv_cache_manager=manager, connector=connector)
        self.journal = _blocks().journal_of(self.pool)
        self.tokens = {}

    def look_for_holders(self):
        _blocks().look_for_holders(self.scheduler, self.journal)

    def room(self):
        return self.pool.get_num_free_blocks()

    def more(self, request, tokens):
        """A request gets tokens; its new blocks."""
        self.tokens[request] = self.tokens.get(request, 0) + tokens
        new = self.manager.allocate_new_blocks(request, self.tokens[request], self.tokens[request])
        return [block.block_id for block in new]

    def free(self, request):
        self.manager.free(request)
        del self.tokens[request]


def output(more, new=()):
    """A ``SchedulerOutput``, as far as the journal looks at it.

    Args:
        more: the blocks that each request of the step before got.
        new: requests that joined.
    """
    cached = SimpleNamespace(req_ids=list(more), new_block_ids=[(ids,) if ids else None for ids in more.values()])
    return SimpleNamespace(scheduled_cached_reqs=cached, scheduled_new_reqs=[SimpleNamespace(req_id=r) for r in new])


def of_each_block(events):
    """What happened to each block, in order."""
    found = {}
    for name, *rest in events:
        if name == "taken":
            ids, requests, lengths, group = rest
            assert sum(lengths) == len(ids)
            owners = [request for request, n in zip(requests, lengths, strict=True) for _ in range(n)]
            told = [(block, ("taken", owner, group)) for block, owner in zip(ids, owners, strict=True)]
        else:
            kept, left, request = rest
            told = [(block, (name, request)) for block in (*kept, *left)]
        for block, what in told:
            found.setdefault(block, []).append(what)
    return found


@pytest.mark.parametrize("seed", range(25))
def test_the_tables_say_the_same_as_the_callers(seed):
    """Requests join, grow, end, and are preempted in steps in which they got blocks: two pools get the same calls."""
    rng, by_tables, by_frames = random.Random(seed), Cache(), Cache()
    by_tables.look_for_holders()
    assert by_tables.journal.holders is not None
    assert by_frames.journal.holders is None
    names, told = iter(range(1000)), 0
    for _ in range(60):
        more, new = {}, []
        for request in rng.sample(sorted(by_tables.tokens), k=len(by_tables.tokens)):
            if by_tables.room() < 6 or rng.random() < 0.1:  # preempted, or aborted, between others' blocks
                for cache in (by_tables, by_frames):
                    cache.free(request)
                more.pop(request, None)
                continue
            tokens = rng.choice([1, 1, 1, 5, 40])
            more[request] = by_tables.more(request, tokens)
            assert by_frames.more(request, tokens) == more[request]
            if rng.random() < 0.1 and by_tables.room():  # and this one in the very step, or it gets more
                if rng.random() < 0.5:
                    for cache in (by_tables, by_frames):
                        cache.free(request)
                    del more[request]
                else:
                    more[request] += by_tables.more(request, PAGE)
                    by_frames.more(request, PAGE)
        while by_tables.room() > 12 and rng.random() < 0.6:
            request, tokens = f"request {next(names)}", rng.randrange(1, 60)
            new.append(request)
            for cache in (by_tables, by_frames):
                cache.more(request, tokens)
        if rng.random() < 0.3:  # one is scheduled though the output does not say so
            more = dict(list(more.items())[1:])
        events = [cache.journal.take(output(more, new)).events for cache in (by_tables, by_frames)]
        assert of_each_block(events[0]) == of_each_block(events[1])
        assert all(request is not None for event in events[0] if event[0] == "taken" for request in event[2])
        told += sum(len(event[1]) for event in events[0] if event[0] == "taken")
    assert told > 200


def test_a_step_in_which_many_requests_fill_a_block_is_one_event():
    cache = Cache()
    cache.look_for_holders()
    more = {f"request {n}": cache.more(f"request {n}", PAGE) for n in range(8)}
    ids = [block for new in more.values() for block in new]
    assert cache.journal.take(output(more)).events == [("taken", ids, list(more), [1] * 8, 0)]
    assert cache.journal.take(output({})).events == []


def test_an_output_that_gives_a_block_to_the_wrong_request_is_not_believed():
    """The worker's tables are made of it, and are compared with what the journal says."""
    cache = Cache()
    cache.look_for_holders()
    first, second = (cache.more(request, PAGE) for request in ("A", "B"))
    ((_, ids, requests, *_),) = cache.journal.take(output({"A": second, "B": first})).events
    assert dict(zip(ids, requests, strict=True)) == {first[0]: "A", second[0]: "B"}


def test_a_block_that_replaces_a_shared_one_is_found_inside_of_its_table():
    """A prefix that ends inside of a block: its request gets a copy of the block."""
    cache = Cache()
    cache.look_for_holders()
    cache.more("A", 3 * PAGE)
    cache.journal.take(output({}))
    (copy,) = cache.pool.get_new_blocks(1)
    cache.manager.req_to_blocks["A"][1] = copy
    (lost,) = cache.pool.get_new_blocks(1)  # of nobody
    cache.journal.note("touched", [7], "B")
    assert cache.journal.take(output({})).events == [("taken", [copy.block_id], ["A"], [1], 0), ("touched", [7], "B")]
    assert lost.block_id != copy.block_id
    assert cache.journal.holders is None  # from now on callers are asked: the tables did not say all
    (block,) = cache.more("A", PAGE)
    assert cache.journal.take(output({})).events == [("taken", [block], ["A"], [1], 0)]


def test_callers_are_asked_where_the_tables_do_not_say_it(monkeypatch):
    """Of a sliding window, whose blocks are given up in between; beside a connector; and where stacks are kept."""
    window, connected = Cache(window=2 * PAGE), Cache(connector=object())
    monkeypatch.setenv("KVCANARY_STACKS", "8")
    stacks = Cache()
    assert not stacks.journal.undecided
    for cache in (window, connected):
        assert cache.journal.undecided
        cache.look_for_holders()
        assert not cache.journal.undecided
    for cache in (window, connected, stacks):
        assert cache.journal.holders is None
        (block,) = cache.more("A", PAGE)
        assert cache.journal.take(output({"A": [block]})).events == [("taken", [block], ["A"], [1], 0)]
