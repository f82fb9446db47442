"""Reading a session's buffers from a thread beside the one that runs it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch

from .binding import Controls


class Beside:
    """Streams that wait for no other: under a lock, a reader kept a runner that is ahead of its device waiting until
    the device had caught up, in every reading."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @contextlib.contextmanager
    def streams(self, controls: Iterable[Controls]) -> Iterator[None]:
        """Make them the current ones of this thread, on all devices of the sessions that have these controls."""
        with contextlib.ExitStack() as streams:
            for device in {d for each in controls for d in each.by_device if d.type == "cuda"}:
                streams.enter_context(torch.cuda.stream(self._streams.setdefault(device, torch.cuda.Stream(device))))
            yield
