"""Four threads run protected models while four others compile: is every forward guarded, or said not to be?

``PYTHONPATH=. python tests/runtime/eight_threads.py --seconds 600`` is the long run; the suite has a short one.
"""

from __future__ import annotations

import argparse
import dataclasses
import threading
import time
import types
from collections.abc import Callable

import torch
from toys import Rig, new_caches

RUNNERS = COMPILERS = 4
SLOTS = 24


@dataclasses.dataclass
class Forwards:
    """What became of the forwards of one thread, or of several.

    Attributes:
        silent: forwards that were neither guarded nor reported.
        compiled: what threads that run no model compiled in the meantime.
        errors: what was raised, each text once.
    """

    guarded: int = 0
    reported: int = 0
    silent: int = 0
    compiled: int = 0
    errors: set[str] = dataclasses.field(default_factory=set)

    def __add__(self, other: Forwards) -> Forwards:
        counts = [getattr(self, f) + getattr(other, f) for f in ("guarded", "reported", "silent", "compiled")]
        return Forwards(*counts, self.errors | other.errors)

    @property
    def share(self) -> float:
        """The guarded share of all forwards."""
        return self.guarded / max(1, self.guarded + self.reported + self.silent)


def run_model(rig: Rig, until: float, seen: Forwards) -> None:
    """Prompts of one to three tokens and then single ones, in one cache after the other."""
    session = rig.session
    while time.monotonic() < until:
        before = session.entered.guarded
        try:
            rig.step(1 + rig.length % 3 if rig.length < 6 else 1)
        except Exception as e:
            seen.errors.add(f"{type(e).__name__}: {e}")
            seen.reported += 1
            start_over(rig)
            continue
        if session.entered.guarded > before:
            seen.guarded += 1
        elif session.uncovered:
            seen.reported += 1
        else:
            seen.silent += 1
        if rig.length + 3 > SLOTS:
            start_over(rig)


def start_over(rig: Rig) -> None:
    """A new cache."""
    rig.caches, rig.length = new_caches(), 0


def some_function(x: torch.Tensor) -> torch.Tensor:
    for _ in range(20):
        x = torch.sin(x) @ x
    return x


def another(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A function that Dynamo has not seen, which does the same."""
    return types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)


def compile_others(number: int, until: float, seen: Forwards) -> None:
    """Compile one function after the other; one thread compiles models that are guarded as well.

    None exports: torch.export beside Dynamo in another thread fails within torch.
    """
    x = torch.randn(4, 4)
    while time.monotonic() < until:
        try:
            if number == 0:
                Rig.protected_model(mode="log").step(2)
            else:
                torch.compile(another(some_function), backend=("eager", "aot_eager")[number % 2])(x)
        except Exception as e:
            seen.errors.add(f"compiling ({number}): {type(e).__name__}: {e}")
        seen.compiled += 1


def run(seconds: float) -> Forwards:
    """All eight threads for so long; two threads each share a model, with caches of their own."""
    rigs = [Rig.protected_model(mode="log") for _ in range(RUNNERS // 2)]
    rigs += [dataclasses.replace(rig, caches=new_caches()) for rig in rigs]
    for rig in rigs:
        for tokens in (1, 2, 3):
            rig.step(tokens)
    until = time.monotonic() + seconds
    seen = [Forwards() for _ in range(RUNNERS + COMPILERS)]
    threads = [
        *[threading.Thread(target=run_model, args=(rig, until, seen[i])) for i, rig in enumerate(rigs)],
        *[threading.Thread(target=compile_others, args=(i, until, seen[RUNNERS + i])) for i in range(COMPILERS)],
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wrong = {v.explain() for rig in rigs for v in rig.session.violations()}
    told = {why for rig in rigs for why in rig.session.uncovered}
    total = sum(seen, Forwards())
    return dataclasses.replace(total, errors=total.errors | wrong | told)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    result = run(parser.parse_args().seconds)
    print(f"{result.guarded} forwards guarded ({result.share:.2%}), {result.reported} reported, {result.silent} silent")
    print(f"{result.compiled} functions compiled beside them")
    print("\n".join(sorted(result.errors)))


if __name__ == "__main__":
    main()
