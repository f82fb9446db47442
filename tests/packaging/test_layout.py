"""The layout of the repository, which several tools would break without a word."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kvcanary_fx
from kvcanary_fx.kernels import ops

ROOT = Path(__file__).parents[2]
checkout = pytest.mark.skipif(not (ROOT / "passes").is_dir(), reason="not a checkout")


@checkout
@pytest.mark.parametrize("name", ["passes", "kernels"])
def test_no_top_level_package_shadows_another(name):
    assert not (ROOT / name / "__init__.py").exists(), f"a package named {name} shadows the one on PyPI"


@checkout
@pytest.mark.parametrize("name", ["passes", "kernels"])
def test_links_serve_the_checkout(name):
    link = ROOT / "kvcanary_fx" / name
    assert link.is_symlink()
    assert link.readlink() == Path("..") / name


@checkout
def test_links_are_tracked_as_links():
    listed = subprocess.run(
        ["git", "ls-files", "-s", "kvcanary_fx/passes", "kvcanary_fx/kernels"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    assert [line.split()[0] for line in listed.stdout.splitlines()] == ["120000", "120000"]


def test_submodules_are_importable_under_our_name_only():
    program = (
        "import kvcanary_fx.passes.pipeline, kvcanary_fx.kernels.ops, sys;"
        "assert 'passes' not in sys.modules and 'kernels' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT if (ROOT / "passes").is_dir() else None)


@pytest.mark.parametrize(("asked", "torch", "passes"), [
    ("__version__", False, False), ("CanaryConfig", True, False), ("CanaryBackend", True, True),
])  # fmt: skip
def test_importing_us_imports_what_is_asked_for(asked, torch, passes):
    if not importlib.metadata.entry_points(group="torch_dynamo_backends", name="kvcanary"):
        pytest.skip("the package is not installed, so its import registers its backend")
    program = f"import sys; from kvcanary_fx import {asked}\nprint(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, cwd=ROOT)
    seen = set(out.stdout.split())
    assert [name in seen for name in ("torch", "kvcanary_fx.passes.pipeline")] == [torch, passes]
    assert "transformers" not in seen


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_engine_whose_canary_is_off_imports_next_to_nothing_of_us(engine):
    if not importlib.metadata.entry_points(group="torch_dynamo_backends", name="kvcanary"):
        pytest.skip("the package is not installed, so its import registers its backend")
    program = f"import sys; from kvcanary_fx.adapters.{engine} import plugin; plugin.register(); print(*sys.modules)"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("KVCANARY_")}
    out = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, cwd=ROOT, env=environment
    )
    ours = [name for name in out.stdout.split() if name.startswith("kvcanary_fx.")]
    assert len(ours) < 20
    assert not {"kvcanary_fx.engine", "kvcanary_fx.runtime", "kvcanary_fx.compile"} & {*ours}


def test_every_name_of_the_package_is_there_and_known_to_type_checkers():
    for name in kvcanary_fx.__all__:
        assert getattr(kvcanary_fx, name) is not None
    tree = ast.parse(Path(kvcanary_fx.__file__).read_text())
    known = {
        alias.name: f".{node.module}" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level == 1
        for alias in node.names if alias.name != "register_name"
    }  # fmt: skip
    assert known == kvcanary_fx._PLACE_OF
    assert sorted(known) == sorted(kvcanary_fx.__all__)
    assert set(dir(kvcanary_fx)) >= {*known, "__version__"}


def test_a_module_of_the_package_is_an_attribute_of_it_and_no_other_name_is():
    assert kvcanary_fx.errors.CanaryError is kvcanary_fx.CanaryError
    with pytest.raises(AttributeError, match="module 'kvcanary_fx' has no attribute 'Canary'"):
        _ = kvcanary_fx.Canary


@pytest.mark.parametrize("gpus", [0, 1])
def test_what_a_gpu_needs_is_imported_with_the_backend_where_one_is_seen(gpus):
    """So that a first call need not; CUDA is not initialized, since the process may fork."""
    program = (
        f"import sys, torch; torch.version.cuda = '13.0'; torch.cuda.device_count = lambda: {gpus}\n"
        "from kvcanary_fx import kvcanary_backend\n"
        "wanted = 'kvcanary_fx.kernels.content.gpu', 'triton.experimental.gluon.nvidia.hopper'\n"
        "print([name in sys.modules for name in wanted], torch.cuda.is_initialized())"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    out = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, cwd=ROOT, env=environment
    )
    assert out.stdout == f"[{bool(gpus)}, {bool(gpus)}] False\n"


def test_a_triton_that_fails_does_not_keep_us_from_being_imported(monkeypatch):
    """Whoever launches a kernel is told."""
    asked = []

    def fail(name):
        asked.append(name)
        raise RuntimeError("0 active drivers")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(ops, "_gpu_module", fail)
    ops.import_gpu_kernels()
    assert asked == [".content.gpu"]


def files_of(package: Path) -> set[str]:
    """The package's own files, also behind the links of a checkout, which rglob does not follow."""
    roots = (package, package / "passes", package / "kernels")
    found = (file for root in roots for kind in ("*.py", "py.typed") for file in root.rglob(kind))
    return {str(file.relative_to(package)) for file in found}


@checkout
def test_every_file_is_packaged():
    """Run against what pip installed: a room that pyproject.toml does not list would not be there."""
    assert files_of(Path(kvcanary_fx.__file__).parent) == files_of(ROOT / "kvcanary_fx")


@checkout
def test_readme_says_the_versions_of_torch_that_are_installed():
    bounds = re.search(r'"torch>=(\d+\.\d+),<(\d+)\.(\d+)"', (ROOT / "pyproject.toml").read_text())
    assert bounds is not None
    first, major, after = bounds.groups()
    assert f"torch {first} to {major}.{int(after) - 1}," in (ROOT / "README.md").read_text()


def test_version_is_said_once():
    try:
        assert importlib.metadata.version("kvcanary-fx") == kvcanary_fx.__version__
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package is not installed")
