"""One flip in each half of each guarded layer of an engine, of either runner, on a CPU or a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm_rig import Rig, prompt

#: Of the token that is flipped, and when: the request decodes.
POSITION, STEP = 5, 4

#: Of one that was loaded: also in a window.
LOADED_POSITION = 90

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def flips(rig: Rig, length: int = 40) -> dict[str, Any]:
    """What was told of each; ``ok`` if it was the layer, half, request and position, and nothing else."""
    found: dict[str, Any] = {}
    drafts = rig.guard.drafts.groups if rig.guard.drafts is not None else []
    for group in (*rig.guard.groups, *drafts):
        for layer, halves in group.layers.items():
            for half, name in zip(halves, ("latent", "rope") if group.mla else "KV", strict=True):
                found[f"{layer} {name}"] = _flip(rig, group, half, layer, name, f"{len(found)}", length)
    return found


def loads(rig: Rig) -> dict[str, Any]:
    """:func:`flips` in blocks that a KV connector has loaded: what is stored is gone from the prefix cache each time.

    With ``ENGINE`` naming a connector, as ``{"kv_transfer_config": {"kv_connector": "OffloadingConnector", ...}}``.
    """
    text = prompt(700, 96)
    rig.add("stored", text, length=8)
    rig.run()
    found: dict[str, Any] = {}
    for group in rig.guard.groups:
        for layer, halves in group.layers.items():
            for half, name in zip(halves, ("latent", "rope") if group.mla else "KV", strict=True):
                rig.engine.reset_prefix_cache()
                before = _loaded(rig)

                def is_loaded(_step: int, before: int = before) -> bool:
                    return _loaded(rig) > before

                asked = dict(length=16, text=text, position=LOADED_POSITION, when=is_loaded)
                row = _flip(rig, group, half, layer, name, f"{len(found)}", **asked)
                row["loaded"] = _loaded(rig) - before
                found[f"{layer} {name}"] = row
    return dict(ok=all(row["ok"] for row in found.values()), table=found)


def _loaded(rig: Rig) -> int:
    """Slots that a connector has filled, compared or taken as they are."""
    return sum(pool.adopted + pool.expected for session in rig.guard.sessions for pool in session.pools.values())


def stored(rig: Rig) -> dict[str, Any]:
    """A bit of each block in the host's memory is flipped and loaded, one tensor of an OffloadingConnector each time.

    ``ok`` if it was told as what came with a transfer, in a layer of each group, others each time, and nothing else:
    a layer of each group shares the tensor.  Of a block that leaves a window unread it is told when it is released.
    """
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    worker = get_kv_transfer_group().connector_worker.worker
    tensors = worker.host if hasattr(worker, "host") else worker._store_handler.dst_tensors
    text, found = prompt(700, 96), {}
    for number, tensor in enumerate(tensors):
        before = len(rig.session.violations())
        for request in ("stored", "loaded"):
            # what is loaded with the bit goes into the store again
            rig.engine.reset_prefix_cache(reset_connector=request == "stored")
            if request == "loaded":
                tensor[..., 0].bitwise_xor_(1 << 4)
                counted = _loaded(rig)
            rig.add(f"{request} {number}", text, length=4)
            rig.run()
        told = rig.session.violations()[before:]
        what = {(v.check, "" if v.phase == "life" else v.text, str(v.request).rpartition("-")[0]) for v in told}
        layers = sorted({v.layer for v in told})
        right = what - {("content", "", f"loaded {number}")} == {("content", "transfer", f"loaded {number}")}
        right = right and len(layers) == len(rig.guard.groups)
        found[f"tensor {number}"] = dict(ok=right, layers=layers, told=len(told), loaded=_loaded(rig) - counted)
    each = [layer for row in found.values() for layer in row["layers"]]
    return dict(ok=all(row["ok"] for row in found.values()) and len(each) == len(set(each)), table=found)


def _flip(
    rig: Rig,
    group: Any,
    half: torch.Tensor,
    layer: str,
    name: str,
    request: str,
    length: int,
    text: list[int] | None = None,
    position: int = POSITION,
    when: Callable[[int], bool] = STEP.__eq__,
) -> dict[str, Any]:
    before = [len(session.violations()) for session in rig.guard.sessions]
    rig.add(request, text or prompt(400 + int(request), 45), length=length)
    flipped: list[int] = []

    def at(step: int) -> None:
        if not flipped and when(step):
            page = rig.pages(request)[group.number][position // group.page_size]
            slot = page * group.page_size + position % group.page_size
            row = half[slot // half.shape[1], slot % half.shape[1]]  # the kernel's pages may be smaller
            cell = row[(0,) * row.dim()]
            cell.view(_WORDS[cell.element_size()]).bitwise_xor_(1 << 4)
            flipped.append(step)

    rig.run(at)
    told = [v for session, n in zip(rig.guard.sessions, before, strict=True) for v in session.violations()[n:]]
    where = {(v.check, v.layer, v.half, str(v.request).rpartition("-")[0], v.position) for v in told}
    right = where == {("content", layer, name, request, position)}
    return dict(ok=right, told=[str(v.line())[:160] for v in told[:2]])
