"""What a process of :mod:`vllm_runs` may do besides the mixed load."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import os
import pathlib
import random
import sys
import tempfile
import time
from typing import Any

import forced_compile
import tiny_vllm
import torch
import vllm_drafts
import vllm_embeddings
import vllm_images
import vllm_lora
import vllm_sounds
from vllm_rig import Rig, mixed_load, prompt

LAYER = "model.layers.1.self_attn.attn"


def abort(directory: pathlib.Path, model: str) -> dict[str, Any]:
    """Flip a bit of request A while B runs beside it."""
    rig = Rig(model, directory)
    rig.add("A", prompt(50, 40), length=10)
    rig.add("B", prompt(51, 60), length=10)
    before = []

    def at(step: int) -> None:
        if step == 4:
            before.append(len(rig.scheduler.requests[rig.internal("A")].output_token_ids))
            rig.flip(LAYER, 0, "A", 10)

    rig.run(at)
    told = [[v.check, v.layer, v.half, v.position] for v in rig.session.violations()]
    pool = rig.scheduler.kv_cache_manager.block_pool
    left = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
    return {
        "finished": rig.finished,
        "tokens": rig.tokens,
        "tokens_before": before[0],
        "violations": told,
        "pages_left": left,
    }


def _find_here() -> None:
    """Let processes that are spawned, as on a GPU, find the modules of this folder."""
    here = os.path.dirname(os.path.abspath(__file__))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))


def _on_a_gpu() -> dict[str, Any]:
    """What an engine gets besides where there is one: vLLM's own graphs, and no room for a large cache."""
    if not torch.cuda.is_available():
        return {}
    # vLLM wants its share of the memory to be free, whatever it needs
    return dict(dtype="bfloat16", kv_cache_memory_bytes=1 << 28, gpu_memory_utilization=0.1, enforce_eager=False)


def spawned(directory: pathlib.Path, model: str, **arguments: Any) -> dict[str, Any]:
    """An engine in a process of its own, and its counts as this process sees them."""
    from vllm import LLM, SamplingParams

    llm = LLM(**tiny_vllm.engine_arguments(model, directory, **arguments, **_on_a_gpu()))
    wanted = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt(i, 40 + 30 * i)} for i in range(4)], wanted)
    found: dict[str, Any] = {"tokens": [list(o.outputs[0].token_ids) for o in outputs]}
    time.sleep(5)  # counts are written every two seconds
    llm.llm_engine.engine_core.shutdown()
    return found | _counts()


def spawned_flip(directory: pathlib.Path, model: str) -> dict[str, Any]:
    """The same; a bit of every idle page is flipped from outside, and a prompt comes again."""
    from vllm import LLM, SamplingParams

    with _standard_error() as written:
        llm = LLM(**tiny_vllm.engine_arguments(model, directory))
        wanted = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
        llm.generate([{"prompt_token_ids": prompt(5, 96)}], wanted)
        llm.collective_rpc(_flip_all_pages)
        error = None
        try:
            llm.generate([{"prompt_token_ids": prompt(5, 96) + [7]}], wanted)
        except Exception as e:
            error = type(e).__name__
        llm.llm_engine.engine_core.shutdown()
    return {"error": error, "stderr": written.getvalue()} | _counts()


def ruined_on_another_rank(directory: pathlib.Path, model: str) -> dict[str, Any]:
    """Two ranks; the second one's part of a block is ruined while a request reads it, and its prompt comes again."""
    import vllm_filled  # noqa: F401  whose load format the engine is asked for
    from vllm import LLM, SamplingParams

    ranks = dict(tensor_parallel_size=2, load_format="filled", worker_extension_cls="vllm_ruin.Ruin")
    _find_here()
    with _standard_error() as written:
        llm = LLM(**tiny_vllm.engine_arguments(model, directory, **ranks, **_on_a_gpu()))
        wanted = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": prompt(i, 100 - 50 * i)} for i in range(2)]
        llm.collective_rpc(_ruin_on_the_second_rank)
        tokens, error = [], None
        try:
            for asked in (prompts, prompts[:1]):
                tokens += [list(o.outputs[0].token_ids) for o in llm.generate(asked, wanted)]
        except Exception as e:
            error = type(e).__name__
        planted = [] if error else llm.collective_rpc(_planted)
        asked = [*prompts, prompts[0]]
        below = (
            []
            if error
            else [_below_the_best(llm, p["prompt_token_ids"], t) for p, t in zip(asked, tokens, strict=True)]
        )
        llm.llm_engine.engine_core.shutdown()
    return {"tokens": tokens, "error": error, "planted": planted, "below": below, "stderr": written.getvalue()}


def _below_the_best(llm: Any, prompt: list[int], tokens: list[int]) -> list[float]:
    """How far the log probability of each token is below that of the one which the model would choose behind those
    before it.  It is asked anew: with log probabilities of a prompt vLLM reads no prefix from its cache."""
    from vllm import SamplingParams

    asked = SamplingParams(max_tokens=1, prompt_logprobs=1, detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": [*prompt, *tokens]}], asked)
    found = [one for one in output.prompt_logprobs or () if one][-len(tokens) :]
    best = [max(known.logprob for known in one.values()) for one in found]
    return [b - one[t].logprob for one, b, t in zip(found, best, tokens, strict=True)]


def _ruin_on_the_second_rank(worker: Any) -> None:
    from vllm_ruin import Trap

    worker.trap = Trap(worker.model_runner)
    if worker.rank == 1:
        worker.trap.arm(of="0", place=1, decoding=["0"], ended=[], steps=5)


def _planted(worker: Any) -> bool:
    return bool(worker.trap.planted)


def _flip_all_pages(worker: Any) -> None:
    cache = worker.model_runner.compilation_config.static_forward_context[LAYER].kv_cache
    pages, heads, size, width = cache.shape
    cache.view(pages, heads, size * width)[:, 1, -1:].view(torch.int32).bitwise_xor_(1 << 4)


def connector(directory: pathlib.Path, model: str, compiled: bool = False) -> dict[str, Any]:
    """Prompts whose KV is written to files, layer by layer, and read from there once the prefix cache is empty."""
    pieces: dict[str, Any] = {}
    if compiled:
        forced_compile.allow_vllm_compile()
        pieces = dict(enforce_eager=False, compilation_config={"mode": 3})
    config = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    with tempfile.TemporaryDirectory() as store:
        config["kv_connector_extra_config"] = {"shared_storage_path": store}
        rig = Rig(model, directory, max_num_batched_tokens=512, kv_transfer_config=config, **pieces)
        recorded = []
        for number in range(2):
            for i in range(3):
                rig.add(f"{number} {i}", prompt(i, 96 + i), length=8)
            rig.run()
            rig.engine.reset_prefix_cache()
            recorded.append(rig.session.stats().recorded)
        stored = len(os.listdir(store))
    return {
        "tokens": rig.tokens,
        "stored": stored,
        "adopted": rig.session.stats().adopted,
        "recorded": recorded,
        "violations": [v.line() for v in rig.session.violations()],
        "uncovered": rig.session.uncovered,
    }


def loads(directory: pathlib.Path, model: str, steps: int, fails: int) -> dict[str, Any]:
    """Requests whose prefix a connector loads; then a byte is flipped in what a request wrote, and in what was loaded.

    Args:
        steps: of the connector, as ``fails``.
    """
    from vllm_memory_connector import MemoryConnector

    config = {
        "kv_connector": MemoryConnector.__name__,
        "kv_connector_module_path": MemoryConnector.__module__,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    }
    rig = Rig(model, directory, max_num_batched_tokens=256, kv_transfer_config=config)
    shared = prompt(1, 96)
    prompts = {"short": shared[:32] + prompt(2, 40), **{f"{i}": shared + prompt(3 + i, 5 + i) for i in range(3)}}
    for name in prompts:  # each by itself, from the prefix cache: the right tokens
        rig.add(name, prompts[name], length=12)
        rig.run()
    alone = dict(rig.tokens)
    rig.engine.reset_prefix_cache()
    MemoryConnector.steps, MemoryConnector.fails = steps, fails
    if steps:  # the first block is computed by one request, in the step in which others ask for those behind it
        del MemoryConnector.stored[tuple(shared[:32])]
        rig.add("short", prompts["short"], length=12)
    for i in range(3):
        rig.add(f"{i}", prompts[f"{i}"], length=12)
    rig.run()
    clean = [v.line() for v in rig.session.violations()]
    rig.engine.reset_prefix_cache()
    rig.add("0", prompts["0"], length=12)
    rig.add("1", prompts["1"], length=12)
    layer = list(rig.layers())[1]
    adopted = rig.session.stats().adopted
    flips = {8: ("1", 100), 9: ("0", 40)}
    rig.run(lambda step: _flip(rig, layer, *flips[step]) if step in flips else None)
    told = {(v.check, v.layer, v.position) for v in rig.session.violations()[len(clean) :]}
    return {
        "violations": clean,
        "uncovered": rig.session.uncovered,
        "failed": fails - MemoryConnector.fails,
        "alike": {name: rig.tokens[name] == alone[name] for name in prompts},
        "told": sorted(told),
        "layer": layer,
        "adopted": rig.session.stats().adopted - adopted,
    }


def offloaded(
    directory: pathlib.Path, model: str, fault: str = "", spec: str = "OwnSpec", **extra: Any
) -> dict[str, Any]:
    """Requests whose prefix comes back from the host's memory, as it was stored there; then once more, with a fault.

    Args:
        fault: ``flip``: a bit of what is stored; ``shift``: it comes from the neighbouring chunks.
        spec: of :mod:`vllm_cpu_store`.
    """
    import vllm_cpu_store
    from vllm_cpu_store import CopyingWorker

    config = vllm_cpu_store.config(spec, **extra)
    rig = Rig(model, directory, max_num_batched_tokens=256, kv_transfer_config=config)
    shared = prompt(1, 96)
    prompts = {f"{i}": shared + prompt(3 + i, 25 + i) for i in range(3)}
    for name in prompts:
        rig.add(name, prompts[name], length=12)
        rig.run()
    alone = dict(rig.tokens)
    for _ in range(2):
        rig.engine.reset_prefix_cache()
        for name in prompts:
            rig.add(name, prompts[name], length=12)
        rig.run()
    clean, loads, tokens = [v.line() for v in rig.session.violations()], CopyingWorker.loads, dict(rig.tokens)
    stats = rig.session.stats()
    rig.engine.reset_prefix_cache()
    if fault == "flip":
        cache = next(iter(rig.layers().values())).kv_cache
        last = (cache.shape[2] - 1) * cache.element_size()  # of the last token, which is in each layer's window
        CopyingWorker.ruin = lambda chunk: chunk[-1, last : last + 1].bitwise_xor_(1 << 4)
    CopyingWorker.shifted = int(fault == "shift")
    rig.add("again", prompts["0"], length=4)
    rig.run()
    told = rig.session.violations()[len(clean) :]
    return {
        "alike": {name: tokens[name] == alone[name] for name in prompts},
        "stored": CopyingWorker.stores,
        "loaded": loads,
        "adopted": stats.adopted,
        "violations": clean,
        "uncovered": rig.session.uncovered,
        "told": [(v.check, v.phase, v.layer, v.half, v.position, v.slot) for v in told],
        "said": [str(v) for v in told],
    }


def ruined_store(directory: pathlib.Path, model: str) -> dict[str, Any]:
    """What is off-loaded is damaged in the host's memory, before a request loads it; also without the canary."""
    import vllm_cpu_store
    import vllm_filled  # noqa: F401  whose load format the engine is asked for
    from vllm_cpu_store import CopyingWorker

    rig = Rig(model, directory, load_format="filled", kv_transfer_config=vllm_cpu_store.config())
    asked, dtype = prompt(1, 100), next(iter(rig.layers().values())).kv_cache.dtype
    for name in ("clean", "damaged", "later"):
        if name == "damaged":
            CopyingWorker.ruin = lambda chunk: chunk.view(dtype).mul_(-1e5)
        before = CopyingWorker.loads
        rig.add(name, asked, length=12)
        rig.run()
        rig.engine.reset_prefix_cache()
    return {"tokens": rig.tokens, "preempted": rig.preempted, "loaded_later": CopyingWorker.loads - before}


def off_loaded_on_two_ranks(directory: pathlib.Path, model: str) -> dict[str, Any]:
    """A prompt comes back from the host's memory of two ranks, then once more, changed in the second one's."""
    import vllm_cpu_store
    from vllm import LLM, SamplingParams

    _find_here()
    with _standard_error() as written:
        ranks = dict(tensor_parallel_size=2, kv_transfer_config=vllm_cpu_store.config())
        llm = LLM(**tiny_vllm.engine_arguments(model, directory, **ranks))
        wanted = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
        tokens, loads = [], []
        for turn in range(3):
            if turn == 2:
                llm.collective_rpc(_flip_in_the_second_ranks_store)
            (output,) = llm.generate([{"prompt_token_ids": prompt(1, 100)}], wanted)
            tokens.append(list(output.outputs[0].token_ids))
            loads.append(llm.collective_rpc(_blocks_loaded))
            llm.reset_prefix_cache()
        llm.llm_engine.engine_core.shutdown()
    before, _, after = written.getvalue().partition(CHANGED)
    lines = [[line for line in each.splitlines() if "kvcanary.violation" in line] for each in (before, after)]
    return {"tokens": tokens, "loads": loads, "before": lines[0], "after": lines[1]}


#: Written by :func:`_flip_in_the_second_ranks_store`.
CHANGED = "the store is changed"


def _flip_in_the_second_ranks_store(worker: Any) -> None:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    if worker.rank == 1:
        get_kv_transfer_group().connector_worker.worker.host[0][..., 0].bitwise_xor_(1 << 4)
        print(CHANGED, file=sys.stderr, flush=True)


def _blocks_loaded(_worker: Any) -> int:
    from vllm_cpu_store import CopyingWorker

    return CopyingWorker.loads


def _flip(rig: Rig, layer: str, request: str, position: int) -> None:
    """A bit of K, wherever this machine's attention keeps it."""
    (group,) = rig.guard.groups
    page, offset = rig.pages(request)[0][position // group.page_size], position % group.page_size
    word = group.layers[layer][0][page, offset][0, 3:4] if torch.cuda.is_available() else None
    if word is None:
        rig.flip(layer, 0, request, position)
    else:
        word.view(torch.int32).bitwise_xor_(1 << 4)


def input_in_pieces(directory: pathlib.Path, model: str) -> dict[str, Any]:
    """Requests whose input comes in pieces (vLLM's streaming input), beside others with their prefixes; in the end a
    bit is flipped in what one of them wrote before its last piece."""
    import vllm_filled  # noqa: F401  whose load format the engine is asked for

    rig = Rig(model, directory, load_format="filled", num_gpu_blocks_override=40)
    rng = random.Random(3)
    ids = {f"s{i}": _piece(rig, f"s{i}", None, prompt(i, 40 + i), 5) for i in range(3)}
    tokens: dict[str, list[int]] = {}

    def run(steps: int) -> None:
        for _ in range(steps):
            for output in rig.engine.step():
                tokens.setdefault(output.request_id, []).extend(output.outputs[0].token_ids)

    run(12)
    for turn in range(4):
        for i, name in enumerate(ids):
            _piece(rig, ids[name], name, prompt(100 + 10 * turn + i, rng.choice([1, 7, 40])), rng.choice([1, 4, 9]))
            if rng.random() < 0.5:
                rig.add(f"{turn}{i}", prompt(i, 40 + i)[:36] + prompt(50 + turn, 9), length=6)
            if rng.random() < 0.3:  # while the one before is running
                _piece(rig, ids[name], name, prompt(300 + 10 * turn + i, 3), 3)
            run(rng.choice([1, 3, 25]))
    run(40)
    found: dict[str, Any] = {
        "tokens": {name: list(got) for name, got in tokens.items()},
        "left": len(rig.scheduler.requests),
    }
    if rig.guard is not None:
        found |= {"violations": [v.line() for v in rig.session.violations()], "uncovered": rig.session.uncovered}
        rig.flip(LAYER, 0, "s0", 35)
        _piece(rig, ids["s0"], "s0", prompt(900, 5), 4)
        run(12)
        found["told"] = sorted({(v.check, v.layer, v.position) for v in rig.session.violations()})
    return found


def _piece(rig: Rig, request: str, known_as: str | None, tokens: list[int], length: int) -> str:
    """Send one piece of a request's input; the id that vLLM knows it by.

    Args:
        known_as: what its client calls it; None: it is the first piece.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine, kind = rig.engine, RequestOutputKind.DELTA
    wanted = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False, output_kind=kind)
    tasks = engine.get_supported_tasks()
    given = {"prompt_token_ids": tokens}
    piece = engine.input_processor.process_inputs(request, given, wanted, supported_tasks=tasks, resumable=True)
    if known_as is None:
        engine.input_processor.assign_request_id(piece)
    else:
        piece.external_req_id = known_as
    engine.output_processor.add_request(piece, None, None, 0)
    engine.engine_core.add_request(copy.deepcopy(piece))  # both sides append to its tokens; else a process is between
    return str(piece.request_id)


def stored_damage(directory: pathlib.Path, model: str) -> dict[str, Any]:
    """A connector has stored a block that is damaged: the request that has read it begins again."""
    import vllm_filled  # noqa: F401  whose load format the engine is asked for
    from vllm_memory_connector import MemoryConnector

    name = MemoryConnector.__name__
    config = {"kv_connector": name, "kv_connector_module_path": MemoryConnector.__module__, "kv_role": "kv_both"}
    rig = Rig(model, directory, load_format="filled", kv_transfer_config=config)
    asked = prompt(1, 100)
    rig.add("clean", asked, length=12)
    rig.run()
    rig.engine.reset_prefix_cache()
    for layers in MemoryConnector.stored.values():
        for stored in layers.values():
            stored.mul_(-1e5)

    def ruin(step: int) -> None:
        if step == 6:
            caches = [layer.kv_cache for layer in rig.layers().values()]
            for cache in caches:
                cache[rig.pages("A")[0][1]].mul_(-1e5)

    stored, MemoryConnector.stored = MemoryConnector.stored, {}  # it computes its prompt
    rig.add("A", asked, length=12)
    rig.run(lambda step: (setattr(MemoryConnector, "stored", stored) if step == 4 else None, ruin(step))[1])
    found = [v.line() for v in rig.session.violations()]
    return {"tokens": rig.tokens, "preempted": rig.preempted, "found": len(found), "stored": len(stored)}


def hybrid(directory: pathlib.Path, model: str) -> dict[str, Any]:
    """A model of convolutions, whose states have blocks, too, and attention."""
    import vllm_v2_flips
    import vllm_v2_models

    rig = Rig("hybrid", directory, **vllm_v2_models.ARGUMENTS["hybrid"])
    mixed_load(rig)
    clean = [v.line() for v in rig.session.violations()]
    return {
        "halves": {group.name: 2 * len(group.layers) for group in rig.guard.groups},
        "violations": clean,
        "uncovered": rig.session.uncovered,
        "flips": [row["ok"] for row in vllm_v2_flips.flips(rig, length=8).values()],
    }


def states(directory: pathlib.Path, model: str) -> dict[str, Any]:
    """A hybrid without a prefix cache, and a flip in the first state of a request that decodes."""
    rig = Rig(model, directory, block_size=None, enable_prefix_caching=False)
    mixed_load(rig)
    clean = [v.line() for session in rig.guard.sessions for v in session.violations()]
    (layer, module), *_ = ((n, m) for n, m in rig.layers().items() if not isinstance(m.kv_cache, torch.Tensor))
    told, error = [], None
    for number in range(4):
        rig.add(f"{number}", prompt(50 + number, 20), length=8)

        def at(step: int, number: int = number) -> None:
            if step == 3:
                block = rig.pages(f"{number}")[rig.group_of(layer)][0]
                module.kv_cache[0][block].view(torch.int32)[0, 0] ^= 1 << 4

        try:
            rig.run(at)
        except Exception as e:
            error = type(e).__name__
            break
    for v in rig.guard.states.session.violations():
        told.append([v.check, v.layer, str(v.request).rpartition("-")[0]])
    return {
        "violations": clean,
        "told": told,
        "layer": layer,
        "error": error,
        "every": rig.session.stats().compared_every,
    }


def _counts() -> dict[str, Any]:
    if "KVCANARY_MODE" not in os.environ:
        return {}
    from kvcanary_fx.adapters.vllm import counts

    found, violations = counts.read_all()
    return {"counts": dict(found), "violations": dict(violations)}


def split_graph(directory: pathlib.Path, model: str) -> dict[str, Any]:
    """The pieces into which vLLM splits a graph: name, and the ops of those that are not compiled (None: compiled).

    And the forwards that ran, and how often it was told that a layer writes.
    """
    from vllm.compilation import backends

    from kvcanary_fx.passes.write_ops import op_name

    pieces: list[tuple[str, list[str] | None]] = []
    split = backends.split_graph

    def kept(*args: Any) -> Any:
        split_gm, items = split(*args)
        for item in items:
            ops = [op_name(n) for n in item.graph.graph.nodes if n.op.startswith("call_")]
            pieces.append((item.submod_name, ops if item.is_splitting_graph else None))
        return split_gm, items

    backends.split_graph = kept
    # vLLM compiles while it makes the engine
    rig = Rig(model, directory, enforce_eager=False, compilation_config={"mode": 3})
    told: list[int] = []
    if rig.guard is None:
        rig.close()
        return {"pieces": pieces}
    from kvcanary_fx.adapters.vllm import ops

    before = rig.session.stats().forwards
    rig.add("A", prompt(50, 40), length=4)
    with ops.telling_writes(lambda: told.append(1)):
        rig.run()
    forwards = rig.session.stats().forwards - before
    rig.close()
    return {"pieces": pieces, "forwards": forwards, "told": len(told)}


@contextlib.contextmanager
def _standard_error() -> Any:
    """What this process and its children write to standard error and standard output."""
    written = io.StringIO()
    kept = [os.dup(number) for number in (1, 2)]
    with tempfile.TemporaryFile("w+") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
        try:
            yield written
        finally:
            for number, old in zip((1, 2), kept, strict=True):
                os.dup2(old, number)
            file.seek(0)
            written.write(file.read())


SCENES = {
    "abort": abort,
    **vllm_drafts.SCENES,
    **vllm_embeddings.SCENES,
    **vllm_images.SCENES,
    **vllm_lora.SCENES,
    **vllm_sounds.SCENES,
    "spawned": spawned,
    "spawned flip": spawned_flip,
    "spawned on two ranks": functools.partial(spawned, tensor_parallel_size=2),
    "input in pieces": input_in_pieces,
    "stored damage": stored_damage,
    "ruined on another rank": ruined_on_another_rank,
    "spawned in two stages": functools.partial(spawned, pipeline_parallel_size=2),
    "connector": connector,
    "connector, compiled": functools.partial(connector, compiled=True),
    "loads that fail": functools.partial(loads, steps=0, fails=1),
    "loads that take steps": functools.partial(loads, steps=2, fails=0),
    "off-loaded": functools.partial(offloaded, fault="flip"),
    "off-loaded in chunks": functools.partial(offloaded, fault="flip", blocks_per_chunk=2),
    "off-loaded, mixed up": functools.partial(offloaded, fault="shift"),
    "ruined store": ruined_store,
    "off-loaded on two ranks": off_loaded_on_two_ranks,
    "off-loaded elsewhere": functools.partial(offloaded, spec="SharedSpec"),
    "hybrid": hybrid,
    "states": states,
    "split graph": split_graph,
}
