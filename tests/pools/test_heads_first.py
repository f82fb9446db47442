"""Store ops over pages of [heads, page_size, dim]: slots lie as the engine declared, whatever the op shows."""

from __future__ import annotations

import pytest
import torch

import kvcanary_fx
from kvcanary_fx import CanaryBackend, CanaryConfig, KVCacheViolation, KVPool, register_kv_write

PAGES, PAGE, DIM = 6, 4, 8

_LIBRARY = torch.library.Library("heads_first", "FRAGMENT")
_LIBRARY.define("store(Tensor(a!) k_pool, Tensor(b!) v_pool, Tensor k, Tensor v, Tensor where) -> ()")
_LIBRARY.define("hide(Tensor(a!) kv, Tensor k, Tensor v, Tensor meta) -> ()")
register_kv_write("heads_first::store", slots="where", pools={"k_pool": "k", "v_pool": "v"})


def _store(k_pool, v_pool, k, v, where):
    for pool, rows in ((k_pool, k), (v_pool, v)):
        pool[where // PAGE, :, where % PAGE] = rows.view(len(where), pool.shape[1], DIM)


_LIBRARY.impl("store", _store, "CPU")
_LIBRARY.impl("hide", lambda kv, k, v, meta: _store(kv[0], kv[1], k, v, meta), "CPU")
for _name in ("store", "hide"):
    torch.library.register_fake(f"heads_first::{_name}", lambda *_: None, lib=_LIBRARY)


def forward(kv, k, v, slots):
    if isinstance(kv, torch.Tensor):
        torch.ops.heads_first.hide(kv, k, v, slots)
    else:
        torch.ops.heads_first.store(*kv, k, v, slots)
    return k + sum(half.sum() for half in kv)


@pytest.mark.parametrize(
    ("heads", "flat", "stacked"),
    [(2, False, False), (PAGE, False, False), (2, True, False), (2, False, True)],
    ids=["slots and rows are told", "as many heads as slots in a page", "rows of another shape", "nothing is told"],
)
def test_store_op_writes_what_was_declared(heads, flat, stacked):
    kv = torch.zeros(2, PAGES, heads, PAGE, DIM)
    table = torch.zeros(2, 4, dtype=torch.int32)
    table[1, 0] = 1
    pool = KVPool(
        [(kv,) if stacked else (kv[0], kv[1])],
        table,
        kv_axis=0 if stacked else None,
        order="HND",
        paged=True,
        table_page_size=PAGE,
        reserved=tuple(range(PAGE)),
        allocations=False,
    )
    session = kvcanary_fx.install_canary(pool, inner="eager")
    session.mark_ready()
    run = torch.compile(forward, backend=session.backend, dynamic=False)

    def step(position: int) -> None:
        batch = {"input_ids": [5], "slots": [PAGE + position], "request_rows": [1]}
        rows = torch.randn(2, 1, heads * DIM) if flat else torch.randn(2, 1, heads, DIM)
        with session.step({**batch, "prefix_lens": [position], "extend_lens": [1]}), session.forward(), torch.no_grad():
            run(kv if stacked else (kv[0], kv[1]), *rows, torch.tensor([PAGE + position]))

    step(0)
    step(1)
    kv.data[1, 1, heads - 1, 0, 3] += 1
    with pytest.raises(KVCacheViolation) as caught:
        step(2)
    assert [(v.check, v.half, v.slot) for v in caught.value.violations] == [("content", "V", PAGE)]
    shown = [site.opaque is None for plan in session.plans for site in plan.sites]
    assert shown == [not flat and not stacked] * 2


def test_undeclared_pages_of_heads_are_read_by_the_shape_of_a_token():
    backend = CanaryBackend(CanaryConfig(inner="eager"))
    run, kv = torch.compile(forward, backend=backend), [torch.zeros(PAGES, 2, PAGE, DIM) for _ in range(2)]
    with torch.no_grad():
        run(kv, *torch.randn(2, 1, 2, DIM), torch.tensor([PAGE + 1]))
        kv[0].data[1, 1, 1, 3] += 1
        with pytest.raises(KVCacheViolation) as caught:
            run(kv, *torch.randn(2, 1, 2, DIM), torch.tensor([PAGE + 2]))
    assert [(v.check, v.slot) for v in caught.value.violations] == [("content", PAGE + 1)]
