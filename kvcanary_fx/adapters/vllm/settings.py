"""Settings of the adapter: those of every session, and what happens to a request with a violation."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
from collections.abc import Mapping

from ...config import CanaryConfig, asked_for
from ...errors import InvalidSettingError, UnknownSettingError

log = logging.getLogger("kvcanary")

#: What a violation does; by default what ``KVCANARY_MODE`` says.
ON_VIOLATION_VARIABLE = "KVCANARY_VLLM_ON_VIOLATION"

#: What looks like it: ``on_violation`` is a setting, but a function, which no environment can hold.
_MISTAKEN = "KVCANARY_ON_VIOLATION"

#: Its values.
OUTCOMES = ("recompute", "abort", "raise", "log")

#: The deprecated way to say it.
ABORT_VARIABLE = "KVCANARY_VLLM_ABORT"
_MEANT = {"request": "abort", "engine": "raise"}

#: Directory in which the processes of one vLLM write their counts for its metrics endpoint.
COUNTS_VARIABLE = "KVCANARY_VLLM_COUNTS"

_KNOWN = (ON_VIOLATION_VARIABLE, ABORT_VARIABLE, COUNTS_VARIABLE)


@dataclasses.dataclass(frozen=True)
class VllmSettings:
    """How a vLLM is guarded.

    Attributes:
        config: of its session.
        asked: what a violation does, if not what the mode says.
    """

    config: CanaryConfig
    asked: str = ""

    @property
    def on_violation(self) -> str:
        """``recompute``: requests that read the damage begin again from their tokens; ``abort``: they end with an
        error; ``raise``: the engine ends; ``log``: a line."""
        return self.asked or ("raise" if self.config.mode == "raise" else "log")

    @property
    def session_config(self) -> CanaryConfig:
        """The session's settings: it raises only if the engine is to end."""
        return dataclasses.replace(self.config, mode="raise" if self.on_violation == "raise" else "log")

    @property
    def contains(self) -> bool:
        """Whether damage is kept from requests while the engine goes on."""
        return self.on_violation in ("abort", "recompute")

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
    if _MISTAKEN in environ:  # of all known names the nearest one was KVCANARY_VERIFY_FRACTION
        raise UnknownSettingError(_MISTAKEN, f"the environment (did you mean {ON_VIOLATION_VARIABLE!r}?)", _KNOWN)
    config = CanaryConfig.from_env(environ)
    return VllmSettings(config, _on_violation(environ, config.mode))


def _on_violation(environ: Mapping[str, str], mode: str) -> str:
    """What a violation does; empty for what the mode says."""
    wanted = environ.get(ON_VIOLATION_VARIABLE)
    if wanted is not None and wanted not in OUTCOMES:
        raise InvalidSettingError(ON_VIOLATION_VARIABLE, "the environment", wanted, f"one of {', '.join(OUTCOMES)}")
    old = environ.get(ABORT_VARIABLE)
    if old is None:
        return wanted or ""
    if old not in _MEANT:
        raise InvalidSettingError(ABORT_VARIABLE, "the environment", old, "'engine' or 'request'")
    instead = f"{ON_VIOLATION_VARIABLE}={_MEANT[old]}"
    if mode != "raise":
        expected = f"unset with KVCANARY_MODE={mode}: {instead} is set in any mode"
        raise InvalidSettingError(ABORT_VARIABLE, "the environment", old, expected)
    if wanted not in (None, _MEANT[old]):
        raise InvalidSettingError(
            ABORT_VARIABLE, "the environment", old, f"unset beside {ON_VIOLATION_VARIABLE}={wanted}"
        )
    log.warning("kvcanary.vllm %s=%s is deprecated: %s", ABORT_VARIABLE, old, instead)
    return _MEANT[old]
