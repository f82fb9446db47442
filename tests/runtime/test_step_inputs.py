"""Step inputs: buffers that stay, padding that is padding, and views that slice as the raw batch would."""

from __future__ import annotations

import copy
import random
import types
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcanary_fx.engine import gathered as module
from kvcanary_fx.engine import step_inputs
from kvcanary_fx.engine.step_inputs import StepInputs
from kvcanary_fx.engine.step_view import Axis, StepView
from kvcanary_fx.errors import StepInputError
from kvcanary_fx.kernels.handed import Handed
from kvcanary_fx.kernels.staging import CurrentStream, Staging

POISON = -77


@pytest.fixture(params=["one by one", "gathered", "handed over"], autouse=True, scope="module")
def gathered(request):
    """Whether a fill's copies go to the device together, and whether numbers that come again are read where they are,
    both as on a GPU."""
    before = StepInputs._gathers, module.hands_over
    if request.param != "one by one":
        StepInputs._gathers = lambda self: not self._captured
    if request.param == "handed over":
        if torch.cuda.is_available():
            pytest.skip("the interpreter stands in for a missing GPU")
        module.hands_over = lambda device: True
    yield request.param != "one by one"
    StepInputs._gathers, module.hands_over = before


def make(**settings):
    """A registry with two slots an axis, one of them [n, 3], and one computed."""
    inputs = StepInputs("cpu", **settings)
    inputs.register("rows", "batch", torch.int64, pad=-1)
    inputs.register("extend_lens", "batch", torch.int32)
    inputs.register("ids", Axis.TOKENS, torch.int64, pad=9)
    inputs.register("positions", "tokens", torch.int64)
    inputs.register("ends", "batch", torch.int64, compute=lambda batch, inputs: inputs.view().extend_lens.cumsum(0))
    return inputs


def make_batch(*lens, base=100, **others):
    total = sum(lens)
    return types.SimpleNamespace(
        rows=torch.arange(base, base + len(lens)),
        extend_lens=torch.tensor(lens, dtype=torch.int32),
        ids=torch.arange(base, base + total),
        positions=torch.arange(3 * total).reshape(total, 3),
        **others,
    )


def poison(inputs):
    for name in ("rows", "extend_lens", "ids", "positions", "ends"):
        if inputs.buffer(name) is not None:
            inputs.buffer(name).fill_(POISON)


def pointers(view):
    return [getattr(view, name).data_ptr() for name in ("rows", "extend_lens", "ids", "positions", "ends")]


def test_a_view_shows_the_batch():
    inputs, batch = make(), make_batch(2, 1)
    inputs.fill_from(batch)
    view = inputs.view()
    for name in ("rows", "extend_lens", "ids", "positions"):
        assert torch.equal(getattr(view, name), getattr(batch, name))
    assert view.ends.tolist() == [2, 3]
    assert (view.num_requests, view.num_tokens, view.padded_bs, view.padded_tokens) == (2, 3, 2, 3)
    assert isinstance(view, StepView)


def test_what_the_host_gives_in_a_step_is_one_copy(gathered, monkeypatch):
    if not gathered:
        pytest.skip("of a fill that gathers")
    sent = []
    send, launch = Staging.send, Handed.launch
    monkeypatch.setattr(Staging, "send", lambda self, words, out: (sent.append(words.tolist()), send(self, words, out)))
    monkeypatch.setattr(Handed, "launch", lambda self, *given: (sent.append(given), launch(self, *given)))
    inputs = StepInputs("cpu", max_requests=4, max_tokens=4)
    for name, axis in (("rows", "batch"), ("lens", "batch"), ("ids", "tokens")):
        inputs.register(name, axis, torch.int64, pad=-1)
    inputs.register("owners", "batch", torch.int64, compute=lambda batch, inputs: [5] * inputs.num_requests)
    for number, rows in enumerate(([1, 2, 3], [4])):  # padding comes along with it
        inputs.step = number
        inputs.fill_from({"rows": rows, "lens": torch.ones(len(rows), dtype=torch.int32), "ids": range(len(rows))})
        assert len(sent) == number + 1
    assert inputs.view(padded_bs=4).rows.tolist() == [4, -1, -1, -1]
    assert inputs.counts.tolist() == [1, 1, 1]
    assert inputs.buffer("owners").tolist() == [5, 0, 0, 0]


def host_batch(rng: random.Random, requests: int, tokens: int) -> dict[str, Any]:
    """A batch as engines give it, sometimes with a field missing or on the device, sometimes with a wrong one."""
    fields: dict[str, Any] = {
        "rows": [rng.randrange(1 << 40) for _ in range(requests)],
        "lens": tuple(rng.randrange(9) for _ in range(requests)),
        "ids": [rng.randrange(1 << 40) for _ in range(tokens)],
        "positions": range(tokens) if rng.random() < 0.9 else None,
        "slots": torch.randint(99, (tokens,), dtype=rng.choice([torch.int32, torch.int32, torch.int64])),
        "owners": [rng.randrange(9) for _ in range(requests)],
    }
    if rng.random() < 0.1:
        fields["ids"] = rng.choice([[1.5] * tokens, [1 << 70] * tokens, ["a"] * tokens, [7] * (tokens + 1)])
    if rng.random() < 0.1:
        fields["rows"] = torch.tensor(fields["rows"])
    return fields


@pytest.mark.parametrize("seed", range(4))
def test_a_batch_like_the_one_before_is_shown_as_in_a_registry_that_sees_it_first(gathered, seed):
    def registry() -> StepInputs:
        made = StepInputs("cpu", max_requests=4, max_tokens=4)
        for name, axis in (("rows", "batch"), ("lens", "batch"), ("ids", "tokens"), ("positions", "tokens")):
            made.register(name, axis, torch.int64, pad=-1)
        made.register("slots", "tokens", torch.int64)
        made.register("owners", "batch", torch.int64, compute=lambda batch, inputs: batch["owners"])
        made.register_memory("ends", "batch", torch.int64)
        return made

    def filled(inputs: StepInputs, batch: dict[str, Any]) -> Any:
        try:
            inputs.fill_from(batch)
        except StepInputError as e:
            return str(e)
        view = inputs.view()
        fields = [getattr(view, name) for name in ("rows", "lens", "ids", "positions", "slots", "owners")]
        shown = [None if field is None else field.tolist() for field in fields]
        buffers = [inputs.buffer(name)[:4].tolist() for name in ("rows", "lens", "ids", "slots", "owners")]
        return shown, buffers, inputs.counts.tolist(), (view.num_requests, view.num_tokens, view.padded_tokens)

    rng, long_used = random.Random(seed), registry()
    sizes = 2, 3
    for number in range(60):
        if rng.random() < 0.2:
            sizes = rng.randint(1, 4), rng.randint(1, 5)
        batch, new = host_batch(rng, *sizes), registry()
        long_used.step = new.step = number
        got, expected = filled(long_used, batch), filled(new, batch)
        if isinstance(expected, str):
            assert got == expected
        else:
            assert (got[0], got[2:]) == (expected[0], expected[2:])
            for mine, theirs, n in zip(
                got[1], expected[1], (sizes[0], sizes[0], sizes[1], sizes[1], sizes[0]), strict=True
            ):
                assert mine[:n] == theirs[:n]
                assert set(mine[n:]) <= {-1, 0}, "what is behind them is padding"


def test_a_batch_like_the_one_before_is_one_look_at_each_field(gathered, monkeypatch):
    if not gathered:
        pytest.skip("of a fill that gathers")
    inputs = StepInputs("cpu", max_requests=4, max_tokens=4)
    inputs.register("rows", "batch", torch.int64)
    for step in range(3):
        inputs.fill_from({"rows": [step, 1]})
    monkeypatch.setattr(StepInputs, "_fill_plain", None)
    inputs.step = 7
    inputs.fill_from({"rows": [5, 6]})
    assert inputs.view().rows.tolist() == [5, 6]
    assert inputs.counts.tolist() == [2, 0, 7]


def test_numbers_of_a_batch_alike_are_read_where_they_are_by_one_launch(monkeypatch):
    if not module.hands_over(torch.device("cpu")):
        pytest.skip("of a fill that hands them over")
    inputs = StepInputs("cpu", max_requests=4, max_tokens=4)
    inputs.register("rows", "batch", torch.int64)
    inputs.clock = torch.zeros(1, dtype=torch.int64)
    for step in range(3):
        inputs.fill_from({"rows": [step, 1]})
    launched, launch = [], Handed.launch_at
    monkeypatch.setattr(Handed, "launch_at", lambda self, *given: (launched.append(given), launch(self, *given)))
    monkeypatch.setattr(Staging, "send", None)
    monkeypatch.setattr(torch, "_foreach_copy_", None)
    inputs.step = 7
    inputs.fill_from({"rows": [5, 6]})
    assert len(launched) == 1
    assert (inputs.view().rows.tolist(), inputs.counts.tolist(), inputs.clock.tolist()) == ([5, 6], [2, 0, 7], [7])


def test_addresses_stay_from_step_to_step():
    inputs = make(max_requests=4, max_tokens=8)
    inputs.fill_from(make_batch(2, 1))
    first, counts = inputs.view(), inputs.counts.data_ptr()
    inputs.step = 9
    inputs.fill_from(make_batch(1, 1, 5, base=500))
    assert pointers(inputs.view()) == pointers(inputs.view(4, 8)) == pointers(first)
    assert (inputs.counts.data_ptr(), inputs.counts.tolist()) == (counts, [3, 7, 9])
    assert inputs.counts.dtype == torch.int64
    assert first.rows.tolist() == [500, 501]


def test_what_was_made_of_a_view_is_kept_for_views_of_the_same_memory_only():
    inputs = make(max_requests=4, max_tokens=4)

    def kept(*lens, **sizes):
        inputs.fill_from(make_batch(*lens))
        return inputs.view(**sizes).kept_plans

    first = kept(2, 1)
    assert kept(1, 2) is first
    others = [kept(3), kept(1, 1), kept(2, 1, padded_bs=4), kept(2, 3, 1)]  # the last one moves the tokens
    assert len({id(each) for each in (first, *others)}) == 5
    assert kept(2, 1) is not first
    assert inputs.view().rows.tolist() == [100, 101]
    handed = make(no_copy=True)
    handed.fill_from(make_batch(2, 1))
    assert handed.view().kept_plans is None


def test_the_batch_keeps_its_tensors():
    inputs, batch = make(), make_batch(2, 1)
    inputs.fill_from(batch)
    inputs.view().ids.fill_(0)
    assert batch.ids.tolist() == [100, 101, 102]


def test_padding_holds_pad_and_not_the_step_before():
    inputs = make(max_requests=4, max_tokens=8)
    inputs.fill_from(make_batch(2, 2, 2, 2))
    poison(inputs)
    inputs.fill_from(make_batch(1, 1))
    view = inputs.view(padded_bs=4, padded_tokens=8)
    assert view.rows.tolist() == [100, 101, -1, -1]
    assert view.ids.tolist() == [100, 101] + [9] * 6
    assert view.positions[2:].eq(0).all()
    assert view.ends.tolist() == [1, 2, 0, 0]
    assert (view.num_requests, view.num_tokens, view.padded_bs, view.padded_tokens) == (2, 2, 4, 8)
    assert inputs.counts.tolist() == [2, 2, 0]


def test_what_the_batch_lacks_is_none_and_a_captured_graph_reads_padding():
    inputs = make()
    inputs.fill_from(make_batch(2, 1))
    for lacking in (types.SimpleNamespace(rows=[1, 2], extend_lens=[1, 1]), make_batch(1, 1)):
        lacking.ids = None
        inputs.fill_from(lacking)
        assert inputs.view().ids is inputs.view(2, 4).ids is None
        assert inputs.buffer("ids").tolist() == [9] * 4
    inputs.fill_from(make_batch(2, 1))
    assert inputs.view().ids.tolist() == [100, 101, 102]


def test_computed_slots_are_computed_each_step_even_where_the_batch_has_the_name():
    inputs = make()
    for lens in ([2, 1], [3]):
        inputs.fill_from(make_batch(*lens, ends=torch.tensor([-5])))
        assert inputs.view().ends.tolist() == torch.tensor(lens).cumsum(0).tolist()


def test_computed_slot_alone_on_its_axis_gives_the_size():
    inputs = StepInputs("cpu")
    inputs.register("rows", "batch", torch.int64)
    inputs.register("twice", "tokens", torch.int64, compute=lambda batch, inputs: inputs.view().rows.repeat(2))
    inputs.fill_from({"rows": [4, 5]})
    assert inputs.view().twice.tolist() == [4, 5, 4, 5]
    assert inputs.counts.tolist() == [2, 4, 0]


def test_computed_slot_registered_off_is_kept_out_of_views():
    inputs = StepInputs("cpu")
    inputs.register("rows", "batch", torch.int64)
    inputs.register("hidden", "batch", torch.int64, compute=lambda batch, inputs: inputs.view().rows + 1, exposed=False)
    inputs.fill_from({"rows": [1, 2]})
    assert not hasattr(inputs.view(), "hidden")
    assert inputs.buffer("hidden").tolist() == [2, 3]


def test_what_is_no_slot_is_carried_from_the_batch():
    for batch in (make_batch(1, is_decode=True), vars(make_batch(1, is_decode=True))):
        inputs = make()
        inputs.fill_from(batch)
        assert inputs.view().is_decode is inputs.view().slice(0, 1).is_decode is True
        with pytest.raises(AttributeError, match="'sampling' is neither a slot of this view nor an attribute of the"):
            _ = inputs.view().sampling


def test_views_can_be_copied():
    inputs = make()
    inputs.fill_from(make_batch(1))
    assert copy.copy(inputs.view()).rows.tolist() == [100]
    assert not hasattr(StepView.__new__(StepView), "num_tokens")


@pytest.mark.parametrize("source", [[1, 2], (1, 2), range(1, 3), torch.tensor([1, 2], dtype=torch.int32)])
def test_sources_are_sequences_and_tensors_of_other_widths(source):
    inputs = StepInputs("cpu")
    inputs.register("rows", "batch", torch.int64)
    inputs.fill_from({"rows": source})
    assert inputs.view().rows.tolist() == [1, 2]
    assert inputs.view().rows.dtype == torch.int64


def test_empty_batch():
    inputs = make()
    for _ in range(2):
        inputs.fill_from(make_batch())
        view = inputs.view(padded_bs=2, padded_tokens=3)
        assert (view.num_requests, view.num_tokens, inputs.counts.tolist()) == (0, 0, [0, 0, 0])
        assert (view.rows.tolist(), view.ids.tolist(), view.positions.shape) == ([-1, -1], [9, 9, 9], (3, 3))
        assert inputs.view().slice().rows.shape == inputs.view().select([]).rows.shape == (0,)
        inputs.fill_from(make_batch(2, 1))
        assert inputs.view().ids.tolist() == [100, 101, 102]


def test_empty_list_does_not_settle_the_shape_of_entries():
    inputs = StepInputs("cpu")
    inputs.register("positions", "tokens", torch.int64)
    inputs.fill_from({"positions": []})
    inputs.fill_from({"positions": [[1, 2, 3]]})
    assert inputs.view().positions.tolist() == [[1, 2, 3]]
    inputs.fill_from({"positions": []})
    assert inputs.view().positions.shape == (0, 3)


def test_buffers_grow_to_the_next_power_of_two():
    inputs = make(max_requests=3)
    assert (inputs.capacity("batch"), inputs.buffer("rows")) == (0, None)
    inputs.fill_from(make_batch(2, 3))
    assert (inputs.capacity("batch"), inputs.capacity(Axis.TOKENS)) == (4, 8)
    inputs.fill_from(make_batch(*[3] * 5))
    assert (inputs.capacity("batch"), inputs.capacity("tokens")) == (8, 16)
    assert inputs.view().rows.tolist() == [100, 101, 102, 103, 104]
    assert inputs.view().ends.tolist() == [3, 6, 9, 12, 15]
    inputs.fill_from(make_batch(1))
    assert inputs.capacity("batch") == 8


def test_padding_beyond_the_capacity_keeps_this_steps_inputs():
    inputs = make()
    inputs.fill_from(make_batch(2, 1))
    view = inputs.view(padded_bs=5, padded_tokens=6)
    assert (view.rows.tolist(), view.ids.tolist()) == ([100, 101, -1, -1, -1], [100, 101, 102, 9, 9, 9])
    assert view.positions[:3].equal(make_batch(2, 1).positions)
    assert inputs.capacity("batch") == 8


def test_a_slot_left_out_while_its_axis_grew_comes_back():
    inputs = make()
    inputs.fill_from(make_batch(2))
    inputs.fill_from({"rows": [1, 2, 3], "extend_lens": [1, 1, 1], "positions": [[0, 0, 0]] * 3})
    assert inputs.view().ids is None
    inputs.fill_from(make_batch(1, 1, 1))
    assert inputs.view(4, 4).ids.tolist() == [100, 101, 102, 9]


def test_frozen_buffers_refuse_to_grow():
    inputs = make(max_requests=2, max_tokens=4)
    inputs.fill_from(make_batch(2, 1))
    before = pointers(inputs.view())
    inputs.freeze()
    assert inputs.frozen
    too_many = "axis 'batch' have room for 2 requests, 3 are needed, .* max_requests=3 or more"
    with pytest.raises(StepInputError, match=too_many):
        inputs.fill_from(make_batch(1, 1, 1))
    with pytest.raises(StepInputError, match=r"room for 4 tokens, 5 are needed, .* max_tokens=5 or more"):
        inputs.fill_from(make_batch(2, 3))
    inputs.fill_from(make_batch(2, 2))
    with pytest.raises(StepInputError, match=too_many):
        inputs.view(padded_bs=3)
    assert pointers(inputs.view(2, 4)) == before


def test_after_a_failed_fill_there_is_nothing_to_view():
    inputs = make()
    with pytest.raises(StepInputError, match=r"there is no batch to view. Call fill_from"):
        inputs.view()
    inputs.fill_from(make_batch(2, 1))
    broken = make_batch(2, 1)
    broken.ids = broken.ids[:2]
    with pytest.raises(StepInputError, match="slots 'ids' and 'positions' disagree on the number of tokens: 2 and 3"):
        inputs.fill_from(broken)
    with pytest.raises(StepInputError, match="there is no batch to view"):
        inputs.view()


def test_a_failed_first_fill_settles_no_shape():
    inputs = make()
    with pytest.raises(StepInputError, match="disagree"):
        inputs.fill_from({"ids": [1], "positions": [[1, 2], [3, 4]]})
    inputs.fill_from(make_batch(2, 1))


def test_no_copy_hands_the_batchs_tensors_through():
    inputs, batch = make(no_copy=True), make_batch(2, 1)
    batch.rows = batch.rows.int()
    inputs.fill_from(batch)
    view = inputs.view()
    assert view.ids is batch.ids
    assert view.positions is batch.positions
    assert (view.rows.tolist(), view.rows.dtype) == ([100, 101], torch.int64)
    assert view.ends.tolist() == [2, 3]
    assert inputs.capacity("tokens") == 0


def test_no_copy_copies_for_padding_and_once_frozen():
    inputs, batch = make(no_copy=True), make_batch(2, 1)
    inputs.fill_from(batch)
    view = inputs.view(padded_tokens=4)
    assert view.ids.tolist() == [100, 101, 102, 9]
    assert inputs.view().ids.data_ptr() == view.ids.data_ptr() != batch.ids.data_ptr()
    inputs.fill_from(batch)
    assert inputs.view().ids is batch.ids
    inputs.freeze()
    for _ in range(2):
        assert inputs.view().ids.data_ptr() == view.ids.data_ptr()
        assert inputs.view().ids.tolist() == [100, 101, 102]
        inputs.fill_from(batch)


def test_no_copy_writes_for_captured_graphs_without_a_view():
    inputs = make(no_copy=True, max_requests=2)
    inputs.freeze()
    inputs.fill_from(make_batch(2))
    assert inputs.buffer("rows").tolist() == [100, -1]
    with pytest.raises(StepInputError, match="room for 2 requests, 3 are needed"):
        inputs.fill_from(make_batch(1, 1, 1))


def test_freezing_leaves_what_was_never_filled_to_be_built():
    inputs = StepInputs("cpu", no_copy=True)
    inputs.register("rows", "batch", torch.int64)
    inputs.register("ids", "tokens", torch.int64)
    inputs.freeze()
    inputs.fill_from({"rows": [1]})
    assert (inputs.view(1, 3).ids, inputs.capacity("tokens")) == (None, 0)
    inputs.fill_from({"rows": [1], "ids": [4, 5, 6]})
    assert inputs.view().ids.tolist() == [4, 5, 6]


def test_freezing_settles_the_shape_of_entries():
    inputs = StepInputs("cpu", max_tokens=4)
    inputs.register("positions", "tokens", torch.int64)
    inputs.fill_from({"positions": []})
    inputs.freeze()
    with pytest.raises(StepInputError, match=r"slot 'positions' has shape \[n\] since its first fill, and was given"):
        inputs.fill_from({"positions": [[1, 2, 3]]})


def test_a_view_can_be_the_next_batch():
    inputs = make()
    for no_copy in (False, True):
        inputs = make(no_copy=no_copy)
        inputs.fill_from(make_batch(1, 2, 1))
        inputs.fill_from(inputs.view(4, 4).slice(1))
        assert inputs.view().rows.tolist() == [101, 102]
        assert inputs.view().ids.tolist() == [101, 102, 103]
        assert inputs.view(3, 4).rows.tolist() == [101, 102, -1]


def test_a_slot_that_takes_what_another_held_before():
    inputs = StepInputs("cpu")
    inputs.register("now", "batch", torch.int64)
    inputs.register("before", "batch", torch.int64)
    inputs.fill_from({"now": [1, 2]})
    inputs.fill_from({"now": [3, 4], "before": inputs.view().now})
    assert (inputs.view().now.tolist(), inputs.view().before.tolist()) == ([3, 4], [1, 2])


def test_buffers_made_in_inference_mode_are_written_outside_of_it():
    inputs = make()
    with torch.inference_mode():
        inputs.fill_from(make_batch(2, 1))
    inputs.fill_from(make_batch(1))
    with_grad = StepInputs("cpu", no_copy=True)
    with_grad.register("weights", "batch", torch.float32)
    with_grad.fill_from({"weights": torch.ones(2, requires_grad=True)})
    assert not with_grad.view().weights.requires_grad
    assert not with_grad.view(4).weights.requires_grad


lengths = st.lists(st.integers(0, 4), max_size=6)
places = st.none() | st.integers(-8, 8)


def raw(batch, chosen):
    """What a plain loop over the requests picks out of the raw batch's tensors."""
    ends = [0, *batch.extend_lens.cumsum(0).tolist()]
    tokens = [t for request in chosen for t in range(ends[request], ends[request + 1])]
    return {
        "rows": batch.rows[chosen],
        "extend_lens": batch.extend_lens[chosen],
        "ids": batch.ids[tokens],
        "positions": batch.positions[tokens],
    }


def assert_equals_raw(view, batch, chosen):
    expected = raw(batch, chosen)
    for name, tensor in expected.items():
        assert torch.equal(getattr(view, name), tensor), name
    assert (view.num_requests, view.num_tokens) == (len(chosen), len(expected["ids"]))


@settings(max_examples=150, deadline=None)
@given(lengths, places, places, st.integers(0, 3), st.booleans())
def test_a_slice_is_what_slicing_the_raw_batch_gives(lens, start, stop, padding, no_copy):
    inputs, batch = make(no_copy=no_copy), make_batch(*lens)
    inputs.fill_from(batch)
    view = inputs.view(len(lens) + padding, sum(lens) + padding).slice(start, stop)
    chosen = list(range(len(lens)))[start:stop]
    assert_equals_raw(view, batch, chosen)
    assert_equals_raw(view.slice(1), batch, chosen[1:])
    assert torch.equal(view.ends, batch.extend_lens.cumsum(0)[start:stop])


@settings(max_examples=150, deadline=None)
@given(lengths, st.data(), st.integers(0, 3))
def test_a_selection_is_what_indexing_the_raw_batch_gives(lens, data, padding):
    inputs, batch = make(), make_batch(*lens)
    inputs.fill_from(batch)
    view = inputs.view(len(lens) + padding, sum(lens) + padding)
    mask = data.draw(st.lists(st.booleans(), min_size=len(lens), max_size=len(lens)))
    kept = [request for request, keep in enumerate(mask) if keep]
    assert_equals_raw(view.select(torch.tensor(mask, dtype=torch.bool)), batch, kept)
    assert_equals_raw(view.select(mask), batch, kept)
    if lens:
        numbers = data.draw(st.lists(st.integers(-len(lens), len(lens) - 1), max_size=8))
        chosen = [number % len(lens) for number in numbers]
        assert_equals_raw(view.select(numbers), batch, chosen)
        assert_equals_raw(view.select(chosen).slice(1, 3), batch, chosen[1:3])


def test_slices_stay_in_the_buffers():
    inputs = make()
    inputs.fill_from(make_batch(2, 1, 1))
    assert inputs.view().slice(1).ids.data_ptr() == inputs.view().ids[2:].data_ptr()


def test_one_token_a_request_where_no_lengths_are_given():
    decode = {"rows": [5, 6, 7], "ids": [50, 60, 70]}
    for name in (None, "extend_lens"):
        inputs = StepInputs("cpu", tokens_per_request=name)
        inputs.register("rows", "batch", torch.int64)
        inputs.register("extend_lens", "batch", torch.int64)
        inputs.register("ids", "tokens", torch.int64)
        inputs.fill_from(decode)
        assert inputs.view(4, 4).select([2, 0]).ids.tolist() == [70, 50]
        assert inputs.view().slice(1).extend_lens is None
        inputs.fill_from({"rows": [1, 2]})
        assert inputs.view().slice(1).rows.tolist() == [2]
        inputs.fill_from(decode | {"ids": [1, 2]})
        with pytest.raises(StepInputError, match="which of 2 tokens are of which of 3 requests: no slot says how many"):
            inputs.view().slice(1)


def test_lengths_that_do_not_add_up():
    inputs, batch = make(), make_batch(2, 1)
    batch.extend_lens[1] = 4
    inputs.fill_from(batch)
    with pytest.raises(StepInputError, match=r"their lengths are \[2, 4\]. Register a slot with the tokens of each"):
        inputs.view().select([0])


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        ([True], "the mask has 1 entries for 2 requests. Give one per real request"),
        ([True, False, True, False], "the mask has 4 entries for 2 requests"),
        ([0, 2], "there is no request 2 in 2"),
        ([-3], "there is no request -3 in 2"),
        ([[0]], r"Give \[n\] numbers or a \[n\] bool mask"),
        ([0.5], r"Give \[n\] numbers or a \[n\] bool mask"),
    ],
)
def test_selections_that_are_none(requests, message):
    inputs = make()
    inputs.fill_from(make_batch(2, 1))
    with pytest.raises(StepInputError, match=message):
        inputs.view(4, 4).select(requests)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (7, "slot 'rows' was given a single value. Give one per request"),
        (torch.tensor(7), "slot 'rows' was given a single value"),
        ([1.5], "slot 'rows' holds torch.int64 and was given torch.float32, .* Convert it in the batch, or register"),
        (torch.tensor([1.0]), "slot 'rows' holds torch.int64 and was given torch.float32"),
        (["a"], "slot 'rows' holds torch.int64 and cannot be made from a list"),
        ([[1], [2, 3]], "slot 'rows' holds torch.int64 and cannot be made from a list"),
        ([1 << 70], "slot 'rows' .* a sequence of numbers in range"),
        ([[1, 2]], r"slot 'rows' has shape \[n\] since its first fill, and was given \[n, 2\]"),
    ],
)
def test_sources_that_do_not_fit(source, message):
    inputs = StepInputs("cpu")
    inputs.register("rows", "batch", torch.int64)
    inputs.fill_from({"rows": [1]})
    with pytest.raises(StepInputError, match=message):
        inputs.fill_from({"rows": source})


def test_number_in_a_list_that_overflows_a_narrow_slot():
    inputs = StepInputs("cpu")
    inputs.register("rows", "batch", torch.int32)
    with pytest.raises(StepInputError, match=r"slot 'rows' holds torch.int32 and cannot be made from a list"):
        inputs.fill_from({"rows": [1 << 40]})


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (None, "slot 'made' was computed as None"),
        (torch.zeros(3), "slots 'rows' and 'made' disagree on the number of requests: 2 and 3"),
    ],
)
def test_computed_slot_that_does_not_fit(made, message):
    inputs = StepInputs("cpu")
    inputs.register("rows", "batch", torch.int64)
    inputs.register("made", "batch", torch.float32, compute=lambda batch, inputs: made)
    with pytest.raises(StepInputError, match=message):
        inputs.fill_from({"rows": [1, 2]})
    with pytest.raises(StepInputError, match="there is no batch to view"):
        inputs.view()


def test_padding_below_the_real_size():
    inputs = make()
    inputs.fill_from(make_batch(2, 1))
    with pytest.raises(StepInputError, match=r"padded_bs is 1, but the batch has 2 requests. Pad to at least 2"):
        inputs.view(padded_bs=1)
    with pytest.raises(StepInputError, match="padded_tokens is 2, but the batch has 3 tokens"):
        inputs.view(padded_tokens=2)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("rows", "batch", torch.int64), {}, "slot 'rows' is registered twice"),
        (("new", "request", torch.int64), {}, "there is no axis 'request'. Use 'batch' or 'tokens'"),
        (("select", "batch", torch.int64), {}, "'select' cannot be the name of a slot"),
        (("num_tokens", "batch", torch.int64), {}, "'num_tokens' cannot be the name of a slot"),
        (("_new", "batch", torch.int64), {}, "'_new' cannot be the name of a slot"),
        (("new", "batch", torch.uint8), {"pad": -1}, "slot 'new' holds torch.uint8, and its pad -1 is none"),
        (("new", "batch", torch.int64), {"pad": 0.5}, "slot 'new' holds torch.int64, and its pad 0.5 is none"),
        (("new", "batch", torch.int64), {"exposed": False}, "slot 'new' is not computed, yet kept out of views"),
        (("lens", "tokens", torch.int64), {}, "slot 'lens' is tokens_per_request, but not whole numbers along axis"),
        (("lens", "batch", torch.float32), {}, "slot 'lens' is tokens_per_request, but not whole numbers along axis"),
    ],
)
def test_slots_that_cannot_be(arguments, options, message):
    inputs = StepInputs("cpu", tokens_per_request="lens")
    inputs.register("rows", "batch", torch.int64)
    with pytest.raises(StepInputError, match=message):
        inputs.register(*arguments, **options)


def test_registering_after_freeze():
    inputs = StepInputs("cpu")
    inputs.freeze()
    with pytest.raises(StepInputError, match=r"slot 'rows' is registered after freeze\(\). Register all slots before"):
        inputs.register("rows", "batch", torch.int64)


def test_settings_and_names_that_cannot_be():
    with pytest.raises(StepInputError, match="max_tokens is -1"):
        StepInputs("cpu", max_tokens=-1)
    with pytest.raises(StepInputError, match=r"there is no slot 'row'. The slots are: rows, extend_lens, ids"):
        make().buffer("row")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_captured_graph_reads_each_steps_inputs():
    inputs = StepInputs("cuda", max_requests=4)
    inputs.register("rows", "batch", torch.int64, pad=-1)
    inputs.freeze()
    inputs.fill_from({"rows": [1, 2]})
    view = inputs.view(padded_bs=4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, counts = view.rows * 2, inputs.counts + 0
    for rows in (torch.tensor([7, 8, 9]), torch.tensor([5], device="cuda"), None):
        inputs.fill_from({"rows": rows})
        graph.replay()
        real = [] if rows is None else (rows * 2).tolist()
        assert out.tolist() == real + [-2] * (4 - len(real))
        assert counts.tolist() == [len(real), 0, 0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16])
def test_tensors_of_the_device_come_with_the_numbers_of_a_batch_alike(monkeypatch, dtype):
    inputs = StepInputs("cuda", max_requests=4, max_tokens=8)
    for name, axis in (("rows", "batch"), ("ids", "tokens"), ("positions", "tokens")):
        inputs.register(name, axis, torch.int64, pad=-1)

    def batch(first: int) -> dict[str, Any]:
        ids = torch.arange(first, first + 6, dtype=dtype, device="cuda")
        return {"rows": [first, 1], "ids": ids[::2], "positions": ids[3:].clone()}

    for step in range(3):
        inputs.fill_from(batch(step))
    copies, copy = [], torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda outs, given: (copies.append(len(outs)), copy(outs, given)))
    for first in (20, 30):
        inputs.fill_from(batch(first))
        assert inputs.view().rows.tolist() == [first, 1]
        assert inputs.view().ids.tolist() == [first, first + 2, first + 4]
        assert inputs.view().positions.tolist() == [first + 3, first + 4, first + 5]
    assert copies == ([] if dtype is not torch.int16 else [2, 2])


@pytest.fixture
def capture(monkeypatch):
    """Between the two calls of it, fills are part of a graph; what a replay does is done by hand."""
    state = [False]
    monkeypatch.setattr(step_inputs, "capturing", lambda: state[0])
    return lambda: state.__setitem__(0, not state[0])


def test_a_graph_writes_the_counts_of_its_batch_and_leaves_the_step(capture):
    inputs = make(max_requests=4, max_tokens=8)
    inputs.fill_from(make_batch(1, 1))
    inputs.counts.fill_(99)
    inputs.fill_from(make_batch(1, 1))
    assert inputs.counts.tolist() == [99, 99, 99]  # they are as they were, as far as anybody knows
    capture()
    inputs.step = 5
    inputs.fill_from(make_batch(1, 1))
    capture()
    assert inputs.counts.tolist() == [2, 2, 99]
    inputs.counts[:2] = 77  # a replay, at any time from now on
    inputs.fill_from(make_batch(1, 1))
    assert inputs.counts.tolist() == [2, 2, 5]


def test_a_graph_takes_its_real_counts_from_the_device(capture):
    inputs = make(max_requests=4, max_tokens=8)
    batch = make_batch(1, 1, 1)
    capture()
    inputs.fill_from({**vars(batch), "real_counts": torch.tensor([1, 1])})
    capture()
    assert inputs.counts.tolist() == [1, 1, 0]
    assert inputs.view().num_requests == 3


def test_what_a_replay_left_behind_becomes_padding_again(capture):
    inputs = make(max_requests=4, max_tokens=8)
    capture()
    inputs.fill_from(make_batch(1, 1, 1, base=40))
    capture()
    rows = inputs.buffer("rows")
    inputs.fill_from(make_batch(1, base=10))
    padding = inputs.view(padded_bs=4).rows[1:].clone()
    rows[:3] = 40  # a replay
    inputs.fill_from(make_batch(1, base=10))
    assert torch.equal(inputs.view(padded_bs=4).rows[1:], padding)


def test_memory_of_kernels_keeps_its_address_and_its_padding():
    inputs = make(max_requests=4, max_tokens=8)
    inputs.register_memory("scratch", "batch", torch.int32, pad=-1, trailing=(2,))
    inputs.fill_from(make_batch(1, 1, 1))
    first = inputs.view().scratch
    assert first.shape == (3, 2)
    first.fill_(7)
    inputs.fill_from(make_batch(1))
    padded = inputs.view(padded_bs=4).scratch
    assert padded.data_ptr() == first.data_ptr()
    assert padded.tolist() == [[7, 7], [-1, -1], [-1, -1], [-1, -1]]


def test_padding_of_an_earlier_longer_step_is_restored():
    inputs = make(max_requests=4, max_tokens=8)
    inputs.fill_from(make_batch(1, 1, 1, base=500))
    for _ in range(2):
        inputs.fill_from(make_batch(1, base=500))
        assert inputs.view(padded_bs=4).rows.tolist()[1:] == inputs.view(padded_bs=4).rows.tolist()[1:2] * 3
        assert inputs.view(padded_bs=4).rows.tolist()[0] == 500


def test_the_current_stream_is_made_anew_only_where_another_one_became_current(monkeypatch):
    class Stream:
        def __init__(self, raw):
            self.cuda_stream = raw

    raw, made = [5], []
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: raw[0] + index, raising=False)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: made.append(device) or Stream(raw[0] + device.index)
    )
    current = CurrentStream(torch.device("cuda:1"))
    assert [current().cuda_stream, current().cuda_stream] == [6, 6]
    assert len(made) == 1
    raw[0] = 8
    assert [current().cuda_stream, current().cuda_stream] == [9, 9]
    assert made == [torch.device("cuda:1")] * 2
