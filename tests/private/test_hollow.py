"""What `lowtide.private.hollow` leans on."""

from __future__ import annotations

from typing import Any

import torch

from lowtide.private.hollow import hollow, keeps_graph


class Hollow(torch.Tensor):
    """Answers everything itself."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return torch.zeros(3)


def test_a_hollow_tensor_has_a_shape_and_answers_itself() -> None:
    one = hollow(Hollow, torch.Size([1 << 30, 1 << 20]), torch.bfloat16, torch.device("cpu"))
    assert one.shape == (1 << 30, 1 << 20) and one.dtype == torch.bfloat16
    assert torch.sin(one).shape == (3,)


def test_a_backward_knows_whether_its_graph_is_kept() -> None:
    x = torch.ones(2, requires_grad=True)
    found: list[bool] = []
    y = x.sin()
    y.register_hook(lambda _: found.append(keeps_graph()))
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert found == [True, False]
