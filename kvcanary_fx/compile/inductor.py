"""Compiling with Inductor: modes and options as torch.compile takes them, and a look at the code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ..errors import LintError
from ..passes.code_lint import pool_sized_buffers
from ..passes.graph_plan import GraphPlan
from ..reports import summary


def compile_with_inductor(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    mode: str | None,
    options: Mapping[str, Any],
    plan: GraphPlan | None,
    lint: str,
) -> Callable[..., Any]:
    """Compile a graph with Inductor.

    Raises:
        LintError: ``lint="raise"`` and the code allocates a buffer of a pool's size.
        RuntimeError: an option that Inductor does not know.
    """
    # the class behind backend="inductor": it validates the options and applies the mode
    wrapper = torch._TorchCompileInductorWrapper(mode, dict(options) or None, None)  # type: ignore[no-untyped-call]
    if plan is None or lint == "off":
        compiled: Callable[..., Any] = wrapper(gm, list(inputs))  # type: ignore[no-untyped-call]
        return compiled
    compiled, sources = compile_and_read(gm, inputs, wrapper.config)
    findings = [str(f) for source in sources for f in pool_sized_buffers(source, plan.pool_bytes)]
    if findings and lint == "raise":
        raise LintError(findings)
    for finding in findings:
        summary.log.warning("kvcanary.lint %s: %s", plan.name, finding)
    return compiled


def compile_and_read(
    gm: fx.GraphModule, inputs: Sequence[Any], patches: Mapping[str, Any]
) -> tuple[Callable[..., Any], list[str]]:
    """Compile a graph and return Inductor's code for it.

    The compile caches are off for this compilation: a cached artifact comes without code.
    """
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    sources: list[str] = []

    def inner(*args: Any, **kwargs: Any) -> Any:
        output = compile_fx_inner(*args, **kwargs)
        sources.append(getattr(output, "source_code", "") or "")
        return output

    compiled: Any = compile_fx(
        gm, list(inputs), inner_compile=inner, config_patches={**patches, "force_disable_caches": True}
    )
    return compiled, sources
