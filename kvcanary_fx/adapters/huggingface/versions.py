"""The versions of transformers that the adapter was tested with; in others it first proves itself.

Tiny models generate, clean and with planted faults, and what is not found, or found where nothing is, refuses to start.
"""

from __future__ import annotations

import functools

from ...errors import SelfTestError
from ..versions import Tested
from . import proof

TESTED = Tested("huggingface", "transformers", "5.23", "5.24", "now proving on a tiny model that it works here")


@functools.cache
def require_known_version() -> None:
    """Warn of a version outside the tested range, and let the adapter's self-proof decide.

    Raises:
        SelfTestError: the proof failed.
    """
    import transformers

    if not TESTED.warn_outside(transformers.__version__):
        return
    failed = [(f.check, f.fault, f.told) for f in proof.examine() if not f.ok]
    if failed:
        raise SelfTestError(failed)
