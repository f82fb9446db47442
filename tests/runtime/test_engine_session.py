"""An engine's session: connecting, the life of slots, what is reported, and what is refused."""

from __future__ import annotations

import dataclasses
import threading

import pytest
import torch
from gpu_on_cpu import use_gpu_kernels
from torch.utils._python_dispatch import TorchDispatchMode
from toy import Toy, prefilled

import kvcanary_fx
from kvcanary_fx import Batch, EngineError, KVCacheViolation, KVPool, SessionStateError, StepInputError
from kvcanary_fx.engine.prefixes import Prefix
from kvcanary_fx.engine.step_inputs import StepInputs
from kvcanary_fx.errors import CoverageError, UnrecordedLayersError
from kvcanary_fx.kernels.ring import Word, forward_and_step


def told(toy: Toy) -> list[tuple[str, str, int, str | int | None]]:
    return [(v.check, v.why, v.slot, v.request) for v in toy.found()]


def flip(toy: Toy, layer: int, half: int, slot: int, word: int = 2) -> None:
    toy.kv[layer][half].view(torch.int32)[slot, 0, word] ^= 1 << 7


# ---- a legal life is silent


def test_requests_that_share_a_prefix_end_and_reuse_slots_are_silent():
    toy = prefilled()
    toy.run({"A": [6]})
    prompt = toy.requests["A"].tokens[:3] + [20, 21]
    toy.pool.share([3, 4, 5], owner="B")
    toy.add("B", prompt, prefix=[3, 4, 5])
    toy.run({"A": [7], "B": [8]})
    toy.done("A", shared=[3, 4, 5])
    toy.pool.release([3, 4, 5], owner="A")
    toy.run({"B": [9]})
    toy.done("B")
    toy.add("C", [1, 2, 3])
    toy.run({"C": [3, 9, 6]})
    assert toy.found() == []
    stats = toy.session.stats()
    assert (stats.engine_steps, stats.slots, stats.violations) == (5, 3, 0)
    assert stats.slots_checked == 3 + 7 + 4


@pytest.mark.parametrize(("layer", "half"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_flipped_bit_is_found_with_layer_half_request_position_and_token(layer, half):
    toy = prefilled()
    flip(toy, layer, half, 4)
    toy.run({"A": [6]})
    (v,) = toy.found()
    assert (v.check, v.phase, v.layer, v.half) == ("content", "pre", f"layers.{layer}", "KV"[half])
    assert (v.slot, v.position, v.token, v.request) == (4, 1, 6, "A")


@pytest.mark.parametrize("shared", [True, False])
def test_a_prefix_that_was_idle_is_compared_by_the_first_that_reads_it_whatever_the_share(shared):
    """A block of a prefix cache may have been idle for long: of those that are read on, each step compares a few."""
    toy = prefilled(verify_fraction="1/512")
    if not shared:
        toy.done("A", shared=[3, 4, 5])
        toy.pool.hand_over([3, 4, 5], owner="the cache")
    for slot in (3, 4, 5):
        flip(toy, 0, 0, slot)
    (toy.pool.share if shared else toy.pool.hand_over)([3, 4, 5], owner="B")
    toy.add("B", [5, 6, 7, 20, 21, 22], prefix=[3, 4, 5])
    toy.run({"B": [8]})
    assert {(v.check, v.slot) for v in toy.found()} == {("content", slot) for slot in (3, 4, 5)}
    for slot in (3, 4, 5):
        flip(toy, 1, 1, slot)
    toy.run({"B": [9]})
    assert len(toy.found()) == 3  # its turn has not come


@pytest.mark.parametrize("first", [True, False], ids=["in front", "behind"])
@pytest.mark.parametrize("row", [0, None], ids=["declared", "not declared"])
def test_row_that_means_padding_is_silent_wherever_it_stands(first, row):
    """As SGLang's row 0: what such an entry seems to read and write is nobody's."""
    toy = prefilled(pools=lambda toy: (KVPool(toy.kv, toy.table, padding_row=row),))
    toy.take("A", [6])
    fields = dict(input_ids=[0, 8], slots=[0, 6], positions=[5, 3], request_rows=[0, 1], prefix_lens=[5, 3])
    fields |= dict(request_ids=["padding", "A"], history=[[1] * 7, toy.requests["A"].tokens], history_lens=[7, 7])
    batch = Batch(**{k: v if first else v[::-1] for k, v in fields.items()})
    toy.forward(batch)
    toy.requests["A"].stored += 1
    assert (told(toy) == []) == (row == 0)
    flip(toy, 0, 0, 6)
    toy.run({"A": [7]})
    assert told(toy)[-1] == ("content", None, 6, "A")


def test_request_that_got_the_padding_row_is_named_before_it_writes():
    toy = prefilled(pools=lambda toy: (KVPool(toy.kv, toy.table, padding_row=0),))
    toy.take("A", [6])
    toy.forward(toy.plan({"A": [6]}, request_rows=[0]))
    (v,) = toy.found()
    assert (v.check, v.why, v.phase, v.slot, v.position, v.request) == ("bounds", "PADDING_WRITES", "pre", 6, 3, "A")
    assert "slot 6, which is not reserved" in v.explain()


@pytest.mark.parametrize("got", [0, 7], ids=["reserved", "not reserved"])
def test_write_of_a_padding_row_may_receive_any_reserved_slot(got):
    """What a store kernel gets for padding differs from the plan: a batch of a captured graph, filled once."""
    toy = prefilled(pools=lambda toy: (KVPool(toy.kv, toy.table, reserved=(0, 1), padding_row=0),))
    toy.take("A", [6])
    batch = toy.plan({"A": [6]})
    fields = dict(input_ids=[0, 8], slots=[1, 6], positions=[0, 3], request_rows=[0, 1], prefix_lens=[0, 3])
    fields |= dict(extend_lens=[1, 1], request_ids=["padding", "A"], history=None, history_lens=None)
    toy.forward(dataclasses.replace(batch, **fields), slots=[got, 6])
    expected = [] if got == 0 else [("index", "NOT_THE_PLANNED_SLOT", 1, "padding")] * 4
    assert told(toy) == expected


def test_bytes_that_nobody_is_about_to_read_are_the_sweeps_business():
    toy = prefilled()
    toy.add("B", [1, 2])
    toy.run({"B": [9]})
    flip(toy, 1, 1, 4)
    toy.run({"B": [10]})
    assert toy.found() == []
    toy.session.sweep.run()
    (v,) = toy.found()
    assert (v.check, v.phase, v.layer, v.half, v.slot, v.request) == ("content", "sweep", "layers.1", "V", 4, "A")


def test_a_sweep_that_the_engine_runs_itself_is_no_check_that_is_off():
    toy = prefilled()
    assert "off sweep: no schedule" in toy.session.summary()
    toy.session.sweep.run()
    text = toy.session.summary()
    assert "off sweep" not in text
    assert "owner, token, sweep, bytes of" in text


def test_sweep_in_slices_comes_round():
    toy = prefilled()
    toy.session.sweep.budget = 1
    flip(toy, 0, 0, 5)
    looked_at = [toy.session.sweep.run() for _ in range(3)]
    assert looked_at == [4, 4, 4]  # fingerprints of one slot
    assert [v.slot for v in toy.found()] == [5]


def test_slices_follow_one_another_and_go_round():
    toy = prefilled()
    toy.session.sweep.budget = 2
    found = []
    for slot in (5, 3):  # slots 3 and 4, then 5 and again 3
        flip(toy, 0, 0, slot)
        toy.session.sweep.run()
        found.append([(v.slot, v.phase) for v in toy.session.violations()])
    assert found == [[], [(5, "sweep"), (3, "sweep")]]


def test_a_scheduled_sweep_runs_every_so_many_steps():
    toy = prefilled(sweep_every=3)
    runs = [toy.session.sweep.runs]
    for slot in range(6, 10):
        toy.run({"A": [slot]})
        runs.append(toy.session.sweep.runs)
    assert runs == [0, 0, 1, 1, 1]


def test_nan_in_a_reserved_slot_is_found_by_the_sweep():
    """Nobody reads the slot as a token, but a masked tile does, and 0 * NaN is NaN."""
    toy = prefilled()
    toy.kv[1][0][0, 0, 3] = float("nan")
    toy.session.sweep.run()
    (v,) = toy.found()
    assert (v.check, v.phase, v.layer, v.half, v.slot) == ("poison", "sweep", "layers.1", "K", 0)


def test_nan_where_padding_is_written_and_nobody_reads_harms_nobody():
    """The memory of such a slot may never have been filled: transformers before 5.18 makes it by torch.empty."""
    toy = prefilled(pools=lambda toy: (KVPool(toy.kv, toy.table, reserved=(0, 1), never_read=(1,)),))
    toy.kv[1][0][1] = float("nan")
    toy.session.sweep.run()
    assert toy.found() == []
    toy.kv[1][0][0] = float("nan")
    toy.session.sweep.run()
    assert [(v.check, v.slot) for v in toy.found()] == [("poison", 0)]


def test_the_counts_are_logged_every_so_many_steps(caplog):
    toy = prefilled(stats_every=2)
    with caplog.at_level("INFO", logger="kvcanary"):
        for slot in range(6, 10):
            toy.run({"A": [slot]})
    lines = [r.getMessage() for r in caplog.records if "kvcanary.stats" in r.getMessage()]
    assert [line.split("engine_steps=")[1].split()[0] for line in lines] == ["2", "4"]


def test_a_sweep_over_the_rows_of_a_prefix_cache_finds_a_freed_slot():
    toy = prefilled()
    toy.pool.release([4], owner="A")
    toy.session.sweep.run([3, 4, 5])
    assert told(toy)[0][:3] == ("owner", "READ_AFTER_FREE", 4)


def test_verify_fraction_counts_steps_of_the_engine_whatever_runs_in_them():
    """Seen: with two calls of a graph in each step, half of the slots never had their turn at 1/2."""
    for slot in (3, 4):
        toy = prefilled(verify_fraction="1/2", width=20)
        toy.add("B", [1] * 8)
        toy.run({"B": [20]})
        toy.take("A", [6])
        toy.take("B", [21])
        first, second = toy.plan({"A": [6]}), toy.plan({"B": [21]})
        flip(toy, 0, 0, slot)
        for _ in range(2):
            with toy.session.step(first), torch.no_grad():
                for i, batch in enumerate((first, second)):
                    with toy.session.forward(i, batch):
                        toy.model(toy.kv, torch.zeros(1, 4), torch.tensor(batch.slots), torch.tensor([0]))
        assert [(v.check, v.slot) for v in toy.found()] == [("content", slot)]


def test_verify_fraction_keeps_its_bound():
    toy = prefilled(verify_fraction="1/4", width=20)
    flip(toy, 1, 0, 4)
    toy.requests["A"].tokens += [0] * 8
    steps = 0
    while not toy.found():
        toy.run({"A": [6 + steps]})
        steps += 1
    assert steps <= 4


# ---- behind a forward, and before a release


def while_it_runs(toy: Toy, act) -> None:
    """Let the toy's forwards do something besides, once they have read and written everything."""
    compiled = toy.model

    def model(*args):
        compiled(*args)
        act()

    toy.model = model


def test_a_stray_write_into_a_prefix_is_found_behind_the_forward_it_happened_in():
    toy = prefilled()
    toy.add("B", [1, 2])
    toy.run({"B": [9]})
    while_it_runs(toy, lambda: flip(toy, 1, 0, 4))
    toy.run({"A": [6], "B": [10]})
    (v,) = toy.found()
    assert (v.check, v.phase, v.layer, v.half) == ("content", "post", "layers.1", "K")
    assert (v.slot, v.position, v.token, v.request, v.step, v.forward) == (4, 1, 6, "A", 3, 0)
    assert "while the forward that reads it ran" in v.explain()
    while_it_runs(toy, lambda: flip(toy, 1, 0, 4))  # puts it right, and the other model makes it wrong again
    toy.run({"A": [7]})
    assert len(toy.found()) == 1


def test_what_was_told_before_a_forward_is_not_told_again_behind_it():
    toy = prefilled()
    flip(toy, 0, 1, 4)
    toy.run({"A": [6]})
    assert [(v.phase, v.slot) for v in toy.found()] == [("pre", 4)]


@pytest.mark.parametrize(
    ("settings", "phases"),
    [
        (dict(verify_after=False), ["pre"]),
        (dict(verify_fraction="1/2"), ["pre"]),
        (dict(verify_fraction="1/2", verify_after=True), ["post"]),
    ],
    ids=["switched off", "off where not everything is compared", "switched on"],
)
def test_verify_after_is_a_setting(settings, phases):
    toy = prefilled(width=20, **settings)
    while_it_runs(toy, lambda: flip(toy, 0, 0, 4) if toy.session.steps == 1 else None)
    toy.requests["A"].tokens += [0] * 4
    for slot in (6, 7, 8):
        toy.run({"A": [slot]})
    assert [v.phase for v in toy.found()] == phases


@pytest.mark.parametrize(("layer", "half"), [(0, 0), (0, 1), (1, 0), (1, 1)])
@pytest.mark.parametrize("fraction", ["1", "1/64"])
def test_bytes_that_changed_after_the_last_read_are_found_at_the_release(layer, half, fraction):
    toy = prefilled(verify_fraction=fraction)
    flip(toy, layer, half, 4)
    toy.done("A")
    (v,) = toy.found()
    assert (v.check, v.phase, v.layer, v.half) == ("content", "life", f"layers.{layer}", "KV"[half])
    assert (v.slot, v.position, v.request, v.forward) == (4, 1, "A", None)
    assert "when it was released" in v.explain()
    toy.add("B", [1, 2, 3])
    toy.run({"B": [4, 3]})
    toy.done("B")
    assert len(toy.found()) == 1


def test_a_shared_slot_is_looked_at_when_its_last_reference_goes():
    toy = prefilled()
    toy.pool.share([3, 4, 5], owner="B")
    flip(toy, 0, 0, 4)
    toy.pool.release([3, 4, 5], owner="A")
    assert toy.found() == []
    toy.pool.release([3, 4, 4, 99], owner="B")
    assert [(v.check, v.phase, v.slot) for v in toy.found()] == [
        ("owner", "life", 4), ("bounds", "life", 99), ("content", "life", 4)
    ]  # fmt: skip


def test_slots_that_were_forgotten_are_released_in_silence():
    toy = prefilled()
    toy.pool.forget([4])
    flip(toy, 0, 0, 4)
    toy.done("A")
    assert toy.found() == []


# ---- ops that do not show where they write


@torch.library.custom_op("test_engine_session::store", mutates_args=("k_pool", "v_pool"))
def store(x: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, given: torch.Tensor) -> None:
    k_pool[given] = x.unsqueeze(1)
    v_pool[given] = 2 * x.unsqueeze(1)


store.register_fake(lambda x, k_pool, v_pool, given: None)


def attend_by_store(pools, x, slots, reads):
    for k_pool, v_pool in pools:
        store(x, k_pool, v_pool, slots)
        x = x + k_pool[reads].mean() + v_pool[reads].mean()
    return x


def test_an_op_that_nobody_registered_may_write_the_planned_slots_and_the_reserved_ones_only():
    toy = prefilled(model=attend_by_store)
    toy.add("B", [1, 2, 3, 4])
    toy.run({"B": [8], "A": [6]})
    toy.take("B", [9])
    toy.forward(toy.plan({"B": [9]}), slots=[0])  # a store kernel may send what it pads with to a reserved slot
    assert toy.found() == []
    batch = toy.plan({"B": [9]})
    toy.forward(batch, slots=[4])  # A's
    found = toy.found()
    assert [(v.check, v.phase, v.layer, v.half, v.slot, v.request) for v in found] == [
        ("index", "post", f"layers.{layer}", half, 4, "A") for layer in (0, 1) for half in "KV"
    ]
    assert "changed a slot that no token of this step goes to" in found[0].explain()
    toy.run({"A": [7]})  # what was violated stays so: the bytes are still not A's
    assert {(v.check, v.slot, v.request) for v in toy.found()[4:]} == {("content", 4, "A")}


# ---- owners


@pytest.mark.parametrize(
    ("act", "expected"),
    [
        (lambda p: p.release([4], owner="A") or p.release([4], owner="A"), ("owner", "DOUBLE_FREE", 4, "A")),
        (lambda p: p.release([4, 4], owner="A"), ("owner", "DOUBLE_FREE", 4, "A")),
        (lambda p: p.release([4], owner="B"), ("owner", "FOREIGN_FREE", 4, "B")),
        (lambda p: p.allocate([4], owner="B"), ("owner", "DOUBLE_ALLOCATE", 4, "B")),
        (lambda p: p.share([7], owner="B"), ("owner", "SHARE_AFTER_FREE", 7, "B")),
        (lambda p: p.allocate([0], owner="B"), ("bounds", "RESERVED_SLOT", 0, "B")),
        (lambda p: p.release([99], owner="B"), ("bounds", "OUT_OF_RANGE", 99, "B")),
    ],
)
def test_what_an_allocator_may_not_do(act, expected):
    toy = prefilled()
    act(toy.pool)
    assert told(toy) == [expected]
    assert toy.found()[0].phase == "life"


@pytest.mark.parametrize(
    ("slots", "said"),
    [([7, 7], ["owner B, given to B"]), ([4, 4], ["owner A, given to B", "owner B, given to B"])],
    ids=["free before", "another's before"],
)
def test_a_slot_twice_in_one_allocation_is_in_use_by_whom_it_names(slots, said):
    toy = prefilled()
    toy.pool.allocate(slots, owner="B")
    assert [v.explain().split("in use (")[1].split(")")[0] for v in toy.found()] == said


def test_without_owners_a_content_report_names_the_request_that_read_the_slot():
    toy = prefilled(pools=lambda toy: (KVPool(toy.kv, toy.table, allocations=False),))
    toy.add("B", [1, 2, 3])
    toy.run({"B": [9]})
    flip(toy, 0, 0, 4)
    toy.run({"B": [10], "A": [6]})
    assert [(v.check, v.slot, v.request) for v in toy.found()] == [("content", 4, "A")]


def test_without_owners_the_sweep_names_nobody_whose_slot_was_not_read_last():
    toy = prefilled(pools=lambda toy: (KVPool(toy.kv, toy.table, allocations=False),))
    toy.add("B", [1, 2, 3])
    toy.run({"B": [9]})
    flip(toy, 0, 0, 4)
    toy.session.sweep.run()
    assert [(v.check, v.slot, v.request) for v in toy.found()] == [("content", 4, None)]


def test_a_batch_that_does_not_say_whose_its_requests_are_is_no_stranger_in_its_own_slots():
    toy = prefilled()
    toy.run({"A": [6]}, request_ids=None)
    assert toy.found() == []
    toy.pool.release([4], owner="A")
    toy.run({"A": [7]}, request_ids=None)
    assert told(toy) == [("owner", "READ_AFTER_FREE", 4, None)]


def test_an_engine_that_does_not_report_allocations_has_no_owner_check():
    toy = Toy(pools=lambda toy: (KVPool(toy.kv, toy.table, allocations=False),))
    toy.add("A", [5, 6, 7, 8])
    toy.pool.allocate = lambda slots, owner: None
    toy.run({"A": [3, 4, 5]})
    toy.run({"A": [6]})
    assert toy.found() == []
    assert "off owner" in toy.session.summary()


def test_summary_names_pools_and_what_is_off():
    text = prefilled(checks=("content", "bounds", "token")).session.summary()
    assert "checks content, bounds, token" in text
    assert "pool kv: 24 slots, 2 layers, 4 tensors" in text
    toy = Toy(pools=lambda toy: (KVPool(toy.kv, toy.table, allocations=False, window=4),))
    assert "4 tensors, window 4, allocations not reported, so owner is off" in toy.session.summary()


def test_summary_names_the_inputs_that_no_batch_had_and_what_is_lost():
    toy = prefilled(history=False)
    for slot in (6, 7):
        toy.take("A", [slot])
        with toy.session.step(toy.plan({"A": [slot]}, positions=None, request_ids=None)), toy.session.forward():
            pass
    text = toy.session.summary()
    assert "checks content, operand, bounds, poison, chain, index, owner, " in text
    assert "off token: no batch had history or history_lens, of 3: tokens are not compared" in text
    assert "off namespace: no batch had namespaces, of 3: all requests count as of one namespace" in text
    assert "off digest: session.compare_digests was not called" in text
    assert "in part chain: 2 of 3 batches had no positions" in text
    assert "in part owner: 2 of 3 batches had no request_ids: a slot of another request" in text
    assert "in part index: session.check_reads was not called: the page table" in text


def test_summary_lists_a_check_whose_inputs_came_each_time_as_on():
    toy = prefilled()
    toy.run({"A": [6]}, namespaces=[0])
    toy.session.compare_digests(1, 1)
    toy.take("A", [7])
    with toy.session.step(toy.plan({"A": [7]}, namespaces=[0])), toy.session.forward():
        toy.session.check_reads(torch.tensor([[3, 4, 5, 6, 7]]), torch.tensor([5]))
    text = toy.session.summary()
    for check in ("token", "chain", "owner", "index", "digest"):
        assert f"off {check}" not in text
        assert f"in part {check}" not in text
    assert "in part namespace: 1 of 3 batches had no namespaces" in text


def test_history_without_its_lengths_is_said_and_not_taken_for_a_check(caplog):
    toy = prefilled()
    for slot in (6, 7):
        toy.run({"A": [slot]}, history_lens=None)
    lines = [r.getMessage() for r in caplog.records if "kvcanary.unguarded" in r.getMessage()]
    assert len(lines) == 1
    assert "the batch has no history_lens" in lines[0]
    assert "in part token: 2 of 3 batches had no history_lens" in toy.session.summary()


def test_reports_count_the_steps_of_the_engine_whatever_it_calls_in_them():
    toy = prefilled(width=20)
    for slot in (6, 7, 8, 9):
        with toy.session.step():
            toy.take("A", [slot])
            batch = toy.plan({"A": [slot]})
            toy.requests["A"].stored += 1
            with toy.session.forward(0, batch), torch.no_grad():
                for _ in range(2):  # a graph that is called twice in each forward
                    toy.model(toy.kv, torch.zeros(1, 4), torch.tensor(batch.slots), torch.tensor([0]))
        if slot == 8:
            flip(toy, 0, 0, 4)
    assert [(v.check, v.step) for v in toy.found()] == [("content", 5)]
    toy.pool.release([4, 4], owner="A")  # between two steps
    assert [(v.check, v.step) for v in toy.found()[1:]] == [("owner", 5)]
    assert "step=5" in toy.found()[0].line()


# ---- writes that do not arrive


class Fills(TorchDispatchMode):
    """Counts the tensors that are filled with one number, a launch each on a GPU."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.fill_.Scalar
        return func(*args, **(kwargs or {}))


def test_steps_with_batches_alike_bring_their_number_to_the_device_with_the_batch(monkeypatch):
    monkeypatch.setattr(StepInputs, "_gathers", lambda self: not self._captured)  # as on a GPU
    toy = prefilled()
    word = toy.session.controls(torch.device("cpu")).words[Word.FORWARD : Word.FORWARD + 1]
    began = []
    for slot in range(6, 10):
        toy.run({"A": [slot]})
        began.append(forward_and_step(int(word)))
    assert began == [(0, step) for step in range(2, 6)]
    assert toy.session.inputs.may_come_again
    alike = dict(input_ids=[1], slots=[10], request_rows=[0], prefix_lens=[0], extend_lens=[1])
    for _ in range(3):  # the form is that of the last two
        with toy.session.step(alike):
            pass
    with Fills() as fills, toy.session.step(alike):
        assert forward_and_step(int(word)) == (0, toy.session.steps + 1)
    assert fills.count == 0
    with toy.session.step(alike), toy.session.forward(1):
        assert forward_and_step(int(word)) == (1, toy.session.steps + 1)
        with pytest.raises(SessionStateError), toy.session.forward(0):
            pass
        assert forward_and_step(int(word)) == (1, toy.session.steps + 1)
    with toy.session.step(alike):  # as without a batch alike: 0 outside of a forward
        assert forward_and_step(int(word)) == (0, toy.session.steps + 1)
    with toy.session.step():
        assert forward_and_step(int(word)) == (0, toy.session.steps + 1)


def without_a_write(toy: Toy, slots: list[int]) -> None:
    """A forward of A whose model does not run: the plan stands, nothing is written."""
    toy.take("A", slots)
    with toy.session.step(toy.plan({"A": slots})), toy.session.forward():
        pass
    toy.requests["A"].stored += len(slots)


def never_written(toy: Toy) -> list[tuple[str, str, int, int | None]]:
    return [(v.layer, v.half, v.slot, v.position) for v in toy.found() if v.why == "NEVER_WRITTEN"]


def test_step_that_wrote_nothing_is_reported_by_the_next_reader_in_every_layer_once():
    toy = prefilled()
    without_a_write(toy, [6])
    assert toy.found() == []
    toy.run({"A": [7]})
    assert sorted(never_written(toy)) == [(f"layers.{n}", half, 6, 3) for n in (0, 1) for half in "KV"]
    assert {(v.check, v.request, v.token) for v in toy.found()} == {("poison", "A", 8)}
    toy.run({"A": [8]})
    assert len(toy.found()) == 4


def test_layer_that_wrote_nothing_is_named():
    toy = prefilled()
    toy.run({"A": [6]})
    toy.pool.digests[2:, :, 6] = 0  # layer 1 of that step
    toy.run({"A": [7]})
    assert sorted(never_written(toy)) == [("layers.1", half, 6, 3) for half in "KV"]


@pytest.mark.parametrize("off", ["content", "poison"])
def test_step_that_wrote_nothing_is_silent_where_the_check_is_off(off):
    toy = prefilled(checks=tuple(c for c in kvcanary_fx.config.CHECKS if c != off))
    without_a_write(toy, [6])
    toy.run({"A": [7]})
    assert toy.found() == []


def test_slots_that_were_forgotten_or_that_no_layer_records_need_no_fingerprint():
    toy = prefilled()
    toy.pool.forget([4])
    toy.run({"A": [6]})
    toy = Toy()
    toy.add("A", [5, 6, 7, 8, 9])
    without_a_write(toy, [3, 4])
    with toy.session.step(toy.plan({"A": []})), toy.session.forward():
        toy.session.pool.scales.check()
    assert toy.found() == []


def test_write_that_goes_elsewhere_does_not_become_the_truth_of_its_victim():
    toy = prefilled()
    toy.add("B", [20, 21, 22, 23])
    toy.run({"B": [9, 10]})
    toy.take("A", [6])
    toy.forward(toy.plan({"A": [6]}), slots=[9])  # B's first token is overwritten
    toy.requests["A"].stored += 1
    strayed = toy.found()
    assert {(v.why, v.slot) for v in strayed} == {("NOT_THE_PLANNED_SLOT", 6)}
    toy.run({"B": [11]})
    hurt = toy.found()[len(strayed) :]
    assert {(v.check, v.slot, v.request, v.position) for v in hurt} == {("content", 9, "B", 0)}
    assert len(hurt) == 4
    toy.run({"A": [7]})
    assert {(half, slot) for _, half, slot, _ in never_written(toy)} == {("K", 6), ("V", 6)}


# ---- slots that are filled elsewhere


def test_slots_filled_outside_are_adopted_and_then_guarded():
    toy = prefilled()
    toy.add("B", [1, 2, 3])
    toy.take("B", [9, 10])
    for pair in toy.kv:
        for tensor in pair:
            tensor[[9, 10]] = 3.0
    toy.pool.adopt([9, 10], tokens=[1, 2], positions=[0, 1])
    toy.requests["B"].stored = 2
    toy.run({"B": [11]})
    assert toy.found() == []
    assert toy.session.stats().adopted == 2
    flip(toy, 1, 0, 9)
    toy.add("C", [1, 2, 3], prefix=[9, 10])
    toy.pool.share([9, 10], owner="C")
    toy.run({"C": [12]})
    assert told(toy) == [("content", None, 9, "B")]


@pytest.mark.parametrize("damaged", [None, "tokens", "bytes"])
def test_slots_that_are_filled_while_a_forward_runs_are_guarded_behind_it(damaged):
    """A prefix that is shared, and behind it what is loaded: the request goes on with the chain of both."""
    toy = prefilled()
    toy.add("B", [*toy.requests["A"].tokens[:2], 8, 9, 7, 6], prefix=[3, 4])
    toy.pool.share([3, 4], owner="B")
    toy.take("B", [9, 10])
    wrong = damaged == "tokens"
    toy.pool.announce([9, 10], [*toy.requests["B"].tokens[:3], 1 if wrong else 9], [2, 3], owner="B")
    toy.requests["B"].stored = 4
    toy.run({"B": [11]})
    assert toy.found() == []
    toy.pool.accept([9, 10])
    if damaged == "bytes":
        flip(toy, 1, 0, 9)
    toy.run({"B": [12]})
    expected = {None: set(), "tokens": {("token", 10)}, "bytes": {("content", 9)}}[damaged]
    assert {(v.check, v.slot) for v in toy.found()} == expected


def test_a_shadow_that_travels_with_its_bytes_finds_what_was_lost():
    here, there = prefilled(), Toy()
    shadow = here.pool.export([3, 4, 5]).to("cpu")
    there.add("A", here.requests["A"].tokens)
    there.take("A", [9, 10, 11])
    for (k, v), (k2, v2) in zip(here.kv, there.kv, strict=True):
        k2[[9, 10, 11]], v2[[9, 10, 11]] = k[[3, 4, 5]], v[[3, 4, 5]]
    there.kv[1][1][10] = 0
    there.pool.import_(shadow, [9, 10, 11])
    there.requests["A"].stored = 3
    there.run({"A": [12]})
    (v,) = there.found()
    assert (v.check, v.layer, v.half, v.slot, v.position, v.request) == ("content", "layers.1", "V", 10, 1, "A")


def test_forgotten_slots_may_be_rewritten():
    toy = prefilled()
    toy.pool.forget([4])
    flip(toy, 0, 0, 4)
    toy.run({"A": [6]})
    assert toy.found() == []


def test_a_shadow_is_cut_by_layers_for_a_stage_that_has_some_of_them():
    def stage(name: str) -> Toy:
        return Toy(pools=lambda toy: (KVPool(toy.kv[1:], toy.table, layer_names=[name]),))

    here, there = prefilled(), stage("model.layers.1.attn")
    for shadow in (here.pool.export([3, 4, 5]), here.pool.export([3, 4, 5]).of_layers(["layers.1"])):
        there.pool.allocate([9, 10, 11], owner="A")
        for mine, theirs in zip(here.kv[1], there.kv[1], strict=True):
            theirs[[9, 10, 11]] = mine[[3, 4, 5]]
        there.pool.import_(shadow, [9, 10, 11])
        there.session.sweep.run([9, 10, 11])
        assert there.found() == []
        there.kv[1][0][10] += 1
        there.session.sweep.run([9, 10, 11])
        (v,) = there.found()
        assert (v.check, v.layer, v.half, v.slot) == ("content", "model.layers.1.attn", "K", 10)
        there.session.mark_ready()
        there.pool.release([9, 10, 11])
    with pytest.raises(EngineError, match=r"no layer 'layers\.7': it has"):
        here.pool.export([3]).of_layers(["layers.7"])
    with pytest.raises(EngineError, match=r"the shadow has no K of layers\.5 .* layer_names with the layers' numbers"):
        stage("layers.5").pool.import_(here.pool.export([3]), [9])


def test_a_shadow_of_rows_with_other_bytes_is_refused_and_may_come_without_them():
    here, there = prefilled(), Toy(dtype=torch.bfloat16)
    shadow = here.pool.export([3, 4, 5])
    there.add("A", here.requests["A"].tokens)
    there.take("A", [9, 10, 11])
    with pytest.raises(EngineError, match=r"\(16 bytes of float32\), pool 'kv' has .* \(8 bytes of bfloat16"):
        there.pool.import_(shadow, [9, 10, 11])
    there.pool.import_(shadow.without_bytes(), [9, 10, 11])
    there.requests["A"].stored = 3
    there.run({"A": [12]})
    assert there.found() == []  # who is in the slots is known, and what has arrived is what is checked
    there.kv[0][0][10] = 7
    there.run({"A": [13]})
    assert told(there) == [("content", None, 10, "A")]


def test_all_slots_of_a_pool_may_be_forgotten_at_once():
    toy = prefilled()
    toy.pool.forget(range(24))
    for pair in toy.kv:
        for tensor in pair:
            tensor.fill_(2.0)
    toy.run({"A": [6]})
    assert toy.found() == []
    assert toy.session.stats().slots == 4  # of A; the free ones and the reserved one hold nothing


def test_ranks_that_hold_the_same_tokens_have_the_same_digest():
    one, other = prefilled(), prefilled()
    assert one.session.digest([3, 4, 5]) == other.session.digest([3, 4, 5])
    other.kv[0][0].mul_(2)
    other.pool.adopt([3])
    assert one.session.digest([3, 4, 5], what="content") != other.session.digest([3, 4, 5], what="content")
    mine, theirs = one.session.digest([3, 4]), one.session.digest([4, 3])
    assert not one.session.compare_digests(mine, theirs, request="A")
    assert [(v.check, v.request) for v in one.found()] == [("digest", "A")]


# ---- layers that nobody records


class Skipping:
    """A model whose second layer stops writing."""

    def __init__(self):
        self.skips = False

    def __call__(self, pools, x, slots, reads):
        for number, (k_pool, v_pool) in enumerate(pools):
            if number == 0 or not self.skips:
                k_pool[slots] = x.unsqueeze(1)
                v_pool[slots] = 2 * x.unsqueeze(1)
            x = x + k_pool[reads].mean() + v_pool[reads].mean()
        return x


def rewrite(toy: Toy, steps: int) -> None:
    """A draft is rejected in each step, and its slot written again."""
    for _ in range(steps):
        toy.pool.reject([5])
        toy.requests["A"].stored = 2
        toy.forward(toy.plan({"A": [5]}))


@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_a_layer_that_stops_writing_to_slots_that_are_rewritten_is_named(kernels, monkeypatch):
    """Seen by nobody: these slots have fingerprints, of what was there before."""
    if kernels == "triton":
        use_gpu_kernels(monkeypatch.setattr)
    model = Skipping()
    toy = prefilled(model=model, health_every=2)
    object.__setattr__(toy.session.config, "mode", "raise")
    rewrite(toy, 6)
    model.skips = True
    with pytest.raises(UnrecordedLayersError, match=r"of layers.1 K, layers.1 V no write was recorded"):
        rewrite(toy, 4)


# ---- steps, forwards, and what is refused


def test_off_costs_nothing_and_installs_nothing():
    toy = Toy()
    canary = kvcanary_fx.install_canary(KVPool(toy.kv, toy.table), mode="off")
    assert canary is None
    assert kvcanary_fx.step(canary, object()) is kvcanary_fx.forward(canary)
    with kvcanary_fx.step(canary), kvcanary_fx.forward(canary):
        pass


def test_raise_mode_stops_before_the_write_on_the_cpu():
    toy = prefilled()
    object.__setattr__(toy.session.config, "mode", "raise")
    toy.pool.release([4], owner="A")
    before = toy.kv[0][0].clone()
    with pytest.raises(KVCacheViolation, match="about to read a slot that is free"):
        toy.run({"A": [6]})
    assert torch.equal(toy.kv[0][0], before)
    with toy.session.step(toy.plan({})), toy.session.forward():
        pass  # the session is usable, the violation was told once


def test_a_forward_that_fails_leaves_the_session_usable():
    toy = prefilled()
    toy.take("A", [6])
    batch = toy.plan({"A": [6]})
    with pytest.raises(ZeroDivisionError), toy.session.step(batch), toy.session.forward():
        raise ZeroDivisionError
    toy.forward(batch)
    toy.requests["A"].stored += 1
    toy.run({"A": [7]})
    assert toy.found() == []


@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_a_slot_that_a_failed_forward_rewrote_may_be_released(kernels, monkeypatch):
    """Its bytes are new in some layers, and their record has not come."""
    if kernels == "triton":
        use_gpu_kernels(monkeypatch.setattr)
    toy = prefilled()
    toy.pool.reject([5])
    toy.requests["A"].stored = 2
    batch = toy.plan({"A": [5]})
    with pytest.raises(ZeroDivisionError), toy.session.step(batch), toy.session.forward():
        toy.kv[1][1][5] += 1
        raise ZeroDivisionError
    toy.pool.release([3, 4, 5], owner="A")
    assert toy.found() == []


def test_a_failed_forward_hides_no_damage_to_what_it_read():
    toy = prefilled()
    toy.take("A", [6])
    batch = toy.plan({"A": [6]})
    with pytest.raises(ZeroDivisionError), toy.session.step(batch), toy.session.forward():
        toy.kv[1][1][4] += 1
        raise ZeroDivisionError
    toy.pool.release([3, 4, 5, 6], owner="A")
    assert [(v.check, v.slot, v.half) for v in toy.found()] == [("content", 4, "V")]


def test_messages_about_order():
    toy = prefilled()
    session = toy.session
    with pytest.raises(SessionStateError, match=r"forward\(0\) outside step\(\)"), session.forward():
        pass
    with pytest.raises(SessionStateError, match=r"step\(\) inside step\(\)"), session.step(), session.step():
        pass
    with (
        session.step(toy.plan({})),
        session.forward(0),
        pytest.raises(SessionStateError, match=r"forward\(1\) inside forward\(0\)"),
        session.forward(1),
    ):
        pass
    with pytest.raises(SessionStateError, match=r"ran outside session.forward"), torch.no_grad():
        toy.model(toy.kv, torch.zeros(1, 4), torch.tensor([6]), torch.tensor([0]))
    with pytest.raises(SessionStateError, match=r"close\(\) inside step\(\)"), session.step():
        session.close()
    session.close()
    with pytest.raises(SessionStateError, match="closed: install_canary"):
        session.close()
    with pytest.raises(SessionStateError, match="closed"), session.step():
        pass


def test_nested_calls_of_one_forward_belong_to_the_outermost():
    toy = prefilled()
    toy.take("A", [6])
    batch = toy.plan({"A": [6]})
    with toy.session.step(batch), toy.session.forward():
        toy_batch_in_the_middle = toy.session.forward()
        with toy_batch_in_the_middle, torch.no_grad():
            toy.model(toy.kv, torch.randn(1, 4), torch.tensor([6]), torch.tensor([0]))
    assert toy.session.stats().forwards == 2


def test_a_session_in_a_step_refuses_another_thread():
    toy = prefilled()
    errors: list[BaseException] = []

    def intrude():
        try:
            with toy.session.step():
                pass
        except SessionStateError as e:
            errors.append(e)

    with toy.session.step():
        other = threading.Thread(target=intrude, name="worker-7")
        other.start()
        other.join()
    assert "'worker-7' entered step() while thread 'MainThread' is in one" in str(errors[0])


def test_two_sessions_do_not_see_each_other():
    one, other = prefilled(), prefilled()
    flip(one, 0, 0, 4)
    one.run({"A": [6]})
    other.run({"A": [6]})
    assert len(one.found()) == 1
    assert other.found() == []


def test_a_batch_beyond_what_a_captured_graph_has_room_for_names_the_setting():
    toy = Toy()
    session = kvcanary_fx.install_canary(KVPool(toy.kv, toy.table), mode="log", max_requests=1, max_tokens=2)
    toy.session = session
    toy.add("A", [5, 6, 7, 8])
    session.inputs.fill_from(toy.plan({"A": [3, 4]}))
    session.inputs.freeze()
    with pytest.raises(StepInputError, match="max_tokens"), session.step(toy.plan({"A": [3, 4, 5]})):
        pass


def test_what_a_captured_graph_reads_of_a_step_stays_where_it_is():
    toy = Toy()
    session = toy.session = kvcanary_fx.install_canary(
        KVPool(toy.kv, toy.table), mode="log", max_requests=4, max_tokens=8
    )
    toy.pool = session.pool
    seen = []

    def look(work):
        for name, slots in work.items():
            toy.take(name, slots)
        with session.step(toy.plan(work)), session.forward():
            (plan,) = session._stepping.running.plans.values()
            tensors = {n: t for n, t in vars(plan).items() if isinstance(t, torch.Tensor)}
            seen.append({n: t.data_ptr() for n, t in tensors.items() if n != "history"})  # which is the batch's own
            return plan.real_slots.tolist()

    toy.add("A", [5, 6, 7, 8])
    toy.add("B", [1, 2, 3])
    assert look({"A": [3, 4, 5]}) == [3, 4, 5]
    session.inputs.freeze()
    kept = [torch.zeros(n, dtype=torch.int64) for n in (1, 3, 4)]  # what is freed must not come back by luck
    assert look({"A": [6], "B": [7, 8, 9]}) == [6, 7, 8, 9]
    assert len(kept) == 3
    assert seen[0] == seen[1]
    assert {"ends", "real_slots", "slots", "tokens"} <= set(seen[0])


def test_warm_up_is_forgotten():
    toy = Toy()
    session = kvcanary_fx.install_canary(KVPool(toy.kv, toy.table), mode="raise", inner="eager")
    toy.session, toy.pool = session, session.pool
    toy.model = torch.compile(lambda kv, x, s, r: kv[0][0].index_put_((s,), x.unsqueeze(1)), backend=session.backend)
    toy.add("warm-up", [1, 2])
    with torch.no_grad():
        toy.forward(toy.plan({"warm-up": [3, 3]}))  # dummy slots, not even allocated
    session.mark_ready()
    assert session.violations() == []
    assert session.stats().slots == 0


def test_a_model_that_is_not_compiled_with_the_canary_is_noticed():
    toy = prefilled()
    toy.model = lambda *_: None
    toy.run({"A": [6]})
    object.__setattr__(toy.session.config, "mode", "raise")
    with pytest.raises(CoverageError, match=r"no fingerprint in layers\.0 K, layers\.0 V"):
        toy.session.health.check()


def test_every_violation_reaches_the_callback_with_its_request():
    seen = []
    toy = prefilled(on_violation=seen.append)
    flip(toy, 0, 1, 5)
    toy.run({"A": [6]})
    assert [(v.check, v.request) for v in seen] == [("content", "A")]


def test_the_flag_says_that_something_waits_to_be_read():
    toy = prefilled()
    assert toy.session.flag.tolist() == [0, 0]
    toy.pool.release([4, 4], owner="A")
    head, read = toy.session.flag.tolist()
    assert head > read
    toy.found()
    assert toy.session.flag.tolist() == [1, 1]


def test_request_ids_are_strings_or_ints_and_kept_apart():
    toy = Toy()
    assert toy.session.ids.hash("7") != toy.session.ids.hash(7)
    assert toy.session.ids.name(toy.session.ids.hash(7)) == 7
    with pytest.raises(TypeError, match="a string or an int"):
        toy.session.ids.hash(1.5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda t: KVPool([], t.table), "has no layers"),
        (lambda t: KVPool(t.kv, t.table.float()), r"must be integer \[requests, width\]"),
        (lambda t: KVPool([(t.kv[0][0], t.kv[0][0][:3])], t.table), "different numbers of slots"),
        (lambda t: KVPool(t.kv, t.table, reserved=(99,)), "reserved=.99. are not among them"),
        (lambda t: KVPool(t.kv, t.table, never_read=(3,)), "never_read=.3., which are not among its reserved slots"),
        (lambda t: KVPool([(t.table,)], t.table), "must be .slots, ...."),
        (lambda t: KVPool(t.kv, t.table, layer_names=["x"]), "2 layers and 1 layer_names"),
    ],
)
def test_pools_that_cannot_be(make, message):
    with pytest.raises(EngineError, match=message):
        make(Toy())


def test_page_table_of_the_kernel_is_compared_with_the_request_table():
    toy = prefilled()
    toy.take("A", [6])

    def told_by(pages, lengths):
        with toy.session.step(toy.plan({"A": [6]})), toy.session.forward():
            toy.session.check_reads(torch.tensor(pages), torch.tensor(lengths))
        fresh = toy.found()[len(seen) :]
        seen.extend(fresh)
        return [(v.check, v.why, v.slot) for v in fresh]

    seen: list = []
    assert told_by([[3, 4, 5, 6], [0, 0, 0, 0]], [4, 9]) == []  # the second row is padding
    assert told_by([[3, 9, 5, 6]], [4]) == [("index", "READ_DIFFERS", 4)]
    assert told_by([[3, 4, 5, 6]], [3]) == [("index", "LENGTH_DIFFERS", -1)]
    assert told_by([[3, 4]], [4]) == [("bounds", "ROW_TOO_NARROW", -1)]
    with pytest.raises(EngineError, match=r"pages are \[bs, columns\]"):
        told_by([3, 4], [4])


def test_page_table_of_the_kernel_has_pages_of_the_size_of_the_pools_table():
    toy = Toy(pools=lambda toy: (KVPool(toy.kv, toy.table, table_page_size=4),))
    toy.add("A", [5, 6, 7, 8, 9])
    toy.pool.allocate(range(8, 16), owner="A")
    toy.table[toy.requests["A"].row, :2] = torch.tensor([2, 3], dtype=torch.int32)
    toy.forward(toy.plan({"A": [8, 9, 10]}))
    toy.requests["A"].stored = 3
    with toy.session.step(toy.plan({"A": [11, 12]})), toy.session.forward():
        toy.session.check_reads(torch.tensor([[2, 3]]), torch.tensor([5]))
        assert toy.found() == []
        toy.session.check_reads(torch.tensor([[2, 4]]), torch.tensor([5]))
        toy.session.check_reads(torch.tensor([[8, 9, 10, 11, 12]]), torch.tensor([5]), page_size=1)
    assert told(toy) == [("index", "READ_DIFFERS", 12, "A")]


def test_rows_of_memory_that_are_gathered_are_compared_with_the_request_table():
    """Two requests, one after the other; in memory a page of 4 slots is followed by 4 rows that are others' slots."""
    toy = Toy()
    toy.add("A", [5, 6, 7, 8])
    toy.add("B", [5, 9])
    toy.run({"A": [3, 4, 5]})
    toy.take("A", [6])
    toy.take("B", [9])

    def told_by(index, longest=4, **memory):
        with toy.session.step(toy.plan({"A": [6], "B": [9]})), toy.session.forward():
            toy.session.check_indices(torch.tensor(index), longest, **memory)
        fresh = toy.found()[len(seen) :]
        seen.extend(fresh)
        return [(v.check, v.why, v.slot, v.request, v.position) for v in fresh]

    seen: list = []
    assert told_by([3, 4, 5, 6, 9, 77]) == []  # more is padding
    assert told_by([3, 8, 9, 10, 17], unit=4, stride=8) == []
    assert told_by([3, 4, 4, 6, 9]) == [("index", "READ_DIFFERS", 5, "A", 2)]
    assert told_by([3, 12, 9, 10, 17], unit=4, stride=8) == [("index", "READ_DIFFERS", 4, "A", 1)]  # no slot
    assert told_by([3, 4, 5, 6]) == [("index", "READ_DIFFERS", 9, "B", 0)]  # of B none is gathered
    with pytest.raises(EngineError, match=r"the index is \[n\]"):
        told_by([[3, 4]])
    with pytest.raises(EngineError, match="unit=4 and stride=3"):
        told_by([3], unit=4, stride=3)
    for wrong in {"longest": -1}, {"longest": 2.5}, {"unit": 0}, {"stride": "8"}:
        with pytest.raises(EngineError, match=f"the {next(iter(wrong))} of check_indices"):
            told_by([3], **wrong)
    with pytest.raises(SessionStateError, match=r"outside forward\(\)"):
        toy.session.check_indices(torch.tensor([3]), 1)


def test_a_history_by_row_is_read_in_the_requests_rows():
    """One tensor in all steps; a token that becomes another in it is told, and the next step is as the one before."""
    toy = Toy()
    history = torch.tensor([[0] * 4, [5, 6, 7, 8], [5, 9, 1, 1]], dtype=torch.int32)
    for name, tokens in (("A", [5, 6, 7, 8]), ("B", [5, 9, 1, 1])):
        toy.add(name, tokens)
    for slots in ((3, 9), (4, 10), (5, 11)):
        toy.run({"B": [slots[1]], "A": [slots[0]]}, history=history, history_by_row=True)
    assert toy.found() == []
    history[2, 1] = 8
    toy.run({"B": [12], "A": [6]}, history=history, history_by_row=True)
    assert [(v.check, v.request, v.position) for v in toy.found()] == [("token", "B", 1)]


def test_several_pools_must_be_named():
    toy = Toy()
    with pytest.raises(EngineError, match="share a name"):
        kvcanary_fx.install_canary(KVPool(toy.kv, toy.table), KVPool(toy.kv, toy.table))
    with pytest.raises(EngineError, match="at least one KVPool"):
        kvcanary_fx.install_canary()


@pytest.mark.parametrize("phase", ["pre", "sweep"])
def test_a_report_that_is_read_late_names_who_had_the_slot(phase, monkeypatch):
    """In log mode a GPU's reports are read some steps later, and by then the slot may be somebody else's."""
    toy = prefilled()
    flip(toy, 0, 0, slot=4)
    with monkeypatch.context() as late:
        for whoever, drain in ((toy.session, "drain"), (toy.session._stepping, "_drain")):
            late.setattr(whoever, drain, list)
        if phase == "pre":
            toy.run({"A": [6]})
        else:
            toy.session.sweep.run()
        toy.done("A")
        toy.add("B", [30, 31, 32])
        toy.run({"B": [3, 4]})
    (found,) = toy.found()
    assert (found.check, found.phase, found.slot, found.position) == ("content", phase, 4, 1)
    assert (found.request, found.token) == ("A", None)


# ---- token ids


@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize("history", [True, False], ids=["with history", "without"])
@pytest.mark.parametrize("image", [2**31, 2**40 + 5, 2**52 + 2**31, -5])
def test_placeholders_of_images_can_be_any_numbers(monkeypatch, kernels, history, image):
    """Seen: those of 2**31 or more were reported in each step, as a slot keeps 32 bits of them."""
    if kernels == "triton":
        use_gpu_kernels(monkeypatch.setattr)
    toy = Toy(history=history)
    toy.add("A", [image, 5, image + 1, 7, 8])
    toy.run({"A": [3, 4, 5]})
    toy.run({"A": [6]})
    toy.add("B", toy.requests["A"].tokens[:4])
    toy.take("B", [9, 10, 11])
    for pair in toy.kv:
        for tensor in pair:
            tensor[[9, 10, 11]] = 3.0
    toy.pool.adopt([9, 10, 11], tokens=toy.requests["B"].tokens[:3], positions=[0, 1, 2], owner="B")
    toy.requests["B"].stored = 3
    toy.run({"A": [7], "B": [12]})
    toy.session.sweep.run(prefixes=[Prefix([9, 10, 11], tokens=toy.requests["B"].tokens[:3])])
    assert told(toy) == []
    toy.add("C", [image ^ 1, 5, 6], prefix=[3, 4])
    toy.pool.hand_over([3, 4])
    toy.run({"C": [13]})
    assert told(toy) == ([("token", "WRONG_TOKEN", 3, "C")] if history else [])


@pytest.mark.parametrize(
    ("tensors", "asked", "placement"),
    [(1, "auto", "inline"), (2, "auto", "side"), (1, "side", "side"), (2, "inline", "inline")],
)
def test_checks_of_latents_are_in_the_models_own_stream_unless_something_else_is_asked_for(tensors, asked, placement):
    layers = [[torch.zeros(8, 1, 4) for _ in range(tensors)] for _ in range(2)]
    table = torch.zeros(2, 4, dtype=torch.int64)
    session = kvcanary_fx.install_canary(KVPool(layers, table), placement=asked)
    assert session.config.placement == placement


@pytest.mark.parametrize("handed_out", [[5], [3, 4, 5]])
def test_health_leaves_out_slots_that_were_handed_out_since_the_last_forward(handed_out):
    """And forgotten, as something else was to fill them, and given back."""
    toy = prefilled()
    toy.done("A")
    toy.pool.allocate(handed_out, owner="B")
    toy.pool.forget(handed_out)
    toy.pool.release(handed_out, owner="B")
    toy.session.health.check()
    assert toy.session.uncovered == []
