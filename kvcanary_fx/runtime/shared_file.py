"""A file in memory that the ranks of a model on one host share, for what cannot wait for a collective.

The ranks agree on its name through the store of ``torch.distributed``: one round trip in a process's life.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import uuid
from pathlib import Path

import torch.distributed as dist


def agreed_name(key: str) -> str:
    """A name that is the same in all ranks that ask for this key: the first one's.

    Raises:
        RuntimeError, ValueError, AttributeError, OSError: there is no store, or it keeps nothing.
    """
    store = dist.distributed_c10d._get_default_store()
    name: str = store.compare_set(key, "", uuid.uuid4().hex).decode()
    if not name.isalnum():
        raise OSError("the store of torch.distributed keeps nothing")
    return name


def path_of(name: str) -> Path:
    """Where the file of this name is: in memory, if there is such a folder."""
    return _folder() / f"kvcanary-{name}"


def _folder() -> Path:
    memory = Path("/dev/shm")
    return memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())


def open_shared(path: Path, size: int) -> mmap.mmap:
    """So many bytes of it, made by the first rank that comes: zeros, and what others have written.

    Raises:
        OSError: it can be neither made nor opened.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        os.ftruncate(handle, size)  # the size is the same for all; what is there stays
        return mmap.mmap(handle, size)
    finally:
        os.close(handle)
