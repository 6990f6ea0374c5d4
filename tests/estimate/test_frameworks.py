"""What frameworks do, by their own names: losses, recomputation, sharded weights, context parallel; and
commands that they can be started with.
"""

from __future__ import annotations

import shlex
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from lowtide.cli import app
from lowtide.estimate import EstimateError, configure, estimate
from lowtide.estimate import presets as ours
from lowtide.estimate.devices import device
from lowtide.estimate.flops import iteration_flops, layer_flops
from lowtide.estimate.frameworks import FRAMEWORKS, LOWTIDE_MODELS
from lowtide.estimate.layer import layer_terms
from lowtide.estimate.lines import total
from lowtide.estimate.suggest import suggest
from lowtide.estimate.traffic import stage_traffic

S, H, F, KV, V, L = 8192, 4096, 14336, 1024, 128256, 32
"""Llama-3 8B, one sequence."""


def loss_bytes(**settings: Any) -> int:
    """Bytes of one stage that stand for logits at the loss."""
    stage = estimate(configure("llama3-8b", **settings)).stages[0]
    return sum(
        line.bytes for line in stage.lines if "logits" in line.name or line.name == "gradients of the loss"
    )


@pytest.mark.parametrize(
    ("settings", "a_logit"),
    [
        (dict(loss="torch"), 14),
        (dict(loss="in-place"), 6),
        (dict(loss="compiled"), 4),
        (dict(loss="torch", dtype="fp32"), 12),
        (dict(), 14),
        (dict(loss="torch", tp=8), 18 / 8),
        (dict(tp=8), 6 / 8),
        (dict(loss="chunked", loss_chunks=4), 12 / 4),
        (dict(loss="chunked-forward", loss_chunks=4), 6 / 4),
        (dict(loss="torch-uncast"), 8),
        (dict(loss="torch-uncast", tp=8), 10 / 8),
        (dict(loss="torch", tp=8, gather_logits=True), 14),
        (dict(tp=8, gather_logits=True), 6),
    ],
)
def test_bytes_a_logit(settings: dict[str, Any], a_logit: float) -> None:
    """PyTorch's 14 in bfloat16, Megatron's 6: what is live at the loss, where that is the peak."""
    found = loss_bytes(recompute="full", **settings)
    assert found == a_logit * S * V


def test_selective_op_keeps_every_second_product() -> None:
    """torchtitan: the layer's input, q, v, attention's output and log-sum-exp, the first and last product of
    the MLP; what is run again is the other products.
    """
    config = configure("llama3-8b", recompute="selective-op")
    kept = estimate(config).stages[0].layer_activations_bytes
    assert kept == L * S * (2 * (H + H + KV + H + F + H) + 4 * 32)
    compiled = estimate(configure("llama3-8b", recompute="selective-op", compile=True)).stages[0]
    assert kept - compiled.layer_activations_bytes == L * S * 2 * H
    flops = iteration_flops(config)
    assert flops.executed - flops.model == L * 2 * S * H * (KV + H + F)


def test_selective_layer_is_half_of_full() -> None:
    whole, half, full = (
        estimate(configure("llama3-8b", recompute=kind)) for kind in ("none", "selective-layer", "full")
    )
    mean = (whole.stages[0].layer_activations_bytes + full.stages[0].layer_activations_bytes) / 2
    assert half.stages[0].layer_activations_bytes == mean
    again = half.flops.executed - half.flops.model
    assert again == L * (layer_flops(half.config, 1) - 2 * S * H * F) / 2
    by_number = estimate(configure("llama3-8b", recompute=16)).stages[0]
    assert by_number.layer_activations_bytes == mean


def test_reentrant_recomputation_runs_to_the_end() -> None:
    """`torch.utils.checkpoint` stops where backward has all that it needs: the MLP's last product is not run
    again, nor the reduction behind it; Megatron's runs to the end.
    """
    early, whole = (
        estimate(configure("llama3-8b", recompute="full", tp=2, sequence_parallel=True, reentrant=end))
        for end in (False, True)
    )
    assert whole.flops.executed - whole.flops.model == L * layer_flops(whole.config, 1)
    assert whole.flops.executed - early.flops.executed == L * 2 * S * H * F
    assert whole.network_bytes - early.network_bytes == L * 2 * S * H // 2
    assert whole.total_bytes == early.total_bytes
    reduced = [
        estimate(configure("llama3-8b", recompute="full", tp=2, reentrant=end)).network_bytes
        for end in (False, True)
    ]
    assert reduced[1] - reduced[0] == L * 2 * 2 * S * H // 2
    papers = configure("22b", as_published=True, recompute="full")
    assert papers.reentrant and papers.early_share == 0


def test_gradients_may_be_summed_in_another_precision() -> None:
    """FSDP's ``reduce_dtype``: twice the bytes of a bfloat16 reduce-scatter, the gathers as before."""
    ways: list[dict[str, Any]] = [{}, {"reduce_dtype": "fp32"}]
    plain, wide = (
        {item.name: item.bytes for item in estimate(configure("llama3-8b", dp=8, zero=3, **more)).traffic[0]}
        for more in ways
    )
    assert wide["reduce-scatters of gradients"] == 2 * plain["reduce-scatters of gradients"]
    gathers = "gathers of weights, forward and backward"
    assert wide[gathers] == plain[gathers]


def test_a_pipeline_s_sharded_weights_are_gathered_once() -> None:
    """FSDP2 under a pipeline keeps gathered weights and float32 gradients over a step's micro-batches."""
    traffic = [
        sum(
            item.bytes
            for item in estimate(
                configure("llama3-8b", dp=8, zero=3, pp=2, global_batch=8 * batches)
            ).traffic[1]
            if item.link == "data"
        )
        for batches in (2, 16)
    ]
    assert traffic[0] == traffic[1] > 0


def test_context_parallel_ranks_share_sequences_and_states() -> None:
    one = configure("llama3-8b", seq=8 * S, dp=8, zero=3)
    eight = configure("llama3-8b", seq=8 * S, cp=8, zero=3)
    assert eight.devices == 8 and eight.tokens == S and one.tokens == 8 * S
    assert total(layer_terms(eight)) == total(layer_terms(one)) / 8
    states = [
        stage.weights_bytes + stage.optimizer_bytes
        for stage in (*estimate(one).stages, *estimate(eight).stages)
    ]
    assert states[0] == states[1]
    ring = [item for item in estimate(eight).traffic[0] if item.link == "context"]
    assert [item.bytes for item in ring] == [7 * 3 * L * 2 * 2 * S * KV]
    assert "context" not in {item.link for item in estimate(one).traffic[0]}


def test_sharded_weights_are_gathered() -> None:
    """FSDP2: two layers and the root's embeddings; under a pipeline the stage's weights, and float32
    gradients.
    """
    layer = configure("llama3-8b").model.layer_parameters()
    lines = {line.name: line.bytes for line in estimate(configure("llama3-8b", dp=8, zero=3)).stages[0].lines}
    assert lines["gathered weights"] == 2 * (2 * layer + 2 * V * H)
    stage = estimate(configure("llama3-8b", dp=8, zero=3, pp=2)).stages[1]
    lines = {line.name: line.bytes for line in stage.lines}
    assert lines["gathered weights and gradients"] == 6 * stage.parameters


def test_kept_gathered_inputs() -> None:
    """DTensor's layers keep what they gathered: two of 2sbh a layer rather than their shards, and the output
    layer's.
    """
    given: dict[str, Any] = dict(tp=8, sequence_parallel=True)
    shards, whole = (estimate(configure("llama3-8b", keep_gathered=kept, **given)) for kept in (False, True))
    more = whole.stages[0].activations_bytes - shards.stages[0].activations_bytes
    assert more == (2 * L + 1) * 2 * S * H * 7 // 8


def test_all_in_bfloat16() -> None:
    """Lightning's bf16-true: weights, gradients and two values of Adam, 8 bytes a parameter; AdamW's master
    copy is no more.
    """
    stage = estimate(configure("llama3-8b", dtype="bf16-true")).stages[0]
    states = stage.weights_bytes + stage.gradients_bytes + stage.optimizer_bytes
    assert states == 8 * stage.parameters
    lines = {line.kind: line for line in stage.lines}
    assert lines["optimizer"].name == "adam state" and "activations" in lines


def test_gradients_without_sync_are_whole_until_the_last_micro_batch() -> None:
    """FSDP2 sums them in the dtype that it reduces in, and reduces once."""
    given: dict[str, Any] = dict(dp=8, zero=3, global_batch=32, reduce_dtype="fp32")
    each, once = (configure("llama3-8b", no_sync=held, **given) for held in (False, True))
    split, whole = (estimate(config).stages[0] for config in (each, once))
    assert split.gradients_bytes == 2 * split.parameters // 8
    assert whole.gradients_bytes == 4 * whole.parameters
    sent = [
        sum(item.bytes for item in stage_traffic(config, 0) if "reduce-scatter" in item.name)
        for config in (each, once)
    ]
    assert sent[0] == pytest.approx(4 * sent[1])


def test_gathered_logits_travel() -> None:
    """Each of t ranks sends its part to the others, once a micro-batch."""
    config = configure("llama3-8b", tp=4, gather_logits=True, global_batch=2)
    sent = {item.name: item.bytes for item in stage_traffic(config, 0)}
    assert sent["gather of the logits"] == 2 * (2 * S * V) * 3 // 4


def test_reserved_is_more_than_allocated_and_has_to_fit() -> None:
    found = estimate(configure("llama3-8b", tp=8, sequence_parallel=True))
    assert found.total_bytes < found.reserved_bytes < 1.1 * found.total_bytes
    between = (found.total_bytes + found.reserved_bytes) // 2
    fits = estimate(configure("llama3-8b", tp=8, sequence_parallel=True, memory_bytes=between))
    assert fits.fits is False
    sharded = estimate(configure("llama3-8b", dp=8, zero=3))
    assert sharded.reserved_bytes / sharded.total_bytes > found.reserved_bytes / found.total_bytes


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (dict(cp=2, attention="unfused"), "--attention fused"),
        (dict(cp=3), "--cp=3"),
        (dict(cp=8, tp=4, sequence_parallel=True, seq=8200), "--cp x --tp=32"),
        (dict(keep_gathered=True), "--keep-gathered without --sequence-parallel"),
        (dict(gather_logits=True), "--gather-logits with --tp=1"),
        (dict(gather_logits=True, tp=2, loss="chunked"), "--loss=chunked"),
        (dict(no_sync=True, zero=3, dp=8), "1 micro-batch:"),
        (dict(no_sync=True, zero=1, dp=8, global_batch=32), "--zero 2 or 3"),
        (dict(no_sync=True, zero=3, dp=8, pp=2, global_batch=32), "--no-sync with --zero=3 --pp=2"),
        (dict(loss="liger"), "choose auto, torch, torch-uncast, upcast, float32, transformers, in-place"),
        (dict(recompute="op"), "selective-op"),
    ],
)
def test_refusals(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(EstimateError, match=says):
        configure("llama3-8b", **settings)


def test_lowtide_s_models_are_those_that_it_trains() -> None:
    from lowtide.models import PRESETS

    for name, trained in LOWTIDE_MODELS.items():
        shape, config = ours.preset(name).shape, PRESETS[trained]
        assert (
            shape.layers, shape.hidden, shape.heads, shape.kv_heads, shape.ffn, shape.vocab, shape.tied
        ) == (
            config.layers, config.width, config.heads, config.key_value_heads, config.hidden_width,
            config.vocabulary, config.tied,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("model", "devices"), [("llama3-8b", 4), ("llama3-70b", 64), ("gpt2", 1), ("22b", 8)]
)
def test_lowtide_runs_every_row(model: str, devices: int) -> None:
    """The commands have flags that ``lowtide train`` knows, in combinations that it takes."""
    from lowtide.train.options import TrainOptions

    found = suggest(model, devices=devices, device=device("h100"), runs_with="lowtide", count=50)
    assert found.fits
    for one in found.best:
        words = shlex.split(one.command)
        flags = words[words.index("train") + 1 :]
        context = typer.main.get_command(app).commands["train"].make_context("train", flags)  # type: ignore
        names = set(TrainOptions.__dataclass_fields__) & set(context.params)
        asked = {name: context.params[name] for name in names if context.params[name] is not None}
        asked |= dict(device="cpu", steps=1000, json=None)  # the accelerator is not here
        options = TrainOptions(**asked)
        assert options.ranks == devices
        assert options.batch * options.grad_accum == one.config.global_batch


def test_frameworks_offer_what_they_have() -> None:
    for name, zero in (("torchtitan", {3, 0}), ("megatron", {0, 1}), ("lowtide", {0, 3})):
        found = suggest("llama3-8b", devices=8, device=device("h100"), runs_with=name, count=100)
        assert found.fits and {one.config.zero for one in found.best} <= zero
        assert all(one.command.startswith("torchrun --nproc-per-node 8 ") for one in found.best)
        assert {one.config.recompute for one in found.best} <= set(FRAMEWORKS[name].recompute)
    with pytest.raises(EstimateError, match="--for lowtide, --zero can be 0, 3"):
        suggest("llama3-8b", devices=8, device=device("h100"), runs_with="lowtide", zero=1)
    with pytest.raises(EstimateError, match="--for torchtitan: it has deepseek-v3, llama3-405b"):
        suggest("gpt2", devices=8, device=device("h100"), runs_with="torchtitan")


@pytest.mark.parametrize(
    "arguments",
    [
        ["suggest", "--model", "llama3-8b", "--devices", "4", "--memory", "80GB"],
        ["suggest", "--model", "llama3-8b", "--devices", "16", "--for", "any", "--device", "a100-40gb"],
        ["suggest", "--model", "llama3-70b", "--devices", "64", "--for", "megatron", "--device", "h100"],
    ],
)
def test_columns_keep_their_names_at_80_characters(arguments: list[str]) -> None:
    text = CliRunner().invoke(app, arguments, env={"COLUMNS": "80"}).output
    head = next(line.split() for line in text.splitlines() if "recompute" in line and "GiB" in line)
    assert [name for name in head if name != "host"] == [
        "t", "p", "d", "Z", "b", "recompute", "optim.", "loss", "GiB", "s/step", "tok/s",
    ]  # fmt: skip
    start = text.index("recompute  optim.")
    table = text[start : text.index("t tensor parallel")]
    assert "…" not in table and max(map(len, table.splitlines())) <= 80


def test_estimate_s_columns_and_header_at_80_characters() -> None:
    flags = ["--model", "530b", "--as-published", "--recompute", "full", "--device", "a100", "--brief"]
    text = CliRunner().invoke(app, ["estimate", *flags], env={"COLUMNS": "80"}).output
    assert "…" not in text and max(map(len, text.splitlines())) <= 80
    head = next(line.split() for line in text.splitlines() if line.split()[:1] == ["stage"])
    assert head == [
        "stage",
        "weights",
        "grads",
        "optim.",
        "kept",
        "temp.",
        "total",
        "reserved",
        "left",
        "whole",
    ]
    told = " ".join(text.split())
    assert "1 x 2,048 tokens a micro-batch; a step: 280 micro-batches = 280 sequences, 573,440 tokens" in told
    assert "predicted step" in told and "tokens a second and device" in told


def test_offload_says_what_the_host_needs() -> None:
    found = estimate(configure("llama3-8b", dp=4, zero=2, offload_optimizer=1.0))
    assert found.host_bytes == pytest.approx(14 * 8030261248 / 4, rel=1e-6)
    assert any("pinned" in note for note in found.notes)
    best = suggest("llama3-8b", devices=4, device=device("a100"), offload_optimizer=1.0, zero=2).best[0]
    assert best.host_bytes == pytest.approx(14 * 8030261248, rel=1e-6)
