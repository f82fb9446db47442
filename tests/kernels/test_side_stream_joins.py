"""Which stream work beside the model goes to, with streams that only note what they wait for."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch

from kvcanary_fx.kernels import side_stream
from kvcanary_fx.kernels.side_stream import ForkInGraph, SideStream, meets_at

DEVICE = torch.device("cuda", 0)


class Stream:
    """In the place of a GPU's: the work that it comes behind, by name."""

    numbers = itertools.count()

    def __init__(self, device: torch.device | None = None):
        self.name, self.behind = f"stream {next(self.numbers)}", set()

    def launch(self, name: str) -> None:
        self.behind = self.behind | {name}

    def wait_event(self, event: Event) -> None:
        self.behind = self.behind | event.behind

    def wait_stream(self, other: Stream) -> None:
        self.behind = self.behind | other.behind


class Event:
    """Where a stream was when it was recorded."""

    behind: frozenset[str] = frozenset()

    def record(self, stream: Stream) -> None:
        self.behind = frozenset(stream.behind)


@pytest.fixture
def model(monkeypatch):
    """The model's stream; ``captured`` says whether it is being captured."""
    model = Stream()
    model.captured = False
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: model)
    monkeypatch.setattr(side_stream, "capturing", lambda device=None: model.captured)
    return model


def test_what_is_forked_behind_a_join_in_a_capture_goes_to_another_stream(model):
    """Else it would depend a second time on what was joined: a branch from there on."""
    model.captured, side = True, SideStream(DEVICE)
    first = side.stream
    side.start()
    first.launch("checks")
    side.join()
    assert "checks" in model.behind
    side.start()
    assert side.stream is not first
    side.stream.launch("records")
    side.join()
    assert model.behind == {"checks", "records"}


def test_outside_of_a_capture_the_stream_stays(model):
    side = SideStream(DEVICE)
    first = side.stream
    for _ in range(2):
        side.start()
        side.join()
    assert side.stream is first


def test_a_join_in_a_capture_keeps_the_stream_for_what_was_forked_before_it(model):
    """The end of the forward joins that, and the model may reuse the memory of what it reads."""
    side = SideStream(DEVICE)
    side.start()
    side.stream.launch("a check outside")
    model.captured = True
    side.start()
    side.stream.launch("a check inside")
    side.join()
    model.captured, model.behind = False, set()
    side.join()
    assert "a check outside" in model.behind


def test_a_stream_waits_for_another_ones_work_as_long_as_it_is_not_joined(model):
    model.captured, one, other = True, SideStream(DEVICE), SideStream(DEVICE)
    other.start()
    other.stream.launch("listed")
    one.follow(other)
    assert "listed" in one.stream.behind
    other.join()
    third = SideStream(DEVICE)
    third.follow(other)
    assert third.stream.behind == set()
    third.start()
    assert "listed" in third.stream.behind, "by the model's"


@pytest.mark.parametrize(("layers", "behind"), [(0, 0), (7, 0), (8, 2), (16, 2), (17, 2), (32, 2), (80, 5)])
def test_behind_how_many_layers_the_model_waits(layers, behind):
    assert meets_at(layers) == behind


def test_what_a_graph_has_joined_is_not_waited_for_again(model, monkeypatch):
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(Event, "record", lambda self, stream=None: setattr(self, "behind", frozenset({"checks"})))
    fork = ForkInGraph(DEVICE, lambda: None)
    side = Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: side)
    fork.join()
    assert side.behind == {"checks"}, "the model has not waited yet"
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: model)
    fork.join()
    assert model.behind == {"checks"}
    late = Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: late)
    fork.join()
    assert late.behind == set(), "whatever is forked from the model comes behind it"


def test_what_comes_first_is_waited_for_by_itself(model, monkeypatch):
    on = [model]

    @contextlib.contextmanager
    def stream(other):
        on.append(other)
        yield
        on.pop()

    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(Event, "record", lambda self, stream=None: setattr(self, "behind", frozenset(on[-1].behind)))
    fork = ForkInGraph(DEVICE, lambda: on[-1].launch("checks"), lambda: on[-1].launch("first"))
    late = Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: late)
    fork.join_first()
    assert late.behind == {"first"}
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: model)
    assert model.behind == set()
    fork.join_first()
    assert model.behind == {"first"}, "not what another stream waited for"
    model.behind = set()
    fork.join_first()
    assert model.behind == set(), "once"
    fork.join()
    assert model.behind == {"first", "checks"}
