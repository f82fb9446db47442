"""What a declaration means beside the table: what is refused, what is off, and how groups of layers differ."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
import torch
from forms import FORMS, PAGE
from gpu_on_cpu import use_gpu_kernels
from groups import SLOTS, Compressed, Cross, Group, Mapped, Neighbour, Ring, State
from opaque_engine import DIM, HEADS, METADATA, Model
from rig import Rig
from shapes import SHAPES, WINDOW

import kvcanary_fx
from kvcanary_fx import Batch, EngineError, KVCacheViolation, KVPool
from kvcanary_fx.config import CanaryConfig
from kvcanary_fx.engine.layers import EagerLayers
from kvcanary_fx.engine.layouts.base import Layout
from kvcanary_fx.proof import doctor
from kvcanary_fx.proof.scratch_tensors import scaled_down

TABLE = torch.zeros(4, 16, dtype=torch.int32)


def kv(*shape: int, dtype: torch.dtype = torch.float32) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype))]


def test_examples_of_the_documentation_run():
    page = Path(__file__).parents[2] / "docs" / "layouts.md"
    names: dict[str, object] = {}
    blocks = re.findall(r"<!-- run -->\n```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert len(blocks) >= 13
    for block in blocks:
        exec(block, names)


# ---- what is refused

REFUSED = {
    "ring without a window": (dict(ring=True), "a window that fits"),
    "window of no tokens": (dict(window=0), "at least 1"),
    "negative window": (dict(window=-1), "at least 1"),
    "chunk of no tokens": (dict(chunk=0), "at least 1"),
    "ring of chunks": (dict(ring=True, window=4, chunk=8), "a window"),
    "compressed chunk": (dict(tokens_per_slot=4, chunk=8), "count tokens"),
    "padding row that does not exist": (dict(padding_row=4), "padding_row=4"),
    "ring shorter than its window": (dict(ring=True, window=17), "a window that fits"),
    "state with a row of slots": (dict(state=True), r"\[requests, 1\]"),
    "compressed window": (dict(tokens_per_slot=4, window=8), "count tokens"),
    "compressed draft": (dict(tokens_per_slot=4, token_offset=1), "count tokens"),
    "ring of compressed slots": (dict(tokens_per_slot=4, ring=True, window=4), "one of them only"),
    "no tokens in a slot": (dict(tokens_per_slot=0), "at least one"),
    "heads first without pages": (dict(order="HND"), "paged"),
    "no K and V axis": (dict(kv_axis=1), "kv_axis"),
    "scales of integers": (dict(scales={"s": torch.zeros(2, dtype=torch.int64)}), "floating-point"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_layout_is_refused_with_its_reason(name):
    settings, reason = REFUSED[name]
    with pytest.raises(EngineError, match=reason):
        KVPool(kv(8, 3, 4), TABLE, **settings)


def test_scale_that_a_page_shares_is_refused():
    layer = (*kv(32, 2, 4, dtype=torch.float8_e4m3fn)[0], torch.zeros(8, 2))
    with pytest.raises(EngineError, match="a scale that several slots share"):
        KVPool([layer], TABLE)


def test_wide_integers_are_refused_with_the_remedy():
    with pytest.raises(EngineError, match=r"view\(torch.uint8\)"):
        KVPool(kv(8, 4, dtype=torch.int32), TABLE)


def test_graph_that_writes_a_part_of_a_declared_tensor_is_refused():
    """The declared half would have no fingerprints, and until now lost its shadow without a word."""
    whole = Group("kv", "mla in parts")
    whole.form = FORMS["mla in parts"]
    pool = KVPool(whole.kv, whole.table, name="kv", layer_names=whole.layer_names)
    whole.pool = lambda: pool
    rig = Rig([whole])
    with pytest.raises(EngineError, match=r"declares these bytes as K of kv\.0, 48 slots of 40 bytes"):
        rig.run("A", 3)


def test_page_table_of_rings_cannot_be_compared():
    rig = Rig([Group("full", "nhd"), Ring("swa", "nhd", WINDOW)])
    session = rig.session
    batch = Batch([1], [0], [1], [0], request_ids=["A"])
    refused = pytest.raises(EngineError, match="rings or states")
    with session.step({**vars(batch), "ring_slots": [0]}), session.forward(), refused:
        session.check_reads(TABLE, torch.tensor([1]), pool="swa")


@pytest.mark.parametrize("shape", SHAPES)
def test_doctor_proves_the_checks_on_the_layout(shape):
    """Of every pool of the shape, with its own way to number tokens and its own strides."""
    for group in SHAPES[shape]():
        findings = list(doctor.examine(group.pool(), CanaryConfig(inner="eager")))
        assert len(findings) >= 11
        assert [f for f in findings if not f.ok] == [], group.name


@pytest.mark.parametrize(
    ("layout", "shape"), [(State, "recurrent"), (Compressed, "DeepSeek"), (Ring, "sliding window, r")]
)
def test_doctor_sees_a_layout_whose_plans_are_wrong(layout, shape, monkeypatch):
    """The scratch pool is of the user's own layout: on one with a slot per token nothing would be found."""
    group = next(g for g in SHAPES[next(n for n in SHAPES if n.startswith(shape))]() if isinstance(g, layout))
    pool = group.pool()
    monkeypatch.setattr(type(pool.layout), "narrowed", Layout.narrowed)
    monkeypatch.setattr(type(pool.layout), "ring", False)
    assert [f for f in doctor.examine(pool, CanaryConfig(inner="eager")) if not f.ok]


def test_scratch_tensors_lie_as_the_real_ones_do():
    joint, heads_first = torch.zeros(48, 3, 10), torch.zeros(3, 48, 4).transpose(0, 1)
    raw = torch.zeros(12, PAGE * 584, dtype=torch.uint8)
    rows, scales = (raw.as_strided((12, PAGE, n), (PAGE * 584, n, 1), at) for n, at in ((576, 0), (8, PAGE * 576)))
    k, v = joint[..., :6], joint[..., 6:]
    made = scaled_down([[k, v], [k, v], [heads_first]], 5)
    assert [[t.stride() for t in layer] for layer in made[:2]] == [[k.stride(), v.stride()]] * 2
    assert made[0][1].data_ptr() - made[0][0].data_ptr() == v.data_ptr() - k.data_ptr()
    assert made[0][0] is made[1][0]
    assert (made[2][0].shape, made[2][0].stride()) == ((5, 3, 4), (4, 20, 1))
    packed, beside = scaled_down([[rows, scales]], 2)[0]
    assert (packed.stride(), beside.stride()) == (rows.stride(), scales.stride())
    assert beside.data_ptr() - packed.data_ptr() == PAGE * 576
    assert beside.untyped_storage().nbytes() == 2 * PAGE * 584


# ---- one storage, several layers or pools


def test_slot_of_a_shared_storage_that_both_groups_hand_out_is_reported():
    full = Group("full", "nhd")
    rig = Rig([full, Neighbour("swa", full, WINDOW)])
    rig.run("A", 3)
    taken = int(full.table[1, 1])
    rig.session.pools["swa"].allocate([taken], owner="A")
    assert [(v.check, v.why, v.slot, v.pool) for v in rig.found()] == [("owner", "DOUBLE_ALLOCATE", taken, "swa")]


def test_layer_of_a_shared_storage_that_uses_the_other_groups_slots_is_reported():
    """The bytes are right for somebody: only the plan of the layer's own group tells."""
    full = Group("full", "nhd")
    swa = Neighbour("swa", full, WINDOW)
    rig = Rig([full, swa])
    rig.run("A", 9)
    rig.run("A", received=lambda name, slots: slots if name == "full" else [int(full.table[1, 9])])
    told = {(v.check, v.pool, v.layer) for v in rig.found() if v.check == "index"}
    assert told == {("index", "swa", "swa.0"), ("index", "swa", "swa.1")}


def test_opaque_layer_that_reads_anothers_cache_records_nothing():
    """Its key and value are never stored, and what the first layer stored must not be blessed a second time."""
    pair = tuple(torch.zeros(16, HEADS, DIM) for _ in range(2))
    table, names = torch.zeros(3, 8, dtype=torch.int32), ["layers.0", "layers.1"]
    METADATA.pools = dict.fromkeys(names, pair)
    spare = tuple(torch.zeros(16, HEADS, DIM) for _ in range(2))
    METADATA.redirect = {}
    session = kvcanary_fx.install_canary(
        KVPool([pair, pair], table, layer_names=names), inner="eager", mode="log", health_every=1
    )
    session.mark_ready()
    METADATA.pools["layers.1"] = spare  # where the toy's op, which always writes, does no harm
    model = torch.compile(Model(2, False), backend=session.backend, dynamic=True)
    for start, slots in ((0, [1, 2]), (2, [3])):
        session.pool.allocate(slots, owner="A")
        end = start + len(slots)
        table[1, start:end] = torch.tensor(slots, dtype=torch.int32)
        METADATA.slots, METADATA.reads = torch.tensor(slots), table[1, :end].long()
        batch = Batch(list(range(start, end)), slots, [1], [start], [len(slots)], request_ids=["A"])
        with session.step(batch), session.forward(), torch.no_grad():
            model(torch.randn(len(slots), HEADS * DIM))
    assert session.violations() == []
    assert session.stats().recorded == 2 * 3  # K and V of three tokens, once
    assert len(session.pool.halves) == 2
    assert session.uncovered == []


# ---- windows whose slots are found through a map


def mapped() -> tuple[Rig, Mapped]:
    """Request A with nine tokens, of which a window still sees some, in a pool behind a map."""
    full = Group("full", "nhd")
    swa = Mapped("swa", "nhd", full, WINDOW)
    rig = Rig([full, swa])
    rig.run("A", 9)
    return rig, swa


@pytest.mark.parametrize("back", [1, WINDOW - 1], ids=["newest", "oldest"])
@pytest.mark.parametrize("free", [True, False], ids=["and the slot freed", "alone"])
def test_map_entry_cleared_while_the_window_still_reads_it_is_reported(back, free):
    """As a prefix cache does that frees a page of the window one step too early."""
    rig, swa = mapped()
    full = int(swa.table[1, 9 - back])
    if free:
        swa.guard.release([int(swa.map[full])], owner="A")
    swa.map[full] = 0
    rig.run("A")
    found = [(v.check, v.why, v.position, v.pool, v.request) for v in rig.found()]
    assert found == [("bounds", "RESERVED_SLOT", 9 - back, "swa", "A")]


def test_map_entry_cleared_once_the_window_has_left_it_is_silent():
    rig, swa = mapped()
    left = swa.table[1, : 9 - WINDOW + 1].long()
    assert swa.map[left].tolist() == [0] * len(left)
    rig.run("A")
    assert rig.found() == []


@pytest.mark.parametrize("window", [1, WINDOW])
def test_newest_token_without_a_slot_is_reported_whatever_the_window(window):
    full = Group("full", "nhd")
    swa = Mapped("swa", "nhd", full, window)
    rig = Rig([full, swa])
    rig.run("A", 3)
    rig.run("A", late=lambda: swa.map.__setitem__(int(swa.table[1, 3]), 0))
    found = [(v.check, v.why, v.phase, v.position) for v in rig.found() if v.pool == "swa" and v.check == "bounds"]
    assert found == [("bounds", "RESERVED_SLOT", "pre", 3)]


# ---- scales per tensor


def test_scale_that_changes_is_reported_by_name():
    scale = torch.full((2, 3), 0.5)[:, 1]
    rig = Rig([Group("kv", "fp8", scales={"kv.0 K": scale})])
    rig.run("A", 3)
    assert rig.found() == []
    scale[1] *= 2
    rig.run("A")
    rig.run("A")
    assert [(v.check, v.layer, v.half) for v in rig.found()] == [("content", "kv.0 K", "scale")]
    scale[0] *= 2
    rig.session.pool.scales.adopt()
    rig.run("A")
    assert len(rig.found()) == 1


# ---- slots of several tokens


def test_report_about_a_compressed_slot_names_the_token_that_completes_it():
    group = Compressed("c4", "584 bytes", 4)
    rig = Rig([group])
    rig.run("A", 9)
    rig.flip(group, 0, 0, int(group.table[1, 1]))
    rig.run("A")
    violation = rig.found()[0]
    assert (violation.position, violation.token) == (7, rig.history("A")[7])


@pytest.mark.parametrize("off", [-1, 1])
def test_wrong_position_of_a_token_that_completes_a_slot_is_reported(off):
    group = Compressed("c4", "584 bytes", 4)
    rig = Rig([group])
    rig.run("A", 4)
    rig.run("A", 4, positions=[p + off for p in range(4, 8)])
    assert [(v.check, v.slot) for v in rig.found()] == [("chain", int(group.table[1, 1]))]


def test_compressed_slot_that_a_padding_row_completes_is_reported():
    row, slots = torch.zeros(2, 4, dtype=torch.int32), torch.zeros(16, 4)
    session = kvcanary_fx.install_canary(
        KVPool([(slots,)], row, tokens_per_slot=2, padding_row=0), inner="eager", mode="log"
    )
    session.mark_ready()
    session.pool.allocate([3], owner="A")
    for taken in (0, 3):
        with session.step(Batch([5, 6], [0, taken], [0], [0], [2], request_ids=["A"])), session.forward():
            pass
    assert [(v.why, v.slot, v.request) for v in session.violations()] == [("PADDING_WRITES", 3, "A")]


def test_write_that_gets_only_the_completed_slots_is_compared_with_them():
    """Some kernels get a slot for each token, others only those of the tokens that complete one."""
    group = Compressed("c4", "584 bytes", 4)
    rig = Rig([group])
    rig.run("A", 9, received=lambda _, slots: slots)
    compact = Compressed("c4", "584 bytes", 4)
    plan = compact.plan

    def only_completed(*args):
        work = plan(*args)
        work.taken = [i for i, s in enumerate(work.planned) if s]
        work.written = [s for s in work.planned if s]
        return work

    compact.plan = only_completed
    rig = Rig([compact])
    rig.run("A", 9)
    assert rig.found() == []
    rig.run("A", 7, received=lambda _, slots: slots[::-1])
    assert {v.check for v in rig.found()} == {"index"}


class TwoTokens:
    """Layers that run from Python, over slots of two tokens each: request A has the slots 5 and 6."""

    def __init__(self):
        self.slots, row = torch.zeros(16, 4), torch.zeros(2, 4, dtype=torch.int32)
        row[1, :2] = torch.tensor([5, 6])
        pool = KVPool([(self.slots,)], row, slots_from="c2", tokens_per_slot=2)
        self.session = kvcanary_fx.install_canary(pool, inner="eager", mode="log")
        self.layers = EagerLayers(self.session)
        self.session.mark_ready()
        self.session.pool.allocate([5, 6], owner="A")

    def step(self, stored, planned, received=()):
        added = len(planned)
        batch = dict(
            input_ids=list(range(added)), c2=planned, request_rows=[1], prefix_lens=[stored], extend_lens=[added],
            request_ids=["A"],
        )  # fmt: skip
        with self.session.step(batch), self.session.forward():
            self.layers.verify("layers.0")
            done = [slot for slot in planned if slot]
            self.slots[done] = torch.randn(len(done), 4)
            if received:
                self.layers.record("layers.0", slots=torch.tensor(received))

    def told(self):
        return [(v.check, v.why, v.slot, v.position) for v in self.session.violations()]


@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_layer_that_runs_from_python_may_get_a_slot_for_each_token(monkeypatch, kernels):
    """Seen: it was compared with the slots that are completed, as if it were these."""
    if kernels == "triton":
        use_gpu_kernels(monkeypatch.setattr)
    for received in ([5, 6], [0, 5, 0, 6], [-1, 5, 0, 6]):
        engine = TwoTokens()
        engine.step(0, [0, 5, 0, 6], received)
        assert engine.told() == []
    for received in ([6, 5], [0, 6, 0, 5]):
        engine = TwoTokens()
        engine.step(0, [0, 5, 0, 6], received)
        assert [told[:3] for told in engine.told()] == [
            ("index", "NOT_THE_PLANNED_SLOT", 5),
            ("index", "NOT_THE_PLANNED_SLOT", 6),
        ]


@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize("added", [0, 1])
def test_step_that_completes_no_slot_reads_what_the_request_has(monkeypatch, kernels, added):
    """Seen: where no request added a token, the slots that it read were counted by its tokens."""
    if kernels == "triton":
        use_gpu_kernels(monkeypatch.setattr)
    engine = TwoTokens()
    engine.step(0, [0, 5, 0, 6], [5, 6])
    engine.step(4, [0] * added)
    assert engine.told() == []
    engine.slots.view(torch.int32)[6, 2] ^= 1 << 7
    engine.step(4, [0] * added)
    assert [(check, slot, position) for check, _, slot, position in engine.told()] == [("content", 6, 3)]


def test_c128_over_three_hundred_tokens():
    row, slots = torch.zeros(2, 4, dtype=torch.int32), torch.zeros(16, 584, dtype=torch.uint8)
    session = kvcanary_fx.install_canary(
        KVPool([(slots,)], row, tokens_per_slot=128, slots_from="c128"), inner="eager", mode="log"
    )
    session.mark_ready()

    def write(pool, rows, where):
        pool[where] = rows
        return pool[where].sum()

    model, tokens, had = torch.compile(write, backend=session.backend), list(range(301)), 0
    for start, stop, known in ((0, 100, 300), (100, 130, 300), (130, 131, 300), (131, 300, 300), (300, 301, 200)):
        done = [p // 128 + 5 for p in range(start, stop) if p % 128 == 127]
        if done:
            session.pool.allocate(done, owner="A")
            row[1, had : had + len(done)] = torch.tensor(done, dtype=torch.int32)
            had += len(done)
        planned = [p // 128 + 5 if p % 128 == 127 else 0 for p in range(start, stop)]
        batch = dict(
            input_ids=tokens[start:stop], c128=planned, request_rows=[1], prefix_lens=[start],
            extend_lens=[stop - start], request_ids=["A"], positions=list(range(start, stop)),
            history=torch.tensor([tokens[:known] + [999] * (300 - known)]), history_lens=[known],
        )  # fmt: skip
        with session.step(batch), session.forward():
            model(slots, torch.randint(0, 99, (len(planned), 584), dtype=torch.uint8), torch.tensor(planned))
    assert session.violations() == []
    space = session.pool.space
    assert space.tokens[[5, 6]].tolist() == [127, 255]
    assert space.positions[[5, 6]].tolist() == [0, 1]


def test_plan_with_fewer_tokens_stays_at_its_addresses():
    """A captured graph reads the plan where it was."""
    group = State("state", "states")
    rig = Rig([Group("full", "nhd"), group], max_tokens=16, max_requests=4)
    addresses = []
    for count in (9, 1):
        rig.run("A", count)
        plan = rig.session.health.last_plans[rig.session.pools["state"].space.space_id]
        assert plan.taken is not None
        tensors = (
            plan.slots,
            plan.tokens,
            plan.prefix_lens,
            plan.extend_lens,
            plan.counts,
            plan.taken,
            plan.real_slots,
        )
        addresses.append([t.data_ptr() for t in tensors])
    assert addresses[0] == addresses[1]


# ---- caches that are written once


def test_second_write_of_a_cross_attention_cache_is_reported():
    cross = Cross("cross", "nhd")
    rig = Rig([Group("self", "nhd"), cross])
    rig.run("A", 9)
    slots = cross.table[1, :4].tolist()
    again = Batch([1, 2, 3, 4], slots, [1], [0], [4], request_ids=["A"])
    rig.run("A", encoder=again)
    assert {(v.check, v.why, v.slot) for v in rig.found()} == {("owner", "WRITTEN_BEFORE", s) for s in slots}


def test_second_write_whose_tokens_are_wrong_too_raises_the_violation():
    """The rows of the ring have two checks each; which of them leads was not said, and the report itself failed."""
    cross = Cross("cross", "nhd")
    rig = Rig([Group("self", "nhd"), cross], mode="raise")
    rig.run("A", 9)
    again = Batch([1, 2, 3, 4], cross.table[1, :4].tolist(), [1], [0], [4], request_ids=["A"])
    again.history, again.history_lens = torch.full((1, 4), 99), [4]
    with pytest.raises(KVCacheViolation, match="written once") as caught:
        rig.run("A", encoder=again)
    assert {(v.check, v.also) for v in caught.value.violations} == {("owner", ("token",))}


def test_batch_without_the_field_of_a_pools_own_batch_is_an_error():
    rig = Rig([Group("self", "nhd"), Cross("cross", "nhd")])
    with pytest.raises(EngineError, match="'encoder'"), rig.session.step(Batch([1], [1], [1], [0])):
        pass


# ---- how windows differ


def test_window_report_counts_what_differs_and_what_left_the_window(caplog):
    full = Group("full", "nhd")
    rig = Rig([full, Mapped("swa", "nhd", full, WINDOW), Ring("ring", "nhd", WINDOW)], window_report_every=11)
    rig.run("A", 9)
    early = rig.session.window_report()
    assert [g.verified for g in early.groups] == [0, 0, 0]
    with caplog.at_level(logging.INFO, logger="kvcanary"):
        for _ in range(10):
            rig.run("A")
    report = rig.session.window_report()
    whole, swa, ring = report.groups
    assert (report.step, report.base) == (11, "full")
    assert (whole.inside, whole.outside, whole.pairs, whole.verified) == (19, 0, 0, sum(range(9, 19)))
    assert (swa.inside, swa.outside, swa.held) == (WINDOW - 1, 14, 0)
    assert swa.verified == ring.verified == 10 * (WINDOW - 1)
    tokens = range(14, 19)
    assert swa.pairs == len(tokens)
    expected = [int(full.table[1, p]) != int(rig.groups[1].map[full.table[1, p].long()]) for p in tokens]
    assert swa.differ == sum(expected)
    lines = [r.getMessage() for r in caplog.records if "kvcanary.windows" in r.getMessage()]
    assert len(lines) == 1
    assert "step=11 base=full" in lines[0]
    assert f"swa.pairs=5 swa.differ={swa.differ}" in lines[0]


def test_window_report_counts_tokens_that_are_held_too_long():
    full = Group("full", "nhd")
    swa = Mapped("swa", "nhd", full, WINDOW)
    swa.after = lambda *_: None  # the engine never lets go
    rig = Rig([full, swa])
    rig.run("A", 9)
    for _ in range(3):
        rig.run("A")
    assert (rig.session.window_report().groups[1].outside, rig.session.window_report().groups[1].held) == (7, 7)


def test_window_report_shows_a_map_that_changes_nothing():
    full = Group("full", "nhd")
    swa = Mapped("swa", "nhd", full, WINDOW)
    swa.free.reverse()  # both pools hand out the same numbers
    rig = Rig([full, swa])
    rig.run("A", 5)
    group = rig.session.window_report().groups[1]
    assert (group.pairs, group.differ) == (5, 0)


def test_summary_tells_the_layout():
    text = Rig(SHAPES["DeepSeek-V4 groups"]()).session.summary()
    assert f"pool window: {SLOTS} slots, 2 layers, 2 tensors, window 6, rings of 6" in text
    assert "4 tokens a slot, rows of 584 bytes, 584 bytes apart" in text
    pages = Rig(SHAPES["HND pages"]()).session.summary()
    assert f"pages of {PAGE}, HND" in pages


# ---- a rolling cache, of which nothing is declared


class Rolling(torch.nn.Module):
    """Hugging Face's sliding layer: once it is full, every slot moves in each step."""

    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(8, 8)

    def forward(self, x, keys, position):
        new = self.qkv(x)
        rolled = keys.roll(-1, dims=2) if position >= WINDOW else keys.clone()
        rolled[:, :, min(position, WINDOW - 1)] = new
        keys.copy_(rolled)
        return keys.sum()


def test_rolling_cache_is_guarded_without_a_declaration():
    backend = kvcanary_fx.CanaryBackend(CanaryConfig(mode="log", inner="eager"))
    model, keys = torch.compile(Rolling(), backend=backend, dynamic=True), torch.zeros(1, 2, WINDOW, 8)
    with torch.no_grad():
        for position in range(WINDOW + 4):
            model(torch.randn(1, 2, 8), keys, position)
        assert backend.session.violations() == []
        keys.view(torch.int32)[0, 1, 3, 5] ^= 1 << 20
        model(torch.randn(1, 2, 8), keys, WINDOW + 4)
    assert [(v.check, v.index) for v in backend.session.violations()] == [("content", 3)]
