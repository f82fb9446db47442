"""Which rows of the ring are a legal rewrite, by which halves of which layers changed together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from kvcanary_fx.kernels.buffers import HalfBuffers, RowState
from kvcanary_fx.kernels.checks import Check
from kvcanary_fx.kernels.content.cpu import digest_rows
from kvcanary_fx.kernels.content.digest import empty_digest
from kvcanary_fx.kernels.ring import Ring
from kvcanary_fx.kernels.writes.layout import SlotLayout
from kvcanary_fx.runtime.adoption import Verdict, judge
from kvcanary_fx.runtime.companions import Call, Companions
from kvcanary_fx.runtime.registry import PoolRegistry


def registry(layers: int, halves: int, kind: str) -> PoolRegistry:
    """Halves numbered layer by layer; slots without rows."""
    peers = {layer * halves + half: layer for layer in range(layers) for half in range(halves)}
    layout = SlotLayout((8, 4), (0,), torch.float32)
    made = {
        n: SimpleNamespace(
            id=n,
            peers=peers,
            kind=kind,
            beside=set(),
            exchanges_rows=False,
            place=SimpleNamespace(layout=layout),
            reported={},
            takes_turns=False,
            forward=None,
            seeds=(1, 2),
            buffers=HalfBuffers.allocate(layout, 1, torch.device("cpu")),
        )
        for n in peers
    }
    return cast(PoolRegistry, SimpleNamespace(by_id=made.get))


STAMPS = torch.full((2, 8), -1, dtype=torch.int64)


def changed(half: int, slot: int = 3) -> list[int]:
    row = [0] * len(Ring)
    row[Ring.STEP], row[Ring.HALF], row[Ring.CHECK], row[Ring.LENIENT], row[Ring.SLOT] = 1, half, Check.CONTENT, 1, slot
    row[Ring.STORED], row[Ring.FOUND] = 10 + half, 20 + half
    return row


@pytest.mark.parametrize(
    ("layers", "halves", "kind", "hit", "adopted"),
    [
        pytest.param(2, 2, "kv", [0, 1, 2, 3], True, id="K and V of every layer"),
        pytest.param(2, 2, "kv", [2, 3], True, id="K and V of all but the first layer, where they only know the token"),
        pytest.param(2, 2, "kv", [3], False, id="one half of a layer"),
        pytest.param(3, 2, "kv", [2, 3], False, id="one layer of two above the first"),
        pytest.param(2, 1, "kv", [0, 1], True, id="a latent in two layers"),
        pytest.param(2, 1, "kv", [1], False, id="one of two latents: one half above the first says nothing"),
        pytest.param(3, 1, "kv", [1, 2], True, id="a latent in three layers"),
        pytest.param(2, 1, "state", [0, 1], True, id="the states of two layers"),
        pytest.param(2, 1, "state", [1], False, id="one state of two layers"),
        pytest.param(1, 1, "state", [0], False, id="a state alone"),
        pytest.param(1, 2, "kv", [0, 1], True, id="K and V of the only layer"),
    ],
)
def test_a_slot_that_changed_in_these_halves_was(layers: int, halves: int, kind: str, hit: list[int], adopted: bool):
    rows = [changed(half) for half in hit]
    verdict = judge(rows, registry(layers, halves, kind), STAMPS)
    assert (verdict.adopted_slots, verdict.adopted_fingerprints) == ((1, len(hit)) if adopted else (0, 0))
    assert verdict.violations == ([] if adopted else rows)


def test_where_nothing_else_can_have_written_no_pattern_is_legal():
    rows: list[Any] = [changed(half) for half in range(4)]
    for row in rows:
        row[Ring.LENIENT] = 0
    assert judge(rows, registry(2, 2, "kv"), STAMPS).violations == rows


def test_of_two_slots_the_one_that_changed_everywhere_is_adopted():
    legal, flipped = [changed(half, 5) for half in range(4)], changed(2, 6)
    verdict = judge([*legal[:3], flipped, legal[3]], registry(2, 2, "kv"), STAMPS)
    assert verdict.violations == [flipped]
    assert verdict.adopted_slots == 1


@pytest.mark.parametrize(
    ("hit", "adopted"),
    [
        pytest.param([2, 3, 4, 5], True, id="from the second layer on"),
        pytest.param([4, 5], True, id="in the last layer"),
        pytest.param([5], False, id="in one half of the last layer"),
        pytest.param([3, 4, 5], False, id="in one half of the second layer, and in the last"),
        pytest.param([2, 3], False, id="in the second layer alone"),
    ],
)
def test_beside_new_tokens_of_a_pool_a_slot_that_changed_was(hit: list[int], adopted: bool):
    """A prompt that begins as the last one did is computed in products of another size, which round otherwise."""
    new, again = [changed(half, 5) for half in range(6)], [changed(half, 6) for half in hit]
    assert judge([*new, *again], registry(3, 2, "kv"), STAMPS).violations == ([] if adopted else again)
    emptied = [changed(half, 5) for half in range(6)]
    for row in emptied:
        row[Ring.FOUND] = empty_digest((1, 2))[0]
    missed = set(hit) >= {2, 3, 4, 5}  # by these alone it would be a token of a new prompt
    assert judge([*emptied, *again], registry(3, 2, "kv"), STAMPS).violations == ([] if missed else again)


def test_a_sequence_given_up_whose_state_was_empty_in_one_layer():
    made = registry(2, 1, "state")
    for half in range(2):
        made.by_id(half).buffers.digest[0, 5] = 77  # another sequence
    row = changed(0)
    row[Ring.FOUND] = empty_digest((1, 2))[0]
    assert judge([row], made, STAMPS).violations == []


ROW, SEEDS = 8, (1, 2)


class Cache:
    """A cache of two sequences in eight slots each; layer 0 has the halves 0 and 1.

    Args:
        lengths: tokens of the two sequences.
        cropped: tokens behind them, of which a crop has left the bytes.
        shared: tokens that they begin with in common.
        recorded: slots of a row that have a digest; None: those with a token.
        opaque: the graph's write does not show its slots.
        apart: each half has a graph of its own, as where graphs break between K and V.
    """

    def __init__(
        self,
        layers: int = 2,
        halves: int = 2,
        lengths: tuple[int, int] = (5, 6),
        cropped: int = 0,
        shared: int = 0,
        recorded: int | None = None,
        kind: str = "kv",
        opaque: bool = False,
        apart: bool = False,
    ):
        self.layout, self.opaque, self.apart, self.step = (
            SlotLayout((2, ROW, 4), (0, 1), torch.float32),
            opaque,
            apart,
            0,
        )
        self.stamps = torch.full((2, 2 * ROW), -1)
        layer_of = {layer * halves + half: layer for layer in range(layers) for half in range(halves)}
        forward = Companions(tuple(Call(n, (n,), both=halves == 1) for n in layer_of), span=1, ahead=0)
        self.views = {n: torch.zeros(2, ROW, 4) for n in layer_of}
        self.halves = {}
        filled = [length + cropped for length in lengths]
        for n, view in self.views.items():
            for row, length in enumerate(filled):
                view[row, :length] = torch.randn(length, 4)
            view[1, :shared] = view[0, :shared]
            buffers = HalfBuffers.allocate(self.layout, 1, torch.device("cpu"))
            buffers.rows[:, RowState.NEXT] = 0 if opaque else torch.tensor(lengths)
            known = [row * ROW + i for row in range(2) for i in range(filled[row] if recorded is None else recorded)]
            buffers.digest[0, known] = self.digests(n, known)
            self.halves[n] = SimpleNamespace(
                id=n,
                peers={n: layer_of[n]} if apart else layer_of,
                kind=kind,
                beside=set(),
                exchanges_rows=False,
                place=SimpleNamespace(layout=self.layout),
                reported={},
                takes_turns=apart,
                forward=forward if apart else None,
                changed={},
                seeds=SEEDS,
                buffers=buffers,
            )
        views = self.views
        self.registry = cast(PoolRegistry, SimpleNamespace(by_id=self.halves.get, view_of=lambda half: views[half.id]))
        self.before = {n: view.clone() for n, view in self.views.items()}

    def unknown(self, slot: int, half: int) -> Cache:
        """A graph has never written a slot of a half."""
        self.halves[half].buffers.digest[0, slot] = 0
        return self

    def digests(self, half: int, slots: Iterable[int]) -> torch.Tensor:
        return digest_rows(self.layout, self.views[half], torch.tensor(list(slots)), SEEDS, 1)[0]

    def change(self, slots: Iterable[int], to: Any = None, halves: Iterable[int] | None = None) -> Cache:
        """Code outside writes random numbers, ``to`` zeros, or what other slots held."""
        slots = list(slots)
        for n in self.halves if halves is None else halves:
            new = torch.randn(len(slots), 4) if to is None else self.before[n].view(-1, 4)[to] if to else 0.0
            self.views[n].view(-1, 4)[slots] = new
        return self

    def judged(self, write: int | None = None, by: Iterable[int] | None = None, lost: int = 0) -> Verdict:
        """A step of the graphs, and what becomes of what they found.

        Args:
            write: the slot that the step writes.
            by: the halves that it writes; None for all.
            lost: how many rows of what was found have no room in the ring.
        """
        self.step += 1
        rows, told = [], Verdict([])
        for n in self.halves:
            rows += self._verify(n)
            if write is not None and (by is None or n in by):
                self._write(n, write)
            if self.apart:
                told.violations += judge(rows, self.registry, self.stamps).violations
                rows = []
        return told if self.apart else judge(rows[: len(rows) - lost], self.registry, self.stamps, lost)

    def told(self, write: int | None = None, by: Iterable[int] | None = None) -> list[int]:
        return sorted({row[Ring.SLOT] for row in self.judged(write, by).violations})

    def _verify(self, n: int) -> list[list[int]]:
        rows, digest = [], self.halves[n].buffers.digest[0]
        for slot, found in enumerate(self.digests(n, range(2 * ROW)).tolist()):
            if int(digest[slot]) not in (0, found):
                row = changed(n, slot)
                row[Ring.STEP], row[Ring.STORED], row[Ring.FOUND] = self.step, int(digest[slot]), found
                rows.append(row)
                digest[slot] = found
        return rows

    def _write(self, n: int, slot: int) -> None:
        buffers = self.halves[n].buffers
        if self.opaque:
            buffers.baseline = self.digests(n, range(2 * ROW))
        else:
            self.stamps[0, slot], buffers.rows[slot // ROW, RowState.NEXT] = self.step << 16, slot % ROW + 1
        self.views[n].view(-1, 4)[slot] = torch.randn(4)
        buffers.digest[0, slot] = self.digests(n, [slot])[0]


ONE = dict(layers=1)
ALONE = dict(layers=1, halves=1)
LATENTS = dict(halves=1)
APART = dict(apart=True)
OPAQUE = dict(opaque=True)
CROPPED: dict[str, Any] = dict(lengths=(3, 4), cropped=4)
ZEROS: list[int] = []

#: What code outside did to the first sequence, where the step then writes, and the slots that are violations.
CHANGES: dict[str, tuple[dict[str, Any], Callable[[Cache], Cache], int | None, list[int]]] = {
    "reset": ({}, lambda c: c.change(range(5), ZEROS), 0, []),
    "reset of a sequence of one token": (dict(lengths=(1, 6), **ALONE), lambda c: c.change([0], ZEROS), 0, []),
    "another token in a sequence of one token": (dict(lengths=(1, 6), **ALONE), lambda c: c.change([0]), 1, [0]),
    "another token, in K and V": (dict(lengths=(1, 6), **ONE), lambda c: c.change([0]), 1, []),
    "reset that left one slot of V": (
        {},
        lambda c: c.change([0, 1, 3, 4], ZEROS).change([2], ZEROS, [0, 1, 2]),
        0,
        [0, 1, 2, 3, 4],
    ),
    "cropped": ({}, lambda c: c.change([3, 4], ZEROS), 3, []),
    "newest slots emptied": ({}, lambda c: c.change([3, 4], ZEROS), 5, [3, 4]),
    "newest slots emptied, where writes are opaque": (OPAQUE, lambda c: c.change([3, 4], ZEROS), 5, [3, 4]),
    "a new prompt": ({}, lambda c: c.change(range(5)), 5, []),
    "another newest token, above the first layer": ({}, lambda c: c.change([4], None, [2, 3]), 5, []),
    "a new prompt that begins alike, with other roundings": (
        dict(layers=4),
        lambda c: c.change([3, 4]).change([1], None, [4, 5, 6, 7]).change([2], None, [7]),
        5,
        [],
    ),
    "another newest token, and an older one from a layer on": (
        dict(layers=4),
        lambda c: c.change([4]).change([1], None, [4, 5, 6, 7]),
        5,
        [],
    ),
    "another newest token, and a flip": (dict(layers=4), lambda c: c.change([4]).change([1], None, [7]), 5, [1]),
    "other roundings alone": (dict(layers=4), lambda c: c.change([1], None, [4, 5, 6, 7]), 5, [1]),
    "older tokens without those behind them": ({}, lambda c: c.change([1, 2]), 5, [1, 2]),
    "a new prompt, where a crop left tokens": (CROPPED, lambda c: c.change(range(3)), 3, []),
    "older tokens, where a crop left tokens": (CROPPED, lambda c: c.change([0, 1]), 3, [0, 1]),
    "a token that a crop left": (CROPPED, lambda c: c.change([4]), 3, [4]),
    "newest slots emptied, where a crop left tokens": (CROPPED, lambda c: c.change([2], ZEROS), 3, [2]),
    "older tokens of a cache that is only read": (dict(kind="read"), lambda c: c.change([1, 2]), None, []),
    "older tokens, where writes are opaque": (OPAQUE, lambda c: c.change([1, 2]), 5, []),
    "one layer: half of what follows": (ONE, lambda c: c.change([1, 2]), 5, []),
    "one layer: less than half": (ONE, lambda c: c.change([0, 4]), 5, [0, 4]),
    "one layer: the newest slot": (ONE, lambda c: c.change([4]), 5, [4]),
    "one layer: a shorter prompt, where writes are opaque": (dict(**ONE, **OPAQUE), lambda c: c.change([0, 1]), 2, []),
    "one layer: what lies behind an opaque write": (dict(**ONE, **OPAQUE), lambda c: c.change([0, 4]), 3, [0]),
    "one layer: two tokens, where a crop left more": (dict(**ONE, **CROPPED), lambda c: c.change([1, 2]), 3, []),
    "one layer: the only token that a crop left": (
        dict(layers=1, lengths=(1, 6), cropped=2),
        lambda c: c.change([0]),
        1,
        [],
    ),
    "beams that differ in the newest token": (dict(shared=4, **ONE), lambda c: c.change([4], [12]), 5, []),
    "of such beams K alone": (dict(shared=4, **ONE), lambda c: c.change([4], [12], [0]), 5, [4]),
    "of such beams V otherwise": (
        dict(shared=4, **ONE),
        lambda c: c.change([4], [12], [0]).change([4], None, [1]),
        5,
        [4],
    ),
    "two latents: a prompt that shares tokens with the old one": (
        LATENTS,
        lambda c: c.change([2]).change([1, 3, 4], None, [1]),
        5,
        [],
    ),
    "two latents: the upper one alone": (LATENTS, lambda c: c.change([3, 4], None, [1]), 5, [3, 4]),
    "two latents: a flip in the upper one beside a new token": (
        LATENTS,
        lambda c: c.change([4]).change([0], None, [1]),
        5,
        [0, 4],
    ),
    "tokens in empty slots": (dict(recorded=ROW, **ALONE), lambda c: c.change([1, 5, 6]), 7, [1]),
    "apart: another newest token": (APART, lambda c: c.change([4]), 5, []),
    "apart: that in one half": (APART, lambda c: c.change([4], None, [2]), 5, [4]),
    "apart: an older token without those behind it": (APART, lambda c: c.change([1, 13]), 5, [1]),
    "apart: another newest token, where a crop left some": (
        dict(**APART, **CROPPED),
        lambda c: c.change([2]),
        3,
        [],
    ),
    "apart: newest slots emptied": (APART, lambda c: c.change([3, 4], ZEROS), 5, [3, 4]),
    "apart: a shorter prompt, opaque": (dict(**APART, **OPAQUE), lambda c: c.change([1]), 2, []),
    "apart: reset, and a key that was never recorded is written": (
        APART,
        lambda c: c.unknown(0, 2).change(range(5), ZEROS),
        0,
        [],
    ),
    "one layer: a token that a crop left is cleared": (
        dict(layers=1, lengths=(3, 6), cropped=1),
        lambda c: c.change([3], ZEROS),
        3,
        [],
    ),
    "one layer: that of K alone": (
        dict(layers=1, lengths=(3, 6), cropped=2),
        lambda c: c.change([3, 4], ZEROS, [0]),
        3,
        [3, 4],
    ),
    "one layer: one of two such tokens": (
        dict(layers=1, lengths=(3, 6), cropped=2),
        lambda c: c.change([3], ZEROS),
        3,
        [3],
    ),
    "apart: an empty slot of one half": (dict(recorded=ROW, **APART), lambda c: c.change([5], None, [2]), 6, []),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_sequence_holds_now_is(name: str):
    setting, change, write, told = CHANGES[name]
    torch.manual_seed(0)
    assert change(Cache(**setting)).told(write) == told


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_sequence_holds_is_told_whatever_the_default_device(name: str, monkeypatch):
    """Seen under ``torch.set_default_device("cuda")``: RuntimeError where beams were exchanged."""
    judge_here = judge

    def judge_elsewhere(*args, **kwargs):
        with torch.device("meta"):  # as good as a GPU
            return judge_here(*args, **kwargs)

    monkeypatch.setitem(globals(), "judge", judge_elsewhere)
    test_what_a_sequence_holds_now_is(name)


@pytest.mark.parametrize(
    ("write", "by", "told"),
    [
        pytest.param(2, [1], [], id="elsewhere"),
        pytest.param(5, [1], [1], id="where it ended"),
        pytest.param(4, None, [1], id="by this graph, too"),
    ],
)
def test_a_key_changed_where_the_write_of_v_began(write, by, told):
    assert Cache(layers=1).change([1], None, [0]).told(write, by) == told


@pytest.mark.parametrize("opaque", [False, True], ids=["", "where writes are opaque"])
@pytest.mark.parametrize(
    ("setting", "change", "write", "told"),
    [
        pytest.param({}, lambda c: c.change([5], None, [0]), 5, [], id="where the values are written"),
        pytest.param({}, lambda c: c.change([1, 5], None, [0]), 5, [1], id="elsewhere as well"),
        pytest.param(
            CROPPED,
            lambda c: c.change([3], None, [0]).change([4, 5, 6], ZEROS, [0]),
            3,
            [],
            id="behind a crop that clears what it cuts off",
        ),
        pytest.param(
            CROPPED,
            lambda c: c.change([3], None, [0]).change([4], ZEROS, [0]),
            3,
            [4],
            id="one cleared in front of others that are not",
        ),
    ],
)
def test_keys_that_code_outside_writes_in_front_of_the_values_graph(setting, change, write, told, opaque):
    cache = Cache(layers=1, recorded=ROW, opaque=opaque, **setting)
    keys, values = cache.halves.values()
    keys.kind, keys.peers, keys.beside, values.peers = "read", {0: 0}, {1}, {1: 0}
    assert change(cache).told(write, by=[1]) == told


def test_a_key_that_changed_in_the_first_layer_alone_is_reported_though_the_values_changed_in_all_layers():
    cache = Cache(apart=True)
    for n, half in cache.halves.items():
        half.peers = {n % 2: 0, n % 2 + 2: 1}  # graphs break between K and V; each has both layers
    found = cache.change([4], None, [0, 1, 3]).judged(5).violations
    assert [row[Ring.HALF] for row in found] == [0, 1, 3]


def test_a_slot_that_was_reported_may_be_put_right_once():
    cache = Cache()
    assert cache.change([1], None, [3]).told(5) == [1]
    assert cache.change([1], [1]).told(6) == []
    assert cache.change([1], None, [3]).told(7) == [1]
    assert cache.change([1], None, [3]).told(7) == [1]


def test_a_slot_that_a_fault_emptied_was_not_empty():
    cache = Cache(layers=1)
    assert cache.change([1], ZEROS, [0]).told(5) == [1]
    assert cache.change([1]).told(6) == [1]


def test_a_rewrite_that_overflows_the_ring_is_counted_whole():
    verdict = Cache().change(range(5)).judged(5, lost=3)
    assert (verdict.violations, verdict.adopted_slots, verdict.adopted_fingerprints) == ([], 5, 20)
