"""What becomes of the canary ops behind our passes: names and order, after AOTAutograd and in Inductor's code.

Both are private to PyTorch and differ from version to version.  Accept with ``EXPECTTEST_ACCEPT=1``.
"""

from __future__ import annotations

import re
import unittest
from typing import Any

import torch
from expecttest import TestCase
from idioms import IDIOMS
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.utils import run_and_get_code

from kvcanary_fx import CanaryBackend, CanaryConfig

VERSION = "2.13"

#: Calls that a reader needs to see what stands where.
_SHOWN = "|".join(
    (
        r"kvcanary\.(\w+?)\.default",
        r"(index_put_?|index_copy|copy_|scatter)\.\w+",
        r"= torch\.ops\.aten\.(\w*attention\w*)",
        r"^(cpp_fused\w+)\(",
    )
)


def sequence(lines: list[str]) -> str:
    """The calls in some lines of code, one a line."""
    found = [re.search(_SHOWN, line.strip()) for line in lines]
    return "\n".join(next(name for name in m.groups() if name) for m in found if m)


def run(inner: Any) -> Any:
    torch._dynamo.reset()
    idiom = next(i for i in IDIOMS if i.name == "index_copy")
    model = torch.compile(idiom.run, backend=CanaryBackend(CanaryConfig(inner=inner)), fullgraph=True)
    with torch.no_grad():
        return model(*idiom.make())


@unittest.skipUnless(torch.__version__.startswith(VERSION), f"the golden is of torch {VERSION}")
class TestStages(TestCase):
    def test_after_aot_autograd(self):
        graphs: list[str] = []

        def keep(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
            graphs.append(gm.code)
            return gm.forward

        run(aot_autograd(fw_compiler=keep))
        self.assertExpectedInline(
            sequence(graphs[0].splitlines()),
            """\
begin
verify_halves
index_copy
index_copy
record_halves
_scaled_dot_product_flash_attention_for_cpu""",
        )

    def test_in_the_code_of_inductor(self):
        _, code = run_and_get_code(run, "inductor")
        self.assertExpectedInline(
            sequence(code[0].splitlines()),
            """\
begin
verify_halves
cpp_fused_index_copy_0
record_halves
_scaled_dot_product_flash_attention_for_cpu""",
        )
