"""Hooks on vLLM's scheduler: its messages to the workers, and theirs to it.

Unless the engine is to end, the forward that found a violation runs to its end, since it has other requests.  Before
the scheduler processes the sampled tokens, damaged blocks leave the prefix cache; with ``abort`` or ``recompute`` as
``KVCANARY_VLLM_ON_VIOLATION`` all requests that read them end, or begin again from their tokens: what they sampled in
this step never leaves the engine.  Under a budget damage may be older than that: log and clients learn how many tokens
had been sent.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import RequestStatus

from ...errors import EngineError
from ...reports.untrusted import one_line
from . import counts, load_failures, stores
from .blocks import JOURNAL, look_for_holders
from .identity import namespace
from .journal import ATTRIBUTE, NOTHING, PLAIN
from .patching import replace_in_all
from .verdict import Verdict

log = logging.getLogger("kvcanary")

#: How often a request begins again; damage that comes back has a cause that stays, and the request ends.
TRIES = 3


#: How often each request has begun again, by its id.
_AGAIN: Counter[str] = Counter()

#: What the clients of requests that began again are told when these end, by their ids.
_LATE: dict[str, str] = {}

#: How many tokens each request had when it began again last, by its id.
_BEGAN_WITH: dict[str, int] = {}


def hook() -> None:
    """Follow every scheduler of this process."""
    replace_in_all(Scheduler, "schedule", _schedule)
    replace_in_all(Scheduler, "update_from_output", _update_from_output)
    load_failures.hook()


def _schedule(original: Callable[..., Any]) -> Callable[..., Any]:
    def schedule(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(scheduler, *args, **kwargs)
        journal = getattr(scheduler.kv_cache_manager.block_pool, JOURNAL, None)  # in each step, where each call counts
        if journal is not None:
            for new in output.scheduled_new_reqs:
                request = scheduler.requests[new.req_id]
                if request.lora_request is not None or request.cache_salt:
                    journal.name(new.req_id, namespace(request.lora_request, request.cache_salt))
            message = journal.message
            if journal.handed_out or message.events or message.namespaces:
                message = journal.take(output)
            else:
                cached = output.scheduled_cached_reqs
                message = PLAIN
                if (
                    output.scheduled_new_reqs
                    or output.finished_req_ids
                    or output.preempted_req_ids
                    or getattr(output, "kv_cache_block_copies", None)
                    or cached.resumed_req_ids
                    or any(cached.new_block_ids)
                ):
                    message = NOTHING
            setattr(output, ATTRIBUTE, message)
            if journal.undecided:
                look_for_holders(scheduler, journal)
        return output

    return schedule


def _update_from_output(original: Callable[..., Any]) -> Callable[..., Any]:
    def update_from_output(scheduler: Any, scheduled: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
        for request in scheduled.finished_req_ids if _AGAIN else ():
            for known in (_AGAIN, _LATE, _BEGAN_WITH):
                known.pop(request, None)
        verdict = getattr(output, ATTRIBUTE, None)
        if verdict is None:
            outputs = original(scheduler, scheduled, output, *args, **kwargs)
            if _LATE:
                _tell_late(outputs)
            return outputs
        ended = contain(scheduler, verdict, _AGAIN, _LATE, _BEGAN_WITH)
        outputs = original(scheduler, scheduled, output, *args, **kwargs)
        _tell_clients(outputs, ended, verdict)
        return outputs

    return update_from_output


def contain(
    scheduler: Any, verdict: Verdict, again: Counter[str], late: dict[str, str], began_with: dict[str, int]
) -> list[Any]:
    """Keep damage from requests: before the tokens of the step are processed.

    Args:
        again: how often each request has begun again; counted here.
        late: what the clients of requests that begin again are told when these end; added to here.
        began_with: how many tokens each had when it began again last; added to here.

    Returns:
        The requests that ended.
    """
    manager = scheduler.kv_cache_manager
    tables = {request: manager.get_block_ids(request) for request in scheduler.requests}
    now = {name: request.num_output_tokens for name, request in scheduler.requests.items()}
    readers = verdict.readers(tables, {name for name, tokens in began_with.items() if now.get(name) == tokens})
    if manager.enable_caching:
        manager.evict_blocks(_evicted(verdict, readers, tables, manager.block_pool))
    hit = [r for r in reversed(scheduler.running) if r.request_id in readers]
    preempted = [r for r in hit if again[r.request_id] < TRIES and _begins_again(r, verdict.outcome)]
    for request in preempted:  # in reverse: each goes to the front of the queue
        again[request.request_id] += 1
        began_with[request.request_id] = request.num_output_tokens
        if verdict.late:
            late[request.request_id] = _reason(verdict, request)
        _preempt(scheduler, request)
    stores.compute_anew(scheduler, preempted)
    left = set(readers) - {request.request_id for request in preempted} if verdict.outcome != "log" else set()
    _require_ends(verdict, [scheduler.requests[name] for name in left])
    ended: list[Any] = scheduler.finish_requests(left, RequestStatus.FINISHED_ERROR)
    stores.drop(scheduler)
    _log(verdict, preempted[::-1], ended)
    return ended


def _require_ends(verdict: Verdict, requests: Sequence[Any]) -> None:
    """Refuse to end a pooling model's request with an error, for which vLLM's output processor has no place."""
    stuck = [request.request_id for request in requests if request.pooling_params is not None]
    if stuck:
        raise EngineError(
            f"kv_cache_corruption {verdict.id}: {_listed(stuck)}: damage that comes back, and vLLM cannot end a "
            "request of a pooling model with an error. The engine ends: the violations above say what to look for"
        )


def _log(verdict: Verdict, recomputed: Sequence[Any], ended: Sequence[Any]) -> None:
    log.warning(
        "kvcanary.vllm kv_cache_corruption %s: %d violation%s; blocks %s left the prefix cache; recomputed: %s; "
        "aborted: %s%s",
        verdict.id,
        verdict.total,
        "s" * (verdict.total != 1),
        _listed(sorted(verdict.blocks())),
        _listed([request.request_id for request in recomputed]),
        _listed([request.request_id for request in ended]),
        _sent([*recomputed, *ended]) if verdict.late else "",
    )


def _begins_again(request: Any, outcome: str) -> bool:
    """Whether a request that read damage is computed again.  One of a pooling model is with ``abort``, too: vLLM's
    output processor takes no error for it, and its server would end."""
    return outcome == "recompute" or (outcome == "abort" and request.pooling_params is not None)


def _sent(requests: Sequence[Any]) -> str:
    """How many tokens each request had sent, for the log."""
    sent = [f"{one_line(request.request_id)} {request.num_output_tokens}" for request in requests]
    return f"; tokens sent before: {_listed(sent)}"


def _reason(verdict: Verdict, request: Any) -> str:
    """Why a request ended, or began again, for its client."""
    sent = f", {request.num_output_tokens} tokens had been sent" if verdict.late else ""
    return f"kv_cache_corruption {verdict.id}{sent}"


def _tell_late(outputs: Any) -> None:
    """Tell the clients of requests that began again, and end now."""
    for told in outputs.values():
        for output in told.outputs:
            if output.finish_reason is not None and output.request_id in _LATE:
                reason = _LATE.pop(output.request_id)
                output.stop_reason = reason if output.stop_reason is None else output.stop_reason


def _evicted(
    verdict: Verdict, readers: dict[str, int], tables: dict[str, tuple[list[int], ...]], pool: Any
) -> set[int]:
    """The blocks that nobody may find any more: those that are damaged, and what was computed from them."""
    if verdict.late or verdict.everyone:
        return {block.block_id for block in pool.blocks if not block.is_null}
    later = {block for request, first in readers.items() for table in tables[request] for block in table[first:]}
    return verdict.blocks() | later


def _preempt(scheduler: Any, request: Any) -> None:
    """As ``reset_prefix_cache(reset_running_requests=True)`` does it: also what this step sampled is dropped."""
    scheduler.running.remove(request)
    scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
    scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
    request.is_prefill_chunk = True  # a draft's guesses of this step are not for its next one


def _tell_clients(outputs: Any, ended: Sequence[Any], verdict: Verdict) -> None:
    reasons = {request.request_id: _reason(verdict, request) for request in ended}
    counts.note_ended({name: reason.removeprefix("kv_cache_corruption ") for name, reason in reasons.items()})
    for request in ended:
        told = outputs.setdefault(request.client_index, EngineCoreOutputs())
        told.outputs.append(
            EngineCoreOutput(
                request_id=request.request_id,
                new_token_ids=[],
                finish_reason=request.get_finished_reason(),
                stop_reason=reasons[request.request_id],
                events=request.take_events(),
                trace_headers=request.trace_headers,
            )
        )


def _listed(things: Sequence[Any], shown: int = 20) -> str:
    """The first of some things, as text."""
    more = f" and {len(things) - shown} more" if len(things) > shown else ""
    return (" ".join(one_line(thing) for thing in things[:shown]) + more) or "none"
