"""Which thread is in a forward, and over which caches: a cache serves one at a time."""

from __future__ import annotations

import threading

from ..errors import ConcurrentUseError
from .bound_call import BoundCall


class Users:
    """The calls of guarded graphs that are running in one session, by thread.

    Where only one thread is in a forward, no cache is looked at.
    """

    def __init__(self) -> None:
        self._calls: dict[int, list[BoundCall]] = {}  # by the thread's ident; a draft may run inside its target

    def enter(self, call: BoundCall) -> None:
        """The calling thread begins a call.

        Raises:
            ConcurrentUseError: another thread is in a call over one of its caches.
        """
        me = threading.get_ident()
        mine = self._calls.get(me)
        if mine is None:
            self._calls[me] = [call]
        else:
            mine.append(call)
        if len(self._calls) > 1:
            # entered before the others are looked at, so that of two threads that come at once one is refused
            try:
                self._refuse_shared(me, call)
            except ConcurrentUseError:
                self.leave()
                raise

    def leave(self) -> None:
        """The calling thread's last call ends."""
        me = threading.get_ident()
        mine = self._calls[me]
        mine.pop()
        if not mine:
            del self._calls[me]

    def nobody(self) -> bool:
        """Whether no thread is in a forward."""
        return not self._calls

    def _refuse_shared(self, me: int, call: BoundCall) -> None:
        for thread, theirs in list(self._calls.items()):
            for other in tuple(theirs) if thread != me else ():
                if not other.storage_ids.isdisjoint(call.storage_ids):
                    name = next(name for storage, _, name in call.storages if id(storage) in other.storage_ids)
                    owner = next((t.name for t in threading.enumerate() if t.ident == thread), "that has ended")
                    raise ConcurrentUseError(name, owner)
