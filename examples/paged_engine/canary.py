"""How this engine describes its pools to the canary.  Everything else is in the lines marked ``# canary``."""

from __future__ import annotations

from typing import Any

import torch
from config import EngineConfig
from kv_store import Group
from memory import Memory

import kvcanary_fx
from kvcanary_fx import KVPool


def install(config: EngineConfig, groups: list[Group], memory: Memory, **settings: Any) -> Any:
    """The target's session (:class:`kvcanary_fx.EngineSession`); None with ``mode="off"``."""
    common: dict[str, Any] = dict(table_page_size=config.page, reserved=tuple(range(config.page)))
    common["layer_names"] = groups[0].names
    pools = [KVPool(groups[0].layers, memory.table, name="kv", **common)]
    for group in groups[1:]:
        window: dict[str, Any] = dict(slot_map=memory.slot_map, window=group.window, layer_names=group.names)
        pools.append(KVPool(group.layers, memory.table, name=group.name, **common | window))
    session = kvcanary_fx.install_canary(*pools, inner=config.inner, **settings)
    if session is not None:
        memory.full.watchers.append(session.pools["kv"])
        if memory.window:
            memory.window.watchers.append(session.pools["window"])
        session.mark_ready()
    return session


def install_draft(
    config: EngineConfig, group: Group, memory: Memory, table: torch.Tensor, offset: int, **settings: Any
) -> Any:
    """A draft's session: same slots, but the slot of position p holds token p + ``offset``.

    Args:
        table: the request table that the draft reads, the target's or its own.
    """
    pool = KVPool(
        group.layers,
        table,
        name=group.name,
        layer_names=group.names,
        table_page_size=config.page,
        reserved=tuple(range(config.page)),
        token_offset=offset,
    )
    if config.capture:  # a graph keeps the addresses of the step inputs: they get all the room they will need
        settings = settings | dict(max_requests=config.views, max_tokens=max(config.views, 2 * config.token_budget))
    session = kvcanary_fx.install_canary(pool, inner=config.inner, **settings)
    if session is not None:
        memory.full.watchers.append(session.pool)
        session.mark_ready()
    return session
