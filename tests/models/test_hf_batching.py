"""Continuous batching of a protected Hugging Face model: silent when all is well, and each planted bug has a name."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import kvcanary_fx

pytest.importorskip("transformers", minversion="5.17")

import batches
import transformers
from torch._dynamo.utils import counters
from transformers import CompileConfig, MistralConfig, MistralForCausalLM
from transformers.generation.continuous_batching import continuous_api, input_outputs, offloading_manager

from kvcanary_fx.adapters import huggingface
from kvcanary_fx.adapters.huggingface import paged_cache, proof
from kvcanary_fx.proof import tiny

if HAS_ALLOCATORS := paged_cache.page_setting() == "page_size":
    from transformers.generation.continuous_batching import cache_allocators

pytestmark = pytest.mark.usefixtures("on_device")  # where models are built

#: Bugs planted in methods that are others before 5.18.
in_allocators = pytest.mark.skipif(not HAS_ALLOCATORS, reason="before 5.18 a block manager has what is broken here")

ARCHITECTURES = ["gemma3", "llama", "mixtral", "qwen3"]
NAME = "model.layers.{}.self_attn"


#: Five prompts that share three blocks and a part of a fourth, and one of its own; longer than a batch together.
SHARED = [*batches.prompts(3, 9, 1, 20, 16, shared=13), *batches.prompts(7, seed=1)]


def clean(arch, inputs, new=12, sequences=1, **settings):
    """Generate plain and guarded; the session, after looking that both agree and nothing was said."""
    plain = batches.generate(tiny.build(arch), inputs, new, sequences, **settings)
    torch._dynamo.reset()
    model = batches.guarded(arch, health_every=1, sweep_every=3)
    assert batches.generate(model, inputs, new, sequences, **settings) == plain
    session = huggingface.batch_session(model)
    session.sweep.run()
    assert session.violations() == []
    assert session.uncovered == []
    held = [int((pool.space.flags[:-1] >= 256).sum()) - len(pool.declared.reserved) for pool in session.pools.values()]
    assert session.stats().slots <= sum(held)
    return session


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_chunked_prefill_and_shared_prefixes_are_silent(arch):
    session = clean(arch, SHARED)
    stats = session.stats()
    tokens = sum(len(p) + 11 for p in SHARED)
    layers = len(session.eager_layers)
    assert layers == 2
    if arch == "gemma3":  # with a window nothing is shared: each token is written in each layer
        assert stats.recorded == 2 * layers * tokens
        assert stats.slots == 0 or not HAS_ALLOCATORS  # a block manager keeps blocks that it never shares
    else:
        assert 0 < stats.recorded < 2 * layers * tokens
        assert stats.slots > 0  # blocks that the cache keeps for requests to come
    assert stats.checked > stats.recorded


def test_a_window_that_is_no_whole_number_of_pages(monkeypatch):
    """All layers slide; a ring of 10 slots in pages of 4.  A bit of its last page is found."""
    sizes = dict(vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    config = MistralConfig(**sizes, num_key_value_heads=2, head_dim=8, max_position_embeddings=256, sliding_window=10)
    plain = batches.generate(MistralForCausalLM(config).eval(), SHARED[:2])
    torch.manual_seed(0)  # as the fixture did before the first model
    model = huggingface.protect(MistralForCausalLM(config).eval(), inner="eager", mode="log")
    assert batches.generate(model, SHARED[:2]) == plain
    session = huggingface.batch_session(model)
    assert session.stats().violations == 0
    assert session.stats().slots_checked > 0

    struck = []

    def strike(processor, step):
        for state in (future.state for future in processor.inputs_and_outputs.requests_in_batch):
            position = state.position_offset - 2  # the last one that this step reads
            if not struck and position > 20 and position % 10 == 9:  # the end of the ring
                batches.flip(processor, 1, 1, state.request_id, position)
                struck.append(("content", "V", state.request_id, position))

    batches.planted(monkeypatch, after=strike)
    batches.generate(model, SHARED[:2])
    found = huggingface.batch_session(model).violations()
    assert struck
    assert [(v.check, v.half, v.request, v.position) for v in found] == struck


def test_a_full_cache_that_evicts_and_starts_requests_anew_is_silent(monkeypatch):
    """14 blocks for six requests of up to 57 tokens: cached blocks are evicted and requests are reset."""
    seen = []
    original = offloading_manager.OffloadingManager.offload_requests
    monkeypatch.setattr(
        offloading_manager.OffloadingManager, "offload_requests", lambda self: seen.append(1) or original(self)
    )
    clean("llama", SHARED, new=24, num_blocks=14)
    assert len(seen) >= 2


def test_blocks_without_sharing_are_all_free_at_the_end():
    session = clean("llama", SHARED, allow_block_sharing=False)
    assert session.stats().slots == 0


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_children_of_a_request_share_its_blocks_and_get_copies(arch):
    clean(arch, SHARED[:3], sequences=3)


def test_requests_saved_in_host_memory_keep_their_fingerprints(monkeypatch):
    """Host memory is pinned, which only a machine with a GPU can do; here it is plain."""

    class Unpinned:
        def __getattr__(self, name):
            return getattr(torch, name)

        def empty(self, *args, pin_memory=False, **kwargs):
            return torch.empty(*args, **kwargs)

    restored = []
    monkeypatch.setattr(offloading_manager, "torch", Unpinned())
    original = offloading_manager.OffloadingManager.restore_scheduled_requests

    def restore(self, requests):
        restored.extend(f.state.request_id for f in requests if f.state.is_cpu_offloaded)
        original(self, requests)

    monkeypatch.setattr(offloading_manager.OffloadingManager, "restore_scheduled_requests", restore)
    clean("llama", SHARED, new=24, num_blocks=14, cpu_offload_space=0.001)
    assert restored


def test_compiled_batches_are_guarded_as_eager_ones():
    """update stays outside of the graphs, so padding is all that compiling changes."""
    config = CompileConfig(backend="eager", fullgraph=False, dynamic=True, mode=None)
    compiled = dict(varlen_compile_config=config, q_padding_interval_size=16, kv_padding_interval_size=64)
    plain = batches.generate(tiny.build("llama", layers=1), SHARED[:1], 3)
    model = huggingface.protect(tiny.build("llama", layers=1), inner="eager")
    frames = sum(counters["frames"].values())
    assert batches.generate(model, SHARED[:1], 3, **compiled) == plain
    assert sum(counters["frames"].values()) > frames
    stats = huggingface.batch_session(model).stats()
    assert stats.checked > 0
    assert stats.violations == 0


def test_a_persistent_manager_keeps_its_session_and_its_blocks():
    model = batches.guarded("llama")
    first = batches.generate(model, SHARED[:3], persistent=True)
    session, checked = huggingface.batch_session(model), huggingface.batch_session(model).stats()
    second = batches.generate(model, SHARED[:3], persistent=True)
    model.destroy_cached_continuous_batching_manager()
    assert list(second.values()) == list(first.values())
    assert huggingface.batch_session(model) is session
    stats = session.stats()
    assert stats.violations == 0
    assert 0 < stats.recorded - checked.recorded < checked.recorded  # the prompts were in the cache


def test_batches_are_proved_where_the_config_has_no_page_size(monkeypatch):
    """As before 5.18, where a page is called a block; a stand-in, unless such a version runs."""
    theirs = transformers.ContinuousBatchingConfig

    @dataclasses.dataclass
    class WithBlocks:
        block_size: int
        num_blocks: int
        max_batch_tokens: int

        def __new__(cls, block_size, **others):
            return theirs(page_size=block_size, **others)

    if HAS_ALLOCATORS:
        monkeypatch.setattr("transformers.ContinuousBatchingConfig", WithBlocks)
    clean_run = next(proof.examine_batches())
    assert clean_run.ok, clean_run.told


def test_a_prompt_that_is_cached_as_a_whole_is_silent():
    """Its last token is computed again: before 5.18 into the shared block, which guarding prevents."""
    whole = batches.prompts(4 * batches.PAGE)
    plain = batches.generate(tiny.build("llama"), whole, 3)
    model = batches.guarded("llama")
    for _ in range(2):
        assert list(batches.generate(model, whole, 3, persistent=True).values()) == list(plain.values())
    model.destroy_cached_continuous_batching_manager()
    assert huggingface.batch_session(model).stats().violations == 0


# ---- flips


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_a_flipped_bit_is_found_in_its_layer_request_and_position(arch, monkeypatch):
    """In an old slot where there is no window, in one that it still shows where there is."""
    expected = []

    def strike(processor, step):
        if not 7 <= step < 11:
            return
        layer, half = divmod(step - 7, 2)
        request = processor.inputs_and_outputs.requests_in_batch[step % 3].state
        position = 2 if batches.group_of(processor, layer).window is None else request.position_offset - 8
        batches.flip(processor, layer, half, request.request_id, position)
        expected.append((step, "content", NAME.format(layer), "KV"[half], request.request_id, position))

    batches.planted(monkeypatch, after=strike)
    model = batches.guarded(arch, mode="log")
    batches.generate(model, batches.prompts(9, 6, 12), allow_block_sharing=False)
    found = huggingface.batch_session(model).violations()
    assert [(v.step, v.check, v.layer, v.half, v.request, v.position) for v in found] == expected
    assert len({where[4] for where in expected}) == 3


def test_raise_mode_raises_from_generate_batch(monkeypatch):
    batches.planted(monkeypatch, after=lambda p, step: batches.flip(p, 1, 0, "req_1", 3) if step == 6 else None)
    with pytest.raises(kvcanary_fx.KVCacheViolation) as caught:
        batches.generate(batches.guarded("llama"), batches.prompts(9, 6))
    assert [(v.check, v.request, v.position, v.step) for v in caught.value.violations] == [("content", "req_1", 3, 6)]


def test_a_violation_can_cancel_its_request_and_no_other(monkeypatch):
    inputs = batches.prompts(9, 6, 12)
    plain = batches.generate(tiny.build("llama"), inputs)
    monkeypatch.setattr(
        continuous_api.ContinuousBatchProcessor,
        "update_batch",
        after_flip(continuous_api.ContinuousBatchProcessor.update_batch, step=6, request="req_1"),
    )
    cancelled = []

    def cancel(violation):
        cancelled.append(violation.request)
        manager.cancel_request(violation.request)

    model = batches.guarded("llama", mode="log", on_violation=cancel)
    generation, batching = batches.configs()
    with model.continuous_batching_context_manager(generation, continuous_batching_config=batching) as manager:
        manager.add_requests(inputs, max_new_tokens=12)
        results = [manager.get_result(timeout=10) for _ in range(2)]
    assert set(cancelled) == {"req_1"}
    assert {r.request_id: r.generated_tokens for r in results} == {k: plain[k] for k in ("req_0", "req_2")}


def after_flip(original, step, request):
    """A method of a processor that flips a bit of a request first, once."""
    calls = []

    def wrapper(self, *args):
        calls.append(1)
        if len(calls) == step:
            batches.flip(self, 0, 1, request, 2)
        return original(self, *args)

    return wrapper


def test_a_cached_prefix_that_nobody_reads_is_swept(monkeypatch):
    model = batches.guarded("llama", mode="log")
    processors = []
    batches.planted(monkeypatch, after=lambda p, step: processors.append(p))
    batches.generate(model, SHARED[:1])
    session, pool = huggingface.batch_session(model), huggingface.batch_session(model).pool
    cache = processors[0].cache
    if HAS_ALLOCATORS:
        cached = next(iter(cache.cache_allocators["full_attention"].ledger.block_to_hash))
    else:
        cached = next(iter(cache._block_manager._hash_to_id.values()))
    pool.views[2][cached, 1].view(torch.int32)[0, 0] ^= 1
    session.sweep.run()
    assert [(v.check, v.phase, v.layer, v.slot) for v in session.violations()] == [
        ("content", "sweep", "model.layers.1.self_attn", cached * batches.PAGE + 1)
    ]


# ---- bugs of the block manager


def bug(monkeypatch, arch="llama", before=None, after=None, inputs=None, **settings):
    """What a protected run says in the first step in which it says something."""
    batches.planted(monkeypatch, before, after)
    model = batches.guarded(arch, mode="log")
    batches.generate(model, inputs or batches.prompts(9, 6, 12), 10, **settings)
    found = huggingface.batch_session(model).violations()
    return [v for v in found if v.step == found[0].step] if found else []


def nth(processor, place):
    """The name of a request by its place in the batch."""
    return processor.inputs_and_outputs.requests_in_batch[place].state.request_id


@pytest.mark.parametrize("layer", [0, 1], ids=["ring", "full"])
def test_another_requests_block_in_a_table(layer, monkeypatch):
    def swap(processor, step):
        if step == 7:
            table = batches.group_of(processor, layer).allocator.block_table
            table["req_1"][0] = table["req_0"][0]

    found = bug(monkeypatch, "gemma3", before=swap, allow_block_sharing=False)
    told = {(v.check, v.why) for v in found}
    assert ("owner", "FOREIGN_READ") in told
    # and where the rest of the request follows on the foreign block, is written to it, or reads what its owner writes
    assert told <= {
        ("owner", "FOREIGN_READ"),
        ("owner", "OVERWRITE"),
        ("chain", "WRONG_PREDECESSOR"),
        ("index", "READ_WHILE_WRITTEN"),
    }
    assert {v.request for v in found if v.why != "READ_WHILE_WRITTEN"} == {"req_1"}
    assert {v.request for v in found} <= {"req_0", "req_1"}  # the owner is told what is written into its block
    assert {v.pool for v in found} == {["sliding_attention", "full_attention"][layer]}


@in_allocators
def test_a_block_of_another_prefix(monkeypatch):
    """A prefix match that returns the blocks of a prompt that begins otherwise."""
    inputs = [*batches.prompts(16, 16), *batches.prompts(16, seed=2)]
    original = cache_allocators.FullAttentionCacheAllocator.match_prefix_blocks

    def match(self, prompt_ids):
        blocks = original(self, prompt_ids)
        others = [b for b in self.ledger.block_to_hash if b not in blocks]
        return others[:2] if others else blocks

    monkeypatch.setattr(cache_allocators.FullAttentionCacheAllocator, "match_prefix_blocks", match)
    found = bug(monkeypatch, inputs=inputs)
    assert {v.check for v in found} == {"token"}
    assert {v.request for v in found} <= {"req_0", "req_1", "req_2"}
    assert len(found) == 2 * batches.PAGE * len({v.request for v in found})


@in_allocators
@pytest.mark.parametrize("layer", [0, 1], ids=["ring", "full"])
def test_a_block_freed_early(layer, monkeypatch):
    freed = []

    def free(processor, step):
        allocator, running = batches.group_of(processor, layer).allocator, processor.scheduler.active_requests
        wanted = any(a.needs_new_blocks(name, s.current_len(), 1) for name, s in running.items() for a in [allocator])
        if step >= 6 and not wanted and not freed:  # else somebody gets the block in this very step
            freed.append(allocator.block_table["req_2"][1])
            allocator.pool.free_blocks(allocator.index, freed[:])

    found = bug(monkeypatch, "gemma3", before=free)
    told = {(v.check, v.why) for v in found}
    assert ("owner", "READ_AFTER_FREE") in told
    assert told <= {("owner", "READ_AFTER_FREE"), ("owner", "WRITE_AFTER_FREE")}
    assert {v.request for v in found} == {"req_2"}
    assert {v.slot // batches.PAGE for v in found} == set(freed)


@in_allocators
def test_a_block_freed_twice(monkeypatch):
    original = cache_allocators.CacheAllocator.free_blocks

    def free_blocks(self, request_id, no_cache=False):
        blocks = list(self.block_table.get(request_id, []))
        original(self, request_id, no_cache)
        if request_id == "req_0":
            self.pool.free_blocks(self.index, blocks[:1])

    monkeypatch.setattr(cache_allocators.CacheAllocator, "free_blocks", free_blocks)
    found = bug(monkeypatch, allow_block_sharing=False)
    assert {(v.check, v.why, v.request) for v in found} == {("owner", "DOUBLE_FREE", "req_0")}
    assert len(found) == batches.PAGE


def test_a_stale_entry_among_the_read_indices(monkeypatch):
    names = []

    def redirect(processor, step):
        if step == 7:
            index = processor.inputs_and_outputs.read_index_storage[0]
            index[2] = index[1]
            names.append(nth(processor, 0))

    found = bug(monkeypatch, after=redirect)
    assert [(v.check, v.why, v.request, v.position) for v in found] == [("index", "READ_DIFFERS", names[0], 2)]


def test_a_shifted_write_index(monkeypatch):
    names = []

    def shift(processor, step):
        if step == 7:
            processor.inputs_and_outputs.write_index_storage[0, 1] -= 1
            names.append(nth(processor, 1))

    found = bug(monkeypatch, after=shift)
    assert ("index", "TABLE_DIFFERS") in {(v.check, v.why) for v in found}
    assert {v.request for v in found} == set(names)


def test_write_indices_that_change_on_their_way_to_the_layers(monkeypatch):
    original = input_outputs.ContinuousBatchingIOs.get_model_kwargs
    steps = [0]

    def get_model_kwargs(self, use_padding=False):
        kwargs = original(self, use_padding)
        steps[0] += 1
        if steps[0] == 7:
            kwargs["write_index"] = [index.roll(1) for index in kwargs["write_index"]]
        return kwargs

    monkeypatch.setattr(input_outputs.ContinuousBatchingIOs, "get_model_kwargs", get_model_kwargs)
    found = bug(monkeypatch)
    assert {(v.check, v.why) for v in found} >= {("index", "NOT_THE_PLANNED_SLOT")}
    assert {v.request for v in found if v.check == "index"} == {"req_0", "req_1", "req_2"}


@in_allocators
def test_write_indices_that_change_between_layers(monkeypatch):
    """In the place where all layers read them: the last one tells."""
    original = cache_allocators.FullAttentionCacheAllocator.update
    calls = [0]

    def update(self, key_states, value_states, layer_idx, read_index, write_index):
        calls[0] += 1
        if calls[0] == 14:
            write_index[1] = write_index[0]
        return original(self, key_states, value_states, layer_idx, read_index, write_index)

    monkeypatch.setattr(cache_allocators.FullAttentionCacheAllocator, "update", update)
    found = bug(monkeypatch)
    told = {(v.check, v.why, v.layer) for v in found if v.check == "index"}
    assert told == {("index", "NOT_THE_PLANNED_SLOT", NAME.format(1))}
    assert {v.layer for v in found if v.check == "operand"} == {NAME.format(1)}  # and its bytes are not where they go


@in_allocators
def test_a_write_that_lands_elsewhere(monkeypatch):
    """The indices are right, and the layer's code shifts them."""
    original = cache_allocators.FullAttentionCacheAllocator.update
    calls = [0]

    def update(self, key_states, value_states, layer_idx, read_index, write_index):
        calls[0] += 1
        wrong = write_index + 2 * batches.PAGE if calls[0] == 14 else write_index
        return original(self, key_states, value_states, layer_idx, read_index, wrong)

    monkeypatch.setattr(cache_allocators.FullAttentionCacheAllocator, "update", update)
    found = bug(monkeypatch)
    lost = [v for v in found if v.check == "operand"]
    assert {(v.layer, v.half) for v in lost} == {("model.layers.1.self_attn", half) for half in "KV"}
    assert {v.request for v in lost} == {"req_0", "req_1", "req_2"}
    # what they were written over is another layer's, which the forward has read: found behind it, on a CPU
    assert {(v.check, v.phase, v.layer) for v in found if v not in lost} <= {
        ("content", "post", "model.layers.0.self_attn")
    }


def test_positions_that_are_off_by_one(monkeypatch):
    names = []

    def shift(processor, step):
        if step == 7:
            processor.inputs_and_outputs.position_ids[0] += 1
            names.append(nth(processor, 0))

    found = bug(monkeypatch, after=shift)
    assert {(v.check, v.why) for v in found} == {("chain", "WRONG_POSITION")}
    assert {v.request for v in found} == set(names)


def test_a_token_that_is_not_the_requests_own(monkeypatch):
    names = []

    def replace(processor, step):
        if step == 7:
            processor.inputs_and_outputs.input_ids[1] += 1
            names.append(nth(processor, 1))

    found = bug(monkeypatch, after=replace)
    assert {(v.check, v.request) for v in found} == {("token", names[0])}


@in_allocators
def test_bytes_lost_on_the_way_of_a_copy(monkeypatch):
    """A fork's partial block is copied; the copy arrives with a bit changed."""
    original = cache_allocators.FullAttentionCacheAllocator.copy_blocks

    def copy_blocks(self, source, dest):
        original(self, source, dest)
        self._copy_view[dest[-1], 5] ^= 1

    monkeypatch.setattr(cache_allocators.FullAttentionCacheAllocator, "copy_blocks", copy_blocks)
    found = bug(monkeypatch, inputs=batches.prompts(9, 6), sequences=2)
    assert {(v.check, v.layer, v.half) for v in found} == {("content", "model.layers.0.self_attn", "K")}
    assert all("__child#" in v.request for v in found)


@pytest.mark.parametrize("device", ["cpu"])  # on a GPU a cache is let go with its batches
def test_a_forward_outside_a_batch_is_noticed(monkeypatch):
    seen = []
    batches.planted(monkeypatch, after=lambda p, step: seen.append(p))
    model = batches.guarded("llama", mode="log")
    batches.generate(model, batches.prompts(9))
    cache, session = seen[0].cache, huggingface.batch_session(model)
    kwargs = {"cu_seq_lens_k": {"full_attention": torch.zeros(2)}, "max_length_k": {"full_attention": 1}}
    kwargs |= {"write_index": [torch.tensor([0])], "read_index": [torch.zeros(0, dtype=torch.int64)]}
    indices = {"kwargs": kwargs} if HAS_ALLOCATORS else {name: kwargs[name] for name in ("write_index", "read_index")}
    cache.update(torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 8), 0, **indices)
    assert "without a single check" in session.uncovered[0]
