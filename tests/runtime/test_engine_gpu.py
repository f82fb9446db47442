"""An engine's session on a GPU: eager, and with the model replayed from a CUDA graph."""

from __future__ import annotations

import functools

import pytest
import torch
from opaque_engine import DIM, HEADS, METADATA, Model
from toy import DIM as TOY_DIM
from toy import Toy, embed
from toy import prefilled as prefilled_on

import kvcanary_fx
from kvcanary_fx import Batch, KVPool

pytestmark = pytest.mark.gpu

prefilled = functools.partial(prefilled_on, device="cuda")


@pytest.mark.parametrize("inner", ["eager", "aot_eager", "inductor"])
def test_a_legal_life_is_silent(inner):
    toy = prefilled(inner=inner)
    toy.run({"A": [6]})
    toy.add("B", [1, 2, 3])
    toy.run({"A": [7], "B": [8]})
    toy.done("A")
    toy.run({"B": [9]})
    assert toy.found() == []
    assert toy.session.stats().slots_checked == 3 + 4 + 1


@pytest.mark.parametrize(("layer", "half"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_flipped_bit_is_found(layer, half):
    toy = prefilled()
    toy.kv[layer][half].view(torch.int32)[4, 0, 2] ^= 1 << 7
    toy.run({"A": [6]})
    (v,) = toy.found()
    assert (v.check, v.layer, v.half, v.slot, v.position, v.token, v.request) == (
        "content", f"layers.{layer}", "KV"[half], 4, 1, 6, "A",
    )  # fmt: skip


def test_identity_and_ownership():
    toy = prefilled()
    toy.pool.release([4], owner="A")
    toy.run({"A": [6]})
    assert {(v.check, v.why, v.slot, v.request) for v in toy.found()} == {("owner", "READ_AFTER_FREE", 4, "A")}
    toy = prefilled()
    toy.take("A", [6])
    toy.forward(toy.plan({"A": [6]}), slots=[9])
    assert {(v.check, v.why, v.slot) for v in toy.found()} == {("index", "NOT_THE_PLANNED_SLOT", 6)}
    toy = prefilled()
    toy.run({"A": [6]}, positions=[7])
    assert {(v.check, v.why) for v in toy.found()} == {("chain", "WRONG_POSITION")}


def test_log_mode_tells_without_being_asked_within_two_steps():
    seen = []
    toy = prefilled(on_violation=seen.append)
    toy.pool.release([4], owner="A")
    for slot in (6, 7, 8):
        toy.run({"A": [slot]})
        torch.cuda.synchronize()
    assert any(v.why == "READ_AFTER_FREE" for v in seen)


class Captured:
    """The opaque model in a CUDA graph, one token of one request a step."""

    def __init__(self, hoisted: bool, inside: bool):
        self.kv = [tuple(torch.zeros(32, HEADS, DIM, device="cuda") for _ in range(2)) for _ in range(2)]
        self.table = torch.zeros(3, 16, dtype=torch.int32, device="cuda")
        names = ["layers.0", "layers.1"]
        METADATA.pools, METADATA.redirect = dict(zip(names, self.kv, strict=True)), {}
        self.session = kvcanary_fx.install_canary(
            KVPool(self.kv, self.table, layer_names=names), inner="inductor", mode="log", max_requests=1, max_tokens=1
        )
        self.model = torch.compile(Model(2, hoisted).cuda(), backend=self.session.backend)
        self.x = torch.randn(1, HEADS * DIM, device="cuda")
        METADATA.slots = torch.tensor([1], device="cuda")
        METADATA.reads = torch.zeros(16, dtype=torch.int64, device="cuda")
        self.inside, self.stored = inside, 0
        self.session.pool.allocate([1], owner="warm-up")
        batch = Batch([0], [1], [0], [0], [1], request_ids=["warm-up"])
        for _ in range(3):
            with self.session.step(batch), self.session.forward(), torch.no_grad():
                self.model(self.x)
        self.session.inputs.freeze()
        self.graph = torch.cuda.CUDAGraph()
        with self.session.step(batch), torch.no_grad():
            if inside:
                with torch.cuda.graph(self.graph), self.session.forward():
                    self.model(self.x)
            else:
                with self.session.forward(), torch.cuda.graph(self.graph):
                    self.model(self.x)
        self.session.pool.release([1], owner="warm-up")
        torch.cuda.synchronize()
        self.session.mark_ready()

    def step(self, slot: int) -> None:
        self.session.pool.allocate([slot], owner="A")
        self.table[1, self.stored] = slot
        METADATA.slots.fill_(slot)
        METADATA.reads.copy_(self.table[1])
        with self.session.step(Batch([self.stored], [slot], [1], [self.stored], [1], request_ids=["A"])):
            if self.inside:
                self.graph.replay()
            else:
                with self.session.forward():
                    self.graph.replay()
        self.stored += 1


@pytest.mark.parametrize("inside", [False, True], ids=["checks before the replay", "checks captured too"])
@pytest.mark.parametrize("hoisted", [False, True], ids=["name is a constant", "name is an input"])
def test_flip_is_found_on_replay_at_its_request_and_position(hoisted, inside):
    rig = Captured(hoisted, inside)
    for slot in (3, 4, 5):
        rig.step(slot)
    assert rig.session.violations() == []
    assert rig.session.stats().recorded >= 12
    rig.kv[1][0].view(torch.int32)[4, 1, 2] ^= 1 << 9
    rig.step(6)
    assert [(v.check, v.layer, v.half, v.slot, v.position, v.request) for v in rig.session.violations()] == [
        ("content", "layers.1", "K", 4, 1, "A")
    ]
    rig.session.pool.release([5], owner="A")
    rig.step(7)
    assert {(v.check, v.why, v.slot) for v in rig.session.violations()[1:]} == {("owner", "READ_AFTER_FREE", 5)}


class CapturedWrites:
    """The toy's layers, whose writes the graph shows, captured for two requests of one token each."""

    def __init__(self, inside: bool):
        self.toy = toy = Toy(device="cuda", inner="inductor", max_requests=2, max_tokens=2)
        self.x = torch.zeros(2, TOY_DIM, device="cuda")
        self.slots, self.reads = (torch.tensor(ids, device="cuda") for ids in ([1, 2], [0]))
        self.inside = inside
        for name, slot in (("warm", 1), ("up", 2)):
            toy.add(name, [0, 0])
            toy.take(name, [slot])
        batch = toy.plan({"warm": [1], "up": [2]}, history=None, history_lens=None)
        for _ in range(3):
            with toy.session.step(batch), toy.session.forward(), torch.no_grad():
                self.call()
        toy.session.inputs.freeze()
        self.graph = torch.cuda.CUDAGraph()
        with toy.session.step(batch), torch.no_grad():
            if inside:
                with torch.cuda.graph(self.graph), toy.session.forward():
                    self.call()
            else:
                with toy.session.forward(), torch.cuda.graph(self.graph):
                    self.call()
        for name in ("warm", "up"):
            toy.requests[name].stored = 1
            toy.done(name)
        torch.cuda.synchronize()
        toy.session.mark_ready()

    def call(self) -> None:
        self.toy.model(self.toy.kv, self.x, self.slots, self.reads)

    def run(self, work: dict[str, list[int]], sent_to: list[int] | None = None) -> None:
        """A replay; a batch of one request is padded with a token for slot 0."""
        toy = self.toy
        for name, slots in work.items():
            toy.take(name, slots)
        batch = toy.plan(work, history=None, history_lens=None)
        slots = list(sent_to or batch.slots)
        x = torch.stack([embed(t, p) for t, p in zip(batch.input_ids, batch.positions, strict=True)])
        self.x.zero_()[: len(x)] = x
        self.slots.copy_(torch.tensor(slots + [0] * (2 - len(slots))))
        with toy.session.step(batch):
            if self.inside:
                self.graph.replay()
            else:
                with toy.session.forward():
                    self.graph.replay()
        for name in work:
            toy.requests[name].stored += 1


@pytest.mark.parametrize("inside", [False, True], ids=["checks before the replay", "checks captured too"])
def test_replayed_writes_are_compared_with_the_plan_of_their_own_step(inside):
    """Seen: a replay took where the tokens of each request end from the memory of the forward that was captured."""
    rig = CapturedWrites(inside)
    rig.toy.add("A", [5, 6, 7, 8])
    rig.toy.add("B", [1, 2, 3, 4])
    rig.run({"A": [3], "B": [4]})
    rig.run({"B": [6]})
    rig.run({"A": [7], "B": [8]})
    assert rig.toy.found() == []
    assert rig.toy.session.stats().recorded >= 5 * 4
    rig.run({"A": [9], "B": [10]}, sent_to=[9, 11])
    found = {(v.check, v.why, v.slot, v.request) for v in rig.toy.found()}
    assert found == {("index", "NOT_THE_PLANNED_SLOT", 10, "B")}
