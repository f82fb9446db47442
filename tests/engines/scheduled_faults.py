"""The faults that random schedules get, by class: each a function of the engine at one of its points.

A function returns whether it did anything; where it does not, it is tried again the next time the engine comes by.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from scheduled_engine import (
    CACHE,
    LAYERS,
    SLOTS,
    VOCABULARY,
    WIDTH,
    WINDOW,
    Engine,
    Forward,
    Node,
    Request,
    Work,
    _meanwhile,
)

Act = Callable[[Engine, Any], bool]


@dataclasses.dataclass(frozen=True)
class Fault:
    """A class of faults.

    Attributes:
        point: of the engine, where it is planted.
        pool: "plain", "windowed", or None for both.
        cached: whether it needs the prefix cache.
        drafts: whether it needs drafts.
    """

    name: str
    point: str
    act: Act
    pool: str | None = None
    cached: bool = False
    drafts: bool = False


FAULTS: dict[str, Fault] = {}


def fault(name: str, point: str, **needs: Any) -> Callable[[Act], Act]:
    def register(act: Act) -> Act:
        FAULTS[name] = Fault(name, point, act, **needs)
        return act

    return register


# ---- helpers


def a_reader(engine: Engine) -> Request | None:
    """A running request that reads slots at its next forward."""
    found = [r for r in engine.running if engine.readable(r)]
    return engine.rng.choice(found) if found else None


def a_work(engine: Engine, forward: Forward, least: int = 0) -> Work | None:
    """Of one of a forward's requests that reads so many slots."""
    found = [w for w in forward.work if len(engine.readable(w.request)) >= least]
    return engine.rng.choice(found) if found else None


def first_token(forward: Forward, work: Work) -> int:
    """Where the tokens of a request begin in the batch."""
    at = forward.names.index(work.request.name)
    return sum(forward.extend_lens[:at])


def halves(engine: Engine) -> list[torch.Tensor]:
    return [half for layer in engine.guarded.kv for half in layer]


def flip(tensor: torch.Tensor, slot: int, engine: Engine) -> None:
    """One bit of a slot, by what bypasses PyTorch's version counter."""
    words = tensor.data[slot].view(torch.uint8).view(-1)
    words[engine.rng.randrange(words.numel())] ^= 1 << engine.rng.randrange(8)


def columns(engine: Engine, request: Request) -> range:
    """Positions that its next forward reads."""
    return range(0 if engine.map is None else max(0, request.stored - WINDOW), request.stored)


def an_entry(engine: Engine, request: Request) -> int:
    return engine.rng.choice(columns(engine, request))


def idle_nodes(engine: Engine) -> list[Node]:
    return [n for n in engine.trie.below() if not n.users]


# ---- bytes


def flip_in(layer: int, half: int, engine: Engine, forward: Forward) -> bool:
    work = a_work(engine, forward, 1)
    if work is None:
        return False
    flip(engine.guarded.kv[layer][half], engine.rng.choice(engine.readable(work.request)), engine)
    return True


for _layer in range(LAYERS):
    for _half, _name in enumerate("KV"):
        fault(f"flip before the forward, layer {_layer} {_name}", "planned")(functools.partial(flip_in, _layer, _half))


@fault("flip between steps, whoever reads it", "between")
def flip_between(engine: Engine, _: Any) -> bool:
    request = a_reader(engine)
    if request is None:
        return False
    flip(engine.rng.choice(halves(engine)), engine.rng.choice(engine.readable(request)), engine)
    return True


@fault("flip of an idle cached slot", "between", cached=True)
def flip_cached(engine: Engine, _: Any) -> bool:
    nodes = idle_nodes(engine)
    if not nodes:
        return False
    flip(engine.rng.choice(halves(engine)), engine.rng.choice(nodes).slot, engine)
    return True


def stray(engine: Engine, slot: int) -> None:
    """Another slot's bytes, in one tensor or in all."""
    other = engine.rng.choice([s for s in range(1, SLOTS) if s != slot])
    for half in halves(engine) if engine.rng.random() < 0.5 else [engine.rng.choice(halves(engine))]:
        half.data[slot] = half[other] + 1


@fault("stray write before the forward", "planned")
def stray_before(engine: Engine, forward: Forward) -> bool:
    work = a_work(engine, forward, 1)
    if work is not None:
        stray(engine, engine.rng.choice(engine.readable(work.request)))
    return work is not None


@fault("stray write into a prefix during the forward", "planned")
def stray_during(engine: Engine, forward: Forward) -> bool:
    work = a_work(engine, forward, 1)
    if work is None:
        return False
    slot = engine.rng.choice(engine.readable(work.request))
    _meanwhile.append(lambda: stray(engine, slot))
    return True


@fault("stray write into a prefix of nobody in the batch, during the forward", "planned")
def stray_during_elsewhere(engine: Engine, forward: Forward) -> bool:
    others = [r for r in engine.running if r.name not in forward.names and engine.readable(r)]
    if not others:
        return False
    slot = engine.rng.choice(engine.readable(engine.rng.choice(others)))
    _meanwhile.append(lambda: stray(engine, slot))
    return True


@fault("stray write into a new slot, behind its layer's write", "kernel")
def stray_into_new(engine: Engine, forward: Forward) -> bool:
    slot = engine.rng.choice(forward.kernel[0])
    if slot:
        _meanwhile.append(lambda: flip(engine.rng.choice(engine.guarded.kv[0]), slot, engine))
    return bool(slot)


@fault("stray write into a new slot, after the forward", "after")
def stray_after(engine: Engine, forward: Forward) -> bool:
    slot = engine.rng.choice([s for s in forward.kernel[0] if s] or [0])
    if slot:
        stray(engine, slot)
    return bool(slot)


@fault("a slot zeroed by a torch op that the graph does not have", "between")
def zeroed(engine: Engine, _: Any) -> bool:
    request = a_reader(engine)
    if request is not None:
        slot = engine.rng.choice(engine.readable(request))
        for half in halves(engine):
            half[slot] = 0
    return request is not None


def swap(engine: Engine, forward: Forward, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    work = a_work(engine, forward, 1)
    if work is None:
        return False
    slot = engine.rng.choice(engine.readable(work.request))
    for one, other in pairs:
        one.data[slot], other.data[slot] = other[slot].clone(), one[slot].clone()
    return True


@fault("layers swapped in a slot", "planned")
def layers_swapped(engine: Engine, forward: Forward) -> bool:
    return swap(engine, forward, list(zip(*engine.guarded.kv[:2], strict=True)))


@fault("K and V swapped in a slot", "planned")
def halves_swapped(engine: Engine, forward: Forward) -> bool:
    return swap(engine, forward, [engine.rng.choice(engine.guarded.kv)])


@fault("the bytes of two slots of a prefix swapped", "planned")
def slots_swapped(engine: Engine, forward: Forward) -> bool:
    work = a_work(engine, forward, 2)
    if work is None:
        return False
    one, other = engine.rng.sample(engine.readable(work.request), 2)
    for half in halves(engine):
        half.data[one], half.data[other] = half[other].clone(), half[one].clone()
    return True


# ---- what the kernels get


def redirect(engine: Engine, forward: Forward, layers: range, target: Callable[[Work, int], list[int]]) -> bool:
    """Let a token's K and V go elsewhere in some layers."""
    work = engine.rng.choice(forward.work)
    at = first_token(forward, work) + engine.rng.randrange(len(work.tokens))
    targets = target(work, forward.kernel[0][at])
    if not targets:
        return False
    slot = engine.rng.choice(targets)
    for layer in layers:
        forward.kernel[layer][at] = slot
    return True


def free_slots(engine: Engine, work: Work, mine: int) -> list[int]:
    return list(engine.free)


def foreign_slots(engine: Engine, work: Work, mine: int) -> list[int]:
    """Of other requests' prefixes, and of the cache."""
    running = [s for r in engine.running if r is not work.request for s in engine.readable(r)]
    return [s for s in running + [n.slot for n in engine.trie.below()] if s != mine]


def own_prefix(engine: Engine, work: Work, mine: int) -> list[int]:
    return engine.readable(work.request)


for _what, _layers in {"in all layers": range(LAYERS), "in layer 0": range(1), "in layer 1": range(1, 2)}.items():
    for _where, _target in {"a free": free_slots, "another's": foreign_slots, "its own older": own_prefix}.items():

        def _act(engine: Engine, forward: Forward, layers: range = _layers, target: Any = _target) -> bool:
            return redirect(engine, forward, layers, functools.partial(target, engine))

        fault(f"write to {_where} slot {_what}", "kernel")(_act)


@fault("write of one token lost in padding", "kernel")
def write_lost(engine: Engine, forward: Forward) -> bool:
    return redirect(engine, forward, range(LAYERS), lambda work, mine: [0])


@fault("slots of two new tokens swapped in the kernel", "kernel")
def kernel_slots_swapped(engine: Engine, forward: Forward) -> bool:
    real = [i for i, s in enumerate(forward.kernel[0]) if s]
    if len(real) < 2:
        return False
    one, other = engine.rng.sample(real, 2)
    for slots in forward.kernel:
        slots[one], slots[other] = slots[other], slots[one]
    return True


@fault("padding written to another's slot", "kernel")
def padding_written(engine: Engine, forward: Forward) -> bool:
    padding = [i for i, s in enumerate(forward.entries) if not s]
    targets = foreign_slots(engine, forward.work[0], 0)
    if not padding or not targets:
        return False
    slot = engine.rng.choice(targets)
    for slots in forward.kernel:
        slots[engine.rng.choice(padding)] = slot
    return True


@fault("a forward that never ran", "kernel")
def never_ran(engine: Engine, forward: Forward) -> bool:
    forward.runs = False
    return True


@fault("writes that never happened in one layer", "kernel")
def layer_missing(engine: Engine, forward: Forward) -> bool:
    layer = engine.rng.randrange(LAYERS)
    forward.missing = ((layer, 0), (layer, 1))
    return True


@fault("a write of K that never happened in layer 0", "kernel")
def half_missing(engine: Engine, forward: Forward) -> bool:
    forward.missing = ((0, 0),)
    return True


# ---- the request table, the batch


def stale_entries(engine: Engine, forward: Forward) -> tuple[Work, int] | None:
    work = a_work(engine, forward, 1)
    return None if work is None else (work, an_entry(engine, work.request))


@fault("stale table entry: a free slot", "planned", pool="plain")
def stale_free(engine: Engine, forward: Forward) -> bool:
    chosen = stale_entries(engine, forward)
    if chosen is None or not engine.free:
        return False
    engine.table[chosen[0].request.row, chosen[1]] = engine.rng.choice(engine.free)
    return True


@fault("stale table entry: another request's slot", "planned")
def stale_foreign(engine: Engine, forward: Forward) -> bool:
    chosen = stale_entries(engine, forward)
    if chosen is None:
        return False
    work, position = chosen
    others = [e for r in engine.running if r is not work.request for e in engine.entries(r) if engine.slot(e)]
    others = [e for e in others if e not in engine.entries(work.request)]
    if others:
        engine.table[work.request.row, position] = engine.rng.choice(others)
    return bool(others)


@fault("table entry zeroed", "planned")
def entry_zeroed(engine: Engine, forward: Forward) -> bool:
    chosen = stale_entries(engine, forward)
    if chosen is not None:
        engine.table[chosen[0].request.row, chosen[1]] = 0
    return chosen is not None


@fault("two table entries swapped", "planned")
def entries_swapped(engine: Engine, forward: Forward) -> bool:
    work = a_work(engine, forward, 2)
    if work is None:
        return False
    row, (one, other) = engine.table[work.request.row], engine.rng.sample(columns(engine, work.request), 2)
    row[one], row[other] = int(row[other]), int(row[one])
    return True


@fault("pages shifted by one", "planned")
def shifted(engine: Engine, forward: Forward) -> bool:
    work = a_work(engine, forward, 2)
    if work is None:
        return False
    row, places = engine.table[work.request.row], columns(engine, work.request)
    start = engine.rng.choice(places[:-1])
    row[start : places.stop - 1] = row[start + 1 : places.stop].clone()
    return True


@fault("two requests plan one slot", "planned")
def planned_twice(engine: Engine, forward: Forward) -> bool:
    if len(forward.work) < 2:
        return False
    one, other = engine.rng.sample(forward.work, 2)
    entry = one.entries[-1]
    forward.entries[first_token(forward, other)] = entry
    engine.table[other.request.row, other.request.stored] = entry
    return True


@fault("plan writes another's stored slot", "planned")
def planned_foreign(engine: Engine, forward: Forward) -> bool:
    work = engine.rng.choice(forward.work)
    others = [e for r in engine.running if r is not work.request for e in engine.entries(r) if engine.slot(e)]
    if not others:
        return False
    entry = engine.rng.choice(others)
    forward.entries[first_token(forward, work)] = entry
    engine.table[work.request.row, work.request.stored] = entry
    return True


@fault("planned slots and the table disagree", "planned")
def plan_differs(engine: Engine, forward: Forward) -> bool:
    found = [w for w in forward.work if len(w.tokens) > 1]
    if not found:
        return False
    work = engine.rng.choice(found)
    at = first_token(forward, work)
    forward.entries[at], forward.entries[at + 1] = forward.entries[at + 1], forward.entries[at]
    return True


@fault("wrong token", "planned")
def wrong_token(engine: Engine, forward: Forward) -> bool:
    work = engine.rng.choice(forward.work)
    known = len(work.tokens) - work.drafted
    at = first_token(forward, work) + engine.rng.randrange(known)
    forward.input_ids[at] = forward.input_ids[at] % (VOCABULARY - 1) + 1
    return True


@fault("tokens of two requests swapped", "planned")
def tokens_swapped(engine: Engine, forward: Forward) -> bool:
    ats = [first_token(forward, w) for w in forward.work]
    if len(ats) < 2 or forward.input_ids[ats[0]] == forward.input_ids[ats[1]]:
        return False
    ids = forward.input_ids
    ids[ats[0]], ids[ats[1]] = ids[ats[1]], ids[ats[0]]
    return True


@fault("wrong position", "planned")
def wrong_position(engine: Engine, forward: Forward) -> bool:
    work = engine.rng.choice(forward.work)
    forward.positions[first_token(forward, work) + engine.rng.randrange(len(work.tokens))] += 1
    return True


@fault("prefix one too long", "planned")
def prefix_long(engine: Engine, forward: Forward) -> bool:
    work = engine.rng.choice(forward.work)
    forward.prefix_lens[forward.names.index(work.request.name)] += 1
    return True


@fault("prefix one too short", "planned")
def prefix_short(engine: Engine, forward: Forward) -> bool:
    work = a_work(engine, forward, 1)
    if work is not None:
        forward.prefix_lens[forward.names.index(work.request.name)] -= 1
    return work is not None


@fault("rows of two requests swapped", "planned")
def rows_swapped(engine: Engine, forward: Forward) -> bool:
    if len(forward.work) < 2:
        return False
    one, other = (forward.names.index(w.request.name) for w in engine.rng.sample(forward.work, 2))
    forward.rows[one], forward.rows[other] = forward.rows[other], forward.rows[one]
    return True


@fault("a request takes the padding's row", "planned")
def padding_row(engine: Engine, forward: Forward) -> bool:
    work = engine.rng.choice(forward.work)
    forward.rows[forward.names.index(work.request.name)] = 0
    return True


@fault("padding takes a request's row", "planned")
def padding_reads(engine: Engine, forward: Forward) -> bool:
    padding = [i for i, name in enumerate(forward.names) if not name and forward.extend_lens[i]]
    work = a_work(engine, forward, 1)
    if not padding or work is None:
        return False
    at = padding[0]
    forward.rows[at], forward.prefix_lens[at] = work.request.row, work.request.stored
    return True


@fault("the prefix of another text", "planned")
def other_text(engine: Engine, forward: Forward) -> bool:
    work = a_work(engine, forward, 2)
    others = [r for r in engine.running if work is not None and r is not work.request and len(engine.readable(r)) > 1]
    if work is None or not others:
        return False
    other, mine = engine.rng.choice(others), work.request
    places = [p for p in columns(engine, mine) if p in columns(engine, other)]
    if not [p for p in places if mine.tokens[p] != other.tokens[p]]:
        return False
    engine.table[mine.row, places] = engine.table[other.row, places]
    return True


# ---- the life of slots


def take_away(engine: Engine, request: Request, owner: str) -> list[int]:
    """The allocator gets a slot back that a request still reads."""
    own = [e for e in engine.entries(request, len(request.nodes)) if engine.slot(e)]
    chosen = own[-1:]
    if chosen:
        engine.pool.release([engine.slot(e) for e in chosen], owner=owner)
        engine.free += [engine.slot(e) for e in chosen]
    return chosen


@fault("freed early", "between")
def freed_early(engine: Engine, _: Any) -> bool:
    request = a_reader(engine)
    return request is not None and bool(take_away(engine, request, request.name))


@fault("freed early and written by another", "planned")
def freed_and_reused(engine: Engine, forward: Forward) -> bool:
    if len(forward.work) < 2:
        return False
    victim, thief = engine.rng.sample(forward.work, 2)
    freed = take_away(engine, victim.request, victim.request.name)
    if not freed:
        return False
    slot = engine.free.pop()
    engine.pool.allocate([slot], owner=thief.request.name)
    forward.entries[first_token(forward, thief)] = freed[0]
    engine.table[thief.request.row, thief.request.stored] = freed[0]
    return True


@fault("two requests given one slot", "between")
def given_twice(engine: Engine, _: Any) -> bool:
    request = a_reader(engine)
    if request is None or engine.map is not None:
        return False
    engine.free.append(engine.readable(request)[-1])  # the free list has a slot that is in use
    return True


@fault("double free", "finished")
def double_free(engine: Engine, request: Request) -> bool:
    own = [s for s in map(engine.slot, engine.entries(request, len(request.nodes))) if s]
    if not own:
        return False
    engine.running.remove(request)
    engine._leave(request)
    engine.pool.release(own, owner=request.name)
    engine.free += own
    return True


@fault("the end of a request frees what the cache keeps", "finished", cached=True)
def frees_shared(engine: Engine, request: Request) -> bool:
    slots = [n.slot for n in request.nodes]
    if not slots:
        return False
    engine.pool.release(slots, owner=request.name)
    engine.free += slots
    return True


@fault("retraction that keeps reading its slots", "between")
def retraction(engine: Engine, _: Any) -> bool:
    request = a_reader(engine)
    own = [] if request is None else [s for s in map(engine.slot, engine.entries(request, len(request.nodes))) if s]
    if request is None or not own:
        return False
    engine.pool.release(own, owner=request.name)
    engine.free += own
    return True


@fault("eviction of a prefix that is in use", "between", cached=True)
def evicts_used(engine: Engine, _: Any) -> bool:
    nodes = [n for n in engine.trie.below() if n.users and not n.children]
    if nodes:
        engine.evict(engine.rng.choice(nodes))
    return bool(nodes)


# ---- the prefix cache


@fault("another text's prefix from the cache", "admitted", cached=True)
def wrong_hit(engine: Engine, request: Request) -> bool:
    nodes = [n for n in engine.trie.below() if n.depth < len(request.tokens) - 1]
    paths = [_path(n) for n in nodes]
    paths = [p for p in paths if [n.token for n in p] != request.tokens[: len(p)]]
    if not paths:
        return False
    request.nodes = engine.rng.choice(paths)
    request.stored = len(request.nodes)
    return True


@fault("a token from another branch of the cache", "admitted", cached=True)
def wrong_branch(engine: Engine, request: Request) -> bool:
    found = [(i, n) for i, mine in enumerate(request.nodes) for n in engine.trie.below() if _similar(n, mine)]
    if found:
        place, node = engine.rng.choice(found)
        request.nodes[place] = node
    return bool(found)


def _path(node: Node) -> list[Node]:
    return [] if node.parent is None else [*_path(node.parent), node]


def _similar(node: Node, other: Node) -> bool:
    return node is not other and node.depth == other.depth


@fault("the cache lists slots in a wrong order", "between", cached=True)
def wrong_order(engine: Engine, _: Any) -> bool:
    pairs = [(n, n.parent) for n in engine.trie.below() if n.parent is not None and n.parent is not engine.trie]
    if pairs:
        one, other = engine.rng.choice(pairs)
        one.slot, other.slot = other.slot, one.slot
    return bool(pairs)


@fault("a cached branch under another parent", "between", cached=True)
def wrong_parent(engine: Engine, _: Any) -> bool:
    nodes = list(engine.trie.below())
    moves = [(n, p) for n in nodes for p in nodes if n.parent is not p and n.depth == p.depth + 1 and _free(p, n)]
    if not moves:
        return False
    node, parent = engine.rng.choice(moves)
    assert node.parent is not None
    del node.parent.children[node.token]
    parent.children[node.token], node.parent = node, parent
    return True


def _free(parent: Node, child: Node) -> bool:
    return child.token not in parent.children


@fault("a cached slot freed while idle", "between", cached=True)
def cached_freed(engine: Engine, _: Any) -> bool:
    nodes = idle_nodes(engine)
    if nodes:
        slot = engine.rng.choice(nodes).slot
        engine.pool.release([slot], owner=CACHE)
        engine.free.append(slot)
    return bool(nodes)


@fault("a cached slot given away while idle", "planned", cached=True)
def cached_given(engine: Engine, forward: Forward) -> bool:
    nodes, work = idle_nodes(engine), engine.rng.choice(forward.work)
    if not nodes:
        return False
    slot = engine.rng.choice(nodes).slot
    engine.pool.release([slot], owner=CACHE)
    engine.pool.allocate([slot], owner=work.request.name)
    forward.entries[first_token(forward, work)] = slot
    engine.table[work.request.row, work.request.stored] = slot
    return True


# ---- windows and drafts


@fault("map entry cleared inside the window", "planned", pool="windowed")
def map_cleared(engine: Engine, forward: Forward) -> bool:
    chosen = stale_entries(engine, forward)
    if chosen is not None and engine.map is not None:
        engine.map[engine.entries(chosen[0].request)[chosen[1]]] = 0
    return chosen is not None


@fault("map entry of the newest token cleared", "planned", pool="windowed")
def map_cleared_newest(engine: Engine, forward: Forward) -> bool:
    assert engine.map is not None
    engine.map[engine.rng.choice(forward.work).entries[-1]] = 0
    return True


@fault("map entry to another's slot", "planned", pool="windowed")
def map_foreign(engine: Engine, forward: Forward) -> bool:
    chosen = stale_entries(engine, forward)
    if chosen is None or engine.map is None:
        return False
    work, position = chosen
    others = [s for r in engine.running if r is not work.request for s in engine.readable(r)]
    if others:
        engine.map[engine.entries(work.request)[position]] = engine.rng.choice(others)
    return bool(others)


@fault("left the window one step early", "windowed", pool="windowed")
def left_early(engine: Engine, request: Request) -> bool:
    return request.stored > WINDOW


@fault("rejected draft read", "rejected", drafts=True)
def rejected_read(engine: Engine, subject: tuple[Request, int]) -> bool:
    request, end = subject
    if end + 1 > WIDTH - 4:
        return False
    request.goal = max(request.goal, end + 1)  # it goes on, so that they are read
    rejected = end - request.stored
    engine.pool.reject([engine.slot(e) for e in engine.entries(request, request.stored, end)])
    request.tokens += [engine.rng.randrange(1, VOCABULARY) for _ in range(rejected)]
    request.stored, request.spare = end, 0
    return True
