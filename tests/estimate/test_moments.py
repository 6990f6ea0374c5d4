"""The moments of a step, each against what PyTorch takes there: the loss, backward, the update."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import lowtide
from lowtide.estimate import Config, EstimateError, configure, estimate
from lowtide.estimate.devices import device
from lowtide.estimate.edges import loss_bytes
from lowtide.estimate.lines import Moment
from lowtide.estimate.losses import LOSSES

P = 8_030_261_248
"""Parameters of llama3-8b."""
ROWS, VOCAB = 64, 4096


def llama(**changes: Any) -> Config:
    usual: dict[str, Any] = dict(dtype="bf16-true", recompute="full", loss="fused-linear")
    return configure("llama3-8b", **(usual | changes))


def alone(config: Config) -> dict[Moment, int]:
    """The moments of a step of one micro-batch."""
    return estimate(config).stages[0].moments


@pytest.mark.parametrize(
    ("settings", "a_parameter"),
    [
        (dict(dtype="bf16-true"), 10),
        (dict(dtype="bf16-true", update="fused"), 8),
        (dict(dtype="bf16-true", update="for-loop"), 8),
        (dict(dtype="fp32"), 20),
        (dict(dtype="autocast"), 20),
        (dict(dtype="autocast", update="fused"), 16),
        (dict(dtype="autocast", optimizer="momentum"), 12),
        (dict(dtype="mixed", zero=3, dp=8), Fraction(20, 8)),
        (dict(dtype="bf16"), 18),  # Megatron's, with a master copy: fused
        (dict(dtype="bf16", update="foreach"), 22),
        (dict(dtype="bf16-true", optimizer="adamw-8bit"), Fraction(4) + 2 + Fraction(8, 256)),
        (dict(dtype="bf16-true", optimizer_in_backward=True), 6),
    ],
)
def test_bytes_a_parameter_in_the_update(settings: dict[str, Any], a_parameter: Fraction) -> None:
    found = alone(llama(**settings))["update"]
    assert abs(found - a_parameter * P) < 8


@pytest.mark.parametrize(("foreach", "copies"), [(True, 1), (False, 0)])
def test_foreach_adamw_makes_one_more_copy_of_a_state(foreach: bool, copies: int) -> None:
    """Of all parameters together where foreach, else of one parameter of the eight."""
    parameters = [torch.nn.Parameter(torch.zeros(1 << 12)) for _ in range(8)]
    optimizer = torch.optim.AdamW(parameters, foreach=foreach)
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        taken = lowtide.measure(optimizer.step).peak_bytes
    size = 4 * 8 * (1 << 12)
    assert copies * size <= taken < copies * size + size / 2


def test_one_micro_batch_has_no_gradients_at_the_loss() -> None:
    one, two = (alone(llama(global_batch=count)) for count in (1, 2))
    assert two["loss"] - one["loss"] == 2 * P
    buffer = [alone(llama(dtype="bf16", global_batch=count)) for count in (1, 2)]
    assert buffer[0] == buffer[1]  # Megatron's float32 gradients have a buffer of their own


TABLE, LAYER = 128256 * 4096, 218_112_000
"""Parameters of the output layer and of one layer."""
INPUT = 2 * 8192 * 4096
"""Bytes of a layer's input, which is what a recomputed layer keeps of a sequence."""


def test_backward_is_fullest_as_it_begins_or_as_it_ends() -> None:
    """Of one sequence gradients weigh more than what is kept, of sixteen less."""
    one, many = (alone(llama(micro_batch=count)) for count in (1, 16))
    working = one["backward"] - 8 * P - INPUT
    assert working > 0
    assert many["backward"] == 6 * P + 2 * (TABLE + LAYER) + 16 * (32 * INPUT + working)


def test_optimizer_in_backward_holds_one_gradient() -> None:
    """The output layer's, as backward begins."""
    usual, within = (alone(llama(micro_batch=16, optimizer_in_backward=way)) for way in (False, True))
    assert usual["backward"] - within["backward"] == 2 * LAYER
    assert within["loss"] == usual["loss"]
    with pytest.raises(EstimateError, match="nothing can be summed"):
        llama(optimizer_in_backward=True, global_batch=2)
    with pytest.raises(EstimateError, match="a float32 buffer"):
        llama(optimizer_in_backward=True, dtype="bf16")


def test_paged_states_stand_in_the_update_only() -> None:
    usual, paged = (alone(llama(optimizer=name)) for name in ("adamw-8bit", "paged-adamw-8bit"))
    assert usual["update"] == paged["update"]
    state = pytest.approx(2 * P * (1 + 4 / 256), abs=2)
    assert usual["loss"] - paged["loss"] == state
    assert estimate(llama(optimizer="paged-adamw-8bit")).host_bytes == state
    assert estimate(llama(optimizer="adamw-8bit")).host_bytes == 0


def _measured(step: Callable[[torch.Tensor, torch.Tensor], list[Any]]) -> float:
    """Bytes a logit above hidden states, weight and their gradients, at most in a loss and its backward up to
    the logits' gradient.
    """
    logits = torch.randn(ROWS, VOCAB).bfloat16().requires_grad_()
    targets = torch.zeros(ROWS, dtype=torch.int64)
    return lowtide.measure(lambda: step(logits, targets)).peak_bytes / (ROWS * VOCAB)


def _torch(logits: torch.Tensor, targets: torch.Tensor) -> list[Any]:
    held = logits * 1  # the output layer's
    F.cross_entropy(held.float(), targets).backward()
    return [held]


def _uncast(logits: torch.Tensor, targets: torch.Tensor) -> list[Any]:
    held = logits * 1
    F.cross_entropy(held, targets).backward()
    return [held]


def _upcast(logits: torch.Tensor, targets: torch.Tensor) -> list[Any]:
    held = logits * 1
    single = held.float()
    F.cross_entropy(single, targets).backward()
    return [held, single]


def _transformers(logits: torch.Tensor, targets: torch.Tensor) -> list[Any]:
    F.cross_entropy((logits * 1).float(), targets).backward()
    return []


@pytest.mark.parametrize(
    ("kind", "step"),
    [("torch", _torch), ("torch-uncast", _uncast), ("upcast", _upcast), ("transformers", _transformers)],
)
def test_bytes_a_logit_are_pytorch_s(kind: str, step: Callable[..., list[Any]]) -> None:
    kept, above = loss_bytes(llama(loss=kind))
    assert _measured(step) == pytest.approx(kept + above, rel=0.02)


@pytest.mark.parametrize("kind", LOSSES)
def test_the_loss_is_named_with_its_bytes(kind: str) -> None:
    config = llama(loss=kind)
    told = estimate(config).loss
    usual = {"torch": 14, "torch-uncast": 8, "upcast": 18, "float32": 16, "transformers": 12, "in-place": 6,
             "in-place-copy": 8, "in-place-fused": 10, "compiled": 4, "chunked": 12, "chunked-forward": 6,
             "chunked-vocabulary": 6, "vocabulary-eager": 18, "fused-linear": 2}  # fmt: skip
    assert (told["kind"], told["bytes_a_logit"]) == (kind, usual[kind])
    stage = estimate(config).stages[0]
    made = next(line for line in stage.lines if line.name == "gradients of the loss")
    usual_pieces = dict.fromkeys(("chunked", "chunked-forward", "chunked-vocabulary", "vocabulary-eager"), 8)
    pieces = (usual_pieces | {"fused-linear": 32}).get(kind, 1)  # ceil(128256 / 4096)
    assert told["pieces"] == pieces and kind in made.note
    assert made.bytes == sum(loss_bytes(config)[1:]) * -(-8192 * 128256 // pieces)
    assert made.moments == {"loss": made.bytes, "backward": 0, "update": 0}


def test_mixed_weights_are_cast_where_they_are_gathered() -> None:
    mixed, half = (estimate(llama(dtype=name, zero=3, dp=8)).stages[0] for name in ("mixed", "bf16"))
    assert mixed.weights_bytes == 2 * half.weights_bytes
    assert mixed.layer_activations_bytes == half.layer_activations_bytes
    gathered = [next(x.bytes for x in s.lines if x.name == "gathered weights") for s in (mixed, half)]
    assert gathered[0] == gathered[1]
    with pytest.raises(EstimateError, match="--dtype=mixed with --zero=0"):
        llama(dtype="mixed")


def test_offloaded_inputs_of_two_layers_stay_in_backward() -> None:
    within = llama(offload_activations=True)
    layers = [line for line in estimate(within).stages[0].lines if line.place == "layers"]
    assert sum(line.moments["backward"] for line in layers) == 2 * INPUT


@pytest.mark.parametrize(("name", "mebibytes"), [("h100", 64), ("h200", 64), ("a100", 16.25)])
def test_cublas_keeps_two_workspaces(name: str, mebibytes: float) -> None:
    """32 MiB on Hopper and 8.125 on others, for forward's thread and for backward's."""
    config = llama()
    here, anywhere = estimate(config, device(name)).stages[0], estimate(config).stages[0]
    for moment, size in here.moments.items():
        assert size - anywhere.moments[moment] == mebibytes * 2**20


def test_an_embedding_that_is_a_unit_is_freed_after_its_lookup() -> None:
    """Of the root's unit the output layer is left, in forward and backward."""
    whole, apart = (
        next(line for line in estimate(llama(dp=8, zero=3, embedding_unit=way)).stages[0].lines
             if line.name == "gathered weights")
        for way in (False, True)
    )  # fmt: skip
    assert whole.bytes - apart.bytes == 2 * TABLE
    with pytest.raises(EstimateError, match="--embedding-unit with --zero=3: for --zero 3 and an output"):
        configure("llama3-1b", dp=8, zero=3, embedding_unit=True)


def test_fsdp_holds_gradients_before_they_are_split() -> None:
    """In backward, a layer's and the output layer's, as whole as what is gathered; adapters' are small."""
    stage = estimate(llama(dp=8, zero=3)).stages[0]
    (line,) = (line for line in stage.lines if line.name == "gradients that are not split yet")
    assert line.moments == {"loss": 0, "backward": 2 * (TABLE + LAYER), "update": 0}
    names = [line.name for line in estimate(llama(dp=8, zero=3, lora=8)).stages[0].lines]
    assert "gathered weights" in names and line.name not in names


def test_reserved_counts_a_layer_s_blocks_beside_logits() -> None:
    """Two models on an H100, recomputed block by block (6 layers, 32,768 tokens): 10,422 and 11,008 MiB were
    reserved for 7,883 and 7,837 allocated.
    """
    usual: dict[str, Any] = dict(
        layers=6, hidden=2048, heads=16, vocab=16384, seq=2048, micro_batch=16, dtype="bf16-true",
        attention="fused", dropout=0.0, recompute="full", loss="transformers", optimizer="sgd",
        reentrant=False,
    )  # fmt: skip
    llama: dict[str, Any] = dict(mlp="swiglu", norm="rmsnorm", positions="rotary", bias=False, ffn=5632,
                                 kv_heads=8, tied=False, unfused_mlp=True)  # fmt: skip
    for more, allocated, held in (({"ffn": 8192}, 7883, 10422), (llama, 7837, 11008)):
        found = estimate(configure(**usual, **more))
        assert found.total_bytes / 2**20 == pytest.approx(allocated, rel=0.01)
        assert found.reserved_bytes / 2**20 == pytest.approx(held, rel=0.035)
        assert found.reserved_expandable_bytes < 0.85 * found.reserved_bytes
        room = (found.total_bytes + found.reserved_bytes) // 2  # where it is full, the cache is given back
        assert estimate(configure(**usual, **more, memory_bytes=room)).reserved_bytes == room


def test_reserved_counts_gradients_that_the_allocator_caches() -> None:
    found = estimate(configure("llama3-8b", loss="torch", dtype="bf16-true", update="fused"))
    stage = found.stages[0]
    assert stage.peak_at == "loss"
    assert stage.cached_bytes - stage.total_bytes == 2 * P
    assert found.reserved_bytes > stage.cached_bytes


def test_distributed_data_parallel_has_buckets_beside_gradients(one_rank: Callable[[], None]) -> None:
    """As many bytes as all gradients; none where these are views of them."""
    plain, buckets = (alone(llama(dp=8, loss="torch", ddp_buckets=how)) for how in (False, True))
    assert {name: buckets[name] - plain[name] for name in plain} == dict.fromkeys(plain, 2 * P)
    with pytest.raises(EstimateError, match="--ddp-buckets with --zero=3"):
        llama(dp=8, zero=3, ddp_buckets=True)
    one_rank()
    for view, copies in ((False, 2), (True, 1)):
        model = torch.nn.Sequential(*(torch.nn.Linear(256, 256, bias=False) for _ in range(8)))
        given: list[Any] = [torch.randn(1, 256)]
        taken = lowtide.measure(_wrapped_step(model, view, given)).end_bytes
        assert taken == pytest.approx(copies * 8 * 256 * 256 * 4, rel=0.01)


def _wrapped_step(model: torch.nn.Module, view: bool, held: list[Any]) -> Callable[[], None]:
    def step() -> None:
        held.append(torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=view))
        held[1](held[0]).sum().backward()

    return step
