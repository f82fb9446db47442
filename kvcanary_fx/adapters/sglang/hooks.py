"""What SGLang calls: when a model runner has its pools, for each batch of a model, and around attention."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from ...config import CanaryConfig
from ..versions import Tested
from .runner import GuardedRunner, why_not

log = logging.getLogger("kvcanary")

TESTED = Tested(
    "sglang", "SGLang", "0.5.23", "0.5.24", "the checks are proved on scratch pools of the same layout first"
)


def attach(runner: Any, config: CanaryConfig) -> None:
    """Guard a model runner whose pools are allocated, or log why not."""
    reason = why_not(runner)
    if reason is not None:
        log.warning("kvcanary.unguarded %s of SGLang: %s", "draft" if runner.is_draft_worker else "model", reason)
        return
    import sglang

    runner.kvcanary = GuardedRunner(runner, config, self_test=TESTED.warn_outside(sglang.__version__))
    log.info("kvcanary.sglang guards %s", runner.kvcanary.session.pool.describe())


def keep_history(result: Any, owner: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
    """Attach each request's own tokens to the model's batch: SGLang keeps them on the host."""
    result.kvcanary_history = [[*r.origin_input_ids, *r.output_ids] for r in batch.reqs]


def attention(
    original: Callable[..., Any], layer: Any, q: Any, k: Any, v: Any, forward_batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """A layer's attention, KV write included, between the check of what it reads and the check of what it wrote."""
    guard = GuardedRunner.running
    if guard is None:
        return original(layer, q, k, v, forward_batch, *args, **kwargs)
    return guard.attention(layer, k, v, lambda: original(layer, q, k, v, forward_batch, *args, **kwargs))
