"""What is done with saved tensors of a profiled step that the program overwrites."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.graph import StepGraph

WRITES: dict[str, tuple[Callable[[Tensor, Tensor], object], bool]] = {
    "nothing": (lambda read, rest: None, True),
    "what was read": (lambda read, rest: read.data.mul_(2), False),
    "another part of its storage": (lambda read, rest: rest.data.mul_(2), True),
    "no storage: the tensor gets another": (lambda read, rest: read.data.set_(read.data * 2), True),
}


class Overwriting(nn.Module):
    """Three times squares half of what a layer made, which autograd saves, and then writes somewhere. The
    first time runs in Python, later ones in C++. What the layer made is let go of right after the write.
    """

    def __init__(self, write: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__()
        self.layer, self.write = nn.Linear(4, 8), write

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.part(x) for _ in range(3)]).sum()

    def part(self, x: Tensor) -> Tensor:
        read, rest = self.layer(x).chunk(2, 1)
        square = (read * read).sum() + rest.sum()
        self.write(read, rest)
        return square


def saved_of(graph: StepGraph) -> list[bool]:
    """Whether a plan may evict what the layer made, for each time that autograd saved it."""
    made = {value for op in graph.operations if op.name.startswith("aten.addmm") for value in op.writes}
    return [saved.droppable for saved in graph.saved if saved.value in made]


@pytest.mark.parametrize("what", WRITES)
def test_only_what_was_overwritten_past_its_version_counter_stays(what: str) -> None:
    write, evictable = WRITES[what]
    found = saved_of(lowtide.trace(Overwriting(write), torch.randn(3, 4)))
    assert len(found) == 6 and all(one is evictable for one in found)


@pytest.mark.parametrize("what", WRITES)
def test_what_is_let_go_of_right_after_such_a_write_is_read_as_written(what: str) -> None:
    torch.manual_seed(0)
    plain = Overwriting(WRITES[what][0])
    limited, x = copy.deepcopy(plain), torch.randn(3, 4)
    lowtide.limit_memory(limited, policy="full")
    for step in range(3):
        for model in (plain, limited):
            model.zero_grad()
            model(x).backward()
        assert plain.layer.weight.grad is not None and limited.layer.weight.grad is not None
        assert torch.equal(plain.layer.weight.grad, limited.layer.weight.grad), f"in step {step}"
