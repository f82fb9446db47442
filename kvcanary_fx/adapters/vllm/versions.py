"""Which versions of vLLM this was tested with, and what happens outside of them."""

from __future__ import annotations

import logging
import re

log = logging.getLogger("kvcanary")

#: First and last version that `make test-engines` ran with, as docs/vllm.md lists them.
TESTED = ((0, 32, 0), (0, 32, 0))


def parse(version: str) -> tuple[int, ...]:
    """The numbers of a version: ``0.32.0`` of ``0.32.0+cpu``."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(n) for n in found.group().split(".")) if found else ()


def is_tested(version: str) -> bool:
    """Whether a version lies in the tested range."""
    return TESTED[0] <= (parse(version) + (0, 0, 0))[:3] <= TESTED[1]


def warn_outside(version: str) -> bool:
    """Whether the version is outside of the tested range; says so, naming the range."""
    if is_tested(version):
        return False
    first, last = (".".join(map(str, v)) for v in TESTED)
    log.warning(
        "kvcanary.vllm version %s is outside of the tested range %s to %s: the checks are proved on scratch pools of "
        "the same layout before the first request, and the engine does not start if one stays silent",
        version,
        first,
        last,
    )
    return True
