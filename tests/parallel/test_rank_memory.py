"""Whole steps on real processes, by every byte that is allocated: what the layers of a rank hold, and what
one layer more adds to its peak.

Both are table 2 of arXiv 2205.05198 at t = 1, 2 and 4. `test_table2` looks at one layer, and at the tensors
that operations make.
"""

from __future__ import annotations

from functools import cache
from statistics import mode
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from ranks import any_rank, collectives_at_once, on_each_backend, on_ranks, seeded
from recomputed import Recomputed
from table2 import ROWS, Row, statistics_bytes
from torch import Tensor, nn

from lowtide import meter
from lowtide.models import preset
from lowtide.models.gpt import GPT

pytestmark = [
    on_each_backend,
    pytest.mark.skipif(not meter.available(), reason="needs a C++ compiler for the counting allocator"),
]
FOUR = pytest.param(4, marks=pytest.mark.slow)
WIDTH, HEADS, SEQUENCE, BATCH, VOCABULARY = 32, 4, 32, 3, 16
DEPTHS = (1, 2)
NUMBER = 8
"""Autograd keeps the factor of the scores, 1 / sqrt(head width), as a tensor of one double: memory that no
operation's result shows.
"""
READINGS = 16
"""At most so many. What Gloo's threads let go of late counts on top of one reading and is missing in the
next, so the commonest is the step's own.
"""
SHARED_INPUT = Row(
    "full activation recomputation, sequence parallel",
    lambda t, core: 2 / t,
    sequence_parallel=True,
    recompute="full",
)


class Found(NamedTuple):
    """One row on one rank.

    Attributes:
        layer: bytes of a layer by the formula, with the statistics of its norms and the number.
        held: bytes that all layers of a model took and had not given back when forward ended, for each depth.
        peaks: the most that a step added to parameters and gradients, for each depth.
    """

    layer: float
    held: list[int]
    peaks: list[int]

    def as_the_formula_says(self) -> bool:
        """Whether every byte is accounted for."""
        more = DEPTHS[1] - DEPTHS[0]
        held = self.held == [depth * self.layer for depth in DEPTHS]
        return held and self.peaks[1] - self.peaks[0] == more * self.layer


def make(row: Row, layers: int) -> GPT:
    """A model on the whole world, of layers that run as the row says."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "layers": layers,
        "width": WIDTH,
        "heads": HEADS,
        "hidden_width": 4 * WIDTH,
        "key_value_heads": HEADS,
    }
    config = preset(
        "gpt-nano", **shape, vocabulary=VOCABULARY, positions=SEQUENCE, dropout=0.1, fused_attention=False
    )
    group = dist.group.WORLD if dist.get_world_size() > 1 else None
    model = GPT(config, group, row.sequence_parallel and group is not None)
    for name, block in list(model.blocks.named_children()):
        if row.recompute == "selective":
            block.attention.core = Recomputed(block.attention.core)  # type: ignore[arg-type, assignment]
        elif row.recompute == "full":
            setattr(model.blocks, name, Recomputed(block))
    return model


def tokens() -> Tensor:
    """A batch, the same on every rank."""
    return torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=seeded(1))


def layer_bytes(row: Row, t: int) -> float:
    """What a layer keeps in bfloat16."""
    formula = SEQUENCE * BATCH * WIDTH * row.formula(t, 5 * HEADS * SEQUENCE / WIDTH)
    return formula + statistics_bytes(SEQUENCE, BATCH, row, t, 2) + NUMBER


def held_bytes(model: GPT) -> int:
    """Of the layers, at the end of their forward. A layer's output is the next one's input: the first input
    was there before, and the last output is there."""
    hidden = model.embed(tokens())
    with meter.peak(torch.get_default_device()) as seen:
        hidden = model.run_blocks(hidden)
    assert hidden.requires_grad
    return seen.live_bytes


def peak_bytes(model: nn.Module) -> int:
    """Of forward and backward, where gradients are there already."""
    x, targets = tokens(), tokens().roll(-1, 1)
    with meter.peak(torch.get_default_device()) as seen:
        model(x, targets).loss.backward()
    return seen.peak_bytes


def measured() -> dict[str, Found]:
    """Each row on this rank."""
    found: dict[str, Found] = {}
    t = dist.get_world_size()
    torch.set_default_dtype(torch.bfloat16)
    # counting from the start, so that what is freed later is known
    with meter.peak(torch.get_default_device()), collectives_at_once():
        for row in (*ROWS, SHARED_INPUT):
            if row.one_rank and t > 1:
                continue
            models = [make(row, depth) for depth in DEPTHS]
            for model in models:
                peak_bytes(model)
            held: list[list[int]] = [[] for _ in DEPTHS]
            peaks: list[list[int]] = [[] for _ in DEPTHS]
            for _ in range(READINGS):
                for k, model in enumerate(models):
                    held[k].append(held_bytes(model))
                    peaks[k].append(peak_bytes(model))
                seen = Found(layer_bytes(row, t), [*map(mode, held)], [*map(mode, peaks)])
                found[row.name] = seen
                if not any_rank(not seen.as_the_formula_says(), dist.group.WORLD):
                    break
    return found


@cache
def ranks(size: int) -> list[dict[str, Found]]:
    """What every rank finds."""
    return on_ranks(size, measured)


@pytest.mark.parametrize("size", [1, 2, FOUR])
def test_saved_bytes_and_the_peak_of_a_layer_more_are_the_formula(size: int) -> None:
    for rank in ranks(size):
        assert len(rank) == (7 if size == 1 else 6)
        wrong = {name: found for name, found in rank.items() if not found.as_the_formula_says()}
        assert not wrong


@pytest.mark.parametrize("size", [2, FOUR])
def test_they_go_down_with_the_ranks(size: int) -> None:
    """Under sequence parallelism all that a layer keeps is shared; without, what lies outside of the shared
    layers is not.
    """
    one, more = ranks(1)[0], ranks(size)[0]
    for row in (*ROWS[1:], SHARED_INPUT):
        assert one[row.name].peaks[-1] > more[row.name].peaks[-1], row.name
        whole, part = (found[row.name].held[-1] - DEPTHS[-1] * NUMBER for found in (one, more))
        if row.sequence_parallel:
            assert whole == size * part, row.name
        else:
            outside = DEPTHS[-1] * SEQUENCE * BATCH * WIDTH * (2 if row.recompute == "full" else 10)
            outside += DEPTHS[-1] * statistics_bytes(SEQUENCE, BATCH, row, 1, 2)
            assert whole - outside == size * (part - outside), row.name
    for plain, shared in ((ROWS[1], ROWS[2]), (ROWS[3], ROWS[4]), (ROWS[5], SHARED_INPUT)):
        assert more[shared.name].peaks[-1] < more[plain.name].peaks[-1], shared.name
