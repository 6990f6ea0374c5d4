"""The page in a real browser, headless: no errors, no network, wide and narrow, light and dark, by keyboard.
axe-core has the rules of Lighthouse's accessibility audit. Without a browser these tests are skipped."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lowtide.remedies import Holder
from lowtide.report import Measured, Report, save_report
from lowtide.report.page import page_data

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
if BROWSER is None:
    pytest.skip("no chromium or google-chrome is installed", allow_module_level=True)
playwright = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-core audits the page")

FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
LOOKS = [(width, scheme) for width in (390, 1440) for scheme in ("light", "dark")]
IDS = [f"{width}-{scheme}" for width, scheme in LOOKS]
CONTROLS = "a[href], button, input, summary, [tabindex='0']"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=BROWSER, args=FLAGS)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def file(report: Report, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    save_report(report, path)
    return path


@pytest.fixture(scope="module")
def deep_file(deep: Report, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("deep") / "report.html"
    save_report(deep, path)
    return path


def opened(browser: Any, path: Path, width: int = 1440, scheme: str = "light") -> Any:
    """The page, with what it complains of and asks for in lists that are its attributes."""
    size = {"width": width, "height": 900}
    page = browser.new_page(viewport=size, color_scheme=scheme, reduced_motion="reduce")
    page.complaints, page.asked = [], []
    page.on("console", lambda message: page.complaints.append(message.text))
    page.on("pageerror", lambda error: page.complaints.append(str(error)))
    page.on("request", lambda request: page.asked.append(request.url))
    page.goto(path.as_uri())
    return page


@pytest.mark.parametrize(("width", "scheme"), LOOKS, ids=IDS)
def test_it_opens_without_a_word_and_fits(browser: Any, file: Path, width: int, scheme: str) -> None:
    page = opened(browser, file, width, scheme)
    assert page.complaints == []
    assert [url for url in page.asked if not url.startswith(("data:", file.as_uri()))] == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("canvas").count() == 4
    drawn = page.evaluate(
        "[...document.querySelectorAll('canvas')].map(c => new Set(new Uint32Array("
        "c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer)).size)"
    )
    assert min(drawn) > 5  # colours: none is empty
    page.close()


@pytest.mark.parametrize(("width", "scheme"), [LOOKS[1], LOOKS[2]], ids=[IDS[1], IDS[2]])
def test_the_audit_finds_nothing(browser: Any, file: Path, width: int, scheme: str) -> None:
    page = opened(browser, file, width, scheme)
    page.locator("summary").click()
    page.locator(".expand").first.click()
    found = axe.Axe().run(
        page, options={"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]}
    )
    assert found.violations_count == 0, found.generate_report()
    passed = {rule["id"] for rule in found.response["passes"]}
    assert {"color-contrast", "button-name", "label", "aria-input-field-name", "html-has-lang"} <= passed
    assert [rule["id"] for rule in found.response["incomplete"]] == []
    page.close()


def test_no_table_is_wider_than_a_telephone(browser: Any, file: Path, deep_file: Path) -> None:
    """Else its last column begins outside of what is seen."""
    for path in (file, deep_file):
        page = opened(browser, path, width=390)
        boxes = page.evaluate(
            "[...document.querySelectorAll('.scroll')].map(e => [e.scrollWidth, e.clientWidth])"
        )
        assert boxes and all(inside <= seen for inside, seen in boxes), boxes
        page.close()


def test_long_paths_of_files_fit_a_telephone(browser: Any, report: Report, tmp_path: Path) -> None:
    source = "transformers/integrations/sdpa_attention_with_a_long_name.py:193"
    long = Holder("activations", 33 << 20, "transformer.h.0-5.attn", source, "8x4x128x128 float32")
    path = save_report(replace(report, holders=(long,)), tmp_path / "r.html")
    page = opened(browser, path, width=390)
    assert source in page.locator("#helps").inner_text()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.close()


def test_what_was_not_measured_says_why(browser: Any, deep: Report, tmp_path: Path) -> None:
    path = save_report(replace(deep, measured_planned=Measured(deep.planned.peak_bytes)), tmp_path / "r.html")
    page = opened(browser, path)
    measured = page.locator("#measured").inner_text()
    assert "–" not in page.locator("main").inner_text()
    assert "not run: the plain step ran nowhere" in measured and "not timed: " in measured
    assert "no meter" not in measured
    page.close()


def test_a_plain_time_that_no_step_took_is_not_called_measured(
    browser: Any, deep: Report, tmp_path: Path
) -> None:
    """Steps under the plan were timed; what they say of a plain one is no measurement of one."""
    words = {"calibrated_plain_seconds": 2.0, "calibrated_extra_seconds": 0.5, "plain_seconds": 1.5}
    faster = {"predicted_extra_seconds": -0.0028, "peak_operation": "outside"}
    save_report(replace(deep, summary={**deep.summary, **words, **faster}), tmp_path / "bare.html")
    page = opened(browser, tmp_path / "bare.html")
    rows = [row.split("\t") for row in page.locator("#measured tr").all_inner_texts()]
    cells = {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows}
    assert cells["time, plain"][1] == "not run" and cells["time, planned"][1] == "2.5 s"
    assert "1.5 s plain \u2212 2.8 ms" in page.locator("body").inner_text()
    page.close()


def test_the_keyboard_reaches_every_control(browser: Any, file: Path) -> None:
    page = opened(browser, file)
    wanted = page.evaluate(
        f"[...document.querySelectorAll(`{CONTROLS}`)].filter(e => e.checkVisibility() && "
        "(e.type !== 'radio' || e.checked)).map((e, k) => e.dataset.number = String(k)).length"
    )
    reached = set()
    for _ in range(wanted + 1):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.dataset.number"))
    assert wanted >= 15
    assert reached - {None} == {str(k) for k in range(wanted)}
    page.close()


def test_the_arrow_keys_say_what_is_live_where(browser: Any, file: Path, report: Report) -> None:
    page = opened(browser, file)
    chart = page.locator("#chart-planned [role=slider]")
    chart.focus()
    page.keyboard.press("Home")
    assert chart.get_attribute("aria-valuenow") == "0"
    page.keyboard.press("ArrowRight")
    assert chart.get_attribute("aria-valuenow") == "1"
    page.keyboard.press("End")
    assert chart.get_attribute("aria-valuenow") == str(len(report.planned.ticks) - 1)
    page.keyboard.press("p")
    peak = report.planned.ticks[report.planned.peak_tick]
    assert chart.get_attribute("aria-valuenow") == str(report.planned.peak_tick)
    assert f"{peak.operation} in {peak.module or 'the model itself'}" in chart.get_attribute("aria-valuetext")
    assert peak.operation in page.locator("#who").inner_text()
    page.locator("#zoom-peak").click()  # draws both charts anew, closer
    assert chart.get_attribute("aria-valuenow") == str(report.planned.peak_tick)
    chart.focus()
    before = chart.get_attribute("aria-valuenow")
    assert before == str(report.planned.peak_tick)
    page.keyboard.press("+")
    page.keyboard.press("+")
    page.keyboard.press("0")
    assert page.complaints == []
    assert chart.get_attribute("aria-valuenow") == before
    page.close()


def test_pointing_and_dragging(browser: Any, file: Path) -> None:
    page = opened(browser, file)
    over = page.locator("#chart-plain .u-over")
    over.scroll_into_view_if_needed()
    box = over.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + 40)
    first = page.locator("#who h3").inner_text()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 40)
    assert page.locator("#who h3").inner_text() != first
    assert "Plain step" in page.locator("#who").inner_text()
    axis = "document.querySelector('#chart-planned canvas').toDataURL().length"
    whole = page.evaluate(axis)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.7, box["y"] + 40)
    page.mouse.up()
    assert page.evaluate(axis) != whole  # both charts went closer
    page.locator("#zoom-whole").click()
    assert page.evaluate(axis) == whole
    page.locator("input[value=part]").check()
    assert "mlp.c_fc" in page.locator("#legend").inner_text()
    page.locator("input[name=holders][value=plain]").check()
    assert page.complaints == []
    page.close()


def test_it_says_what_the_report_says(browser: Any, file: Path, report: Report) -> None:
    page = opened(browser, file)
    assert page.locator("h1").inner_text() == report.title
    text = page.locator("main").inner_text()
    peaks = page.locator("#peaks [role=img]").evaluate_all(
        "bars => bars.map(bar => bar.getAttribute('aria-label'))"
    )
    assert [label.split(":")[0] for label in peaks] == ["Plain step", "Planned step"]
    assert "activations" in peaks[0]
    time = page.locator(".tile", has_text="Extra time")
    forecast, measured = time.locator(".number").all()
    assert measured.inner_text() == "+25.0 %" and "measured" in time.inner_text()
    assert measured.bounding_box()["height"] == forecast.bounding_box()["height"], "as large as the forecast"
    assert "held:" in text
    layers = set(page_data(report)["layers"].values())
    assert page.locator("#decided tbody tr:not(.inside)").count() == len(layers) + 1  # and their total
    page.locator("#decided .expand").first.click()
    assert page.locator("#decided tr.inside:visible").count() > 1
    page.close()


@pytest.mark.parametrize(("width", "scheme"), [LOOKS[0], LOOKS[-1]], ids=[IDS[0], IDS[-1]])
def test_96_layers_fit(browser: Any, deep_file: Path, width: int, scheme: str) -> None:
    assert deep_file.stat().st_size < 2_000_000
    page = opened(browser, deep_file, width, scheme)
    assert page.complaints == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.close()
