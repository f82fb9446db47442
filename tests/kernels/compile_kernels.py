"""Compile every Triton kernel for an H200, on a machine without one: the interpreter is Python, and takes what is no
Triton (a name that changes its type within a branch, for one).

    PYTHONPATH=tests/runtime:tests/bugs python tests/kernels/compile_kernels.py [--first-whole]

The host code runs over CPU tensors, as it would over a GPU's, and each launch is compiled and left at that.  With
--first-whole only the first variant of each kernel becomes machine code; of the others Triton checks the source and
makes its first representation, where what is no Triton is found, in a third of the time.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from array import array
from typing import Any

import random_events
import random_plans
import test_held
import test_opaque_attention
import test_state_checks
import torch
import toys
import triton
from gpu_on_cpu import use_gpu_kernels
from no_device import NoDevice
from scenes import play, random_scene, random_step
from test_rejected import random_batch
from test_take_in import random_inputs
from test_write import Layer, random_write
from toy import Toy
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from kvcanary_fx.engine.parked import ParkedShadows
from kvcanary_fx.kernels.bound_launch import BoundLaunch
from kvcanary_fx.kernels.checks import Phase
from kvcanary_fx.kernels.content import gpu
from kvcanary_fx.kernels.handed import BLOCK, Handed, Places
from kvcanary_fx.kernels.slots import gpu as gpu_requests
from kvcanary_fx.kernels.slots import gpu_life
from kvcanary_fx.kernels.triton_handed import scatter_from_kernel

#: Layers' kernels without a slot space: seeds that reach all of them, both digest sizes, and every unit of a row.
SEEDS = (0, 1, 3, 4, 6, 9)


class FirstRepresentation:
    """A hook of Triton's: while ``only``, nothing is done behind its first representation."""

    only = False

    def __call__(self, backend: Any = None, stages: Any = None, *_: Any) -> tuple[str, str] | None:
        if stages is None:  # what Triton keeps its kernels by
            return "first representation", "'first representation'"
        if self.only:
            behind = list(stages)[1:]
            stages.update({name: lambda module, metadata: module for name in behind})
            stages[behind[0]] = lambda module, metadata: metadata.update(name="none", shared=0) or module
        return None


def compile_only(first_whole: bool) -> dict[str, set[str]]:
    """From now on a launch compiles; the variants of each kernel so far."""
    driver.set_active(NoDevice())
    run, seen, hook = JITFunction.run, {}, FirstRepresentation()
    if first_whole:
        triton.knobs.runtime.add_stages_inspection_hook = hook

    def compiled(self: JITFunction, *args: Any, grid: Any, warmup: bool, **settings: Any) -> None:
        variants = seen.setdefault(self.fn.__name__, set())
        hook.only = bool(variants)
        variants.add(run(self, *args, grid=grid, warmup=True, **settings).hash)

    JITFunction.run = compiled
    return seen


def kernels() -> set[str]:
    """The names of all that can be launched."""
    modules = [m for name, m in list(sys.modules.items()) if re.match(r"kvcanary_fx\.(\w+\.)*triton_", name)]
    found = [value for module in modules for value in vars(module).values() if isinstance(value, JITFunction)]
    return {f.fn.__name__ for f in found if f.fn.__name__.endswith("_kernel")}


def layers() -> None:
    """The checks of caches that nobody declared."""
    for seed in SEEDS:
        scene = random_scene(seed)
        for _ in range(2):
            play(gpu, scene, random_step(scene))
    for seed in SEEDS:
        scene, rng = random_scene(seed), random.Random(seed)
        if scene.site.space is None:
            for halves in (1, 2):
                Layer(scene, halves).step(random_write(rng, scene, halves), rng)
        if scene.site.layout.has_rows:  # of more tokens than one launch takes
            gpu.first_positions(scene.site.layout, torch.zeros(1, dtype=torch.int64))
    checks = ("content", "operand", "bounds", "poison")  # chain computes with what kernels would have left
    rig = toys.Rig.build(mode="log", checks=checks, budget="1%")
    rig.step()
    rig.step()


def engine() -> None:
    """The checks of an engine's pools, around opaque attention and around writes that a graph shows."""
    for bits in (32, 64):
        rig = test_opaque_attention.Rig(digest_bits=bits)
        rig.step([3, 4, 5])
        rig.step([6], padding=2)
        torch._dynamo.reset()
    toy = Toy(budget="1%")
    toy.add("A", [5, 6, 7, 8])
    toy.run({"A": [3, 4]})
    own = torch.zeros(5, 8, dtype=torch.int32)
    batch = toy.plan({"A": [5]}, history=own, history_by_row=True)
    with toy.session.step(batch), toy.session.forward():
        toy.session.check_reads(torch.tensor([[3, 4]]), torch.tensor([2]))
        toy.session.check_indices(torch.tensor([3, 4]), 2)
    gpu_requests.slots_of_memory(torch.tensor([3, 4]), 2, 4, torch.zeros(2, dtype=torch.int64))
    for bits in (32, 64):
        pool = Toy(digest_bits=bits, verify_after=True).pool
        whose = torch.tensor([1, 1])
        pool.content.verify(torch.tensor([3, 4]), None, whose, Phase.LIFE, whose)
        pool.content.verify(pool.space.listed, pool.space.listed_count, None, Phase.POST)
        pool.content.verify_listed(in_flight=False)
        pool.content.fingerprint(torch.tensor([3, 4]))
        ParkedShadows(pool, 2).put(["first", "second"], [2, 3])
    for seed in range(4):
        test_held.Scene(seed, hold=True).run()


def spaces() -> None:
    """What only large batches launch, and a plan that comes without memory."""
    random_plans.use_sizes((16, 16, 2, 16, 16, 64))
    rng = random.Random(0)
    for _ in range(8):
        space = random_plans.random_space(rng)
        plan = random_plans.random_plan(rng, space, unique=True)
        for check in (gpu_requests.store, gpu_requests.check_writes, gpu_requests.walk):
            check(space, plan)
        calls = random_events.random_calls(rng, space.slots)  # as many as no replay has room for
        digests = torch.ones(2, 1, space.slots, dtype=torch.int32)
        apply, events = gpu_life.Apply(space, digests), random_events.as_events(calls, 1, "cpu")
        apply(events)
        apply(events, gone=torch.zeros(3, events.slots, dtype=torch.int64))
        apply.renew(events)


def inputs() -> None:
    """What brings a step's inputs to the device."""
    Places(Handed(torch.device("cpu")), [torch.zeros(3, dtype=torch.int64)]).fill(array("q", (1, 2, 3)))
    at = torch.zeros(1, dtype=torch.int64)
    BoundLaunch(scatter_from_kernel, at.device, dict(at_ptr=at, BLOCK=BLOCK), (), 4).first((1, 1, 1), (), None)


def adapters() -> None:
    """What an adapter has of its own."""
    random_inputs(random.Random(0)).launch(4, 8)
    marker, starts, rejected = random_batch(0, 4)
    marker.launch(starts, rejected)
    for bits in (32, 64):
        made = test_state_checks.States(bits)
        made.places(16, *[[1, 1]] * 4)._launch.check(torch.zeros(3, dtype=torch.int64))
        states = made.checks.launches
        for compares in (False, True):
            states.run(0, 2, compares)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first-whole", action="store_true")
    seen = compile_only(parser.parse_args(argv).first_whole)
    use_gpu_kernels(setattr)
    layers()
    engine()
    spaces()
    inputs()
    adapters()
    for name, variants in sorted(seen.items()):
        print(f"{name}: {len(variants)} variants")
    missing = kernels() - set(seen)
    print(f"triton {triton.__version__}; never launched: {sorted(missing) or 'none'}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
