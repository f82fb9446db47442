"""Bugs planted into vLLM: each is reported by the check that is named for it, with the request."""

from __future__ import annotations

import pytest
from vllm_rig import Rig, prompt

import kvcanary_fx


@pytest.fixture
def rig(models):
    made = Rig("llama", models)
    yield made
    made.close()


def kinds(rig: Rig, request: str) -> set[tuple[str, str]]:
    return {(check, why) for check, why, named in rig.told() if named == request}


def test_block_freed_while_its_request_reads_it(rig, monkeypatch):
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

    allocate = FullAttentionManager.allocate_new_blocks
    freed = []

    def allocate_and_free(self, request_id, *args):
        new = allocate(self, request_id, *args)
        blocks = self.req_to_blocks[request_id]
        if len(blocks) == 3 and not freed:
            freed.append(blocks[-2])
            self.block_pool.free_blocks(freed)
        return new

    monkeypatch.setattr(FullAttentionManager, "allocate_new_blocks", allocate_and_free)
    rig.add("A", prompt(50, 60), length=8)
    rig.add("B", prompt(51, 60), length=8)
    with pytest.raises(AssertionError, match="left after"):
        rig.run(limit=6)
    assert ("owner", "FOREIGN_READ") in kinds(rig, "A")
    assert kinds(rig, "B") == set()
    found = next(v for v in rig.session.violations() if v.why == "FOREIGN_READ")
    assert found.slot // 32 == freed[0].block_id


def test_block_freed_early_without_a_prefix_cache(models, monkeypatch):
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

    rig = Rig("llama", models, enable_prefix_caching=False)
    allocate, freed = FullAttentionManager.allocate_new_blocks, []

    def allocate_and_free(self, request_id, *args):
        new = allocate(self, request_id, *args)
        if len(self.req_to_blocks[request_id]) == 3 and not freed:
            freed.append(self.req_to_blocks[request_id][0])
            self.block_pool.free_blocks(freed)
        return new

    monkeypatch.setattr(FullAttentionManager, "allocate_new_blocks", allocate_and_free)
    rig.add("A", prompt(50, 60), length=8)
    with pytest.raises(AssertionError, match="left after"):
        rig.run(limit=6)
    assert ("owner", "READ_AFTER_FREE") in kinds(rig, "A")
    rig.close()


@pytest.mark.parametrize(("caching", "why"), [(True, "FOREIGN_FREE"), (False, "DOUBLE_FREE")])
def test_blocks_freed_twice(models, monkeypatch, caching, why):
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager

    rig = Rig("llama", models, enable_prefix_caching=caching)
    free = SingleTypeKVCacheManager.free

    def free_twice(self, request_id):
        blocks = list(self.req_to_blocks.get(request_id, []))
        free(self, request_id)
        if request_id.startswith("A-"):
            self.block_pool.free_blocks(blocks[:1])

    monkeypatch.setattr(SingleTypeKVCacheManager, "free", free_twice)
    rig.add("B", prompt(52, 40), length=4)
    rig.add("A", prompt(50, 70), length=4)
    rig.run()
    assert kinds(rig, "A") == {("owner", why)}
    assert kinds(rig, "B") == set()
    rig.close()


def test_prefix_cache_returns_another_prompts_block(rig, monkeypatch):
    from vllm.v1.core.block_pool import BlockPool

    rig.add("donor", prompt(50, 96))
    rig.add("other", prompt(51, 96))
    pages = {}
    rig.run(lambda step: pages.update({r: rig.pages(r)[0] for r in ("donor", "other")}) if step == 3 else None)
    find = BlockPool.get_cached_block

    def find_wrong(self, block_hash, groups):
        found = find(self, block_hash, groups)
        if found and found[0].block_id == pages["donor"][1]:
            return [self.blocks[pages["other"][1]]]
        return found

    monkeypatch.setattr(BlockPool, "get_cached_block", find_wrong)
    rig.add("A", prompt(50, 96) + prompt(9, 4))
    rig.run()
    assert ("token", "WRONG_TOKEN") in kinds(rig, "A")
    first = next(v for v in rig.session.violations() if v.why == "WRONG_TOKEN")
    assert (first.slot // 32, first.position) == (pages["other"][1], 32)


def test_slot_mapping_is_off_by_one(rig, monkeypatch):
    from vllm.v1.worker.block_table import BlockTable

    compute = BlockTable.compute_slot_mapping

    def shifted(self, *args, **kwargs):
        compute(self, *args, **kwargs)
        self.slot_mapping.gpu += 1

    monkeypatch.setattr(BlockTable, "compute_slot_mapping", shifted)
    rig.add("A", prompt(50, 40))
    rig.run()
    assert ("index", "TABLE_DIFFERS") in kinds(rig, "A")
    first = rig.session.violations()[0]
    assert (first.check, first.why, first.position, first.stored, first.found) == (
        "index", "TABLE_DIFFERS", 0, first.slot, first.slot - 1,
    )  # fmt: skip


def test_block_table_of_the_worker_is_stale(rig, monkeypatch):
    from vllm.v1.worker.block_table import BlockTable

    append = BlockTable.append_row

    def forgets_the_third(self, block_ids, row):
        if self.num_blocks_per_row[row] != 2:
            append(self, block_ids, row)

    monkeypatch.setattr(BlockTable, "append_row", forgets_the_third)
    rig.add("A", prompt(50, 60), length=12)
    rig.run()
    # its entry is still the null block: attention reads there, and the tokens are about to be written there
    assert {("index", "READ_DIFFERS"), ("bounds", "RESERVED_SLOT")} <= kinds(rig, "A")
    first = next(v for v in rig.session.violations() if v.why == "READ_DIFFERS")
    assert first.position == 64


def test_only_the_kernels_block_table_is_stale(rig, monkeypatch):
    """The slots are right; attention alone is sent to another page."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

    build = CPUAttentionMetadataBuilder.build

    def build_stale(self, *args, **kwargs):
        metadata = build(self, *args, **kwargs)
        metadata.block_table = metadata.block_table.clone()
        metadata.block_table[:, 1] = 40
        return metadata

    monkeypatch.setattr(CPUAttentionMetadataBuilder, "build", build_stale)
    rig.add("A", prompt(50, 60), length=3)
    rig.run()
    assert kinds(rig, "A") == {("index", "READ_DIFFERS")}


def test_write_that_goes_elsewhere_is_found_by_its_operand(rig, monkeypatch):
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    update = CPUAttentionBackendImpl.do_kv_cache_update

    def misdirected(self, layer, key, value, kv_cache, slot_mapping):
        if layer.layer_name.startswith("model.layers.1."):
            slot_mapping = slot_mapping + 1
        update(self, layer, key, value, kv_cache, slot_mapping)

    monkeypatch.setattr(CPUAttentionBackendImpl, "do_kv_cache_update", misdirected)
    rig.add("A", prompt(50, 40), length=2)
    rig.run()
    found = [v for v in rig.session.violations() if v.check == "operand"]
    assert found
    assert {v.layer for v in found} == {"model.layers.1.self_attn.attn"}
    assert str(found[0].request).startswith("A-")


def test_mode_raise_stops_before_the_token_leaves(models, monkeypatch):
    from kvcanary_fx.adapters.vllm import settings

    rig = Rig("llama", models)
    config = settings.VllmSettings(kvcanary_fx.CanaryConfig(mode="raise"))
    rig.guard.reactions.settings = config
    rig.guard.begin(True)
    rig.add("A", prompt(50, 40), length=8)

    def at(step):
        if step == 3:
            rig.flip("model.layers.1.self_attn.attn", 1, "A", 10)

    with pytest.raises(kvcanary_fx.KVCacheViolation) as caught:
        rig.run(at)
    (found,) = caught.value.violations
    assert (found.check, found.layer, found.half, found.position) == (
        "content", "model.layers.1.self_attn.attn", "V", 10,
    )  # fmt: skip
    assert "request A-" in str(caught.value)
    assert rig.tokens == {}
    rig.close()
