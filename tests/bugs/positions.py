"""Bugs of tokens and positions (A)."""

from __future__ import annotations

import math

import torch
from cases import Outcome, bug
from toy import Toy

from kvcanary_fx import KVPool


def eagle_draft() -> Toy:
    """A draft whose slot p holds token p + 1."""
    return Toy(pools=lambda toy: (KVPool(toy.kv, toy.table, name="draft", token_offset=1),))


@bug("A1", "sgl-project/sglang#25015", check="chain")
def draft_positions_bumped_before_each_forward(faulty: bool) -> Outcome:
    """The draft loop counts its positions up before each forward instead of after it."""
    draft = eagle_draft()
    draft.add("r", range(20, 30))
    draft.run({"r": [1, 2, 3, 4, 5, 6, 7]})
    position = 7
    for slot in (8, 9):
        if faulty:
            position += 1
        draft.run({"r": [slot]}, positions=[position])
        if not faulty:
            position += 1
    return Outcome((draft.session,), slot=8, request="r")


# The wrong token is the draft's own input and its chain agrees with it: only the request's history knows better.
@bug("A2", "sgl-project/sglang#26329 / #26800", check="chain", also=("token",))
def sampled_token_at_the_tail_of_a_non_final_chunk(faulty: bool) -> Outcome:
    """A chunk of the prompt ends with the token that was sampled, not with the prompt's next one."""
    draft = eagle_draft()
    a, b, c, d, sampled = 20, 21, 22, 23, 40
    draft.add("r", [a, b, c, d, 24])
    draft.run({"r": [1, 2]}, input_ids=[b, sampled if faulty else c])
    draft.run({"r": [3, 4]})
    return Outcome((draft.session,), slot=2, request="r")


@bug("A6", "vllm-project/vllm#10388", check="chain", also=("bounds",))
def position_slice_of_a_chunk_without_its_right_edge(faulty: bool) -> Outcome:
    """A chunk brings the positions of its whole prompt, so those of the next request in the batch are shifted."""
    toy = Toy()
    toy.add("A", range(20, 26))
    toy.add("B", range(30, 33))
    chunk = 4
    positions = [*range(6)[0 : None if faulty else chunk], *range(3)]
    toy.run({"A": [1, 2, 3, 4], "B": [5, 6, 7]}, positions=positions[: chunk + 3])
    return Outcome((toy.session,), slot=5, request="B")


@bug("A7", "waybarrios/vllm-mlx#311", check="chain")
def stored_prefix_one_token_shorter_than_its_key(faulty: bool) -> Outcome:
    """The prefix store trims one token too many; who hits it goes on behind the key, over a token never computed."""
    toy = Toy()
    key = list(range(20, 28))
    toy.add("A", key)
    toy.run({"A": [1, 2, 3, 4, 5, 6, 7, 8]})
    stored = [1, 2, 3, 4, 5, 6, 7, 8][: -1 if faulty else None]
    toy.pool.share(stored, owner="B")
    toy.add("B", [*key, 30], prefix=stored)
    toy.run({"B": [9]}, input_ids=[30], positions=[len(key)])
    return Outcome((toy.session,), slot=9, request="B")


def rotate_keys(pools: list[tuple[torch.Tensor, torch.Tensor]], slots: torch.Tensor, angle: torch.Tensor) -> None:
    """The K of slots turned by an angle, as RoPE does when positions move."""
    for k_pool, _ in pools:
        x, y = k_pool[slots].chunk(2, dim=-1)
        k_pool[slots] = torch.cat((x * angle.cos() - y * angle.sin(), x * angle.sin() + y * angle.cos()), dim=-1)


def drop_oldest(toy: Toy, name: str, count: int) -> None:
    """The oldest tokens of a request go, the others move up: in its row, not yet in their K."""
    request = toy.requests[name]
    slots = toy.table[request.row, : request.stored].tolist()
    toy.pool.release(slots[:count], owner=name)
    toy.table[request.row, : len(slots) - count] = torch.tensor(slots[count:], dtype=torch.int32)
    request.tokens, request.stored = request.tokens[count:], request.stored - count


@bug("A9", "ggml-org/llama.cpp#3825", check=None)
def second_shift_forgets_the_pending_rotation_of_the_first(faulty: bool) -> Outcome:
    """Of two context shifts in a row, K is rotated by the last one only."""
    toy = Toy()
    request = toy.add("r", range(20, 28))
    toy.run({"r": [1, 2, 3, 4, 5, 6]})
    pending = 0
    for count in (2, 1):
        drop_oldest(toy, "r", count)
        pending = -count if faulty else pending - count
    shift, request.stored = torch.compile(rotate_keys, backend=toy.session.backend, dynamic=False), 0
    with toy.session.step(toy.plan({"r": [4, 5, 6]})), toy.session.forward(), torch.no_grad():
        shift(toy.kv, torch.tensor([4, 5, 6]), torch.tensor(pending * math.pi / 8))
    request.stored = 3
    toy.run({"r": [7]})
    return Outcome((toy.session,))


@bug("A10", "Blaizzy/mlx-vlm#1983", check="chain")
def position_ids_without_the_cache_offset(faulty: bool) -> Outcome:
    """All decode tokens get position 0."""
    toy = Toy()
    toy.add("r", [5, 6, 7, 8, 9])
    toy.run({"r": [1, 2, 3]})
    toy.run({"r": [4]}, **({"positions": [0]} if faulty else {}))
    return Outcome((toy.session,), slot=4, request="r")
