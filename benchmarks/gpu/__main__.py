"""``python -m benchmarks.gpu [--out FOLDER]``, or ``make gpu``; with ``--no-card .venv-cuda`` the bytes of
every row that needs no card.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.rows import ROOT
from benchmarks.gpu.runner import Results, about, run

_SECONDS = 570.0


def without_card(asked: argparse.Namespace) -> list[str]:
    """The same run on PyTorch's CUDA build without a card."""
    build = [sys.executable, str(ROOT / "tests" / "cuda_build" / "environment.py"), str(asked.no_card)]
    run = ["--run", "benchmarks.gpu", "--out", str(asked.out.absolute()), "--seconds", str(asked.seconds)]
    only = ["--only", asked.only] if asked.only else []
    return [*build, *run, *["--small"] * asked.small, *["--retry"] * asked.retry, *only]


def parsed(arguments: list[str]) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path("runs/gpu"), help="folder of gpu.json, gpu.md, gpu.log"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=_SECONDS,
        help="all ends by then; with more, a row may take longer, too",
    )
    parser.add_argument("--small", action="store_true", help="tiny models, as on a CPU")
    parser.add_argument("--retry", action="store_true", help="measure again what failed")
    parser.add_argument(
        "--no-card",
        type=Path,
        metavar="FOLDER",
        help="bytes alone, on the environment of `make cuda-build`, which is made if it is not there",
    )
    parser.add_argument("--only", metavar="PART", help=f"one of {', '.join(part.name for part in PARTS)}")
    asked = parser.parse_args(arguments)
    if asked.only not in (None, *(part.name for part in PARTS)):
        parser.error(f"there is no part {asked.only!r}")
    return asked


def main(arguments: list[str]) -> None:
    """Measure what is not known yet."""
    asked = parsed(arguments)
    if asked.no_card is not None:
        sys.exit(subprocess.run(without_card(asked), check=False).returncode)
    deadline = time.monotonic() + asked.seconds
    patience = max(1.0, asked.seconds / _SECONDS)
    parts = [
        replace(part, limit_seconds=patience * part.limit_seconds)
        for part in PARTS
        if asked.only in (None, part.name)
    ]
    import torch

    small = asked.small or not torch.cuda.is_available()
    results = Results(asked.out.absolute(), *about(small))
    results.resume(asked.retry)
    results.write()
    whole = run(parts, results, deadline, small)
    print(f"{'' if whole else 'time ran out, run again to go on; '}{asked.out / 'gpu.md'}")


if __name__ == "__main__":
    main(sys.argv[1:])
