"""Hooks around the proposals of vLLM's drafters.  See :mod:`.drafts`."""

from __future__ import annotations

import contextlib
import contextvars
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from vllm.v1.spec_decode import llm_base_proposer
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

from . import registry
from .drafts import Proposal
from .patching import wrap, wrap_in_all

_PROPOSAL: contextvars.ContextVar[Proposal | None] = contextvars.ContextVar("kvcanary_vllm_proposal", default=None)


def hook() -> None:
    """Guard every draft of this process from now on."""
    wrap_in_all(SpecDecodeBaseProposer, "propose", _propose)
    wrap_in_all(SpecDecodeBaseProposer, "build_per_group_and_layer_attn_metadata", _build_metadata)
    wrap(llm_base_proposer, "set_forward_context", _set_forward_context)


def _propose(original: Callable[..., Any], drafter: Any, *args: Any, **kwargs: Any) -> Any:
    guard = registry.of_drafter(drafter)
    if guard is None or guard.drafts is None:
        return original(drafter, *args, **kwargs)
    given = inspect.signature(original).bind(drafter, *args, **kwargs).arguments
    rejected = given.get("num_rejected_tokens_gpu")
    with guard.proposing(drafter, rejected, given["target_token_ids"], given["next_token_ids"]) as proposal:
        token = _PROPOSAL.set(proposal)
        try:
            return original(drafter, *args, **kwargs)
        finally:
            _PROPOSAL.reset(token)


def _build_metadata(original: Callable[..., Any], drafter: Any, common: Any, *args: Any, **kwargs: Any) -> Any:
    proposal = _PROPOSAL.get()
    if proposal is not None:
        proposal.common = common
    return original(drafter, common, *args, **kwargs)


def _set_forward_context(original: Callable[..., Any], metadata: Any, *args: Any, **kwargs: Any) -> Any:
    context, proposal = original(metadata, *args, **kwargs), _PROPOSAL.get()
    return context if proposal is None else _both(context, proposal.forward(metadata, kwargs["slot_mapping"]))


@contextlib.contextmanager
def _both(context: Any, forward: Any) -> Iterator[None]:
    with context, forward:
        yield
