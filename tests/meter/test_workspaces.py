"""The workspaces of cuBLAS stand on the threads of forward and backward; on a CPU there are none."""

from __future__ import annotations

import pytest
import torch

from lowtide.meter.cuda import resident_workspace_bytes, workspace_bytes


def test_a_cpu_has_none() -> None:
    assert workspace_bytes(torch.device("cpu")) == resident_workspace_bytes(torch.device("cpu")) == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_step_adds_none() -> None:
    weight = torch.ones(64, 64, device="cuda", requires_grad=True)
    with torch.cuda.stream(torch.cuda.Stream()):
        before = torch.cuda.memory_allocated()
        count = resident_workspace_bytes(torch.device("cuda"))
        assert torch.cuda.memory_allocated() - before == count == workspace_bytes(torch.device("cuda:0"))
        torch.autograd.grad((weight @ weight).sum(), weight)
        torch.autograd.grad(torch.nn.functional.linear(weight, weight, weight[0]).sum(), weight)
        assert torch.cuda.memory_allocated() - before == count
        assert resident_workspace_bytes(torch.device("cuda", 0)) == count
        assert torch.cuda.memory_allocated() - before == count
