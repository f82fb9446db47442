"""Bugs of transfers and off-load (D)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from cases import Outcome, bug
from toy import Toy, attend

from kvcanary_fx import KVPool
from kvcanary_fx.engine.transfer import ShadowSlice

#: The tensors of each layer: a pool, or some rows on their way.
Layers = Sequence[Sequence[torch.Tensor]]


def read(kv: Layers, slots: Sequence[int]) -> Layers:
    """A copy of the bytes of slots, in all layers."""
    return [[tensor[list(slots)] for tensor in layer] for layer in kv]


def land(kv: Layers, slots: Sequence[int], rows: Layers) -> None:
    """Bytes on their way arrive in slots."""
    for layer, arrived in zip(kv, rows, strict=True):
        for tensor, row in zip(layer, arrived, strict=True):
            tensor[list(slots)] = row


def host_pool(toy: Toy, slots: int) -> Layers:
    """Memory of the host for the rows of a few slots."""
    return [[torch.zeros_like(tensor[:slots]) for tensor in layer] for layer in toy.kv]


def send(source: Toy, at: Sequence[int], target: Toy, to: Sequence[int]) -> None:
    """Move slots between two engines, the bytes and what is known about them."""
    land(target.kv, to, read(source.kv, at))
    target.pool.import_(source.pool.export(at), to)


def off_load(toy: Toy, name: str, tokens: Sequence[int], slots: Sequence[int]) -> tuple[Layers, ShadowSlice]:
    """A request runs and ends; its slots are on the host then."""
    toy.add(name, tokens)
    toy.run({name: slots})
    moved = read(toy.kv, slots), toy.pool.export(slots)
    toy.done(name)
    return moved


def expect(toy: Toy, name: str, tokens: Sequence[int], slots: Sequence[int]) -> None:
    """A request arrives whose first tokens are to be loaded into slots of its own."""
    request = toy.add(name, tokens)
    toy.take(name, slots)
    request.stored = len(slots)


def while_it_runs(toy: Toy, act: Callable[[], None]) -> None:
    """Do something in each forward from now on: after it was planned and queued, before its kernels run."""
    compiled = toy.model

    def model(*args: object) -> torch.Tensor:
        act()
        return compiled(*args)

    toy.model = model


def attend_with_sidecar(pools: Layers, x: torch.Tensor, slots: torch.Tensor, reads: torch.Tensor) -> torch.Tensor:
    """:func:`toy.attend` of a model that keeps a third row for each token."""
    for _, _, sidecar in pools:
        sidecar[slots] = -x.unsqueeze(1)
    return attend([(k, v) for k, v, _ in pools], x, slots, reads)


def one_pool_with_sidecar(toy: Toy) -> tuple[KVPool]:
    """K, V and the sidecar share their slots' lives."""
    toy.kv = [(k, v, torch.zeros_like(k)) for k, v in toy.kv]
    return (KVPool(toy.kv, toy.table),)


def two_pools_with_sidecar(toy: Toy) -> tuple[KVPool, KVPool]:
    """The sidecar is a pool of its own that nobody allocates: a slot of it belongs to whoever has it in the first."""
    toy.kv = [(k, v, torch.zeros_like(k)) for k, v in toy.kv]
    sidecar = KVPool([(s,) for _, _, s in toy.kv], toy.table, name="sidecar", allocations=False)
    return KVPool([(k, v) for k, v, _ in toy.kv], toy.table), sidecar


def attend_fused(pools: Layers, x: torch.Tensor, slots: torch.Tensor, reads: torch.Tensor) -> torch.Tensor:
    """:func:`toy.attend` over blocks of the layout [slot][head][k|v], with two heads."""
    for (kv,) in pools:
        k = torch.stack((x, -x), dim=1)
        kv[slots] = torch.cat((k, 2 * k), dim=-1)
        x = x + kv[reads].mean()
    return x


def one_fused_pool(toy: Toy) -> tuple[KVPool]:
    """K and V of a head side by side."""
    toy.kv = [(torch.zeros(k.shape[0], 2, 2 * k.shape[-1]),) for k, _ in toy.kv]
    return (KVPool(toy.kv, toy.table),)


@bug("D2", "vllm-project/vllm#52234", check="chain", also=("digest",))
def stale_read_is_accepted(faulty: bool) -> Outcome:
    """The producer has given a block to another prompt when the consumer reads it, and the failed read counts as
    one that succeeded."""
    producer, consumer = Toy(history=False), Toy(history=False)
    producer.add("p", [5, 6, 7, 8, 9])
    producer.run({"p": [1, 2, 3, 4]})
    expect(consumer, "p", [5, 6, 7, 8, 9], [11, 12, 13, 14])
    if not faulty:
        send(producer, [1, 2, 3, 4], consumer, [11, 12, 13, 14])
    producer.pool.release([3, 4], owner="p")
    producer.add("q", [15, 16, 17])
    producer.run({"q": [3, 4]})
    if faulty:
        send(producer, [1, 2, 3, 4], consumer, [11, 12, 13, 14])
    consumer.run({"p": [15]})
    return Outcome((producer.session, consumer.session), slot=13, request="p")


@bug("D3", "sgl-project/sglang#27372", check="owner", also=("content",))
def prefill_sends_on_after_an_abort(faulty: bool) -> Outcome:
    """Decode aborts a request and reuses its slots, while prefill still sends into them."""
    prefill, decode = Toy(), Toy()
    prefill.add("a", [5, 6, 7, 8])
    prefill.run({"a": [1, 2, 3]})
    expect(decode, "a", [5, 6, 7, 8], [11, 12, 13])
    if not faulty:  # the abort waits for what is on its way
        send(prefill, [1, 2, 3], decode, [11, 12, 13])
    decode.done("a")
    decode.add("b", [9, 10, 11])
    decode.run({"b": [12]})
    if faulty:  # nobody is there any more to say that it arrived
        land(decode.kv, [11, 12, 13], read(prefill.kv, [1, 2, 3]))
    decode.run({"b": [14]})
    return Outcome((prefill.session, decode.session), slot=12, request="b")


@bug("D5", "bytedance-iaas/sglang#638", check="content")
def sidecar_evicted_from_the_host_during_load_back(faulty: bool) -> Outcome:
    """Eviction of sidecars from a full host pool does not see that a load-back still reads the page."""
    toy = Toy(model=attend_with_sidecar, pools=one_pool_with_sidecar)
    host, shadow = off_load(toy, "a", [5, 6, 7, 8], [1, 2, 3])
    toy.add("b", [9, 10, 11])
    toy.run({"b": [4]})
    expect(toy, "a2", [5, 6, 7, 8], [11, 12, 13])
    toy.pool.import_(shadow, [11, 12, 13])  # the copy is queued
    if faulty:  # b's sidecar takes the place of a's second one
        for layer, (_, _, sidecar) in zip(host, read(toy.kv, [4]), strict=True):
            layer[2][1] = sidecar[0]
    land(toy.kv, [11, 12, 13], host)
    toy.run({"a2": [14]})
    return Outcome((toy.session,), slot=12, request="a2")


@bug("D6", "sgl-project/sglang#28468", check="content")
def host_target_freed_with_a_back_up_in_flight(faulty: bool) -> Outcome:
    """The host row that a queued back-up goes to is freed and reused; the copy lands in the new tenant's bytes."""
    toy = Toy()
    host = host_pool(toy, 2)
    queued, _ = off_load(toy, "a", [5, 6], [1])  # on its way to row 0
    rows, shadow = off_load(toy, "b", [7, 8], [2])
    mine = 0 if faulty else 1  # row 0 is free before the copy has landed, or is not
    land(host, [mine], rows)
    land(host, [0], queued)
    expect(toy, "b2", [7, 8], [3])
    land(toy.kv, [3], read(host, [mine]))
    toy.pool.import_(shadow, [3])
    toy.run({"b2": [4]})
    return Outcome((toy.session,), slot=3, request="b2")


@bug("D7", "sgl-project/sglang#35769", check="owner", also=("content",))
def insert_frees_the_target_of_a_load_back(faulty: bool) -> Outcome:
    """A load-back is queued before insert decides who owns the slot; insert finds a duplicate and frees it."""
    toy = Toy()
    host, shadow = off_load(toy, "a", [5, 6], [1])
    expect(toy, "a2", [5, 6], [6])
    toy.pool.import_(shadow, [6])  # the copy is queued
    if faulty:
        toy.pool.release([6], owner="a2")
    toy.add("b", [9, 10, 11])
    toy.run({"b": [6 if faulty else 7]})
    land(toy.kv, [6], host)
    toy.run({"a2": [8]})
    return Outcome((toy.session,), slot=6, request="a2")


@bug("D9", "vllm-project/vllm#47282", check="content", also=("owner",))
def load_not_ordered_after_compute(faulty: bool) -> Outcome:
    """The copy for the next tenant of a slot does not wait for the kernels that still read the last one's."""
    toy = Toy()
    host, shadow = off_load(toy, "b", [9, 10], [1])
    toy.add("a", [5, 6, 7])
    toy.run({"a": [1, 2]})
    if faulty:
        while_it_runs(toy, lambda: land(toy.kv, [1], host))
    toy.run({"a": [3]})  # a's last step
    toy.done("a")
    expect(toy, "b2", [9, 10], [1])
    land(toy.kv, [1], host)
    toy.pool.import_(shadow, [1])
    toy.run({"b2": [2]})
    return Outcome((toy.session,), slot=1, request="a")


@bug("D11", "LMCache/LMCache#4463", check="content", also=("digest",))
def connector_misreads_the_fused_layout(faulty: bool) -> Outcome:
    """The connector stores blocks of the layout [slot][head][k|v] as if they were [slot][kv][head]."""
    toy = Toy(model=attend_fused, pools=one_fused_pool)
    rows, shadow = off_load(toy, "a", [5, 6, 7], [1, 2])
    expect(toy, "a2", [5, 6, 7], [11, 12])
    for (pool,), (fused,) in zip(toy.kv, rows, strict=True):
        chunk = fused.view(2, 2, 2, -1) if faulty else fused.view(2, 2, 2, -1).transpose(1, 2)  # [slot, kv, head, dim]
        pool[[11, 12]] = chunk.transpose(1, 2).reshape(fused.shape)
    toy.pool.import_(shadow, [11, 12])
    toy.run({"a2": [13]})
    return Outcome((toy.session,), slot=11, request="a2")


@bug("D13", "NVIDIA/TensorRT-LLM#8813", check="content", also=("chain",))
def attention_reads_before_the_on_boarding(faulty: bool) -> Outcome:
    """The step does not wait for the copy from the host, and reads what the last tenant left in the block."""
    toy = Toy()
    host, shadow = off_load(toy, "a", [5, 6, 7], [1, 2])
    off_load(toy, "b", [8, 9], [11, 12])
    expect(toy, "a2", [5, 6, 7], [11, 12])
    toy.pool.import_(shadow, [11, 12])  # the copy is queued
    if not faulty:
        land(toy.kv, [11, 12], host)
    toy.run({"a2": [13]})
    land(toy.kv, [11, 12], host)
    return Outcome((toy.session,), slot=11, request="a2")


@bug("D14", "vllm-project/vllm#43996", check="chain", also=("digest",))
def trimming_drops_the_first_block(faulty: bool) -> Outcome:
    """Prefill sends a look-ahead block that decode has no room for, and the list is cut at the wrong end."""
    prefill, decode = Toy(history=False), Toy(history=False)
    prefill.add("a", [5, 6, 7, 8])
    prefill.run({"a": [1, 2]})
    prefill.run({"a": [3, 4]})  # the look-ahead block
    blocks = [(1, 2), (3, 4)]
    expect(decode, "a", [5, 6, 7, 8], [11, 12])
    send(prefill, blocks[-1] if faulty else blocks[0], decode, [11, 12])
    decode.run({"a": [13]})
    return Outcome((prefill.session, decode.session), slot=11, request="a")


@bug("D17", "ROCm/ATOM#1807", check="content")
def codec_saves_one_row_of_a_page(faulty: bool) -> Outcome:
    """The off-load codec takes a page of 16 rows for one row: it saves the first, and reloads 16."""
    toy = Toy(slots=40, width=20)
    host, page, target = host_pool(toy, 16), range(1, 17), range(17, 33)
    rows, shadow = off_load(toy, "a", range(5, 22), page)
    saved = 1 if faulty else 16
    land(host, range(saved), read(rows, range(saved)))
    expect(toy, "a2", range(5, 22), target)
    land(toy.kv, target, host)
    toy.pool.import_(shadow, target)
    toy.run({"a2": [33]})
    return Outcome((toy.session,), slot=18, request="a2")


@bug("D18", "sgl-project/sglang#30738", check="chain", also=("content",))
def page_published_without_its_sidecar(faulty: bool) -> Outcome:
    """A page is published as a hit once its KV is loaded, though the indexer's row was not: an old one is there."""
    toy = Toy(model=attend_with_sidecar, pools=two_pools_with_sidecar, history=False)
    sidecar = toy.session.pools["sidecar"]
    toy.add("a", [5, 6, 7, 8])
    toy.run({"a": [1, 2, 3]})
    host, shadow, rows = read(toy.kv, [1, 2, 3]), toy.pool.export([1, 2, 3]), sidecar.export([1, 2, 3])
    toy.done("a")
    off_load(toy, "b", [15, 16], [13, 14])
    expect(toy, "a2", [5, 6, 7, 8], [11, 12, 13])
    loaded = 2 if faulty else 3
    land([layer[:2] for layer in toy.kv], [11, 12, 13], [layer[:2] for layer in host])
    land([layer[2:] for layer in toy.kv], range(11, 11 + loaded), read([layer[2:] for layer in host], range(loaded)))
    toy.pool.import_(shadow, [11, 12, 13])
    sidecar.import_(rows[:loaded], range(11, 11 + loaded))
    toy.run({"a2": [14]})
    return Outcome((toy.session,), slot=13, request="a2")
