"""A runner that has the fields of vLLM's Model Runner V2, running states beside attention, and no GPU."""

from __future__ import annotations

from typing import NamedTuple

import torch
from v2_runner import Runner, spec_of

#: Blocks of the cache, those of attention among them: the first ones.
BLOCKS, FIRST = 48, 16

CONV, SSM = (6, 3), (4, 5)


class Kept(NamedTuple):
    """A prefix in the cache: how many tokens, the pages of attention, and the block of each group of states."""

    tokens: int
    pages: list[int]
    blocks: list[int]


class Places(dict):
    """The index of each request's state, whatever it is said to be."""

    def __init__(self, most):
        super().__init__()
        self._most = most

    def __setitem__(self, request, _):
        if request not in self:
            super().__setitem__(request, min({*range(self._most)} - {*self.values()}))


class HybridRunner(Runner):
    """Two groups of one layer each, in the same memory, as vLLM has them.

    Args:
        align: tokens of a block, with a prefix cache that keeps the states where blocks end; 0: there is none.
        frees: requests give up their states but for the last two, as vLLM's do.
        blocks: of the cache; the first ones are attention's.
    """

    def __init__(self, mode="log", align=0, frees=False, blocks=range(FIRST, BLOCKS), **settings):
        self.align, self.frees, self.free = align, frees, list(blocks)
        self.states: dict[str, list[list[int]]] = {}  # by request: the blocks of each group
        self.planned: dict[str, list[list[int]]] = {}  # of the step's message
        memory = (torch.zeros(blocks.stop, *CONV, dtype=torch.bfloat16), torch.zeros(blocks.stop, *SSM))
        self.state_layers = {"m0": memory, "m1": memory}
        super().__init__(mode, **settings)
        self.row, self.cached = Places(self.max_num_reqs), []
        self.free_pages = list(range(1, self.sizes.pages))

    def _guarded(self):
        from kvcanary_fx.adapters.vllm.state_groups import StateGroup
        from kvcanary_fx.adapters.vllm.v2.hybrids import BracketOfHybrid, GuardOfHybridV2
        from kvcanary_fx.adapters.vllm.v2.state_proof import prove_states

        tokens = self.align or self.max_model_len
        self.kv_cache_config.kv_cache_groups += [spec_of(tokens), spec_of(tokens)]
        shape = self.max_num_reqs, self.max_model_len // tokens + 1
        self.block_tables.input_block_tables += [torch.zeros(shape, dtype=torch.int32) for _ in "ab"]
        groups = self.state_groups = [
            StateGroup(number, {layer: states}, ("conv", "state"), self.align)
            for number, (layer, states) in enumerate(self.state_layers.items(), 1)
        ]
        prove_states(self, groups, self.settings.session_config)
        guard = GuardOfHybridV2(self, self.settings, False, [self.group], groups)
        return guard, BracketOfHybrid(self.connector, guard)

    def column(self, tokens):
        return (tokens - 1) // self.align if self.align else 0

    def step(self, tokens, new=(), more=(), finished=(), taken_up=None, events=(), **given):
        """As :meth:`.Runner.step`; blocks of states, and what happens to blocks, come by themselves.

        Args:
            taken_up: by new request: what it takes up from the prefix cache.
            events: what happens to blocks besides.
        """
        new, more, taken_up = dict(new), dict(more), taken_up or {}
        happened = [*events]
        for request in finished:
            happened += self._freed(request)
        for request, pages in {**new, **more}.items():
            kept = taken_up[request].pages if request in taken_up else []
            happened += [("touched", kept, request)] if kept else []
            taken = [page for page in pages if page not in kept]
            happened += [("taken", taken, [request], [len(taken)], 0)] if taken else []
        self.planned = {}
        found = {request: kept.tokens for request, kept in taken_up.items()}
        for request, count in tokens.items():
            stored = found.get(request, 0) if request in new else self._stored(request)
            self.planned[request] = self._grow(request, stored + count, taken_up.get(request), happened)
        return super().step(tokens, new, more, finished, happened, found=found, **given)

    def _freed(self, request):
        """A request ends: the prefix cache keeps its full blocks, if the last one has a state."""
        kept = self.keeps(request)
        left = [page for page in self.pages[request] if page not in kept.pages]
        self.free_pages += left
        yield "freed", [page for page in self.pages[request] if page in kept.pages], left, request
        for group, stays in zip(self.states.pop(request), kept.blocks, strict=True):
            self.free += [block for block in group if block not in (0, stays)]
            yield (
                "freed",
                [stays] * bool(stays and stays in group),
                [block for block in group if block not in (0, stays)],
                request,
            )
        self.row.pop(request)
        if kept.tokens:
            self.cached.append(kept)

    def keeps(self, request):
        """What stays in the prefix cache when a request ends."""
        full = self._stored(request) // self.align if self.align else 0
        blocks = [group[full - 1] if full else 0 for group in self.states[request]]
        if not all(blocks) or full * self.align > self.sizes.page * len(self.pages[request]):
            return Kept(0, [], [0, 0])
        return Kept(full * self.align, self.pages[request][: full * self.align // self.sizes.page], blocks)

    def _grow(self, request, after, kept, events):
        """The blocks that a request gets, by group, so that it can have so many tokens."""
        mine = self.states.setdefault(request, [[], []])
        before, last = [len(group) for group in mine], self.column(after)
        for number, group in enumerate(mine):
            if kept is not None:
                group += [0] * self.column(kept.tokens) + [kept.blocks[number]]
                events.append(("touched", group[-1:], request))
            if len(group) <= last:
                group += [0] * (last - len(group)) + [self.free.pop(0)]
                events.append(("taken", group[-1:], [request], [1], 1 + number))
                if self.frees and len(group) > 2 and group[-3]:
                    events.append(("freed", [], [group[-3]], request))
                    self.free.append(group[-3])
                    group[-3] = 0
        return [group[n:] for group, n in zip(mine, before, strict=True)]

    def evict(self):
        """The prefix cache gives up what it has had for longest."""
        kept = self.cached.pop(0)
        self.free_pages += kept.pages
        self.free += kept.blocks

    def _block_ids(self, request, pages):
        return [pages, *self.planned[request]]

    def _more_ids(self, request, pages):
        planned = self.planned[request]
        return [pages or [], *planned] if pages is not None or any(planned) else None

    def _prepare(self, tokens, wrong):
        batch, slots = super()._prepare(tokens, wrong)
        for row, request in enumerate(tokens):
            for number, group in enumerate(self.states[request]):
                self.block_tables.input_block_tables[1 + number][row, : len(group)] = torch.tensor(group)
        if self.align:
            self._copy(batch)
        self._last = batch
        return batch, slots

    def _copy(self, batch):
        """A state goes on in another block."""
        for row, (stored, added) in enumerate(
            zip(batch.num_computed_tokens_np, batch.num_scheduled_tokens, strict=True)
        ):
            for number, table in enumerate(self.block_tables.input_block_tables[1:]):
                source, there = (int(table[row, self.column(n)]) for n in (max(stored, 1), stored + added))
                if stored and source != there:
                    for state in self.state_layers[f"m{number}"]:
                        state[there] = state[source]

    def _model(self, slots, layers=None):
        super()._model(slots, layers)
        if not len(slots):  # of requests that are made up
            return
        tokens = self._last.num_computed_tokens_np + self._last.num_scheduled_tokens
        for number, table in enumerate(self.block_tables.input_block_tables[1:]):
            for row, count in enumerate(tokens):
                for state in self.state_layers[f"m{number}"]:
                    block = int(table[row, self.column(count)])
                    state[block] = 0.5 * state[block] + torch.randn(state.shape[1:])

    def state_blocks(self, request):
        """The block of each group that has a request's state."""
        return [group[-1] for group in self.states[request]]
