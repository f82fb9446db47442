"""What follows a step: requests that a violation named are ended, and the counts of an engine that falls idle are told.

With ``KVCANARY_VLLM_ABORT=request`` the forward that found a violation goes on to its end, since other requests are in
it.  Before the scheduler takes in the sampled tokens, the named requests are finished with an error: their tokens of
this step never leave the engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import RequestStatus

from . import registry
from .patching import wrap_in_all

log = logging.getLogger("kvcanary")


def hook() -> None:
    """Follow every scheduler of this process."""
    wrap_in_all(Scheduler, "update_from_output", _update_from_output)


def _update_from_output(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    guard = registry.of_pool(scheduler.kv_cache_manager.block_pool)
    if guard is None:
        return original(scheduler, *args, **kwargs)
    flagged = guard.take_flagged()
    ended = scheduler.finish_requests(flagged, RequestStatus.FINISHED_ERROR) if flagged else []
    outputs = original(scheduler, *args, **kwargs)
    if not scheduler.has_unfinished_requests():
        guard.tell_counts()
    for request in ended:
        log.warning("kvcanary.vllm aborted request %s", request.request_id)
        told = outputs.setdefault(request.client_index, EngineCoreOutputs())
        told.outputs.append(
            EngineCoreOutput(
                request_id=request.request_id,
                new_token_ids=[],
                finish_reason=request.get_finished_reason(),
                events=request.take_events(),
                trace_headers=request.trace_headers,
            )
        )
    return outputs
