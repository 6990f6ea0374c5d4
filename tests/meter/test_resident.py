"""What is resident before a step, each storage once; and what main memory has left."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import torch
from torch import nn

from lowtide.meter import resident_bytes, storages
from lowtide.meter.main_memory import free_main_memory


def free_on(root: Path, files: dict[str, str]) -> int | None:
    """What is free on a machine of these files."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    with patch("lowtide.meter.main_memory._ROOT", root):
        return free_main_memory()


def test_main_memory_is_what_the_system_and_every_control_group_leave(tmp_path: Path) -> None:
    files = {"proc/meminfo": "MemTotal: 900 kB\nMemAvailable:   500 kB\n"}
    assert free_on(tmp_path, files) == 500 * 1024
    inner, outer = "sys/fs/cgroup/pods/mine", "sys/fs/cgroup/pods"
    files |= {
        "proc/self/cgroup": "0::/pods/mine\n",
        f"{inner}/memory.max": "max\n",
        f"{inner}/memory.current": "9000\n",
    }
    assert free_on(tmp_path, files) == 500 * 1024
    files |= {
        f"{outer}/memory.max": "100000\n",
        f"{outer}/memory.current": "60000\n",
        f"{outer}/memory.stat": "inactive_file 5000\n",
    }
    assert free_on(tmp_path, files) == 45_000
    old = "sys/fs/cgroup/memory/job"
    files |= {"proc/self/cgroup": "4:memory:/job\n0::/\n", f"{old}/memory.limit_in_bytes": "30000\n"}
    files |= {f"{old}/memory.usage_in_bytes": "10000\n", f"{old}/memory.stat": "total_inactive_file 0\n"}
    assert free_on(tmp_path, files) == 20_000


def test_resident_bytes_counts_storages_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(10, 4)
            self.head = nn.Linear(4, 10, bias=False)
            self.head.weight = self.embed.weight
            self.register_buffer("table", torch.zeros(3).expand(7, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(x))

    model = Tied()
    assert resident_bytes(model) == 160 + 12
    model(torch.tensor([1])).sum().backward()
    assert resident_bytes(model) == 2 * 160 + 12
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    assert resident_bytes(model, optimizer) == 4 * 160 + 12 + 4  # two moments and a step count
    assert resident_bytes(None, optimizer) == 4 * 160 + 4
    assert resident_bytes(model, optimizer, "cuda") == 0
    assert resident_bytes() == 0


def test_storages_look_into_sparse_tensors() -> None:
    assert sum(s.nbytes() for s in storages([torch.eye(3).to_sparse()])) == 2 * 3 * 8 + 3 * 4
