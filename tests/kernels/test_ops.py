"""The ops as PyTorch sees them: schemas, fakes, opcheck, and the context they need."""

from __future__ import annotations

import pytest
import torch
from scenes import random_scene

import kvcanary_fx
from kvcanary_fx.kernels import ops
from kvcanary_fx.kernels.buffers import Gate
from kvcanary_fx.kernels.context import ForwardContext, forward_context, get_forward_context, has_forward_context
from kvcanary_fx.kernels.ops import SCHEMAS
from kvcanary_fx.kernels.writes.plan import Select, Selector, WritePlan


def _context(scene) -> ForwardContext:
    device = scene.view.device
    return ForwardContext(
        sites=(scene.site,),
        plans=(WritePlan((Selector(Select.FLAT, 0),), 0, ahead=True),),
        identities={0: scene.identity},
        controls={device: scene.site.control},
        gates={device: scene.site.gate},
    )


def _arguments(scene) -> dict[str, tuple]:
    device = scene.view.device
    state = torch.zeros(1, dtype=torch.int32, device=device)
    slot = torch.tensor([0], device=device)
    value = torch.zeros(1, *scene.site.layout.row_shape, dtype=scene.site.layout.dtype, device=device)
    return {
        "begin": (state,),
        "join": ([value], state),
        "verify": (scene.view, value, [slot], [], state, 0, 0),
        "record": (scene.view, value, [slot], [], None, state, 0, 0),
        "verify_halves": ([scene.view], [value], [slot], [], state, [0], [0]),
        "record_halves": ([scene.view], [value], [slot], [], None, state, [0], [0]),
        "verify_layers": ([scene.view] * 2, [slot], [], False, state, [0, 0], [0, 0]),
        "record_layers": ([scene.view] * 2, [value] * 2, [slot], [], False, None, state, [0, 0], [0, 0]),
        "observe": (scene.view, state, 0),
        "watch": (scene.view, state, 0),
        "record_changed": (scene.view, state, 0),
        "identify": (slot, None, [slot], [], state, 0, 0),
        "index_put_": (scene.view, value, [slot], [], 0, 0),
    }


@pytest.mark.parametrize("name", SCHEMAS)
def test_opcheck(name, device):
    scene = random_scene(11, dtype=torch.bfloat16).to(device)  # opcheck multiplies, which fp8 cannot
    with forward_context(_context(scene)):
        torch.library.opcheck(getattr(torch.ops.kvcanary, name).default, _arguments(scene)[name])


@pytest.mark.parametrize("name", [n for n in SCHEMAS if n != "index_put_"])
def test_ops_mutate_state_and_only_read_the_pool(name):
    schema = getattr(torch.ops.kvcanary, name).default._schema
    written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    assert written == ["state"]


@pytest.mark.parametrize("name", [n for n in SCHEMAS if n not in ("index_put_", "join")])
def test_every_op_leaves_a_count(name):
    scene = random_scene(11)
    with forward_context(_context(scene)):
        getattr(torch.ops.kvcanary, name)(*_arguments(scene)[name])
    assert int(scene.site.gate[Gate.OPS]) == 1


def test_every_device_has_an_implementation_with_the_same_functions():
    """They are imported by name, and a GPU's only when there is one."""
    for found in (ops.kernels_for, ops.request_kernels_for, ops.pool_kernels_for):
        here, there = (vars(found(torch.device(device))) for device in ("cpu", "cuda"))
        shared = {name for name, value in there.items() if callable(value) and not name.startswith("_")} & here.keys()
        assert shared, found


def test_op_outside_a_forward_names_the_remedy():
    scene = random_scene(11)
    with pytest.raises(kvcanary_fx.MissingContextError, match="no ForwardContext is published in thread 'MainThread'"):
        torch.ops.kvcanary.begin(torch.zeros(1, dtype=torch.int32))
    assert not has_forward_context()
    with forward_context(_context(scene)) as outer:
        inner = _context(random_scene(12))
        with pytest.raises(ValueError), forward_context(inner):
            assert get_forward_context() is inner
            raise ValueError
        assert get_forward_context() is outer


@pytest.mark.parametrize("name", SCHEMAS)
def test_ops_take_any_strides_so_inductor_need_not_copy_their_arguments(name):
    assert torch.Tag.flexible_layout in getattr(torch.ops.kvcanary, name).default.tags
