"""The session of a serving engine, which knows the pools, the requests and the plan of each forward.

::

    canary = kvcanary_fx.install_canary(KVPool(layers=[(k, v), ...], request_table=req_to_token))
    model = torch.compile(model, backend=canary.backend)
    ...
    with canary.step(batch):
        with canary.forward():
            logits = model(...)

``install_canary`` returns None when the canary is off; :func:`step` and :func:`forward` take that None and cost
nothing then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from .config import CanaryConfig, override
from .engine.arguments import require_whole
from .engine.forward import Schedule
from .engine.kv_pool import KVPool
from .engine.session import EngineSession
from .errors import EngineError
from .proof import doctor

#: One shared context that does nothing, so that a hook of a canary that is off costs nothing.
OFF: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


def install_canary(
    *pools: KVPool,
    config: CanaryConfig | None = None,
    max_requests: int | None = None,
    max_tokens: int | None = None,
    sweep_every: int = 0,
    health_every: int = 64,
    stats_every: int = 0,
    window_report_every: int = 0,
    self_test: bool = False,
    **settings: Any,
) -> EngineSession | None:
    """Guard the pools of an engine.

    Args:
        pools: at least one; each group of layers with its own slot numbers is a pool.
        config: None takes the environment's settings.
        max_requests, max_tokens: sizes of the largest batch, where CUDA graphs are captured.
        sweep_every: steps between two sweeps over all written slots, 0 for none.
        health_every: steps between two proofs that every layer's writes are recorded, 0 for none.
        stats_every: steps between two log lines with the counts, 0 for none.
        window_report_every: steps between two log lines on how the groups of a hybrid model differ
            (:meth:`EngineSession.window_report`), 0 for none.
        self_test: plant one fault per check on scratch pools of the same layout first, and refuse to start where
            one is not reported.  Takes some seconds.
        settings: settings of :class:`CanaryConfig` that override ``config``.

    Returns:
        The session; None if the canary is off.

    Raises:
        EngineError: pools are invalid, or share a name.
        SelfTestError: with ``self_test``, a check does not work here.
        UnknownSettingError, InvalidSettingError: a setting that does not exist, or a value it cannot have.
    """
    resolved = override(CanaryConfig.from_env() if config is None else config, settings, "install_canary()")
    if resolved.mode == "off":
        return None
    _require_pools(pools)
    for name, size in {"max_requests": max_requests, "max_tokens": max_tokens}.items():
        if size is not None:
            require_whole(name, size, 1, f"{name.removeprefix('max_')}, or None")
    if self_test:
        doctor.require_health(pools, resolved)
    schedule = Schedule(sweep_every, health_every, stats_every, window_report_every)
    return EngineSession(pools, resolved, max_requests, max_tokens, schedule)


def _require_pools(pools: Sequence[Any]) -> None:
    for pool in pools:
        if not isinstance(pool, KVPool):
            raise EngineError(
                f"install_canary takes KVPools, not a {type(pool).__name__}: "
                "install_canary(KVPool(layers=[(k, v), ...], request_table=table))"
            )


def step(session: EngineSession | None, batch: Any = None) -> contextlib.AbstractContextManager[Any]:
    """``session.step(batch)``, or nothing where the canary is off."""
    return OFF if session is None else session.step(batch)


def forward(session: EngineSession | None, index: int = 0, batch: Any = None) -> contextlib.AbstractContextManager[Any]:
    """``session.forward(index, batch)``, or nothing where the canary is off."""
    return OFF if session is None else session.forward(index, batch)
