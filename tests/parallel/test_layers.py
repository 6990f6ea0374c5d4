"""Every combination of the layers' options, on real processes, against the unsharded layers: outputs, every
parameter's and input's gradient.

The whole grid runs in one process group for each number of ranks. What a rank holds is put together again
with the collectives of ``torch.distributed`` itself, and the unsharded rival is made of ``torch.nn`` alone.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_each_backend, on_ranks, seeded
from torch import Tensor, nn
from torch.nn import functional as F

from lowtide import parallel as lp

pytestmark = on_each_backend
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}
SEQUENCE, BATCH, WIDTH = 8, 3, 8


@dataclass(frozen=True)
class Case:
    """One cell of the grid: a column-parallel layer, GELU, a row-parallel layer, perhaps a norm before and a
    dropped part.
    """

    dtype: torch.dtype
    bias: bool = True
    sequence: int | None = None
    stride: int = 1
    skip_bias_add: bool = False
    hidden: int = 16
    pad: bool = False
    norm: str = ""
    frozen: str = ""
    input_grad: bool = True
    gather_output: bool = False
    input_is_parallel: bool = True
    reduce_output: bool = True
    master: bool = False
    siblings: int = 1
    batch: int = BATCH
    alignment: int = 1


def grid() -> list[Case]:
    """Several hundred cells."""
    cells: list[Case] = []
    for dtype in TOLERANCE:
        for bias, sequence, stride, skip in itertools.product(
            (True, False), (None, 0, 1), (1, 2), (False, True)
        ):
            cells.append(Case(dtype, bias, sequence, stride, skip))
        for sequence, frozen, grad in itertools.product(
            (None, 0, 1), ("", "up", "down", "both"), (True, False)
        ):
            if frozen != "both" or grad:
                cells.append(Case(dtype, sequence=sequence, frozen=frozen, input_grad=grad))
        for sequence, norm, siblings in itertools.product(
            (None, 0, 1), ("layer", "rms", "layer without shift"), (1, 3)
        ):
            cells.append(Case(dtype, sequence=sequence, norm=norm, siblings=siblings))
        for bias, hidden, sequence, skip in itertools.product(
            (True, False), (10, 13, 3), (None, 0, 1), (False, True)
        ):
            cells.append(Case(dtype, bias, sequence, 1, skip, hidden, pad=True))
        for bias, skip, hidden, parallel in itertools.product(
            (True, False), (False, True), (16, 13), (False, True)
        ):
            if not parallel:
                cells.append(
                    Case(
                        dtype,
                        bias,
                        None,
                        1,
                        skip,
                        hidden,
                        pad=hidden == 13,
                        gather_output=True,
                        input_is_parallel=False,
                        alignment=3 if hidden == 13 and bias else 1,
                    )
                )
        for skip, master in itertools.product((False, True), (False, True)):
            cells.append(Case(dtype, skip, None, 1, skip, reduce_output=False, master=master))
        for bias, hidden, sequence, stride in itertools.product((True, False), (10, 6), (None, 1), (1, 2)):
            cells.append(Case(dtype, bias, sequence, stride, False, hidden, pad=True, alignment=4))
        for sequence, batch in itertools.product((0, 1), (1, 2)):
            cells.append(Case(dtype, sequence=sequence, batch=batch, siblings=2))
    return list(dict.fromkeys(cells))


class Whole(nn.Module):
    """The unsharded rival, with the parallel layers' own initial values."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.norm = nn.Identity()
        if case.norm == "rms":
            self.norm = nn.RMSNorm(WIDTH, eps=1e-6, dtype=case.dtype)
        elif case.norm:
            self.norm = nn.LayerNorm(WIDTH, bias="without" not in case.norm, dtype=case.dtype)
        self.ups = nn.ModuleList(
            nn.Linear(WIDTH, case.hidden, case.bias, dtype=torch.float64) for _ in range(case.siblings)
        )
        self.down = nn.Linear(case.hidden, WIDTH, case.bias, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        hidden = torch.stack([F.gelu(up(x)) for up in self.ups]).prod(0)
        return self.down(hidden)


class Shared(nn.Module):
    """The same on the parallel layers."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        sp: dict[str, Any] = {"sequence_parallel_enabled": case.sequence is not None}
        both: dict[str, Any] = {
            **sp,
            "sequence_dimension": case.sequence,
            "dtype": case.dtype,
            "pad": case.pad,
            "pad_alignment_size_per_rank": case.alignment,
        }
        both |= {"stride": case.stride, "skip_bias_add": case.skip_bias_add}
        self.norm = nn.Identity()
        if case.norm == "rms":
            self.norm = lp.RMSNorm(WIDTH, dtype=case.dtype, **sp)
        elif case.norm:
            self.norm = lp.LayerNorm(WIDTH, bias="without" not in case.norm, dtype=case.dtype, **sp)
        self.ups = nn.ModuleList(
            lp.ColumnParallelLinear(
                WIDTH, case.hidden, case.bias, case.gather_output, keep_master_weight=case.master, **both
            )
            for _ in range(case.siblings)
        )
        self.down = lp.RowParallelLinear(
            case.hidden, WIDTH, case.bias, case.input_is_parallel, reduce_output=case.reduce_output, **both
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        case = self.case
        if case.sequence is not None:
            x = lp.scatter_to_sequence_parallel_region(x, case.sequence)
        x = self.norm(x)
        layers: Any = self.ups
        ups = lp.column_parallel(x, list(layers)) if case.siblings > 1 else (layers[0](x),)
        hidden = torch.stack(
            [F.gelu(u[0] if u[1] is None else u[0] + u[1]) if case.skip_bias_add else F.gelu(u) for u in ups]
        ).prod(0)
        out = self.down(hidden)
        bias = None
        if case.skip_bias_add:
            out, bias = out
        if not case.reduce_output:
            out = lp.reduce_from_tensor_model_parallel_region(out)
        if bias is not None:
            out = out + bias
        if case.sequence is not None:
            out = lp.gather_from_sequence_parallel_region(out, case.sequence, to_model_parallel=False)
        return out


def gathered(module: lp.layers.ParallelModule, name: str, tensor: Tensor) -> Tensor:  # pyright: ignore
    """The whole of a parameter or of its gradient, from every rank's part, with ``torch.distributed``
    alone.
    """
    where = module.partitions[name]
    if where.dimension is None:
        return tensor.detach().clone()
    parts = [
        torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size())
    ]
    dist.all_gather(parts, tensor.detach().contiguous())
    d, length = where.dimension, where.shape[where.dimension] // where.stride
    cut = [part.chunk(where.stride, d) for part in parts]
    blocks = [torch.cat([rank[block] for rank in cut], d) for block in range(where.stride)]
    padding = [block.narrow(d, length, block.shape[d] - length) for block in blocks]
    assert sum(part.abs().sum() for part in padding) == 0, "padding was trained"
    return torch.cat([block.narrow(d, 0, length) for block in blocks], d)


def pairs(shared: Shared, whole: Whole) -> Iterator[tuple[str, Any, str, nn.Parameter]]:
    """Each parameter of the parallel model with its rival."""
    modules: list[tuple[Any, Any, str]] = [(shared.down, whole.down, "down")]
    modules += [
        (up, rival, f"up {k}") for k, (up, rival) in enumerate(zip(shared.ups, whole.ups, strict=True))
    ]
    if shared.case.norm:
        modules.append((shared.norm, whole.norm, "norm"))
    for module, rival, label in modules:
        for name, parameter in module.named_parameters():
            yield f"{label}.{name}", (module, name, parameter), label, getattr(rival, name)


def distance(a: Tensor, b: Tensor) -> float:
    """Relative to the norm of ``b``."""
    return float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30))


def check(case: Case) -> list[str]:
    # the layers are on the CPU: of every cell, seeding all devices took a tenth
    torch.default_generator.manual_seed(0)
    shared = Shared(case)
    whole = Whole(case)
    faults: list[str] = []
    for label, (module, name, parameter), part, rival in pairs(shared, whole):
        rival.data = gathered(module, name, parameter).to(rival.dtype)
        trained = not ((case.frozen == "both" and name == "weight") or part.split()[0] == case.frozen)
        parameter.requires_grad_(trained)
        rival.requires_grad_(trained)
        checked = case.master and name == "weight" and part.startswith("up")
        if checked and not torch.equal(module.master_weight.double(), rival.data.double()):
            faults.append(f"{label}: master weight")
    shape = (case.batch, SEQUENCE, WIDTH) if case.sequence == 1 else (SEQUENCE, case.batch, WIDTH)
    generator = seeded(1)
    x = torch.randn(shape, generator=generator, dtype=torch.float64).to(case.dtype)
    gradient = torch.randn(shape, generator=generator, dtype=torch.float64).to(case.dtype)
    own, other = x.clone().requires_grad_(case.input_grad), x.clone().requires_grad_(case.input_grad)
    out, expected = shared(own), whole.to(case.dtype)(other)
    if not out.requires_grad:
        return [*faults, "nothing to train"]
    out.backward(gradient)
    expected.backward(gradient)
    lp.allreduce_sequence_parallel_gradients(shared, buffer_bytes=64)
    tolerance = TOLERANCE[case.dtype]

    def compare(label: str, a: Tensor | None, b: Tensor | None) -> None:
        if (a is None) != (b is None):
            faults.append(f"{label}: {'no' if a is None else 'a'} gradient")
        elif (
            a is not None
            and b is not None
            and (a.dtype is not b.dtype or a.shape != b.shape or not distance(a, b) <= tolerance)
        ):
            faults.append(f"{label}: {a.dtype} {tuple(a.shape)} {tuple(b.shape)} off by {distance(a, b):.1e}")

    compare("output", out.detach(), expected.detach())
    compare("input", own.grad, other.grad)
    for label, (module, name, parameter), _, rival in pairs(shared, whole):
        compare(label, None if parameter.grad is None else gathered(module, name, parameter.grad), rival.grad)
    return faults


def run_grid(cells: list[Case]) -> list[str]:
    return [f"{asdict(case)}: {fault}" for case in cells for fault in check(case)]


@pytest.mark.parametrize("size", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_option(size: int) -> None:
    cells = grid()
    if size == 4:
        cells = [case for case in cells if not (case.hidden == 3 and case.stride > 1)]
    if size == 2:  # all in one dtype, and a third of them, another one, in the others
        dtypes = list(TOLERANCE)
        cells = [c for i, c in enumerate(cells) if i % 3 == dtypes.index(c.dtype) or c.dtype is dtypes[0]]
    assert len(cells) >= (150 if size == 2 else 300)
    for rank, faults in enumerate(on_ranks(size, run_grid, cells)):
        assert not faults, f"rank {rank}: {len(faults)} faults\n" + "\n".join(faults[:12])


def test_the_grid_sees_a_missing_sum() -> None:
    """The comparison is one that can fail: without the sum of the partial gradients it does."""
    assert all(on_ranks(2, without_sum))


def without_sum() -> bool:
    keep: Callable[..., Any] = lp.allreduce_sequence_parallel_gradients
    lp.allreduce_sequence_parallel_gradients = lambda *_, **__: 0  # type: ignore[assignment]
    try:
        faults = check(Case(torch.float64, sequence=0, norm="layer"))
    finally:
        lp.allreduce_sequence_parallel_gradients = keep
    return any("norm.weight" in fault for fault in faults) and any("down.bias" in fault for fault in faults)


# Names, order and defaults of parameters are those that neuronx-distributed publishes, so that a call of its
# layers is one of ours. What is for its hardware only (``use_spmd_rank``) is left out.

REQUIRED = inspect.Parameter.empty
LINEAR: list[tuple[str, Any]] = [
    ("dtype", torch.float32),
    ("device", None),
    ("stride", 1),
    ("init_method", None),
    ("sequence_parallel_enabled", False),
    ("sequence_dimension", None),
    ("keep_master_weight", False),
    ("skip_bias_add", False),
    ("pad", False),
]
LAST: list[tuple[str, Any]] = [("tensor_model_parallel_group", None), ("reduce_dtype", torch.float32)]
SIZES: list[tuple[str, Any]] = [("input_size", REQUIRED), ("output_size", REQUIRED), ("bias", True)]
ALIGNED: list[tuple[str, Any]] = [("pad_alignment_size_per_rank", 1), ("keep_padded_output", False)]
CONVOLUTION: list[tuple[str, Any]] = [
    ("in_channels", REQUIRED),
    ("out_channels", REQUIRED),
    ("kernel_size", REQUIRED),
    ("stride", 1),
    ("padding", 0),
    ("dilation", 1),
    ("groups", 1),
    ("bias", True),
    ("padding_mode", "zeros"),
]
MADE: list[tuple[str, Any]] = [
    ("dtype", torch.float32),
    ("device", None),
    ("init_method", None),
    ("keep_master_weight", False),
    ("partition_pad", False),
]
PUBLISHED: dict[type, list[tuple[str, Any]]] = {
    lp.ColumnParallelLinear: [*SIZES, ("gather_output", True), *LINEAR, *ALIGNED, *LAST],
    lp.OutputChannelParallelConv2d: [*CONVOLUTION, ("gather_output", True), *MADE],
    lp.InputChannelParallelConv2d: [*CONVOLUTION, ("input_is_parallel", False), *MADE],
    lp.RowParallelLinear: [*SIZES, ("input_is_parallel", False), *LINEAR, ("reduce_output", True), *LAST],
    lp.ParallelEmbedding: [
        ("num_embeddings", REQUIRED),
        ("embedding_dim", REQUIRED),
        ("padding_idx", None),
        ("max_norm", None),
        ("norm_type", 2.0),
        ("scale_grad_by_freq", False),
        ("sparse", False),
        ("init_method", torch.nn.init.normal_),
        ("device", None),
        ("dtype", torch.float32),
        ("shard_across_embedding", False),
        ("pad", False),
        ("sequence_parallel_enabled", False),
        ("tensor_model_parallel_group", None),
    ],
    lp.LayerNorm: [
        ("normalized_shape", REQUIRED),
        ("eps", 1e-5),
        ("elementwise_affine", True),
        ("device", None),
        ("dtype", None),
        ("sequence_parallel_enabled", False),
    ],
    lp.RMSNorm: [("hidden_size", REQUIRED), ("eps", 1e-6), ("sequence_parallel_enabled", False)],
}
OURS_BEHIND_THEM: dict[type, list[str]] = {
    lp.RowParallelLinear: ["pad_alignment_size_per_rank"],
    lp.OutputChannelParallelConv2d: ["tensor_model_parallel_group", "reduce_dtype"],
    lp.InputChannelParallelConv2d: ["tensor_model_parallel_group", "reduce_dtype"],
    lp.ParallelEmbedding: ["sequence_dimension", "collect_output", "pad_alignment_size_per_rank"],
    lp.LayerNorm: ["tensor_model_parallel_group", "bias"],
    lp.RMSNorm: ["device", "dtype", "tensor_model_parallel_group"],
}


@pytest.mark.parametrize("layer", PUBLISHED, ids=lambda layer: layer.__name__)
def test_parameters(layer: type) -> None:
    found = list(inspect.signature(layer).parameters.values())
    published = PUBLISHED[layer]
    assert [(one.name, one.default) for one in found[: len(published)]] == published
    assert all(one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for one in found)
    behind = found[len(published) :]
    assert [one.name for one in behind] == OURS_BEHIND_THEM.get(layer, [])
    assert all(one.default is not REQUIRED for one in behind)
