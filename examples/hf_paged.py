"""Guard Hugging Face's continuous batching, show that nothing changes, then flip bits and free a block too early.

    python examples/hf_paged.py --arch gemma3

The model is tiny and random, so no download is needed.  Six requests that share a prefix are generated in batches over
one paged cache, with prefills in chunks.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

import kvcanary_fx
from kvcanary_fx.adapters import huggingface
from kvcanary_fx.proof import tiny

NEW, PAGE = 12, 4

#: Called before the model's forward with the names of the requests in the batch, the session, and the batch's number.
Fault = Callable[[kvcanary_fx.EngineSession, int], None]


def prompts() -> list[list[int]]:
    torch.manual_seed(0)
    common = torch.randint(3, 128, (10,)).tolist()
    return [common + torch.randint(3, 128, (n,)).tolist() for n in (3, 9, 1, 20, 16, 7)]


def generate(model: Any) -> list[list[int]]:
    """The new tokens of each prompt."""
    results = model.generate_batch(
        prompts(),
        generation_config=GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(page_size=PAGE, num_blocks=64, max_batch_tokens=16),
    )
    return [result.generated_tokens for result in results.values()]


def guarded(arch: str, device: str, fault: Fault | None = None) -> Any:
    """A protected model; the fault happens when a forward of it begins."""
    model = huggingface.protect(tiny.build(arch, device=device), mode="raise", inner="eager", budget=None)
    batches = 0

    def strike(module: Any, args: Any) -> None:
        nonlocal batches
        batches += 1
        assert fault is not None
        fault(huggingface.batch_session(model), batches)

    if fault is not None:
        model.get_input_embeddings().register_forward_pre_hook(strike)
    return model


def flip(layer: str, half: str, position: int) -> Fault:
    """Flip one bit of a token of the batch's first request, in the eighth batch."""

    def strike(session: kvcanary_fx.EngineSession, batch: int) -> None:
        if batch != 8:
            return
        for pool in session.pools.values():
            for held, view in zip(pool.halves, pool.views, strict=True):
                if (held.info.layer, held.info.half) == (layer, half):
                    at = position if pool.declared.window is None else int(pool.space.positions.max()) - 4
                    slot = int((pool.space.positions[:-1] == at).nonzero()[0])
                    view[slot // PAGE, slot % PAGE].view(torch.int32)[0, 0] ^= 1

    return strike


def free_early(session: kvcanary_fx.EngineSession, batch: int) -> None:
    """Tell the pools that the first block of the batch's first request is free, as a broken allocator would."""
    if batch == 8:
        pool = session.pools["full_attention"]
        block = int(pool.declared.request_table[0, 0])
        while int(pool.space.flags[block * PAGE]) >= 256:
            pool.release(range(block * PAGE, block * PAGE + PAGE))


def caught(model: Any) -> kvcanary_fx.Violation | None:
    """What ends the batches of a model with a fault."""
    try:
        generate(model)
    except kvcanary_fx.KVCacheViolation as e:
        return e.violations[0]
    return None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="llama", choices=["gemma3", "llama", "mixtral", "qwen3"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    for name in ("transformers", "ContinuousBatchingLogger"):
        logging.getLogger(name).setLevel(logging.CRITICAL)

    expected = generate(tiny.build(args.arch, device=args.device))
    model = guarded(args.arch, args.device)
    equal = generate(model) == expected
    session = huggingface.batch_session(model)
    stats = session.stats()
    print(session.summary())
    print(
        f"{args.arch}: tokens equal {equal}, violations {stats.violations}, {stats.engine_steps} batches, "
        f"{stats.checked} fingerprints and {stats.slots_checked} identities checked"
    )
    ok, shown = equal and stats.violations == 0 and stats.checked > 0, ""
    for layer in session.eager_layers:
        for half in "KV":
            found = caught(guarded(args.arch, args.device, flip(layer, half, position=2)))
            right = found is not None and (found.check, found.layer, found.half) == ("content", layer, half)
            ok, shown = ok and right, found.explain() if found is not None else shown
            print(f"  bit flipped in {layer} {half}: {'found' if right else f'MISSED {found}'}", flush=True)
    found = caught(guarded(args.arch, args.device, free_early))
    right = found is not None and (found.check, found.why) == ("owner", "READ_AFTER_FREE")
    print(f"  block freed too early: {'found' if right else f'MISSED {found}'}\n\n{shown}")
    ok = ok and right
    print("ok" if ok else "FAILED")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
