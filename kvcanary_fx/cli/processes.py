"""What a process and those that it started say of themselves in their status files."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import EndpointError
from ..reports.metrics_text import Reading, file_of, read
from ..reports.untrusted import one_line

#: Names the directory of the files, here and in the process.
VARIABLE = "KVCANARY_STATUS"

_PROC = Path("/proc")
_REMEDY = f"Start it with {VARIABLE}=DIR (or status=DIR), and give that directory: --status DIR"


def reading(pid: int, folder: str | None) -> Reading:
    """The counts of a process and of all that it started.

    Args:
        folder: of their files; None: as the process's environment says, or this one's.

    Raises:
        EndpointError: there is no such process, or it has no file.
    """
    name = f"--pid {pid}"
    if not _lives(pid):
        raise EndpointError(name, "there is no such process", "It has ended, or runs on another machine")
    folder = folder or _variable_of(pid) or os.environ.get(VARIABLE)
    if not folder:
        raise EndpointError(name, "it is not known where its status file is", _REMEDY)
    texts = [text for each in [pid, *_started_by(pid)] if (text := _text(file_of(folder, each))) is not None]
    try:
        found = read("".join(texts))
    except ValueError as e:
        raise EndpointError(
            name, f"this line cannot be read: {one_line(e)}", "Delete the file, it is none of ours"
        ) from e
    if found is None:
        raise EndpointError(name, f"neither it nor a process that it started has a status file in {folder}", _WAIT)
    return found


_WAIT = f"It appears some seconds after the first guarded graph or step. {_REMEDY}"


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:  # somebody else's
        return True
    except (OSError, OverflowError):
        return False
    return True


def _variable_of(pid: int) -> str | None:
    """The directory that the process was started with, where the system tells."""
    try:
        given = (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return None
    begin = f"{VARIABLE}=".encode()
    return next((os.fsdecode(line[len(begin) :]) for line in given if line.startswith(begin)), None)


def _started_by(pid: int) -> list[int]:
    """The processes below one, in any order; none where the system does not tell."""
    parents: dict[int, int] = {}
    for stat in _PROC.glob("[0-9]*/stat"):
        text = _text(stat)
        if text is not None:  # PID (NAME) STATE PARENT ..., where a name may hold anything
            parents[int(stat.parent.name)] = int(text.rpartition(")")[2].split()[1])
    found = [pid]
    for known in found:
        found += [child for child, parent in parents.items() if parent == known and child not in found]
    return found[1:]
