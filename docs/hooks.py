"""What mkdocs does not do by itself: pages that are made from files outside ``docs``, from notebooks and from
the command line, and links between all of them that work in the repository, too.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

DOCS = Path(__file__).parent
ROOT = DOCS.parent

OUTSIDE = {
    "release_notes.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "results/memory_per_rank.md": "benchmarks/results/parallel_memory.md",
    "results/host_optimizer.md": "benchmarks/results/host_optimizer.md",
    "results/budget_curve.md": "benchmarks/results/budget_curve.md",
    "results/operations.md": "benchmarks/results/op_sweep.md",
    "results/one_h100.md": "benchmarks/results/gpu_h100.md",
    "results/sharded.md": "benchmarks/results/sharded.md",
    "results/late_streams.md": "benchmarks/results/late_streams.md",
    "results/reserved.md": "benchmarks/results/reserved.md",
    "results/held.md": "benchmarks/results/held.md",
    "results/held_families.md": "benchmarks/results/held_families.md",
}
"""Pages of the site, and the files of the repository that they show."""

LINK = re.compile(r"(?<=\]\()([^)#:\s]+)(?=[#)])")
"""A link's path within the project: no address of elsewhere, no mere anchor."""


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Add the pages that are made."""
    made = {page: (ROOT / source).read_text() for page, source in OUTSIDE.items()}
    made |= {f"notebooks/{path.stem}.md": notebook(path) for path in (DOCS / "notebooks").glob("*.ipynb")}
    made["commands.md"] = commands()
    for page, text in made.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links are those of the repository: let them lead to where the site has the file."""
    here = page.file.src_uri
    source = OUTSIDE.get(here, f"docs/{here}")
    on_site = {path: at for at, path in OUTSIDE.items()}

    def moved(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), found[1]))
        at = on_site.get(target, target.removeprefix("docs/"))
        return posixpath.relpath(at, posixpath.dirname(here) or ".")

    return LINK.sub(moved, markdown)


def notebook(path: Path) -> str:
    """A notebook as it was last run: its text, its code, and what that printed."""
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        text = "".join(cell["source"])
        parts.append(f"```python\n{text}\n```" if cell["cell_type"] == "code" else text)
        for output in cell.get("outputs", ()):
            said = output.get("text") or output.get("data", {}).get("text/plain", "")
            parts.append("```text\n" + "".join(said).rstrip() + "\n```")
    parts.append(f"[This page as a notebook]({path.name})")
    return "\n\n".join(parts)


def commands() -> str:
    """Every command with its options, as Typer writes them down."""
    line = [sys.executable, "-m", "typer", "lowtide.cli", "utils", "docs", "--name", "lowtide"]
    paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        line, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": paths}
    )
    return done.stdout.replace("# `lowtide`", "# Commands", 1)
