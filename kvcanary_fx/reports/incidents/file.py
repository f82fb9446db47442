"""The file of an incident: a zip of JSON and safetensors, written whole or not at all.

Nothing in it is executed when it is read: no pickle, and every value is checked against the type it should have.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
import os
import secrets
import types
import typing
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ...errors import IncidentError, MissingExtraError
from ...kernels.checks import CHECKS, Why
from .incident import FORMAT, HalfScene, Incident, Record

#: Violations in a file; the others are counted.
MOST_RECORDS = 1_000

#: Bytes of a file once it is unpacked; larger ones are refused.
MOST_BYTES = 1 << 30

_REASONS = tuple(why.name for why in Why)

_JSON, _TENSORS = "incident.json", "tensors.safetensors"
_MARK = "kvcanary incident"
_NO_INCIDENT = "Give a file that KVCANARY_INCIDENTS or session.snapshot(path) has written"


def require_safetensors() -> Any:
    """The library that packs tensors.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        import safetensors.torch
    except ImportError as e:
        raise MissingExtraError("safetensors", "incidents", "the file of an incident") from e
    return safetensors.torch


def save(incident: Incident, path: str | os.PathLike[str]) -> None:
    """Write a file that its owner alone can read; it appears under its name when it is whole.

    Raises:
        OSError: it cannot be written; nothing is left behind.
        MissingExtraError: safetensors is not installed.
    """
    target, packed = Path(path), pack(incident)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(packed)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    with contextlib.suppress(OSError):  # some file systems have no handle of a directory
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def pack(incident: Incident) -> bytes:
    """The bytes of the file."""
    tensors: dict[str, torch.Tensor] = {}
    told = {"what": _MARK, "format": FORMAT, "incident": _plain(incident, "", tensors)}
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(_JSON, json.dumps(told, indent=1))
        archive.writestr(_TENSORS, require_safetensors().save(tensors))
    return packed.getvalue()


def load(path: str | os.PathLike[str]) -> Incident:
    """The incident in a file.

    Raises:
        IncidentError: it cannot be read, is none of ours, or was written by a newer version.
        MissingExtraError: safetensors is not installed.
    """
    library = require_safetensors()
    try:
        with zipfile.ZipFile(path) as archive:
            if sum(member.file_size for member in archive.infolist()) > MOST_BYTES:
                raise IncidentError(path, f"unpacked, it has more than {MOST_BYTES} bytes", _NO_INCIDENT)
            told, raw = json.loads(archive.read(_JSON)), archive.read(_TENSORS)
    except OSError as e:
        raise IncidentError(path, f"it cannot be read ({e.strerror or e})", _NO_INCIDENT) from e
    except (zipfile.BadZipFile, zipfile.LargeZipFile, KeyError, ValueError, RuntimeError, NotImplementedError) as e:
        raise IncidentError(path, f"it is no incident of kvcanary, or damaged ({e})", _NO_INCIDENT) from e
    except RecursionError as e:
        raise IncidentError(path, "it is nested too deeply", _NO_INCIDENT) from e
    if not isinstance(told, dict) or told.get("what") != _MARK:
        raise IncidentError(path, "it is no incident of kvcanary", _NO_INCIDENT)
    if told.get("format") != FORMAT:
        raise IncidentError(
            path,
            f"it has format {told.get('format')!r}, this version reads {FORMAT}",
            "Read it with the version of kvcanary_fx that wrote it, or a newer one",
        )
    try:
        incident: Incident = _typed(told["incident"], Incident, library.load(raw))
        _require_whole(incident)
    except Exception as e:  # safetensors has an error of its own, and a foreign file may hold anything
        raise IncidentError(path, f"it is damaged ({type(e).__name__}: {e})", _NO_INCIDENT) from e
    return incident


def _plain(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """A value for JSON; tensors get a name and are put aside."""
    if isinstance(value, torch.Tensor):
        tensors[name] = value.detach().contiguous()
        return {"tensor": name}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name), f"{name}/{f.name}", tensors) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): _plain(v, f"{name}/{k}", tensors) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(v, f"{name}/{i}", tensors) for i, v in enumerate(value)]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _typed(value: Any, kind: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The value that was made plain.

    Raises:
        TypeError, KeyError: it is not of that kind.
    """
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any or (origin is not None and isinstance(origin, type) and issubclass(origin, Mapping)):
        if kind is not Any and not isinstance(value, dict):
            raise TypeError(f"{value!r:.40} is no object")
        return value
    if origin in (types.UnionType, typing.Union):
        return _one_of(value, args, tensors)
    if origin is tuple:
        return _typed_tuple(value, args, tensors)
    if kind is torch.Tensor:
        return tensors[value["tensor"]]
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        there = [f for f in dataclasses.fields(kind) if f.name in value or f.default is dataclasses.MISSING]
        return kind(**{f.name: _typed(value[f.name], hints[f.name], tensors) for f in there})
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"{value!r:.40} is no {kind.__name__}")
    return value


def _one_of(value: Any, kinds: Sequence[Any], tensors: Mapping[str, torch.Tensor]) -> Any:
    if value is None and types.NoneType in kinds:
        return None
    for kind in kinds:
        if kind in (str, int):
            if isinstance(value, kind) and not isinstance(value, bool):
                return value
        elif kind is not types.NoneType:
            return _typed(value, kind, tensors)
    raise TypeError(f"{value!r:.40} is of another type")


def _typed_tuple(value: Any, kinds: Sequence[Any], tensors: Mapping[str, torch.Tensor]) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r:.40} is no list")
    each = [kinds[0]] * len(value) if kinds[-1] is Ellipsis else kinds
    return tuple(_typed(v, kind, tensors) for v, kind in zip(value, each, strict=True))


def _require_whole(incident: Incident) -> None:
    """Refuse values that would not be shown: tensors of another shape than the slots they are of, unknown checks.

    Raises:
        ValueError, AttributeError: naming what is wrong.
    """
    for pool in incident.pools:
        if pool.slots < 0 or pool.positions < 0:
            raise ValueError(f"sizes of pool {pool.name!r}")
        for half in pool.halves:
            _require_half(half, len(pool.near))
        for whole, dtype in ((pool.map, torch.uint8), (pool.owners, torch.int32)):
            if whole is not None and (whole.dtype, tuple(whole.shape)) != (dtype, (pool.slots,)):
                raise ValueError(f"map of pool {pool.name!r}")
    for record in incident.records:
        _require_record(incident, record)


def _require_half(half: HalfScene, n: int) -> None:
    size = _row_bytes(half)
    if half.rows is not None and (half.rows.dtype, tuple(half.rows.shape)) != (torch.uint8, (n, size)):
        raise ValueError(f"rows of pool {half.pool!r}")
    digests = half.recorded
    if digests is not None and (digests.dtype != torch.int32 or tuple(digests.shape) not in ((1, n), (2, n))):
        raise ValueError(f"digests of pool {half.pool!r}")


def _require_record(incident: Incident, record: Record) -> None:
    violation, half = record.violation, incident.half(record.half)
    if record.pool is not None and not 0 <= record.pool < len(incident.pools):
        raise ValueError("a record of no pool")
    if violation.check not in CHECKS or violation.why not in (None, *_REASONS):
        raise ValueError(f"unknown check {violation.check!r} {violation.why!r}")
    violation.explain()
    bit = None if record.evidence is None else record.evidence.bit
    if bit is not None and (half is None or not 0 <= bit < 8 * _row_bytes(half)):
        raise ValueError(f"bit {bit} of a row")


def _row_bytes(half: HalfScene) -> int:
    dtype = getattr(torch, half.dtype)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"element type {half.dtype!r}")
    return math.prod(half.row_shape) * dtype.itemsize
