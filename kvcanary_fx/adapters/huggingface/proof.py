"""Self-proof of the adapter: a tiny random model generates, clean and with faults planted between its steps.

Faults go through the methods that the adapter wraps.  If transformers no longer calls these, or uses them for
something else, a fault is not reported, or a clean run is.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ...compile.protect import session_of
from ...config import CanaryConfig
from ...passes import dynamo_calls
from ...proof import tiny
from ...proof.doctor import Finding
from ...reports.summary import muted
from ..hooks import hook
from . import paged_cache
from .generate import attach, batch_session
from .groups import Group

#: Plants a fault in a cache, or in a batch processor whose batch is prepared.
Plant = Callable[[Any], None]

_PROMPTS = [list(range(3, 14)), list(range(20, 29)), list(range(3, 12))]


def examine_generate() -> Iterator[Finding]:
    """What was reported for ``generate``, without a fault and with one."""
    with muted(), _quiet_transformers():
        yield _silence(_tried(_generate, None))
        yield _finding("content", "a flipped bit in what a prefill wrote", _tried(_generate, _flip))


def examine_batches() -> Iterator[Finding]:
    """The same for ``generate_batch``."""
    with muted(), _quiet_transformers():
        yield _silence(_tried(_batch, None))
        for check, fault, plant in (
            ("content", "a flipped bit in a paged cache", _flip_in_block),
            ("owner", "a block freed while its request reads it", _free_early),
            ("index", "a read index of another slot", _misread),
        ):
            yield _finding(check, fault, _tried(_batch, plant))


def _silence(told: tuple[str, ...]) -> Finding:
    return Finding("silence", "nothing", not told, told)


def _finding(check: str, fault: str, told: tuple[str, ...]) -> Finding:
    return Finding(check, fault, told[:1] == (check,), told)


def _tried(run: Callable[[Plant | None], tuple[str, ...]], plant: Plant | None) -> tuple[str, ...]:
    """What a run reports; in an unknown version it may also fail in any way."""
    try:
        # The tiny models are on the CPU, whatever the user's default device; and a user's model is compiled as if they
        # had never been: seen with transformers 5.17, sizes of its caches became dynamic.
        with torch.device("cpu"), dynamo_calls.sizes_forgotten():
            return run(plant)
    except Exception as e:
        return (f"{type(e).__name__}: {e}",)


def _generate(plant: Plant | None) -> tuple[str, ...]:
    """What is reported for ``generate`` with a fault between the prefill and the first decode step.

    It has to be ``generate`` itself: 5.24 gives a forward its cache under another name than 5.23, and takes both.
    """
    model = _protected()
    caches: list[Any] = []

    def keep(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        caches.append(original(*args, **kwargs))
        return caches[-1]

    def strike(ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if ids.shape[1] == len(_PROMPTS[0]) + 1 and plant is not None:
            plant(caches[-1])
        return torch.zeros(ids.shape[0], dtype=torch.bool)

    hook(model, "_prepare_static_cache", keep)
    ids = torch.tensor([_PROMPTS[0]])
    model.generate(
        ids, max_new_tokens=3, do_sample=False, eos_token_id=None, pad_token_id=0, stopping_criteria=[strike]
    )
    return _checks(session_of(model))


def _batch(plant: Plant | None) -> tuple[str, ...]:
    """What is reported for ``generate_batch`` with a fault before its fourth batch; ``adapter`` if it fails."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model = _protected()
    steps = 0

    def strike(processor: Any) -> None:
        nonlocal steps
        steps += 1
        if steps == 4 and plant is not None:
            plant(processor)

    model._compiled_call_impl.before_batch = strike
    results = model.generate_batch(
        _PROMPTS,
        generation_config=GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(
            **{paged_cache.page_setting(): 4}, num_blocks=32, max_batch_tokens=16
        ),
    )
    session = batch_session(model)
    session.sweep.run()
    if len(results) < len(_PROMPTS) or any(r.error for r in results.values()):
        return ("adapter",)
    return _checks(session)


def _protected() -> Any:
    return attach(tiny.build("llama"), CanaryConfig(mode="log", inner="eager", budget=None), {}, {})


def _checks(session: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys(v.check for v in session.violations()))


def _flip(cache: Any) -> None:
    cache.layers[1].values.data.view(torch.int32)[0, 0, 2, 3] ^= 1


def _flip_in_block(processor: Any) -> None:
    group = _group_of_layer(processor, 1)
    block = next(iter(group.allocator.block_table.values()))[0]
    keys, _ = group.tensors()[list(group.layers).index(1)]
    keys[block, 0].view(torch.int32)[0, 0] ^= 1


def _free_early(processor: Any) -> None:
    group = _group_of_layer(processor, 1)
    blocks = [table[0] for table in group.allocator.block_table.values() if len(table) > 1]
    for _ in range(3):  # a shared block has several references
        group.hand_back(blocks[:1])


def _misread(processor: Any) -> None:
    index = processor.inputs_and_outputs.read_index_storage[0]
    index[2] = index[1]


def _group_of_layer(processor: Any, number: int) -> Group:
    groups = paged_cache.groups_of(processor.cache, 1, str)
    return next(group for group in groups if number in group.layers)


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Hide what transformers logs about tiny models and small caches."""
    names = ("transformers", "ContinuousBatchingLogger")
    before = {name: logging.getLogger(name).level for name in names}
    try:
        for name in names:
            logging.getLogger(name).setLevel(logging.CRITICAL)
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)
