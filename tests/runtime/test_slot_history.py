"""A report and the file of an incident say what the slot went through: who had it, wrote it, freed it, and where."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import zipfile

import pytest
import torch
from gpu_on_cpu import use_gpu_kernels
from toy import Toy

from kvcanary_fx.engine.stacks import CallStacks, told
from kvcanary_fx.reports.incidents import file
from kvcanary_fx.reports.incidents.page import page
from kvcanary_fx.reports.incidents.story import story
from kvcanary_fx.reports.incidents.terminal import Terminal
from kvcanary_fx.reports.incidents.time_line import time_line


def free_too_early(toy: Toy) -> None:
    toy.pool.release([2, 3], owner="alice")


def reused_while_read(**settings: object) -> Toy:
    """Alice's slots are freed while she goes on, and bob gets them."""
    toy = Toy(**settings)
    toy.add("alice", range(1, 9))
    toy.add("bob", range(10, 18))
    toy.run({"alice": [1, 2, 3]})
    toy.run({"alice": [4]})
    free_too_early(toy)
    toy.run({"bob": [2, 3]})
    toy.run({"alice": [5]})
    return toy


TOLD = (
    "allocated before step 1 to request alice, written in step 1 by request alice, "
    "released in step 2 by request alice, allocated in step 2 to request bob, written in step 3 by request bob"
)


@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_a_report_says_who_had_the_slot_who_wrote_it_and_who_freed_it(kernels, monkeypatch):
    if kernels == "triton" and not torch.cuda.is_available():
        use_gpu_kernels(monkeypatch.setattr)
    first = reused_while_read().found()[0]
    assert (first.slot, first.why, first.step) == (2, "FOREIGN_READ", 4)
    assert first.history is not None
    assert first.history.startswith(TOLD)
    assert f"  history: {TOLD}" in first.explain()


def test_the_line_of_the_log_says_it_too_behind_everything_else():
    first, *_, last = reused_while_read().found()
    assert first.line().endswith(f' pool=kv history="{first.history}"')
    assert first.line(times=10).endswith(f' history="{first.history}" times=10')
    without = dataclasses.replace(last, history=None)
    assert without.line().endswith(" pool=kv")


def test_the_call_that_freed_a_slot_is_named_by_file_line_and_function(tmp_path):
    toy = reused_while_read(stacks=10)
    line = free_too_early.__code__.co_firstlineno + 1
    freed, _, where = toy.found()[0].history.partition("released in step 2 by request alice at ")[2].partition(":")
    assert freed.endswith("test_slot_history.py")
    assert where.startswith(f"{line} in free_too_early, ")
    toy.session.snapshot(tmp_path / "one.zip")
    past = next(s.past for s in file.load(tmp_path / "one.zip").pools[0].near if s.slot == 2)
    (released,) = [event for event in past.events if event.kind == "release"]
    assert released.stack[1].endswith(" in reused_while_read")


def test_a_call_that_was_made_in_another_process_has_its_stack_there():
    toy = Toy(stacks=2)
    toy.add("alice", range(1, 9))
    toy.run({"alice": [1, 2]})
    for line in (7, 8, 9):  # more than are kept
        with told((f"scheduler.py:{line} in free", "core.py:5 in step")):
            toy.pool.reject([3])
    released = toy.pool.histories([3])[0].events[-1]
    assert released.stack == ("scheduler.py:9 in free", "core.py:5 in step")


def test_a_file_shows_what_the_damaged_slots_went_through(tmp_path):
    toy = reused_while_read(incidents=tmp_path)
    toy.found()
    incident = file.load(next(tmp_path.glob("*owner*")))
    assert any(TOLD in told for told in story(incident))
    text = Terminal(200, colour=False).render(incident)
    assert "What slots 2 to 3 went through:\n  allocated before step 1 to request alice\n" in text
    assert "released in step 2 by request alice\n" in page(incident)


def test_the_steps_between_which_bytes_changed_are_told(tmp_path):
    toy = Toy(incidents=tmp_path)
    toy.add("alice", range(1, 9))
    toy.run({"alice": [1, 2]})
    for slot in (3, 4):
        toy.run({"alice": [slot]})
    toy.kv[0][0][[1, 4]] += 1
    toy.run({"alice": [5]})
    (past,) = toy.pool.histories([1])
    assert (past.first_read, past.read_before, past.last_read, past.reads) == (2, 3, 4, 3)
    first, fourth = story(file.load(next(tmp_path.iterdir())))
    assert first.endswith("Its bytes were right when they were compared in step 3: they changed after that.")
    assert fourth.endswith(
        "written in step 3 by request alice, compared for a read in step 4. Its bytes had not "
        "been compared since they were written."
    )


def test_plain_words_say_who_lost_the_slot_and_a_time_line_shows_it(tmp_path):
    toy = reused_while_read(incidents=tmp_path, stacks=10)
    toy.found()
    incident = file.load(next(tmp_path.glob("*owner*")))
    line = free_too_early.__code__.co_firstlineno + 1
    told = story(incident)[0]
    assert "Request alice had it until it was released in step 2 by request alice, at " in told
    assert (
        f"test_slot_history.py:{line} in free_too_early. Request bob got it in step 2, and wrote it in step 3. " in told
    )
    assert "So request alice reads what is request bob's. The same in slot 3." in told
    line = time_line(incident, 0)
    assert line.head == ("", "before step 1", "step 1", "step 2", "step 3", "step 4")
    which, cells = line.rows[0]
    assert which == "slots 2 to 3"
    assert [[f"{mark.text} {mark.request}" for mark in cell] for cell in cells] == [
        ["allocated alice"],
        ["written alice"],
        ["released alice", "allocated bob"],
        ["written bob"],
        ["compared None", "foreign read alice"],
    ]
    shown = page(incident)
    assert re.search(r'background:#d93025; color: #fff" title="alice">foreign read<br>alice</span>', shown)
    assert TOLD not in shown.partition("<h2>")[0]  # the time line has it


def test_slots_to_which_the_same_happened_are_told_of_once(tmp_path):
    toy = Toy(incidents=tmp_path)
    toy.add("alice", range(1, 9))
    toy.run({"alice": [1, 2, 3]})
    for layer in toy.kv:
        for tensor in layer:
            tensor[[1, 2, 3]] *= -3
    toy.run({"alice": [4]})
    (told,) = story(file.load(next(tmp_path.iterdir())))
    assert "The slot is reported in 4 of 4 tensors." in told
    assert "The same in slots 2 to 3." in told


def test_no_comparison_is_told_of_where_bytes_are_not_checked():
    told = reused_while_read(checks=("owner", "token")).found()[0].history
    assert told == TOLD


def test_requests_in_the_history_of_a_file_are_hashed_like_all_others(tmp_path):
    toy = reused_while_read(privacy=("ids",))
    toy.found()
    toy.session.snapshot(tmp_path / "one.zip")
    incident = file.load(tmp_path / "one.zip")
    with zipfile.ZipFile(io.BytesIO(file.pack(incident))) as archive:
        text = archive.read("incident.json").decode()
    assert "alice" not in text
    slot = next(s for s in incident.pools[0].near if s.slot == 2)
    assert [e.request for e in slot.past.events][-1] == slot.owner


def test_a_file_of_a_version_without_histories_is_read(tmp_path):
    toy = reused_while_read()
    toy.session.snapshot(tmp_path / "one.zip")
    with zipfile.ZipFile(tmp_path / "one.zip") as archive:
        told, tensors = json.loads(archive.read("incident.json")), archive.read("tensors.safetensors")
    for slot in told["incident"]["pools"][0]["near"]:
        del slot["past"]
    for record in told["incident"]["records"]:
        del record["violation"]["history"]
    with zipfile.ZipFile(tmp_path / "old.zip", "w") as archive:
        archive.writestr("incident.json", json.dumps(told))
        archive.writestr("tensors.safetensors", tensors)
    incident = file.load(tmp_path / "old.zip")
    assert all(slot.past is None for slot in incident.pools[0].near)
    assert "went through" not in Terminal(200, colour=False).render(incident)


def test_without_a_history_reports_are_as_before_and_nothing_is_allocated():
    toy = reused_while_read(slot_history=0)
    assert toy.pool.space.past.nbytes == 0
    assert toy.found()[0].history is None
    assert "history:" not in toy.found()[0].explain()


def test_what_was_forgotten_twice_in_a_step_is_told_once_and_what_was_freed_twice_is_not():
    """A block that a connector is about to fill is forgotten where that is said, and where its tokens are."""
    toy = Toy()
    toy.add("alice", range(1, 9))
    toy.run({"alice": [2, 3]})
    for _ in range(2):
        toy.pool.forget([2])
        toy.pool.release([3], owner="alice")
    forgotten, freed = toy.pool.calls.histories([2, 3])
    assert forgotten.told().count("forgotten") == 1
    assert freed.told().count("released") == 2


def test_only_the_last_distinct_stacks_are_kept():
    stacks = CallStacks(2)

    def in_pool() -> int:
        return in_events()

    def in_events() -> int:
        return stacks.number()

    numbers = [in_pool() for _ in range(3)]
    assert len(set(numbers)) == 1
    first, second, third = in_pool(), in_pool(), in_pool()
    assert len({numbers[0], first, second, third}) == 4
    assert [n for n in (numbers[0], first, second, third, 99) if stacks.lines(n)] == [second, third]
