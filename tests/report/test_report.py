"""A report as data, and as a page: complete, self-contained, and no way out of it for what stands in
names."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from importlib.resources import files
from itertools import pairwise
from pathlib import Path

import pytest
from synthetic import transformer

from lowtide.budget import would_reserve
from lowtide.errors import LowtideError, PlanError
from lowtide.plan import make
from lowtide.plan.simulate import plain
from lowtide.report import Measured, Report, make_report, save_report
from lowtide.report.names import layers_of, part_of
from lowtide.report.page import page, page_data
from lowtide.report.report import DECISIONS, decision_rows
from lowtide.report.tradeoff import tradeoff
from lowtide.train.planning import PlanOptions, trace_and_plan


class Links(HTMLParser):
    """What a page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attrs if name in ("src", "href", "action", "data")]


def embedded(text: str) -> dict[str, object]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return json.loads(found.group(1))


def test_decisions_sum_to_the_plans_own_table() -> None:
    graph = transformer(3)
    for policy in ("keep_all", "full", "optimal"):
        plan = make(graph, "70%" if policy == "optimal" else None, policy)
        rows = decision_rows(graph, plan)
        assert {r.module: sum(r.saved_bytes) for r in rows if any(r.saved_bytes)} == {
            r.module: r.saved_bytes for r in plan.modules if r.saved_bytes
        }
        assert sum(r.replayed for r in rows) == len(plan.replayed)
        sums = {name: sum(row.saved_bytes[k] for row in rows) for k, name in enumerate(DECISIONS)}
        assert (sums["recomputed"] > 0) == (policy != "keep_all")
        assert (sums["kept"] == sum(sums.values())) == (policy == "keep_all")


def test_what_a_card_would_reserve_is_said_either_way() -> None:
    graph = transformer(3)
    plan = make(graph, "70%")
    assert "reserved_bytes" not in make_report(graph, plan, points=()).summary
    on_card = make_report(replace(graph, device="cuda:0"), plan, points=()).summary
    default, expandable = on_card["reserved_bytes"], on_card["reserved_expandable_bytes"]
    assert default >= plan.predicted_peak_bytes and expandable >= plan.predicted_peak_bytes
    assert on_card["notes"] == [*plan.notes, would_reserve(default, expandable)]


def test_other_budgets_cost_more_the_smaller_they_are() -> None:
    graph = transformer(3)
    points = tradeoff(graph, points=4)
    assert points[0].peak_bytes == plain(graph).peak_bytes
    assert len(points) >= 3
    for larger, smaller in pairwise(points):
        assert smaller.peak_bytes < larger.peak_bytes
        assert smaller.extra_seconds > larger.extra_seconds
    assert all(0 <= point.bound_seconds <= point.extra_seconds for point in points)
    assert len(tradeoff(graph, points=4, seconds=0.0)) == 2  # no time: the plain step and the smallest


def test_the_curve_goes_down_to_the_smallest_budget_where_time_is_short() -> None:
    graph = transformer(3)
    least = make(graph, "min").predicted_peak_bytes
    assert tradeoff(graph, points=50, seconds=0.0)[-1].peak_bytes <= least


def test_a_plan_is_shown_whole_in_sixty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make(transformer(12), "60%")
    assert max(map(len, str(plan).splitlines())) > 60
    monkeypatch.setenv("COLUMNS", "60")
    assert max(map(len, str(plan).splitlines())) <= 60
    assert "<pre>plan by policy" in plan._repr_html_()


def test_a_notebook_shows_the_page(report: Report) -> None:
    shown = report._repr_html_()
    assert shown.startswith("<iframe srcdoc=") and "<script" not in shown


def test_every_cell_that_holds_no_number_says_why() -> None:
    assert "–" not in files("lowtide.report").joinpath("assets", "tables.js").read_text(encoding="utf-8")


def test_what_would_help_comes_first(report: Report) -> None:
    """The largest holders at the planned peak, by module, with what frees how much of each."""
    found = page(report)
    assert found.index("What would help") < found.index("At a glance")
    sizes = [holder.bytes for holder in report.holders]
    assert len(sizes) == 3 and sizes == sorted(sizes, reverse=True)
    assert sum(sizes) <= report.summary["predicted_peak_bytes"]
    helps = report.to_json()["helps"]
    assert any("frees about" in line for line in helps)


def test_a_graph_that_the_plan_was_not_made_for_is_refused() -> None:
    with pytest.raises(PlanError, match="give the graph"):
        make_report(transformer(1), make(transformer(2), "70%"), points=())


def test_modules_are_folded_into_layers_and_parts() -> None:
    names = ["model.layers.11.mlp.up", "layer1.0.conv1", "0", "lm_head", "", "encoder.h.2"]
    layers = layers_of(names)
    assert list(layers.values()) == ["model.layers.11", "layer1.0", "0", "lm_head", "", "encoder.h.2"]
    parts = [part_of(name, layer) for name, layer in layers.items()]
    assert parts == ["mlp.up", "conv1", "0", "lm_head", "", "h"]


BLOCK = ("norm", "attn.qkv", "attn.out", "mlp.0", "mlp.2")
EXPERTS = ("norm", *(f"experts.{k}.{part}" for k in range(3) for part in ("up", "down")))


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        # GPT-2: what stands beside the list is no part of one layer with it
        (
            ["transformer.wte", *(f"transformer.h.{k}.{part}" for k in (0, 1) for part in BLOCK), "lm_head"],
            ["transformer.wte", "transformer.h.0", "transformer.h.1", "lm_head"],
        ),
        # Sequential(encoder, head), where the encoder is the list
        ([*(f"0.{k}.{part}" for k in (0, 1) for part in BLOCK), "1"], ["0.0", "0.1", "1"]),
        # stages, of which the first has a block without dropped paths
        (
            [f"stages.{k}.blocks.{n}.{part}" for k in (0, 1) for n in (0, 1) for part in BLOCK[k + n == 0 :]],
            ["stages.0.blocks.0", "stages.0.blocks.1", "stages.1.blocks.0", "stages.1.blocks.1"],
        ),
        # experts, and lists of operations, are inside a layer
        (
            ["layers.0.mlp", "layers.0.norm", *(f"layers.{k}.{part}" for k in (1, 2) for part in EXPERTS)],
            ["layers.0", "layers.1", "layers.2"],
        ),
        ([f"layers.0.{part}" for part in EXPERTS], ["layers.0"]),
        # T5
        (
            [f"encoder.block.{k}.layer.{part}" for k in (0, 1) for part in ("0.attn.q", "0.norm", "1.ff")],
            ["encoder.block.0", "encoder.block.1"],
        ),
    ],
    ids=["beside a list", "a list in a list", "stages", "experts", "one layer of experts", "t5"],
)
def test_layers_are_those_of_the_model(names: list[str], expected: list[str]) -> None:
    assert list(dict.fromkeys(layers_of(names).values())) == expected


def test_the_page_loads_nothing_and_holds_everything(report: Report) -> None:
    text = page(report)
    links = Links()
    links.feed(text)
    assert links.found == ["data:,"]
    assert "url(" not in re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    assert "@import" not in text
    assert not re.search(r"\b(fetch|XMLHttpRequest|import)\(", text)
    assert embedded(text) == json.loads(json.dumps(page_data(report)))


def test_names_cannot_leave_the_data(report: Report) -> None:
    text = page(report)
    assert text.count("<script") == text.count("</script>") == 3
    assert "<title>four &lt;layers&gt; &amp; &lt;/script&gt; - lowtide report</title>" in text
    assert embedded(text)["title"] == "four <layers> & </script>"


def test_every_module_of_the_data_has_a_layer(report: Report) -> None:
    data = page_data(report)
    assert {label[1] for label in data["labels"]} == set(data["modules"])
    assert {row["module"] for row in data["decided"]} == set(data["layers"])


def test_a_page_says_where_it_shows_other_peaks_than_compiled_code_takes() -> None:
    graph = transformer(3)
    eager = make(graph, plain(graph).peak_bytes * 3 // 4)
    fused = replace(eager, plain_peak_bytes=eager.plain_peak_bytes - 1000)
    for plan, told in ((eager, False), (fused, True)):
        made = make_report(graph, plan, points=())
        assert made.summary["by_operation"] is told
        assert (made.plain.peak_bytes == plan.plain_peak_bytes) is not told
    assert "operation by operation" in page(made)


def test_the_page_of_the_largest_benchmark_has_little_to_open() -> None:
    """24 layers of 1,024 features are the most operations that a benchmark plans. A browser reads the data
    before it shows anything, so this bounds what opening the page takes; that itself is not timed.
    """
    graph, plan = trace_and_plan(PlanOptions("gpt2-medium", None, policy="full", batch=1, seq=32))
    moments = tuple((k * plan.plain_seconds / 600, 1_000_000_007 + 12_345 * k) for k in range(600))
    measured = Measured(plan.plain_peak_bytes, plan.plain_seconds, moments)
    made = make_report(graph, plan, points=(), measured_plain=measured, measured_planned=measured)
    text = page(made)
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert data is not None and len(graph.operations) > 700
    assert len(data.group(1).encode()) < 250_000 and len(text.encode()) < 350_000


def test_the_page_of_96_layers_is_small(deep: Report) -> None:
    assert len(page(deep).encode()) < 1_000_000


def colours(scheme: str) -> dict[str, tuple[float, ...]]:
    """The style sheet's named colours, as red, green and blue between 0 and 1."""
    text = files("lowtide.report").joinpath("assets", "page.css").read_text()
    light, dark = re.findall(r":root \{(.*?)\}", text, re.DOTALL)[:2]
    found = dict(re.findall(r"--([\w-]+): #([0-9a-f]{6});", light))
    if scheme == "dark":
        found |= dict(re.findall(r"--([\w-]+): #([0-9a-f]{6});", dark))
    return {name: tuple(int(hex[at : at + 2], 16) / 255 for at in (0, 2, 4)) for name, hex in found.items()}


def luminance(colour: tuple[float, ...]) -> float:
    """Relative luminance (WCAG 2.2)."""
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in colour]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["text", "quiet", "accent", "good", "bad"])
@pytest.mark.parametrize("ground", ["page", "card", "hover"])
def test_words_stand_out(scheme: str, name: str, ground: str) -> None:
    """At least 4.5 to 1 (WCAG 2.2, success criterion 1.4.3)."""
    found = colours(scheme)
    low, high = sorted((luminance(found[name]), luminance(found[ground])))
    assert (high + 0.05) / (low + 0.05) >= 4.5


def test_a_charting_library_comes_with_its_licence() -> None:
    assets = files("lowtide.report").joinpath("assets")
    library = assets.joinpath("uPlot.iife.min.js").read_text()
    assert library.startswith("/*! https://github.com/leeoniya/uPlot (v")
    assert "MIT License" in assets.joinpath("uPlot.LICENSE").read_text()


@pytest.mark.parametrize("ending", [".html", ".png", ".svg", ".pickle"])
def test_the_ending_says_what_is_written(report: Report, tmp_path: Path, ending: str) -> None:
    if ending in (".png", ".svg"):
        pytest.importorskip("matplotlib")
    file = tmp_path / f"report{ending}"
    save_report(report, file)
    begins = {
        ".html": b"<!doctype html>",
        ".png": b"\x89PNG",
        ".svg": b"<?xml",
        ".pickle": b"\x80",
    }
    assert file.read_bytes().startswith(begins[ending])


def test_what_cannot_be_written_says_why(report: Report, tmp_path: Path) -> None:
    with pytest.raises(LowtideError, match=r"choose a name that ends in \.html"):
        save_report(report, tmp_path / "report.txt")
    with pytest.raises(LowtideError, match="there is no folder"):
        save_report(report, tmp_path / "nowhere" / "report.html")
