"""A runner that has the fields of vLLM's Model Runner V2 and no GPU, with its guard."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

PAGE, PAGES, HEADS, DIM = 4, 16, 2, 8


class Sizes(NamedTuple):
    """Of a runner, and of its cache.

    Attributes:
        page: tokens of a block.
        pages: blocks.
        requests, tokens: of a batch, at most.
        length: of a request, at most.
        layers: their names.
    """

    page: int = PAGE
    pages: int = PAGES
    requests: int = 4
    tokens: int = 16
    length: int = 32
    layers: tuple[str, ...] = ("a", "b")


def execute(runner, scheduled, model=lambda: None):
    """A call of the runner, under the hook on it.

    Args:
        model: runs in it.
    """
    from kvcanary_fx.adapters.vllm import registry
    from kvcanary_fx.adapters.vllm.v2 import hooks

    registry.add(runner, runner.guard)
    hooks._execute_model(lambda *_: model())(runner, scheduled)


def spec_of(block_size):
    return SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=block_size), layer_names=[])


class Connector:
    """The runner's own: it notes what reaches it."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda *args: self.calls.append(name)


def goes_on(runner):
    """Of each step from here on, whether it goes on as the last one did; in one that is measured, by what."""
    went_on, said, forwards = [], [], runner.guard._forwards
    before, go_on, begin, again = runner.kv_connector.pre_forward, forwards.go_on, forwards.begin, forwards.again
    forwards.go_on = lambda batch: said.append(go_on(batch)) or said[-1]
    forwards.begin = lambda *given: said.append(False) or begin(*given)
    forwards.again = lambda *given: said.append(False) or again(*given)

    def pre_forward(*given):
        said.clear()
        begun = runner.guard.session.begun
        before(*given)
        if runner.guard.session.begun > begun:
            went_on.append(said[-1] if said else True)

    runner.kv_connector.pre_forward = pre_forward
    return went_on


class Runner:
    """Requests, tables and inputs as Model Runner V2 keeps them; :meth:`step` runs a model that only writes."""

    def __init__(self, mode="log", drafts=0, chunk=None, sizes=Sizes(), off_loads=False, **settings):  # noqa: B008  it is immutable
        from vllm.config import CompilationMode

        from kvcanary_fx.adapters.vllm.pools import Group
        from kvcanary_fx.adapters.vllm.settings import from_env

        self.sizes, most, tokens = sizes, sizes.requests, sizes.tokens
        self.max_num_reqs, self.max_num_tokens, self.max_model_len = most, tokens, sizes.length
        self.is_encoder_decoder = False
        self.num_speculative_steps, self.device, self.adaptive_verification = drafts, torch.device("cpu"), None
        from vllm.v1.core.sched.scheduler import Scheduler

        self.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(world_size=1),
            scheduler_config=SimpleNamespace(get_scheduler_cls=lambda: Scheduler),
            compilation_config=SimpleNamespace(mode=CompilationMode.NONE),
            kv_transfer_config=SimpleNamespace() if off_loads else None,
        )
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=[spec_of(sizes.page)])
        self.req_states = SimpleNamespace(num_computed_tokens=SimpleNamespace(gpu=torch.zeros(most, dtype=torch.int32)))
        numbers = {"seq_lens": most, "query_start_loc": most + 1, "input_ids": tokens, "positions": tokens}
        buffers = {name: torch.zeros(size, dtype=torch.int32) for name, size in numbers.items()}
        self.input_buffers = SimpleNamespace(**buffers)
        table = torch.zeros(most, sizes.length // sizes.page + 1, dtype=torch.int32)
        self.block_tables = SimpleNamespace(
            input_block_tables=[table], slot_mappings=torch.full((1, tokens), -1, dtype=torch.int64)
        )
        shape = sizes.pages, sizes.page, HEADS, DIM
        self.layers = {layer: (torch.zeros(shape), torch.zeros(shape)) for layer in sizes.layers}
        self.draft = {"draft": (torch.zeros(shape), torch.zeros(shape))} if drafts else {}
        chunked = frozenset(self.layers if chunk else ())
        parts = dict(drafted=frozenset(self.draft), chunked=chunked)
        group = Group(0, sizes.page, sizes.page, None, self.layers | self.draft, False, chunk, **parts)
        environment = {"KVCANARY_MODE": mode, **settings}
        self.settings, self.group = from_env(environment), group
        self.connector = Connector()
        self.guard, self.kv_connector = self._guarded()
        self.row: dict[str, int] = {}
        self.pages: dict[str, list[int]] = {}

    def _guarded(self):
        from kvcanary_fx.adapters.vllm.v2.connector import Bracket
        from kvcanary_fx.adapters.vllm.v2.guard import GuardV2

        guard = GuardV2(self, self.settings, False, [self.group])
        return guard, Bracket(self.connector, guard)

    def _block_ids(self, request, pages):
        """Those of a new request, by group."""
        return [pages]

    def _more_ids(self, request, pages):
        """Those that a running request gets, by group; None: none."""
        return None if pages is None else [pages]

    def step(
        self,
        tokens: dict[str, int],
        new=(),
        more=(),
        finished=(),
        events=None,
        wrong=None,
        rejected=None,
        stray=None,
        stacks=(),
        zeroed=(),
        copies=(),
        found=None,
        images=None,
        cached=False,
        prompts=None,
        lost=None,
        transfers=None,
    ) -> Any:
        """One step: ``new`` and ``more`` give requests pages, ``tokens`` says how many each computes.

        Args:
            rejected: how many of a request's tokens the target rejects; None: no drafts are verified.
            stray: a slot that is overwritten by a guess.
            stacks: the scheduler's, of each event.
            zeroed: pages that the runner clears before its batch is prepared.
            copies: pages that it copies then, each with the copy.
            found: how many tokens of a new request the prefix cache has.
            images: the features of a new request.
            cached: the prefix cache keeps the pages of requests that have finished.
            prompts: tokens of a new request, if they are not those that are computed.
            lost: requests that have ``ended`` or were ``preempted`` while they were in no batch.
            transfers: the message to the KV connector.
        """
        from kvcanary_fx.adapters.vllm.journal import ATTRIBUTE, Message

        new, more, found, images = dict(new), dict(more), found or {}, images or {}
        prompts, lost = prompts or {}, lost or {}
        if events is None:
            given = {**new, **more}
            blocks = [page for pages in given.values() for page in pages]
            events = [("taken", blocks, [*given], [*map(len, given.values())], 0)] if given else []
            events += [("freed", *((self.pages[r], []) if cached else ([], self.pages[r])), r) for r in finished]
        for request, pages in new.items():
            self.row[request], self.pages[request] = len(self.row) % self.max_num_reqs, list(pages)
            self.req_states.num_computed_tokens.gpu[self.row[request]] = found.get(request, 0)
        for request, pages in more.items():
            self.pages[request] += pages
        scheduled = SimpleNamespace(
            finished_req_ids={*finished, *lost.get("ended", ())},
            preempted_req_ids=set(lost.get("preempted", ())) or None,
            scheduled_new_reqs=[
                SimpleNamespace(
                    req_id=r,
                    block_ids=self._block_ids(r, p),
                    num_computed_tokens=found.get(r, 0),
                    prefill_token_ids=prompts.get(r, list(range(3, 3 + found.get(r, 0) + tokens[r]))),
                    mm_features=images.get(r, []),
                )
                for r, p in new.items()
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[r for r in tokens if r not in new],
                new_block_ids=[self._more_ids(r, more.get(r)) for r in tokens if r not in new],
                resumed_req_ids=set(),
                num_computed_tokens=[self._stored(r) for r in tokens if r not in new],
            ),
            num_scheduled_tokens=tokens,
            kv_cache_block_copies=[SimpleNamespace(src_block_id=s, dst_block_id=d) for s, d in copies] or None,
            new_block_ids_to_zero=list(zeroed),
            kv_connector_metadata=transfers,
        )
        plain = not (events or new or more or finished or lost or copies)
        setattr(scheduled, ATTRIBUTE, Message(events, stacks=list(stacks), plain=plain))
        slots = torch.zeros(0)

        def model():
            nonlocal slots
            for half in (half for halves in self.layers.values() for half in halves):
                half[list(zeroed)] = 0
                for source, copy in copies:
                    half[copy] = half[source]
            batch, slots = self._prepare(tokens, wrong)
            batch.num_draft_tokens = 0 if rejected is None else len(slots)
            self.kv_connector.pre_forward(scheduled, batch, self._metadata(batch) if wrong is not None else None)
            self._replay(batch, slots) if wrong is not None else self._model(slots)
            self.kv_connector.finish_forward()

        execute(self, scheduled, model)
        gone = {request: (rejected or {}).get(request, 0) for request in tokens}
        self.guard.drafting.verified(self.input_buffers.query_start_loc, torch.tensor(list(gone.values())))
        for request, count in tokens.items():
            self.req_states.num_computed_tokens.gpu[self.row[request]] += count - gone[request]
        if self.draft:
            self._propose(slots, tokens, stray)
        if self.guard.follows_samples:
            self.guard.sampled()

    def read(self, step=None):
        """The tokens of a step have arrived: what its violations mean, if there are any.

        Args:
            step: what :meth:`step` returned, so that both are one line.
        """
        return self.guard.read()

    def _propose(self, slots, tokens, stray):
        from vllm.config import CUDAGraphMode

        from kvcanary_fx.adapters.vllm.v2 import hooks

        token, page = hooks._SAMPLING.set(self.guard), self.sizes.page
        hooks._prefill(lambda *_: self._model(slots, self.draft), None, 0, 0, None, None, None, CUDAGraphMode.NONE)
        hooks._SAMPLING.reset(token)
        for guess in range(1, self.num_speculative_steps):
            places = [(self.pages[r], self._stored(r) + guess - 1) for r in tokens]
            guessed = [pages[p // page] * page + p % page for pages, p in places if p // page < len(pages)]
            self._model(torch.tensor(guessed if stray is None else [stray], dtype=torch.int64), self.draft)

    def _stored(self, request):
        return int(self.req_states.num_computed_tokens.gpu[self.row[request]])

    def _prepare(self, tokens, wrong):
        where = {r: range(self._stored(r), self._stored(r) + n) for r, n in tokens.items()}
        page = self.sizes.page
        slots = [self.pages[r][p // page] * page + p % page for r, places in where.items() for p in places]
        positions = torch.tensor([p for places in where.values() for p in places])
        for number, request in enumerate(tokens):
            self.block_tables.input_block_tables[0][number, : len(self.pages[request])] = torch.tensor(
                self.pages[request]
            )
        if wrong is not None:
            self.block_tables.input_block_tables[0][0, 0] = wrong
        self.block_tables.slot_mappings[0, : len(slots)] = torch.tensor(slots)
        buffers, ends = self.input_buffers, np.cumsum(list(tokens.values()))
        buffers.query_start_loc[: len(tokens) + 1] = torch.tensor([0, *ends])
        buffers.input_ids[: len(slots)], buffers.positions[: len(slots)] = positions + 3, positions
        buffers.seq_lens[: len(tokens)] = torch.tensor([places.stop for places in where.values()])
        index = [self.row[r] for r in tokens]
        batch = SimpleNamespace(
            req_ids=list(tokens),
            num_reqs=len(tokens),
            num_tokens=len(slots),
            num_tokens_after_padding=len(slots),
            num_draft_tokens=0,
            num_scheduled_tokens=np.array(list(tokens.values())),
            num_computed_tokens_np=np.array([places.start for places in where.values()]),
            idx_mapping=torch.tensor(index),
            idx_mapping_np=np.array(index),
            input_ids=buffers.input_ids[: len(slots)],
            positions=positions,
            seq_lens=buffers.seq_lens[: len(tokens)],
        )
        return batch, torch.tensor(slots)

    def _metadata(self, batch):
        """What a graph that is replayed whole is given."""
        self._captured(batch.num_tokens_after_padding)
        table = self.block_tables.input_block_tables[0]
        return {self.sizes.layers[0]: SimpleNamespace(block_table=table, seq_lens=batch.seq_lens)}

    def _captured(self, tokens):
        self.guard.layers_in_graphs[tokens] = len(self.layers)
        if self.guard._forwards.for_graph(tokens) is not None:
            self.guard.checked_in_graphs.add(tokens)

    def _replay(self, batch, slots):
        """What is captured in such a graph: the checks before the model, if they can be, the layers, and the flags."""
        from kvcanary_fx.kernels.context import forward_context

        before = self.guard._forwards.for_graph(batch.num_tokens_after_padding)
        if before is None:
            self._model(slots)
            return
        self.guard._layers._fork(before)
        with forward_context(before.context(len(slots))):
            self._model(slots)

    def tell(self, *event):
        """A message of the scheduler for which no model runs."""
        from kvcanary_fx.adapters.vllm.journal import ATTRIBUTE, Message

        cached = SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set(), num_computed_tokens=[])
        empty = dict.fromkeys(
            ("finished_req_ids", "preempted_req_ids", "scheduled_new_reqs", "num_scheduled_tokens"), ()
        )
        scheduled = SimpleNamespace(**empty, scheduled_cached_reqs=cached, kv_cache_block_copies=None)
        setattr(scheduled, ATTRIBUTE, Message([event]))
        execute(self, scheduled)

    def warm_up_replay(self, tokens):
        """A graph is replayed for requests that are made up."""
        batch, scheduled = SimpleNamespace(num_tokens_after_padding=tokens, num_tokens=tokens), object()
        self._captured(tokens)
        self.kv_connector.set_disabled(True)
        self.kv_connector.pre_forward(scheduled, batch, {})
        self._replay(batch, torch.zeros(0, dtype=torch.int64))
        self.kv_connector.finish_forward()
        self.kv_connector.set_disabled(False)

    def _model(self, slots, layers=None):
        from kvcanary_fx.adapters.vllm import ops

        for layer, halves in (self.layers if layers is None else layers).items():
            written = [torch.randn(len(slots), HEADS, DIM) for _ in halves]
            for half, rows in zip(halves, written, strict=True):
                half.view(-1, HEADS, DIM)[slots] = rows
            output = torch.zeros(1)
            ops.verify(output, layer)
            ops.record(output, *written, layer)
