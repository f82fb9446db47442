"""Whether this vLLM is one that the canary knows, decided before anything of it is hooked."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ...errors import EngineError
from ...reports import json_lines
from ..versions import Tested
from .hook_points import HOOK_POINTS, OPERATIONS, HookPoint, differences

log = logging.getLogger("kvcanary")

#: As docs/vllm.md lists them.
TESTED = Tested(
    "vllm",
    "vLLM",
    "0.32.0",
    "0.32.1",
    "the checks are proved on scratch pools of the same layout before the first request, and the engine does not start "
    "if one stays silent",
)


def can_be_guarded(mode: str, table: Sequence[HookPoint] | None = None) -> bool:
    """Whether this vLLM has all that the canary hooks into, as the table says; if not, it is logged.

    Args:
        table: by default all that is hooked into at once.

    Raises:
        EngineError: it has not, and the mode is ``raise``.
    """
    import vllm
    from vllm.platforms import current_platform

    log_as_vllm_does()
    table = [point for point in HOOK_POINTS if not point.late] if table is None else table
    unknown = differences(table, current_platform.is_cpu())
    if not unknown:
        return True
    text = unknown_version(vllm.__version__, unknown)
    if mode == "raise":
        raise EngineError(text)
    log.warning("kvcanary.unguarded nothing is guarded: %s", text)
    _tell_metrics(text, table)
    return False


def _tell_metrics(why: str, table: Sequence[HookPoint]) -> None:
    """Say it in the metrics endpoint, if that at least is known."""
    if any(not differences([point], on_cpu=False) for point in table if point.need == OPERATIONS):
        from . import counts, metrics

        metrics.hook()
        counts.write_unguarded({"all": why})


def unknown_version(version: str, unknown: Sequence[str]) -> str:
    """Why a version of vLLM cannot be guarded, and the remedy.

    Args:
        unknown: what is missing or has another signature.
    """
    return (
        f"this vLLM ({version}) is not one that kvcanary_fx knows: {'; '.join(unknown)}. "
        f"Install vllm=={TESTED.first}, or set KVCANARY_MODE=off to run this one unguarded"
    )


def log_as_vllm_does() -> None:
    """Send our log lines where vLLM's go; lines of JSON to stderr, since vLLM would write its own words before them."""
    if json_lines.follow_environment():
        return
    ours, theirs = logging.getLogger("kvcanary"), logging.getLogger("vllm")
    known = ours.handlers + (logging.getLogger().handlers if ours.propagate else [])
    for handler in theirs.handlers:
        if handler not in known:  # it would write each line twice
            ours.addHandler(handler)
    ours.setLevel(min(ours.level or logging.INFO, logging.INFO))
