"""Hugging Face transformers: one call guards a model's ``generate`` and ``generate_batch``.

::

    from kvcanary_fx.adapters import huggingface

    huggingface.protect(model)
    model.generate(ids)  # the prefill, too
    model.generate_batch(prompts)
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ...compile.protect import take_compile_options
from ...config import CanaryConfig, override
from .generate import Protection, attach, batch_session, has_its_own_generate, unprotect
from .versions import require_known_batches, require_known_version

__all__ = ["Protection", "attach", "batch_session", "protect", "unprotect"]

#: Settings of ``install_canary`` that a session over a paged cache accepts.
_INSTALL = ("sweep_every", "health_every", "stats_every", "self_test")


def protect(model: Any, **settings: Any) -> Any:
    """Guard the KV caches of ``generate`` and ``generate_batch`` of a Hugging Face model.

    ``generate`` uses a static cache unless it is told otherwise, and each of its forwards, the prefill too, is
    compiled with the canary.  ``generate_batch``, and the managers of ``init_continuous_batching``, get an engine's
    session over the paged cache: its blocks, tables, indices, tokens and bytes are checked in every batch.

    Args:
        model: a ``PreTrainedModel``, guarded in place.  A deep copy or a pickle of it is unguarded.
        settings: those of :func:`kvcanary_fx.protect`, and ``sweep_every``, ``health_every``, ``stats_every`` and
            ``self_test`` of :func:`kvcanary_fx.install_canary`.

    Returns:
        ``model``; untouched with ``mode="off"``.

    Raises:
        TypeError: ``model`` has no ``generate``, or one that is not transformers' ``GenerationMixin``'s.
        UnknownSettingError, InvalidSettingError: a setting that does not exist, or a value it cannot have.
        SelfTestError: transformers has an untested version, in which a planted fault was not found; for a fault in a
            batch ``generate_batch`` and ``init_continuous_batching`` raise it.
    """
    if not isinstance(model, nn.Module) or not hasattr(model, "generate"):
        raise TypeError(
            f"huggingface.protect takes a transformers model with generate, not {type(model).__name__}: "
            "kvcanary_fx.protect guards any other module"
        )
    if has_its_own_generate(model):
        raise TypeError(
            f"{type(model).__name__} has a generate of its own, and huggingface.protect wraps that of transformers' "
            "GenerationMixin: kvcanary_fx.protect guards each call of the model with a cache that keeps its place"
        )
    options = take_compile_options(settings)
    install = {name: settings.pop(name) for name in _INSTALL if name in settings}
    config = override(CanaryConfig.from_env(), settings, "huggingface.protect()")
    if config.mode == "off":
        return model
    unprotect(model)
    require_known_version()
    return attach(model, config, options, install, require_known_batches)
