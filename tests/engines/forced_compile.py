"""vLLM's own compilation (mode VLLM_COMPILE) on a CPU, where the platform would replace it by a simpler one.

What vLLM's pass manager needs a GPU for is left out: its fusions, and the functionalisation fix-up that Inductor does
by itself.  Splitting, piecewise compilation, graph partition and the caches are vLLM's.
"""

from __future__ import annotations

from typing import Any


def allow_vllm_compile() -> None:
    """Let ``compilation_config={"mode": 3}`` stand on CPUs, in this process."""
    from vllm.compilation.passes import pass_manager
    from vllm.compilation.passes.utility.fix_functionalization import FixFunctionalizationPass
    from vllm.config import CompilationMode
    from vllm.platforms.cpu import CpuPlatform

    update = CpuPlatform.check_and_update_config.__func__  # type: ignore[attr-defined]
    configure = pass_manager.PostGradPassManager.configure

    def keep_mode(cls: Any, config: Any) -> None:
        wanted = config.compilation_config.mode
        update(cls, config)
        if wanted == CompilationMode.VLLM_COMPILE:
            config.compilation_config.mode = wanted
            config.compilation_config.ir_enable_torch_wrap = True
            config.compilation_config.compile_sizes = config.compilation_config.compile_sizes or []

    def without_fusions(self: Any, config: Any) -> Any:
        passes = config.compilation_config.pass_config
        for name, value in list(vars(passes).items()):
            if isinstance(value, bool) and name.startswith(("fuse_", "enable_")):
                setattr(passes, name, False)
        return configure(self, config)

    CpuPlatform.check_and_update_config = classmethod(keep_mode)  # type: ignore[method-assign]
    FixFunctionalizationPass.__call__ = lambda self, graph: None
    pass_manager.PostGradPassManager.configure = without_fusions
