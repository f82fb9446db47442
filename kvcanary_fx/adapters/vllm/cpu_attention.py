"""vLLM's attention on CPUs with AMX: in the tiles' layout a slot's bytes are not a view.

There, words of 32 bits hold an element of K of one token and the next one, and an element of V of two tokens, and a
block is cut into groups of 16 tokens (read: ``csrc/cpu/cpu_attn_amx.hpp``).  vLLM uses tiles for every bfloat16 cache
whose blocks are a multiple of 32 tokens, and allows no other blocks.  So a guarded engine uses the vector kernels
instead, whose layout the canary can read: the ones that a CPU without AMX runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from .patching import wrap

log = logging.getLogger("kvcanary")

_UNQUANTISED = (None, "auto", "bfloat16")


def hook() -> None:
    """From now on use no AMX tiles for attention in this process; does nothing if vLLM does not run on a CPU."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.v1.attention.backends import cpu_attn

    wrap(cpu_attn, "_get_attn_isa", without_tiles)


def without_tiles(
    original: Callable[..., str],
    dtype: Any,
    block_size: int,
    head_size: int | None = None,
    kv_cache_dtype: str | None = None,
) -> str:
    """The kernels that vLLM chose; the vector kernels instead of AMX tiles.

    Quantised caches are not guarded either way, and keep vLLM's choice.
    """
    chosen = original(dtype, block_size, head_size, kv_cache_dtype)
    if chosen != "amx" or kv_cache_dtype not in _UNQUANTISED:
        return chosen
    log.warning(
        "kvcanary.vllm attention runs without AMX tiles, in which no slot can be told from its neighbours: slower, and "
        "rounded as on a CPU without AMX. Unset KVCANARY_MODE to have the tiles, unguarded"
    )
    return "vec"
