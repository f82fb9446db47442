"""Bugs of prefix identity, of drafts and of windows (E, F, G)."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Hashable

import torch
from cases import Outcome, bug
from toy import Toy

from kvcanary_fx import KVPool, ShadowSlice

# ---- E: prefix identity

PROMPT = [20, 21, 22, 23]


class PrefixCache:
    """Finds the slots of PROMPT, all but its last token, by whatever key the engine thinks identifies them."""

    def __init__(self, toy: Toy):
        self.toy = toy
        self.known: dict[Hashable, list[int]] = {}

    def serve(self, name: str, key: Hashable, slots: list[int], namespace: int) -> None:
        """A request takes what the cache has for its key, and computes the rest."""
        hit = self.known.get(key, [])
        self.toy.add(name, PROMPT, prefix=hit)
        self.toy.pool.share(hit, owner=name)
        self.toy.run({name: slots[len(hit) :]}, namespaces=[namespace])
        self.known.setdefault(key, slots[:-1])


@bug("E1", "vllm-project/vllm#44701 / #44706", check="namespace")
def adapter_names_and_salts_in_one_key_space(faulty: bool) -> Outcome:
    """A request with salt X hits the prefix of a request with LoRA X: the key does not say which of them it holds."""
    toy = Toy()
    cache = PrefixCache(toy)
    lora, salt = ("X", "X") if faulty else (("lora", "X"), ("salt", "X"))
    cache.serve("A", lora, [1, 2, 3, 4], namespace=1)
    cache.serve("B", salt, [5, 6, 7, 8], namespace=2)
    return Outcome((toy.session,), slot=1, request="B")


@bug("E4", "LMCache/LMCache#4086", check="namespace")
def image_hash_cut_to_16_bits(faulty: bool) -> Outcome:
    """Two images whose hashes agree in their low 16 bits share a prefix."""
    toy = Toy()
    cache = PrefixCache(toy)
    for name, image, slots in (("A", 0x12345, [1, 2, 3, 4]), ("B", 0x62345, [5, 6, 7, 8])):
        cache.serve(name, image & 0xFFFF if faulty else image, slots, namespace=image)
    return Outcome((toy.session,), slot=1, request="B")


Saved = tuple[ShadowSlice, list[torch.Tensor]]


def save(toy: Toy, slots: list[int]) -> Saved:
    """The bytes of slots and their shadow, for a file."""
    return toy.pool.export(slots), [half[slots].clone() for layer in toy.kv for half in layer]


def load(toy: Toy, saved: Saved, slots: list[int]) -> None:
    """What a file holds into slots."""
    for half, kept in zip((half for layer in toy.kv for half in layer), saved[1], strict=True):
        half[slots] = kept
    toy.pool.import_(saved[0], slots)


@bug("E5", "vllm-project/vllm#54342", check="namespace")
def files_of_kv_named_by_token_ids_alone(faulty: bool) -> Outcome:
    """The file of a prefix is named by the md5 of its token ids; the image behind the placeholders is left out."""
    toy = Toy()
    files: dict[str, Saved] = {}
    for name, image, slots in (("A", b"cat", [1, 2, 3]), ("B", b"dog", [5, 6, 7])):
        path = hashlib.md5(bytes(PROMPT[:3]) + (b"" if faulty else image)).hexdigest()
        request, space = toy.add(name, PROMPT), [zlib.crc32(image)]
        if path in files:
            toy.take(name, slots)
            load(toy, files[path], slots)
            request.stored = len(slots)
        else:
            toy.run({name: slots}, namespaces=space)
            files[path] = save(toy, slots)
        toy.run({name: [slots[-1] + 1]}, namespaces=space)
    return Outcome((toy.session,), slot=5, request="B")


@bug("E6", "vllm-project/vllm#51899", check="namespace")
def exif_image_id_taken_for_the_content(faulty: bool) -> Outcome:
    """The cache believes the id that an image file carries; two images carry the same."""
    toy = Toy()
    cache = PrefixCache(toy)
    images = {"A": {"ImageID": "0001", "pixels": b"cat"}, "B": {"ImageID": "0001", "pixels": b"dog"}}
    for (name, image), slots in zip(images.items(), ([1, 2, 3, 4], [5, 6, 7, 8]), strict=True):
        cache.serve(name, image["ImageID" if faulty else "pixels"], slots, namespace=zlib.crc32(image["pixels"]))
    return Outcome((toy.session,), slot=1, request="B")


class BlockIndex:
    """Finds blocks of two slots by a hash of all tokens up to their end."""

    def __init__(self, toy: Toy, compare: bool):
        self.toy, self.compare = toy, compare
        self.known: dict[int, tuple[list[int], list[int]]] = {}  # hash -> the tokens it stands for, the block

    def serve(self, name: str, tokens: list[int], slots: list[int]) -> None:
        """A request takes the blocks that the index has, and computes the rest."""
        blocks = {sum(tokens[:end]) % 16: (tokens[:end], slots[end - 2 : end]) for end in range(2, len(tokens), 2)}
        hit: list[int] = []
        for key, (prefix, _) in blocks.items():
            if key not in self.known or (self.compare and self.known[key][0] != prefix):
                break
            hit += self.known[key][1]
        self.toy.pool.share(hit, owner=name)
        self.toy.add(name, tokens, prefix=hit)
        self.toy.run({name: slots[len(hit) :]})
        self.known = blocks | self.known


# Without the requests' histories a collision shows where the foreign block meets the request's own.
@bug("E7", "openvinotoolkit/openvino.genai#3722", check="chain")
def blocks_found_by_hash_whose_tokens_are_never_compared(faulty: bool) -> Outcome:
    """The hashes of two different prefixes collide, and a request gets the second block of the other one."""
    toy = Toy(history=False)
    index = BlockIndex(toy, compare=not faulty)
    index.serve("P", [1, 2, 3, 4, 5], [1, 2, 3, 4, 5])
    index.serve("R", [5, 6, 1], [6, 7, 8])
    index.serve("Q", [5, 6, 7, 8, 9], [9, 10, 11, 12, 13])
    return Outcome((toy.session,), slot=3, request="Q")


# ---- F: drafts


# The token after the corrupted slot 6 shows it: it followed the bonus token that is no longer there.
@bug("F1", "vllm-project/vllm#9730", check="chain")
def bonus_token_overwritten_by_the_sequence_without_it(faulty: bool) -> Outcome:
    """A draft runs each sequence with and without its bonus token; the one without it writes its own guess over it."""
    draft = Toy(history=False)
    bonus, guess, proposed = 25, 40, 26
    request = draft.add("r", [20, 21, 22, 23, 24, bonus, proposed, 27])
    draft.run({"r": [1, 2, 3, 4, 5, 6]})
    draft.take("r", [7])
    both = {"request_rows": [request.row] * 2, "request_ids": ["r", "r"], "prefix_lens": [6, 5], "extend_lens": [1, 1]}
    tokens = [proposed, guess if faulty else bonus]
    draft.forward(draft.plan({"r": [7]}, input_ids=tokens, slots=[7, 6], positions=[6, 5], **both))
    request.stored += 1
    draft.run({"r": [8]})
    return Outcome((draft.session,), slot=7, request="r")


@bug("F2", "vllm-project/vllm#47930", check="chain", also=("owner",))
def prefix_hit_vouches_for_draft_slots_never_filled(faulty: bool) -> Outcome:
    """A restored prefix never ran through the draft, whose slots still hold the tokens of whoever had them before."""
    draft = Toy(pools=lambda toy: (KVPool(toy.kv, toy.table, name="draft", allocations=False),), history=False)
    draft.add("old", range(20, 28))
    draft.run({"old": [5, 6, 7, 8, 1, 2, 3, 4]})
    restored = [1, 2, 3, 4]
    draft.add("B", range(40, 45), prefix=restored if faulty else ())
    draft.run({"B": [9] if faulty else [*restored, 9]})
    return Outcome((draft.session,), slot=1, request="B")


# ---- G: windows and rings


def windowed(window: int) -> Toy:
    """A toy whose attention sees a window."""
    return Toy(pools=lambda toy: (KVPool(toy.kv, toy.table, window=window),), history=False)


def roll(toy: Toy, ring: list[int]) -> None:
    """Every token moves down by one slot; the oldest goes."""
    shadow = toy.pool.export(ring[1:])
    for layer in toy.kv:
        for half in layer:
            half[ring[:-1]] = half[ring[1:]]
    toy.pool.import_(shadow, ring[:-1])


# also poison: the slot that was not written yet is rolled into the window with the others
@bug("G1", "huggingface/transformers#37574 / #38046", check="chain", also=("poison",))
def window_rolled_one_step_early(faulty: bool) -> Outcome:
    """The token that just fills the window rolls the oldest one out of it."""
    toy, ring = windowed(8), [1, 2, 3, 4, 5, 6, 7, 8]
    request = toy.add("r", range(20, 30))
    toy.take("r", ring)
    toy.forward(toy.plan({"r": ring[:7]}))
    for request.stored in (7, 8):
        if request.stored >= (7 if faulty else 8):
            roll(toy, ring)
        toy.table[request.row, request.stored - 7 : request.stored + 1] = torch.tensor(ring, dtype=torch.int32)
        toy.forward(toy.plan({"r": ring[-1:]}))
    return Outcome((toy.session,), slot=1, request="r")


@bug("G2", "huggingface/transformers#47708", check="chain")
def ring_start_computed_before_the_ring_is_full(faulty: bool) -> Outcome:
    """The oldest entry of a ring is sought at past_length % window, which holds only once the ring is full."""
    toy, ring, window = windowed(4), [1, 2, 3, 4], 4
    request = toy.add("r", range(20, 30))
    toy.take("r", ring)
    toy.forward(toy.plan({"r": ring[:2]}))
    for request.stored in (2, 3, 4):
        start = request.stored % window if faulty or request.stored >= window else 0
        slot = ring[(start + min(request.stored, window)) % window]
        toy.table[request.row, request.stored] = slot
        toy.forward(toy.plan({"r": [slot]}))
    return Outcome((toy.session,), slot=1, request="r")


@bug("G3", "huggingface/transformers#38156", check="chain")
def cache_length_taken_from_a_local_layer(faulty: bool) -> Outcome:
    """The length of a hybrid cache is asked of its first layer, which never holds more than its window."""
    window = 8
    toy = Toy(
        width=24,
        pools=lambda toy: (
            KVPool(toy.kv[:1], toy.table, name="local", window=window),
            KVPool(toy.kv[1:], toy.table, name="global"),
        ),
    )
    toy.add("r", range(20, 41))
    toy.session.pools["global"].allocate(range(1, 22), owner="r")
    toy.run({"r": range(1, 21)})
    length = min(20, window) if faulty else 20
    toy.run({"r": [21]}, positions=[length])
    return Outcome((toy.session,), slot=21, request="r")


@bug("G4", "vllm-project/vllm#42273", check="owner", also=("index", "chain"))
def window_eviction_leaves_the_row_as_it_was(faulty: bool) -> Outcome:
    """A slot leaves the window and is freed, its table entry stays; the kernel loads the whole row and masks later."""
    toy, window, null = Toy(), 4, 23
    toy.pool.allocate([null])  # the null block: anybody may load it, nobody is in it
    toy.pool.adopt([null])
    request = toy.add("r", range(20, 30))
    toy.run({"r": [1, 2, 3, 4, 5]})
    toy.pool.release([1], owner="r")
    if not faulty:
        toy.table[request.row, : request.stored - window] = null
    toy.add("B", [40, 41])
    toy.run({"B": [1]})
    toy.run({"r": [6]})
    return Outcome((toy.session,), slot=1, request="r")
