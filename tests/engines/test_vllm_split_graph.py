"""Where the canary ops stand in the graph that vLLM splits at attention: names and order only.

The graph is private to vLLM and differs from version to version.  Accept with ``EXPECTTEST_ACCEPT=1``.
"""

from __future__ import annotations

import pytest
import vllm_runs
from expecttest import TestCase

VERSION = "0.32"


def written(pieces):
    """The pieces in order, one a line; below those at which vLLM splits, their ops."""
    return "\n".join(name if ops is None else "\n  ".join([f"{name} splits:", *ops]) for name, ops in pieces)


def as_vllm_has_it(pieces):
    return [[name, ops and [op.replace("kvcanary_vllm::", "vllm::") for op in ops]] for name, ops in pieces]


@pytest.fixture(scope="class")
def split(request, models, tmp_path_factory):
    """Gives a test class the pieces of a guarded and of a plain engine."""
    import vllm

    if not vllm.__version__.startswith(VERSION + "."):
        pytest.skip(f"the golden is of vLLM {VERSION}, this is {vllm.__version__}")
    run = {"model": "llama", "scene": "split graph", "forced": True}
    for name, mode in (("guarded", "log"), ("plain", "off")):
        cache = tmp_path_factory.mktemp(name)  # one of its own: what comes from a cache is not split
        (found,) = vllm_runs.results(models, [run], mode, VLLM_CACHE_ROOT=str(cache))
        setattr(request.cls, name, found["pieces"])
        if mode == "log":
            request.cls.forwards, request.cls.told = found["forwards"], found["told"]


@pytest.mark.usefixtures("split")
class TestSplitGraph(TestCase):
    def test_attention_has_its_checks_in_it(self):
        self.assertExpectedInline(
            written(self.guarded),
            """\
submod_0
submod_1 splits:
  kvcanary_vllm::unified_kv_cache_update
  kvcanary_vllm::unified_attention_with_output
submod_2
submod_3 splits:
  kvcanary_vllm::unified_kv_cache_update
  kvcanary_vllm::unified_attention_with_output
submod_4""",
        )

    def test_pieces_are_those_without_the_canary(self):
        assert as_vllm_has_it(self.guarded) == self.plain

    def test_somebody_is_told_before_each_layer_writes(self):
        """As what comes first in a graph of the model relies on, see ``LayerChecks.about_to_write``."""
        assert self.forwards >= 4
        assert self.told == 2 * self.forwards
