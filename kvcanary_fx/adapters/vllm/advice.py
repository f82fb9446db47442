"""What to try about a violation, in words of vLLM: where an engine of one's own would call the session."""

from __future__ import annotations

#: By the name of the text that explains a violation (``kernels/checks.py``); the others hold for any engine.
ADVICE = {
    "content": (
        "run it again with prefix caching, KV connectors or off-loading switched off, one at a time, to see "
        "which of them writes; a custom attention backend or kernel writes beside its slots"
    ),
    "index": "compare the slots that the custom op writes with the forward context's slot_mapping",
    "content post": (
        "compare the slots that each layer writes with the forward context's slot_mapping; the step's tokens "
        "may be wrong already"
    ),
    "content life": (
        "what ran since the request's last step? KV connectors and off-loading write there, sleep mode and "
        "weight reloads too"
    ),
    "transfer": (
        "compare the bytes on both ends of the KV connector, and wait for the load before the step that reads"
    ),
    "OUT_OF_RANGE": "look at the worker's block table (BlockTable.append_row) and at the number of blocks",
    "RESERVED_SLOT": "block 0 is vLLM's null block: see which row of the worker's block table was not filled",
    "PLANNED_TWICE": "look at what KVCacheManager.allocate_slots gave to the two requests",
    "ROW_TOO_NARROW": "look at max_model_len and at the tokens that drafts add",
    "NO_SUCH_ROW": "look at the order of requests in the runner's InputBatch, and at max_num_seqs",
    "READ_AFTER_FREE": (
        "find who freed the block (BlockPool.free_blocks): an abort, a preemption, a KV connector that was "
        "not waited for"
    ),
    "FOREIGN_READ": (
        "find who freed the block while the request reads it (BlockPool.free_blocks), and compare the "
        "worker's block table with the scheduler's (KVCacheManager.get_block_ids)"
    ),
    "WRITE_AFTER_FREE": "find who freed the block before the step that writes it had ended",
    "OVERWRITE": "compare the order of BlockPool.free_blocks and get_new_blocks with the steps in flight",
    "WRITE_SHARED": (
        "a request's new tokens must begin in a block of its own: look at num_computed_tokens and at the "
        "prefix cache's hits"
    ),
    "DOUBLE_FREE": "find the first call of BlockPool.free_blocks with the block",
    "FOREIGN_FREE": "compare the blocks of the request (KVCacheManager.get_block_ids) with those that it gave up",
    "DOUBLE_ALLOCATE": "look for double_free before this in the log: the block is in the free queue twice",
    "SHARE_AFTER_FREE": "the prefix cache lists a block that was given up: see who resets its hash",
    "NEVER_WRITTEN": (
        "compare num_computed_tokens with what was stored: a KV connector's load that did not arrive, or a "
        "layer that does not write"
    ),
    "OTHER_NAMESPACE": (
        "the block's hash leaves out the adapter, the image or the salt: look at generate_block_hash_extra_keys"
    ),
    "NOT_THE_PLANNED_SLOT": "compare the slot_mapping that attention's write got with the forward context's",
    "TABLE_DIFFERS": (
        "compare BlockTable.compute_slot_mapping with the scheduler's blocks (KVCacheManager.get_block_ids)"
    ),
    "READ_DIFFERS": (
        "compare the block_table in the attention metadata with the scheduler's blocks; a custom metadata "
        "builder must build it in each step"
    ),
    "PADDING_WRITES": "padded tokens must get slot -1: look at the forward context's slot_mapping",
}

#: A name for the content check's text in an engine, with the same advice.
ADVICE["engine content"] = ADVICE["content"]
