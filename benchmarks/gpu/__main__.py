"""``python -m benchmarks.gpu [--out FOLDER]``, or ``make gpu``."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.runner import Results, about, run


def main(arguments: list[str]) -> None:
    """Measure what is not known yet."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path("runs/gpu"), help="folder of gpu.json, gpu.md, gpu.log"
    )
    parser.add_argument(
        "--seconds", type=float, default=570, help="all ends by then; with more, a row may take longer, too"
    )
    parser.add_argument("--small", action="store_true", help="tiny models, as on a CPU")
    parser.add_argument("--retry", action="store_true", help="measure again what failed")
    parser.add_argument("--only", metavar="PART", help=f"one of {', '.join(part.name for part in PARTS)}")
    asked = parser.parse_args(arguments)
    deadline = time.monotonic() + asked.seconds
    patience = max(1.0, asked.seconds / parser.get_default("seconds"))
    parts = [
        replace(part, limit_seconds=patience * part.limit_seconds)
        for part in PARTS
        if asked.only in (None, part.name)
    ]
    if not parts:
        parser.error(f"there is no part {asked.only!r}")
    import torch

    small = asked.small or not torch.cuda.is_available()
    results = Results(asked.out.absolute(), *about(small))
    results.resume(asked.retry)
    results.write()
    whole = run(parts, results, deadline, small)
    print(f"{'' if whole else 'time ran out, run again to go on; '}{asked.out / 'gpu.md'}")


if __name__ == "__main__":
    main(sys.argv[1:])
