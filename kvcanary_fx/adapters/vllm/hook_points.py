"""Every function of vLLM that the canary wraps, or calls from a wrapper: one table, checked before anything is hooked.

None of them is a public interface.  A version that has lost one, or gives it other parameters, is not guarded by guess:
what differs is named.  docs/vllm.md shows the same table (tested).
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

OPERATIONS = "Operations"

#: vLLM's server; importing it takes seconds, so that only a process that has it is looked at.
SERVER = "vllm.entrypoints.launchers.api_server.entry"

#: What a part of the table is for, in the order of the table.
NEEDS = (
    "Who has which block",
    "What a step runs, and what becomes of its tokens",
    "The forward, and the memory that it reads",
    "The compiled graph",
    "Drafts",
    OPERATIONS,
)


@dataclasses.dataclass(frozen=True)
class HookPoint:
    """One function of vLLM.

    Attributes:
        need: what it is for, one of :data:`NEEDS`.
        where: ``module:qualified name``.
        takes: its parameters, as in a stub: ``self, num_blocks, prefix=...``; ``property`` for a property.
        why: what the canary does there.
        later: its parameters from 0.33.0 on, where they are others, as its sources have them; our calls fit both.
        called: the canary calls it and does not wrap it.
        on_stack: its frame is looked for on the stack, and it is not wrapped.
        on_cpu: it exists only where vLLM runs on a CPU.
        of_server: it is hooked only in the process of a server.
        late: it is checked and hooked when vLLM imports its module, which many engines never do.
    """

    need: str
    where: str
    takes: str
    why: str
    later: str | None = None
    called: bool = False
    on_stack: bool = False
    on_cpu: bool = False
    of_server: bool = False
    late: bool = False

    @property
    def name(self) -> str:
        return self.where.replace(":", ".")


def _part(need: str, prefix: str, *rows: tuple[str, ...], **given: Any) -> tuple[HookPoint, ...]:
    """Rows of the table: name, parameters, what the canary does, and later parameters, if there are any."""
    return tuple(
        HookPoint(need, prefix + name, takes, why, later[0] if later else None, **given)
        for name, takes, why, *later in rows
    )


_MANAGER = "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager."
_POOL = "vllm.v1.core.block_pool:BlockPool."
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler."
_PROPOSER = "vllm.v1.spec_decode.llm_base_proposer:"

#: Model Runner V1.
FIRST_RUNNER = "vllm.v1.worker.gpu_model_runner"

#: The table.
HOOK_POINTS: tuple[HookPoint, ...] = (
    *_part(
        NEEDS[0],
        _POOL,
        (
            "__init__",
            "self, num_gpu_blocks, enable_caching, hash_block_size, enable_kv_cache_events=..., "
            "metrics_collector=..., medium=...",
            "follows the pool from its first block",
            "self, num_gpu_blocks, enable_caching, hash_block_size, enable_kv_cache_events=..., "
            "metrics_collector=..., num_hash_lookahead_tokens=..., medium=...",
        ),
        ("get_new_blocks", "self, num_blocks", "blocks are handed out, and leave the prefix cache"),
        ("touch", "self, blocks", "a request takes up blocks that it found in the prefix cache"),
        ("free_blocks", "self, ordered_blocks", "a request gives up blocks; the prefix cache may keep them"),
    ),
    *_part(
        NEEDS[0],
        "vllm.v1.core.kv_cache_manager:KVCacheManager.",
        (
            "allocate_slots",
            "self, request, num_new_tokens, num_new_computed_tokens=..., new_computed_blocks=..., "
            "num_lookahead_tokens=..., num_external_computed_tokens=..., delay_cache_blocks=..., "
            "num_encoder_tokens=..., full_sequence_must_fit=..., reserved_blocks=..., has_scheduled_reqs=..., "
            "skip_zeroing_group_ids=...",
            "says for which request the block pool is asked",
        ),
        ("free", "self, request", "the same, for blocks that are given up"),
        on_stack=True,
    ),
    *_part(
        NEEDS[0],
        _POOL,
        ("evict_blocks", "self, block_ids", "damaged blocks leave the prefix cache"),
        called=True,
    ),
    *_part(
        NEEDS[0],
        _MANAGER,
        (
            "add_local_computed_blocks",
            "self, request_id, new_computed_blocks, num_local_computed_tokens, num_external_computed_tokens",
            "says for which request and KV cache group the block pool is asked",
        ),
        ("allocate_new_blocks", "self, request_id, num_tokens, num_tokens_main_model", "the same"),
        ("free", "self, request_id", "the same"),
        (
            "remove_skipped_blocks",
            "self, request_id, processed_computed_tokens, num_prompt_tokens=...",
            "the same, for blocks that left a sliding window",
        ),
        on_stack=True,
    ),
    *_part(
        NEEDS[0],
        _MANAGER,
        (
            "allocate_external_computed_blocks",
            "self, request_id, num_local_computed_tokens, num_external_computed_tokens, record_for_zeroing=...",
            "which blocks a KV connector fills",
        ),
        (
            "_apply_cow",
            "self, request_id, block_idx, source_block, cow_block",
            "a prefix ends inside a block: the request gets a copy, which is compared with what was copied",
        ),
    ),
    *_part(
        NEEDS[0],
        _SCHEDULER,
        (
            "_handle_invalid_blocks",
            "self, invalid_block_ids, num_scheduled_tokens",
            "blocks that a KV connector could not load are written by one request, and others share them again",
        ),
    ),
    *_part(
        NEEDS[1],
        _SCHEDULER,
        ("schedule", "self, throttle_prefills=...", "what happened to blocks goes to the workers with the step"),
        (
            "update_from_output",
            "self, scheduler_output, model_runner_output",
            "requests that read damage end, or begin again, before their tokens leave",
        ),
    ),
    *_part(
        NEEDS[1],
        _SCHEDULER,
        ("finish_requests", "self, request_ids, finished_status", "ends them"),
        (
            "_preempt_request",
            "self, request, timestamp, drop_stale_output=...",
            "or lets them begin again from their tokens",
        ),
        called=True,
    ),
    *_part(
        NEEDS[1],
        "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.",
        ("reset_cache", "self", "what an offloading connector has stored of damaged blocks is dropped"),
        called=True,
    ),
    *_part(
        NEEDS[2],
        "vllm.v1.worker.gpu_worker:Worker.",
        ("sleep", "self, level=...", "the memory of the cache is given back: nothing that was stored is compared"),
        ("discard", "self, tags", "the same, for the cache alone"),
    ),
    *_part(
        NEEDS[2],
        f"{FIRST_RUNNER}:GPUModelRunner.",
        (
            "initialize_kv_cache",
            "self, kv_cache_config, is_profiling=..., kv_cache_allocation_context=...",
            "the cache exists: where each slot's bytes are is found, and the guard is made",
        ),
        ("execute_model", "self, scheduler_output, intermediate_tensors=...", "a step begins"),
        (
            "_model_forward",
            "self, input_ids=..., positions=..., intermediate_tensors=..., inputs_embeds=..., **model_kwargs",
            "what is about to be read is checked before the model runs, what it wrote after",
        ),
        ("sample_tokens", "self, grammar_output", "what failed goes to the scheduler with the tokens"),
        late=True,
    ),
    *_part(
        NEEDS[2],
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.",
        (
            "initialize_kv_cache",
            "self, kv_cache_config, is_profiling=..., kv_cache_allocation_context=...",
            "the same in Model Runner V2; its connector gets our calls around each forward",
        ),
        ("capture_model", "self, *, profile_only=...", "its graphs are captured with the checks of the layers"),
        (
            "execute_model",
            "self, scheduler_output, intermediate_tensors=..., dummy_run=..., skip_attn_for_dummy_run=..., "
            "is_profile=..., context_len=..., valid_dummy_state_slots=..., randomize_inputs=...",
            "a step begins",
        ),
        (
            "sample_tokens",
            "self, grammar_output",
            "an output says whose it is (only where there are drafts, or several runners or ranks)",
        ),
        ("pool", "self", "the same of a model that samples nothing"),
        (
            "postprocess_sampled",
            "self, idx_mapping, sampled_tokens, num_sampled, num_rejected, query_start_loc=...",
            "drafted tokens were verified: slots of rejected ones may not be read (only where there are drafts)",
            "self, idx_mapping, sampled_tokens, num_sampled, num_rejected, query_start_loc=..., draft_tokens=...",
        ),
    ),
    *_part(
        NEEDS[2],
        "vllm.v1.worker.gpu.",
        (
            "cudagraph_utils:set_forward_context",
            "attn_metadata, vllm_config, num_tokens=..., num_tokens_across_dp=..., cudagraph_runtime_mode=..., "
            "batch_descriptor=..., ubatch_slices=..., slot_mapping=..., skip_compiled=..., is_padding=...",
            "around a forward that is captured",
        ),
        ("async_utils:AsyncOutput.get_output", "self", "the tokens arrive: violations are read before one leaves"),
        ("async_utils:AsyncPoolingOutput.get_output", "self", "the same of embeddings and scores"),
    ),
    *_part(
        NEEDS[2],
        "vllm.v1.worker.gpu.kv_connector:KVConnector.",
        (
            "pre_forward",
            "self, scheduler_output, input_batch=..., attn_metadata=...",
            "called before the model by a runner, which has ours in the place of its own",
        ),
        ("finish_forward", "self", "the same after the model"),
        ("set_disabled", "self, disabled", "the same around dummy forwards"),
        called=True,
    ),
    *_part(
        NEEDS[2],
        "vllm.v1.attention.backends.cpu_attn:",
        (
            "_get_attn_isa",
            "dtype, block_size, head_size=..., kv_cache_dtype=...",
            "no AMX tiles, in which a slot's bytes are no strided row",
        ),
        on_cpu=True,
    ),
    *_part(
        NEEDS[3],
        "vllm.config:",
        (
            "CompilationConfig.init_backend",
            "self, vllm_config, prefix=..., is_encoder=...",
            "two ops around attention, before the graph is split",
            "self, vllm_config, prefix=..., is_encoder=..., use_aot_compile=...",
        ),
        ("VllmConfig.compute_hash", "self, include_version=...", "guarded artifacts have keys of their own"),
        (
            "VllmConfig.__post_init__",
            "self",
            "our ops are in no piece that is captured; no full graphs of the first runner",
        ),
    ),
    *_part(
        NEEDS[3], "vllm.config:", ("VllmConfig.use_v2_model_runner", "property", "which runner it will be"), called=True
    ),
    *_part(
        NEEDS[3],
        "vllm.model_executor.layers.attention.",
        (
            "attention:unified_attention_with_output",
            "query, key, value, output, layer_name, output_scale=..., output_block_scale=..., kv_cache_dummy_dep=...",
            "the same two calls where no graph has the ops: eager mode",
        ),
        (
            "mla_attention:unified_mla_attention_with_output",
            "q, kv_c_normed, k_pe, output, layer_name, output_scale=..., output_block_scale=..., "
            "kv_cache_dummy_dep=..., quant_group_size=..., quant_scale_ue8m0=..., quant_col_major=..., "
            "quant_tma_aligned=..., q_dcp_replicated=...",
            "the same for MLA",
        ),
    ),
    *_part(
        NEEDS[3],
        "vllm.model_executor.layers.attention.",
        ("attention:unified_kv_cache_update", "key, value, layer_name", "runs where the graph has ours in its place"),
        ("attention:unified_kv_cache_update_fake", "key, value, layer_name", "what it gives while vLLM compiles"),
        (
            "mla_attention:unified_mla_kv_cache_update",
            "kv_c_normed, k_pe, layer_name, kv_cache_dtype, k_scale",
            "the same for MLA",
        ),
        (
            "mla_attention:unified_mla_kv_cache_update_fake",
            "kv_c_normed, k_pe, layer_name, kv_cache_dtype, k_scale",
            "the same for MLA",
        ),
        called=True,
    ),
    *_part(
        NEEDS[3],
        "vllm.utils.torch_utils:",
        (
            "direct_register_custom_op",
            "op_name, op_func, mutates_args=..., fake_impl=..., target_lib=..., dispatch_key=..., tags=...",
            "registers the ops",
        ),
        ("_resolve_layer_name", "layer_name", "the layer of an op's call"),
        called=True,
    ),
    *_part(
        NEEDS[4],
        _PROPOSER,
        (
            "SpecDecodeBaseProposer.propose",
            "self, num_speculative_tokens, target_token_ids, target_positions, target_hidden_states, next_token_ids, "
            "token_indices_to_sample, common_attn_metadata, sampling_metadata, mm_embed_inputs=..., "
            "num_rejected_tokens_gpu=..., slot_mappings=...",
            "a proposal begins: the draft's own layers",
        ),
        (
            "SpecDecodeBaseProposer.build_per_group_and_layer_attn_metadata",
            "self, common_attn_metadata, draft_index=...",
            "what the next forward of the draft reads",
        ),
        (
            "set_forward_context",
            "attn_metadata, vllm_config, num_tokens=..., num_tokens_across_dp=..., cudagraph_runtime_mode=..., "
            "batch_descriptor=..., ubatch_slices=..., slot_mapping=..., skip_compiled=..., is_padding=...",
            "around a forward of the draft",
        ),
        late=True,
    ),
    *_part(
        NEEDS[4],
        "vllm.v1.worker.gpu.spec_decode.",
        (
            "target_dependent_ar.speculator:TargetDependentARSpeculator._prefill",
            "self, num_reqs, num_tokens, attn_metadata, slot_mappings, num_tokens_across_dp, "
            "cudagraph_runtime_mode=..., mm_inputs=...",
            "the first forward of a draft in Model Runner V2: its layers record the tokens of the target",
            "self, num_reqs, num_tokens, attn_metadata, slot_mappings, num_tokens_across_dp, "
            "cudagraph_runtime_mode=..., mm_inputs=..., skip_sample=...",
        ),
        (
            "standalone_ar.speculator:StandaloneARSpeculator._prefill",
            "self, input_batch, num_rejected, last_sampled, num_reqs, skip_attn, num_tokens_across_dp",
            "the same for a draft model",
        ),
    ),
    *_part(
        NEEDS[5],
        "vllm.v1.metrics.prometheus:",
        ("get_prometheus_registry", "", "the canary's counts are in vLLM's metrics endpoint"),
    ),
    *_part(
        NEEDS[5],
        "vllm.",
        (
            "entrypoints.generate.base.serving:GenerateBaseServing._raise_if_error",
            "self, finish_reason, request_id",
            "a client is told why its request failed",
        ),
        (
            "v1.engine.exceptions:EngineDeadError.__init__",
            "self, *args, suppress_context=..., **kwargs",
            "or why the engine ended",
        ),
        (
            "entrypoints.launchers.api_server.entry:build_and_serve",
            "engine_client, listen_address, sock, args, peer_loads=..., **uvicorn_kwargs",
            "a server whose engine ended for a violation does not exit with status 0",
        ),
        of_server=True,
    ),
)


def differences(table: Sequence[HookPoint], on_cpu: bool) -> list[str]:
    """What of a table this vLLM does not have as the table says; empty if all is known.

    Args:
        on_cpu: vLLM runs on a CPU.
    """
    on_server = SERVER in sys.modules
    here = [p for p in table if (on_cpu or not p.on_cpu) and (on_server or not p.of_server)]
    return [text for point in here for text in _differences(point)]


def resolve(where: str) -> tuple[Any, str]:
    """The class or module that has a name, and the name in it.

    Raises:
        ImportError, AttributeError: there is no such module or class.
    """
    module, _, path = where.partition(":")
    owner: Any = importlib.import_module(module)
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    return owner, name


def overrides(owner: type, name: str) -> Iterator[type]:
    """The subclasses of a class, known by now, that define ``name`` themselves."""
    todo: list[type] = list(owner.__subclasses__())
    while todo:
        cls = todo.pop()
        todo += cls.__subclasses__()
        if name in vars(cls):
            yield cls


def parameters(found: Any) -> str:
    """The parameters of a function as the table writes them: no annotations, and no values of defaults."""
    if isinstance(found, property):
        return "property"
    empty = inspect.Parameter.empty
    shown = [
        p.replace(annotation=empty, default=empty if p.default is empty else ...)
        for p in inspect.signature(found).parameters.values()
    ]
    return str(inspect.Signature(shown))[1:-1].replace("=Ellipsis", "=...")


def _differences(point: HookPoint) -> Iterator[str]:
    try:
        owner, name = resolve(point.where)
        found = vars(owner)[name]
    except (ImportError, AttributeError, KeyError):
        yield f"{point.name} is missing"
        return
    if (has := parameters(found)) not in (point.takes, point.later):
        yield f"{point.name} takes ({has}), known is ({point.takes})"
        return
    if isinstance(owner, type) and callable(found) and name != "__init__":  # which a subclass calls as it likes
        for cls in overrides(owner, name):
            if not _takes_the_same(vars(cls)[name], found):
                has = parameters(vars(cls)[name])
                yield f"{cls.__module__}.{cls.__qualname__}.{name} takes ({has}), known is ({point.takes})"


def _takes_the_same(override: Callable[..., Any], base: Callable[..., Any]) -> bool:
    """Whether an override can be called by position as the method that it overrides; it may name things its own way."""
    given = [p for p in inspect.signature(base).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    try:
        inspect.signature(override).bind(*given)
        inspect.signature(override).bind(*(p for p in given if p.default is p.empty))
    except TypeError:
        return False
    return True
