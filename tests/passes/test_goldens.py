"""Golden graphs: what each idiom's graph looks like once the canaries are in.

Accept changes with ``EXPECTTEST_ACCEPT=1 pytest tests/passes/test_goldens.py`` and read the diff.
"""

from __future__ import annotations

from typing import Any

import torch
from documented import documented
from expecttest import TestCase
from idioms import IDIOMS, NOT_KV, STATES
from opaque_engine import Model

from kvcanary_fx.passes.pipeline import passes, run_passes

BY_NAME = {idiom.name: idiom for idiom in IDIOMS + STATES + NOT_KV}


def golden(name: str, rewrite: bool = False, keep: tuple[str, ...] = ()) -> str:
    """The rewritten graph of an idiom as text."""
    torch._dynamo.reset()
    texts = []

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        rewritten, plan = run_passes(gm, example_inputs, passes(rewrite=rewrite))
        texts.append(documented(rewritten, plan, keep))
        return gm.forward

    with torch.no_grad():
        torch.compile(BY_NAME[name].run, backend=backend, fullgraph=True)(*BY_NAME[name].make())
    return "\n".join(texts)


def opaque(hoisted: bool) -> str:
    """The rewritten graph of one layer whose attention is an opaque op; twice over, which changes nothing more."""
    texts = []

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        for _ in range(2):
            gm, plan = run_passes(gm, example_inputs, passes(pools_in=lambda _: 0, side=True))
        texts.append(documented(gm, plan, frame=-1))
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
begin()
# conv_states.copy_(torch.cat((conv_states, k[:, 0].transpose(1, 2)), dim=-1)[..., -4:])
getitem = getitem(k, (:, 0))
transpose = transpose(getitem, 1, 2)
verify(conv_states)  # conv
cat = cat((conv_states, transpose), dim=-1)
getitem_1 = getitem(cat, (..., -4:None))
copy_(conv_states, getitem_1)
record(conv_states, value=getitem_1)  # conv
# ssm_states.copy_(ssm_states * 0.9 + k.transpose(2, 3) @ v)
verify(ssm_states)  # state
mul = mul(ssm_states, 0.9)
transpose_1 = transpose(k, 2, 3)
matmul = matmul(transpose_1, v)
add = add(mul, matmul)
copy_(ssm_states, add)
record(ssm_states, value=add)  # state
# return q @ ssm_states + conv_states.mean()""",
        )

    def test_setitem(self):
        self.assertExpectedInline(
            golden("setitem"),
            """\
begin()
# kc[:, :, pos] = k
verify_halves([kc, vc], value=[k, v], index=[pos])
setitem(kc, (:, :, pos), k)
# vc[:, :, pos] = v
setitem(vc, (:, :, pos), v)
record_halves([kc, vc], value=[k, v], index=[pos], positions=pos)
# return attend(q, kc, vc)""",
        )

    def test_setitem_slice(self):
        self.assertExpectedInline(
            golden("setitem_slice"),
            """\
begin()
# kc[:, :, 3:5] = k
verify_halves([kc, vc], value=[k, v], extent=[3, 5])
setitem(kc, (:, :, 3:5), k)
# vc[:, :, 3:5] = v
setitem(vc, (:, :, 3:5), v)
record_halves([kc, vc], value=[k, v], extent=[3, 5])
# return attend(q, kc, vc)""",
        )

    def test_setitem_batch_slice(self):
        self.assertExpectedInline(
            golden("setitem_batch_slice"),
            """\
begin()
# kc[:B, :, 3:5] = k
verify_halves([kc, vc], value=[k, v], extent=[3, 5])
setitem(kc, (None:2, :, 3:5), k)
# vc[:B, :, 3:5] = v
setitem(vc, (None:2, :, 3:5), v)
record_halves([kc, vc], value=[k, v], extent=[3, 5])
# return attend(q, kc, vc)""",
        )

    def test_setitem_rows_and_positions(self):
        self.assertExpectedInline(
            golden("setitem_rows_and_positions"),
            """\
begin()
# rows = torch.arange(B, device=q.device).unsqueeze(1)
# kc[rows, :, pos.expand(B, T)] = k.transpose(1, 2)
transpose = transpose(k, 1, 2)
expand = expand(pos, 2, 2)
verify(kc, value=transpose, index=[rows, expand])  # K
setitem(kc, (rows, :, expand), transpose)
record(kc, value=transpose, index=[rows, expand], positions=pos)  # K
# vc[rows, :, pos.expand(B, T)] = v.transpose(1, 2)  (alike)
# return attend(q, kc, vc)""",
        )

    def test_index_copy(self):
        self.assertExpectedInline(
            golden("index_copy"),
            """\
begin()
# kc.index_copy_(2, pos, k)
verify_halves([kc, vc], value=[k, v], index=[pos])
index_copy_(kc, 2, pos, k)
# vc.index_copy_(2, pos, v)
index_copy_(vc, 2, pos, v)
record_halves([kc, vc], value=[k, v], index=[pos], positions=pos)
# return attend(q, kc, vc)""",
        )

    def test_index_put(self):
        self.assertExpectedInline(
            golden("index_put"),
            """\
begin()
# kc.transpose(1, 2).index_put_((torch.arange(B, device=q.device).unsqueeze(1), pos.unsqueeze(0)), k.transpose(1, 2))
transpose = transpose(kc, 1, 2)
arange = arange(2, device=cpu)
unsqueeze = unsqueeze(arange, 1)
unsqueeze_1 = unsqueeze(pos, 0)
transpose_1 = transpose(k, 1, 2)
verify(transpose, value=transpose_1, index=[unsqueeze, unsqueeze_1])  # K
index_put_(transpose, (unsqueeze, unsqueeze_1), transpose_1)
record(transpose, value=transpose_1, index=[unsqueeze, unsqueeze_1], positions=pos)  # K
# vc.transpose(1, 2).index_put_((torch.arange(B, device=q.device).unsqueeze(1), pos.unsqueeze(0)), v.transpose(1, 2))  (alike)
# return attend(q, kc, vc)""",
        )

    def test_scatter(self):
        self.assertExpectedInline(
            golden("scatter"),
            """\
begin()
# index = pos.view(1, 1, T, 1).expand(B, H, T, D)
# kc.scatter_(2, index, k)
verify_halves([kc, vc], value=[k, v], index=[index])
scatter_(kc, 2, index, k)
# vc.scatter_(2, index, v)
scatter_(vc, 2, index, v)
record_halves([kc, vc], value=[k, v], index=[index], positions=pos)
# return attend(q, kc, vc)""",
        )

    def test_narrow_copy(self):
        self.assertExpectedInline(
            golden("narrow_copy"),
            """\
begin()
# kc.narrow(2, 3, T).copy_(k)
narrow = narrow(kc, 2, 3, 2)
verify_halves([kc, vc], value=[k, v], extent=[3, 5])
copy_(narrow, k)
# vc.narrow(2, 3, T).copy_(v)
narrow_1 = narrow(vc, 2, 3, 2)
copy_(narrow_1, v)
record_halves([kc, vc], value=[k, v], extent=[3, 5])
# return attend(q, kc, vc)""",
        )

    def test_slice_copy(self):
        self.assertExpectedInline(
            golden("slice_copy"),
            """\
begin()
# kc[:, :, 3:5].copy_(k)
getitem = getitem(kc, (:, :, 3:5))
verify_halves([kc, vc], value=[k, v], extent=[3, 5])
copy_(getitem, k)
# vc[:, :, 3:5].copy_(v)
getitem_1 = getitem(vc, (:, :, 3:5))
copy_(getitem_1, v)
record_halves([kc, vc], value=[k, v], extent=[3, 5])
# return attend(q, kc, vc)""",
        )

    def test_rolling(self):
        self.assertExpectedInline(
            golden("rolling"),
            """\
begin()
# cache.copy_(torch.cat((cache[:, :, T:], new), dim=2))
getitem = getitem(kc, (:, :, 2:None))
verify(kc)  # K
cat = cat((getitem, k), dim=2)
copy_(kc, cat)
record(kc, value=cat)  # K
getitem_1 = getitem(vc, (:, :, 2:None))
verify(vc)  # V
cat_1 = cat((getitem_1, v), dim=2)
copy_(vc, cat_1)
record(vc, value=cat_1)  # V
# return attend(q, kc, vc)""",
        )

    def test_flex(self):
        # the block mask that flex_attention builds is PyTorch's own, and another in each version
        self.assertExpectedInline(
            golden("flex", keep=("index_copy_",)),
            """\
begin()
# kc.index_copy_(2, pos, k)
verify_halves([kc, vc], value=[k, v], index=[pos])
index_copy_(kc, 2, pos, k)
# vc.index_copy_(2, pos, v)
index_copy_(vc, 2, pos, v)
record_halves([kc, vc], value=[k, v], index=[pos], positions=pos)""",
        )

    def test_in_checkpoint(self):
        self.assertExpectedInline(
            golden("in_checkpoint"),
            """\
begin()
# return checkpoint(body, q, k, v, kc, vc, pos, use_reentrant=False)
observe(kc)  # K
observe(vc)  # V
tag_activation_checkpoint = tag_activation_checkpoint(<graph>, kc, pos, k, vc, v, q, use_reentrant=False)
record_changed(kc)  # K
record_changed(vc)  # V
getitem = getitem(tag_activation_checkpoint, 0)""",
        )

    def test_in_cond(self):
        if "in_cond" not in BY_NAME:
            self.skipTest("this torch refuses a branch that writes to its inputs")
        self.assertExpectedInline(
            golden("in_cond"),
            """\
begin()
# extra = torch.cond(pos.sum() > 0, write, write_scaled, (k, v, kc, vc, pos))
sum_1 = sum(pos)
gt = gt(sum_1, 0)
observe(kc)  # K
observe(vc)  # V
cond = cond(gt, <graph>, <graph>, (k, kc, pos, v, vc))
record_changed(kc)  # K
record_changed(vc)  # V
extra = getitem(cond, 0)
# return attend(q, kc, vc) + extra.sum() * 0""",
        )

    def test_in_subgraph(self):
        self.assertExpectedInline(
            golden("in_subgraph"),
            """\
begin()
# return _region(q, k, v, kc, vc, pos) + _region(q, k + 1, v + 1, kc, vc, pos + 2)
observe(kc)  # K
observe(vc)  # V
invoke_subgraph = invoke_subgraph(<graph>, subgraph_0, kc, pos, k, vc, v, q)
record_changed(kc)  # K
record_changed(vc)  # V
getitem = getitem(invoke_subgraph, 0)
add = add(k, 1)
add_1 = add(v, 1)
add_2 = add(pos, 2)
invoke_subgraph_1 = invoke_subgraph(<graph>, subgraph_0, kc, add_2, add, vc, add_1, q)
record_changed(kc)  # K
record_changed(vc)  # V
getitem_1 = getitem(invoke_subgraph_1, 0)
add_3 = add(getitem, getitem_1)""",
        )

    def test_halves(self):
        self.assertExpectedInline(
            golden("halves"),
            """\
begin()
# kv[0][slot] = tokens_first(k)
getitem = getitem(k, 0)
transpose = transpose(getitem, 0, 1)
getitem_1 = getitem(kv, 0)
verify(getitem_1, value=transpose, index=[slot])  # K
setitem(getitem_1, slot, transpose)
record(getitem_1, value=transpose, index=[slot])  # K
# kv[1][slot] = tokens_first(v)
getitem_2 = getitem(v, 0)
transpose_1 = transpose(getitem_2, 0, 1)
getitem_3 = getitem(kv, 1)
verify(getitem_3, value=transpose_1, index=[slot])  # V
setitem(getitem_3, slot, transpose_1)
record(getitem_3, value=transpose_1, index=[slot])  # V
# return attend(q, heads_first(kv[0]), heads_first(kv[1]))""",
        )

    def test_unbind(self):
        self.assertExpectedInline(
            golden("unbind"),
            """\
begin()
# kc, vc = kv.unbind(0)
# kc[slot] = tokens_first(k)
getitem_2 = getitem(k, 0)
transpose = transpose(getitem_2, 0, 1)
verify(kc, value=transpose, index=[slot])  # K
setitem(kc, slot, transpose)
record(kc, value=transpose, index=[slot])  # K
# vc[slot] = tokens_first(v)  (alike)
# return attend(q, heads_first(kc), heads_first(vc))""",
        )

    def test_select_int_in_index(self):
        self.assertExpectedInline(
            golden("select_int_in_index"),
            """\
begin()
# kv[0, slot] = tokens_first(k)
getitem = getitem(k, 0)
transpose = transpose(getitem, 0, 1)
getitem_4 = getitem(kv, (0, :, :, :))
verify(getitem_4, value=transpose, index=[slot])  # K
setitem(kv, (0, slot), transpose)
record(getitem_4, value=transpose, index=[slot])  # K
# kv[1, slot] = tokens_first(v)
getitem_1 = getitem(v, 0)
transpose_1 = transpose(getitem_1, 0, 1)
getitem_5 = getitem(kv, (1, :, :, :))
verify(getitem_5, value=transpose_1, index=[slot])  # V
setitem(kv, (1, slot), transpose_1)
record(getitem_5, value=transpose_1, index=[slot])  # V
# return attend(q, heads_first(kv[0]), heads_first(kv[1]))""",
        )

    def test_stacked_layers(self):
        self.assertExpectedInline(
            golden("stacked_layers"),
            """\
begin()
# pool[layer][0][slot] = tokens_first(k) + layer
getitem = getitem(k, 0)
transpose = transpose(getitem, 0, 1)
add = add(transpose, 0)
getitem_1 = getitem(pool, 0)
getitem_2 = getitem(getitem_1, 0)
verify(getitem_2, value=add, index=[slot])  # K
setitem(getitem_2, slot, add)
record(getitem_2, value=add, index=[slot])  # K
# pool[layer][1].index_copy_(0, slot, tokens_first(v) + layer)
getitem_3 = getitem(pool, 0)
getitem_4 = getitem(getitem_3, 1)
getitem_5 = getitem(v, 0)
transpose_1 = transpose(getitem_5, 0, 1)
add_1 = add(transpose_1, 0)
verify(getitem_4, value=add_1, index=[slot])  # V
index_copy_(getitem_4, 0, slot, add_1)
record(getitem_4, value=add_1, index=[slot])  # V
# pool[layer][0][slot] = tokens_first(k) + layer
getitem_6 = getitem(k, 0)
transpose_2 = transpose(getitem_6, 0, 1)
add_2 = add(transpose_2, 1)
getitem_7 = getitem(pool, 1)
getitem_8 = getitem(getitem_7, 0)
verify(getitem_8, value=add_2, index=[slot])  # K
setitem(getitem_8, slot, add_2)
record(getitem_8, value=add_2, index=[slot])  # K
# pool[layer][1].index_copy_(0, slot, tokens_first(v) + layer)
getitem_9 = getitem(pool, 1)
getitem_10 = getitem(getitem_9, 1)
getitem_11 = getitem(v, 0)
transpose_3 = transpose(getitem_11, 0, 1)
add_3 = add(transpose_3, 1)
verify(getitem_10, value=add_3, index=[slot])  # V
index_copy_(getitem_10, 0, slot, add_3)
record(getitem_10, value=add_3, index=[slot])  # V
# return attend(q, heads_first(pool[0, 0]), heads_first(pool[1, 1]))""",
        )

    def test_interleaved(self):
        self.assertExpectedInline(
            golden("interleaved"),
            """\
begin()
# kv[:, 0][slot] = tokens_first(k)
getitem = getitem(k, 0)
transpose = transpose(getitem, 0, 1)
getitem_1 = getitem(kv, (:, 0))
verify(getitem_1, value=transpose, index=[slot])  # K
setitem(getitem_1, slot, transpose)
record(getitem_1, value=transpose, index=[slot])  # K
# kv[:, 1][slot] = tokens_first(v)
getitem_2 = getitem(v, 0)
transpose_1 = transpose(getitem_2, 0, 1)
getitem_3 = getitem(kv, (:, 1))
verify(getitem_3, value=transpose_1, index=[slot])  # V
setitem(getitem_3, slot, transpose_1)
record(getitem_3, value=transpose_1, index=[slot])  # V
# return attend(q, heads_first(kv[:, 0]), heads_first(kv[:, 1]))""",
        )

    def test_paged_view(self):
        self.assertExpectedInline(
            golden("paged_view"),
            """\
begin()
# kc.view(-1, H, D)[slot] = tokens_first(k)
getitem = getitem(k, 0)
transpose = transpose(getitem, 0, 1)
view = view(kc, -1, 2, 16)
verify(view, value=transpose, index=[slot])  # K
setitem(view, slot, transpose)
record(view, value=transpose, index=[slot])  # K
# vc.view(-1, H, D)[slot] = tokens_first(v)  (alike)
# return attend(q, heads_first(kc.view(-1, H, D)), heads_first(vc.view(-1, H, D)))""",
        )

    def test_page_and_offset(self):
        self.assertExpectedInline(
            golden("page_and_offset"),
            """\
begin()
# kc[slot // PAGE, slot % PAGE] = tokens_first(k)
getitem = getitem(k, 0)
transpose = transpose(getitem, 0, 1)
floordiv = floordiv(slot, 4)
mod = mod(slot, 4)
verify(kc, value=transpose, index=[floordiv, mod])  # K
setitem(kc, (floordiv, mod), transpose)
record(kc, value=transpose, index=[floordiv, mod])  # K
# vc[slot // PAGE, slot % PAGE] = tokens_first(v)  (alike)
# return attend(q, heads_first(kc.view(-1, H, D)), heads_first(vc.view(-1, H, D)))""",
        )

    def test_custom_op(self):
        self.assertExpectedInline(
            golden("custom_op"),
            """\
begin()
# torch.ops.kvcanary_test.store_kv(tokens_first(k), tokens_first(v), kc, vc, slot)
getitem = getitem(k, 0)
transpose = transpose(getitem, 0, 1)
getitem_1 = getitem(v, 0)
transpose_1 = transpose(getitem_1, 0, 1)
verify_halves([kc, vc], value=[transpose, transpose_1], index=[slot])
store_kv(transpose, transpose_1, kc, vc, slot)
record_halves([kc, vc], value=[transpose, transpose_1], index=[slot])
# return attend(q, heads_first(kc.view(-1, H, D)), heads_first(vc.view(-1, H, D)))""",
        )

    def test_hidden_custom_op(self):
        self.assertExpectedInline(
            golden("hidden_custom_op"),
            """\
begin()
# torch.ops.kvcanary_test.hidden_store(tokens_first(k), tokens_first(v), kv, slot)
getitem = getitem(k, 0)
transpose = transpose(getitem, 0, 1)
getitem_1 = getitem(v, 0)
transpose_1 = transpose(getitem_1, 0, 1)
getitem_4 = getitem(kv, (0))
observe(getitem_4)  # K
getitem_5 = getitem(kv, (1))
observe(getitem_5)  # V
hidden_store(transpose, transpose_1, kv, slot)
record_changed(getitem_4)  # K
record_changed(getitem_5)  # V
# return attend(q, heads_first(kv[0].view(-1, H, D)), heads_first(kv[1].view(-1, H, D)))""",
        )

    def test_functionalised_custom_op(self):
        self.assertExpectedInline(
            golden("functionalised_custom_op"),
            """\
begin()
# k=tokens_first(k),
# v=tokens_first(v),
# _, new_k, new_v = torch.ops.higher_order.auto_functionalized(
verify(kc, index=[slot])  # K
verify(vc, index=[slot])  # V
auto_functionalized = auto_functionalized(kvcanary_test.store_kv.default, k=transpose, v=transpose_1, k_cache=kc, v_cache=vc, slot_mapping=slot)
new_k = getitem(auto_functionalized, 1)
new_v = getitem(auto_functionalized, 2)
# kc.copy_(new_k)
copy_(kc, new_k)
record(kc, value=transpose, index=[slot])  # K
# vc.copy_(new_v)
copy_(vc, new_v)
record(vc, value=transpose_1, index=[slot])  # V
# return attend(q, heads_first(kc.view(-1, H, D)), heads_first(vc.view(-1, H, D)))""",
        )

    def test_moe_scatter(self):
        self.assertExpectedInline(
            golden("moe_scatter"),
            """\
begin()
# kc.index_copy_(2, pos, k)
verify_halves([kc, vc], value=[k, v], index=[pos])
index_copy_(kc, 2, pos, k)
# vc.index_copy_(2, pos, v)
index_copy_(vc, 2, pos, v)
record_halves([kc, vc], value=[k, v], index=[pos], positions=pos)
# out = attend(q, kc, vc)
# mixed = torch.zeros_like(out)
# mixed.index_add_(2, torch.arange(T, device=q.device), out)
# mixed[:, :, 0] = out[:, :, 0]""",
        )

    def test_counter_and_mask(self):
        self.assertExpectedInline(
            golden("counter_and_mask"),
            """\
begin()
# counter.add_(T)
# mask[:, :, :, pos] = 0.0
# kc.index_copy_(2, pos, k)
verify_halves([kc, vc], value=[k, v], index=[pos])
index_copy_(kc, 2, pos, k)
# vc.index_copy_(2, pos, v)
index_copy_(vc, 2, pos, v)
record_halves([kc, vc], value=[k, v], index=[pos], positions=pos)
# return F.scaled_dot_product_attention(q, kc, vc, attn_mask=mask)""",
        )

    def test_output_buffer(self):
        self.assertExpectedInline(
            golden("output_buffer"),
            """# out[:, :, pos] = attend(q, k, v)""",
        )

    def test_rewritten_scatter(self):
        self.assertExpectedInline(
            golden("scatter", rewrite=True),
            """\
begin()
# index = pos.view(1, 1, T, 1).expand(B, H, T, D)
view = view(pos, 1, 1, 2, 1)
index = expand(view, 2, 2, 2, 16)
verify_halves([kc, vc], value=[k, v], index=[index])
index_put_(kc, value=k, index=[index])  # K
index_put_(vc, value=v, index=[index])  # V
record_halves([kc, vc], value=[k, v], index=[index], positions=pos)
# return attend(q, kc, vc)""",
        )

    def test_rewritten_stacked_layers(self):
        self.assertExpectedInline(
            golden("stacked_layers", rewrite=True),
            """\
begin()
# pool[layer][0][slot] = tokens_first(k) + layer
getitem = getitem(k, 0)
transpose = transpose(getitem, 0, 1)
add = add(transpose, 0)
getitem_1 = getitem(pool, 0)
getitem_2 = getitem(getitem_1, 0)
verify(getitem_2, value=add, index=[slot])  # K
index_put_(getitem_2, value=add, index=[slot])  # K
record(getitem_2, value=add, index=[slot])  # K
# pool[layer][1].index_copy_(0, slot, tokens_first(v) + layer)
getitem_3 = getitem(pool, 0)
getitem_4 = getitem(getitem_3, 1)
getitem_5 = getitem(v, 0)
transpose_1 = transpose(getitem_5, 0, 1)
add_1 = add(transpose_1, 0)
verify(getitem_4, value=add_1, index=[slot])  # V
index_put_(getitem_4, value=add_1, index=[slot])  # V
record(getitem_4, value=add_1, index=[slot])  # V
# pool[layer][0][slot] = tokens_first(k) + layer
getitem_6 = getitem(k, 0)
transpose_2 = transpose(getitem_6, 0, 1)
add_2 = add(transpose_2, 1)
getitem_7 = getitem(pool, 1)
getitem_8 = getitem(getitem_7, 0)
verify(getitem_8, value=add_2, index=[slot])  # K
index_put_(getitem_8, value=add_2, index=[slot])  # K
record(getitem_8, value=add_2, index=[slot])  # K
# pool[layer][1].index_copy_(0, slot, tokens_first(v) + layer)
getitem_9 = getitem(pool, 1)
getitem_10 = getitem(getitem_9, 1)
getitem_11 = getitem(v, 0)
transpose_3 = transpose(getitem_11, 0, 1)
add_3 = add(transpose_3, 1)
verify(getitem_10, value=add_3, index=[slot])  # V
index_put_(getitem_10, value=add_3, index=[slot])  # V
record(getitem_10, value=add_3, index=[slot])  # V
# return attend(q, heads_first(pool[0, 0]), heads_first(pool[1, 1]))""",
        )

    def test_row_by_row_tokens_first(self):
        self.assertExpectedInline(
            golden("row_by_row_tokens_first"),
            """\
begin()
# kv[0].select(1, row).index_copy_(0, pos, k[row].transpose(0, 1))
getitem = getitem(kv, 0)
select = select(getitem, 1, 0)
getitem_1 = getitem(k, 0)
transpose = transpose(getitem_1, 0, 1)
verify(getitem, value=transpose, index=[pos], extent=[0])  # K
index_copy_(select, 0, pos, transpose)
record(getitem, value=transpose, index=[pos], extent=[0], positions=pos)  # K
# kv[1].select(1, row).index_copy_(0, pos, v[row].transpose(0, 1))
getitem_2 = getitem(kv, 1)
select_1 = select(getitem_2, 1, 0)
getitem_3 = getitem(v, 0)
transpose_1 = transpose(getitem_3, 0, 1)
verify(getitem_2, value=transpose_1, index=[pos], extent=[0])  # V
index_copy_(select_1, 0, pos, transpose_1)
record(getitem_2, value=transpose_1, index=[pos], extent=[0], positions=pos)  # V
# kv[0].select(1, row).index_copy_(0, pos, k[row].transpose(0, 1))
getitem_4 = getitem(kv, 0)
select_2 = select(getitem_4, 1, 1)
getitem_5 = getitem(k, 1)
transpose_2 = transpose(getitem_5, 0, 1)
index_copy_(select_2, 0, pos, transpose_2)
record(getitem, value=transpose_2, index=[pos], extent=[1], positions=pos)  # K
# kv[1].select(1, row).index_copy_(0, pos, v[row].transpose(0, 1))
getitem_6 = getitem(kv, 1)
select_3 = select(getitem_6, 1, 1)
getitem_7 = getitem(v, 1)
transpose_3 = transpose(getitem_7, 0, 1)
index_copy_(select_3, 0, pos, transpose_3)
record(getitem_2, value=transpose_3, index=[pos], extent=[1], positions=pos)  # V
# return attend(q, *kv.permute(0, 2, 3, 1, 4).unbind(0))""",
        )

    def test_opaque_attention_named_by_a_string(self):
        self.assertExpectedInline(
            opaque(hoisted=False),
            """\
begin()
# q, k, v = self.qkv(x).view(-1, 3, HEADS, DIM).unbind(1)
# output = torch.empty_like(q)
# op(q.contiguous(), k.contiguous(), v.contiguous(), output, self.name)
contiguous = contiguous(q)
contiguous_1 = contiguous(k)
contiguous_2 = contiguous(v)
verify_at(layers.0)
attention(contiguous, contiguous_1, contiguous_2, output, layers.0)
record_at(contiguous_1, value=contiguous_2, layer=layers.0)
# return x + output.flatten(1)""",
        )

    def test_opaque_attention_named_by_an_input(self):
        self.assertExpectedInline(
            opaque(hoisted=True),
            """\
begin()
# q, k, v = self.qkv(x).view(-1, 3, HEADS, DIM).unbind(1)
# output = torch.empty_like(q)
# op(q.contiguous(), k.contiguous(), v.contiguous(), output, self.name)
contiguous = contiguous(q)
contiguous_1 = contiguous(k)
contiguous_2 = contiguous(v)
verify_at_opaque_engine_attention_hoisted_opaque_engine_LayerName(layers.0.name)
attention_hoisted(contiguous, contiguous_1, contiguous_2, output, layers.0.name)
record_at_opaque_engine_attention_hoisted_opaque_engine_LayerName(contiguous_1, value=contiguous_2, layer=layers.0.name)
# return x + output.flatten(1)""",
        )
