"""The parts of the vLLM adapter that need no vLLM."""

from __future__ import annotations

import importlib
import inspect
import itertools
import os
import random
import re
import subprocess
import sys
import time
from types import SimpleNamespace

import packed_cache
import pytest
import torch

import kvcanary_fx
from kvcanary_fx import EngineError
from kvcanary_fx.__main__ import main
from kvcanary_fx.adapters.versions import Tested
from kvcanary_fx.adapters.vllm import (
    counts,
    cpu_attention,
    hook_points,
    identity,
    known,
    late_imports,
    layouts,
    patching,
    ranks,
    reactions,
    settings,
    verdict,
)
from kvcanary_fx.adapters.vllm import plugin as plugin_module
from kvcanary_fx.adapters.vllm.advice import ADVICE
from kvcanary_fx.adapters.vllm.books import CACHE, Books
from kvcanary_fx.adapters.vllm.journal import Journal
from kvcanary_fx.adapters.vllm.ranks import RankVerdicts
from kvcanary_fx.adapters.vllm.reactions import Reactions
from kvcanary_fx.adapters.vllm.tables import Ledger
from kvcanary_fx.engine.observers.stats import EngineStats
from kvcanary_fx.errors import InvalidSettingError, UnknownSettingError
from kvcanary_fx.kernels.checks import TEXTS
from kvcanary_fx.reports.violation import KVCacheViolation, Violation


def test_importing_the_package_imports_no_vllm():
    code = "import sys, kvcanary_fx; sys.exit(any(m.split('.')[0] == 'vllm' for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("mode", [None, "", "off"])
def test_plugin_does_nothing_unless_it_is_asked(monkeypatch, mode):
    monkeypatch.delenv("KVCANARY_MODE", raising=False)
    if mode is not None:
        monkeypatch.setenv("KVCANARY_MODE", mode)
    from kvcanary_fx.adapters.vllm import plugin

    monkeypatch.setitem(sys.modules, "kvcanary_fx.adapters.vllm.connect", None)  # importing it would fail
    plugin.register()


def test_plugin_connects_when_it_is_asked(monkeypatch):
    monkeypatch.setenv("KVCANARY_MODE", "log")
    from kvcanary_fx.adapters import vllm as adapter
    from kvcanary_fx.adapters.vllm import plugin

    monkeypatch.setattr(known, "can_be_guarded", lambda mode: True)
    given = []
    monkeypatch.setattr(adapter, "connect", SimpleNamespace(connect=given.append), raising=False)
    monkeypatch.setitem(sys.modules, "kvcanary_fx.adapters.vllm.connect", adapter.connect)
    plugin.register()
    assert [s.config.mode for s in given] == ["log"]


@pytest.mark.parametrize("before", [None, "MY_,OUR_", "KVCANARY_"])
def test_what_ray_starts_gets_the_settings(monkeypatch, before):
    """vLLM copies some variables to Ray's actors, of itself none of ours: an engine there would be unguarded."""
    variable = plugin_module._CARRIED_BY_RAY
    monkeypatch.setenv("KVCANARY_MODE", "log")
    monkeypatch.setattr(known, "can_be_guarded", lambda mode: False)
    monkeypatch.setenv(variable, before or "")
    if before is None:
        monkeypatch.delenv(variable)
    for _ in range(2):
        plugin_module.register()
    assert set(os.environ[variable].split(",")) == {*(before or "KVCANARY_").split(","), "KVCANARY_"}
    assert os.environ[variable].count("KVCANARY_") == 1


ON_VIOLATION, ABORT = settings.ON_VIOLATION_VARIABLE, settings.ABORT_VARIABLE


@pytest.mark.parametrize(
    ("mode", "asked", "outcome", "session", "contains"),
    [
        ("raise", None, "raise", "raise", False),
        ("log", None, "log", "log", False),
        ("raise", "log", "log", "log", False),
        ("log", "raise", "raise", "raise", False),
        ("raise", "abort", "abort", "log", True),
        ("log", "abort", "abort", "log", True),
        ("log", "recompute", "recompute", "log", True),
    ],
)
def test_what_a_violation_does(mode, asked, outcome, session, contains):
    found = settings.from_env({"KVCANARY_MODE": mode} | ({ON_VIOLATION: asked} if asked else {}))
    assert (found.on_violation, found.session_config.mode, found.contains) == (outcome, session, contains)
    assert found.config.mode == mode


@pytest.mark.parametrize(("old", "outcome"), [("request", "abort"), ("engine", "raise")])
def test_deprecated_setting_means_what_it_did_and_says_what_to_write(old, outcome, caplog):
    assert settings.from_env({"KVCANARY_MODE": "raise", ABORT: old}).on_violation == outcome
    assert [r.message for r in caplog.records] == [
        f"kvcanary.vllm KVCANARY_VLLM_ABORT={old} is deprecated: KVCANARY_VLLM_ON_VIOLATION={outcome}"
    ]
    with pytest.raises(InvalidSettingError, match=f"unset beside {ON_VIOLATION}=recompute"):
        settings.from_env({"KVCANARY_MODE": "raise", ABORT: old, ON_VIOLATION: "recompute"})
    with pytest.raises(InvalidSettingError, match=rf"{ABORT}.*unset with KVCANARY_MODE=log: {ON_VIOLATION}={outcome}"):
        settings.from_env({"KVCANARY_MODE": "log", ABORT: old})


@pytest.mark.parametrize(
    "wrong",
    [
        {"KVCANARY_VLLM_ON_VIOLATION": "request"},
        {"KVCANARY_VLLM_ABORT": "all"},
        {"KVCANARY_VLLM_ABROT": "engine"},
        {"KVCANARY_MODE": "loud"},
        {"KVCANARY_CHECKS": ""},
    ],
)
def test_wrong_settings_are_refused_by_name(wrong):
    with pytest.raises(InvalidSettingError, match=next(iter(wrong))):
        settings.from_env({"KVCANARY_MODE": "log", **wrong})


def test_a_name_without_the_adapters_prefix_is_told_the_one_that_is_meant():
    """Seen: the error of ``KVCANARY_ON_VIOLATION=abort`` asked for ``KVCANARY_VERIFY_FRACTION``."""
    with pytest.raises(UnknownSettingError, match=f"did you mean '{ON_VIOLATION}'"):
        settings.from_env({"KVCANARY_MODE": "log", "KVCANARY_ON_VIOLATION": "abort"})


@pytest.mark.parametrize(
    ("variables", "remedy"),
    [
        ({"VLLM_PLUGINS": "other"}, "VLLM_PLUGINS=other,kvcanary"),
        ({"VLLM_PLUGINS": ""}, "VLLM_PLUGINS=kvcanary"),
        ({"VLLM_PLUGINS": "other,kvcanary"}, None),
        ({"VLLM_PLUGINS": "other", "KVCANARY_MODE": "off"}, None),
        ({}, None),
    ],
)
def test_doctor_tells_that_vllm_would_not_load_the_canary(variables, remedy, monkeypatch, capsys):
    for name, value in {"KVCANARY_MODE": "raise", **variables}.items():
        monkeypatch.setenv(name, value)
    why = settings.left_out()
    assert (why is None) == (remedy is None)
    if remedy is not None:
        assert why.endswith(f": {remedy}")
        assert main(["doctor"]) == 1
        assert f"FAIL {why}" in capsys.readouterr().out


def test_cache_key_differs_by_version_and_checks():
    one = settings.from_env({"KVCANARY_MODE": "log"})
    other = settings.from_env({"KVCANARY_MODE": "log", "KVCANARY_CHECKS": "content"})
    assert len({one.cache_key("1"), one.cache_key("2"), other.cache_key("1")}) == 3
    assert one.cache_key("1") == settings.from_env({"KVCANARY_MODE": "raise"}).cache_key("1")


@pytest.mark.parametrize(
    ("version", "tested"),
    [("0.32.0", True), ("0.32.0+cpu", True), ("0.31.9", False), ("0.33.0", False), ("dev", False)],
)
def test_versions_outside_of_the_tested_range_are_told(version, tested, caplog):
    caplog.set_level("WARNING", "kvcanary")
    versions = Tested("vllm", "vLLM", "0.32.0", "0.32.1", "so it proves itself")
    assert versions.warn_outside(version) is not tested
    said = (
        f"kvcanary.vllm vLLM {version} is untested: the adapter was tested with 0.32.0 up to, not including, 0.32.1; "
    )
    assert [r.message for r in caplog.records] == [f"{said}so it proves itself"] * (not tested)


def _wrap(base):
    patching.wrap_in_all(base, "run", lambda original, self: ["around", *original(self)])


def _replace(base):
    patching.replace_in_all(base, "run", lambda original: lambda self: ["around", *original(self)])


WAYS = pytest.mark.parametrize("way", [_wrap, _replace], ids=["wrapped", "replaced"])


@WAYS
def test_wrapping_twice_wraps_once_and_a_missing_name_is_told(way):
    class Base:
        def run(self):
            return ["base"]

    class Derived(Base):
        def run(self):
            return ["derived"]

    class Inherits(Base):
        pass

    class Extends(Base):
        def run(self):
            return ["extended", *super().run()]

    for _ in range(2):
        way(Base)
    assert Base().run() == Inherits().run() == ["around", "base"]
    assert Derived().run() == ["around", "derived"]
    assert [Extends().run() for _ in range(2)] == [["around", "extended", "base"]] * 2
    with pytest.raises(EngineError, match=r"no Base\.walk"):
        patching.wrap(Base, "walk", lambda original: None)


@WAYS
def test_a_method_that_no_subclass_overrides_is_wrapped_once_and_known_by_its_name(way):
    class Base:
        def run(self):
            """What it does."""
            return ["base"]

    for _ in range(2):
        way(Base)
    assert Base().run() == ["around", "base"]
    assert (Base.run.__name__, Base.run.__doc__) == ("run", "What it does.")


@WAYS
@pytest.mark.parametrize("earlier", [False, True], ids=["the first", "one of several"])
def test_subclass_that_comes_between_two_registrations_is_wrapped_once(earlier, way):
    class Base:
        def run(self):
            return ["base"]

    if earlier:

        class Earlier(Base):
            def run(self):
                return ["earlier", *super().run()]

    way(Base)

    class Later(Base):
        def run(self):
            return ["later", *super().run()]

    for _ in range(2):
        way(Base)
        assert Later().run() == ["around", "later", "base"]
        assert Base().run() == ["around", "base"]
        if earlier:
            assert Earlier().run() == ["around", "earlier", "base"]


@pytest.fixture
def unknown_version(monkeypatch):
    """A module that stands for a vLLM, and a table that it differs from."""

    class Pool:
        def __init__(self, size):
            """As known."""

        def free(self, blocks, tier):
            """A parameter more than known."""

        def touch(self, blocks, *, now=None):
            """As known."""

        @property
        def size(self):
            return 0

    class Tiered(Pool):
        def __init__(self, tiers):
            """A constructor is its class's own matter."""

        def touch(self, blocks, tier, *, now=None):
            """Cannot be called as the method that it overrides."""

    class Renamed(Pool):
        def touch(self, given, *, now=None):
            """Can be."""

    monkeypatch.setitem(sys.modules, "pool_of_tomorrow", SimpleNamespace(Pool=Pool, kept=(Tiered, Renamed)))
    rows = [
        ("Pool.__init__", "self, size"),
        ("Pool.free", "self, blocks"),
        ("Pool.touch", "self, blocks, *, now=..."),
        ("Pool.size", "property"),
        ("Pool.grow", "self"),
        ("Heap.free", "self"),
    ]
    points = [hook_points.HookPoint("", f"pool_of_tomorrow:{where}", takes, "") for where, takes in rows]
    later = hook_points.HookPoint("", "pool_of_tomorrow:Pool.free", "self, blocks", "", "self, blocks, tier")
    return [*points, later, hook_points.HookPoint("", "no_such_module:f", "", "")]


def test_what_differs_from_the_table_is_named(unknown_version):
    here = test_what_differs_from_the_table_is_named.__module__
    assert hook_points.differences(unknown_version, on_cpu=False) == [
        "pool_of_tomorrow.Pool.free takes (self, blocks, tier), known is (self, blocks)",
        f"{here}.unknown_version.<locals>.Tiered.touch takes (self, blocks, tier, *, now=...), "
        "known is (self, blocks, *, now=...)",
        "pool_of_tomorrow.Pool.grow is missing",
        "pool_of_tomorrow.Heap.free is missing",
        "no_such_module.f is missing",
    ]


@pytest.mark.parametrize("mode", ["raise", "log"])
def test_unknown_vllm_is_refused_and_in_mode_log_runs_unguarded(mode, unknown_version, monkeypatch, caplog):
    for name, module in {
        "vllm": SimpleNamespace(__version__="0.99"),
        "vllm.platforms": SimpleNamespace(current_platform=SimpleNamespace(is_cpu=lambda: True)),
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    said = "this vLLM (0.99) is not one that kvcanary_fx knows: no_such_module.f is missing. Install vllm==0.32.0, "
    if mode == "raise":
        with pytest.raises(EngineError, match=re.escape(said)):
            known.can_be_guarded(mode, unknown_version[-1:])
    else:
        assert not known.can_be_guarded(mode, unknown_version[-1:])
        assert [r.message for r in caplog.records] == [
            f"kvcanary.unguarded nothing is guarded: {said}or set KVCANARY_MODE=off to run this one unguarded"
        ]
    assert known.can_be_guarded(mode, [])


# ---- what vLLM may never import


@pytest.fixture
def rare(monkeypatch, tmp_path):
    """The name of a module that nobody has imported, and of one that imports it."""
    (tmp_path / "rare_runner.py").write_text("class Runner:\n    hooked = False\n")
    (tmp_path / "rare_worker.py").write_text("from rare_runner import Runner\nclass Own(Runner):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(late_imports, "_WAITING", {})
    yield "rare_runner", "rare_worker"
    for name in ("rare_runner", "rare_worker"):
        sys.modules.pop(name, None)


def set_hooked() -> None:
    import rare_runner

    rare_runner.Runner.hooked = True


def test_a_module_is_hooked_when_it_is_imported(rare):
    late_imports.when_imported(rare[0], set_hooked)
    assert rare[0] not in sys.modules
    assert importlib.import_module(rare[1]).Own.hooked
    assert inspect.getsource(sys.modules[rare[0]]).startswith("class Runner")


def test_a_module_that_is_there_is_hooked_at_once_and_again_by_the_next_call(rare):
    runner = importlib.import_module(rare[0]).Runner
    for _ in range(2):
        runner.hooked = False
        late_imports.when_imported(rare[0], set_hooked)
        assert runner.hooked


def test_a_module_waits_for_one_hook_however_often_plugins_are_loaded(rare):
    called = []
    for number in range(3):
        late_imports.when_imported(rare[0], lambda number=number: called.append(number))
    importlib.import_module(rare[1])
    assert called == [2]
    assert sum(isinstance(finder, late_imports._Finder) for finder in sys.meta_path) == 1


def test_what_a_hook_raises_the_import_raises(rare):
    def refuse() -> None:
        raise EngineError("another signature")

    late_imports.when_imported(rare[0], refuse)
    with pytest.raises(EngineError, match="another signature"):
        importlib.import_module(rare[1])


def test_a_module_that_is_missing_is_missing_with_a_hook_as_well(rare):
    late_imports.when_imported("rare_runner_of_tomorrow", set_hooked)
    with pytest.raises(ModuleNotFoundError, match="rare_runner_of_tomorrow"):
        importlib.import_module("rare_runner_of_tomorrow")


# ---- where a slot's bytes lie

HEADS, DIM, SIZE = 2, 8, 4


def transposed(key, value, cache, slots):
    """Pages ``[heads, 2, ...]``: K as ``[dim, size]``, V as ``[size, dim]``."""
    parts = cache.view(cache.shape[0], HEADS, 2, SIZE * DIM)
    for token, slot in enumerate(slots.tolist()):
        page, at = divmod(slot, SIZE)
        parts[page, :, 0].view(HEADS, DIM, SIZE)[:, :, at] = key[token]
        parts[page, :, 1].view(HEADS, SIZE, DIM)[:, at] = value[token]


def tiles(key, value, cache, slots):
    """Two slots interleaved element by element, and a gap between pairs: no strided view of slots."""
    for token, slot in enumerate(slots.tolist()):
        page, at = divmod(slot, SIZE)
        flat = cache.view(cache.shape[0], -1)[page]
        for half, given in enumerate((key, value)):
            rows = flat[half * SIZE * HEADS * DIM :][: SIZE * HEADS * DIM].view(SIZE // 2, HEADS * DIM, 2)
            rows[at // 2, :, at % 2] = given[token].flatten()


def scaled(key, value, cache, slots):
    transposed(key * 2, value, cache, slots)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_layout_is_found_by_writing(dtype):
    cache = torch.randn(5, HEADS, SIZE, 2 * DIM).to(dtype)
    before = cache.clone()
    found = layouts.find(cache, SIZE, ((HEADS, DIM), (HEADS, DIM)), transposed)
    assert found is not None
    assert torch.equal(cache, before)
    k, v = (half.view(cache, SIZE) for half in found)
    assert k.shape == v.shape == (5, SIZE, HEADS, DIM)
    key, value = torch.randn(2, 3, HEADS, DIM).to(dtype)
    slots = torch.tensor([9, 2, 19])
    transposed(key, value, cache, slots)
    assert torch.equal(k[slots // SIZE, slots % SIZE], key)
    assert torch.equal(v[slots // SIZE, slots % SIZE], value)


def heads_exchanged(key, value, cache, slots):
    by_rows(key.flip(1), value, cache, slots)


@pytest.mark.parametrize("write", [tiles, scaled, heads_exchanged])
def test_layout_that_is_no_strided_view_is_refused(write):
    cache = torch.zeros(5, HEADS, SIZE, 2 * DIM)
    assert layouts.find(cache, SIZE, ((HEADS, DIM), (HEADS, DIM)), write) is None


def test_quantised_layout_whose_strides_are_negative_is_refused():
    cache = torch.zeros(5, HEADS, SIZE, 2 * DIM, dtype=torch.uint8)
    assert layouts.find(cache, SIZE, ((HEADS, DIM), (HEADS, DIM)), quantised(heads_exchanged, 1.0)) is None


def by_rows(key, value, cache, slots):
    """Pages ``[2, size, heads, dim]``."""
    pages = cache if cache.dim() == 5 else cache.view(cache.shape[0], 2, SIZE, HEADS, DIM)
    for half, given in enumerate((key, value)):
        pages[slots // SIZE, half, slots % SIZE] = given


def quantised(write, scale):
    def stored(key, value, cache, slots):
        key, value = ((t.float() / scale).to(torch.float8_e4m3fn).view(torch.uint8) for t in (key, value))
        write(key, value, cache, slots)

    return stored


@pytest.mark.parametrize("scale", [0.02, 1.0, 40.0])
@pytest.mark.parametrize(
    ("write", "shape", "order"),
    [
        (transposed, (5, HEADS, SIZE, 2 * DIM), (0, 1, 2, 3)),
        (by_rows, (5, HEADS, SIZE, 2 * DIM), (0, 1, 2, 3)),
        (by_rows, (2, 5, HEADS, SIZE, DIM), (1, 0, 3, 2, 4)),  # as FlashAttention has it, K and V apart
    ],
)
def test_layout_of_a_quantised_cache_is_found(write, shape, order, scale):
    cache = torch.zeros(shape, dtype=torch.uint8).permute(order)
    stored = quantised(write, scale)
    found = layouts.find(cache, SIZE, ((HEADS, DIM), (HEADS, DIM)), stored)
    slots = torch.randperm(5 * SIZE)[:7]
    key, value = torch.randn(7, HEADS, DIM), torch.randn(7, HEADS, DIM)
    stored(key, value, cache, slots)
    for half, rows in zip(found, (key, value), strict=True):
        expected = (rows / scale).to(torch.float8_e4m3fn).view(torch.uint8)
        assert torch.equal(half.view(cache, SIZE)[slots // SIZE, slots % SIZE], expected)


def rows_last(key, value, cache, slots):
    """The same pages as of :func:`by_rows`, in which V comes first."""
    by_rows(value, key, cache, slots)


def one_number_more(key, value, cache, slots):
    by_rows(key, value, cache, slots)
    cache.view(cache.shape[0], -1)[0, 3] = 1


@pytest.mark.parametrize("other", [by_rows, rows_last, heads_exchanged, one_number_more, transposed, tiles])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_a_layer_like_another_one_is_asked_whether_it_has_its_layout(dtype, other):
    shapes, known, written = ((HEADS, DIM), (HEADS, DIM)), layouts.Known(), []
    caches = [torch.zeros(5, HEADS, SIZE, 2 * DIM, dtype=dtype) for _ in range(2)]

    def counted(write):
        stored = quantised(write, 0.5) if dtype == torch.uint8 else write
        return lambda *given: (written.append(len(given[3])), stored(*given))

    first = known.find(caches[0], SIZE, shapes, counted(by_rows))
    assert first == layouts.find(caches[0], SIZE, shapes, counted(by_rows)) is not None
    written.clear()
    found = known.find(caches[1], SIZE, shapes, counted(other))
    assert found == layouts.find(caches[1], SIZE, shapes, counted(other)) if other is not by_rows else found == first
    if other is by_rows:
        assert written == [SIZE] * (2 if dtype == torch.uint8 else 1)
    assert not any(cache.any() for cache in caches)


def test_a_layer_with_a_cache_of_another_form_is_looked_at_by_itself():
    known = layouts.Known()
    for size in (SIZE, 2 * SIZE):
        cache = torch.zeros(5, 2, size, HEADS, DIM)

        def write(key, value, cache, slots, size=size):
            for half, given in enumerate((key, value)):
                cache[slots // size, half, slots % size] = given

        found = known.find(cache, size, ((HEADS, DIM), (HEADS, DIM)), write)
        assert [half.view(cache, size).shape for half in found] == [(5, size, HEADS, DIM)] * 2


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3)])
def test_layout_of_a_cache_with_scales_for_each_token_and_head_is_found(order):
    shape = [(5, HEADS, SIZE, 2 * DIM + 8)[axis] for axis in order]
    cache = torch.zeros(shape, dtype=torch.int8).permute(order)
    found = layouts.find_with_scales(cache, SIZE, ((HEADS, DIM), (HEADS, DIM)), packed_cache.PerTokenAndHead())
    assert not cache.any()
    slots, (key, value) = torch.tensor([9]), torch.randn(2, 1, HEADS, DIM)
    packed_cache.PerTokenAndHead()(key, value, cache, slots)
    for half, given in zip(found, (key, value), strict=True):
        row = half.view(cache, SIZE)[slots // SIZE, slots % SIZE]
        most = given.abs().amax(-1, keepdim=True)
        assert torch.equal(row[..., :DIM], (given / most * 127).round().to(torch.int8))
        assert torch.equal(row[..., DIM:].contiguous().view(torch.float32), most)


def test_cache_whose_scales_are_in_another_slot_is_refused():
    cache = torch.zeros(5, HEADS, SIZE, 2 * DIM + 8, dtype=torch.int8)
    write = packed_cache.PerTokenAndHead(misplaced=True)
    assert layouts.find_with_scales(cache, SIZE, ((HEADS, DIM), (HEADS, DIM)), write) is None


def test_quantised_cache_with_scales_between_its_rows_is_refused():
    def with_scales(key, value, cache, slots):
        transposed(*((t != 0).to(torch.uint8) for t in (key, value)), cache, slots)
        cache.view(-1)[-1] = 1

    cache = torch.zeros(5, HEADS, SIZE, 2 * DIM, dtype=torch.uint8)
    assert layouts.find(cache, SIZE, ((HEADS, DIM), (HEADS, DIM)), with_scales) is None


@pytest.mark.parametrize(
    ("chosen", "cache", "expected"),
    [
        ("amx", None, "vec"),
        ("amx", "auto", "vec"),
        ("amx", "fp8_e4m3", "amx"),
        ("vec", "auto", "vec"),
        ("neon", None, "neon"),
    ],
)
def test_attention_under_guard_takes_no_amx_tiles(chosen, cache, expected, caplog):
    given = []

    def choose(*arguments):
        given.append(arguments)
        return chosen

    assert cpu_attention.without_tiles(choose, torch.bfloat16, 64, head_size=32, kv_cache_dtype=cache) == expected
    assert given == [(torch.bfloat16, 64, 32, cache)]
    assert ["without AMX tiles" in r.message for r in caplog.records] == [True] * (chosen != expected)


def amx(key, value, cache, slots):
    """What vLLM's AMX kernels store, in blocks of 32 tokens: a head's K, then its V, in words of two elements."""
    pages, heads, size, width = cache.shape
    dim = width // 2
    blocks = cache.view(pages, heads, 2, size * dim)
    for token, slot in enumerate(slots.tolist()):
        page, at = divmod(slot, size)
        keys = blocks[page, :, 0].view(heads, size // 16, dim // 2, 16, 2)
        values = blocks[page, :, 1].view(heads, dim // 16, size // 2, 16, 2)
        keys[:, at // 16, :, at % 16] = key[token].view(heads, dim // 2, 2)
        values[:, :, at // 2, :, at % 2] = value[token].view(heads, dim // 16, 16)


def test_layout_of_amx_tiles_is_no_strided_view_whatever_the_block_is():
    for size in (32, 64):
        cache = torch.zeros(3, HEADS, size, 2 * 32, dtype=torch.bfloat16)
        assert layouts.find(cache, size, ((HEADS, 32), (HEADS, 32)), amx) is None


# ---- block tables


def message(new=(), cached=(), finished=(), resumed=()):
    return SimpleNamespace(
        finished_req_ids=set(finished),
        scheduled_new_reqs=[SimpleNamespace(req_id=r, block_ids=pages) for r, pages in new],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[r for r, _ in cached],
            new_block_ids=[pages for _, pages in cached],
            resumed_req_ids=set(resumed),
        ),
    )


def test_ledger_follows_requests_of_several_groups():
    ledger = Ledger(3, [6, 4], torch.device("cpu"))
    ledger.take(message(new=[("A", ([1, 2], [9])), ("B", ([3], [8]))]))
    ledger.show(["A", "B"])
    assert [t[:2, :3].tolist() for t in ledger.tables] == [[[1, 2, 0], [3, 0, 0]], [[9, 0, 0], [8, 0, 0]]]
    ledger.take(message(cached=[("A", None), ("B", ([4], [7, 6]))]))
    ledger.show(["B", "A"])
    assert ledger.tables[0][:2, :2].tolist() == [[3, 4], [1, 2]]
    assert ledger.tables[1][0, :3].tolist() == [8, 7, 6]
    ledger.take(message(cached=[("A", ([5], [])), ("B", None)]))
    ledger.show(["B", "A"])
    assert ledger.tables[0][1, :3].tolist() == [1, 2, 5]
    ledger.take(message(cached=[("A", ([7, 8], [5])), ("B", None)], resumed=["A"]))
    ledger.show(["B", "A"])
    assert ledger.tables[0][1, :2].tolist() == [7, 8]
    assert ledger.tables[1][1, :1].tolist() == [5]


def test_ledger_takes_an_id_that_ended_and_came_again():
    ledger = Ledger(2, [4], torch.device("cpu"))
    ledger.take(message(new=[("A", ([1, 2],))]))
    ledger.show(["A"])
    ledger.take(message(new=[("A", ([3],))], finished=["A"]))
    ledger.show(["A"])
    assert ledger.tables[0][0, 0] == 3


# ---- whose each page is


class TakenOneByOne:
    """What is told at once, as single calls."""

    def allocate_each(self, given, page_size, written_in_step):
        for slots, owner in given:
            self.allocate(slots, page_size=page_size, owner=owner)


def test_pages_that_the_prefix_cache_gives_up_in_a_step_are_released_at_once_before_any_is_handed_out():
    """A GPU is told of what was released before it is told who gets it: once a step, not once a request."""
    told = []

    class Pool(TakenOneByOne):
        declared = SimpleNamespace(table_page_size=16)

        def __getattr__(self, name):
            return lambda slots, page_size, owner=None: told.append((name, slots, page_size, owner))

    books = Books(lambda: [SimpleNamespace(pools={"group0": Pool()})])
    books.apply([("taken", [1, 2, 3], ["A"], [3], 0), ("freed", [1, 2], [3], "A")])
    assert told == [("allocate", [1, 2, 3], 16, "A"), ("hand_over", [1, 2], 16, CACHE), ("release", [3], 16, "A")]
    told.clear()
    books.apply([("taken", [1, 3, 2], ["B", "C", "D"], [1, 1, 1], 0)])
    assert told == [
        ("release", [1, 2], 16, CACHE),
        ("allocate", [1], 16, "B"),
        ("allocate", [3], 16, "C"),
        ("allocate", [2], 16, "D"),
    ]


def test_blocks_that_are_handed_out_one_call_after_the_other_are_one_event():
    """Unless something happened to blocks in between, or the stack of each call is kept."""
    for stacks, expected in ((0, 4), (8, 5)):
        journal = Journal(stacks)
        journal.taken([1, 2], ["A"], [2], 0)
        journal.taken([3], ["B"], [1], 0)
        journal.taken([4], ["B"], [1], 1)
        journal.note("touched", [1], "C")
        journal.taken([5], ["C"], [1], 1)
        message = journal.take()
        assert len(message.events) == expected
        assert len(message.stacks) == expected * (stacks > 0)
        taken = [event[1:] for event in message.events if event[0] == "taken"]
        calls = [(owner, group) for _, owners, _, group in taken for owner in owners]
        assert calls == [("A", 0), ("B", 0), ("B", 1), ("C", 1)]
        assert [block for blocks, *_ in taken for block in blocks] == [1, 2, 3, 4, 5]
        assert journal.take().events == []


def test_requests_of_a_model_with_several_groups_get_their_blocks_in_an_event_for_each_group():
    """As those of a hybrid do, whose states move on to other blocks when a block is full."""
    journal = Journal()
    for request in range(8):
        journal.note("freed", [100 + request], [], f"r{request}")
        for group in range(3):
            journal.taken([3 * request + group], [f"r{request}"], [1], group)
    events = journal.take().events
    assert [event[4] for event in events if event[0] == "taken"] == [0, 1, 2]
    assert len(events) == 8 + 3
    assert events[1][1:4] == ([0, 3, 6, 9, 12, 15, 18, 21], [f"r{n}" for n in range(8)], [1] * 8)


@pytest.mark.parametrize("seed", range(20))
def test_blocks_that_join_an_earlier_event_were_free_by_then(seed):
    rng, journal, made = random.Random(seed), Journal(), []
    free, mine, cached = list(range(1, 15)), [], []
    for _ in range(60):
        what = rng.choice(["taken", "taken", "taken", "freed", "freed", "touched"])
        if what == "taken" and free:
            blocks, group = [free.pop(0) for _ in range(min(len(free), rng.choice([1, 1, 2])))], rng.randrange(3)
            cached, mine = [b for b in cached if b not in blocks], mine + blocks
            journal.taken(list(blocks), ["r"], [len(blocks)], group)
            made += [("taken", block, group) for block in blocks]
        elif what == "freed" and mine:
            block = mine.pop(rng.randrange(len(mine)))
            kept = [block] * rng.randrange(2)
            cached, free = cached + kept, [block, *free] if rng.random() < 0.5 else [*free, block]
            journal.note("freed", kept, [] if kept else [block], "r")
            made.append(("freed", block, bool(kept)))
        elif what == "touched" and cached:
            block = cached.pop()
            free.remove(block)
            mine.append(block)
            journal.note("touched", [block], "r")
            made.append(("touched", block, None))
    told = []
    for name, *rest in journal.take().events:
        if name == "taken":
            assert sum(rest[2]) == len(rest[0])
            told += [("taken", block, rest[3]) for block in rest[0]]
        elif name == "freed":
            told += [("freed", block, kept) for kept, blocks in ((True, rest[0]), (False, rest[1])) for block in blocks]
        else:
            told += [("touched", block, None) for block in rest[0]]
    of_each = [{block: [e for e in events if e[1] == block] for _, block, _ in events} for events in (made, told)]
    assert of_each[0] == of_each[1]  # what happens to each block, in order
    assert len(told) == len(made)


def test_calls_for_pages_have_the_stacks_of_the_scheduler_also_those_that_wait_for_a_forward():
    from kvcanary_fx.engine.stacks import told_now

    told = []

    class Pool(TakenOneByOne):
        declared = SimpleNamespace(table_page_size=16)

        def __getattr__(self, name):
            return lambda slots, page_size, owner=None: told.append((name, slots, *told_now()))

    books = Books(lambda: [SimpleNamespace(pools={"group0": Pool()})])
    books.apply([("taken", [1, 2], ["A"], [2], 0)], [("first",)])
    books.apply([("touched", [1], "B"), ("touched", [2], "C")], [("second",), ("third",)])
    books.apply([("freed", [], [1], "A")], [("fourth",)])
    books.settle([{2}])
    books.after_forward()
    assert told == [
        ("allocate", [1, 2], "first"),
        ("share", [1], "second"),
        ("release", [1], "fourth"),
        ("hand_over", [2], "third"),
        ("share", [2], "third"),
    ]


class ToldAtOnce(TakenOneByOne):
    """A pool that is told of calls at once, as (event, pages, owner), and counts others."""

    declared = SimpleNamespace(table_page_size=16)

    def __init__(self):
        self.told, self.others = [], 0

    def __getattr__(self, name):
        def other(*args, **kwargs):
            self.others += 1

        return other

    def tell_now(self, calls, page_size, into_step):
        self.told.append([(event.name, pages, owner) for event, pages, owner in calls])
        return True

    def tell_handed_out(self, given_up, holder, pages, owners, lengths, page_size, into_step):
        of_each = iter(pages)
        calls = [("RELEASE", list(given_up), holder)] if given_up else []
        calls += [
            ("ALLOCATE", list(itertools.islice(of_each, n)), owner) for owner, n in zip(owners, lengths, strict=True)
        ]
        self.told.append(calls)
        return True


def books_of(*pools, cached=(1, 2, 3), held=(4, 5, 6)):
    """Books with blocks that the cache of A's keeps, and others that H has."""
    books = Books(lambda: [SimpleNamespace(pools={f"group{number}": pool for number, pool in enumerate(pools)})])
    books.apply([("taken", [*cached], ["A"], [3], 0), ("freed", [*cached], [], "A"), ("taken", [*held], ["H"], [3], 0)])
    assert books.idle == {*cached}
    return books


CACHED = "the prefix cache of vLLM"


@pytest.mark.parametrize(
    ("blocks", "group", "told", "idle"),
    [
        ([7, 8], 0, [("ALLOCATE", [7, 8], "B")], {1, 2, 3}),
        ([2, 1], 0, [("RELEASE", [2, 1], CACHED), ("ALLOCATE", [2, 1], "B")], {3}),
        ([2, 7, 1], 0, [("RELEASE", [2, 1], CACHED), ("ALLOCATE", [2, 7, 1], "B")], {3}),
        ([2, 2], 0, None, {1, 2, 3}),
        ([2], 1, None, {1, 2, 3}),  # the first that this group gets
    ],
    ids=["new", "given up", "some of each", "twice", "another group's"],
)
def test_blocks_are_handed_out_at_once_if_the_cache_gives_up_what_it_has_of_the_same_group(blocks, group, told, idle):
    first, second = ToldAtOnce(), ToldAtOnce()
    books = books_of(first, second)
    events = [("taken", blocks, ["B"], [len(blocks)], group)]
    assert books.tell_now(events) == (events if told is None else [])
    assert first.told + second.told == ([] if told is None else [told])
    assert books.idle == idle
    if told is not None:
        assert {block: books.group[block] for block in blocks} == dict.fromkeys(blocks, 0)


def test_several_requests_blocks_are_told_as_each_ones():
    pool = ToldAtOnce()
    assert books_of(pool).tell_now([("taken", [7, 8, 9], ["B", "C"], [2, 1], 0)]) == []
    assert pool.told == [[("ALLOCATE", [7, 8], "B"), ("ALLOCATE", [9], "C")]]


@pytest.mark.parametrize(
    ("events", "told", "idle"),
    [
        ([("freed", [4, 5], [6], "H")], [[("HAND_OVER", [4, 5], CACHED), ("RELEASE", [6], "H")]], {1, 2, 3, 4, 5}),
        ([("freed", [], [6], "H")], [[("RELEASE", [6], "H")]], {1, 2, 3}),
        (  # what was released goes to another, in the same launch
            [("freed", [4], [6], "H"), ("taken", [6, 7], ["B"], [2], 0)],
            [[("HAND_OVER", [4], CACHED), ("RELEASE", [6], "H"), ("ALLOCATE", [6, 7], "B")]],
            {1, 2, 3, 4},
        ),
        (
            [("taken", [1], ["B"], [1], 0), ("freed", [4], [], "H")],
            [[("RELEASE", [1], CACHED), ("ALLOCATE", [1], "B"), ("HAND_OVER", [4], CACHED)]],
            {2, 3, 4},
        ),
        (  # the cache gives up what it has just got
            [("freed", [4], [], "H"), ("taken", [4], ["B"], [1], 0)],
            [[("HAND_OVER", [4], CACHED)], [("RELEASE", [4], CACHED), ("ALLOCATE", [4], "B")]],
            {1, 2, 3},
        ),
        (  # or keeps what it has just given up
            [("taken", [1], ["B"], [1], 0), ("freed", [1], [], "B")],
            [[("RELEASE", [1], CACHED), ("ALLOCATE", [1], "B"), ("HAND_OVER", [1], CACHED)]],
            {1, 2, 3},
        ),
        (
            [("taken", [1], ["B"], [1], 0), ("freed", [], [1], "B")],
            [[("RELEASE", [1], CACHED), ("ALLOCATE", [1], "B")], [("RELEASE", [1], "B")]],
            {2, 3},
        ),
        (
            [("taken", [7], ["B"], [1], 0), ("freed", [7], [], "B")],
            [[("ALLOCATE", [7], "B")], [("HAND_OVER", [7], CACHED)]],
            {1, 2, 3, 7},
        ),
    ],
    ids=["both", "left", "then taken", "behind", "given up again", "cached again", "left again", "new"],
)
def test_blocks_that_a_request_gives_up_are_told_at_once_with_those_handed_out(events, told, idle):
    pool = ToldAtOnce()
    books = books_of(pool)
    before = pool.others
    assert books.tell_now(events) == []
    assert (pool.told, pool.others, books.idle) == (told, before, idle)
    one_by_one = books_of(ToldAtOnce())
    one_by_one.apply(events)
    assert (one_by_one.idle, one_by_one.group) == (books.idle, books.group)


@pytest.mark.parametrize("what", ["unknown", "named twice", "left idle", "taken up", "of several groups", "refused"])
def test_blocks_given_up_with_something_odd_about_them_are_applied_one_by_one(what):
    pool, second = ToldAtOnce(), ToldAtOnce()
    books = books_of(pool, second)
    event = ("freed", [4], [5], "H")
    if what == "unknown":
        event = ("freed", [4], [99], "H")
    elif what == "named twice":
        event = ("freed", [4, 4], [], "H")
    elif what == "left idle":
        event = ("freed", [], [2], "H")
    elif what == "taken up":
        books.touched([5], "B")
    elif what == "of several groups":
        books.apply([("taken", [9], ["H"], [1], 1)])
        event = ("freed", [4], [9], "H")
    else:
        pool.tell_now = lambda *_: False
    idle = set(books.idle)
    assert books.tell_now([event]) == [event]
    assert (pool.told + second.told, books.idle) == ([], idle)


def books_of_a_hybrid(*pools):
    """Books of two groups: H has blocks 4 and 5 of the first and 14 and 15 of the second, the cache 1 and 11."""
    books = books_of(*pools, cached=(1, 2, 3), held=(4, 5, 6))
    books.apply([("taken", [11, 12, 13], ["A"], [3], 1), ("freed", [11], [12, 13], "A")])
    books.apply([("taken", [14, 15, 16], ["H"], [3], 1)])
    return books


@pytest.mark.parametrize(
    ("events", "told", "later"),
    [
        (  # as in each step of a hybrid: what each group gets and gives up is told in one go
            [
                ("taken", [7, 1], ["H", "I"], [1, 1], 0),
                ("taken", [17], ["H"], [1], 1),
                ("freed", [14], [], "H"),
                ("freed", [], [15], "H"),
                ("freed", [5], [], "H"),
            ],
            (
                [("RELEASE", [1], CACHED), ("ALLOCATE", [7], "H"), ("ALLOCATE", [1], "I"), ("HAND_OVER", [5], CACHED)],
                [("ALLOCATE", [17], "H"), ("HAND_OVER", [14], CACHED), ("RELEASE", [15], "H")],
            ),
            ([], []),
        ),
        (  # one group gives a block back and the other gets it
            [("freed", [], [15], "H"), ("taken", [15], ["I"], [1], 0)],
            ([("ALLOCATE", [15], "I")], [("RELEASE", [15], "H")]),
            ([], []),
        ),
        (  # and gives it back, too
            [("taken", [17], ["I"], [1], 1), ("taken", [15], ["I"], [1], 0), ("freed", [], [15], "I")],
            ([("ALLOCATE", [15], "I")], [("ALLOCATE", [17], "I")]),
            ([("RELEASE", [15], "I")], []),
        ),
    ],
    ids=["each group's", "from one to the other", "and back"],
)
def test_the_groups_of_a_hybrid_are_told_at_once(events, told, later):
    first, second = ToldAtOnce(), ToldAtOnce()
    books = books_of_a_hybrid(first, second)
    before = first.others, second.others
    assert books.tell_now(events) == []
    assert [first.told, second.told] == [
        [calls] + ([more] if more else []) for calls, more in zip(told, later, strict=True)
    ]
    assert (first.others, second.others) == before
    one_by_one = books_of_a_hybrid(ToldAtOnce(), ToldAtOnce())
    one_by_one.apply(events)
    assert (one_by_one.idle, one_by_one.group) == (books.idle, books.group)


def test_what_the_pool_of_one_group_cannot_be_told_at_once_is_left_in_its_order():
    first, second = ToldAtOnce(), ToldAtOnce()
    books = books_of_a_hybrid(first, second)
    second.tell_now = lambda *_: False
    events = [
        ("taken", [17], ["H"], [1], 1),
        ("taken", [7], ["H"], [1], 0),
        ("freed", [14], [], "H"),
        ("freed", [], [15], "H"),
        ("taken", [15], ["I"], [1], 0),  # of the other group until the event before it is applied
        ("freed", [5], [], "H"),
    ]
    assert books.tell_now(events) == [events[0], *events[2:]]
    assert first.told == [[("ALLOCATE", [7], "H")]]


# ---- whom a violation concerns


def found(check, slot, request=None, why=None, phase="pre", pool="group0"):
    place = dict(layer="*", half="*", pool=pool, row=None, index=slot, slot=slot, position=None, stored=0, found=0)
    return Violation(check=check, phase=phase, step=1, request=request, why=why, **place)


TABLES = {"A": ([1, 2, 3], [9]), "B": ([1, 2, 4], [8]), "C": ([5], [2]), "waiting": ([], [])}


@pytest.mark.parametrize(
    ("violation", "readers"),
    [
        (found("content", 2 * 16 + 3, "A"), {"A": 1, "B": 1}),
        (found("content", 2 * 16 + 3), {"A": 1, "B": 1}),
        (found("content", 2 * 32, pool="group1"), {"C": 0}),
        (found("content", 5 * 16, pool="draft0", request="C"), {"C": 0}),
        (found("operand", 4 * 16, "B", phase="post"), {"B": 2}),
        (found("owner", 2 * 16, "A", why="FOREIGN_READ"), {"A": 1}),
        (found("owner", 2 * 16, "C", why="OVERWRITE"), {"A": 1, "B": 1, "C": 0}),
        (found("token", 1 * 16, "B", why="WRONG_TOKEN"), {"B": 0}),
        (found("bounds", -1, "B", why="ROW_TOO_NARROW"), {"B": 0}),
        (found("bounds", -1), {"A": 0, "B": 0, "C": 0}),
        (found("content", 2 * 16, phase="life"), {}),
        (found("content", 2 * 16, "waiting"), {"A": 1, "B": 1}),
    ],
)
def test_requests_that_a_violation_concerns(violation, readers):
    given = verdict.Verdict()
    given.add(violation, [16, 32])
    assert given.readers(TABLES) == readers
    assert (given.blocks() == set()) == (violation.slot < 0)


def test_a_request_that_began_again_does_not_do_so_for_the_blocks_that_it_gave_up():
    given = verdict.Verdict()
    given.add(found("content", 2 * 16, "A", phase="life"), [16, 32])
    assert given.readers(TABLES) == {"A": 1}, "it may have read them, in a window that it has left"
    assert given.readers(TABLES, {"A"}) == {}
    given.add(found("content", 2 * 16, "A"), [16, 32])
    assert given.readers(TABLES, {"A"}) == {"A": 1, "B": 1}, "it reads damage again"


def test_advice_is_about_vllm_and_not_about_calls_that_it_does_not_have():
    assert set(ADVICE) <= set(TEXTS)
    for name, text in TEXTS.items():
        assert not re.search(r"\b(pool|session|KVPool)[.(]", ADVICE.get(name, text.remedy)), name
    said = found("owner", 32, "A", why="FOREIGN_READ")
    assert "pool.share" in said.explain()
    assert "BlockPool.free_blocks" in str(KVCacheViolation([said], 1, ADVICE))
    assert "pool.share" not in str(KVCacheViolation([said], 1, ADVICE))


# ---- what tells equal tokens apart


def test_namespaces_of_adapters_and_salts():
    lora = SimpleNamespace(lora_name="a", lora_path="/a", lora_int_id=1)
    other = SimpleNamespace(lora_name="b", lora_path="/b", lora_int_id=1)
    found = [identity.namespace(*g) for g in ((None, None), (lora, None), (other, None), (None, "s"), (lora, "s"))]
    assert found[0] == 0
    assert len(set(found)) == 5
    assert all(0 <= n < 2**62 for n in found)


def test_tokens_of_images_stand_for_the_image_and_the_place_in_it():
    def image(name, offset, length):
        return SimpleNamespace(identifier=name, mm_position=SimpleNamespace(offset=offset, length=length))

    tokens = [torch.tensor([1, 9, 9, 9, 2, 9, 9], dtype=torch.int32) for _ in range(3)]
    identity.mark_features(tokens[0], 10, [image("x", 11, 3), image("y", 15, 4)])
    identity.mark_features(tokens[1], 10, [image("z", 11, 3), image("y", 15, 4)])
    identity.mark_features(tokens[2], 30, [image("x", 11, 3)])
    assert tokens[2].tolist() == [1, 9, 9, 9, 2, 9, 9]
    assert (tokens[0] == tokens[1]).tolist() == [True, False, False, False, True, True, True]
    assert len(set(tokens[0][1:4].tolist())) == 3
    assert tokens[0][1] >= 1 << 30
    part = torch.tensor([9, 9], dtype=torch.int64)  # the same image's second and third token, in a later chunk
    identity.mark_features(part, 12, [image("x", 11, 3)])
    assert part.tolist() == tokens[0][2:4].tolist()


# ---- counts


def test_counts_of_several_engines_add_up(monkeypatch, tmp_path):
    monkeypatch.setenv(settings.COUNTS_VARIABLE, str(tmp_path))
    base = dict(steps=0, adopted=0, violations=1)
    one = EngineStats(checked=5, recorded=2, forwards=3, by_check={"content": 1}, compared_within=0.5, **base)
    counts.Counts("one").write(one)
    counts.Counts("two").write(
        EngineStats(checked=7, recorded=1, forwards=4, by_check={"content": 2, "owner": 1}, **base)
    )
    found, violations = counts.read_all()
    assert found == {"forwards": 7, "slots_checked": 0, "fingerprints_checked": 12, "fingerprints_recorded": 3}
    assert violations == {"content": 3, "owner": 1}
    assert counts.compared_within() == 0.5


def test_group_that_one_engine_does_not_guard_counts_as_unguarded(monkeypatch, tmp_path):
    monkeypatch.setenv(settings.COUNTS_VARIABLE, str(tmp_path))
    counts.Counts("one", {"group0": "", "group1": ""}).write()
    counts.Counts("two", {"group0": "", "group1": "a riddle"}).write()
    assert counts.guarded() == {"group0": "", "group1": "a riddle"}
    counts.write_unguarded({"all": "another version"})
    assert counts.guarded()["all"] == "another version"


def test_directory_of_counts_that_is_gone_is_told_once_and_ends_nothing(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv(settings.COUNTS_VARIABLE, str(tmp_path / "gone"))
    mine = counts.Counts("one")
    for _ in range(2):
        mine.write(EngineStats(steps=0, checked=5, recorded=2, adopted=0, violations=0))
    assert [r.message for r in caplog.records] == [
        f"kvcanary.vllm the metrics endpoint stands still: {tmp_path / 'gone'} is gone"
    ]


def test_counts_are_written_by_themselves_also_when_the_engine_is_idle(monkeypatch, tmp_path):
    monkeypatch.setenv(settings.COUNTS_VARIABLE, str(tmp_path))

    class Session:
        steps = 1

        def drain(self):
            pass

        def stats(self, drain):
            return EngineStats(steps=0, checked=self.steps, recorded=0, adopted=0, violations=0)

    mine, session = counts.Counts("one"), Session()

    def wait_for(checked):
        end = time.monotonic() + 10
        while counts.read_all()[0]["fingerprints_checked"] != checked:
            assert time.monotonic() < end
            time.sleep(0.01)

    mine.follow(session, every=0.02)
    wait_for(1)
    with mine.busy():
        session.steps = 2
        time.sleep(0.1)
        assert counts.read_all()[0]["fingerprints_checked"] == 1
    wait_for(2)


@pytest.mark.parametrize("name", ["group0", "draft0"])
def test_what_a_connector_loads_has_the_tokens_of_the_target_alone(name):
    """A draft's layers may have other tokens at these positions; also where the target's are not guarded."""
    calls = []

    class Pool:
        declared = SimpleNamespace(table_page_size=4)

        def __getattr__(self, called):
            return lambda slots, *given, **named: calls.append((called, torch.as_tensor(slots).tolist()))

    pool = Pool()
    pool.name = name
    books = Books(lambda: [SimpleNamespace(pools={name: pool})])
    books.group = {3: 0, 5: 0}
    books.filled_elsewhere([3, 5], "a", [0, 1], 7)
    new = SimpleNamespace(req_id="a", num_computed_tokens=6, prefill_token_ids=list(range(9)))
    cached = SimpleNamespace(req_ids=[], num_computed_tokens=[])
    scheduled = SimpleNamespace(scheduled_new_reqs=[new], scheduled_cached_reqs=cached, num_scheduled_tokens={"a": 3})
    books.announce_loaded(scheduled, SimpleNamespace(pages=lambda *_: [3, 5]), {}, lambda *_: None)
    books.accept_loaded()
    slots = [12, 13, 14, 15, 20, 21]  # the forward writes the seventh itself
    accepted = [("announce", slots), ("accept", slots)] if name == "group0" else [("adopt", slots)]
    assert calls == [("forget", [3, 5]), *accepted]


# ---- ranks


def ranks_of(tmp_path, world=3):
    return [RankVerdicts(tmp_path / "verdicts", rank, world, reads=rank == 0) for rank in range(world)]


def of_blocks(*blocks, request="A"):
    return verdict.Verdict(requests={request}, damaged={0: set(blocks)}, outcome="recompute", total=len(blocks))


def test_what_another_rank_finds_is_read_once_by_the_first_one(tmp_path):
    first, second, third = ranks_of(tmp_path)
    assert not first.news()
    assert first.read() is None
    second.tell(of_blocks(3, 4))
    assert first.news()
    told = first.read()
    assert (told.requests, told.damaged, told.outcome, told.total) == ({"A"}, {0: {3, 4}}, "recompute", 2)
    assert not first.news()
    third.tell(of_blocks(7, request="B"))
    second.tell(of_blocks(5))
    told = first.read()
    assert (told.requests, told.damaged, told.total) == ({"A", "B"}, {0: {5, 7}}, 2)


def test_a_rank_that_finds_more_before_it_is_read_loses_nothing(tmp_path):
    first, second, _ = ranks_of(tmp_path)
    for block in range(5):
        second.tell(of_blocks(block))
    assert first.read().damaged == {0: set(range(5))}
    second.tell(of_blocks(9))
    assert first.read().damaged == {0: {9}}, "what was read is not told again"


def test_what_is_told_while_the_first_one_reads_is_news(tmp_path, monkeypatch):
    first, second, third = ranks_of(tmp_path)
    third.tell(of_blocks(3))
    from_json = verdict.Verdict.from_json

    def and_meanwhile(text):
        monkeypatch.setattr(verdict.Verdict, "from_json", from_json)
        second.tell(of_blocks(4))
        return from_json(text)

    monkeypatch.setattr(verdict.Verdict, "from_json", and_meanwhile)
    assert first.read().damaged == {0: {3}}
    assert first.news()
    assert first.read().damaged == {0: {4}}


def test_too_many_blocks_for_the_room_concern_all_requests(tmp_path, monkeypatch):
    monkeypatch.setattr(ranks, "ROOM", 256)
    first, second, _ = ranks_of(tmp_path)
    second.tell(of_blocks(*range(500)))
    told = first.read()
    assert (told.everyone, told.total) == (True, 500)
    assert told.readers({"X": ([1, 2],)}) == {"X": 0}


def test_the_first_rank_sends_what_all_have_found(tmp_path):
    first, second, _ = ranks_of(tmp_path)
    recompute = settings.VllmSettings(kvcanary_fx.CanaryConfig(mode="log"), "recompute")
    here, there = (Reactions(recompute, [16], rank) for rank in (first, second))
    assert here.take_verdict() is None
    there.flag(found("content", 16 * 5 + 3))
    there.told()
    assert there.take_verdict() is None, "its outputs are dropped"
    here.flag(found("content", 16 * 7))
    taken = here.take_verdict()
    assert (taken.damaged, taken.total, taken.outcome) == ({0: {5, 7}}, 2, "recompute")
    assert here.take_verdict() is None


def test_another_rank_than_the_first_ends_its_process(tmp_path, monkeypatch, caplog):
    """Seen: its exception reached nobody, and the first rank waited for it for 300 s."""
    ended = []
    monkeypatch.setattr(reactions.os, "_exit", ended.append)
    monkeypatch.setattr(reactions.logging, "shutdown", lambda: None)
    raises = settings.VllmSettings(kvcanary_fx.CanaryConfig(mode="raise"))
    first, second, _ = ranks_of(tmp_path)
    for rank in (first, second):
        made = Reactions(raises, [16], rank)
        made.flag(found("content", 3))
        made.told()
    assert ended == [1]
    assert "kv_cache_corruption" in caplog.text
