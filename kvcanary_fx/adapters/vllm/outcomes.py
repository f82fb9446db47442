"""Hooks on vLLM's scheduler: its messages to the workers, and theirs to it.

With ``KVCANARY_VLLM_ABORT=request`` the forward that found a violation runs to its end, since it has other requests.
Before the scheduler processes the sampled tokens, the named requests are finished with an error: their tokens of
this step never leave the engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import RequestStatus

from ...reports.violation import one_line
from .blocks import journal_of
from .journal import ATTRIBUTE
from .patching import wrap_in_all

log = logging.getLogger("kvcanary")


def hook() -> None:
    """Follow every scheduler of this process."""
    wrap_in_all(Scheduler, "schedule", _schedule)
    wrap_in_all(Scheduler, "update_from_output", _update_from_output)


def _schedule(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    output = original(scheduler, *args, **kwargs)
    journal = journal_of(scheduler.kv_cache_manager.block_pool)
    if journal is not None:
        setattr(output, ATTRIBUTE, journal.take())
    return output


def _update_from_output(
    original: Callable[..., Any], scheduler: Any, scheduled: Any, output: Any, *args: Any, **kwargs: Any
) -> Any:
    flagged = getattr(output, ATTRIBUTE, ())
    if not flagged:
        return original(scheduler, scheduled, output, *args, **kwargs)
    ended = scheduler.finish_requests(set(flagged), RequestStatus.FINISHED_ERROR)
    outputs = original(scheduler, scheduled, output, *args, **kwargs)
    for request in ended:
        log.warning("kvcanary.vllm aborted request %s", one_line(request.request_id))
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
