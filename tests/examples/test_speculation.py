"""Speculation in the small engine: right and silent in every way of drafting, and loud where a draft goes wrong."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "examples" / "paged_engine"))

import canary
import draft as drafting
import verification
from batching import Work
from config import EngineConfig
from engine import Engine
from faults import Faults
from mtp import Mtp
from serving import Served, drive, serve
from workload import BOS, Request, workload

import kvcanary_fx
from kvcanary_fx.errors import SessionStateError

PLAIN = EngineConfig(pages=40, prefix_cache=False, draft=3)
SMALL = dict(pages=28, window=12, window_pages=48, offload=True)

WAYS = {
    "rows of 1 to 8": dict(draft=8, draft_varies=True, pages=30),
    "trees": dict(draft=4, topk=3, draft_varies=True, fp8=True, chunk=16, **SMALL | dict(window_pages=60)),
    "a layer for each": dict(draft=3, draft_varies=True, draft_model="mtp", **SMALL),
    "rows, one loop": dict(draft=4, capture=True, pages=30),
    "llama, trees": dict(model="llama", draft=3, topk=2),
    "llama, a layer for each": dict(model="llama", draft=2, draft_model="mtp"),
}


def outputs(requests: list[Request], config: EngineConfig) -> list[list[int]]:
    """Without speculation, and without the canary."""
    plain = dataclasses.replace(config, draft=0, topk=1, draft_model="eagle")
    return [r.output for r in serve(requests, plain, mode="off").requests]


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_drafting_is_silent_and_changes_no_token(way):
    config = EngineConfig(**dict(pages=40) | WAYS[way])
    count = 6 if config.model == "llama" else 10
    run = serve(workload(count, 0, namespaces=3), config, mode="raise", sweep_every=5)
    (engine,) = run.engines
    assert [r.output for r in run.requests] == outputs(workload(count, 0, namespaces=3), config)
    assert run.violations() == []
    assert engine.accepted > 5
    assert engine.rejected > 5
    assert engine.scheduler.hits > 0
    assert engine.scheduler.chunks > 0
    assert (engine.moved > 0) == (config.topk > 1)
    assert {p.live_slots for s in run.sessions for p in s.pools.values()} == {0}
    if config.model == "oracle":
        assert run.wrong() == []
        assert engine.scheduler.retracts > 0 or config.topk > 1


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", [dict(draft=4), dict(draft=3, topk=2, fp8=True)], ids=["rows", "trees"])
def test_a_loop_of_drafts_runs_over_the_tensors_of_one_graph(way, device):
    config = EngineConfig(pages=40, capture=True, device=device, **way)
    run = serve(workload(10, 0, namespaces=3), config, mode="raise", sweep_every=5)
    (engine,) = run.engines
    assert [r.output for r in run.requests] == outputs(workload(10, 0, namespaces=3), config)
    assert run.violations() == []
    graphs = engine.draft.graphs
    assert max(g.runs for g in graphs.values()) > 5
    assert all((g.graph is not None) == (device == "cuda") for g in graphs.values())


@pytest.mark.parametrize("device", DEVICES)
def test_a_flip_in_a_drafts_pool_is_found_where_the_loop_is_one_graph(device):
    config = EngineConfig(pages=40, capture=True, device=device, draft=4, prefix_cache=False)
    flipped = []

    def flip(step: int, served: Served) -> None:
        (engine,) = served.engines
        running = [r for r in engine.scheduler.running if r.stored > 6]
        if step > 12 and running and not flipped:
            slot = engine.memory.slots(running[0], 2, 3)[0]
            engine.draft.head.group.layers[0][1].view(torch.uint8)[slot].flatten()[1] ^= 4
            flipped.append((running[0].id, slot))

    requests = workload(10, 0)
    entry = Served(requests, [Engine(config, mode="log")])
    drive(entry, flip)
    first = entry.violations()[0]
    assert (first.check, first.half, first.request, first.slot, first.position) == ("content", "V", *flipped[0], 2)


# ---- what goes wrong, once, in an engine that is made once


@pytest.fixture(scope="module")
def engine():
    made = Engine(PLAIN, mode="log", health_every=0)
    yield made
    made.close()


@dataclasses.dataclass
class Expected:
    """What the first report must say."""

    check: str
    why: str
    forward: int
    slot: int
    position: int
    token: int
    request: str
    pool: str = "draft"


class Slip(Faults):
    """Goes wrong once if it is armed; ``expected`` where it did, or would have."""

    def __init__(self, armed: bool = True):
        self.armed, self.expected = armed, None

    def slips(self, *expected) -> bool:
        """Whether this is where it goes wrong."""
        self.expected = Expected(*expected)
        return self.armed


def requests() -> list[Request]:
    return [dataclasses.replace(r, new_tokens=12) for r in workload(3, 3, namespaces=2)]


def reports(engine: Engine, faults: Faults) -> list[kvcanary_fx.Violation]:
    """What a run with ``faults`` adds to the reports."""
    served = Served(requests(), [engine])
    before = [len(s.violations()) for s in served.sessions]
    engine.faults = faults
    if engine.draft:
        engine.draft.runs = 0
    drive(served)
    return [v for s, n in zip(served.sessions, before, strict=True) for v in s.violations()[n:]]


def first_of(head, batch) -> tuple[int, int, int, str]:
    """Slot, position, token and request of a draft's inner forward."""
    at = [int(t[0]) for t in (batch.slots, batch.prefix_lens, batch.input_ids)]
    return (*at, batch.request_ids[0])


class BumpedPositions(Slip):
    """A1: the draft loop counts its positions up before each forward."""

    def on_draft(self, head, index, batch, inputs):
        if index != 1 or self.expected is not None:
            return
        slot, position, token, request = first_of(head, batch)
        if self.slips("chain", "WRONG_POSITION", 1, slot, position, token, request):
            batch.positions = batch.positions + 1
            inputs.positions[: len(batch.slots)] += 1


class SampledTail(Slip):
    """A2: a chunk of the prompt that is not the last ends with the token that was sampled."""

    def on_catch_up(self, work):
        for w in work:
            if self.expected is None and w.request.missing > 1:
                slot, sampled = w.request.pages[(w.stop - 1) // 4] * 4 + (w.stop - 1) % 4, 7
                if self.slips("token", "WRONG_TOKEN", 0, slot, w.stop - 1, sampled, w.request.id):
                    w.tokens[-1] = sampled
        return work


class NoBonus(Slip):
    """F1: all that was proposed is accepted, and the draft does not get the target's own token behind it."""

    def on_accept(self, request, accepted):
        if accepted == len(request.proposed) == 3 and self.expected is None:
            self.request, self.slips_next = request, True
        return accepted

    def on_catch_up(self, work):
        for w in work:
            mine = self.expected is None and w.request is getattr(self, "request", None)
            if mine and w.request.new_tokens - len(w.request.output) > 2:
                slot, left = w.request.pages[(w.stop - 1) // 4] * 4 + (w.stop - 1) % 4, w.tokens[:-1]
                if self.slips("poison", "NEVER_WRITTEN", 1, slot, w.stop - 1, None, w.request.id):
                    return [Work(w.request, w.start, left) if v is w else v for v in work]
        self.request = None
        return work


class ReadsRejected(Slip):
    """The draft does not catch up behind a rejection: it reads its own token, which the target did not take."""

    def on_accept(self, request, accepted):
        if accepted <= 1 and len(request.proposed) == 3 and self.expected is None:
            self.request, self.token = request, request.proposed[accepted]
        return accepted

    def on_catch_up(self, work):
        for w in work:
            mine = self.expected is None and w.request is getattr(self, "request", None)
            if mine and len(w.tokens) > 1 and w.request.new_tokens - len(w.request.output) > 2:
                slot, left = w.request.pages[(w.stop - 1) // 4] * 4 + (w.stop - 1) % 4, w.tokens[:-1]
                if self.slips("token", "REJECTED_TOKEN", 1, slot, w.stop - 1, self.token, w.request.id):
                    return [Work(w.request, w.start, left) if v is w else v for v in work]
        self.request = None
        return work


class UnshiftedTokens(Slip):
    """The draft stores the token of each position, not the one behind it."""

    def on_catch_up(self, work):
        w = work[0]
        if self.expected is None:
            shifted = w.request.tail(w.start)[: len(w.tokens)]
            if self.slips("token", "WRONG_TOKEN", 0, w.request.pages[0] * 4, 0, shifted[0], w.request.id):
                return [Work(w.request, w.start, shifted), *work[1:]]
        return work


class WrongSlot(Slip):
    """The kernel of the second inner forward gets the slot of the first."""

    def on_draft(self, head, index, batch, inputs):
        if index == 2 and self.expected is None:
            slot, position, token, request = first_of(head, batch)
            if self.slips("index", "NOT_THE_PLANNED_SLOT", 2, slot, position, token, request):
                inputs.slots[0][0] -= 1 if slot % 4 else -1


class WrongRow(Slip):
    """Two requests' rows of the request table are swapped in the second inner forward."""

    def on_draft(self, head, index, batch, inputs):
        if index == 2 and self.expected is None and len(batch.slots) > 1:
            other = int(batch.loop.reads[1, 0])
            token = int(head.pool.space.tokens[other])
            if self.slips("owner", "FOREIGN_READ", 2, other, 0, token, batch.request_ids[0]):
                batch.request_rows = batch.request_rows.flip(0)


class OneTooMany(Slip):
    """A verification accepts a token more than the target agrees with: its slot counts as the request's own."""

    def on_accept(self, request, accepted):
        if self.expected is None and accepted < len(request.proposed) and len(request.output) < 4:
            position = request.stored + accepted
            slot, token = request.pages[position // 4] * 4 + position % 4, request.proposed[accepted]
            if self.slips("token", "WRONG_TOKEN", 0, slot, position, token, request.id, "kv"):
                return accepted + 1
        return accepted


SLIPS = (
    BumpedPositions, SampledTail, NoBonus, ReadsRejected, UnshiftedTokens, WrongSlot, WrongRow, OneTooMany,
)  # fmt: skip


class Unarmed(Faults):
    """All slips side by side, none of which goes wrong: their clean twins, in one run."""

    def __init__(self):
        self.slips = [slip(armed=False) for slip in SLIPS]

    def on_accept(self, request, accepted):
        return min(slip.on_accept(request, accepted) for slip in self.slips)

    def on_catch_up(self, work):
        for slip in self.slips:
            assert slip.on_catch_up(work) == work
        return work

    def on_draft(self, head, index, batch, inputs):
        for slip in self.slips:
            slip.on_draft(head, index, batch, inputs)


def test_where_nothing_slips_nothing_is_reported(engine):
    faults = Unarmed()
    assert reports(engine, faults) == []
    assert [type(slip).__name__ for slip in faults.slips if slip.expected is None] == []  # each had its opportunity


@pytest.mark.parametrize("slip", SLIPS, ids=lambda s: s.__name__)
def test_a_slip_is_reported_at_its_forward_slot_and_token(slip, engine):
    faults = slip()
    found = reports(engine, faults)
    assert found, "nothing was reported"
    assert told(found) == faults.expected
    assert f"forward {faults.expected.forward}" in found[0].explain()


def told(found: list[kvcanary_fx.Violation]) -> Expected:
    v = found[0]
    return Expected(v.check, v.why, v.forward, v.slot, v.position, v.token, v.request, v.pool)


def test_a_prefix_that_the_draft_never_saw_is_reported_by_who_hits_it():
    """F2: the prefix cache restores a prompt for which the draft's slots were never filled."""

    class Skipped(Faults):
        armed = True

        def on_catch_up(self, work):
            return [w for w in work if w.request.id != "a" or not self.armed]

    prompt = [BOS, *range(50, 62)]
    engine = Engine(dataclasses.replace(PLAIN, prefix_cache=True), mode="log")
    engine.faults = Skipped()
    for armed in (False, True):
        engine.faults.armed = armed
        shift = 100 * armed  # another prompt, so that nothing of it is cached
        tokens = [BOS, *(t + shift for t in prompt[1:])]
        other = Request("c", [BOS, *range(300 + shift, 306 + shift)], 3)
        made = [other, Request("a", tokens, 1), Request("b", [*tokens, 70], 6, arrival=3)]
        drive(Served(made, [engine]))
        found = engine.draft.heads[0].session.violations()
        assert bool(found) == armed
    slots = engine.memory.full.slots(engine.cache.match(0, engine.keys(made[1]))).tolist()
    assert engine.session.violations() == []
    assert [(v.why, v.forward, v.request) for v in found[:8]] == [("NEVER_WRITTEN", 0, "b")] * 8
    assert [(v.slot, v.position) for v in found[:8]] == list(zip(slots[:8], range(8), strict=True))


def test_a_pool_declared_with_the_wrong_offset_is_reported_at_its_first_token(monkeypatch):
    right = canary.install_draft
    monkeypatch.setattr(canary, "install_draft", lambda *args, **settings: right(*args[:4], 0, **settings))
    made = requests()
    run = serve(made, PLAIN, mode="log")
    found = [v for v in run.violations() if v.pool == "draft"]
    first, tokens = found[0], made[0].prompt
    assert (first.why, first.forward, first.request, first.position) == ("WRONG_TOKEN", 0, made[0].id, 0)
    assert (first.stored, first.found, first.token) == (tokens[0], tokens[1], tokens[1])


def test_an_accepted_branch_that_is_not_moved_is_reported_in_the_next_forward(monkeypatch):
    config = dataclasses.replace(PLAIN, topk=2, draft=2)
    places = []

    def forgotten(store, sources, targets):
        places.append((store.pool.space.tokens[targets].tolist(), targets.tolist()))

    clean = Engine(config, mode="log")
    assert reports(clean, Faults()) == []
    assert clean.moved > 0
    monkeypatch.setattr(verification, "_move", forgotten)
    found = reports(clean, Faults())
    (tokens, slots) = places[0]
    v = found[0]
    assert (v.check, v.why, v.forward, v.slot, v.token) == ("token", "WRONG_TOKEN", 0, slots[0], tokens[0])


def test_a_layer_that_keeps_its_guesses_is_reported_by_its_own_session(monkeypatch):
    """Layer 2 stored a guess, which was wrong, and goes on behind it."""
    engine = Engine(dataclasses.replace(PLAIN, draft=2, draft_model="mtp"), mode="log")
    assert reports(engine, Faults()) == []
    monkeypatch.setattr(Mtp, "_sure", lambda self, request, offset: request.stored)
    found = reports(engine, Faults())
    assert {v.pool for v in found} == {"draft2"}
    assert (found[0].check, found[0].why, found[0].forward) == ("token", "WRONG_TOKEN", 1)
    assert found[0].stored != found[0].found == found[0].token


# ---- missed brackets


class Misbracketed(drafting.Head):
    """A head whose second inner forward runs in another bracket than its own."""

    def forward(self, index, batch, inputs, hidden, faults):
        if index == 2 and self.how == "outside":
            return self.model(inputs, hidden_of(inputs, hidden))
        if index == 2 and self.how == "nested":
            with self.session.forward(1, batch):
                return super().forward(index, batch, inputs, hidden, faults)
        if index == 2 and self.how == "of another":
            self.planned = self.planned or (int(self.before.slots[0]), int(batch.slots[0]))
            with self.session.forward(1, self.before):
                return self.model(inputs, hidden_of(inputs, hidden))
        self.before = batch
        return super().forward(index, batch, inputs, hidden, faults)


def hidden_of(inputs, hidden):
    return torch.cat((hidden, hidden.new_zeros(len(inputs.ids) - len(hidden))))


@pytest.fixture
def head(engine):
    (head,) = engine.draft.heads
    before, head.__class__ = head.__class__, Misbracketed
    head.planned, head.how = None, "right"
    yield head
    head.__class__ = before


@pytest.mark.parametrize(("how", "says"), [("outside", r"outside session\.forward"), ("nested", "forward.2. inside")])
def test_a_bracket_that_is_missed_is_an_error(how, says):
    made = Engine(PLAIN, mode="log", health_every=0)
    (head,) = made.draft.heads
    head.__class__ = Misbracketed
    head.planned, head.how = None, how
    with pytest.raises(SessionStateError, match=says):
        reports(made, Faults())


def test_a_forward_in_the_bracket_of_another_is_reported_there(engine, head):
    assert reports(engine, Faults()) == []
    head.how = "of another"
    found = reports(engine, Faults())
    planned, received = head.planned
    v = found[0]
    assert (v.why, v.forward, v.slot, v.found) == ("NOT_THE_PLANNED_SLOT", 1, planned, received)
