"""Copies that run beside the forwards: on a second stream of a GPU, on a thread where the KV is in host memory."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch


class Ticket(Protocol):
    """A copy under way."""

    def wait(self) -> None:
        """Return when the copy is done; the host and all streams may then use what it wrote, and free what it read."""


class Copier(Protocol):
    """Runs copies one after the other, each behind the device work that was queued when it was started.

    Attributes:
        pinned: whether host memory must be page-locked for a copy not to stop the device.
    """

    pinned: bool

    def start(self, copy: Callable[[], None]) -> Ticket: ...

    def close(self) -> None: ...


def make_copier(device: str) -> Copier:
    return StreamCopier(device) if torch.device(device).type == "cuda" else ThreadCopier()


class ThreadCopier:
    pinned = False

    def __init__(self) -> None:
        self.worker = ThreadPoolExecutor(1)

    def start(self, copy: Callable[[], None]) -> Ticket:
        return ThreadTicket(self.worker.submit(copy))

    def close(self) -> None:
        self.worker.shutdown()


class ThreadTicket:
    def __init__(self, future: Future[None]):
        self.future = future

    def wait(self) -> None:
        self.future.result()


class StreamCopier:
    pinned = True

    def __init__(self, device: str):
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def start(self, copy: Callable[[], None]) -> Ticket:
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            copy()
        return StreamTicket(copy, self.stream.record_event())

    def close(self) -> None:
        self.stream.synchronize()


class StreamTicket:
    """Holds the copy's tensors: freed before the end, they could be handed to a forward while they are read."""

    def __init__(self, copy: Callable[[], None], done: torch.cuda.Event):
        self.copy, self.done = copy, done

    def wait(self) -> None:
        self.done.synchronize()
