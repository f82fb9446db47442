"""The versions of transformers that the adapter was tested with; in others it runs the self-proof first.

Tiny models generate, clean and with planted faults; a miss or a false alarm is an error at the start.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

from ...errors import SelfTestError
from ...proof.doctor import Finding
from ..versions import Tested
from . import proof

TESTED = Tested("huggingface", "transformers", "5.23", "5.25", "now proving on a tiny model that it works here")


@functools.cache
def require_known_version() -> None:
    """Warn about a version outside the tested range, and let the self-proof of ``generate`` decide.

    Raises:
        SelfTestError: the proof failed.
    """
    if TESTED.warn_outside(transformers_version()):
        _require(proof.examine_generate())


@functools.cache
def require_known_batches() -> None:
    """The same for ``generate_batch``, before the first batch: it relies on more undocumented behaviour.

    Raises:
        SelfTestError: the proof failed.
    """
    if not TESTED.has(transformers_version()):
        _require(proof.examine_batches())


def transformers_version() -> str:
    """The version of the installed transformers."""
    import transformers

    version: str = transformers.__version__
    return version


def _require(findings: Iterable[Finding]) -> None:
    failed = [(f.check, f.fault, f.told) for f in findings if not f.ok]
    if failed:
        raise SelfTestError(failed)
