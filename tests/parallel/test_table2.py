"""Table 2 of arXiv 2205.05198, measured: what one layer keeps for backward, on fake tensors at the paper's
sizes, and on real processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from ranks import on_each_backend, on_ranks
from table2 import MODELS, ROWS, SEQUENCE, Row, kept_bytes, layer, statistics_bytes, traced_bytes
from torch._subclasses.fake_tensor import FakeTensorMode

SIZES = (1, 2, 4, 8)
SOME = ["22B", "1T", *(pytest.param(name, marks=pytest.mark.slow) for name in ("175B", "530B"))]


@contextmanager
def pretended(size: int) -> Iterator[None]:
    """One rank of a group of ``size`` that is not there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=size - 1, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def fake_bytes(heads: int, width: int, batch: int, row: Row, size: int) -> int:
    """What a rank keeps, by fake tensors in bfloat16."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        with pretended(size), FakeTensorMode(allow_non_fake_inputs=True):
            module = layer(heads, width, row, dist.group.WORLD if size > 1 else None)
            piece = SEQUENCE // size if row.sequence_parallel else SEQUENCE
            measure = traced_bytes if row.recompute else kept_bytes
            return measure(module, torch.empty(batch, piece, width, requires_grad=True))
    finally:
        torch.set_default_dtype(torch.float32)


def cells() -> list[tuple[Row, int]]:
    return [(row, size) for row in ROWS for size in SIZES if size == 1 or not row.one_rank]


def expected_bytes(model: str, row: Row, size: int) -> float:
    """The formula, without the norms' statistics. Full recomputation keeps the layer's input, of which a rank
    has a piece under SP.
    """
    heads, width, batch = MODELS[model]
    return SEQUENCE * batch * width * row.formula(size, 5 * heads * SEQUENCE / width)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize(
    "model", ["22B", "1T", *(pytest.param(m, marks=pytest.mark.slow) for m in ("175B", "530B"))]
)
def test_table_2_to_the_byte(model: str) -> None:
    """All six rows, t in {1, 2, 4, 8}, the four models: the formula plus the norms' statistics, and nothing
    else.

    On the CPU a norm of bfloat16 keeps its statistics in bfloat16: 2 norms x 2 numbers x 2 bytes a token, at
    most 0.008 % of the table's smallest cell that has them. Rows with recompute go by a trace's saved values,
    as nothing is recorded on fake tensors themselves.
    """
    lines, wrong = [], []
    for row, size in cells():
        if row.sequence_parallel and size == 1:
            row = Row(row.name, row.formula, False, row.recompute)  # one rank has the whole sequence
        heads, width, batch = MODELS[model]
        found = fake_bytes(heads, width, batch, row, size)
        formula = expected_bytes(model, row, size)
        statistics = statistics_bytes(SEQUENCE, batch, row, size, 2)
        lines.append(f"{model:5} t={size} {row.name:50} {found:15,} {formula:17,.0f} + {statistics:7,}")
        if abs(found - formula - statistics) > 1:
            wrong.append(f"{lines[-1]}  off by {(found - statistics) / formula - 1:+.4%}")
        assert statistics <= 0.001 * formula
    print("\n".join(lines))
    assert len(lines) == 1 + 5 * 4
    assert not wrong, "\n" + "\n".join(wrong)


SMALL = {"heads": 8, "width": 64, "sequence": 32, "batch": 3}


def real_bytes() -> list[tuple[int, float, int]]:
    """Each row's bytes on this rank, by the formula, and of statistics, in bfloat16 at a small shape."""
    found = []
    size, h, s, b, a = (
        dist.get_world_size(),
        SMALL["width"],
        SMALL["sequence"],
        SMALL["batch"],
        SMALL["heads"],
    )
    torch.set_default_dtype(torch.bfloat16)
    for row in ROWS:
        if row.one_rank and size > 1:
            continue
        torch.manual_seed(0)
        sharing = size > 1
        row = row if sharing else Row(row.name, row.formula, False, row.recompute)
        module = layer(a, h, row, dist.group.WORLD if sharing else None)
        piece = s // size if row.sequence_parallel else s
        x = torch.randn(b, piece, h, requires_grad=True)
        found.append(
            (
                kept_bytes(module, x),
                s * b * h * row.formula(size, 5 * a * s / h),
                statistics_bytes(s, b, row, size, 2),
            )
        )
    return found


@on_each_backend
@pytest.mark.parametrize("size", [1, 2, 4])
def test_table_2_on_real_processes(size: int) -> None:
    for rank in on_ranks(size, real_bytes):
        assert len(rank) == (6 if size == 1 else 5)
        assert all(found == formula + statistics for found, formula, statistics in rank), rank
