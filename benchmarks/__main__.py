"""Run benchmarks by name, all of them without one: ``python -m benchmarks accuracy planning_time``."""

from __future__ import annotations

import sys
from importlib import import_module

from benchmarks.common import QUICK, RESUME
from lowtide.run.record.engine import engine

NAMES = (
    "estimate_published",
    "estimate_runs",
    "estimate_long_context",
    "estimate_scale",
    "planning_time",
    "first_step",
    "restart",
    "random_lengths",
    "varying",
    "held",
    "held_families",
    "versus_checkpoint",
    "accuracy",
    "budget_curve",
    "compile_time",
    "knob_peak",
    "op_sweep",
    "host_optimizer",
    "layout",
    "codecs",
    "mixes",
    "disk_tier",
    "parallel_memory",
    "sharded",
    "sharded_planning",
    "layer_times",
    "long_sequence",
    "recorder",
    "techniques",
    "tiles",
    "chunked_loss",
    "context_parallel",
    "late_streams",
    "reserved",
    "report_page",
    "report",
    "figures",
)

WITH_OPTIONS = ("held", "held_families")
"""Those that take options of their own, where they are named alone."""


def main(names: list[str]) -> int:
    """Run each; returns the exit code: the first that is not zero."""
    names = [name for name in names if name not in (QUICK, RESUME)]  # the benchmarks read them themselves
    if len(names) > 1 and names[0] in WITH_OPTIONS and names[1].startswith("-"):
        engine()
        return import_module(f"benchmarks.{names[0]}").main(names[1:])
    if {"-h", "--help"} & set(names):
        print(f"python -m benchmarks [--quick] [--resume] [NAME ...]: all, or those of {', '.join(NAMES)}")
        print(f"python -m benchmarks NAME --help: options, of {', '.join(WITH_OPTIONS)}")
        return 0
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        print(f"there is no benchmark {unknown[0]!r}: choose of {', '.join(NAMES)}", file=sys.stderr)
        return 2
    engine()  # else the first measure waits for it
    codes = [import_module(f"benchmarks.{name}").main() for name in names or NAMES]
    return next((code for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
