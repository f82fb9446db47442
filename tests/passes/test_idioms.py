"""Every way to write a cache: found, harmless, silent, and a flipped bit in any half is found."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from idioms import IDIOMS, NOT_KV, STATES, B, Idiom, S

import kvcanary_fx
from kvcanary_fx import CanaryBackend, CanaryConfig

INNER = ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


def compiled(idiom: Idiom, inner: str, **settings):
    backend = CanaryBackend(CanaryConfig(inner=inner, **settings))
    return backend, torch.no_grad()(torch.compile(idiom.run, backend=backend, fullgraph=True))


@torch.no_grad()  # torch.cond takes branches that write only where no gradient is recorded
def plainly(idiom: Idiom, args):
    return idiom.run(*args)


def on(device, args):
    """A number stays on the host: one on a GPU Dynamo refuses to index with, also without us (torch 2.11)."""
    return tuple(a.to(device) if isinstance(a, torch.Tensor) and a.dim() else a for a in args)


def flip_one_bit(backend: CanaryBackend, half, args) -> int:
    """Flip a bit in the first recorded slot of a half, unseen by PyTorch; the slot."""
    recorded = half.buffers.digest[0].nonzero().flatten()
    slot = int(recorded[len(recorded) // 2])
    storages = [(backend.session.registry.known(a), a) for a in args if isinstance(a, torch.Tensor)]
    pool = next(a for storage, a in storages if storage is not None and half in storage.halves.values())
    layout, place = half.place.layout, half.place
    flat = torch.empty(0, dtype=pool.dtype, device=pool.device).set_(pool.data.untyped_storage())
    view = flat.as_strided(layout.shape, place.strides, place.offset // pool.element_size())
    row = layout.slots_first(view)[divmod(slot, layout.positions) if layout.two_axes else slot]
    row.view(torch.int32)[(0,) * row.dim()] ^= 1 << 7
    return slot


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("idiom", IDIOMS + STATES + NOT_KV, ids=lambda i: i.name)
def test_same_result_and_silent(idiom, inner, device):
    backend, run = compiled(idiom, inner)
    args = on(device, idiom.make())
    plain = copy.deepcopy(args)
    for _ in range(3):
        got, expected = run(*args), plainly(idiom, plain)
        assert torch.allclose(got, expected, atol=1e-4)
        for a, b in zip(args, plain, strict=True):
            assert torch.allclose(a.float(), b.float(), atol=1e-4)
    plan = backend.session.plans[0]
    assert len(plan.sites) == idiom.halves
    assert all((site.opaque is None) == idiom.readable for site in plan.sites)
    assert backend.session.violations() == []


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("idiom", IDIOMS + STATES, ids=lambda i: i.name)
def test_a_flipped_bit_in_each_half_is_found(idiom, inner, device):
    backend, run = compiled(idiom, inner)
    args = on(device, idiom.make())
    run(*args)
    run(*args)
    for half in backend.session.registry.halves():
        slot = flip_one_bit(backend, half, args)
        with pytest.raises(kvcanary_fx.KVCacheViolation) as caught:
            run(*args)
        assert [(v.check, v.layer, v.half, v.slot) for v in caught.value.violations] == [
            ("content", half.info.layer, half.info.half, slot)
        ]
        run(*args)  # told once


@pytest.mark.parametrize("idiom", STATES, ids=lambda i: i.name)
def test_a_state_has_a_slot_for_each_sequence(idiom):
    backend, run = compiled(idiom, "eager")
    args = idiom.make()  # the halves live as long as these
    run(*args)
    sites, halves = backend.session.plans[0].sites, backend.session.registry.halves()
    assert [(s.kind, s.slot_axes) for s in sites] == [("state", (0,))] * 2
    assert [h.place.layout.slots for h in halves] == [B, B]
    assert [s.label for s in sites] == (["conv", "state"] if idiom.name == "named_states" else ["state", "state"])


def test_a_window_that_rolls_is_no_state():
    backend, run = compiled(next(i for i in IDIOMS if i.name == "rolling"), "eager")
    run(*next(i for i in IDIOMS if i.name == "rolling").make())
    assert [(s.kind, s.slot_axes) for s in backend.session.plans[0].sites] == [("kv", (0, 2))] * 2


@pytest.mark.parametrize("idiom", [i for i in IDIOMS if i.readable], ids=lambda i: i.name)
def test_rewritten_writes_do_the_same(idiom, device):
    backend, run = compiled(idiom, "aot_eager", rewrite_writes=True)
    args = on(device, idiom.make())
    plain = copy.deepcopy(args)
    for _ in range(2):
        assert torch.allclose(run(*args), plainly(idiom, plain), atol=1e-4)
        assert all(torch.allclose(a.float(), b.float(), atol=1e-4) for a, b in zip(args, plain, strict=True))
    assert backend.session.plans[0].rewritten == (0 if idiom.name == "custom_op" else idiom.halves * idiom.writes)


@pytest.mark.parametrize("idiom", [i for i in IDIOMS if i.readable], ids=lambda i: i.name)
def test_nan_is_reported_in_the_step_that_writes_it(idiom, device):
    _, run = compiled(idiom, "eager")
    args = on(device, idiom.make())
    run(*args)
    args[2][:, :, 1] = float("nan")  # the V of one token
    with pytest.raises(kvcanary_fx.KVCacheViolation) as caught:
        run(*args)
    assert {(v.check, v.half) for v in caught.value.violations} == {("poison", "V")}


def test_what_is_not_a_cache_is_named_with_the_reason(caplog):
    reasons = {}
    for idiom in NOT_KV:
        torch._dynamo.reset()
        backend, run = compiled(idiom, "eager")
        with caplog.at_level(logging.WARNING, "kvcanary"):
            run(*idiom.make())
        reasons.update(backend.session.plans[0].unguarded)
    assert reasons == {
        "counter": "its elements are int64: a counter, a mask or an index",
        "mask": "only constants are written to it: a mask or a buffer being cleared",
        "out": "nothing in the graph reads it: an output buffer",
        "visible": "what is written to it comes from no floating-point input: a mask",
        "mean": "it has two axes and no name of a cache: a running state",
        "scratch": "an op that hides where it writes changed it, and its name is no cache's",
    }
    assert "no KV cache is written in this graph" in caplog.text


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_a_cache_of_complex_numbers_is_not_called_a_counter_and_is_guarded_as_real_ones(dtype):
    def step(k, k_cache, pos):
        k_cache[:, :, pos] = k
        return k_cache.sum()

    def guarded(k, k_cache):
        torch._dynamo.reset()
        backend = CanaryBackend(CanaryConfig(inner="eager"))
        torch.compile(step, backend=backend)(k, k_cache, torch.tensor([3, 4]))
        return backend.session

    k, k_cache = torch.randn(2, 2, 2, 8, dtype=dtype), torch.zeros(2, 2, 16, 8, dtype=dtype)
    session = guarded(k, k_cache)
    name = str(dtype).removeprefix("torch.")
    why = f"its elements are {name}: complex numbers are not compared. Kept as real ones (view_as_real), they are"
    assert session.plans[0].unguarded == [("k_cache", why)]
    real = dtype.to_real()
    session = guarded(torch.view_as_real(k).flatten(3), torch.zeros(2, 2, 16, 16, dtype=real))
    assert session.stats().recorded == 2 * 2


@pytest.mark.parametrize("name", ["keys_with_positions_last", "index_copy_of_positions_last"])
def test_a_report_names_the_position_where_it_is_the_last_axis(name):
    """Seen: K was cut along the axis in front of it, and the slot of a report was an element of a head."""
    (idiom,) = (i for i in IDIOMS if i.name == name)
    backend, run = compiled(idiom, "eager", mode="log")
    args = idiom.make()
    run(*args)
    args[3].data[1, 0, 5, 4] += 1  # of sequence 1, position 4
    run(*args)
    found = [(v.check, v.half, v.row, v.slot, v.position) for v in backend.session.violations()]
    assert found == [("content", "K", 1, 1 * S + 4, 4)]
