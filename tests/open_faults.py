"""What the governor does not hold or foresee yet, test by test: each is expected to fail, and has to be taken
out of this list by the change that mends it.
"""

from __future__ import annotations

_BACKWARD = "backward's operations of other shapes, or with nothing left to evict, go above the budget"
_DEPARTS = "a step that departs takes some KiB more than its budget"

OPEN = {
    "run/limit/test_planning.py::test_weights_that_are_used_many_times_at_the_smallest_budget[dtype0]": (
        _BACKWARD
    ),
    "run/limit/test_planning.py::test_weights_that_are_used_many_times_at_the_smallest_budget[dtype1]": (
        _BACKWARD
    ),
    "run/profile/test_profiler.py::test_layers_left_out_by_chance_are_planned_for[True-True]": _DEPARTS,
    "run/profile/test_profiler.py::test_layers_left_out_by_chance_are_planned_for[False-False]": _DEPARTS,
    "run/record/test_values.py::test_within_any_budget[Invertible-None]": (
        "storages that a model frees and fills take 64 KiB less than is predicted"
    ),
    "estimate/test_simulate.py::test_one_process[gpt-layers=2-recompute=selective-stage0]": (
        "a step without a budget under the policy 'selective' takes more than the formula"
    ),
    "estimate/test_simulate.py::"
    "test_one_process[gpt-layers=8-pp=4-interleave=2-global_batch=16-recompute=selective-stage0]": (
        "a step without a budget under the policy 'selective' takes more than the formula"
    ),
}
"""Test, below this folder -> why it fails."""
