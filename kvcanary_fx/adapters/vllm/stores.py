"""What KV connectors have stored, when a block turns out to be damaged.

A connector may have stored the block after it was damaged.  What it loads is taken as it is, or damage that was told
already is told once more (:mod:`.offloaded`), so a request that begins again would read the damage from there.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

log = logging.getLogger("kvcanary")

#: vLLM's connectors whose store is this engine's own, so that all of it can be dropped.  Others share theirs: vLLM's
#: Mooncake connector would empty the store of a cluster.
_OWN = frozenset(("OffloadingConnector", "SimpleCPUOffloadConnector"))


def compute_anew(scheduler: Any, requests: Iterable[Any]) -> None:
    """Let requests that begin again load nothing, nor take up prefixes: as vLLM itself does it for those that ask for
    the log probabilities of their prompts.

    Loading would also end the engine: vLLM's OffloadingConnector (0.32.0) asserts that a request that was preempted
    since the last step has no load under way.
    """
    if scheduler.connector is not None:
        for request in requests:
            request.skip_reading_prefix_cache = True


def drop(scheduler: Any) -> None:
    """Drop all that this engine's connectors have stored, and say in the log which ones keep it.

    Args:
        scheduler: between two of its steps; requests that end have ended.
    """
    if scheduler.connector is None:
        return
    kept = []
    for connector in getattr(scheduler.connector, "_connectors", None) or [scheduler.connector]:  # MultiConnector's
        own = any(kind.__name__ in _OWN for kind in type(connector).__mro__)
        if not own or connector.reset_cache() is False:
            kept.append(type(connector).__name__)
    if kept:
        log.warning(
            "kvcanary.vllm what %s has stored of these blocks is not dropped, as others may share it or a transfer is "
            "under way: a later request may load the damage. Empty that store if the block was damaged before it was "
            "stored",
            " and ".join(kept),
        )
