"""The versions of transformers that the adapter was tested with, and what happens with others.

The adapter wraps methods that transformers does not document.  In an untested version they may do something else, or
be called no longer, and the canary would guard nothing without a word.  So there the adapter first proves itself: tiny
models generate, clean and with planted faults, and what is not found, or found where nothing is, refuses to start.
"""

from __future__ import annotations

import functools
import logging

from ..errors import SelfTestError

log = logging.getLogger("kvcanary")

#: First version that is known to work, and the first that is not known to.
TESTED = ("5.23", "5.24")


@functools.cache
def require_known_version() -> None:
    """Warn of a version outside the tested range, and let the adapter's self-proof decide.

    Raises:
        SelfTestError: the proof failed.
    """
    import transformers

    version = transformers.__version__
    if _number(TESTED[0]) <= _number(version) < _number(TESTED[1]):
        return
    log.warning(
        "kvcanary.huggingface transformers %s is untested: the adapter was tested with %s up to, not including, %s; "
        "now proving on a tiny model that it works here",
        version,
        *TESTED,
    )
    from . import huggingface_proof

    failed = [(f.check, f.fault, f.told) for f in huggingface_proof.examine() if not f.ok]
    if failed:
        raise SelfTestError(failed)


def _number(version: str) -> tuple[int, ...]:
    """``5.23.0.dev1`` as ``(5, 23)``."""
    return tuple(int(part) for part in version.split(".")[:2])
