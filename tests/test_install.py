"""A wheel and an archive of the source are built; the wheel alone runs the README's first example and a short
training."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from email.parser import Parser
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import lowtide

pytest.importorskip("build")
ROOT = Path(__file__).parents[1]

BEFORE = """
import torch
from lowtide.models import build_model, preset
model = build_model(preset("gpt-nano"))
tokens = torch.randint(256, (2, 64))
batches = [{"tokens": tokens, "targets": tokens}] * 2
optimizer = torch.optim.AdamW(model.parameters())
"""


def run(*words: str | Path, folder: Path) -> str:
    """A command in a folder, without the checkout on its path."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(word) for word in words], capture_output=True, text=True, cwd=folder, env=clean, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def link_what_it_requires(wheel: Path, site: Path) -> None:
    """What pip would install with a wheel, extras left out, linked from this environment; nothing else."""
    with zipfile.ZipFile(wheel) as packed:
        (name,) = (name for name in packed.namelist() if name.endswith(".dist-info/METADATA"))
        asked = Parser().parsestr(packed.read(name).decode()).get_all("Requires-Dist", [])
    missing, seen = list(map(Requirement, asked)), set[str]()
    while missing:
        wanted = missing.pop()
        if wanted.name in seen or (wanted.marker and not wanted.marker.evaluate({"extra": ""})):
            continue
        seen.add(wanted.name)
        found = metadata.distribution(wanted.name)
        assert wanted.specifier.contains(found.version, prereleases=True), f"{wanted}: {found.version}"
        missing += map(Requirement, found.requires or [])
        for top in {file.parts[0] for file in found.files or [] if ".." not in file.parts}:
            if not (site / top).exists():
                (site / top).symlink_to(str(found.locate_file(top)))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with both, made from what git knows."""
    folder = tmp_path_factory.mktemp("dist")
    source = tmp_path_factory.mktemp("source")
    names = subprocess.run(["git", "ls-files"], capture_output=True, text=True, cwd=ROOT, check=True).stdout
    for name in names.splitlines():
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, folder=source)
    return folder


def files_of_the_package() -> set[str]:
    """What has to be in both: all that is not a folder of the package, and is not made by Python."""
    package = ROOT / "src" / "lowtide"
    names = subprocess.run(
        ["git", "ls-files"], capture_output=True, text=True, cwd=package, check=True
    ).stdout
    return {f"lowtide/{name}" for name in names.splitlines()}


def test_both_hold_every_file_of_the_package(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    (archive,) = built.glob("*.tar.gz")
    expected = files_of_the_package()
    assert any(name.endswith(".cpp") for name in expected)
    assert expected <= set(zipfile.ZipFile(wheel).namelist())
    with tarfile.open(archive) as packed:
        inside = {name.split("/src/", 1)[-1] for name in packed.getnames()}
    assert expected <= inside
    assert wheel.name.startswith(f"lowtide-{lowtide.__version__}-")


def test_the_wheel_runs_on_its_own(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    venv.create(tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python]
    run(*pip, "install", "--no-deps", "--no-index", wheel, folder=tmp_path)
    (own,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    link_what_it_requires(wheel, own)
    assert run(tmp_path / "venv" / "bin" / "lowtide", "--version", folder=tmp_path).split() == [
        "lowtide",
        lowtide.__version__,
    ]
    first = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert first is not None
    small = ["--model", "gpt-nano", "--batch", "4", "--seq", "64", "--data", own / "lowtide"]
    after = "print(lowtide.__file__)\nfrom lowtide.cli import main\nmain()"
    told = run(python, "-c", BEFORE + first[1] + after, "train", "--steps", "3", *small, folder=tmp_path)
    assert "peak" in told and str(own) in told
    assert "plain" in told and "planned" in told


@pytest.mark.parametrize(("target", "link"), [("install", ".venv"), ("versions", ".venv-torch-1.0")])
def test_make_refuses_an_environment_that_is_a_link(tmp_path: Path, target: str, link: str) -> None:
    """To make it anew would empty the folder that the link leads to."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "kept").touch()
    (tmp_path / link).symlink_to(shared)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "PYTHON"))}
    done = subprocess.run(
        ["make", target, "TORCHES=1.0", f"PYTHON={sys.executable}"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=clean,
        check=False,
    )
    assert done.returncode != 0
    assert f"{link} is a symbolic link to {shared}" in done.stderr and "remove the link" in done.stderr
    assert [path.name for path in shared.iterdir()] == ["kept"]
