"""Every argument that a user can get wrong is answered with its name and the remedy, before it is used."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

import kvcanary_fx
from kvcanary_fx import Batch, CanaryConfig, EngineError, InvalidSettingError, KVPool, StepInputError
from kvcanary_fx.engine.step_inputs import StepInputs
from kvcanary_fx.errors import RequestIdError

SLOTS, HEADS, DIM = 12, 2, 4
META = torch.device("meta")


def kv(*shape, **kwargs):
    return torch.zeros(shape or (SLOTS, HEADS, DIM), **kwargs)


def table(**kwargs):
    return torch.zeros(4, 8, dtype=torch.int32, **kwargs)


K, V = kv(), kv()
BOTH = kv(SLOTS, 2, HEADS, DIM)
WIDE = kv(SLOTS + 4, HEADS, DIM)

# ---- what a pool is made of: argument, wrong values, what the error says

POOL = {
    "layers": [
        ([K, V], r"layers\[0\] that is a Tensor.*layers=\[\(k, v\), ...\]"),
        (K, r"layers that are a Tensor: give layers=\[\(k, v\), ...\]"),
        ({"a": (K, V)}, "layers that are a dict"),
        ([(K, None)], r"layers\[0\] a NoneType, not a tensor"),
        ([(K, [1, 2])], "a list, not a tensor"),
        ([], "no layers"),
        ([()], "layer without tensors"),
        ([(K, K)], r"the same bytes in layers\[0\]\[0\] and layers\[0\]\[1\]"),
        ([(WIDE[:SLOTS], WIDE[4:])], "the same bytes in"),
        ([(WIDE[:SLOTS], V), (WIDE[4:], kv())], r"layers\[0\]\[0\] and layers\[1\]\[0\], which overlap"),
        ([(kv(1, HEADS, DIM).expand(SLOTS, HEADS, DIM), V)], "expanded"),
        ([(kv(SLOTS, 1, DIM).expand(SLOTS, HEADS, DIM), V)], "expanded"),
        ([(kv(device=META), kv(device=META))], "meta device"),
        ([(kv(SLOTS, DIM).to_sparse(), kv(SLOTS, DIM).to_sparse())], "dense tensor"),
        ([(kv(SLOTS, 0), kv(SLOTS, 0))], "at least one element"),
        ([(kv(0, DIM), kv(0, DIM))], "one slot|not among them"),
        ([(kv(dtype=torch.int64), kv(dtype=torch.int64))], "torch.uint8"),
        ([(kv(dtype=torch.bool), kv(dtype=torch.bool))], "floating-point or 8-bit"),
        ([(kv(dtype=torch.complex64), kv(dtype=torch.complex64))], "floating-point or 8-bit"),
        ([(K, kv(SLOTS - 1, HEADS, DIM))], "different numbers of slots"),
    ],
    "request_table": [
        (None, "request_table that is a NoneType"),
        ([[0, 1]], "request_table that is a list"),
        (torch.zeros(4, 8), "integer"),
        (torch.zeros(4, 8, dtype=torch.bool), "integer"),
        (torch.zeros(8, dtype=torch.int32), r"integer \[requests, width\]"),
        (table(device=META), "meta device"),
        (table().to_sparse(), "dense tensor"),
    ],
    "name": [("", "name=''"), (None, "a string"), (3, "a string")],
    "layer_names": [("L", "sequence of strings"), ([3], "sequence of strings"), (["a", "b"], "1 layers and 2")],
    "half_names": [("KV", "sequence of strings"), (None, "sequence of strings"), ([1, 2], "sequence of strings")],
    "paged": [(1, "True or False"), (None, "True or False"), ("no", "True or False")],
    "order": [("HDN", "'NHD'"), (None, "'NHD'"), ("HND", "paged")],
    "kv_axis": [(True, "number of an axis"), (1.0, "number of an axis"), (9, "kv_axis=9"), ("K", "number of an axis")],
    "table_page_size": [(v, "whole number of slots, at least 1") for v in (0, -1, 1.5, True, None, "4")],
    "slot_map": [
        ([0, 1], "a list, not a tensor"),
        (torch.zeros(SLOTS), "must be integer"),
        (torch.zeros(SLOTS, dtype=torch.bool), "must be integer"),
        (torch.zeros(2, SLOTS, dtype=torch.int64), "must be integer"),
        (torch.zeros(SLOTS, dtype=torch.int64, device=META), "meta device"),
    ],
    "slots_from": [(None, "field of the batch"), ("", "field of the batch"), ("_x", "field of the batch")],
    "reserved": [
        (0, r"a tuple of slots, \(\) for none"),
        (None, "a tuple of slots"),
        ((0.0,), "a tuple of slots"),
        ((True,), "a tuple of slots"),
        ("0", "a tuple of slots"),
        ((SLOTS,), "not among them"),
        ((-1,), "not among them"),
    ],
    "never_read": [
        *((v, r"a tuple of reserved slots, \(\) for none") for v in (0, None, (0.0,), (True,), "0")),
        *((v, "not among its reserved slots") for v in ((1,), (SLOTS,), (-1,))),
    ],
    "token_offset": [(v, "whole number of tokens, 0 or more") for v in (-1, 0.5, True, None)],
    "window": [(1.5, "whole number"), (True, "whole number"), ("8", "whole number")],
    "chunk": [(1.5, "whole number"), (True, "whole number"), ("8", "whole number")],
    "padding_row": [
        *((v, "number of a row of the request table, or None") for v in (1.5, True, "0")),
        (99, "request_table of 4 rows"),
        (-1, "request_table of 4 rows"),
    ],
    "ring": [(1, "True or False"), (None, "True or False")],
    "tokens_per_slot": [(0, "at least one"), (-2, "at least one"), (1.5, "whole number"), (True, "whole number")],
    "state": [(1, "True or False")],
    "written_once": [(1, "True or False")],
    "batch": [("", "field of the batch"), (3, "field of the batch")],
    "scales": [
        (torch.ones(2), "dict of tensors by name"),
        ({1: torch.ones(2)}, "dict of tensors by name"),
        ({"s": 0.5}, r"scales\['s'\] that is a float"),
        ({"s": torch.ones(2, device=META)}, "meta device"),
    ],
    "allocations": [(0, "True or False"), (None, "True or False")],
}
POOL_CASES = [
    pytest.param(name, *case, id=f"{name}-{i}") for name, cases in POOL.items() for i, case in enumerate(cases)
]


@pytest.mark.parametrize(("name", "value", "message"), POOL_CASES)
def test_pool_argument_that_cannot_be_is_refused(name, value, message):
    arguments = {"layers": [(K, V)], "request_table": table()} | {name: value}
    with pytest.raises(EngineError, match=message):
        KVPool(**arguments)


def test_every_argument_of_a_pool_is_in_the_table():
    assert set(POOL) == {field.name for field in dataclasses.fields(KVPool)}


def test_two_layers_may_not_share_a_name():
    with pytest.raises(EngineError, match="each another one"):
        KVPool([(K, V), (kv(), kv())], table(), layer_names=["a", "a"])


@pytest.mark.parametrize(
    "layers",
    [
        [(BOTH[:, 0], BOTH[:, 1])],
        [(WIDE[..., :3], WIDE[..., 3:])],
        [(K, V), (K, V)],
        [(WIDE[:SLOTS],)],
        [[K, V]],
        ((K, V),),
    ],
    ids=["interleaved", "parts of a row", "another layer's cache", "latent", "lists", "tuples"],
)
def test_tensors_that_share_a_storage_and_no_byte_are_a_pool(layers):
    assert KVPool(layers, table()).slots in (SLOTS, SLOTS + 4)


# ---- installing


@pytest.mark.parametrize(
    ("pools", "settings", "message"),
    [
        ([], {}, "at least one KVPool"),
        ([(K, V)], {}, "takes KVPools, not a tuple"),
        ([[(K, V)], table()], {}, "takes KVPools, not a list"),
        (None, {"sweep_every": -1}, "sweep_every is -1: give a whole number of steps, 0 for never"),
        (None, {"sweep_every": 1.5}, "sweep_every is 1.5"),
        (None, {"health_every": -1}, "health_every is -1"),
        (None, {"stats_every": None}, "stats_every is None"),
        (None, {"window_report_every": True}, "window_report_every is True"),
        (None, {"max_requests": 0}, "max_requests is 0"),
        (None, {"max_requests": 1.5}, "max_requests is 1.5"),
        (None, {"max_tokens": "all"}, "max_tokens is 'all'"),
        (None, {"checks": ()}, "setting 'checks' .* at least one"),
        (None, {"mode": "loud"}, "setting 'mode'"),
        (None, {"config": {"mode": "log"}}, "setting 'config' .* must be a CanaryConfig"),
    ],
)
def test_what_cannot_be_installed(pools, settings, message):
    pools = [KVPool([(kv(), kv())], table())] if pools is None else pools
    with pytest.raises((EngineError, InvalidSettingError), match=message):
        kvcanary_fx.install_canary(*pools, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dynamic": "yes"}, "'dynamic' .* True, False or None"),
        ({"fullgraph": 1}, "'fullgraph' .* True or False"),
        ({"compile_mode": 3}, "'compile_mode' .* a mode of torch.compile"),
        ({"compile_options": "x"}, "'compile_options' .* a dict"),
        ({"modes": "log"}, "unknown setting 'modes'"),
        ({"mode": None}, "'mode'"),
    ],
)
def test_what_a_module_cannot_be_protected_with(settings, message):
    with pytest.raises(ValueError, match=message):
        kvcanary_fx.protect(nn.Linear(2, 2), **settings)


@pytest.mark.parametrize("target", ["x", 3, nn.Linear(2, 2), nn.Linear])
def test_what_is_not_protected_has_no_session(target):
    with pytest.raises(TypeError, match=r"is not protected: call kvcanary_fx\.protect"):
        kvcanary_fx.session_of(target)


# ---- a session at work


@pytest.fixture
def session():
    made = kvcanary_fx.install_canary(
        KVPool([(kv(), kv())], torch.arange(32, dtype=torch.int32).view(4, 8) % SLOTS), mode="log"
    )
    made.mark_ready()
    made.pool.allocate([3, 4, 5], owner="A")
    made.pool.adopt([3, 4], owner="A")
    return made


SLOT_ARGUMENTS = [
    (3, "slots are integers, and were given as 3: give a tensor or a sequence"),
    ("3", "slots are integers, and were given as '3'"),
    (None, "slots are integers, and were given as None"),
    ([1.5], "slots are integers, and were given as torch.float32"),
    ([True], "slots are integers, and were given as torch.bool"),
    (["a"], "slots are integers, and were given as a sequence of something else"),
    ([1 << 70], "slots are integers, and were given as a sequence of something else"),
    ([[1], [2, 3]], "slots are integers, and were given as a sequence of something else"),
    (torch.tensor([1.0]), "slots are integers, and were given as torch.float32"),
    (torch.tensor([1j]), "slots are integers, and were given as torch.complex64"),
    (torch.ones(2, dtype=torch.int64, device=META), "meta device"),
    (torch.ones(2, dtype=torch.int64).to_sparse(), "dense tensor"),
]
OF_SLOTS = {
    "allocate": lambda session, slots: session.pool.allocate(slots),
    "release": lambda session, slots: session.pool.release(slots),
    "share": lambda session, slots: session.pool.share(slots),
    "hand_over": lambda session, slots: session.pool.hand_over(slots),
    "adopt": lambda session, slots: session.pool.adopt(slots),
    "forget": lambda session, slots: session.pool.forget(slots),
    "reject": lambda session, slots: session.pool.reject(slots),
    "export": lambda session, slots: session.pool.export(slots),
    "import_": lambda session, slots: session.pool.import_(session.pool.export([3]), slots),
    "sweep": lambda session, slots: session.sweep.run([3] if slots is None else slots),
    "digest": lambda session, slots: session.digest(slots),
}


@pytest.mark.parametrize("act", OF_SLOTS)
def test_slots_that_are_no_integers_are_refused_and_nothing_is_done(session, act):
    before = session.pool.space.block.clone()
    for slots, message in SLOT_ARGUMENTS:
        if act != "sweep" or slots is not None:  # there None is all of them
            with pytest.raises(EngineError, match=message):
                OF_SLOTS[act](session, slots)
    assert torch.equal(session.pool.space.block, before)
    assert session.violations() == []


@pytest.mark.parametrize("act", OF_SLOTS)
def test_slots_that_do_not_exist_are_reported(session, act):
    OF_SLOTS[act](session, [SLOTS])
    OF_SLOTS[act](session, [-2])
    assert {(v.check, v.why, v.slot) for v in session.violations()} == {
        ("bounds", "OUT_OF_RANGE", SLOTS),
        ("bounds", "OUT_OF_RANGE", -2),
    }


@pytest.mark.parametrize("act", OF_SLOTS)
def test_no_slots_are_legal(session, act):
    if act != "import_":
        OF_SLOTS[act](session, [])
        OF_SLOTS[act](session, torch.empty(0, dtype=torch.int32))
    assert session.violations() == []


@pytest.mark.parametrize(
    ("act", "error", "message"),
    [
        (lambda s: s.pool.allocate([6], owner=1.5), RequestIdError, "request id is a string or an int"),
        (lambda s: s.pool.share([3], owner=["A"]), RequestIdError, "request id is a string or an int"),
        (lambda s: s.pool.adopt([3], tokens=[1]), EngineError, "tokens and positions together"),
        (lambda s: s.pool.adopt([3], tokens=[1.5], positions=[0]), EngineError, "tokens are integers"),
        (lambda s: s.pool.adopt([3], tokens=[1], positions=[0.5]), EngineError, "positions are integers"),
        (lambda s: s.pool.adopt([3], tokens=5, positions=[0]), EngineError, "tokens are integers"),
        (lambda s: s.pool.adopt([3], tokens=[1, 2], positions=[0, 1]), EngineError, "1 slots, 2 tokens"),
        (lambda s: s.pool.adopt([3], tokens=[1], positions=[0], namespace="a"), EngineError, "namespaces are integers"),
        (lambda s: s.pool.adopt([3], tokens=[1], positions=[0], namespace=0.5), EngineError, "namespaces are integers"),
        (lambda s: s.pool.adopt([3], positions=[0]), EngineError, "tokens and positions together"),
        (lambda s: s.pool.announce([3], [1], [1]), EngineError, "beyond a history of 1 tokens"),
        (lambda s: s.pool.announce([3], [1], [-1]), EngineError, "beyond a history of 1 tokens"),
        (lambda s: s.pool.announce([3], [1, 2], [0, 1]), EngineError, "1 slots, 2 positions"),
        (lambda s: s.pool.announce([3], [1.5], [0]), EngineError, "history are integers"),
        (lambda s: s.pool.announce([3], [1], [0.5]), EngineError, "positions are integers"),
        (lambda s: s.pool.announce([3], [1], [0], namespace="a"), EngineError, "namespaces are integers"),
        (lambda s: s.pool.announce([3], [1], torch.zeros(1, dtype=torch.int64, device="meta")), EngineError, "meta"),
        (lambda s: s.pool.expect([3], [3], [1], [0]), EngineError, "expect takes what export returned, not a list"),
        (lambda s: s.pool.expect([3], s.pool.export([3, 4]), [1], [0]), EngineError, "2 slots"),
        (lambda s: s.pool.expect([3], s.pool.export([3]).without_bytes(), [1], [0]), EngineError, "import_ takes them"),
        (lambda s: s.pool.expect([3], s.pool.export([3]), [1], [1]), EngineError, "expect got positions beyond"),
        (lambda s: s.pool.import_([3], [3]), EngineError, "import_ takes what export returned, not a list"),
        (lambda s: s.pool.import_(s.pool.export([3, 4]), [3]), EngineError, "2 slots"),
        (lambda s: s.sweep.run(pool="x"), EngineError, "no pool 'x': its pools are 'kv'"),
        (lambda s: s.digest([3], pool="x"), EngineError, "no pool 'x'"),
        (lambda s: s.digest([3], what="all"), EngineError, "'identity' or 'content'"),
        (lambda s: s.compare_digests("a", 1), EngineError, "a digest is 'a'"),
        (lambda s: s.compare_digests(1, 1.5), EngineError, "a digest is 1.5"),
        (lambda s: s.owners("AB"), EngineError, "request_ids is 'AB': give a list"),
        (lambda s: s.owners(7), EngineError, "request_ids is 7: give a list"),
        (lambda s: s.owners([1.5]), RequestIdError, "request id is a string or an int"),
        (lambda s: s.pools["x"], EngineError, "no pool 'x'"),
    ],
)
def test_call_that_cannot_be_is_refused(session, act, error, message):
    with pytest.raises(error, match=message):
        act(session)


# ---- the batch of a step


def batch(**changed):
    """Request A adds two tokens behind three, request B one behind none."""
    given = dict(
        input_ids=[7, 8, 9], slots=[6, 7, 8], request_rows=[0, 1], prefix_lens=[3, 0], extend_lens=[2, 1],
        request_ids=["A", "B"],
    )  # fmt: skip
    return given | changed


BATCH = {
    "input_ids": [5, "abc", [1.5, 2, 3], [True] * 3, [1, 2], [[7, 8, 9]], torch.zeros(3), torch.zeros(3).bool()],
    "slots": [5, [0.5, 1, 2], [1, 2], torch.zeros(3), torch.zeros(3).bool(), torch.zeros(3, 1, dtype=torch.int64)],
    "request_rows": [0, [0.5, 1], [0], [0, 1, 2], torch.zeros(2)],
    "prefix_lens": [3, [3], [3.5, 0], [-1, 0], torch.tensor([-1, 0]), [[3, 0]]],
    "extend_lens": [2, [2], [2.5, 1], [-1, 1], torch.tensor([-1, 4]), [3, 1], torch.tensor([3, 1])],
    "positions": [3, [3, 4], [0.5, 1, 2], torch.zeros(3, 3, dtype=torch.int64), [[3, 4, 0]] * 3],
    "parents": [0, [-1, 0], [0.5, 1, 2]],
    "request_ids": ["AB", 7, ["A"], [1.5, "B"], torch.zeros(2), torch.zeros(3, dtype=torch.int64)],
    "namespaces": [0, [0], [0.5, 1]],
    "history": [5, [1, 2], [[1, 2], [3]], torch.zeros(2, 4), torch.zeros(1, 4, dtype=torch.int64), "ab"],
    "history_lens": [4, [4], [0.5, 1]],
    "history_by_row": [1, "yes", torch.tensor(True)],
    "in_flight": [1, "yes", torch.tensor(True)],
    "real_counts": [2, [2, 3], torch.tensor([2, 3], dtype=torch.int32), torch.tensor([2])],
}


@pytest.mark.parametrize(
    ("name", "value"), [pytest.param(n, v, id=f"{n}-{i}") for n, vs in BATCH.items() for i, v in enumerate(vs)]
)
@pytest.mark.parametrize("make", [dict, Batch], ids=["dict", "Batch"])
def test_batch_that_cannot_be_is_refused_by_the_fields_name(session, name, value, make):
    _refuse(session, name, value, make)


@pytest.mark.parametrize("make", [dict, Batch], ids=["dict", "Batch"])
def test_batch_that_cannot_be_is_refused_after_others_of_its_shape(session, make, monkeypatch):
    monkeypatch.setattr(StepInputs, "_gathers", lambda self: not self._captured)  # as on a GPU
    for name, values in BATCH.items():
        for value in values:
            for _ in range(3):
                session.inputs.fill_from(make(**batch()))
            assert session.inputs.may_come_again
            _refuse(session, name, value, make)


def _refuse(session, name, value, make):
    """A step with a batch whose field has such a value raises, and names the field."""
    given = batch(**{name: value}) | ({"history_lens": [4, 4]} if name == "history" else {})
    named = "request_ids|owners|request id" if name == "request_ids" else name
    with (
        pytest.raises((StepInputError, EngineError, TypeError), match=named) as caught,
        session.step(make(**given)),
        session.forward(),
    ):
        pass
    assert type(caught.value) is not TypeError
    with session.step(batch()), session.forward():  # the session is as usable as before
        pass


def test_every_field_of_a_batch_is_in_the_table():
    assert set(BATCH) == {field.name for field in dataclasses.fields(Batch)}


@pytest.mark.parametrize("given", [3, "batch", [], {}, Batch([], [], None, None)])
def test_what_is_no_batch_is_refused(session, given):
    missing = pytest.raises(EngineError, match=r"the batch has no .*input_ids|the batch has no .*request_rows")
    with missing, session.step(given), session.forward():
        pass


@pytest.mark.parametrize(
    "given",
    [
        dict(input_ids=[], slots=[], request_rows=[], prefix_lens=[], extend_lens=[], request_ids=[]),
        dict(input_ids=[], slots=[], request_rows=[], prefix_lens=[]),
        dict(input_ids=[], slots=[], request_rows=[0], prefix_lens=[2], extend_lens=[0], request_ids=["A"]),
        dict(input_ids=[], slots=[], request_rows=[], prefix_lens=[], extend_lens=[], request_ids=[], in_flight=True),
        batch(parents=[-1, 0, -1]),
        batch(namespaces=[0, 5], history=[[1] * 8] * 2, history_lens=[0, 0]),
        batch(input_ids=torch.tensor([7, 8, 9], dtype=torch.int32), extend_lens=torch.tensor([1, 1])),
        batch(request_ids=(7, None)),
    ],
    ids=["nothing", "no lengths", "no tokens", "nothing in flight", "tree", "all", "padding", "ids of nobody"],
)
def test_batch_without_tokens_or_with_padding_is_legal(session, given):
    session.pool.reject([4])
    session.pool.adopt([4])
    with session.step(given), session.forward():
        pass


@pytest.mark.parametrize("index", [-1, 1.5, "0", None, True])
def test_index_of_a_forward_is_a_whole_number(session, index):
    refused = pytest.raises(EngineError, match=r"the index of forward\(\) is")
    with session.step(batch()), refused, session.forward(index):
        pass


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(pages=torch.zeros(2, 8)), "pages of check_reads are integers"),
        (dict(lengths=torch.zeros(2)), "lengths of check_reads are integers"),
        (dict(pages=[[0]]), "pages of check_reads are integers"),
        (dict(lengths=torch.zeros(2, 1, dtype=torch.int64)), r"lengths \[bs\]"),
        (dict(pages=torch.zeros(1, 8, dtype=torch.int64)), "for a forward of 2 requests"),
        (dict(page_size=0), "page_size of check_reads is 0"),
        (dict(page_size=1.5), "page_size of check_reads is 1.5"),
        (dict(pool="x"), "no pool 'x'"),
    ],
)
def test_page_table_that_cannot_be_is_refused(session, given, message):
    arguments = dict(pages=torch.zeros(2, 8, dtype=torch.int64), lengths=torch.tensor([5, 1])) | given
    with session.step(batch()), session.forward(), pytest.raises(EngineError, match=message):
        session.check_reads(**arguments)


def test_settings_are_refused_in_the_same_way_wherever_they_are_given():
    with pytest.raises(InvalidSettingError, match=r"setting 'checks' in CanaryConfig is \(\)"):
        CanaryConfig(checks=())


def test_an_integer_of_numpy_is_the_same_id_as_that_of_python(session):
    session.pool.allocate([6, 7], owner=np.int64(5))
    session.pool.release([6], owner=5)
    session.pool.release([7, 7], owner=np.uint8(5))
    assert [(v.why, v.slot, v.request) for v in session.violations()] == [("DOUBLE_FREE", 7, 5)]
