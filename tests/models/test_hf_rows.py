"""What the device has of the requests of a batch: always what transformers has, however little of it was sent."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers", minversion="5.17")

from kvcanary_fx.adapters.huggingface import rows as module
from kvcanary_fx.adapters.huggingface.batching import _runs_from_python
from kvcanary_fx.adapters.huggingface.groups import Group
from kvcanary_fx.adapters.huggingface.rows import RequestRows
from kvcanary_fx.engine import gathered
from kvcanary_fx.proof import tiny

ROWS, BLOCKS, PAGE = 5, 13, 4


def groups() -> list[Group]:
    """One of all positions, and a ring of slots, of 6 in pages of 4."""
    made = []
    for index, window in enumerate((None, 6)):
        allocator = SimpleNamespace(
            index=index, tokens_per_page=PAGE, block_physical_stride=PAGE, num_blocks=BLOCKS, layer_indices=[index],
            cache_tensor=torch.zeros(1), block_table={},
        )  # fmt: skip
        if window is not None:
            allocator.sliding_window = window
        made.append(Group(f"group {index}", allocator, ROWS, str))
    return made


class Engine:
    """Requests that come, grow, are started anew or forked, and go; blocks that are added, swapped and given up."""

    def __init__(self, seed: int, groups: list[Group]):
        self.rng, self.groups, self.states, self._named = random.Random(seed), groups, {}, 0

    def _new(self, name: str, prompt: list[int], output: list[int]) -> None:
        self.states[name] = SimpleNamespace(request_id=name, initial_tokens=prompt, generated_tokens=output)
        for group in self.groups:
            group.allocator.block_table[name] = self._blocks(self.rng.randint(0, 4))

    def _blocks(self, n: int) -> list[int]:
        return [self.rng.randrange(BLOCKS) for _ in range(n)]

    def _tokens(self, most: int) -> list[int]:
        return [self.rng.randrange(2**31) for _ in range(self.rng.randint(1, most))]

    def move(self) -> None:
        what = self.rng.choice(["come", "grow", "grow", "grow", "anew", "fork", "go", "blocks", "order", "moved"])
        if what == "come" or not self.states:
            self._named += 1
            self._new(f"req_{self._named % 9}", self._tokens(self.rng.choice([3, 30])), [])
            return
        name = self.rng.choice(list(self.states))
        state, tables = self.states[name], [group.allocator.block_table for group in self.groups]
        if what == "grow":
            state.generated_tokens.append(self.rng.randrange(2**31))
        elif what == "anew":  # evicted, or cancelled and added again: the same name
            self._new(name, [*state.initial_tokens, *state.generated_tokens] if self.rng.random() < 0.5 else [7], [])
        elif what == "fork":
            self._new(f"{name}__child#0", state.initial_tokens[:], state.generated_tokens[:])
        elif what == "go":
            del self.states[name]
            for table in tables:
                table.pop(name, None)
        elif what == "order":
            self.states = dict(self.rng.sample(list(self.states.items()), len(self.states)))
        else:
            for table in tables:
                self._change(table, name, what)

    def _change(self, table: dict[str, list[int]], name: str, what: str) -> None:
        blocks = table.setdefault(name, [])
        if what == "moved":  # as those are that were in host memory
            table[name] = self._blocks(len(blocks))
        elif self.rng.random() < 0.7 and len(blocks) < 6:
            blocks.append(self.rng.randrange(BLOCKS))
        elif self.rng.random() < 0.5:
            table[name] = blocks[: self.rng.randint(0, len(blocks))]
        elif blocks:
            blocks[self.rng.randrange(len(blocks))] = self.rng.randrange(BLOCKS)


def expected_row(group: Group, blocks: list[int]) -> list[int]:
    if group.window is None:
        return blocks
    return [block * PAGE + offset for block in blocks for offset in range(PAGE)][: group.window]


@pytest.mark.parametrize("kernel", [False, True], ids=["copies", "kernel"])
@pytest.mark.parametrize("seed", range(6))
def test_rows_are_those_of_the_requests_whatever_happened_to_them(seed, kernel, monkeypatch):
    monkeypatch.setattr(gathered, "hands_over", lambda device: kernel)
    monkeypatch.setattr(module, "COLUMNS", 4)  # so that the history grows
    made = groups()
    engine, rows = Engine(seed, made), RequestRows(made, ROWS)
    for _ in range(120):
        for _ in range(engine.rng.randint(0, 3)):
            engine.move()
        states = list(engine.states.values())[:ROWS]
        numbers, lengths = rows.fill(states)
        assert len(set(numbers)) == len(numbers)
        for state, number, length in zip(states, numbers, lengths, strict=True):
            tokens = state.initial_tokens + state.generated_tokens
            assert rows.history[number, :length].tolist() == tokens
            for group in made:
                blocks = expected_row(group, group.allocator.block_table.get(state.request_id, []))
                row = group.table[number].tolist()
                assert row == blocks[: len(row)] + [-1] * (len(row) - len(blocks))


def test_a_decode_step_sends_a_word_a_request(monkeypatch):
    made, sent = groups(), []
    rows = RequestRows(made, ROWS)
    monkeypatch.setattr(rows._runs, "add", lambda *run: sent.append(run[1:]))
    states = [SimpleNamespace(request_id=name, initial_tokens=[5] * 7, generated_tokens=[]) for name in "ab"]
    rows.fill(states)
    sent.clear()
    rows.fill(states)
    assert sent == []  # nothing is new
    for state in states:
        state.generated_tokens.append(9)
    rows.fill(states)
    assert sent == [(0, 6, [5, 9]), (1, 6, [5, 9])]


def test_k_and_v_are_held_only_where_nothing_of_the_model_is_compiled():
    eager, compiled = SimpleNamespace(varlen_compile_config=None), SimpleNamespace(varlen_compile_config=object())
    model = tiny.build("llama")
    assert _runs_from_python(model, eager)
    assert not _runs_from_python(model, compiled)
    model.model.layers[1].compile(backend="eager")
    assert not _runs_from_python(model, eager)
    assert not _runs_from_python(torch.compile(tiny.build("llama"), backend="eager"), eager)
    model = tiny.build("llama")
    model.model.layers[0].mlp.forward = torch.compile(model.model.layers[0].mlp.forward, backend="eager")
    assert not _runs_from_python(model, eager)
