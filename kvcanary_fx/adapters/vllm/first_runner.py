"""Model Runner V1 and its drafts are compared with the table and hooked when vLLM imports them.

An engine with the second runner never does: it has 59 modules of vLLM less, and another version may have no first one.
"""

from __future__ import annotations

import functools

from . import known
from .hook_points import FIRST_RUNNER, HOOK_POINTS, OPERATIONS
from .late_imports import when_imported
from .settings import VllmSettings


def hook(settings: VllmSettings, self_test: bool) -> None:
    """Guard every first runner of this process from now on."""
    when_imported(FIRST_RUNNER, functools.partial(_imported, settings, self_test))


def _imported(settings: VllmSettings, self_test: bool) -> None:
    needed = [point for point in HOOK_POINTS if point.late or point.need == OPERATIONS]
    if known.can_be_guarded(settings.config.mode, needed):
        from . import drafting, runner

        runner.hook(settings, self_test)
        drafting.hook()
