"""SGLang's own canary kernels out of an sglang package on sys.path, without importing the rest of SGLang.

What is needed of it is ``sglang/kernels/ops/kv_canary`` and, to compile for a GPU, ``sglang/kernels/jit/csrc`` and
``sglang/kernels/jit/include``; and of the package ``apache-tvm-ffi`` all.  The packages above are entered into
``sys.modules`` as empty ones, since their own imports are SGLang's server; so is SGLang's builder of CUDA modules,
which has tvm-ffi build the same files with the same flags here.
"""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import re
import sys
import types
from pathlib import Path
from typing import Any

import torch
from sglang_package import PeerMissingError, find_sglang, version

CANARY = "sglang.kernels.ops.kv_canary"

#: SGLang's flags for device code (0.5.23), after the architecture.
FLAGS = ["-std=c++20", "-O3", "--expt-relaxed-constexpr"]


def load() -> types.SimpleNamespace:
    """SGLang's kernels, by the modules they are in: ``consts``, ``verify``, ``write``, ``plan``; and ``version``.

    Raises:
        PeerMissingError: they are not there, or an import of theirs fails.
    """
    folder = find_sglang()
    for name in ("sglang", "sglang.kernels", "sglang.kernels.jit", "sglang.kernels.ops", CANARY):
        _enter(name, folder.joinpath(*name.split(".")[1:]))
    builder = _enter("sglang.kernels.jit.utils", folder / "kernels/jit/utils")
    builder.cache_once = functools.cache  # type: ignore[attr-defined]
    builder.make_cpp_args = _template_arguments  # type: ignore[attr-defined]
    builder.load_jit = functools.partial(_build, folder / "kernels/jit")  # type: ignore[attr-defined]
    try:
        parts = {name: importlib.import_module(f"{CANARY}.{name}") for name in ("consts", "verify", "write")}
        parts["plan"] = importlib.import_module(f"{CANARY}.plan.api")
    except ImportError as e:
        raise PeerMissingError(f"the canary kernels in {folder} do not import: {e}") from e
    return types.SimpleNamespace(version=version(folder), **parts)


def _enter(name: str, folder: Path) -> types.ModuleType:
    """An empty package in the place of the one in a folder, whose modules can be imported all the same."""
    module = types.ModuleType(name)
    module.__path__ = [str(folder)]
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    sys.modules[name] = module
    return module


class _TemplateArguments(list[str]):
    """Arguments of a C++ template; as text, what stands between the brackets."""

    def __str__(self) -> str:
        return ", ".join(self)


def _template_arguments(*values: bool | int) -> _TemplateArguments:
    return _TemplateArguments(str(v).lower() if isinstance(v, bool) else str(v) for v in values)


def _build(jit: Path, *names: str, cuda_files: list[str], cuda_wrappers: list[tuple[str, str]]) -> Any:
    """Compile one module with nvcc and load it."""
    path = compile_module(jit, names, cuda_files, cuda_wrappers)
    return _tvm_ffi().load_module(path)


def compile_module(
    jit: Path, names: tuple[str, ...], cuda_files: list[str], cuda_wrappers: list[tuple[str, str]]
) -> str:
    """The library that tvm-ffi makes of some of SGLang's sources, exporting each wrapper's function under its name.

    Raises:
        PeerMissingError: tvm-ffi or a source is missing.
    """
    sources = [jit / "csrc" / name for name in cuda_files]
    missing = [path for path in [*sources, jit / "include"] if not path.exists()]
    if missing:
        raise PeerMissingError(f"{missing[0]} is missing: the GPU's kernels are compiled from it")
    tvm_ffi = _tvm_ffi()
    exports = [f"TVM_FFI_DLL_EXPORT_TYPED_FUNC({name}, ({function}));" for name, function in cuda_wrappers]
    text = [f'#include "{path}"' for path in sources] + ["namespace sglang {", *exports, "}"]
    major, minor = _capability()
    os.environ.setdefault("TVM_FFI_CUDA_ARCH_LIST", f"{major}.{minor}{'a' if major >= 9 else ''}")
    built: str = tvm_ffi.cpp.build_inline(
        name="_".join(["peer", *names]),
        cuda_sources="\n".join(text),
        extra_cuda_cflags=[f"-DSGL_CUDA_ARCH={100 * major + 10 * minor}", *FLAGS],
        extra_include_paths=[str(jit / "include")],
        extra_ldflags=[f"-L{folder}" for folder in _folders_of_cudart()],
    )
    return built


def _folders_of_cudart() -> list[Path]:
    """Where a linker finds CUDA's runtime, besides where tvm-ffi takes nvcc's own to be.

    That is wrong where the nvcc on the path is a script; the library that torch has loaded may lack its plain name.
    """
    folders = []
    maps = Path("/proc/self/maps")
    loaded = re.findall(r"\S*/libcudart\.so\S*", maps.read_text()) if maps.exists() else []
    if loaded:
        link = Path(os.environ.get("TVM_FFI_CACHE_DIR", "~/.cache/tvm-ffi")).expanduser() / "cudart/libcudart.so"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(loaded[0])
        folders.append(link.parent)
    return [*folders, *(lib for home in sorted(Path("/usr/local").glob("cuda*")) for lib in home.glob("lib*"))]


def _capability() -> tuple[int, int]:
    """Of this machine's GPU; without one, of an H100 or H200, so that it can be seen whether the sources compile."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)


def _tvm_ffi() -> Any:
    try:
        importlib.import_module("tvm_ffi.cpp")
        return importlib.import_module("tvm_ffi")
    except ImportError as e:
        raise PeerMissingError(
            f"SGLang's CUDA kernels are built by apache-tvm-ffi, which does not import: {e}. "
            "`pip install --no-deps --target DIRECTORY apache-tvm-ffi`"
        ) from e
