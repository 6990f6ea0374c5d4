"""The page that `lowtide report` writes: how large it is, and how soon it stands in a browser.

python -m benchmarks report_page

GPT steps of 12, 24, 48 and 96 layers, planned at half of their plain peak. A page is opened five times in
headless Chromium, narrow and wide; what counts is the median time from asking for it to the end of its `load`
event, by when its charts are drawn. Without Chromium or playwright the sizes alone are measured, and the file
says so.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import lowtide
from benchmarks.cases import gpt
from benchmarks.common import save
from lowtide.report import make_report, save_report

LAYERS = (12, 24, 48, 96)
WIDTHS = (390, 1440)
ROUNDS = 5
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")


def page_of(layers: int, folder: Path) -> dict[str, Any]:
    """A row with the page's place and size."""
    case = gpt(layers, 64, batch=8, sequence=256)
    model, batch = case.build(), case.batch()
    graph = lowtide.trace(lambda: model(**batch).loss, model=model, fake=True)
    plan = lowtide.plan(graph, budget="50%")
    path = folder / f"{layers}.html"
    begin = time.perf_counter()
    save_report(make_report(graph, plan), path)
    written = time.perf_counter() - begin
    return {
        "model": case.name, "operations": len(graph.operations), "write_seconds": written,
        "bytes": path.stat().st_size, "path": path,
    }  # fmt: skip


def opening_seconds(browser: Any, path: Path, width: int) -> float:
    """Median seconds until the page stands."""
    taken: list[float] = []
    for _ in range(ROUNDS):
        page = browser.new_page(viewport={"width": width, "height": 900})
        begin = time.perf_counter()
        page.goto(path.as_uri(), wait_until="load")
        taken.append(time.perf_counter() - begin)
        page.close()
    return statistics.median(taken)


def main() -> int:
    """Measure and write the result file."""
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    version = None
    with tempfile.TemporaryDirectory() as name:
        rows = [page_of(layers, Path(name)) for layers in LAYERS]
        if program is not None:
            from playwright.sync_api import sync_playwright

            with sync_playwright() as driver:
                browser = driver.chromium.launch(executable_path=program, args=list(FLAGS))
                version = browser.version
                for row in rows:
                    for width in WIDTHS:
                        row[f"open_seconds_{width}"] = opening_seconds(browser, row["path"], width)
                browser.close()
    for row in rows:
        del row["path"]
        opened = ", ".join(f"{row[key]:.2f} s" for key in row if key.startswith("open_seconds"))
        print(f"{row['model']:<12} {row['bytes'] / 1e6:5.2f} MB   opens in {opened or 'not measured'}")
    save("report_page", rows, browser=version)
    return 0
