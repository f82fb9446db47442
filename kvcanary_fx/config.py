"""Settings: one frozen dataclass, read from ``options=``, from code, or from ``KVCANARY_*`` variables."""

from __future__ import annotations

import dataclasses
import difflib
import logging
import os
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal

from .errors import InvalidSettingError, UnknownSettingError
from .kernels.checks import CHECKS as _TABLE
from .kernels.ring import BY_BUDGET

if TYPE_CHECKING:
    import torch

log = logging.getLogger("kvcanary")

Mode = Literal["raise", "log", "off"]

#: The checks that need no help from an engine.
ZERO_CONFIG_CHECKS = tuple(name for name, row in _TABLE.items() if not row.engine)

#: The checks that need to know what an engine knows: see :func:`kvcanary_fx.install_canary`.
ENGINE_CHECKS = tuple(name for name, row in _TABLE.items() if row.engine)
CHECKS = ZERO_CONFIG_CHECKS + ENGINE_CHECKS

OPTION_PREFIX = "kvcanary."
ENV_PREFIX = "KVCANARY_"

#: Set to 1 to hand an eager step's own tensors to the checks instead of copying them to persistent buffers.
NO_COPY_VARIABLE = "KVCANARY_EAGER_INPUT_NO_COPY"

#: The form of the log lines of the process, ``text`` or ``json``.
LOG_VARIABLE = "KVCANARY_LOG"

#: Set to 1 to send the log lines of the process as OpenTelemetry events, too.
OTEL_VARIABLE = "KVCANARY_OTEL"

#: Variables of the process that are no settings of a model.
_OF_THE_PROCESS = (NO_COPY_VARIABLE, LOG_VARIABLE, OTEL_VARIABLE)

#: Variables that begin like settings and belong to an engine's adapter.
ADAPTER_PREFIXES = ("KVCANARY_VLLM_",)

#: Largest N of ``verify_fraction = 1/N``, and of ``ring_capacity``: kernels count in 32 bits, a record takes 112 bytes.
MOST_TURNS = 1 << 30
MOST_RECORDS = 1 << 24

#: Most files of incidents in a directory: it is listed whenever one is written.
MOST_INCIDENTS = 10_000

#: Most events of a slot and stacks of calls that can be kept; a stack takes a few hundred bytes of the host.
MOST_EVENTS = 64
MOST_STACKS = 100_000

#: What ``privacy`` can keep out of an incident's file.
PRIVATE = ("tokens", "ids", "bytes")

#: What ``budget="auto"`` means on a GPU if neither a budget nor a ``verify_fraction`` is given.
GPU_BUDGET: float | None = 0.01


@dataclasses.dataclass(frozen=True)
class CanaryConfig:
    """How a model is guarded.

    Attributes:
        mode: ``"raise"`` stops at the first violation with :class:`~kvcanary_fx.KVCacheViolation`, in the
            step it happens; ``"log"`` writes one WARNING line per violation and never blocks; ``"off"``
            hands the graph to the inner backend untouched.
        inner: the backend that compiles the rewritten graph: a name torch.compile knows, or a callable.
        checks: the checks to run, at least one, of :data:`CHECKS`; :data:`ENGINE_CHECKS` need an engine's session.
        budget: how much longer a guarded step may take, ``"1%"`` or 0.01.  It sets the share of the slots whose bytes
            are checked each step; the summary says within which time each slot is checked.  None: all of them in
            each step.  ``"auto"``: 1 % on a GPU, None on a CPU.
        verify_fraction: instead of a budget, a fixed share of the recorded slots whose bytes are checked each
            step, ``"1/N"``; each slot is checked within N steps.  None: as the budget says.
        verify_after: whether an engine's session checks the bytes of what a forward read again after it, which finds
            writes to them while it runs: True, False, or ``"auto"``: on a CPU, if all are checked before.
        digest_bits: bits of content digest stored per slot, layer and half: 32 or 64.
        placement: where the checks of layers run on a GPU (those of opaque attention, those that an engine calls, and
            in a captured graph those around the writes of K and V): ``"side"``, on a stream of their own beside the
            model's, or ``"inline"``, in the model's own.  Inline is for engines that capture a graph in pieces with our
            ops in them: a piece cannot end while a check runs beside it.  ``"auto"``: inline in an engine's session
            whose layers have one tensor each, as MLA's latents are, where it takes less; else side.  All other checks
            run inline.
        rewrite_writes: replace KV writes by an op that writes in place, where Inductor would copy the pool:
            True for every write, False for none; ``"auto"`` under Inductor for writes to a part of a tensor
            (K and V, or all layers, in one), which it copies whole.
        lint: what to do when the compiled code allocates a buffer as large as a pool: ``"off"``,
            ``"warn"`` or ``"raise"``.
        ring_capacity: violations kept in detail between two reads of the ring.
        dump: directory that receives the graph before and after each pass, or None; made if it does not exist.
        incidents: directory that receives a file on the first violation of its kind, or None; made if it does not
            exist.  The files hold what is known of the slots, prompts and KV bytes included: docs/incidents.md.
        incidents_kept: most files in that directory.
        privacy: what the files must not hold, out of :data:`PRIVATE`.
        status: directory in which this process keeps a file of its counts, for ``kvcanary top --pid``, or None; made if
            it does not exist.
        slot_history: events of each slot of an engine's pools that are kept on the device, for a report that says what
            the slot went through; 0 for none.  They take 12 bytes each, and 32 more.
        stacks: how many distinct Python stacks of allocator calls are kept for the history, the last ones; 0 for none.
        on_violation: called with each :class:`~kvcanary_fx.Violation`, in either mode.

    Raises:
        InvalidSettingError: a value is out of its range.
    """

    mode: Mode = "raise"
    inner: str | Callable[..., Any] = "inductor"
    checks: tuple[str, ...] = CHECKS
    budget: str | float | None = "auto"
    verify_fraction: str | None = None
    verify_after: bool | Literal["auto"] = "auto"
    digest_bits: int = 32
    placement: Literal["auto", "side", "inline"] = "auto"
    rewrite_writes: bool | Literal["auto"] = "auto"
    lint: Literal["off", "warn", "raise"] = "off"
    ring_capacity: int = 65536
    dump: str | os.PathLike[str] | None = None
    incidents: str | os.PathLike[str] | None = None
    incidents_kept: int = 20
    privacy: tuple[str, ...] = ()
    status: str | os.PathLike[str] | None = None
    slot_history: int = 8
    stacks: int = 0
    on_violation: Callable[[Any], None] | None = dataclasses.field(default=None, compare=False)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            validate(field.name, getattr(self, field.name), "CanaryConfig")
        _require_one(vars(self), "CanaryConfig")
        object.__setattr__(self, "checks", tuple(self.checks))
        object.__setattr__(self, "privacy", tuple(self.privacy))
        for name in ("dump", "incidents", "status"):
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else os.fspath(value))

    @property
    def verify_every(self) -> int:
        """N of ``verify_fraction = 1/N``; 1 if it is not set."""
        return 1 if self.verify_fraction is None else Fraction(self.verify_fraction).denominator

    def budget_on(self, device: torch.device) -> float | None:
        """How much longer a step of this device may take, as a fraction; None if the share of slots is fixed."""
        if self.verify_fraction is not None:
            return None
        asked = _budget_of(self.budget)
        if asked == "auto":
            return GPU_BUDGET if device.type == "cuda" else None
        assert not isinstance(asked, str)
        return asked

    def verify_every_on(self, device: torch.device) -> int:
        """The ``verify_every`` of tensors on this device: N of 1/N, or a marker that the budget's word holds it."""
        return self.verify_every if self.budget_on(device) is None else BY_BUDGET

    def checks_at_once(self, device: torch.device) -> bool:
        """Whether the layers of a graph may be checked before its first write, and recorded behind its last.

        What one layer does to another is then found by the next step.  Where each step compares all bytes, each layer
        is checked in front of its own write, so that it is found in the step it happens.
        """
        return self.verify_every_on(device) != 1

    @property
    def beside(self) -> bool:
        """Whether checks may run beside the model; an engine's session has decided what ``"auto"`` is."""
        return self.placement != "inline"

    def verifies_after(self, device: torch.device) -> bool:
        """Whether the bytes of a pool on this device are checked after a forward as well."""
        if self.verify_after == "auto":
            return device.type == "cpu" and self.verify_every_on(device) == 1
        return bool(self.verify_after)

    @property
    def rewrite(self) -> bool | Literal["parts"]:
        """The options of the pass of that name."""
        if self.rewrite_writes == "auto":
            return "parts" if self.inner == "inductor" else False
        return self.rewrite_writes

    @property
    def planes(self) -> int:
        """32-bit planes of digest stored."""
        return self.digest_bits // 32

    def runtime_key(self) -> tuple[object, ...]:
        """What two compiled models must agree on to share a session."""
        return (
            self.mode,
            self.checks,
            self.verify_every,
            self.verify_fraction is None and _budget_of(self.budget),
            self.verify_after,
            self.digest_bits,
            self.placement,
            self.ring_capacity,
            self.incidents,
            self.incidents_kept,
            self.privacy,
            self.status,
            self.slot_history,
            self.stacks,
            self.on_violation,
        )

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> CanaryConfig:
        """Defaults, overridden by ``KVCANARY_*`` variables.

        Raises:
            UnknownSettingError: a ``KVCANARY_`` variable names no setting.
            InvalidSettingError: its value cannot be read.
        """
        return cls(**_from_env(os.environ if environ is None else environ))


def given_in_environment() -> list[str]:
    """The ``KVCANARY_*`` variables of settings that are set, once all of them can be read.

    Raises:
        UnknownSettingError: a ``KVCANARY_`` variable names no setting.
        InvalidSettingError: its value cannot be read.
    """
    CanaryConfig.from_env()
    return [variable for variable in _settings_in(os.environ) if os.environ[variable]]


def asked_for(environ: Mapping[str, str] | None = None) -> bool:
    """Whether an engine that loads us as a plugin is to be guarded: ``KVCANARY_MODE`` is set, and is not ``off``.

    Unlike elsewhere there is no default: installing the package must change nothing.  Other settings without the mode
    are reported, since whoever set them expects a guard.

    Raises:
        UnknownSettingError: a ``KVCANARY_`` variable names no setting, such as a misspelt ``KVCANARY_MODE``.
    """
    environ = os.environ if environ is None else environ
    mode = environ.get(f"{ENV_PREFIX}MODE", "")
    ours = [*_settings_in(environ), *(v for v in environ if v.startswith(ADAPTER_PREFIXES))]
    given = [variable for variable in ours if environ[variable]]
    if not mode and given:
        log.warning("kvcanary.off %s is set, and KVCANARY_MODE is not: nothing is guarded", ", ".join(given))
    return mode not in ("", "off")


def eager_inputs_without_copy() -> bool:
    """The value of the boolean variable of that name.

    Raises:
        InvalidSettingError: it is neither true nor false.
    """
    return _switch(NO_COPY_VARIABLE, None)


def otel_events(environ: Mapping[str, str] | None = None) -> bool:
    """The value of ``KVCANARY_OTEL``.

    Raises:
        InvalidSettingError: it is neither true nor false.
    """
    return _switch(OTEL_VARIABLE, environ)


def _switch(variable: str, environ: Mapping[str, str] | None) -> bool:
    text = (os.environ if environ is None else environ).get(variable) or "0"
    if text.strip().lower() not in _BOOLEANS:
        raise InvalidSettingError(variable, "the environment", text, "1 or 0, or unset")
    return _BOOLEANS[text.strip().lower()]


def log_format(environ: Mapping[str, str] | None = None) -> str:
    """The value of ``KVCANARY_LOG``: ``"text"``, which is the default, or ``"json"``.

    Raises:
        InvalidSettingError: it is neither.
    """
    text = (os.environ if environ is None else environ).get(LOG_VARIABLE, "")
    form = text.strip().lower() or "text"
    if form not in ("text", "json"):
        raise InvalidSettingError(LOG_VARIABLE, "the environment", text, "'text' or 'json', or unset")
    return form


def resolve(config: CanaryConfig | None, options: Mapping[str, Any] | None) -> tuple[CanaryConfig, dict[str, Any]]:
    """Settings for one compilation, and the options that belong to the inner backend.

    Options win over ``config``, which wins over the environment.

    Raises:
        UnknownSettingError, InvalidSettingError: naming the setting and where it was given.
    """
    base = CanaryConfig.from_env() if config is None else require_config(config, "the backend")
    if options is not None and not isinstance(options, Mapping):
        raise InvalidSettingError("options", "torch.compile", options, 'a dict, such as {"kvcanary.mode": "log"}')
    given = dict(options or {})
    ours = {key: given.pop(key) for key in list(given) if str(key).startswith(OPTION_PREFIX)}
    for key in given:
        _require_theirs(str(key))
    return override(base, ours, "options", OPTION_PREFIX), given


def _require_theirs(key: str) -> None:
    """Refuse an option that was meant for us and would go to the inner backend, which may drop it silently."""
    prefix, dot, _ = key.partition(".")
    meant = bool(dot) and difflib.SequenceMatcher(None, prefix.lower(), OPTION_PREFIX[:-1]).ratio() > 0.75
    if meant or key in names():
        _require_known("", key, "options", [OPTION_PREFIX + n for n in names()], member=False)


def require_config(config: Any, where: str) -> CanaryConfig:
    """``config``, if it is one.

    Raises:
        InvalidSettingError: it is not.
    """
    if not isinstance(config, CanaryConfig):
        raise InvalidSettingError("config", where, config, "a CanaryConfig, or None for the environment's settings")
    return config


def override(base: CanaryConfig, settings: Mapping[str, Any], where: str, prefix: str = "") -> CanaryConfig:
    """``base`` with ``settings``, whose keys are names of settings after ``prefix``.

    Raises:
        UnknownSettingError, InvalidSettingError: naming the setting and ``where`` it was given.
    """
    base = require_config(base, where)
    changed: dict[str, Any] = {}
    for key, value in settings.items():
        name = key.removeprefix(prefix)
        _require_known(name, key, where, [prefix + n for n in names()])
        changed[name] = validate(name, value, where, shown=key)
    _require_one(changed, where, {name: prefix + name for name in changed})
    if "budget" in changed:
        changed.setdefault("verify_fraction", None)
    elif "verify_fraction" in changed:
        changed["budget"] = "auto"
    return dataclasses.replace(base, **changed) if changed else base


def names() -> list[str]:
    """Every setting's name."""
    return [field.name for field in dataclasses.fields(CanaryConfig)]


def validate(name: str, value: Any, where: str, shown: str | None = None) -> Any:
    """``value`` if setting ``name`` can have it.

    Args:
        shown: the name as the user gave it, for the error.

    Raises:
        InvalidSettingError: it cannot.
    """
    accepts, expected = _RULES[name]
    if not accepts(value):
        raise InvalidSettingError(shown or name, where, value, expected)
    return value


def _require_one(given: Mapping[str, Any], where: str, shown: Mapping[str, str] | None = None) -> None:
    """Refuse a budget and a fixed share in one place.

    Args:
        shown: the settings' names as the user gave them.
    """
    budget, fraction = given.get("budget", "auto"), given.get("verify_fraction")
    if fraction is not None and _budget_of(budget) != "auto":
        name, other = (shown[n] if shown is not None else n for n in ("budget", "verify_fraction"))
        raise InvalidSettingError(
            name,
            where,
            budget,
            f"left out where {other}={fraction!r} is given: the share of the bytes that is compared each step is "
            "either fixed or follows from a budget",
        )


def _budget_of(value: Any) -> float | Literal["auto"] | None:
    """A budget as a fraction of a step.

    Raises:
        ValueError: it is none.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(value)
    text = str(value).strip().lower()
    if text in ("none", "auto"):
        return None if text == "none" else "auto"
    share = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    if not 0 < share < 1:
        raise ValueError(value)
    return share


def _is_budget(value: Any) -> bool:
    try:
        _budget_of(value)
    except (ValueError, OverflowError):
        return False
    return True


def _is_fraction(value: Any) -> bool:
    if value is None:
        return True
    if not isinstance(value, str):
        return False
    try:
        fraction = Fraction(value)
    except (ValueError, ZeroDivisionError):
        return False
    return fraction.numerator == 1 and fraction.denominator <= MOST_TURNS


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_number(value: Any, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most


def _is_inner(value: Any) -> bool:
    if isinstance(value, str):
        return bool(value) and value != "kvcanary"
    return callable(value) and not getattr(value, "is_kvcanary", False)


def _is_directory_to_be(value: Any) -> bool:
    """Whether the directory exists or can be made, and can be written to; so that no graph is lost later."""
    if value is None:
        return True
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        return False
    path = os.path.abspath(os.fspath(value))
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    return os.path.isdir(path) and os.access(path, os.W_OK | os.X_OK)


_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "mode": (lambda v: v in ("raise", "log", "off"), "'raise', 'log' or 'off'"),
    "inner": (
        _is_inner,
        "the name of a backend for the guarded graph ('inductor', 'aot_eager', 'eager', ...) or a callable, "
        "not the canary itself",
    ),
    "checks": (
        lambda v: isinstance(v, tuple | list) and bool(v) and all(c in CHECKS for c in v),
        f"a tuple of names, at least one, out of {', '.join(CHECKS)} (mode 'off' checks nothing)",
    ),
    "budget": (
        _is_budget,
        "a share of a step's time between 0 and 100 %, such as '1%' or 0.01, None to compare all bytes in each step, "
        "or 'auto'",
    ),
    "verify_fraction": (_is_fraction, f"'1' or '1/N' with a whole number N, at most {MOST_TURNS}"),
    "verify_after": (lambda v: isinstance(v, bool) or v == "auto", "True, False or 'auto'"),
    "digest_bits": (lambda v: isinstance(v, int) and v in (32, 64), "32 or 64"),
    "placement": (lambda v: v in ("auto", "side", "inline"), "'auto', 'side' or 'inline'"),
    "rewrite_writes": (lambda v: isinstance(v, bool) or v == "auto", "True, False or 'auto'"),
    "lint": (lambda v: v in ("off", "warn", "raise"), "'off', 'warn' or 'raise'"),
    "ring_capacity": (lambda v: _is_count(v) and v <= MOST_RECORDS, f"a whole number from 1 to {MOST_RECORDS}"),
    "dump": (
        _is_directory_to_be,
        "None, or the path of a directory that is there or can be made, and can be written to",
    ),
    "incidents": (
        _is_directory_to_be,
        "None, or the path of a directory that is there or can be made, and can be written to",
    ),
    "status": (
        _is_directory_to_be,
        "None, or the path of a directory that is there or can be made, and can be written to",
    ),
    "incidents_kept": (lambda v: _is_count(v) and v <= MOST_INCIDENTS, f"a whole number from 1 to {MOST_INCIDENTS}"),
    "privacy": (
        lambda v: isinstance(v, tuple | list) and all(p in PRIVATE for p in v),
        f"a tuple of names out of {', '.join(PRIVATE)}",
    ),
    "slot_history": (lambda v: _is_number(v, MOST_EVENTS), f"a whole number from 0 to {MOST_EVENTS}"),
    "stacks": (lambda v: _is_number(v, MOST_STACKS), f"a whole number from 0 to {MOST_STACKS}"),
    "on_violation": (lambda v: v is None or callable(v), "a callable, or None"),
}

_BOOLEANS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def _parse(name: str, text: str) -> Any:
    """The value of an environment variable's text; ``text`` itself if it is not a literal."""
    if name in ("checks", "privacy"):
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if name in ("digest_bits", "ring_capacity", "incidents_kept", "slot_history", "stacks"):
        return int(text) if text.isascii() and text.isdigit() else text
    if name in ("rewrite_writes", "verify_after"):
        return _BOOLEANS.get(text.strip().lower(), text)
    return text


def _settings_in(environ: Mapping[str, str]) -> dict[str, str]:
    """The settings in the environment, by the variable.

    Raises:
        UnknownSettingError: a variable has our prefix and is not a setting.
    """
    settable = {ENV_PREFIX + n.upper(): n for n in names() if n != "on_violation"}
    found = {}
    for variable in environ:
        others = variable in _OF_THE_PROCESS or variable.startswith(ADAPTER_PREFIXES)
        if variable.startswith(ENV_PREFIX) and not others:
            _require_known(variable, variable, "the environment", list(settable), member=variable in settable)
            found[variable] = settable[variable]
    return found


def _from_env(environ: Mapping[str, str]) -> dict[str, Any]:
    log_format(environ)
    otel_events(environ)
    found = {}
    for variable, name in _settings_in(environ).items():
        value = _parse(name, environ[variable])
        accepts, expected = _RULES[name]
        if not accepts(value):
            raise InvalidSettingError(variable, "the environment", environ[variable], f"{expected}, or unset")
        found[name] = value
    _require_one(found, "the environment", {name: variable for variable, name in _settings_in(environ).items()})
    return found


def _require_known(name: str, shown: str, where: str, valid: list[str], member: bool | None = None) -> None:
    if member if member is not None else name in names():
        return
    prefix = next((p for p in (ENV_PREFIX, OPTION_PREFIX) if shown.startswith(p)), "")  # it would make all alike
    close = difflib.get_close_matches(shown.removeprefix(prefix), [each.removeprefix(prefix) for each in valid], n=1)
    hint = f"{where} (did you mean {prefix + close[0]!r}?)" if close else where
    raise UnknownSettingError(shown, hint, valid)
