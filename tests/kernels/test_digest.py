"""The digest: its definition pinned, and what it promises."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scenes import random_scene

from kvcanary_fx.kernels.content import cpu, digest
from kvcanary_fx.kernels.content import naive as reference
from kvcanary_fx.kernels.slots.chain import MASK64, mix, mix_tensor
from kvcanary_fx.kernels.writes.layout import SlotLayout

rows = st.binary(min_size=1, max_size=70)
words32 = st.integers(0, 2**32 - 1)


def test_definition_is_pinned():
    assert digest.digest_reference(b"", 1, 2) == (1, 2)
    assert digest.digest_reference(bytes(range(16)), 0, 0) == (0x0D0EA6CB, 0x70803D83)
    assert [digest.coefficient(i, 0) for i in range(2)] == [0x514E28B7, 0x85F0B427]
    assert digest.seeds(3, 1) == (0xF98C575D, 0x54576A30)


def test_coefficients_are_odd_and_fixed_by_their_place():
    short, long = (digest.coefficients(n, torch.device("cpu")) for n in (3, 9))
    assert (long % 2 != 0).all()
    assert torch.equal(short, long[:, :3])


@given(rows, st.data(), words32)
def test_every_single_bit_flip_changes_h1(row, data, seed):
    bit = data.draw(st.integers(0, 8 * len(row) - 1))
    flipped = bytearray(row)
    flipped[bit // 8] ^= 1 << (bit % 8)
    assert digest.digest_reference(row, seed, seed)[0] != digest.digest_reference(bytes(flipped), seed, seed)[0]


@given(rows, st.data(), words32)
def test_every_change_inside_one_word_changes_h1(row, data, seed):
    word = data.draw(st.integers(0, (len(row) - 1) // 4))
    inside = row[4 * word : 4 * word + 4]
    other = data.draw(st.binary(min_size=len(inside), max_size=len(inside)).filter(lambda b: b != inside))
    changed = row[: 4 * word] + other + row[4 * word + 4 :]
    assert digest.digest_reference(row, seed, seed)[0] != digest.digest_reference(changed, seed, seed)[0]


#: Changes of two words at once, in values of the kinds that caches hold.
STRUCTURED = {
    "two signs flipped": lambda row, i, j: flip(row, i, j, 1 << 31),
    "two exponent bits flipped": lambda row, i, j: flip(row, i, j, 1 << 30),
    "two mantissa bits flipped": lambda row, i, j: flip(row, i, j, 1 << 22),
    "four signs of bf16 flipped": lambda row, i, j: flip(row, i, j, (1 << 31) | (1 << 15)),
    "two words lost": lambda row, i, j: put(row, {i: 0, j: 0}),
    "two words swapped": lambda row, i, j: put(row, {i: row[j], j: row[i]}),
    "all signs flipped": lambda row, i, j: [w ^ (1 << 31) for w in row],
}


def flip(row: list[int], i: int, j: int, bits: int) -> list[int]:
    return put(row, {i: row[i] ^ bits, j: row[j] ^ bits})


def put(row: list[int], words: dict[int, int]) -> list[int]:
    return [words.get(i, w) for i, w in enumerate(row)]


@pytest.mark.parametrize("change", STRUCTURED)
@pytest.mark.parametrize("values", ["normal", "small integers", "bf16"])
def test_no_structured_change_of_several_words_is_missed(change, values):
    rng = torch.Generator().manual_seed(0)
    drawn = torch.randn(400, 64, generator=rng)
    if values == "small integers":
        drawn = (4 * drawn).round()
    if values == "bf16":
        drawn = torch.randn(400, 128, generator=rng).to(torch.bfloat16)
    rows = (drawn.view(torch.int32).to(torch.int64) & digest.MASK32).tolist()
    missed = 0
    for number, row in enumerate(rows):
        changed = STRUCTURED[change](row, number % 64, (number * 7 + 1 + number // 64) % 64)
        was, now = (digest.digest_reference(b"".join(w.to_bytes(4, "little") for w in r), 1, 2) for r in (row, changed))
        missed += changed != row and was[0] == now[0]
    assert missed == 0


def test_a_row_moved_to_another_half_or_layer_is_another_digest():
    row = bytes(range(32))
    digests = {digest.digest_reference(row, *digest.seeds(layer, half)) for layer in range(64) for half in range(2)}
    assert len(digests) == 128


def test_zero_is_never_stored():
    assert digest.stored_form(0) == digest.ZERO_STANDS_FOR
    assert digest.stored_form(5) == 5


@settings(max_examples=60)
@given(st.integers(0, 10**9))
def test_cpu_digest_equals_the_definition(seed):
    scene = random_scene(seed)
    slots = torch.arange(scene.site.layout.slots)
    got = cpu.digest_slots(scene.site, scene.view, slots).T.tolist()
    assert got == [
        reference.digest_of(scene.site, reference.row_bytes(scene.site, scene.view, s)) for s in range(len(got))
    ]


LAYOUTS = [
    SlotLayout((12, 3), (0,), torch.float16),
    SlotLayout((2, 3, 20, 5), (0, 2), torch.bfloat16),
    SlotLayout((1, 3, 20, 4), (0, 2), torch.float32),
    SlotLayout((4, 4, 2, 3), (0, 1), torch.float32, paged=True),
]


@given(st.sampled_from(LAYOUTS), st.sets(st.integers(0, 11), max_size=12), st.booleans(), st.integers(1, 200))
@settings(deadline=None)
def test_slots_in_order_have_the_digests_that_they_have_in_any(layout, chosen, run, chunk_words):
    """Those that follow one another are copied, and others selected."""
    view = torch.randn(layout.shape).to(layout.dtype)
    if run and chosen:
        chosen = range(min(chosen), max(chosen) + 1)
    slots = torch.tensor(sorted(chosen), dtype=torch.int64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "CHUNK_WORDS", chunk_words)
        found = cpu.digest_rows(layout, view, slots, (3, 4), 2, ascending=True)
    one_by_one = [cpu.digest_rows(layout, view, slots[i : i + 1], (3, 4), 2) for i in range(len(slots))]
    assert torch.equal(found, torch.cat(one_by_one, 1) if one_by_one else found[:, :0])


@given(st.lists(st.tuples(st.integers(-1, 2**31 - 1), st.integers(-8, 2**31 - 1)), min_size=1, max_size=8))
def test_chain_mix_of_tensors_equals_the_definition(pairs):
    tokens, positions = torch.tensor(pairs).T
    assert [m & MASK64 for m in mix_tensor(tokens, positions).tolist()] == [mix(t, p) for t, p in pairs]
