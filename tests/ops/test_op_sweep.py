"""PyTorch's operator database under a recorder that gives everything up: a part of it here, all of it in
`python -m benchmarks op_sweep`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import op_check, op_sweep
from lowtide.run.record.directors import ScopeDirector
from lowtide.run.record.recorder import Recorder
from lowtide.run.record.tape import Tape

pytest.importorskip("expecttest")  # PyTorch's operator database imports it

ROOT = Path(__file__).parents[2]
SAMPLES = {"float": 2}  # of each operation; elsewhere one
PART = (
    "abs", "acos", "add", "addbmm", "addcmul", "addmm", "addmv", "all", "amax", "angle", "as_strided",
    "asin", "atan2", "baddbmm", "bernoulli",
    "bmm", "broadcast_to", "cat", "cdist", "cholesky_solve", "chunk", "clamp", "clone", "complex", "conj",
    "conj_physical", "contiguous", "copysign",
    "cos", "cross", "cumprod", "cumsum", "diag_embed", "diagonal", "div", "dot", "dsplit", "einsum", "erf",
    "erfinv", "exp", "expand", "expm1",
    "fft.fft", "fft.ihfft", "fft.irfftn", "fill", "flip", "float_power", "fmax", "frexp", "gather", "hypot",
    "imag", "index_add", "index_copy",
    "index_fill", "index_put", "index_select", "kron", "kthvalue", "lerp", "lgamma", "linalg.cholesky",
    "linalg.det", "linalg.eigh", "linalg.inv",
    "linalg.lu_factor", "linalg.matrix_exp", "linalg.norm", "linalg.pinv", "linalg.qr", "linalg.solve",
    "linalg.svd", "log", "log_softmax",
    "logaddexp", "logcumsumexp", "logsumexp", "masked_fill", "masked_scatter", "masked_select", "masked.var",
    "matmul", "max", "max_pool2d_with_indices_backward",
    "mean", "median", "min", "mm", "mul", "multinomial", "mv", "nanmean", "native_batch_norm",
    "native_layer_norm", "nn.functional.adaptive_avg_pool2d",
    "nn.functional.alpha_dropout", "nn.functional.batch_norm", "nn.functional.bilinear",
    "nn.functional.binary_cross_entropy", "nn.functional.celu",
    "nn.functional.conv2d", "nn.functional.conv_transpose2d", "nn.functional.cosine_similarity",
    "nn.functional.cross_entropy",
    "nn.functional.ctc_loss", "nn.functional.dropout", "nn.functional.dropout2d", "nn.functional.elu",
    "nn.functional.embedding",
    "nn.functional.embedding_bag", "nn.functional.fractional_max_pool2d", "nn.functional.gelu",
    "nn.functional.glu", "nn.functional.grid_sample",
    "nn.functional.group_norm", "nn.functional.huber_loss", "nn.functional.instance_norm",
    "nn.functional.interpolate", "nn.functional.layer_norm",
    "nn.functional.leaky_relu", "nn.functional.linear", "nn.functional.max_pool2d",
    "nn.functional.max_unpool2d", "nn.functional.mish",
    "nn.functional.mse_loss", "nn.functional.multi_head_attention_forward", "nn.functional.nll_loss",
    "nn.functional.normalize", "nn.functional.pad",
    "nn.functional.pdist", "nn.functional.pixel_shuffle", "nn.functional.prelu", "nn.functional.relu",
    "nn.functional.rms_norm", "nn.functional.rrelu",
    "nn.functional.scaled_dot_product_attention", "nn.functional.selu", "nn.functional.silu",
    "nn.functional.smooth_l1_loss", "nn.functional.softplus",
    "nn.functional.unfold", "norm", "normal", "ormqr", "outer", "permute", "pinverse", "polar", "pow",
    "prod", "put", "rand_like", "real", "reciprocal",
    "repeat_interleave", "resolve_conj", "rot90", "rsqrt", "scatter", "scatter_add", "scatter_reduce",
    "select_scatter", "sgn", "sigmoid", "sinc",
    "slice_scatter", "softmax", "sort", "sparse.sampled_addmm", "split", "sqrt", "square", "squeeze",
    "stack", "std", "stft", "sub", "sum", "svd",
    "t", "take", "take_along_dim", "tanh", "tensordot", "to", "to_sparse", "topk", "trace", "transpose",
    "trapezoid", "tril", "unbind", "unfold",
    "uniform", "var", "vdot", "view", "view_as_complex", "where", "xlogy", "zero_",
)  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def check(outcomes: list[Any]) -> None:
    wrong = {f"{o.name} ({o.variant})": o.notes for o in outcomes if o.wrong}
    assert not wrong
    total = op_sweep.total(outcomes)
    assert total["dropped_percent"] >= 95
    # what stayed is named, or could not be reached: sparse tensors, noise that its operation fills, index
    # tensors that Python's square brackets make below the dispatcher, and what rests on lengths given to
    # ctc_loss as a list, which C++ makes a tensor of unseen
    for outcome in outcomes:
        if outcome.dropped_bytes < outcome.droppable_bytes:
            unreached = ("sparse", "rrelu", "__getitem__", "ctc_loss")
            assert outcome.kept or any(word in outcome.name for word in unreached), outcome


SELDOM = ("strided", "conjugate", "negative")
"""Variants of the same kernels behind the same seams as the others: in the slow tests."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "variant", [pytest.param(v, marks=pytest.mark.slow) if v in SELDOM else v for v in op_check.VARIANTS]
)
def test_a_part_of_the_database(variant: Any) -> None:
    names = set(PART[::5])
    ops = [op for op in op_check.operations() if op.name in names]
    assert len({op.name for op in ops}) > 30
    outcomes = [
        o
        for o in (op_check.check_operation(op, variant, SAMPLES.get(variant, 1)) for op in ops)
        if o is not None
    ]
    assert len(outcomes) > 8
    check(outcomes)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_whole_database() -> None:
    check(op_sweep.sweep(quiet=True))


def test_the_committed_report_says_so() -> None:
    data = json.loads((ROOT / "benchmarks" / "results" / "op_sweep.json").read_text())
    assert data["variants"]["float"]["operations"] > 500
    for row in data["operations"]:
        assert not row["samples"].get("different") and not row["samples"].get("error"), row["name"]
    assert data["all"]["dropped_percent"] >= 95
    assert (ROOT / "benchmarks" / "results" / "op_sweep.md").read_text() == op_sweep.markdown(data)


# What the sweep and the families found, each as small as it gets.


def gradients(
    step: Callable[[torch.Tensor], torch.Tensor], leaf: torch.Tensor, recorder: Recorder | None
) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    x = leaf.detach().clone().requires_grad_()
    if recorder is None:
        out = step(x)
    else:
        with recorder.recording():
            out = step(x)
    weights = torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype).view(out.shape)
    loss = (out * weights).sum()
    (gradient,) = torch.autograd.grad(loss.abs() if loss.is_complex() else loss, x)
    return out.detach(), gradient


def noting(asked: list[bool]) -> Callable[[Callable[[], torch.Tensor]], torch.Tensor]:
    """Notes each time that backward asks for an evicted tensor."""
    return lambda back: (asked.append(True), back())[1]


def assert_bitwise(step: Callable[[torch.Tensor], torch.Tensor], leaf: torch.Tensor) -> None:
    plain = gradients(step, leaf, None)
    for verify in (True, False):
        asked: list[bool] = []
        recorder = Recorder(ScopeDirector(), tape=Tape(verify), around_unpack=noting(asked))
        found = gradients(step, leaf, recorder)
        assert all(map(torch.equal, plain, found))
        assert not recorder.tape.findings
        assert asked


def test_an_operation_that_conjugates_lazily_within() -> None:
    # Dispatch modes switch lazy conjugation off, which gave linalg_pinv of complex matrices wrong results.
    assert_bitwise(
        lambda x: torch.linalg.pinv(x @ x[:, :2] @ x[:2]), torch.randn(3, 3, dtype=torch.complex64)
    )


def test_conjugate_and_negative_bits() -> None:
    complex_numbers = torch.randn(4, 4, dtype=torch.complex64)
    assert_bitwise(lambda x: (x * 2).conj() @ (x * 3).mH, complex_numbers)
    assert_bitwise(lambda x: (x * 2).conj().imag.sin() * (x.conj() * x).imag.cos(), complex_numbers)
    assert_bitwise(lambda x: torch._neg_view(x * 2).sin().add_(torch._neg_view(x * 3)).cos(), torch.randn(5))


def test_a_kernel_that_looks_at_grad_mode() -> None:
    # oneDNN's LSTM makes its workspace only with gradients on, and leaves parts of it unwritten.
    layer = torch.nn.LSTM(8, 8, batch_first=True)
    assert_bitwise(lambda x: layer(x * 2)[0], torch.randn(2, 5, 8))


def test_statistics_that_the_step_itself_made() -> None:
    # instance_norm repeats its running statistics, and native_batch_norm updates the copy without saying so.
    mean, variance = torch.zeros(4), torch.ones(4)

    def step(x: torch.Tensor) -> torch.Tensor:
        mean.zero_()
        variance.fill_(1)
        return torch.nn.functional.instance_norm(x * 2, mean, variance, use_input_stats=True)

    assert_bitwise(step, torch.randn(3, 4, 6))


def test_a_result_that_does_not_fill_its_storage() -> None:
    index, offsets = torch.tensor([0, 1, 1, 0, 1, 4]), torch.tensor([0, 3, 6])
    assert_bitwise(
        lambda x: torch.nn.functional.embedding_bag(
            index.clone(), x * 1, offsets.clone(), mode="mean", include_last_offset=True
        ),
        torch.randn(5, 5),
    )


def test_functional_batch_norm_that_writes_its_statistics() -> None:
    weight, mean, variance = torch.ones(4), torch.zeros(4), torch.ones(4)

    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten._native_batch_norm_legit(
            x * 2, weight, None, mean.clone(), variance.clone(), True, 0.1, 1e-5
        )[0]

    assert_bitwise(step, torch.randn(3, 4, 6))


def test_a_gradient_of_zeros_without_memory() -> None:
    assert_bitwise(lambda x: torch.sgn(x * 2) + x.sin().cos(), torch.randn(5))
