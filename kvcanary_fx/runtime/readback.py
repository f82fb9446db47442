"""Finds out whether a device has something to report, without waiting for the device.

A GPU writes to the host's memory when a check failed.  A few words show whether all checks ran: they are copied now and
then, into pinned memory that is allocated once, and an event shows when they have arrived.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import torch

from ..kernels.buffers import Gate
from ..kernels.host_time import waiting
from ..kernels.ring import Word
from ..kernels.staging import CurrentStream
from .binding import Controls, GraphBinding

#: Seconds between two copies of a graph's words: to start one and to look at it took 84 us of the host's time (H200).
BETWEEN = 0.1


class Words:
    """Small int64 tensors of one device, on their way to the host."""

    def __init__(self, tensors: Sequence[torch.Tensor]):
        self._tensors, self._device = tensors, tensors[0].device
        self._lists: list[list[int]] = []
        self._pinned: list[torch.Tensor] = []
        if self._device.type == "cuda":
            with torch.inference_mode(False):  # else it could not be written outside of that mode
                sizes = [t.numel() for t in tensors]
                room = torch.empty(sum(sizes), dtype=torch.int64, device="cpu", pin_memory=True)
                self._pinned = list(room.split(sizes))
            self._event, self._current = torch.cuda.Event(), CurrentStream(self._device)

    def start(self) -> None:
        """Read them after all work queued on the device so far; on the CPU, now."""
        if not self._pinned:
            self._lists = [t.tolist() for t in self._tensors]
            return
        for pinned, tensor in zip(self._pinned, self._tensors, strict=True):
            pinned.copy_(tensor, non_blocking=True)
        self.mark()

    def mark(self) -> None:
        """From here on :meth:`arrived` and :meth:`wait` are about all work queued so far, though nothing is read."""
        if self._pinned:
            self._event.record(self._current())

    def arrived(self) -> bool:
        """Whether the last copy has arrived."""
        return not self._pinned or self._event.query()

    def wait(self) -> None:
        """Wait until it has arrived."""
        if self._pinned:
            self._event.synchronize()

    def read(self) -> list[list[int]]:
        """The words of each tensor, once they have arrived."""
        return [pinned.tolist() for pinned in self._pinned] if self._pinned else self._lists


class Poll:
    """Whether the devices' rings have rows to read, for callers without a guarded graph.

    A GPU tells the host when it writes a row, in pinned memory.  To copy its counters in each step, which nearly always
    say that there is none, and to record an event behind them took 27 us of the host's time (H200).
    """

    def __init__(self, controls: Controls):
        self._controls = controls
        self._known = 0  # devices that the next two are of
        self._bells: list[memoryview] = []
        self._silent: list[torch.Tensor] = []  # words of those without a bell

    def news(self) -> bool:
        """Whether any ring has unread rows, as far as the host knows; waits for no device.

        It calls no function: an engine asks in each step, with other work's code in the core's caches.
        """
        if len(self._controls.by_device) != self._known:
            self._listen()
        for bell in self._bells:
            if bell[0] or bell[1]:
                return True
        return bool(self._silent) and any(_unread(words.tolist()) for words in self._silent)

    def bells(self) -> Sequence[memoryview] | None:
        """Two words of each device in the host's memory, of which one is not 0 once its ring has unread rows; None:
        :meth:`news` has to be asked, as some device has none."""
        self._listen()
        return None if self._silent else self._bells

    def _listen(self) -> None:
        controls = list(self._controls.by_device.values())
        bells = [control.heard for control in controls]
        self._bells = [bell for bell in bells if bell is not None]
        self._silent = [control.words for control, bell in zip(controls, bells, strict=True) if bell is None]
        self._known = len(controls)


def _unread(words: Sequence[int]) -> bool:
    return words[Word.HEAD] != words[Word.DRAINED]


class Readback:
    """The few words that show whether the calls of a graph went well.  One per thread.

    Attributes:
        binding: the graph.
        under_way: started, and not looked at since.
        at_once: there is no device to wait for.
        alone: no thread was in the graph while they were read; a thread inside has run only some of the ops.
    """

    def __init__(self, binding: GraphBinding, controls: Controls):
        self.binding = binding
        self._controls = [controls(device) for device in binding.gates]
        self._hears = all(control.bell is not None for control in self._controls)
        self._whole = True  # the words are read as well
        gates = binding.gates.values()
        self._words = [Words([control.words, gate]) for control, gate in zip(self._controls, gates, strict=True)]
        self.at_once = all(device.type != "cuda" for device in binding.gates)
        self.under_way = self.alone = False
        self._forgiven = 0  # ops that failed calls did not run, by then
        self._started = -BETWEEN
        self._lists: list[list[list[int]]] = []  # per device: the control's words, the graph's gate

    def is_due(self) -> bool:
        """Whether a device has written rows, or it is time to read its words again."""
        return self._words_are_due() or self._heard()

    def _words_are_due(self) -> bool:
        return time.monotonic() - self._started >= BETWEEN

    def _heard(self) -> bool:
        return any(control.rang() for control in self._controls)

    def start(self, whole: bool = True) -> None:
        """Read all that the calls so far leave behind.

        Args:
            whole: also whether all checks ran.  Without it that is read only if it is due, or where no device says by
                itself that a check failed.
        """
        self._whole = whole or not self._hears or self._words_are_due()
        if self._whole:
            self._start_words()
        else:
            for words in self._words:
                words.mark()
        self.under_way = True

    def _start_words(self) -> None:
        self._started = time.monotonic()
        binding = self.binding
        binding.settle()
        self._forgiven = binding.forgiven
        begun, ended = calls = binding.calls()
        for words in self._words:
            words.start()
        self.alone = begun == ended and not binding.unsettled and binding.calls() == calls

    def arrived(self) -> bool:
        """Whether the words can be read without waiting."""
        return self.at_once or all(words.arrived() for words in self._words)

    def wait(self) -> None:
        """Wait until the words can be read."""
        with waiting():
            for words in self._words:
                words.wait()

    def take(self) -> bool:
        """Take in what was read; whether a ring has unread rows."""
        self.under_way = False
        if not self._whole:
            return self._heard()
        self._lists = [words.read() for words in self._words]
        return any(_unread(words) for words, _ in self._lists)

    def complete(self) -> bool:
        """Whether every inserted op ran in every call so far; True if that was not read."""
        if not self._whole:
            return True
        steps = ran = 0
        for _, gate in self._lists:
            steps = max(steps, gate[Gate.STEP])
            ran += gate[Gate.OPS]
        return steps > 0 and ran + self._forgiven == steps * self.binding.plan.ops


class Readbacks(threading.local):
    """The read-backs of the calling thread: no thread waits for another's."""

    def __init__(self, controls: Controls):
        self._controls = controls
        self._of: dict[int, Readback] = {}

    def of(self, binding: GraphBinding) -> Readback:
        """That of one graph."""
        found = self._of.get(binding.key)
        if found is None:
            found = self._of[binding.key] = Readback(binding, self._controls)
        return found

    def far(self) -> list[Readback]:
        """Those of graphs with a device to wait for."""
        return [readback for readback in self._of.values() if not readback.at_once]

    def under_way(self) -> list[Readback]:
        """Those that were not read yet."""
        return [readback for readback in self._of.values() if readback.under_way]
