"""Makes Triton's interpreter quick enough to test with: what it computes anew for each operation is kept.

By profiles of tests that launch kernels.  Nothing here changes what a kernel computes.
"""

from __future__ import annotations

import functools
import math

from triton import language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def install() -> None:
    """For the rest of this process."""
    _patch_the_language_once()
    _name_types_once()
    _make_types_once()
    _broadcast_only_what_differs()


def _patch_the_language_once() -> None:
    """At each call of a function in a kernel it searches triton.language for what to replace, half of its time.  What
    was replaced once stays."""

    @functools.cache
    def patch_once(fn, patch=interpreter._patch_lang):
        patch(fn)
        # Triton 3.6 calls int() on an array of one number, which NumPy 2.4 refuses.
        interpreter.tl.tensor.__index__ = lambda self: self.handle.data.item()
        return interpreter._LangPatchScope()  # with nothing to put back

    interpreter._patch_lang = patch_once


def _name_types_once() -> None:
    """It makes a table of NumPy's types for each look at it."""
    known = {}

    def numpy_type(dtype, look_up=interpreter._get_np_dtype):
        name = dtype.scalar.name
        if name not in known:
            known[name] = look_up(dtype)
        return known[name]

    interpreter._get_np_dtype = numpy_type


def _make_types_once() -> None:
    """A type of a block, and what a tensor knows by its type, took a third of the time."""
    made, checked_init = {}, tl.block_type.__init__
    equal, equal_of_blocks = tl.dtype.__eq__, tl.block_type.__eq__

    def new(cls, element_ty, shape):
        # the element's type is kept by what was made with it, so that its address names it
        key = cls, id(element_ty), tuple([s.value if isinstance(s, tl.constexpr) else s for s in shape])
        found = made.get(key)
        if found is None:
            found = object.__new__(cls)
            checked_init(found, element_ty, shape)  # what it refuses is not kept
            made[key] = found
        return found

    def init(self, handle, type):
        parts = type.__dict__.get("_of_a_tensor")
        if parts is None:
            shape = type.shape if type.is_block() else ()
            parts = tl.constexpr(math.prod(shape)), type.scalar, tl.tuple([tl.constexpr(s) for s in shape])
            type._of_a_tensor = parts
        self.handle, self.type = handle, type
        self.numel, self.dtype, self.shape = parts

    tl.block_type.__new__ = new
    tl.block_type.__init__ = lambda self, element_ty, shape: None
    tl.dtype.__eq__ = lambda self, other: self is other or equal(self, other)
    tl.block_type.__eq__ = lambda self, other: self is other or equal_of_blocks(self, other)
    tl.tensor.__init__ = init


def _broadcast_only_what_differs() -> None:
    """Operands of one shape are as they have to be."""
    broadcast = TritonSemantic.broadcast_impl_value

    def broadcast_impl_value(self, lhs, rhs):
        left, right = lhs.type, rhs.type
        if left is right or not (left.is_block() or right.is_block()):
            return lhs, rhs
        if left.is_block() and right.is_block() and left.shape.values == right.shape.values:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    TritonSemantic.broadcast_impl_value = broadcast_impl_value
