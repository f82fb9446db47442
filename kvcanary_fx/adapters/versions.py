"""Whether an engine's version is one that its adapter was tested with.

An adapter hooks into undocumented parts of an engine.  Another version may change them or no longer call them,
and the canary would silently guard nothing: so the range is logged, and the adapter's self-proof decides.
"""

from __future__ import annotations

import dataclasses
import logging
import re

log = logging.getLogger("kvcanary")


@dataclasses.dataclass(frozen=True)
class Tested:
    """The versions of an engine that its adapter was tested with, as in the table of its docs page.

    Attributes:
        adapter: our name, for the log.
        engine: its name.
        first: the first version that is known to work.
        until: the first later version that is not known to work.
        elsewhere: what the adapter does with any other, for the log.
    """

    adapter: str
    engine: str
    first: str
    until: str
    elsewhere: str

    def has(self, version: str) -> bool:
        """Whether ``version`` lies in the range."""
        return _numbers(self.first) <= _numbers(version) < _numbers(self.until)

    def warn_outside(self, version: str) -> bool:
        """Whether ``version`` lies outside the range; if so, logs the range."""
        if self.has(version):
            return False
        log.warning(
            "kvcanary.%s %s %s is untested: the adapter was tested with %s up to, not including, %s; %s",
            self.adapter,
            self.engine,
            version,
            self.first,
            self.until,
            self.elsewhere,
        )
        return True


def _numbers(version: str) -> tuple[int, ...]:
    """``(0, 32, 0)`` of ``0.32.0+cpu``, and of ``0.32``."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    numbers = tuple(map(int, found.group().split("."))) if found else ()
    return (*numbers, 0, 0, 0)[:3]
