"""Golden graphs: what each idiom's graph looks like once the canaries are in.

Accept changes with ``EXPECTTEST_ACCEPT=1 pytest tests/passes/test_goldens.py`` and read the diff.
"""

from __future__ import annotations

from typing import Any

import torch
from expecttest import TestCase
from idioms import IDIOMS, NOT_KV, STATES
from opaque_engine import Model
from render import render

from kvcanary_fx.passes.pipeline import passes, run_passes

BY_NAME = {idiom.name: idiom for idiom in IDIOMS + STATES + NOT_KV}


def golden(name: str, rewrite: bool = False, keep: tuple[str, ...] = ()) -> str:
    """The rewritten graph of an idiom as text."""
    torch._dynamo.reset()
    texts = []

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        rewritten, _ = run_passes(gm, example_inputs, passes(rewrite=rewrite))
        texts.append(render(rewritten, keep))
        return gm.forward

    with torch.no_grad():
        torch.compile(BY_NAME[name].run, backend=backend, fullgraph=True)(*BY_NAME[name].make())
    return "\n".join(texts)


def opaque(hoisted: bool) -> str:
    """The rewritten graph of one layer whose attention is an opaque op; twice over, which changes nothing more."""
    texts = []

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        for _ in range(2):
            gm, _ = run_passes(gm, example_inputs, passes(pools_in=lambda _: 0, side=True))
        texts.append(render(gm))
        return lambda *args: (args[0],)  # nothing runs: there is no pool

    with torch.no_grad():
        torch.compile(Model(1, hoisted), backend=backend, fullgraph=True)(torch.randn(2, 8))
    return "\n".join(texts)


class TestGoldens(TestCase):
    maxDiff = None

    def test_named_states(self):
        self.assertExpectedInline(
            golden("named_states"),
            """\
begin_default = canary.begin(state)
getitem = getitem(k, (:, 0))
transpose = transpose(getitem, 1, 2)
verify_default = canary.verify(conv_states, None, [], [], state, 0, 0)
cat = cat((conv_states, transpose), dim=-1)
getitem_1 = getitem(cat, (..., -4:None))
copy_ = copy_(conv_states, getitem_1)
record_default = canary.record(conv_states, getitem_1, [], [], None, state, 0, 0)
verify_default_1 = canary.verify(ssm_states, None, [], [], state, 1, 1)
mul = mul(ssm_states, 0.9)
transpose_1 = transpose(k, 2, 3)
matmul = matmul(transpose_1, v)
add = add(mul, matmul)
copy__1 = copy_(ssm_states, add)
record_default_1 = canary.record(ssm_states, add, [], [], None, state, 1, 1)
matmul_1 = matmul(q, ssm_states)
mean = mean(conv_states)
add_1 = add(matmul_1, mean)""",
        )

    def test_setitem(self):
        self.assertExpectedInline(
            golden("setitem"),
            """\
begin_default = canary.begin(state)
verify_default = canary.verify(kc, k, [pos], [], state, 0, 0)
setitem = setitem(kc, (:, :, pos), k)
record_default = canary.record(kc, k, [pos], [], pos, state, 0, 0)
verify_default_1 = canary.verify(vc, v, [pos], [], state, 1, 1)
setitem_1 = setitem(vc, (:, :, pos), v)
record_default_1 = canary.record(vc, v, [pos], [], pos, state, 1, 1)
scaled_dot_product_attention = scaled_dot_product_attention(q, kc, vc)""",
        )

    def test_setitem_slice(self):
        self.assertExpectedInline(
            golden("setitem_slice"),
            """\
begin_default = canary.begin(state)
verify_default = canary.verify(kc, k, [], [3, 5], state, 0, 0)
setitem = setitem(kc, (:, :, 3:5), k)
record_default = canary.record(kc, k, [], [3, 5], None, state, 0, 0)
verify_default_1 = canary.verify(vc, v, [], [3, 5], state, 1, 1)
setitem_1 = setitem(vc, (:, :, 3:5), v)
record_default_1 = canary.record(vc, v, [], [3, 5], None, state, 1, 1)
scaled_dot_product_attention = scaled_dot_product_attention(q, kc, vc)""",
        )

    def test_setitem_batch_slice(self):
        self.assertExpectedInline(
            golden("setitem_batch_slice"),
            """\
begin_default = canary.begin(state)
verify_default = canary.verify(kc, k, [], [3, 5], state, 0, 0)
setitem = setitem(kc, (None:2, :, 3:5), k)
record_default = canary.record(kc, k, [], [3, 5], None, state, 0, 0)
verify_default_1 = canary.verify(vc, v, [], [3, 5], state, 1, 1)
setitem_1 = setitem(vc, (None:2, :, 3:5), v)
record_default_1 = canary.record(vc, v, [], [3, 5], None, state, 1, 1)
scaled_dot_product_attention = scaled_dot_product_attention(q, kc, vc)""",
        )

    def test_setitem_rows_and_positions(self):
        self.assertExpectedInline(
            golden("setitem_rows_and_positions"),
            """\
begin_default = canary.begin(state)
arange = arange(2, device=cpu)
rows = unsqueeze(arange, 1)
transpose = transpose(k, 1, 2)
expand = expand(pos, 2, 2)
verify_default = canary.verify(kc, transpose, [rows, expand], [], state, 0, 0)
setitem = setitem(kc, (rows, :, expand), transpose)
record_default = canary.record(kc, transpose, [rows, expand], [], pos, state, 0, 0)
transpose_1 = transpose(v, 1, 2)
expand_1 = expand(pos, 2, 2)
verify_default_1 = canary.verify(vc, transpose_1, [rows, expand_1], [], state, 1, 1)
setitem_1 = setitem(vc, (rows, :, expand_1), transpose_1)
record_default_1 = canary.record(vc, transpose_1, [rows, expand_1], [], pos, state, 1, 1)
scaled_dot_product_attention = scaled_dot_product_attention(q, kc, vc)""",
        )

    def test_index_copy(self):
        self.assertExpectedInline(
            golden("index_copy"),
            """\
begin_default = canary.begin(state)
verify_default = canary.verify(kc, k, [pos], [], state, 0, 0)
index_copy_ = index_copy_(kc, 2, pos, k)
record_default = canary.record(kc, k, [pos], [], pos, state, 0, 0)
verify_default_1 = canary.verify(vc, v, [pos], [], state, 1, 1)
index_copy__1 = index_copy_(vc, 2, pos, v)
record_default_1 = canary.record(vc, v, [pos], [], pos, state, 1, 1)
scaled_dot_product_attention = scaled_dot_product_attention(q, kc, vc)""",
        )

    def test_index_put(self):
        self.assertExpectedInline(
            golden("index_put"),
            """\
begin_default = canary.begin(state)
transpose = transpose(kc, 1, 2)
arange = arange(2, device=cpu)
unsqueeze = unsqueeze(arange, 1)
unsqueeze_1 = unsqueeze(pos, 0)
transpose_1 = transpose(k, 1, 2)
verify_default = canary.verify(transpose, transpose_1, [unsqueeze, unsqueeze_1], [], state, 0, 0)
index_put_ = index_put_(transpose, (unsqueeze, unsqueeze_1), transpose_1)
record_default = canary.record(transpose, transpose_1, [unsqueeze, unsqueeze_1], [], pos, state, 0, 0)
transpose_2 = transpose(vc, 1, 2)
arange_1 = arange(2, device=cpu)
unsqueeze_2 = unsqueeze(arange_1, 1)
unsqueeze_3 = unsqueeze(pos, 0)
transpose_3 = transpose(v, 1, 2)
verify_default_1 = canary.verify(transpose_2, transpose_3, [unsqueeze_2, unsqueeze_3], [], state, 1, 1)
index_put__1 = index_put_(transpose_2, (unsqueeze_2, unsqueeze_3), transpose_3)
record_default_1 = canary.record(transpose_2, transpose_3, [unsqueeze_2, unsqueeze_3], [], pos, state, 1, 1)
scaled_dot_product_attention = scaled_dot_product_attention(q, kc, vc)""",
        )

    def test_scatter(self):
        self.assertExpectedInline(
            golden("scatter"),
            """\
begin_default = canary.begin(state)
view = view(pos, 1, 1, 2, 1)
index = expand(view, 2, 2, 2, 16)
verify_default = canary.verify(kc, k, [index], [], state, 0, 0)
scatter_ = scatter_(kc, 2, index, k)
record_default = canary.record(kc, k, [index], [], pos, state, 0, 0)
verify_default_1 = canary.verify(vc, v, [index], [], state, 1, 1)
scatter__1 = scatter_(vc, 2, index, v)
record_default_1 = canary.record(vc, v, [index], [], pos, state, 1, 1)
scaled_dot_product_attention = scaled_dot_product_attention(q, kc, vc)""",
        )

    def test_narrow_copy(self):
        self.assertExpectedInline(
            golden("narrow_copy"),
            """\
begin_default = canary.begin(state)
narrow = narrow(kc, 2, 3, 2)
verify_default = canary.verify(kc, k, [], [3, 5], state, 0, 0)
copy_ = copy_(narrow, k)
record_default = canary.record(kc, k, [], [3, 5], None, state, 0, 0)
narrow_1 = narrow(vc, 2, 3, 2)
verify_default_1 = canary.verify(vc, v, [], [3, 5], state, 1, 1)
copy__1 = copy_(narrow_1, v)
record_default_1 = canary.record(vc, v, [], [3, 5], None, state, 1, 1)
scaled_dot_product_attention = scaled_dot_product_attention(q, kc, vc)""",
        )

    def test_slice_copy(self):
        self.assertExpectedInline(
            golden("slice_copy"),
            """\
begin_default = canary.begin(state)
getitem = getitem(kc, (:, :, 3:5))
verify_default = canary.verify(kc, k, [], [3, 5], state, 0, 0)
copy_ = copy_(getitem, k)
record_default = canary.record(kc, k, [], [3, 5], None, state, 0, 0)
getitem_1 = getitem(vc, (:, :, 3:5))
verify_default_1 = canary.verify(vc, v, [], [3, 5], state, 1, 1)
copy__1 = copy_(getitem_1, v)
record_default_1 = canary.record(vc, v, [], [3, 5], None, state, 1, 1)
scaled_dot_product_attention = scaled_dot_product_attention(q, kc, vc)""",
        )

    def test_rolling(self):
        self.assertExpectedInline(
            golden("rolling"),
            """\
begin_default = canary.begin(state)
getitem = getitem(kc, (:, :, 2:None))
verify_default = canary.verify(kc, None, [], [], state, 0, 0)
cat = cat((getitem, k), dim=2)
copy_ = copy_(kc, cat)
record_default = canary.record(kc, cat, [], [], None, state, 0, 0)
getitem_1 = getitem(vc, (:, :, 2:None))
verify_default_1 = canary.verify(vc, None, [], [], state, 1, 1)
cat_1 = cat((getitem_1, v), dim=2)
copy__1 = copy_(vc, cat_1)
record_default_1 = canary.record(vc, cat_1, [], [], None, state, 1, 1)
scaled_dot_product_attention = scaled_dot_product_attention(q, kc, vc)""",
        )

    def test_flex(self):
        # the block mask that flex_attention builds is PyTorch's own, and another in each version
        self.assertExpectedInline(
            golden("flex", keep=("index_copy_",)),
            """\
begin_default = canary.begin(state)
verify_default = canary.verify(kc, k, [pos], [], state, 0, 0)
index_copy_ = index_copy_(kc, 2, pos, k)
record_default = canary.record(kc, k, [pos], [], pos, state, 0, 0)
verify_default_1 = canary.verify(vc, v, [pos], [], state, 1, 1)
index_copy__1 = index_copy_(vc, 2, pos, v)
record_default_1 = canary.record(vc, v, [pos], [], pos, state, 1, 1)""",
        )

    def test_in_checkpoint(self):
        self.assertExpectedInline(
            golden("in_checkpoint"),
            """\
begin_default = canary.begin(state)
observe_default = canary.observe(kc, state, 0)
observe_default_1 = canary.observe(vc, state, 1)
tag_activation_checkpoint = tag_activation_checkpoint(<graph>, kc, pos, k, vc, v, q, use_reentrant=False)
record_changed_default = canary.record_changed(kc, state, 0)
record_changed_default_1 = canary.record_changed(vc, state, 1)
getitem = getitem(tag_activation_checkpoint, 0)""",
        )

    def test_in_cond(self):
        if "in_cond" not in BY_NAME:
            self.skipTest("this torch refuses a branch that writes to its inputs")
        self.assertExpectedInline(
            golden("in_cond"),
            """\
begin_default = canary.begin(state)
sum_1 = sum(pos)
gt = gt(sum_1, 0)
observe_default = canary.observe(kc, state, 0)
observe_default_1 = canary.observe(vc, state, 1)
cond = cond(gt, <graph>, <graph>, (k, kc, pos, v, vc))
record_changed_default = canary.record_changed(kc, state, 0)
record_changed_default_1 = canary.record_changed(vc, state, 1)
extra = getitem(cond, 0)
scaled_dot_product_attention = scaled_dot_product_attention(q, kc, vc)
sum_2 = sum(extra)
mul = mul(sum_2, 0)
add = add(scaled_dot_product_attention, mul)""",
        )

    def test_in_subgraph(self):
        self.assertExpectedInline(
            golden("in_subgraph"),
            """\
begin_default = canary.begin(state)
observe_default = canary.observe(kc, state, 0)
observe_default_1 = canary.observe(vc, state, 1)
invoke_subgraph = invoke_subgraph(<graph>, subgraph_0, kc, pos, k, vc, v, q)
record_changed_default = canary.record_changed(kc, state, 0)
record_changed_default_2 = canary.record_changed(vc, state, 1)
getitem = getitem(invoke_subgraph, 0)
add = add(k, 1)
add_1 = add(v, 1)
add_2 = add(pos, 2)
invoke_subgraph_1 = invoke_subgraph(<graph>, subgraph_0, kc, add_2, add, vc, add_1, q)
record_changed_default_1 = canary.record_changed(kc, state, 0)
record_changed_default_3 = canary.record_changed(vc, state, 1)
getitem_1 = getitem(invoke_subgraph_1, 0)
add_3 = add(getitem, getitem_1)""",
        )

    def test_halves(self):
        self.assertExpectedInline(
            golden("halves"),
            """\
begin_default = canary.begin(state)
getitem = getitem(k, 0)
transpose = transpose(getitem, 0, 1)
getitem_1 = getitem(kv, 0)
verify_default = canary.verify(getitem_1, transpose, [slot], [], state, 0, 0)
setitem = setitem(getitem_1, slot, transpose)
record_default = canary.record(getitem_1, transpose, [slot], [], None, state, 0, 0)
getitem_2 = getitem(v, 0)
transpose_1 = transpose(getitem_2, 0, 1)
getitem_3 = getitem(kv, 1)
verify_default_1 = canary.verify(getitem_3, transpose_1, [slot], [], state, 1, 1)
setitem_1 = setitem(getitem_3, slot, transpose_1)
record_default_1 = canary.record(getitem_3, transpose_1, [slot], [], None, state, 1, 1)
getitem_4 = getitem(kv, 0)
transpose_2 = transpose(getitem_4, 0, 1)
unsqueeze = unsqueeze(transpose_2, 0)
getitem_5 = getitem(kv, 1)
transpose_3 = transpose(getitem_5, 0, 1)
unsqueeze_1 = unsqueeze(transpose_3, 0)
scaled_dot_product_attention = scaled_dot_product_attention(q, unsqueeze, unsqueeze_1)""",
        )

    def test_unbind(self):
        self.assertExpectedInline(
            golden("unbind"),
            """\
begin_default = canary.begin(state)
unbind = unbind(kv, 0)
kc = getitem(unbind, 0)
vc = getitem(unbind, 1)
getitem_2 = getitem(k, 0)
transpose = transpose(getitem_2, 0, 1)
verify_default = canary.verify(kc, transpose, [slot], [], state, 0, 0)
setitem = setitem(kc, slot, transpose)
record_default = canary.record(kc, transpose, [slot], [], None, state, 0, 0)
getitem_3 = getitem(v, 0)
transpose_1 = transpose(getitem_3, 0, 1)
verify_default_1 = canary.verify(vc, transpose_1, [slot], [], state, 1, 1)
setitem_1 = setitem(vc, slot, transpose_1)
record_default_1 = canary.record(vc, transpose_1, [slot], [], None, state, 1, 1)
transpose_2 = transpose(kc, 0, 1)
unsqueeze = unsqueeze(transpose_2, 0)
transpose_3 = transpose(vc, 0, 1)
unsqueeze_1 = unsqueeze(transpose_3, 0)
scaled_dot_product_attention = scaled_dot_product_attention(q, unsqueeze, unsqueeze_1)""",
        )

    def test_select_int_in_index(self):
        self.assertExpectedInline(
            golden("select_int_in_index"),
            """\
begin_default = canary.begin(state)
getitem = getitem(k, 0)
transpose = transpose(getitem, 0, 1)
getitem_4 = getitem(kv, (0, :, :, :))
verify_default = canary.verify(getitem_4, transpose, [slot], [], state, 0, 0)
setitem = setitem(kv, (0, slot), transpose)
record_default = canary.record(getitem_4, transpose, [slot], [], None, state, 0, 0)
getitem_1 = getitem(v, 0)
transpose_1 = transpose(getitem_1, 0, 1)
getitem_5 = getitem(kv, (1, :, :, :))
verify_default_1 = canary.verify(getitem_5, transpose_1, [slot], [], state, 1, 1)
setitem_1 = setitem(kv, (1, slot), transpose_1)
record_default_1 = canary.record(getitem_5, transpose_1, [slot], [], None, state, 1, 1)
getitem_2 = getitem(kv, 0)
transpose_2 = transpose(getitem_2, 0, 1)
unsqueeze = unsqueeze(transpose_2, 0)
getitem_3 = getitem(kv, 1)
transpose_3 = transpose(getitem_3, 0, 1)
unsqueeze_1 = unsqueeze(transpose_3, 0)
scaled_dot_product_attention = scaled_dot_product_attention(q, unsqueeze, unsqueeze_1)""",
        )

    def test_stacked_layers(self):
        self.assertExpectedInline(
            golden("stacked_layers"),
            """\
begin_default = canary.begin(state)
getitem = getitem(k, 0)
transpose = transpose(getitem, 0, 1)
add = add(transpose, 0)
getitem_1 = getitem(pool, 0)
getitem_2 = getitem(getitem_1, 0)
verify_default = canary.verify(getitem_2, add, [slot], [], state, 0, 0)
setitem = setitem(getitem_2, slot, add)
record_default = canary.record(getitem_2, add, [slot], [], None, state, 0, 0)
getitem_3 = getitem(pool, 0)
getitem_4 = getitem(getitem_3, 1)
getitem_5 = getitem(v, 0)
transpose_1 = transpose(getitem_5, 0, 1)
add_1 = add(transpose_1, 0)
verify_default_1 = canary.verify(getitem_4, add_1, [slot], [], state, 1, 1)
index_copy_ = index_copy_(getitem_4, 0, slot, add_1)
record_default_1 = canary.record(getitem_4, add_1, [slot], [], None, state, 1, 1)
getitem_6 = getitem(k, 0)
transpose_2 = transpose(getitem_6, 0, 1)
add_2 = add(transpose_2, 1)
getitem_7 = getitem(pool, 1)
getitem_8 = getitem(getitem_7, 0)
verify_default_2 = canary.verify(getitem_8, add_2, [slot], [], state, 2, 2)
setitem_1 = setitem(getitem_8, slot, add_2)
record_default_2 = canary.record(getitem_8, add_2, [slot], [], None, state, 2, 2)
getitem_9 = getitem(pool, 1)
getitem_10 = getitem(getitem_9, 1)
getitem_11 = getitem(v, 0)
transpose_3 = transpose(getitem_11, 0, 1)
add_3 = add(transpose_3, 1)
verify_default_3 = canary.verify(getitem_10, add_3, [slot], [], state, 3, 3)
index_copy__1 = index_copy_(getitem_10, 0, slot, add_3)
record_default_3 = canary.record(getitem_10, add_3, [slot], [], None, state, 3, 3)
getitem_12 = getitem(pool, (0, 0))
transpose_4 = transpose(getitem_12, 0, 1)
unsqueeze = unsqueeze(transpose_4, 0)
getitem_13 = getitem(pool, (1, 1))
transpose_5 = transpose(getitem_13, 0, 1)
unsqueeze_1 = unsqueeze(transpose_5, 0)
scaled_dot_product_attention = scaled_dot_product_attention(q, unsqueeze, unsqueeze_1)""",
        )

    def test_interleaved(self):
        self.assertExpectedInline(
            golden("interleaved"),
            """\
begin_default = canary.begin(state)
getitem = getitem(k, 0)
transpose = transpose(getitem, 0, 1)
getitem_1 = getitem(kv, (:, 0))
verify_default = canary.verify(getitem_1, transpose, [slot], [], state, 0, 0)
getitem_6 = getitem(kv, (:, 1))
verify_default_1 = canary.verify(getitem_6, None, [slot], [], state, 1, 1)
setitem = setitem(getitem_1, slot, transpose)
record_default = canary.record(getitem_1, transpose, [slot], [], None, state, 0, 0)
getitem_2 = getitem(v, 0)
transpose_1 = transpose(getitem_2, 0, 1)
getitem_3 = getitem(kv, (:, 1))
setitem_1 = setitem(getitem_3, slot, transpose_1)
record_default_1 = canary.record(getitem_6, transpose_1, [slot], [], None, state, 1, 1)
getitem_4 = getitem(kv, (:, 0))
transpose_2 = transpose(getitem_4, 0, 1)
unsqueeze = unsqueeze(transpose_2, 0)
getitem_5 = getitem(kv, (:, 1))
transpose_3 = transpose(getitem_5, 0, 1)
unsqueeze_1 = unsqueeze(transpose_3, 0)
scaled_dot_product_attention = scaled_dot_product_attention(q, unsqueeze, unsqueeze_1)""",
        )

    def test_paged_view(self):
        self.assertExpectedInline(
            golden("paged_view"),
            """\
begin_default = canary.begin(state)
getitem = getitem(k, 0)
transpose = transpose(getitem, 0, 1)
view = view(kc, -1, 2, 16)
verify_default = canary.verify(view, transpose, [slot], [], state, 0, 0)
setitem = setitem(view, slot, transpose)
record_default = canary.record(view, transpose, [slot], [], None, state, 0, 0)
getitem_1 = getitem(v, 0)
transpose_1 = transpose(getitem_1, 0, 1)
view_1 = view(vc, -1, 2, 16)
verify_default_1 = canary.verify(view_1, transpose_1, [slot], [], state, 1, 1)
setitem_1 = setitem(view_1, slot, transpose_1)
record_default_1 = canary.record(view_1, transpose_1, [slot], [], None, state, 1, 1)
view_2 = view(kc, -1, 2, 16)
transpose_2 = transpose(view_2, 0, 1)
unsqueeze = unsqueeze(transpose_2, 0)
view_3 = view(vc, -1, 2, 16)
transpose_3 = transpose(view_3, 0, 1)
unsqueeze_1 = unsqueeze(transpose_3, 0)
scaled_dot_product_attention = scaled_dot_product_attention(q, unsqueeze, unsqueeze_1)""",
        )

    def test_page_and_offset(self):
        self.assertExpectedInline(
            golden("page_and_offset"),
            """\
begin_default = canary.begin(state)
getitem = getitem(k, 0)
transpose = transpose(getitem, 0, 1)
floordiv = floordiv(slot, 4)
mod = mod(slot, 4)
verify_default = canary.verify(kc, transpose, [floordiv, mod], [], state, 0, 0)
setitem = setitem(kc, (floordiv, mod), transpose)
record_default = canary.record(kc, transpose, [floordiv, mod], [], None, state, 0, 0)
getitem_1 = getitem(v, 0)
transpose_1 = transpose(getitem_1, 0, 1)
floordiv_1 = floordiv(slot, 4)
mod_1 = mod(slot, 4)
verify_default_1 = canary.verify(vc, transpose_1, [floordiv_1, mod_1], [], state, 1, 1)
setitem_1 = setitem(vc, (floordiv_1, mod_1), transpose_1)
record_default_1 = canary.record(vc, transpose_1, [floordiv_1, mod_1], [], None, state, 1, 1)
view = view(kc, -1, 2, 16)
transpose_2 = transpose(view, 0, 1)
unsqueeze = unsqueeze(transpose_2, 0)
view_1 = view(vc, -1, 2, 16)
transpose_3 = transpose(view_1, 0, 1)
unsqueeze_1 = unsqueeze(transpose_3, 0)
scaled_dot_product_attention = scaled_dot_product_attention(q, unsqueeze, unsqueeze_1)""",
        )

    def test_custom_op(self):
        self.assertExpectedInline(
            golden("custom_op"),
            """\
begin_default = canary.begin(state)
getitem = getitem(k, 0)
transpose = transpose(getitem, 0, 1)
getitem_1 = getitem(v, 0)
transpose_1 = transpose(getitem_1, 0, 1)
verify_default = canary.verify(kc, transpose, [slot], [], state, 0, 0)
verify_default_1 = canary.verify(vc, transpose_1, [slot], [], state, 1, 1)
store_kv = store_kv(transpose, transpose_1, kc, vc, slot)
record_default = canary.record(kc, transpose, [slot], [], None, state, 0, 0)
record_default_1 = canary.record(vc, transpose_1, [slot], [], None, state, 1, 1)
view = view(kc, -1, 2, 16)
transpose_2 = transpose(view, 0, 1)
unsqueeze = unsqueeze(transpose_2, 0)
view_1 = view(vc, -1, 2, 16)
transpose_3 = transpose(view_1, 0, 1)
unsqueeze_1 = unsqueeze(transpose_3, 0)
scaled_dot_product_attention = scaled_dot_product_attention(q, unsqueeze, unsqueeze_1)""",
        )

    def test_hidden_custom_op(self):
        self.assertExpectedInline(
            golden("hidden_custom_op"),
            """\
begin_default = canary.begin(state)
getitem = getitem(k, 0)
transpose = transpose(getitem, 0, 1)
getitem_1 = getitem(v, 0)
transpose_1 = transpose(getitem_1, 0, 1)
getitem_4 = getitem(kv, (0))
observe_default = canary.observe(getitem_4, state, 0)
getitem_5 = getitem(kv, (1))
observe_default_1 = canary.observe(getitem_5, state, 1)
hidden_store = hidden_store(transpose, transpose_1, kv, slot)
record_changed_default = canary.record_changed(getitem_4, state, 0)
record_changed_default_1 = canary.record_changed(getitem_5, state, 1)
getitem_2 = getitem(kv, 0)
view = view(getitem_2, -1, 2, 16)
transpose_2 = transpose(view, 0, 1)
unsqueeze = unsqueeze(transpose_2, 0)
getitem_3 = getitem(kv, 1)
view_1 = view(getitem_3, -1, 2, 16)
transpose_3 = transpose(view_1, 0, 1)
unsqueeze_1 = unsqueeze(transpose_3, 0)
scaled_dot_product_attention = scaled_dot_product_attention(q, unsqueeze, unsqueeze_1)""",
        )

    def test_functionalised_custom_op(self):
        self.assertExpectedInline(
            golden("functionalised_custom_op"),
            """\
begin_default = canary.begin(state)
getitem = getitem(k, 0)
transpose = transpose(getitem, 0, 1)
getitem_1 = getitem(v, 0)
transpose_1 = transpose(getitem_1, 0, 1)
verify_default = canary.verify(kc, None, [slot], [], state, 0, 0)
verify_default_1 = canary.verify(vc, None, [slot], [], state, 1, 1)
auto_functionalized = auto_functionalized(kvcanary_test.store_kv.default, k=transpose, v=transpose_1, k_cache=kc, v_cache=vc, slot_mapping=slot)
new_k = getitem(auto_functionalized, 1)
new_v = getitem(auto_functionalized, 2)
copy_ = copy_(kc, new_k)
record_default = canary.record(kc, transpose, [slot], [], None, state, 0, 0)
copy__1 = copy_(vc, new_v)
record_default_1 = canary.record(vc, transpose_1, [slot], [], None, state, 1, 1)
view = view(kc, -1, 2, 16)
transpose_2 = transpose(view, 0, 1)
unsqueeze = unsqueeze(transpose_2, 0)
view_1 = view(vc, -1, 2, 16)
transpose_3 = transpose(view_1, 0, 1)
unsqueeze_1 = unsqueeze(transpose_3, 0)
scaled_dot_product_attention = scaled_dot_product_attention(q, unsqueeze, unsqueeze_1)""",
        )

    def test_moe_scatter(self):
        self.assertExpectedInline(
            golden("moe_scatter"),
            """\
begin_default = canary.begin(state)
verify_default = canary.verify(kc, k, [pos], [], state, 0, 0)
index_copy_ = index_copy_(kc, 2, pos, k)
record_default = canary.record(kc, k, [pos], [], pos, state, 0, 0)
verify_default_1 = canary.verify(vc, v, [pos], [], state, 1, 1)
index_copy__1 = index_copy_(vc, 2, pos, v)
record_default_1 = canary.record(vc, v, [pos], [], pos, state, 1, 1)
out = scaled_dot_product_attention(q, kc, vc)
mixed = zeros_like(out)
arange = arange(2, device=cpu)
index_add_ = index_add_(mixed, 2, arange, out)
getitem = getitem(out, (:, :, 0))
setitem = setitem(mixed, (:, :, 0), getitem)""",
        )

    def test_counter_and_mask(self):
        self.assertExpectedInline(
            golden("counter_and_mask"),
            """\
begin_default = canary.begin(state)
add_ = add_(counter, 2)
setitem = setitem(mask, (:, :, :, pos), 0.0)
verify_default = canary.verify(kc, k, [pos], [], state, 0, 0)
index_copy_ = index_copy_(kc, 2, pos, k)
record_default = canary.record(kc, k, [pos], [], pos, state, 0, 0)
verify_default_1 = canary.verify(vc, v, [pos], [], state, 1, 1)
index_copy__1 = index_copy_(vc, 2, pos, v)
record_default_1 = canary.record(vc, v, [pos], [], pos, state, 1, 1)
scaled_dot_product_attention = scaled_dot_product_attention(q, kc, vc, attn_mask=mask)""",
        )

    def test_output_buffer(self):
        self.assertExpectedInline(
            golden("output_buffer"),
            """\
scaled_dot_product_attention = scaled_dot_product_attention(q, k, v)
setitem = setitem(out, (:, :, pos), scaled_dot_product_attention)""",
        )

    def test_rewritten_scatter(self):
        self.assertExpectedInline(
            golden("scatter", rewrite=True),
            """\
begin_default = canary.begin(state)
view = view(pos, 1, 1, 2, 1)
index = expand(view, 2, 2, 2, 16)
verify_default = canary.verify(kc, k, [index], [], state, 0, 0)
index_put__default = canary.index_put_(kc, k, [index], [], 0, 0)
record_default = canary.record(kc, k, [index], [], pos, state, 0, 0)
verify_default_1 = canary.verify(vc, v, [index], [], state, 1, 1)
index_put__default_1 = canary.index_put_(vc, v, [index], [], 1, 1)
record_default_1 = canary.record(vc, v, [index], [], pos, state, 1, 1)
scaled_dot_product_attention = scaled_dot_product_attention(q, kc, vc)""",
        )

    def test_rewritten_stacked_layers(self):
        self.assertExpectedInline(
            golden("stacked_layers", rewrite=True),
            """\
begin_default = canary.begin(state)
getitem = getitem(k, 0)
transpose = transpose(getitem, 0, 1)
add = add(transpose, 0)
getitem_1 = getitem(pool, 0)
getitem_2 = getitem(getitem_1, 0)
verify_default = canary.verify(getitem_2, add, [slot], [], state, 0, 0)
index_put__default = canary.index_put_(getitem_2, add, [slot], [], 0, 0)
record_default = canary.record(getitem_2, add, [slot], [], None, state, 0, 0)
getitem_3 = getitem(pool, 0)
getitem_4 = getitem(getitem_3, 1)
getitem_5 = getitem(v, 0)
transpose_1 = transpose(getitem_5, 0, 1)
add_1 = add(transpose_1, 0)
verify_default_1 = canary.verify(getitem_4, add_1, [slot], [], state, 1, 1)
index_put__default_1 = canary.index_put_(getitem_4, add_1, [slot], [], 1, 1)
record_default_1 = canary.record(getitem_4, add_1, [slot], [], None, state, 1, 1)
getitem_6 = getitem(k, 0)
transpose_2 = transpose(getitem_6, 0, 1)
add_2 = add(transpose_2, 1)
getitem_7 = getitem(pool, 1)
getitem_8 = getitem(getitem_7, 0)
verify_default_2 = canary.verify(getitem_8, add_2, [slot], [], state, 2, 2)
index_put__default_2 = canary.index_put_(getitem_8, add_2, [slot], [], 2, 2)
record_default_2 = canary.record(getitem_8, add_2, [slot], [], None, state, 2, 2)
getitem_9 = getitem(pool, 1)
getitem_10 = getitem(getitem_9, 1)
getitem_11 = getitem(v, 0)
transpose_3 = transpose(getitem_11, 0, 1)
add_3 = add(transpose_3, 1)
verify_default_3 = canary.verify(getitem_10, add_3, [slot], [], state, 3, 3)
index_put__default_3 = canary.index_put_(getitem_10, add_3, [slot], [], 3, 3)
record_default_3 = canary.record(getitem_10, add_3, [slot], [], None, state, 3, 3)
getitem_12 = getitem(pool, (0, 0))
transpose_4 = transpose(getitem_12, 0, 1)
unsqueeze = unsqueeze(transpose_4, 0)
getitem_13 = getitem(pool, (1, 1))
transpose_5 = transpose(getitem_13, 0, 1)
unsqueeze_1 = unsqueeze(transpose_5, 0)
scaled_dot_product_attention = scaled_dot_product_attention(q, unsqueeze, unsqueeze_1)""",
        )

    def test_opaque_attention_named_by_a_string(self):
        self.assertExpectedInline(
            opaque(hoisted=False),
            """\
begin_default = canary.begin(state)
linear = linear(x, layers.0.qkv.weight, layers.0.qkv.bias)
view = view(linear, -1, 3, 2, 4)
unbind = unbind(view, 1)
q = getitem(unbind, 0)
k = getitem(unbind, 1)
v = getitem(unbind, 2)
output = empty_like(q)
contiguous = contiguous(q)
contiguous_1 = contiguous(k)
contiguous_2 = contiguous(v)
verify_at_default = canary.verify_at(output, state, layers.0)
attention = attention(contiguous, contiguous_1, contiguous_2, output, layers.0)
record_at_default = canary.record_at(output, contiguous_1, contiguous_2, state, layers.0)
flatten = flatten(output, 1)
x = add(x, flatten)""",
        )

    def test_opaque_attention_named_by_an_input(self):
        self.assertExpectedInline(
            opaque(hoisted=True),
            """\
begin_default = canary.begin(state)
linear = linear(x, layers.0.qkv.weight, layers.0.qkv.bias)
view = view(linear, -1, 3, 2, 4)
unbind = unbind(view, 1)
q = getitem(unbind, 0)
k = getitem(unbind, 1)
v = getitem(unbind, 2)
output = empty_like(q)
contiguous = contiguous(q)
contiguous_1 = contiguous(k)
contiguous_2 = contiguous(v)
verify_at_opaque_engine_attention_hoisted_opaque_engine_layer_name_default = canary.verify_at_opaque_engine_attention_hoisted_opaque_engine_LayerName(output, state, layers.0.name)
attention_hoisted = attention_hoisted(contiguous, contiguous_1, contiguous_2, output, layers.0.name)
record_at_opaque_engine_attention_hoisted_opaque_engine_layer_name_default = canary.record_at_opaque_engine_attention_hoisted_opaque_engine_LayerName(output, contiguous_1, contiguous_2, state, layers.0.name)
flatten = flatten(output, 1)
x = add(x, flatten)""",
        )
