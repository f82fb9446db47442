"""The model of a program, written as code: tokens in, hidden states out, K and V of every token into a cache.

Straight code, because it is what takes Dynamo's time, and because a failing program then prints as one reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fuzz.containers import ARGUMENT, ATTRIBUTES, attach, attribute_names, expression
from fuzz.layouts import PAGE
from fuzz.program import Program
from fuzz.write_idioms import IDIOMS, At

VOCAB = 12

#: What happens in a graph break, once: filled by the run.
STRAY: list[Callable[[], None]] = []


@torch.compiler.disable
def broken() -> None:
    """Break the graph."""
    while STRAY:
        STRAY.pop()()


def _part(tensor: str, axis: int, at: int | str, of: int, access: str) -> str:
    """Code for one part along an axis."""
    if access == "unbind":
        return f"{tensor}.unbind({axis})[{at}]"
    if access == "select":
        return f"{tensor}.select({axis}, {at})"
    if access == "narrow":
        return f"{tensor}.narrow({axis}, {at}, 1).squeeze({axis})"
    if access == "chunk":
        return f"{tensor}.chunk({of}, {axis})[{at}].squeeze({axis})"
    return f"{tensor}[{':, ' * axis}{at}]"


def _joint(tensor: str, half: int, size: int, access: str) -> str:
    if access == "chunk":
        return f"{tensor}.chunk(2, -1)[{half}]"
    if access == "narrow":
        return f"{tensor}.narrow(-1, {half * size}, {size})"
    if access == "unbind":
        return f"{tensor}.split({size}, -1)[{half}]"
    return f"{tensor}[..., {half * size}:{half * size + size}]"


def half_code(program: Program, tensors: Sequence[str], layer: int | str, half: int) -> str:
    """Code for the view of one half of a layer."""
    packing, access, n = program.layout.packing, program.access, program.sizes.layers
    if packing == "pair":
        return tensors[half]
    if packing == "joint":
        heads = program.sizes.heads if program.layout.family in ("bsf", "flatf") else 1
        return _joint(tensors[0], half, program.sizes.dim * heads, access)
    if packing == "layers":
        return _part(tensors[half], 0, layer, n, access)
    if packing in ("kv0", "kv1"):
        return _part(tensors[0], int(packing == "kv1"), half, 2, access)
    if packing == "layers_kv":
        if access == "index":
            return f"{tensors[0]}[{layer}, {half}]"
        return _part(_part(tensors[0], 0, layer, n, access), 0, half, 2, access)
    if access == "index":
        return f"{tensors[0]}[{half}, {layer}]"
    return _part(_part(tensors[0], 0, half, 2, access), 0, layer, n, access)


def _layer_code(program: Program, weight: str, tensors: Sequence[str], layer: int | str) -> list[str]:
    """The lines of one layer, from ``x`` to ``x``."""
    way, of, low = program.way, program.layout.of, program.dtype != "float32"
    cast = f".to(torch.{program.dtype})" if low else ""
    k, v = (of.place.format(new) + cast for new in "kv")
    stop = {place: ["broken()"] if program.breaks == place else [] for place in ("before", "between", "after")}
    if program.layout.latent:
        lines = [f"q, k, v = (x * {weight}).unbind(0)", f"v = v[..., :{program.sizes.dim // 2}]"]
    else:
        lines = [f"q, k, v = (x * {weight}).unbind(0)"]
    halves = [half_code(program, tensors, layer, half) for half in range(2)]
    if way.unit == "both":
        write = [f"{program.idiom}({tensors[0]}, {k}, {v}, at)"]
    elif way.unit == "pair":
        write = [f"{program.idiom}({halves[0]}, {halves[1]}, {k}, {v}, at)"]
    else:
        write = [f"{program.idiom}({halves[0]}, {k}, at)", *stop["between"], f"{program.idiom}({halves[1]}, {v}, at)"]
    if way.unit == "new":
        write = [f"kc = {program.idiom}({halves[0]}, {k}, at)", *stop["between"]]
        write.append(f"vc = {program.idiom}({halves[1]}, {v}, at)")
        halves = ["kc", "vc"]
    back = ".to(x.dtype)" if low else ""
    gathered = "[table].transpose(1, 2)" if of.pool else ""
    read = [f"{name} = {of.read.format(half)}{gathered}{back}" for name, half in zip("kv", halves, strict=True)]
    if program.layout.latent:
        attend = ["y = F.scaled_dot_product_attention(torch.cat((q, q[..., :2]), -1), torch.cat((k, v), -1), k, mask)"]
    else:
        attend = ["y = F.scaled_dot_product_attention(q, k, v, mask)"]
    return [*lines, *stop["before"], *write, *stop["after"], *read, *attend, "x = x + torch.tanh(y)"]


def code(program: Program) -> str:
    """The text of the model's ``forward``, and of its layers' where they are modules."""
    of, count = program.layout.of, 2 if program.layout.packing in ("pair", "layers") else 1
    argument = ARGUMENT[program.names % len(ARGUMENT)]
    owned = program.container in ATTRIBUTES
    new = "at = At(index, start, {}, {}, {})".format(
        program.tokens if not of.pool else "index.shape[0]", of.axis, -1 if of.batch is None else of.batch
    )
    new = new.replace(f"start, {program.tokens},", "start, positions.shape[1],")
    embed = "(self.embed[tokens] + self.places[positions]).transpose(1, 2)" if program.shows_ids else "tokens"
    returns = program.way.unit == "new"
    lines = [new, f"x = {embed}", *["kept = []"] * returns]
    for layer in range(program.sizes.layers):
        if layer and program.breaks == "layers":
            lines.append("broken()")
        tensors = [expression(program.container, program.names, layer, n, count) for n in range(count)]
        if program.one_tensor:
            tensors = [expression(program.container, program.names, 0, n, count) for n in range(count)]
        if owned:
            owner = "self" if program.one_tensor else f"self.layers[{layer}]"
            tensors = [f"{owner}.{t}" for t in tensors]
        if program.loop:
            lines += _layer_code(program, f"self.layers[{layer}].weight", tensors, layer)
        else:
            given = [] if owned and not program.one_tensor else tensors
            got = "x, kc, vc" if returns else "x"
            lines.append(f"{got} = self.layers[{layer}]({', '.join(['x', 'at', 'table', 'mask', *given])})")
        lines += ["kept.append([kc, vc])"] * returns
    takes = f"self, tokens, positions, index, start, table, mask, {argument}=None"
    text = _function("forward", takes, lines, "x, kept" if returns else "x")
    if program.loop:
        return text
    given = list(attribute_names(count, program.names))
    if owned and not program.one_tensor:
        tensors = ["self." + expression(program.container, program.names, 0, n, count) for n in range(count)]
        given = []
    else:
        tensors = given
    body = _layer_code(program, "self.weight", tensors, "self.number")
    takes = ", ".join(["self", "x", "at", "table", "mask", *given])
    return _function("layer", takes, body, "x, kc, vc" if returns else "x") + text


def _function(name: str, arguments: str, lines: Sequence[str], result: str) -> str:
    return "".join([f"def {name}({arguments}):\n", *(f"    {line}\n" for line in lines), f"    return {result}\n\n"])


def build(program: Program, tensors: Sequence[Sequence[torch.Tensor]]) -> Any:
    """The model of a program, over its own caches if they are attributes."""
    known: dict[str, Any] = {"torch": torch, "F": F, "At": At, "PAGE": PAGE, "HEADS": program.sizes.heads}
    known |= {"broken": broken, program.idiom: IDIOMS[program.idiom].write}
    exec(compile(code(program), f"<program {program.seed}>", "exec"), known)
    layer = type("Layer", (nn.Module,), {"forward": known.get("layer")})
    random, z = torch.Generator().manual_seed(program.seed), program.sizes
    model = type("Model", (nn.Module,), {"forward": known["forward"]})()
    model.embed = _fixed(torch.randn(VOCAB, z.heads, z.dim, generator=random))
    model.places = _fixed(torch.randn(z.length, z.heads, z.dim, generator=random) * 0.3)
    model.layers = nn.ModuleList()
    for number in range(z.layers):
        model.layers.append(layer())
        model.layers[number].number = number
        model.layers[number].weight = _fixed(torch.randn(3, 1, z.heads, 1, z.dim, generator=random))
    adopt(program, model, tensors)
    return model.eval()


def _fixed(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def adopt(program: Program, model: Any, tensors: Sequence[Sequence[torch.Tensor]]) -> None:
    """Make these tensors the model's cache, where it is an attribute."""
    if program.container not in ATTRIBUTES:
        return
    owners = [model] if program.one_tensor else model.layers
    called = attribute_names(len(tensors[0]), program.names)
    for owner, mine in zip(owners, tensors, strict=True):
        attach(owner, mine, program.container, called)
