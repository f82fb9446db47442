"""Where the sglang package is that the benchmark is given, found without importing it or torch."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path


class PeerMissingError(Exception):
    """SGLang's kernels cannot be loaded here; the message says what to do about it."""


def find_sglang() -> Path:
    """The folder of the package ``sglang``, which is not imported.

    Raises:
        PeerMissingError: there is none on sys.path, or it has no canary.
    """
    spec = importlib.util.find_spec("sglang")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    if not places:
        raise PeerMissingError(
            "sglang is not on sys.path. Give it: `pip install --no-deps --target DIRECTORY sglang==0.5.23`, and for a "
            "GPU apache-tvm-ffi into the same directory; then PYTHONPATH=DIRECTORY python ... sglang_peer.py"
        )
    folder = Path(places[0])
    if not (folder / "kernels/ops/kv_canary/verify.py").exists():
        raise PeerMissingError(f"{folder} has no kernels/ops/kv_canary: another version? 0.5.23 is known to work")
    return folder


def version(folder: Path) -> str:
    """Of the distribution that the folder is from, if its metadata lie beside it."""
    for found in importlib.metadata.distributions(name="sglang", path=[str(folder.parent)]):
        return found.version
    return "of unknown version"
