"""The entry point: what vLLM runs in each process before it makes its configuration or a model."""

from __future__ import annotations

from ...config import asked_for
from . import settings


def register() -> None:
    """Connect the canary to vLLM if ``KVCANARY_MODE`` says so; otherwise leave vLLM exactly as it is.

    vLLM may call this several times in a process.

    Raises:
        UnknownSettingError, InvalidSettingError: a ``KVCANARY_`` variable names no setting, or cannot be read.
        EngineError: this vLLM lacks something that the canary hooks into, or is set up in a way that it cannot guard.
    """
    if not asked_for():
        return
    from . import connect  # imports vLLM, torch and the kernels: only for those who asked

    connect.connect(settings.from_env())
