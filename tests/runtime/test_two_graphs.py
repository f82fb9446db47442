"""One cache in two graphs, as where a graph breaks: what one records is checked in the other, however each divides
it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import kvcanary_fx
from kvcanary_fx import CanaryBackend, CanaryConfig

B, H, S, D = 2, 2, 6, 8


class Broken:
    """An attention layer whose graph breaks behind the write of K, or of V."""

    def __init__(self, cache: torch.Tensor, halves: Callable, behind: str, config: CanaryConfig | None = None):
        self.cache, self.halves, self.behind, self.length = cache, halves, behind, 0
        self.in_break: list[Callable[[], None]] = []
        self.backend = CanaryBackend(config or CanaryConfig(inner="eager"))
        self.compiled = torch.no_grad()(torch.compile(self._forward, backend=self.backend))
        self.pause = torch._dynamo.disable(self._pause)

    def _pause(self) -> None:
        while self.in_break:
            self.in_break.pop()()

    def _forward(self, x, pos, mask):
        keys, values = self.halves(self.cache)
        keys.index_copy_(2, pos, x * 2)
        if self.behind == "K":
            self.pause()
        values.index_copy_(2, pos, x * 3)
        if self.behind == "V":
            self.pause()
        keys, values = self.halves(self.cache)
        return F.scaled_dot_product_attention(x, keys, values, mask)

    def step(self) -> None:
        pos, self.length = torch.tensor([self.length]), self.length + 1
        self.compiled(torch.randn(B, H, 1, D), pos, (torch.arange(S) <= pos)[None])

    def told(self) -> list[tuple[str, str, int, int]]:
        """The violations of the next step."""
        with pytest.raises(kvcanary_fx.KVCacheViolation) as caught:
            self.step()
        # a graph that writes K alone cannot tell which half that is: "KV"
        return [(v.check, v.half[0], v.row, v.index) for v in caught.value.violations]


PACKED = {
    "in front": (lambda: torch.zeros(2, B, H, S, D), lambda kv: kv.unbind(0)),
    "in front, in a tensor of layers": (lambda: torch.zeros(3, 2, B, H, S, D), lambda kv: (kv[1, 0], kv[1, 1])),
    "behind the sequences": (lambda: torch.zeros(B, 2, H, S, D), lambda kv: (kv[:, 0], kv[:, 1])),
    "side by side": (lambda: torch.zeros(B, H, S, 2 * D), lambda kv: kv.chunk(2, -1)),
}


@pytest.mark.parametrize("behind", ["K", "V"])
@pytest.mark.parametrize("packed", PACKED)
def test_keys_damaged_in_the_break_or_before_the_step(packed, behind):
    make, halves = PACKED[packed]
    layer = Broken(make(), halves, behind)
    for _ in range(3):
        layer.step()
    keys, values = layer.halves(layer.cache)
    layer.in_break.append(lambda: keys.data[1, 0, 2].add_(1))
    assert layer.told() == [("content", "K", 1, 2)]
    values[0, 1, 0, 3] += 1  # by an op that counts
    assert layer.told() == [("content", "V", 0, 0)]
    layer.step()
    assert len(layer.backend.session.violations()) == 2


def test_keys_damaged_in_the_break_behind_which_only_the_packed_cache_is_at_hand():
    hits: list[Callable[[], None]] = []

    @torch._dynamo.disable
    def pause():
        while hits:
            hits.pop()()

    def forward(x, kv, pos):
        kv[0].index_copy_(2, pos, x * 2)
        pause()
        kv[1].index_copy_(2, pos, x * 3)
        return F.scaled_dot_product_attention(x, kv[0], kv[1])

    backend, kv = CanaryBackend(CanaryConfig(inner="eager")), torch.zeros(2, B, H, S, D)
    layer = torch.no_grad()(torch.compile(forward, backend=backend))
    for n in range(2):
        layer(torch.randn(B, H, 1, D), kv, torch.tensor([n]))
    hits.append(lambda: kv.data[0, 1, 0, 1].add_(1))
    with pytest.raises(kvcanary_fx.KVCacheViolation) as caught:
        layer(torch.randn(B, H, 1, D), kv, torch.tensor([2]))
    assert [(v.check, v.row, v.index) for v in caught.value.violations] == [("content", 1, 1)]


def test_keys_of_another_input_in_the_storage_of_the_values_that_a_graph_writes():
    backend, kv = CanaryBackend(CanaryConfig(inner="eager")), torch.zeros(2, B, H, S, D)

    def write(x, kv, pos):
        kv[0].index_copy_(2, pos, x)
        kv[1].index_copy_(2, pos, x)
        return x + 1

    def attend(x, values, keys):
        values[:, :, 3:4] = x
        return F.scaled_dot_product_attention(x, keys, values)

    fill, look = (torch.no_grad()(torch.compile(f, backend=backend, fullgraph=True)) for f in (write, attend))
    x = torch.randn(B, H, 1, D)
    for n in range(3):
        fill(x, kv, torch.tensor([n]))
    look(x, kv[1], kv[0])
    kv.data[0, 0, 1, 2] += 1
    with pytest.raises(kvcanary_fx.KVCacheViolation) as caught:
        look(x, kv[1], kv[0])
    assert [(v.check, v.half, v.row, v.index) for v in caught.value.violations] == [("content", "K", 0, 2)]


def each(kv) -> torch.Tensor:
    return kv[0].sum() + kv[1].sum()


WRITTEN = {
    "of two widths": (lambda: [torch.zeros(B, H, S, D), torch.zeros(B, H, S, D // 2)], lambda kv: kv, each),
    "read as one tensor": (lambda: torch.zeros(2, B, H, S, D), lambda kv: kv, torch.sum),
    "in a tensor of layers": (lambda: torch.zeros(3, 2, B, H, S, D), lambda kv: kv[1], each),
}


@pytest.mark.parametrize("form", WRITTEN)
def test_a_second_graph_that_writes_all_it_reads_watches_nothing_besides(form):
    """A prompt and a token, each a graph."""
    make, layer, read = WRITTEN[form]
    backend, cache = CanaryBackend(CanaryConfig(inner="eager")), make()

    def write(x, cache, pos):
        kv = layer(cache)
        kv[0].index_copy_(2, pos, x)
        kv[1].index_copy_(2, pos, x[..., : kv[1].shape[-1]])
        return x.sum() + read(kv)

    compiled = torch.no_grad()(torch.compile(write, backend=backend, fullgraph=True, dynamic=False))
    for pos in ([0, 1, 2], [3]):
        compiled(torch.randn(B, H, len(pos), D), cache, torch.tensor(pos))
    assert [[site.kind for site in plan.sites] for plan in backend.session.plans] == [["kv"] * 2] * 2


def test_flat_slots_in_one_graph_and_pages_in_the_other():
    pool, table = torch.zeros(4, 2, H, D), torch.tensor([5, 2, 7])
    hits: list[Callable[[], None]] = []

    @torch._dynamo.disable
    def pause():
        while hits:
            hits.pop()()

    def forward(pool, slot, new):
        pool.flatten(0, 1)[slot] = new[None]
        pause()
        seen = pool[table // 2, table % 2].transpose(0, 1)
        return F.scaled_dot_product_attention(new[:, None], seen, seen)

    backend = CanaryBackend(CanaryConfig(inner="eager"))
    compiled = torch.no_grad()(torch.compile(forward, backend=backend))
    for slot in table.split(1):
        compiled(pool, slot, torch.randn(H, D))
    hits.append(lambda: pool.data[1, 0, 1].mul_(2))
    with pytest.raises(kvcanary_fx.KVCacheViolation) as caught:
        compiled(pool, table[:1], torch.randn(H, D))
    assert [(v.check, v.slot) for v in caught.value.violations] == [("content", 2)]


def test_a_first_token_at_a_constant_position_stays_guarded():
    """The position is a constant in the first graph, which takes it for a part of the cache; in the next, a symbol."""
    cache, backend = torch.zeros(B, S, H, D), CanaryBackend(CanaryConfig(inner="eager"))

    def forward(cache, start, new):
        cache.select(1, start).copy_(new)
        return cache.float().sum()

    compiled = torch.no_grad()(torch.compile(forward, backend=backend))
    compiled(cache, 0, torch.randn(B, H, D))
    cache.data[1, 0, 1, 3] += 1
    with pytest.raises(kvcanary_fx.KVCacheViolation) as caught:
        compiled(cache, 1, torch.randn(B, H, D))
    assert [(v.check, v.row, v.index) for v in caught.value.violations] == [("content", 1, 0)]
    for start in range(2, 5):
        compiled(cache, start, torch.randn(B, H, D))
    assert len(backend.session.violations()) == 1


def test_a_returned_cache_that_is_read_behind_a_break():
    hits: list[Callable[[torch.Tensor], None]] = []

    @torch._dynamo.disable
    def pause(tensor):
        while hits:
            hits.pop()(tensor)

    def forward(cache, pos, new, mask):
        cache = cache.index_copy(2, pos, new)
        pause(cache)
        return F.scaled_dot_product_attention(new, cache, cache, mask), cache

    backend = CanaryBackend(CanaryConfig(inner="eager"))
    compiled = torch.no_grad()(torch.compile(forward, backend=backend))
    key_cache = torch.zeros(B, H, S, D)

    def step(n: int) -> torch.Tensor:
        return compiled(key_cache, torch.tensor([n]), torch.randn(B, H, 1, D), (torch.arange(S) <= n)[None])[1]

    for n in range(3):
        key_cache = step(n)
    for harm in (lambda: hits.append(lambda t: t.data[0, 1, 1].add_(1)), lambda: key_cache.data[0, 1, 1].add_(1)):
        harm()
        with pytest.raises(kvcanary_fx.KVCacheViolation) as caught:
            step(3)
        assert [(v.check, v.row, v.index) for v in caught.value.violations] == [("content", 0, 1)]


class OneByOne:
    """Layers over a flat pool, each compiled by itself."""

    def __init__(self, layers: int = 3):
        self.pools = [torch.zeros(2, 8, H, D) for _ in range(layers)]
        self.backend = CanaryBackend(CanaryConfig(inner="eager"))
        self.layer = torch.no_grad()(torch.compile(self._layer, backend=self.backend, fullgraph=True))

    @staticmethod
    def _layer(x, pool, slot):
        pool[0].index_copy_(0, slot, x)
        pool[1].index_copy_(0, slot, x + 1)
        return x + torch.tanh(pool.sum((0, 1)))

    def forward(self, slot: int) -> None:
        x = torch.randn(1, H, D)
        for pool in self.pools:
            x = self.layer(x, pool, torch.tensor([slot]))


class HeadByHead(OneByOne):
    """Each head is written by itself."""

    @staticmethod
    def _layer(x, pool, slot):
        for half, new in zip(pool, (x, x + 1), strict=True):
            for head in range(H):
                half[:, head].index_copy_(0, slot, new[:, head])
        k, v = pool.transpose(1, 2).unbind(0)
        return torch.nn.functional.scaled_dot_product_attention(x.transpose(0, 1), k, v).transpose(0, 1)


@pytest.mark.parametrize("damaged", [0, 2])
def test_k_and_v_swapped_in_one_layer_compiled_by_itself_that_is_written_head_by_head(damaged):
    model = HeadByHead()
    for slot in (0, 1):
        model.forward(slot)
    for pool in model.pools:  # written elsewhere, in all layers
        pool[:, 0] = torch.randn(2, H, D)
    model.forward(2)
    assert model.backend.session.violations() == []
    pool = model.pools[damaged]
    pool[:, 1] = pool[:, 1].flip(0)
    with pytest.raises(kvcanary_fx.KVCacheViolation) as caught:
        model.forward(3)
    assert {(v.half, v.slot) for v in caught.value.violations} == {("K", 1), ("V", 1)}


class SideBySide(OneByOne):
    """K and V in one row."""

    def __init__(self, layers: int):
        super().__init__(layers)
        self.pools = [torch.zeros(8, H, 2 * D) for _ in range(layers)]

    @staticmethod
    def _layer(x, pool, slot):
        pool.index_copy_(0, slot, torch.cat((x, x + 1), -1))
        k, v = (half.transpose(0, 1) for half in pool.chunk(2, -1))
        return torch.nn.functional.scaled_dot_product_attention(x.transpose(0, 1), k, v).transpose(0, 1)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("part", [slice(None), slice(D)], ids=["K and V", "K alone"])
def test_slots_given_back_and_cleared_where_k_and_v_are_side_by_side(layers, part):
    model = SideBySide(layers)
    for slot in (1, 6, 0, 2, 3):
        model.forward(slot)
    for pool in model.pools:
        pool[6, :, part] = 0
    with contextlib.suppress(kvcanary_fx.KVCacheViolation):
        model.forward(4)
    assert {v.slot for v in model.backend.session.violations()} == (set() if part == slice(None) else {6})


@pytest.mark.parametrize("damaged", [0, 1, 2])
def test_a_token_changed_in_one_of_several_layers_compiled_one_by_one(damaged):
    model = OneByOne()
    for slot in range(3):
        model.forward(slot)
    for pool in model.pools:  # written elsewhere, in all layers
        pool[:, :2] = torch.randn(2, 2, H, D)
    model.forward(3)
    assert model.backend.session.violations() == []
    pool = model.pools[damaged]
    pool[:, 1] = pool[:, 2]  # a stray copy of K and V, by an op that counts
    with pytest.raises(kvcanary_fx.KVCacheViolation) as caught:
        model.forward(4)
    assert [(v.check, v.half, v.slot) for v in caught.value.violations] == [("content", "K", 1), ("content", "V", 1)]


def test_caches_that_take_turns_have_forwards_of_their_own():
    model, other = OneByOne(), OneByOne()
    first, second = model.pools, other.pools
    for pools in (first, second) * 2:
        model.pools = pools
        for slot in range(3):
            model.forward(slot)
    for pool in second:
        pool[:, :2] = torch.randn(2, 2, H, D)
    model.forward(3)
    assert model.backend.session.violations() == []


class Paused:
    """A forward over caches that may pause in the middle, which breaks its graph."""

    def __init__(self, forward: Callable, *caches: torch.Tensor):
        self.caches, self.backend = caches, CanaryBackend(CanaryConfig(inner="eager"))
        self.forward = torch.no_grad()(torch.compile(forward, backend=self.backend))

    def step(self, slot: torch.Tensor | int) -> list[tuple[str, int]]:
        """The half and the slot of each violation of a step."""
        try:
            self.forward(self.caches, slot, torch.randn(1, H, D))
        except kvcanary_fx.KVCacheViolation as e:
            return [(v.half, v.slot) for v in e.violations]
        return []


@torch._dynamo.disable
def pause() -> None:
    """Break the graph."""


def test_the_newest_token_of_a_pool_of_one_layer_whose_k_and_v_are_in_two_graphs():
    def forward(caches, slot, x):
        (pool,) = caches
        pool[0].index_copy_(0, slot, x)
        pause()
        pool[1].index_copy_(0, slot, x + 1)
        return F.scaled_dot_product_attention(x.transpose(0, 1), *pool.transpose(1, 2).unbind(0))

    model = Paused(forward, torch.zeros(2, 8, H, D))
    for slot in range(3):
        model.step(torch.tensor([slot]))
    (pool,) = model.caches
    pool[:, 2] = torch.randn(2, H, D)
    assert model.step(torch.tensor([3])) == []
    pool[1, 2] = torch.randn(H, D)
    assert model.step(torch.tensor([4])) == [("V", 2)]


def test_k_and_v_of_the_newest_token_swapped_in_the_last_layer_whose_graphs_hold_one_half_each():
    """Seen: the forward before had written the slot, which was taken for a write of this one."""

    def one(keys, values, slot, x):
        keys.index_copy_(2, slot, x)
        pause()
        values.index_copy_(2, slot, x + 1)
        pause()
        return x + F.scaled_dot_product_attention(x, keys, values, (torch.arange(S) <= slot)[None])

    def forward(caches, slot, x):
        return one(*caches[2], slot, one(*caches[1], slot, one(*caches[0], slot, x)))

    caches = [[torch.zeros(1, H, S, D) for _ in "kv"] for _ in range(3)]
    backend = CanaryBackend(CanaryConfig(inner="eager", mode="log"))
    step = torch.no_grad()(torch.compile(forward, backend=backend))
    for slot in range(3):
        step(caches, torch.tensor([slot]), torch.randn(1, H, 1, D))
    keys, values = caches[2]
    keys[:, :, 2], values[:, :, 2] = values[:, :, 2].clone(), keys[:, :, 2].clone()
    step(caches, torch.tensor([3]), torch.randn(1, H, 1, D))
    found = backend.session.violations()
    assert [(v.pool, v.slot) for v in found] == [("keys #3", 2), ("values #3", 2)]


def test_a_layer_with_k_and_v_side_by_side_in_a_row_is_the_first():
    """Its tokens may be those of the prompt before, so that only the layers above it have changed."""

    def layer(pool, slot, x):
        pool.index_copy_(0, slot, torch.cat((x, x + 1), -1))
        keys, values = pool.transpose(0, 1).chunk(2, -1)
        return x + F.scaled_dot_product_attention(x.transpose(0, 1), keys, values).transpose(0, 1)

    def forward(caches, slot, x):
        x = layer(caches[0], slot, x)
        pause()
        return layer(caches[1], slot, x)

    model = Paused(forward, *torch.zeros(2, 8, H, 2 * D))
    for slot in range(3):
        model.step(torch.tensor([slot]))
    model.caches[0][:2], model.caches[1][:3] = torch.randn(2, H, 2 * D), torch.randn(3, H, 2 * D)
    assert model.step(torch.tensor([3])) == []


def test_a_break_in_each_layer_where_graphs_return_k_of_the_next_layer_before_v():
    """The first layer is K of the first graph and V of the second, though that returns K of the next layer first."""

    def attend(x, *halves):
        return x + F.scaled_dot_product_attention(*(t.transpose(0, 1) for t in (x, *halves))).transpose(0, 1)

    def forward(caches, slot, x):
        kept = []
        keys = caches[0][0].index_copy(0, slot, x)
        pause()
        values = caches[0][1].index_copy(0, slot, x + 1)
        x = attend(x, keys, values)
        kept.append((keys, values))
        keys = caches[1][0].index_copy(0, slot, x)
        pause()
        values = caches[1][1].index_copy(0, slot, x + 1)
        kept.append((keys, values))
        return attend(x, keys, values), kept

    model = Paused(forward)
    model.caches = [torch.zeros(2, 8, H, D).unbind(0) for _ in range(2)]
    for slot in range(4):
        if slot == 3:  # tokens of the prompt before: they differ above the first layer
            for half in model.caches[1]:
                half[:2] = torch.randn(2, H, D)
        _, model.caches = model.forward(model.caches, torch.tensor([slot]), torch.randn(1, H, D))
    assert model.backend.session.violations() == []


#: By how many slots ``store`` and ``keep`` miss the next one.
MISSED_BY: list[int] = []


@torch.library.custom_op("two_graphs::store", mutates_args=("kv_cache",))
def store(new: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    kv_cache[slot_mapping + sum(MISSED_BY)] = new


@torch.library.custom_op("two_graphs::keep", mutates_args=("there",))
def keep(new: torch.Tensor, there: torch.Tensor, at: torch.Tensor) -> None:
    there[at + sum(MISSED_BY)] = new


for _op in (store, keep):
    _op.register_fake(lambda *_: None)
kvcanary_fx.register_kv_write("two_graphs::keep", slots="at", pools={"there": "new"})


@pytest.mark.parametrize("write", [store, keep])
def test_an_op_that_says_it_writes_a_cache_which_is_read_behind_a_break_only(write, monkeypatch):
    """Its argument is called so, or it was registered; the tensor has another name."""

    def forward(buffers, slot, x):
        write(x, buffers[0], slot)
        pause()
        keys = values = buffers[0].transpose(0, 1)
        return F.scaled_dot_product_attention(x.transpose(0, 1), keys, values)

    model = Paused(forward, torch.zeros(8, H, D))
    for slot in range(3):
        assert model.step(torch.tensor([slot])) == []
    monkeypatch.setitem(globals(), "MISSED_BY", [2])
    assert model.step(torch.tensor([3])) == [("KV", 3)]


def test_a_change_before_the_step_in_which_a_graph_divides_the_cache_anew():
    """In the first graphs the position is a constant: they take it for a part of the cache."""

    def write(half, slot, new):
        half.select(0, slot).copy_(new[0])
        half.select(0, slot + 1).copy_(new[0] * 2)

    def attend(kv, x):
        return x + F.scaled_dot_product_attention(x.transpose(0, 1), *kv.transpose(1, 2).unbind(0)).transpose(0, 1)

    def forward(caches, slot, x):
        kv = caches[0]
        write(kv[0, 0], slot, x)
        pause()
        write(kv[0, 1], slot, x + 1)
        x = attend(kv[0], x)
        write(kv[1, 0], slot, x)
        pause()
        write(kv[1, 1], slot, x + 1)
        return attend(kv[1], x)

    model = Paused(forward, torch.zeros(2, 2, 8, H, D))
    model.step(2)
    model.caches[0][:, :, 2:4] = torch.randn(2, 2, 2, H, D)
    assert model.step(4) == []


def test_values_of_a_sequence_emptied_while_its_keys_are_divided_otherwise():
    """The graph that writes K by hidden slots has no attention: it does not know which axis counts tokens."""

    def put(half, slot, new):
        half.put_(torch.arange(half.numel()).view(half.shape)[:, :, slot], new)

    def forward(caches, slot, x):
        keys, values = caches
        put(keys, slot, torch.stack((x, x)).transpose(1, 2))
        pause()
        put(values, slot, torch.stack((x, x + 1)).transpose(1, 2))
        return F.scaled_dot_product_attention(torch.stack((x, x)).transpose(1, 2), keys, values)

    model = Paused(forward, *torch.zeros(2, 2, H, 8, D))
    for slot in range(3):
        model.step(torch.tensor([slot]))
    model.caches[1][1] = 0
    assert model.step(torch.tensor([3])) == [("V", 8 + slot) for slot in range(3)]


def _by_row(half: torch.Tensor, start: int, new: torch.Tensor) -> None:
    for row in range(half.shape[0]):
        half[row].movedim(0, 0)[start : start + 1] = new[row]


def _by_slot(half: torch.Tensor, start: int, new: torch.Tensor) -> None:
    half.select(1, start).copy_(new.select(1, 0))


@pytest.mark.parametrize("write", [_by_row, _by_slot])
def test_a_prefix_from_outside_below_a_first_write_at_a_constant_position(write):
    """Attention shows which axes count sequences and tokens, whatever constants the write picks from them."""
    cache, backend = torch.zeros(2, B, S, H, D), CanaryBackend(CanaryConfig(inner="eager"))

    def forward(cache, start, x, mask):
        write(cache[0], start, x * 2)
        write(cache[1], start, x * 3)
        keys, values = cache.transpose(2, 3).unbind(0)
        return F.scaled_dot_product_attention(x.transpose(1, 2), keys, values, mask)

    compiled = torch.no_grad()(torch.compile(forward, backend=backend, fullgraph=True))
    cache[:, :, :2] = torch.randn(2, B, 2, H, D)
    compiled(cache, 2, torch.randn(B, 1, H, D), (torch.arange(S) <= 2)[None])
    cache.data[1, 1, 0, 1] += 1
    with pytest.raises(kvcanary_fx.KVCacheViolation) as caught:
        compiled(cache, 3, torch.randn(B, 1, H, D), (torch.arange(S) <= 3)[None])
    assert [(v.check, v.half, v.row, v.index) for v in caught.value.violations] == [("content", "V", 1, 0)]


def test_a_prefix_flipped_between_two_tokens_at_constant_positions_that_are_read_behind_a_break():
    """What writes the token has no attention: it must not take the position for a part of the cache."""

    def forward(caches, slot, x):
        keys, values = caches
        k, v = x.transpose(0, 1)[None], x.transpose(0, 1)[None] + 1
        keys.select(2, slot).copy_(k.select(2, 0))
        values.select(2, slot).copy_(v.select(2, 0))
        pause()
        return F.scaled_dot_product_attention(k, keys, values)

    model = Paused(forward, *torch.randn(2, 1, H, 8, D))
    model.step(2)
    model.caches[1][0, 0, 1, 0] += 1
    assert model.step(3) == [("V", 1)]


def test_a_cleared_crop_where_the_first_graph_reads_the_keys_of_all_layers():
    """It finds the change of a later layer's keys before that layer's own graph runs."""

    def write(half, slot, new):
        new = new.transpose(0, 1)[None]
        half.copy_(torch.cat((half[:, :, :slot], new, half[:, :, slot + 1 :]), 2))

    def layer(caches, number, slot, x):
        keys, values = (t.chunk(2)[number].squeeze(0) for t in caches)
        write(keys, slot, x)
        pause()
        write(values, slot, x + 1)
        y = F.scaled_dot_product_attention(x.transpose(0, 1)[None], keys, values)
        return x + y[0].transpose(0, 1)

    def forward(caches, slot, x):
        for number in range(2):
            x = layer(caches, number, slot, x)
        return x

    model = Paused(forward, *torch.zeros(2, 2, 1, H, 8, D))
    assert [model.step(slot) for slot in range(5)] == [[]] * 5
    for tensor in model.caches:
        tensor[..., 1:, :] = 0
    assert model.step(1) == []


class RowByRow(Broken):
    """Tokens in front of sequences, and a write for each sequence."""

    def _forward(self, x, pos, mask):
        keys, values = self.halves(self.cache)
        new_keys, new_values = (x * 2).permute(2, 0, 1, 3), (x * 3).permute(2, 0, 1, 3)
        for row in range(B):
            keys.select(1, row).index_copy_(0, pos, new_keys.select(1, row))
        if self.behind == "K":
            self.pause()
        for row in range(B):
            values.select(1, row).index_copy_(0, pos, new_values.select(1, row))
        if self.behind == "V":
            self.pause()
        keys, values = (half.permute(1, 2, 0, 3) for half in self.halves(self.cache))
        return F.scaled_dot_product_attention(x, keys, values, mask)

    def damaged_slots(self) -> set[int]:
        """Of the next step: sequences are counted within a token."""
        with pytest.raises(kvcanary_fx.KVCacheViolation) as caught:
            self.step()
        assert {v.check for v in caught.value.violations} == {"content"}
        return {v.slot for v in caught.value.violations}


@pytest.mark.parametrize("behind", ["K", "V"])
def test_sequences_behind_tokens_written_one_by_one(behind):
    layer = RowByRow(torch.zeros(2, S, B, H, D), lambda kv: kv.unbind(0), behind)
    for _ in range(4):
        layer.step()
    layer.cache[:, 3:] = 0  # a crop, cleared
    layer.length = 3
    layer.step()
    layer.in_break.append(lambda: layer.cache.data[0, 2, 1, 0].add_(1))
    assert layer.damaged_slots() == {2 * B + 1}
    layer.cache[1, 1, 1] = 0  # not the end of anything: the second sequence goes on
    assert layer.damaged_slots() == {B + 1}


class AllRows(Broken):
    """Tokens in front of sequences, which are named one by one: all of them."""

    def _forward(self, x, pos, mask):
        keys, values = self.halves(self.cache)
        keys.narrow(1, 0, B)[pos] = (x * 2).permute(2, 0, 1, 3)
        self.pause()
        values.narrow(1, 0, B)[pos] = (x * 3).permute(2, 0, 1, 3)
        keys, values = (half.permute(1, 2, 0, 3) for half in (keys, values))
        return F.scaled_dot_product_attention(x, keys, values, mask)


def test_a_cleared_crop_where_a_write_takes_a_part_that_is_all_of_the_sequences():
    """The graph of K has no attention that shows which axis counts sequences; V is divided as K is."""
    layer = AllRows(torch.zeros(2, S, B, H, D), lambda kv: kv.unbind(0), "K")
    for _ in range(4):
        layer.step()
    layer.cache[:, 3:] = 0
    layer.length = 3
    layer.step()
    layer.cache.data[1, 1, 1, 0] += 1
    with pytest.raises(kvcanary_fx.KVCacheViolation) as caught:
        layer.step()
    assert {(v.half, v.slot) for v in caught.value.violations} == {("V", 1)}


class Pages(Broken):
    """K and V in pages of their own; a graph writes K alone, into what it does not read."""

    def __init__(self):
        self.table = torch.tensor([[3, 1], [0, 4]])  # of sequences, pages of 4 slots
        super().__init__(torch.zeros(2, 5, 4, 1, D), lambda kv: kv.unbind(0), "K")
        self.buffers = tuple(half.clone() for half in self.cache)

    def _forward(self, x, pos, mask):
        pages, offsets = self.table[:, pos // 4].squeeze(1), (pos % 4).expand(B)
        self.buffers[0][pages, offsets] = x[:, :, 0] * 2
        self.pause()
        self.buffers[1][pages, offsets] = x[:, :, 0] * 3
        keys, values = (half[self.table].flatten(1, 2).transpose(1, 2) for half in self.buffers)
        return F.scaled_dot_product_attention(x, keys, values, mask)

    def step(self) -> None:
        pos, self.length = torch.tensor([self.length]), self.length + 1
        self.compiled(torch.randn(B, 1, 1, D), pos, (torch.arange(8) <= pos)[None])


def test_a_cleared_crop_of_keys_that_a_graph_writes_into_pages_it_does_not_read():
    layer = Pages()
    for _ in range(7):
        layer.step()
    for half in layer.buffers:
        half[layer.table[:, 1], 1:] = 0
    layer.length = 5
    layer.step()
    layer.buffers[0].data[3, 1] += 1
    assert layer.told() == [("content", "K", None, 13)]


class Permuted(Broken):
    """Tokens are written through a view that has them in front."""

    def _forward(self, x, pos, mask):
        keys, values = self.halves(self.cache)
        keys.permute(2, 0, 1, 3)[pos] = (x * 2).permute(2, 0, 1, 3)
        if self.behind == "K":
            self.pause()
        values.permute(2, 0, 1, 3)[pos] = (x * 3).permute(2, 0, 1, 3)
        return F.scaled_dot_product_attention(x, keys, values, mask)


@pytest.mark.parametrize("behind", ["", "K"])
def test_a_write_through_a_view_with_tokens_in_front_is_to_a_sequence_and_a_position(behind):
    layer = Permuted(torch.zeros(2, B, H, S, D), lambda kv: kv.unbind(0), behind)
    for _ in range(4):
        layer.step()
    layer.cache[..., 3:, :] = 0
    layer.length = 3
    layer.step()
    layer.cache.data[1, 1, 0, 2, 0] += 1
    assert layer.told() == [("content", "V", 1, 2)]


def test_beams_change_places_in_a_cache_that_is_written_through_a_view_with_tokens_in_front():
    """K's graph has no attention that shows which axis counts sequences."""
    layer = Permuted(torch.zeros(2, B, H, S, D), lambda kv: kv.unbind(0), "K")
    for _ in range(3):
        layer.step()
    layer.cache.copy_(layer.cache.flip(1))
    layer.step()
    layer.cache.data[0, 1, 0, 2, 0] += 1
    assert layer.told() == [("content", "K", 1, 2)]


class ByHead(Broken):
    """Heads are written one by one, four of them."""

    def _forward(self, x, pos, mask):
        x = x.repeat(1, 2, 1, 1)
        keys, values = self.halves(self.cache)
        for head, new in zip(keys.split(1, 1), (x * 2).split(1, 1), strict=True):
            head.index_copy_(2, pos, new)
        self.pause()
        for head, new in zip(values.split(1, 1), (x * 3).split(1, 1), strict=True):
            head.index_copy_(2, pos, new)
        return F.scaled_dot_product_attention(x, keys, values, mask)


def test_heads_that_are_written_in_a_graph_without_attention_are_no_layers():
    """Taken for layers, those above the first would show that the newest token is a new one."""
    layer = ByHead(torch.zeros(2, B, 2 * H, S, D), lambda kv: kv.unbind(0), "K")
    for _ in range(4):
        layer.step()
    layer.cache[0, 1, :, 3] = layer.cache[0, 1, :, 1]
    assert layer.told() == [("content", "K", 1, 3)] * 2 * H


class AtPosition(Broken):
    """A token goes to a position that is an int; attention is another graph's."""

    def _forward(self, x, pos, mask):
        keys, values = self.halves(self.cache)
        keys.select(2, self.length).copy_(x[:, :, 0] * 2)
        values.select(2, self.length).copy_(x[:, :, 0] * 3)
        self.pause()
        return F.scaled_dot_product_attention(x, keys, values)

    def step(self) -> None:
        self.compiled(torch.randn(B, H, 1, D), None, None)
        self.length += 1


def test_a_reset_of_interleaved_halves_at_the_position_that_a_graph_was_compiled_for():
    """K and V of a sequence lie in turns: K's write does not touch what V's check is about."""
    layer = AtPosition(torch.zeros(B, 2, H, S, D), lambda kv: (kv[:, 0], kv[:, 1]), "V")
    layer.step()
    layer.cache.zero_()
    layer.length = 0
    layer.step()
    layer.step()
    layer.cache.data[1, 1, 0, 0, 2] += 1
    assert [(check, half) for check, half, *_ in layer.told()] == [("content", "V")]


def test_a_prompt_from_outside_where_each_layer_is_divided_anew_in_its_own_graph():
    """All layers are in one tensor: the first one's graph notices the prompt, and the second one's judges it, too."""
    backend, kv = CanaryBackend(CanaryConfig(inner="eager")), torch.zeros(2, 2, B, S, D)

    def write(x, kv, layer, position):
        kv[layer, 0].select(1, position).copy_(x * 2)
        kv[layer, 1].select(1, position).copy_(x * 3)
        return x + 1

    def first(x, kv, position):
        return write(x, kv, 0, position)

    def second(x, kv, position):
        return write(x, kv, 1, position)

    layers = [torch.no_grad()(torch.compile(f, backend=backend, fullgraph=True)) for f in (first, second)]
    for layer in layers:
        layer(torch.randn(B, D), kv, 0)
    kv[:, :, :, :4] = torch.randn(2, 2, B, 4, D)
    for layer in layers:
        layer(torch.randn(B, D), kv, 4)
    assert backend.session.violations() == []
    kv.data[1, 0, 1, 2] += 1
    with pytest.raises(kvcanary_fx.KVCacheViolation) as caught:
        for layer in layers:
            layer(torch.randn(B, D), kv, 5)
    assert {(v.check, v.row, v.index) for v in caught.value.violations} == {("content", 1, 2)}


class KeysGuardedLater:
    """Slots are positions of all sequences; a graph breaks behind the write of K.

    The first step's position is a constant in its graphs, and that of K takes the one slot for all of the cache.
    """

    def __init__(self, layers: int):
        self.caches = [torch.zeros(12, B, H, 2 * D) for _ in range(layers)]
        self.backend, self.length = CanaryBackend(CanaryConfig(inner="eager")), 0
        self.layer = torch.no_grad()(torch.compile(self._layer, backend=self.backend))
        self.pause = torch._dynamo.disable(lambda: None)

    def _layer(self, x, cache, pos, mask):
        cache.narrow(-1, 0, D).select(0, pos).copy_(x[0])
        self.pause()
        cache.narrow(-1, D, D).select(0, pos).copy_(x[0] + 1)
        k, v = (half.permute(1, 2, 0, 3) for half in cache.split(D, -1))
        return x + torch.tanh(F.scaled_dot_product_attention(x.permute(1, 2, 0, 3), k, v, mask)).permute(2, 0, 1, 3)

    def step(self, x: torch.Tensor) -> list[tuple[str, int]]:
        """One token for each sequence, whose first layer stores ``x``; the halves and slots of its violations."""
        pos, self.length = self.length, self.length + 1
        known = len(self.backend.session.violations())
        with contextlib.suppress(kvcanary_fx.KVCacheViolation):
            for cache in self.caches:
                x = self.layer(x, cache, pos, (torch.arange(12) <= pos)[None])
        return [(v.half[0], v.slot) for v in self.backend.session.violations()[known:]]


@pytest.mark.parametrize("layers", [1, 2])
def test_sequences_exchanged_where_k_is_guarded_later_than_v(layers):
    model = KeysGuardedLater(layers)
    for _ in range(4):
        assert model.step(torch.randn(1, B, H, D)) == []
    for cache in model.caches:  # an op that counts
        cache.copy_(cache.flip(1))
    assert model.step(torch.randn(1, B, H, D)) == []


def test_a_prompt_that_begins_like_the_last_one_where_k_is_guarded_later_than_v():
    model = KeysGuardedLater(2)
    for _ in range(4):
        assert model.step(torch.randn(1, B, H, D)) == []
    model.caches[0][1:4] = torch.randn(3, B, H, 2 * D)  # its first token is the same, so its first layer's K and V
    model.caches[1][:4] = torch.randn(4, B, H, 2 * D)
    assert model.step(torch.randn(1, B, H, D)) == []
    model.caches[1][1, ..., D:] += 1
    assert model.step(torch.randn(1, B, H, D)) == [("V", 1)]
