"""The entry point: vLLM calls it in each process before it makes its configuration or a model."""

from __future__ import annotations

from ...config import asked_for
from . import settings


def register() -> None:
    """Connect the canary to vLLM if ``KVCANARY_MODE`` asks for it; otherwise leave vLLM unchanged.

    vLLM may call this several times in a process.

    Raises:
        UnknownSettingError, InvalidSettingError: a ``KVCANARY_`` variable names no setting, or cannot be read.
        EngineError: this vLLM lacks a hook point, or is configured in a way that the canary cannot guard.
    """
    if not asked_for():
        return
    from . import connect  # imports vLLM, torch and the kernels: only if the canary is on

    connect.connect(settings.from_env())
