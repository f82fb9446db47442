"""Settings of the adapter: those of every session, and what happens to a request with a violation."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Mapping
from typing import Literal

from ...config import CanaryConfig, asked_for
from ...errors import InvalidSettingError

#: In mode ``raise``: what a violation ends, the ``engine`` or the ``request`` it names.
ABORT_VARIABLE = "KVCANARY_VLLM_ABORT"

#: Directory in which the processes of one vLLM write their counts for its metrics endpoint.
COUNTS_VARIABLE = "KVCANARY_VLLM_COUNTS"

_KNOWN = (ABORT_VARIABLE, COUNTS_VARIABLE)


@dataclasses.dataclass(frozen=True)
class VllmSettings:
    """How a vLLM is guarded.

    Attributes:
        config: of its session.
        abort: in mode ``raise``, whether a violation ends the engine or the request that it names.
    """

    config: CanaryConfig
    abort: Literal["engine", "request"] = "engine"

    @property
    def session_config(self) -> CanaryConfig:
        """The session's settings: one that aborts requests must not raise, since the engine goes on."""
        return dataclasses.replace(self.config, mode="log") if self.aborts_requests else self.config

    @property
    def aborts_requests(self) -> bool:
        return self.config.mode == "raise" and self.abort == "request"

    def cache_key(self, version: str) -> str:
        """What vLLM's compile caches must distinguish: our version, and the settings that change a graph.

        Args:
            version: of kvcanary_fx.
        """
        return hashlib.sha256(f"kvcanary_fx {version} {sorted(self.config.checks)}".encode()).hexdigest()[:10]


def left_out(environ: Mapping[str, str] | None = None) -> str | None:
    """Why vLLM would not load the plugin with these variables, as text; None if it would, or if the canary is off.

    vLLM imports nothing of a plugin that ``VLLM_PLUGINS`` does not name, so there the canary itself cannot report it.
    """
    environ = os.environ if environ is None else environ
    named = environ.get("VLLM_PLUGINS")
    if named is None or "kvcanary" in named.split(",") or not asked_for(environ):
        return None
    return (
        f"VLLM_PLUGINS={named} leaves the canary out, so that vLLM runs unguarded and without a word whatever "
        f"KVCANARY_MODE is: VLLM_PLUGINS={','.join(filter(None, [named, 'kvcanary']))}"
    )


def from_env(environ: Mapping[str, str] | None = None) -> VllmSettings:
    """The settings in the environment.

    Raises:
        UnknownSettingError, InvalidSettingError: naming the variable; also for one that has no effect in this mode.
    """
    environ = os.environ if environ is None else environ
    for name in environ:
        if name.startswith("KVCANARY_VLLM_") and name not in _KNOWN:
            raise InvalidSettingError(name, "the environment", environ[name], f"one of {', '.join(_KNOWN)}")
    abort = environ.get(ABORT_VARIABLE, "engine")
    if abort not in ("engine", "request"):
        raise InvalidSettingError(ABORT_VARIABLE, "the environment", abort, "'engine' or 'request'")
    config = CanaryConfig.from_env(environ)
    if ABORT_VARIABLE in environ and config.mode != "raise":
        expected = f"unset with KVCANARY_MODE={config.mode}, which ends nothing: it belongs to KVCANARY_MODE=raise"
        raise InvalidSettingError(ABORT_VARIABLE, "the environment", abort, expected)
    return VllmSettings(config, abort)  # type: ignore[arg-type]
