"""What is not foreseen to a hundredth yet, test by test: each is expected to fail, and has to be taken out of
this list by the change that mends it. All take less than is foreseen.
"""

from __future__ import annotations

OPEN = {
    "run/record/test_values.py::test_within_any_budget[Invertible-None]": (
        "what a plan stores for replays alone goes when they have read it, sooner than rule 7 foresees: 6.2 %"
    ),
    "estimate/test_simulate.py::test_one_process[gpt-layers=2-recompute=selective-stage0]": (
        "what a scope's replays start from goes when they have read it, sooner than rule 7 foresees: 4.2 %"
    ),
    "estimate/test_simulate.py::"
    "test_one_process[gpt-layers=8-pp=4-interleave=2-global_batch=16-recompute=selective-stage0]": (
        "what a scope's replays start from goes when they have read it, sooner than rule 7 foresees: 1.3 %"
    ),
}
"""Test, below this folder -> why it fails."""
