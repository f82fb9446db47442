"""What the documents say is so: code in them runs, settings and errors are complete, links lead somewhere."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from pathlib import Path

import pytest
import torch

import kvcanary_fx
from kvcanary_fx import config
from kvcanary_fx.adapters.vllm.hook_points import HOOK_POINTS, NEEDS
from kvcanary_fx.kernels.checks import CHECKS
from kvcanary_fx.reports.incidents.causes import CAUSES

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

pytestmark = pytest.mark.skipif(not (ROOT / "README.md").exists(), reason="not a checkout")


def section(page: str, start: str) -> str:
    return (ROOT / page).read_text().split(start, 1)[1].split("\n## ", 1)[0]


def test_readme_code_runs(capsys):
    if not any(e.name == "kvcanary" for e in importlib.metadata.entry_points(group="torch_dynamo_backends")):
        pytest.skip("the package is not installed, so its entry point does not exist")
    blocks = re.findall(r"<!-- run -->\n```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    names: dict[str, object] = {}
    for block in blocks:
        exec(block, names)
    out = capsys.readouterr().out
    assert "layer" in out
    assert "2 halves guarded" in out
    assert "kvcanary.violation check=content" in out
    assert "half=V row=0 position=0 slot=0" in out
    assert "[owner] attention is about to read a slot that is free" in out
    assert "request request-7, position 1, token 1, slot 6 of kv, step 2" in out
    assert kvcanary_fx.session_of(names["model"]).stats().violations == 1


def blocks_of_engines_md():
    return re.findall(r"<!-- run -->\n```python\n(.*?)```", (ROOT / "docs/engines.md").read_text(), re.DOTALL)


def test_layers_called_by_hand_as_documented():
    by_hand = blocks_of_engines_md()[0]
    names: dict[str, object] = {}
    exec(by_hand, names)
    stats = names["canary"].stats()
    assert (stats.engine_steps, stats.recorded, stats.violations) == (1, 2 * 2 * 2, 0)
    wrong = by_hand.replace("= key, value", "= key, value + 1")
    assert wrong != by_hand
    with pytest.raises(kvcanary_fx.KVCacheViolation, match="operand"):
        exec(wrong, {})
    without_forward = by_hand.replace("canary.step(batch), canary.forward()", "canary.step(batch)")
    with pytest.raises(kvcanary_fx.errors.SessionStateError):
        exec(without_forward, {})


def test_pages_in_flight_as_documented():
    names: dict[str, object] = {}
    for block in blocks_of_engines_md():
        exec(block, names)
    canary = names["canary"]
    canary.pool.release([3, 4, 5, 6], owner="a")
    canary.pool.release([3, 4, 5, 6, 7], owner="b")
    assert canary.violations() == []
    stats = canary.stats()
    assert (stats.engine_steps, stats.recorded, stats.checked > 0) == (2, 2 * 2 * 5, True)


@pytest.mark.parametrize(
    ("documented", "instead", "told"),
    [
        ("canary.pool.hand_over([5, 6])", 'canary.pool.share([5, 6], owner="b")', "several requests share"),
        ("canary.pool.hand_over([5, 6])", "pass", "belongs to another request"),
        ("in_flight=True", "in_flight=False", "nobody wrote"),
    ],
    ids=["shared before", "not handed over", "no flag"],
)
def test_pages_in_flight_need_each_line_that_is_documented(documented, instead, told):
    names: dict[str, object] = {}
    by_hand, in_flight = blocks_of_engines_md()
    exec(by_hand, names)
    assert documented in in_flight
    with pytest.raises(kvcanary_fx.KVCacheViolation, match=told):
        exec(in_flight.replace(documented, instead), names)


def test_lines_by_which_the_example_engine_connects_are_its_own():
    block = (ROOT / "README.md").read_text().split("<!-- paged_engine -->\n```python\n")[1].split("```")[0]
    code = "\n".join(p.read_text() for p in sorted((ROOT / "examples/paged_engine").glob("*.py")))
    assert [line for line in block.splitlines() if line.strip() and line.strip() not in code] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_setting_is_documented_with_its_default():
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", section("docs/settings.md", "| setting |"), re.MULTILINE))
    assert sorted(rows) == sorted(config.names())
    defaults = config.CanaryConfig()
    for name, shown in rows.items():
        value = getattr(defaults, name)
        expected = f'"{value}"' if isinstance(value, str) else str(value)
        assert shown == ("all" if name == "checks" else f"`{expected}`")


def test_every_check_is_documented():
    titles = re.findall(r"^## (\w+)$", (ROOT / "docs/checks.md").read_text(), re.MULTILINE)
    assert tuple(titles) == config.CHECKS


def test_inputs_of_every_check_are_documented():
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \|", section("docs/checks.md", "| check | inputs |"), re.MULTILINE)
    for check, row in CHECKS.items():
        shown = " ".join(inputs for name, inputs in rows if name == check)
        missing = [name for need in row.needs for name in need.given if f"`{name}" not in shown]
        assert missing == [], check


def test_every_error_a_user_can_meet_is_documented():
    page = (ROOT / "docs/reports.md").read_text()
    values = {name: getattr(kvcanary_fx, name) for name in kvcanary_fx.__all__}
    public = {n for n, v in values.items() if isinstance(v, type) and issubclass(v, kvcanary_fx.CanaryError)}
    assert [n for n in sorted(public - {"CanaryError"}) if f"`{n}`" not in page] == []


def test_hooks_into_vllm_are_documented_as_they_are_checked():
    page = (ROOT / "docs" / "vllm.md").read_text().split("## The hooks that a sanitizer needs", 1)[1]
    rows = [line for line in page.splitlines() if line.startswith("| `vllm.")]
    expected = []
    for need in NEEDS:
        assert f"**{need}.**" in page
        for point in [p for p in HOOK_POINTS if p.need == need]:
            takes = point.takes if point.takes == "property" else f"({point.takes})"
            told = f"{point.why}{', called' * point.called}{', on the stack' * point.on_stack}"
            later = f"; from 0.33.0 on `({point.later})`" if point.later else ""
            expected.append(f"| `{point.name}` | `{takes}`{later} | {told} |")
    assert rows == expected


def test_every_cause_of_an_incident_is_documented():
    rows = dict(re.findall(r"^\| ([a-z ]+) \| (.+?) \|", section("docs/incidents.md", "| cause |"), re.MULTILINE))
    assert rows == CAUSES


def test_pictures_are_what_their_script_draws():
    spec = importlib.util.spec_from_file_location("draw", ROOT / "docs" / "pictures" / "draw.py")
    draw = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(draw)
    drawn = {name: make().svg() for name, make in draw.PICTURES.items()}
    assert {p.name: p.read_text() for p in (ROOT / "docs" / "pictures").glob("*.svg")} == drawn
    pages = "".join(page.read_text() for page in PAGES)
    assert [name for name in drawn if f"pictures/{name})" not in pages] == []


def test_shadow_memory_is_what_the_settings_page_says():
    """An 8B model with grouped-query attention: 32 layers, 8 heads of 128, bf16."""
    from kvcanary_fx.kernels.buffers import HalfBuffers, IdentityBuffers
    from kvcanary_fx.kernels.ring import Control
    from kvcanary_fx.kernels.writes.layout import SlotLayout

    slots, layers = 1 << 16, 32
    layout = SlotLayout((1, 8, slots, 128), (0, 2), torch.bfloat16)
    half = HalfBuffers.allocate(layout, 1, torch.device("cpu"))
    identity = IdentityBuffers.allocate(slots, torch.device("cpu"))
    stamps = Control.allocate(1, torch.device("cpu")).stamps
    bytes_ = 2 * layers * half.digest.nbytes + sum(t.nbytes for t in (identity.tokens, identity.positions))
    bytes_ += identity.chain.nbytes + stamps.shape[0] * stamps.itemsize * slots
    assert round(bytes_ / slots) == 288
    assert bytes_ / (2 * layers * slots * layout.row_bytes) < 0.0025
