"""A model's parts by name: tensors by their storages, and the modules whose forwards are under way."""

from __future__ import annotations

import torch
from torch import nn

from lowtide import private
from lowtide.trace.modules import following_modules, tensor_names


def test_tensors_have_the_name_and_kind_of_the_first_that_has_their_storage() -> None:
    model = nn.Sequential(
        nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2, affine=False), nn.Linear(2, 2, bias=False)
    )
    model[2].weight = model[0].weight
    model[0].weight.grad = torch.zeros(2, 2)
    names = tensor_names(model)
    assert names[private.storage_key(model[2].weight)] == ("parameter", "0.weight")
    assert names[private.storage_key(model[0].weight.grad)] == ("gradient", "0.weight")
    assert names[private.storage_key(model[1].running_mean)] == ("buffer", "1.running_mean")


class Seen(nn.Module):
    """Notes what is under way; fails where that is asked for."""

    def __init__(self, under_way: list[str], fails: bool = False) -> None:
        super().__init__()
        self.under_way, self.seen, self.fails = under_way, list[list[str]](), fails

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(list(self.under_way))
        if self.fails:
            raise ValueError
        return x


def test_modules_under_way_are_known_and_forgotten_with_the_block() -> None:
    under_way: list[str] = []
    first, second = Seen(under_way), Seen(under_way, fails=True)
    model = nn.Sequential(nn.Sequential(first), second)
    with following_modules(model, under_way):
        try:
            model(torch.zeros(1))
        except ValueError:
            assert not under_way, "a forward that fails is over, too"
    assert first.seen == [["", "0", "0.0"]] and second.seen == [["", "1"]]
    first(torch.zeros(1))
    assert first.seen[-1] == []
