"""What importing brings with it: planning is arithmetic on data, and needs no PyTorch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import lowtide
import lowtide.plan

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


CODE = """
import pkgutil, sys
from importlib import import_module
import lowtide.plan
for module in pkgutil.walk_packages(lowtide.plan.__path__, "lowtide.plan."):
    import_module(module.name)
heavy = ("lowtide.extensions", "lowtide.run", "lowtide.trace.")
print(sorted(name for name in sys.modules if name == "torch" or name.startswith(heavy)))
"""


def test_no_file_of_the_planner_loads_torch_or_what_executes():
    assert (
        subprocess.run(
            [sys.executable, "-c", CODE], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]"
    )


def test_what_a_plan_is_needs_no_solver():
    code = "import sys, lowtide.plan.data; print('scipy' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "False"


PLAIN = """
import sys, torch, lowtide
block = lambda: torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU())
model = torch.nn.Sequential(*(block() for _ in range(6)))
handle = lowtide.limit_memory(model, "80%")
for _ in range(3):
    model(torch.ones(512, 16)).sum().backward()
assert handle.plan.replayed
lowtide.plan(lowtide.trace(lambda: model(torch.ones(4, 16)).sum()), policy="full")
print(sorted(name for name in sys.modules if name.startswith("lowtide.extensions.")))
"""


def test_a_plain_limit_loads_neither_moves_nor_scopes():
    found = subprocess.run([sys.executable, "-c", PLAIN], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def imports(path: Path) -> str:
    return "\n".join(
        line for line in path.read_text().splitlines() if line.lstrip().startswith(("import ", "from "))
    )


ROOMS = [
    "data", "simulate", "blocks", "bound", "search", "policies", "choose",
]  # fmt: skip


def test_arrows_between_the_rooms_run_one_way():
    root = Path(lowtide.plan.__file__).parent
    for path in root.rglob("*.py"):
        room = path.relative_to(root).parts[0].removesuffix(".py")
        if room in ROOMS:
            above = ROOMS[ROOMS.index(room) + 1 :]
            assert not [name for name in above if f"lowtide.plan.{name}" in imports(path)], path


def test_lowtide_shows_each_of_its_names_once_and_no_others():
    shown = [name for name in dir(lowtide) if not name.startswith("_")]
    assert len(shown) == len(set(shown)) and set(lowtide.__all__) <= set(shown)
    assert not {"Any", "annotations", "import_module", "TYPE_CHECKING"} & set(shown)
