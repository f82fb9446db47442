"""Puts an incident together: what failed, what surrounds it, and under which settings, versions and devices."""

from __future__ import annotations

import datetime
import os
import platform
import sys
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from ..config import ENV_PREFIX, CanaryConfig, names
from ..kernels.checks import CHECKS
from ..kernels.ring import Ring
from ..passes.graph_plan import GraphPlan
from ..reports import summary
from ..reports.incidents import log_tail, privacy
from ..reports.incidents.file import MOST_RECORDS
from ..reports.incidents.incident import Incident, PoolScene, Record
from ..reports.violation import Violation
from .groups import Damage, Group
from .hooks import Hooks
from .registry import PoolRegistry
from .row_search import RowSearch
from .scene import MOST_BYTES, evidence, pool_scene

#: A row of the ring, and its record.
Told = tuple[Sequence[int], Violation]

#: Records whose bytes are looked into.
MOST_EXPLAINED = 100

_PACKAGES = ("kvcanary_fx", "torch", "triton", "transformers", "vllm", "sglang", "safetensors")


class Watched(Protocol):
    """What an incident needs of a session.

    Attributes:
        plans: of the graphs.
        uncovered: why coverage was lost.
    """

    config: CanaryConfig
    hooks: Hooks
    registry: PoolRegistry
    plans: list[GraphPlan]
    uncovered: list[str]


def describe(session: Watched, told: Sequence[Told], total: int, reason: str) -> Incident:
    """The incident of the violations that were just read, or of a snapshot.  Waits for the devices.

    What a lost device does not give is named in ``missing``.

    Args:
        told: with their rows.
        total: how many there were.
    """
    order = sorted(told, key=lambda t: (t[1].step, CHECKS[t[1].check].place))[:MOST_RECORDS]
    missing: list[str] = []
    groups: list[Group] = []
    try:
        groups = session.hooks.groups(session.registry)
    except Exception as e:
        missing.append(f"the pools: {type(e).__name__}: {e}")
    pools: list[PoolScene] = []
    records = [Record(v, None, None, row[Ring.SLOT]) for row, v in order]
    hit = sum(any(row[Ring.HALF] in g.numbers() for row, _ in order) for g in groups)
    for group in groups:
        try:
            scene = _scene(session, group, order, records, len(pools), MOST_BYTES // max(hit, 1))
        except Exception as e:
            missing.append(f"pool {group.name}: {type(e).__name__}: {e}")
        else:
            pools.append(scene)
    incident = Incident(
        made=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        reason=reason,
        records=tuple(records),
        total=total,
        pools=tuple(pools),
        settings=_settings(session.config),
        system=_system(),
        graphs=tuple(line for plan in session.plans for line in summary.describe_plan(plan, session.config)),
        coverage=tuple(session.uncovered),
        log=log_tail.lines(),
        missing=tuple(missing),
    )
    return privacy.hide(incident, session.config.privacy)


def _scene(
    session: Watched, group: Group, order: Sequence[Told], records: list[Record], number: int, room: int
) -> PoolScene:
    """One pool; the records that are about it get its number and their evidence."""
    ours = group.numbers()
    damage = {i: _damage(row, v) for i, (row, v) in enumerate(order) if row[Ring.HALF] in ours}
    search = RowSearch(group)
    scene = pool_scene(group, session.registry, list(damage.values()), search, room)
    for i, hurt in damage.items():
        half = hurt.number if hurt.number != group.info_id else None
        seen = evidence(scene, hurt, search, list(damage.values())) if i < MOST_EXPLAINED else None
        records[i] = Record(order[i][1], number, half, hurt.slot, seen)
    return scene


def _damage(row: Sequence[int], violation: Violation) -> Damage:
    plain = violation.why is None
    return Damage(
        number=row[Ring.HALF],
        slot=row[Ring.SLOT],
        stored=violation.stored,
        found=violation.found,
        digests=plain and violation.check in ("content", "operand", "index"),
        poison=plain and violation.check == "poison",
    )


def _settings(config: CanaryConfig) -> dict[str, Any]:
    values = {name: getattr(config, name) for name in names()}
    return {name: list(v) if isinstance(v, tuple) else v if _simple(v) else repr(v) for name, v in values.items()}


def _simple(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _system() -> dict[str, Any]:
    """Versions and devices; of the environment our own variables alone."""
    told: dict[str, Any] = {"python": platform.python_version(), "platform": platform.platform(), "pid": os.getpid()}
    for name in _PACKAGES:
        version = getattr(sys.modules.get(name), "__version__", None)
        if version is not None:
            told[name] = str(version)
    told["environment"] = {k: v for k, v in sorted(os.environ.items()) if k.startswith(ENV_PREFIX)}
    try:
        count = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
        told["gpus"] = [torch.cuda.get_device_name(i) for i in range(count)]
        told["cuda"] = torch.version.cuda
    except RuntimeError as e:  # the device is lost
        told["gpus"] = str(e)
    return told
