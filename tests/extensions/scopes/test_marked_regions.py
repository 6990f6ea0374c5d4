"""Regions that a user has marked are recomputed in compiled code, too, or refused."""

from __future__ import annotations

import pytest
import torch
from programs import Plain, Program, run
from torch.utils.checkpoint import checkpoint

import lowtide


class Torchs(Program):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.half, x, 0, use_reentrant=False)
        return self.half(x, 3).square().mean()


class TorchsTwice(Program):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for first in (0, 3):
            x = checkpoint(self.half, x, first, use_reentrant=False)
        return x.square().mean()


class Called(Program):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.half(lowtide.checkpoint(self.half, x, 0), 3).square().mean()


class Marked(Program):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with lowtide.checkpointing():
            x = self.half(x, 0)
        return self.half(x, 3).square().mean()


class MarkedTwice(Program):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for first in (0, 3):
            with lowtide.checkpointing():
                x = self.half(x, first)
        return x.square().mean()


class MarkedThenCalled(Program):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with lowtide.checkpointing():
            x = self.half(x, 0)
        return lowtide.checkpoint(self.half, x, 3).square().mean()


def test_marked_regions_are_what_the_user_wishes() -> None:
    _, plain = run(Plain, "100%")
    peaks = {kind: run(kind, "100%")[1] for kind in (Torchs, Called, Marked)}
    twice = {kind: run(kind, "100%")[1] for kind in (TorchsTwice, MarkedTwice, MarkedThenCalled)}
    assert peaks[Called] == peaks[Marked] == peaks[Torchs] < plain
    assert len(set(twice.values())) == 1, f"what enters the second region is kept: {twice}"


def test_a_region_that_compiled_code_cannot_honour_is_refused() -> None:
    class Listed(Program):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with lowtide.checkpointing([torch.ops.aten.gelu]):
                return self.half(x, 0).square().mean()

    compiled = lowtide.compile(Listed(), "100%", backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match=r"None, 'full' or 'keep_all'"):
        compiled(torch.randn(8, 32))


def test_an_option_without_a_meaning_in_a_compiled_region_is_named() -> None:
    class Asked(Program):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return lowtide.checkpoint(self.half, x, 0, preserve_rng_state=False).square().mean()

    compiled = lowtide.compile(Asked(), "100%", backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match=r"preserve_rng_state=False.*drop it"):
        compiled(torch.randn(8, 32))
