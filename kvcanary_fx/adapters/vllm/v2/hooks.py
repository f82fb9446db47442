"""Hooks on Model Runner V2."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any, cast

from vllm.config import CUDAGraphMode
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu.async_utils import AsyncOutput, AsyncPoolingOutput
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator import TargetDependentARSpeculator

from ....errors import EngineError
from .. import registry, state_groups
from ..journal import ATTRIBUTE
from ..patching import replace, replace_in_all, wrap, wrap_in_all
from ..pools import groups_with_drafts
from ..runners import CONTEXTS, IN_PARTS, guard
from ..settings import VllmSettings
from ..state_groups import StateGroup
from .connector import Bracket
from .drafts import rows_of_the_target, why_unguarded
from .guard import GuardV2
from .hybrids import BracketOfHybrid, GuardOfHybridV2, why_no_words, why_not_by_the_second
from .outputs import Readers
from .state_proof import prove_states

#: The guard of the runner that captures its graphs.
_CAPTURING: contextvars.ContextVar[GuardV2 | None] = contextvars.ContextVar("kvcanary_vllm_capturing", default=None)

#: The guard of the runner that samples, and proposes drafts after it.
_SAMPLING: contextvars.ContextVar[GuardV2 | None] = contextvars.ContextVar("kvcanary_vllm_sampling", default=None)

#: Of the outputs of this process.
READERS = Readers()


def hook(settings: VllmSettings, self_test: bool) -> None:
    """Guard every Model Runner V2 of this process from now on."""

    def initialize_kv_cache(
        original: Callable[..., Any], runner: Any, kv_cache_config: Any, is_profiling: bool = False, **kwargs: Any
    ) -> Any:
        made = original(runner, kv_cache_config, is_profiling, **kwargs)
        if not is_profiling:
            guard(runner, settings, self_test, _guard)
            if READERS.add(runner, _of(runner)):
                replace_in_all(GPUModelRunner, "sample_tokens", _sample_tokens)
        return made

    wrap_in_all(GPUModelRunner, "initialize_kv_cache", initialize_kv_cache)
    wrap_in_all(GPUModelRunner, "capture_model", _capture_model)
    replace_in_all(GPUModelRunner, "execute_model", _execute_model)
    replace_in_all(GPUModelRunner, "pool", _pool)
    wrap(TargetDependentARSpeculator, "_prefill", _prefill)
    wrap(StandaloneARSpeculator, "_prefill", _prefill_of_a_model)
    wrap(cudagraph_utils, "set_forward_context", _set_forward_context)
    replace(AsyncOutput, "get_output", _get_output)
    replace(AsyncPoolingOutput, "get_output", _get_output)


def _guard(runner: Any, settings: VllmSettings, self_test: bool, unguarded: dict[str, str]) -> GuardV2:
    why, groups, states = _unguarded(runner), [], []
    if why is None:
        states = state_groups.state_groups(runner, unguarded, why_not_by_the_second, why_no_words)
        elsewhere = state_groups.layers_of_states(runner)
        why_no_drafts = why_unguarded(getattr(runner, "speculator", None))
        groups = groups_with_drafts(runner, why_no_drafts, unguarded, elsewhere)
    if not groups:
        state_groups.note_alone(states, unguarded)
        why = why or "no KV cache group of this model can be guarded (the warnings above say why)"
        raise EngineError(f"{why}: KVCANARY_MODE=log or off runs it unguarded")
    if runner.num_speculative_steps:  # only here: it is called in each step, and a call around it takes 3 us (1B, H200)
        replace_in_all(GPUModelRunner, "postprocess_sampled", _postprocess_sampled)
    if _proved(runner, settings, states, unguarded):
        hybrid = GuardOfHybridV2(runner, settings, self_test, groups, states, unguarded)
        runner.kv_connector = BracketOfHybrid(runner.kv_connector, hybrid)
        return hybrid
    made = GuardV2(runner, settings, self_test, groups, unguarded)
    runner.kv_connector = Bracket(runner.kv_connector, made)
    return made


def _proved(runner: Any, settings: VllmSettings, states: list[StateGroup], unguarded: dict[str, str]) -> bool:
    """Whether there are states, and a changed byte in each is told.  If not, in mode ``log``, attention alone is
    guarded, and the reason is logged.

    Raises:
        SelfTestError: mode ``raise``, and one is not told.
    """
    try:
        if states:
            prove_states(runner, states, settings.session_config)
    except Exception as e:  # whatever it is: attention is guarded without them
        if settings.config.mode == "raise":
            raise
        state_groups.note_failed(states, " ".join(str(e).split()), unguarded)
        return False
    return bool(states)


def _unguarded(runner: Any) -> str | None:
    """Why the batches of a runner cannot be guarded; None if they can."""
    if runner.dcp_size > 1 or runner.pcp_manager is not None:
        return CONTEXTS
    return IN_PARTS if runner.ubatch_runner is not None else None


def _capture_model(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    found = _of(runner)
    if found is None:
        return original(runner, *args, **kwargs)
    token = _CAPTURING.set(found)
    try:
        with found.capturing():
            return original(runner, *args, **kwargs)
    finally:
        _CAPTURING.reset(token)


def _execute_model(original: Callable[..., Any]) -> Callable[..., Any]:
    def execute_model(
        runner: Any, scheduled: Any, intermediate_tensors: Any = None, dummy_run: bool = False, **kwargs: Any
    ) -> Any:
        found = getattr(runner, registry.OF_RUNNER, None)
        if found is None or dummy_run or found.scheduled is not None:
            return original(runner, scheduled, intermediate_tensors, dummy_run, **kwargs)
        told = getattr(scheduled, ATTRIBUTE, None)
        if told is not None and told.plain and found.lets_pass:
            found.scheduled, found.passing = scheduled, True
        else:
            found.begin_step(scheduled)
        try:
            if kwargs:
                return original(runner, scheduled, intermediate_tensors, **kwargs)
            return original(runner, scheduled, intermediate_tensors)
        finally:
            if found.open is None:  # as in a step like the last one
                found.scheduled = None
            else:
                found.end_step()

    return execute_model


def _sample_tokens(original: Callable[..., Any]) -> Callable[..., Any]:
    def sample_tokens(runner: Any, *args: Any, **kwargs: Any) -> Any:
        found = getattr(runner, registry.OF_RUNNER, None)
        if found is not None and found.follows_samples:
            return _sample_with(found, original, runner, *args, **kwargs)
        output = original(runner, *args, **kwargs)
        if found is not None and (type(output) is AsyncOutput or isinstance(output, AsyncOutput)):
            setattr(output, ATTRIBUTE, found)
        return output

    return sample_tokens


def _sample_with(found: GuardV2, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Where the guard follows what becomes of drafts, or looks for violations itself."""
    token = _SAMPLING.set(found)
    try:
        output = original(*args, **kwargs)
    finally:
        _SAMPLING.reset(token)
    if isinstance(output, AsyncOutput):
        found.sampled()
        setattr(output, ATTRIBUTE, found)
    return output


def _pool(original: Callable[..., Any]) -> Callable[..., Any]:
    """In the place of :func:`_sample_tokens` where a model samples nothing: embeddings, scores."""

    def pool(runner: Any) -> Any:
        output, found = original(runner), getattr(runner, registry.OF_RUNNER, None)
        if found is not None and isinstance(output, AsyncPoolingOutput):
            if found.follows_samples:
                found.sampled()
            setattr(output, ATTRIBUTE, found)
        return output

    return pool


def _postprocess_sampled(original: Callable[..., Any]) -> Callable[..., Any]:
    def postprocess_sampled(
        runner: Any,
        idx_mapping: Any,
        sampled_tokens: Any,
        num_sampled: Any,
        num_rejected: Any,
        query_start_loc: Any = None,
        **kwargs: Any,
    ) -> Any:
        found = _SAMPLING.get()  # None where it is told of an earlier step, on another rank than the last
        if found is not None and query_start_loc is not None:
            found.drafting.verified(query_start_loc, num_rejected)
        return original(runner, idx_mapping, sampled_tokens, num_sampled, num_rejected, query_start_loc, **kwargs)

    return postprocess_sampled


def _prefill(
    original: Callable[..., Any],
    speculator: Any,
    num_reqs: int,
    num_tokens: int,
    attn_metadata: Any,
    slot_mappings: Any,
    num_tokens_across_dp: Any,
    cudagraph_runtime_mode: CUDAGraphMode = CUDAGraphMode.NONE,
    **kwargs: Any,
) -> Any:
    given = num_reqs, num_tokens, attn_metadata, slot_mappings, num_tokens_across_dp, cudagraph_runtime_mode
    found = _CAPTURING.get() or _SAMPLING.get()
    if found is None:
        return original(speculator, *given, **kwargs)
    with found.draft_forward(num_tokens, cudagraph_runtime_mode == CUDAGraphMode.NONE):
        return original(speculator, *given, **kwargs)


def _prefill_of_a_model(
    original: Callable[..., Any], speculator: Any, input_batch: Any, *args: Any, **kwargs: Any
) -> Any:
    found = _SAMPLING.get()  # no graph is captured of it
    if found is None:
        return original(speculator, input_batch, *args, **kwargs)
    with found.draft_forward(input_batch.num_tokens, whole=True, rows=rows_of_the_target(input_batch)):
        return original(speculator, input_batch, *args, **kwargs)


def _get_output(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_output(output: Any) -> Any:
        made, only = original(output), READERS.only
        found = getattr(output, ATTRIBUTE, None) if only is None else only()
        if found is not None:
            verdict = found.read()
            if verdict is not None:
                setattr(made, ATTRIBUTE, verdict)
        return made

    return get_output


def _set_forward_context(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    context, found = original(*args, **kwargs), _CAPTURING.get()
    if found is None:
        return context
    whole = kwargs["cudagraph_runtime_mode"] == CUDAGraphMode.NONE  # vLLM captures all of such a forward, or nothing
    return _both(context, found.dummy_forward(kwargs["num_tokens"], whole))


@contextlib.contextmanager
def _both(context: Any, forward: Any) -> Iterator[None]:
    with context, forward:
        yield


def _of(runner: Any) -> GuardV2 | None:
    return cast("GuardV2 | None", registry.of_runner(runner))  # what guards these runners
