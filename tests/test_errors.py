"""What is given wrongly is refused at once: what was given, what is allowed, in the words of this library."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lowtide
from lowtide import estimate, meter, models, optim, parallel, policies
from lowtide.errors import BudgetError, LowtideError
from lowtide.estimate.devices import device
from lowtide.estimate.suggest import suggest
from lowtide.models.gpt import GPT
from lowtide.models.llama import Llama
from lowtide.report import make_report, save_report

X = torch.randn(2, 4)
MODEL = torch.nn.Linear(4, 1)
TARGET = torch.tensor([0, 1])
GRAPH = lowtide.trace(lambda: MODEL(X).sum())
GIVEN: Any = "nonsense"


def ones(*_: Any) -> torch.Tensor:
    return torch.ones(3)


def prepared() -> Any:
    return lowtide.limit_memory(MODEL, "60%").prepare_all(GIVEN)


WRONG: dict[str, Callable[[], Any]] = {
    "measure(step=)": lambda: lowtide.measure(GIVEN),
    "measure(repeats=)": lambda: lowtide.measure(ones, repeats=GIVEN),
    "measure(warmup=)": lambda: lowtide.measure(ones, warmup=GIVEN),
    "measure(device=)": lambda: lowtide.measure(ones, device=GIVEN),
    "peak(device=)": lambda: meter.peak(GIVEN),
    "resident_bytes(model=)": lambda: meter.resident_bytes(GIVEN),
    "resident_bytes(optimizer=)": lambda: meter.resident_bytes(MODEL, GIVEN),
    "resident_bytes(device=)": lambda: meter.resident_bytes(MODEL, device=GIVEN),
    "checkpoint": lambda: lowtide.checkpoint(GIVEN, X),
    "trace(model=)": lambda: lowtide.trace(ones, model=GIVEN),
    "apply(stores=)": lambda: lowtide.apply(
        lowtide.plan(lowtide.trace(lambda: MODEL(X).sum()), policy="keep_all"), stores=GIVEN
    ),
    "prepare_all": prepared,
    "layout(capacity=)": lambda: lowtide.layout([0], [1], [4], capacity=GIVEN),
    "layout(align=)": lambda: lowtide.layout([0], [1], [4], align=GIVEN),
    "layout(seconds=)": lambda: lowtide.layout([0], [1], [4], seconds=GIVEN),
    "measure_links(stores=)": lambda: lowtide.measure_links("int8", stores=GIVEN),
    "measure_links(device=)": lambda: lowtide.measure_links("int8", device=GIVEN),
    "Compress(codec=)": lambda: lowtide.Compress(3),  # type: ignore[arg-type]
    "Shard(size=)": lambda: lowtide.Shard("group", GIVEN),
    "Chain(first=)": lambda: lowtide.Chain(GIVEN, lowtide.Offload()),
    "Chain(then=)": lambda: lowtide.Chain(lowtide.Compress("int8"), GIVEN),
    "Stores(codecs=)": lambda: lowtide.Stores(codecs=GIVEN),
    "offload(min_bytes=)": lambda: policies.offload(min_bytes=GIVEN),
    "offload(keep_last=)": lambda: policies.offload(keep_last=GIVEN),
    "auto(links=)": lambda: policies.auto(links=GIVEN),
    "auto(host_budget=)": lambda: policies.auto(host_budget=GIVEN),
    "mixed(window_bytes=)": lambda: policies.mixed(window_bytes=GIVEN),
    "mixed(links=)": lambda: policies.mixed(links=GIVEN),
    "compress(codec=)": lambda: policies.compress(None),  # type: ignore[arg-type]
    "compress(then=)": lambda: policies.compress(then=GIVEN),
    "sqrt(segments=)": lambda: policies.sqrt(GIVEN),
    "scope(modules=)": lambda: policies.scope(GIVEN),
    "compile(options=)": lambda: lowtide.compile(MODEL, "60%", options=GIVEN),
    "compile(options=), a setting": lambda: lowtide.compile(MODEL, "60%", options={GIVEN: 1}),
    "compile(tiers=)": lambda: lowtide.compile(MODEL, "60%", tiers=3),  # type: ignore[arg-type]
    "compile(codecs=)": lambda: lowtide.compile(MODEL, "60%", codecs=3),  # type: ignore[arg-type]
    "HostOptimizer(params=)": lambda: optim.HostOptimizer(torch.optim.AdamW, GIVEN),
    "HostOptimizer(link=)": lambda: optim.HostOptimizer(torch.optim.AdamW, MODEL.parameters(), link=GIVEN),
    "HostOptimizer(delay_after=)": lambda: optim.HostOptimizer(
        torch.optim.AdamW, MODEL.parameters(), delay_after=GIVEN
    ),
    "HostOptimizer(chunk_bytes=)": lambda: optim.HostOptimizer(
        torch.optim.AdamW, MODEL.parameters(), chunk_bytes=GIVEN
    ),
    "parallelize": lambda: parallel.parallelize(GIVEN),
    "whole_state_dict": lambda: parallel.whole_state_dict(GIVEN),
    "get_grad_norm(parameters=)": lambda: parallel.get_grad_norm(GIVEN),
    "get_grad_norm(norm_type=)": lambda: parallel.get_grad_norm(MODEL.parameters(), GIVEN),
    "get_grad_norm(counted_elsewhere=)": lambda: parallel.get_grad_norm(
        MODEL.parameters(), counted_elsewhere=GIVEN
    ),
    "clip_grad_norm(parameters=)": lambda: parallel.clip_grad_norm(GIVEN, 1.0),
    "clip_grad_norm(max_norm=)": lambda: parallel.clip_grad_norm(MODEL.parameters(), GIVEN),
    "partial_gradients": lambda: parallel.partial_gradients(GIVEN),
    "mark_partial_gradient": lambda: parallel.mark_partial_gradient(GIVEN),
    "allreduce_sequence_parallel_gradients(buffer_bytes=)": lambda: (
        parallel.allreduce_sequence_parallel_gradients(MODEL, buffer_bytes=GIVEN)
    ),
    "column_parallel(input=)": lambda: parallel.column_parallel(
        GIVEN, (parallel.ColumnParallelLinear(4, 4),)
    ),
    "column_parallel(layers=)": lambda: parallel.column_parallel(X, GIVEN),
    "ColumnParallelLinear(input_size=)": lambda: parallel.ColumnParallelLinear(GIVEN, 4),
    "ColumnParallelLinear(output_size=)": lambda: parallel.ColumnParallelLinear(4, GIVEN),
    "ColumnParallelLinear(dtype=)": lambda: parallel.ColumnParallelLinear(4, 4, dtype=GIVEN),
    "ColumnParallelLinear(device=)": lambda: parallel.ColumnParallelLinear(4, 4, device=GIVEN),
    "ColumnParallelLinear(stride=)": lambda: parallel.ColumnParallelLinear(4, 4, stride=GIVEN),
    "ColumnParallelLinear(init_method=)": lambda: parallel.ColumnParallelLinear(4, 4, init_method=GIVEN),
    "ColumnParallelLinear(reduce_dtype=)": lambda: parallel.ColumnParallelLinear(4, 4, reduce_dtype=GIVEN),
    "RowParallelLinear": lambda: parallel.RowParallelLinear(4, 4)(GIVEN),
    "SharedHeadsLinear(heads=)": lambda: parallel.SharedHeadsLinear(4, GIVEN, 4),
    "ParallelEmbedding(num_embeddings=)": lambda: parallel.ParallelEmbedding(GIVEN, 4),
    "ParallelEmbedding(padding_idx=)": lambda: parallel.ParallelEmbedding(4, 4, padding_idx=GIVEN),
    "ParallelEmbedding(max_norm=)": lambda: parallel.ParallelEmbedding(4, 4, max_norm=GIVEN),
    "ParallelEmbedding": lambda: parallel.ParallelEmbedding(4, 4)(GIVEN),
    "LayerNorm(normalized_shape=)": lambda: parallel.LayerNorm(GIVEN),
    "LayerNorm(eps=)": lambda: parallel.LayerNorm(4, eps=GIVEN),
    "RMSNorm": lambda: parallel.RMSNorm(4)(GIVEN),
    "ParallelDropout(probability=)": lambda: parallel.ParallelDropout(GIVEN),
    "RandomTracker(device=)": lambda: parallel.RandomTracker(device=GIVEN),
    "parallel_cross_entropy(target=)": lambda: parallel.parallel_cross_entropy(X, GIVEN),
    "parallel_cross_entropy(label_smoothing=)": lambda: parallel.parallel_cross_entropy(X, TARGET, GIVEN),
    "parallel_cross_entropy(ignore_index=)": lambda: parallel.parallel_cross_entropy(
        X, TARGET, ignore_index=GIVEN
    ),
    "parallel_cross_entropy(vocabulary=)": lambda: parallel.parallel_cross_entropy(
        X, TARGET, vocabulary=GIVEN
    ),
    "parallel_linear_cross_entropy(weight=)": lambda: parallel.parallel_linear_cross_entropy(
        X, GIVEN, TARGET
    ),
    "parallel_linear_cross_entropy(chunks=)": lambda: parallel.parallel_linear_cross_entropy(
        X, torch.ones(3, 4), TARGET, chunks=GIVEN
    ),
    "gather_from_sequence_parallel_region": lambda: parallel.gather_from_sequence_parallel_region(GIVEN),
    "parallelize(plan=)": lambda: parallel.parallelize(MODEL, plan=GIVEN),
    "save_checkpoint(path=)": lambda: parallel.save_checkpoint(3, MODEL),  # type: ignore[arg-type]
    "save_checkpoint(optimizer=)": lambda: parallel.save_checkpoint("folder", MODEL, GIVEN),
    "load_whole_state_dict": lambda: parallel.load_whole_state_dict(MODEL, GIVEN),
    "storages": lambda: meter.storages(GIVEN),
    "resident_tensors": lambda: meter.resident_tensors(GIVEN),
    "measurable": lambda: meter.measurable(GIVEN),
    "mark_partial_gradients": lambda: parallel.mark_partial_gradients(GIVEN),
    "allreduce_sequence_parallel_gradients": lambda: parallel.allreduce_sequence_parallel_gradients(GIVEN),
    "make_plan(stored=)": lambda: policies.make_plan(GRAPH, stored=GIVEN),
    "make_plan(moves=)": lambda: policies.make_plan(GRAPH, stored=(), moves=GIVEN),
    "make_plan(budget=)": lambda: policies.make_plan(GRAPH, stored=(), budget=GIVEN),
    "mixed(codecs=)": lambda: policies.mixed(codecs=GIVEN),
    "make_report(graph=)": lambda: make_report(GIVEN, GIVEN),
    "save_report(report=)": lambda: save_report(GIVEN, "page.html"),
    "check_path": lambda: save_report(make_report(GRAPH, lowtide.plan(GRAPH, policy="keep_all")), 3),  # type: ignore
    "suggest(device=)": lambda: suggest("llama3-8b", devices=4, device=GIVEN),
    "suggest(memory_bytes=)": lambda: suggest("gpt2", devices=4, device=device("a100"), memory_bytes=GIVEN),
    "device": lambda: device(3),  # type: ignore[arg-type]
    "models.preset": lambda: models.preset(3),  # type: ignore[arg-type]
    "GPT": lambda: GPT(GIVEN),
    "Llama": lambda: Llama(GIVEN),
    "estimate": lambda: estimate.estimate(GIVEN),
    "iteration_flops": lambda: estimate.iteration_flops(GIVEN),
    "model_states": lambda: estimate.model_states(GIVEN),
    "utilization": lambda: estimate.utilization(1, GIVEN, 1, 1.0),
    "from_hugging_face": lambda: estimate.from_hugging_face(GIVEN),
    "read_config": lambda: estimate.read_config(3),  # type: ignore[arg-type]
    "configure": lambda: estimate.configure(3),  # type: ignore[arg-type]
    "preset": lambda: estimate.preset(3),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_refused_with_what_is_allowed(name: str) -> None:
    with pytest.raises(LowtideError, match=r"was given .*: give ") as refused:
        WRONG[name]()
    assert "nonsense" in str(refused.value) or " 3:" in str(refused.value) or "None:" in str(refused.value)


SHAPES: dict[str, Callable[[], Any]] = {
    "column_parallel": lambda: parallel.ColumnParallelLinear(5, 4)(X),
    "RowParallelLinear": lambda: parallel.RowParallelLinear(5, 4)(X),
    "RMSNorm": lambda: parallel.RMSNorm(5)(X),
    "parallel_linear_cross_entropy": lambda: parallel.parallel_linear_cross_entropy(
        X, torch.ones(3, 5), TARGET
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_that_does_not_fit_is_refused_with_one_that_does(name: str) -> None:
    with pytest.raises(LowtideError, match=r"was given .*\(2, 4\).*: give "):
        SHAPES[name]()


@pytest.mark.parametrize("number", [-1.0, float("nan")])
def test_gradients_are_not_clipped_to_less_than_nothing(number: float) -> None:
    with pytest.raises(LowtideError, match=r"max_norm=\) was given (-1\.0|nan): give a number, 0 or more"):
        parallel.clip_grad_norm(MODEL.parameters(), number)


def test_a_checkpoint_that_is_not_there_or_of_another_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LowtideError, match="give a folder that save_checkpoint wrote"):
        parallel.load_checkpoint(tmp_path / "nothing", MODEL)
    parallel.save_checkpoint(tmp_path, MODEL)
    with pytest.raises(LowtideError, match="and the model and optimizer that it was given"):
        parallel.load_checkpoint(tmp_path, torch.nn.Linear(2, 1))


GIB = 1 << 30
PARTS = {
    "parameters": 6 * GIB,
    "gradients": 6 * GIB,
    "optimizer state": 12 * GIB,
    "least activations": 2 * GIB,
}


def test_a_refusal_says_what_it_takes_then_what_to_do_then_the_detail() -> None:
    error = BudgetError(
        None,
        26 * GIB + 1,
        "Its peak is at the loss.",
        budget_bytes=25 * GIB,
        parts=PARTS,
        plain_peak_bytes=52 * GIB,
    )
    assert str(error).splitlines() == [
        "the budget of 25 GiB is too small: parameters 6, gradients 6, optimizer state 12, least activations "
        "2, others 0.01 take 26.01 GiB",
        "What to do, any one of these:",
        "  - give a budget of 26.01GiB or more (27917287425 bytes, 50.1% of the plain step's peak), the "
        "smallest that works",
        "  - make the batch or the sequences at least 51 % smaller, and give the budget as 25GiB (a "
        "percentage would be of the smaller step)",
        "  - keep 9% or more of the optimizer's state on the host: lowtide.optim.HostOptimizer(..., "
        "host_fraction=0.09)",
        "Its peak is at the loss.",
    ]
    assert (error.budget_bytes, error.smallest_bytes, error.parts) == (25 * GIB, 26 * GIB + 1, PARTS)
    error.add_first_remedy("turn it off")
    twin = pickle.loads(pickle.dumps(error))
    assert str(twin) == str(error) and twin.parts == error.parts, "ranks tell each other"
    assert twin.remedies[0] == "turn it off" and len(twin.remedies) == 4


def test_a_refusal_shows_one_number_for_the_budget() -> None:
    """It said 5.58 MiB at first, and 5.59MiB where a smaller batch is proposed."""
    text = str(BudgetError(None, 8_689_291, budget_bytes=5_860_000, parts={"least activations": 8 << 20}))
    assert "the budget of 5.58 MiB is" in text and "give the budget as 5.58MiB" in text


def test_a_refusal_without_a_message_has_words_wherever_it_is_shown() -> None:
    error = BudgetError(None, 2 * GIB, budget_bytes=GIB)
    short = "the budget of 1 GiB is too small: at least 2 GiB are needed"
    for one in (error, pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert one.args[0].startswith(f"{short}. ") and repr(one) == f"BudgetError({short!r})"
        assert str(one).startswith(f"{short}\nWhat to do") and one.message is None


def test_a_text_follows_the_facts_and_a_message_stays() -> None:
    error = BudgetError(None, 2 * GIB, budget_bytes=GIB, policy="full")
    assert "for the policy 'full'" in str(error) and "use the policy 'optimal'" in str(error)
    error.add("It was the last one.")
    error = error.stating(smallest_bytes=3 * GIB)
    assert "at least 3 GiB are needed" in str(error) and "3GiB" in error.remedies[0]
    assert error.policy == "full" and str(error).endswith("It was the last one.")
    given = BudgetError("no layout", 2 * GIB, budget_bytes=GIB)
    assert str(given) == "no layout" and not given.remedies


def test_a_refused_step_is_out_of_memory_and_a_malformed_budget_is_not() -> None:
    refusal = BudgetError(None, 3 << 30, budget_bytes=1 << 30)
    for error in (refusal, pickle.loads(pickle.dumps(refusal)), refusal.stating(budget_bytes=1 << 20)):
        assert isinstance(error, torch.OutOfMemoryError) and type(error).__name__ == "BudgetError"
        assert error.args[0].endswith("out of memory.") and "out of memory" not in str(error)
    assert not isinstance(BudgetError("the budget 'x' is not understood"), torch.OutOfMemoryError)


def test_accelerates_search_takes_a_smaller_batch_where_the_budget_is_too_small() -> None:
    accelerate = pytest.importorskip("accelerate")

    @accelerate.utils.find_executable_batch_size(starting_batch_size=64)
    def train(batch: int) -> int:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 64))
        lowtide.limit_memory(model, 400_000)
        model(torch.randn(batch, 64)).square().mean().backward()
        return batch

    assert 8 <= train() < 64
