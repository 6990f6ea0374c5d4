"""What importing `lowtide.parallel` brings with it."""

from __future__ import annotations

import subprocess
import sys

HEAVY = (
    "torch.distributed.checkpoint",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "sympy",
)


def test_what_takes_long_and_may_abort_processes_at_their_end_is_imported_late() -> None:
    code = (
        "import sys, torch.distributed\n"
        "before = set(sys.modules)\n"
        "import lowtide.parallel as lp, lowtide.optim, torch\n"
        "layer = lp.ColumnParallelLinear(4, 4, gather_output=False)\n"
        "layer(torch.ones(2, 4)).sum().backward()\n"
        "lp.clip_grad_norm(layer.parameters(), 1.0)\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules and name not in before])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
