"""Each technique where the papers print no number: against an independent count, or against what it must and
must not change.
"""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.estimate import Config, EstimateError, configure, estimate
from lowtide.estimate.layer import kept_terms, layer_terms
from lowtide.estimate.lines import total
from lowtide.estimate.schedule import layers_in_flight, most_chunks_held, turns

S, B, H, A = 8192, 1, 4096, 32


def layer_bytes(config: Config) -> Fraction:
    return sum((term.bytes * share for term, share in kept_terms(config)), Fraction(0))


def llama(**changes: object) -> Config:
    return configure("llama3-8b", **changes)


def test_llama_layer_at_t_1() -> None:
    """Norm inputs and outputs 8sbh; q 2, k and v half of one h each (8 of 32 heads), output 2; SwiGLU 6 x
    3.5; log-sum-exp 4asb.
    """
    assert layer_bytes(llama()) == S * B * H * (8 + 2 + 2 * 2 // 4 + 2 + 21) + 4 * A * S * B


def test_llama_layer_at_t_4() -> None:
    inner = (S * B * H * (2 + 1 + 2 + 21) + 4 * A * S * B) // 4
    assert layer_bytes(llama(tp=4)) == 8 * S * B * H + inner
    assert layer_bytes(llama(tp=4, sequence_parallel=True)) == 2 * S * B * H + inner


def test_more_ranks_than_key_value_heads() -> None:
    eight, sixteen = (total(t for t in layer_terms(llama(tp=tp)) if t.name == "keys") for tp in (8, 16))
    assert eight == sixteen == 2 * S * B * 128


def test_separate_operations_repeat_grouped_keys() -> None:
    terms = {term.name: term.bytes for term in layer_terms(llama(attention="unfused"))}
    assert terms["keys"] == terms["values"] == terms["queries"] == 2 * S * B * H
    assert terms["output of softmax"] == 2 * A * S * S * B
    assert "mask of softmax's dropout" not in terms and "output of softmax's dropout" not in terms


def test_squared_relu_keeps_what_gelu_keeps() -> None:
    gelu, squared = (
        configure(layers=32, hidden=6144, heads=48, mlp=mlp, positions="rotary", bias=False)
        for mlp in ("gelu", "squared-relu")
    )
    mlp = [
        total(t for t in layer_terms(config) if t.part == "mlp" and "mask" not in t.name)
        for config in (gelu, squared)
    ]
    assert mlp[0] == mlp[1] == 2048 * 6144 * (4 + 16)


def test_nemotron_15b_at_t_8() -> None:
    config = configure("nemotron-15b", tp=8, sequence_parallel=True)
    s, h = 4096, 6144
    assert layer_bytes(config) == Fraction(s * h * (8 + 2 + Fraction(2 * 2 * 8, 48) + 2 + 16) + 4 * 48 * s, 8)


def test_no_dropout_leaves_the_masks_out() -> None:
    with_, without = (layer_bytes(configure("22b", dropout=p)) for p in (0.1, 0.0))
    s, h, a = 2048, 6144, 64
    assert with_ - without == 2 * s * h + 3 * a * s * s  # two masks; softmax's mask and the copy behind it


def test_dtypes() -> None:
    half, single = (layer_bytes(configure("22b", dtype=dtype, dropout=0.0)) for dtype in ("bf16", "fp32"))
    assert single == 2 * half
    assert layer_bytes(configure("22b", dtype="fp16")) == layer_bytes(configure("22b"))


def test_autocast() -> None:
    """The residual stream is float32, softmax works in float32, products read bfloat16."""
    s, h, a = 2048, 6144, 64
    assert (
        layer_bytes(configure("22b", dtype="autocast", dropout=0.0))
        == s * h * (2 * 4 + 2 * 2 + 4 * 2 + 16) + (4 + 2) * a * s * s + 2 * 12 * h * h
    )
    stage = estimate(configure("22b", dtype="autocast")).stages[0]
    assert stage.weights_bytes + stage.gradients_bytes + stage.optimizer_bytes == 16 * stage.parameters


@pytest.mark.parametrize("layers", [1, 7, 24, 48])
def test_recompute_some_layers(layers: int) -> None:
    none, full, some = (layer_bytes(configure("22b", recompute=r)) for r in ("none", "full", layers))
    assert 48 * some == layers * full + (48 - layers) * none


def test_selective_under_fused_attention_frees_the_log_sum_exp_only() -> None:
    assert layer_bytes(llama()) - layer_bytes(llama(recompute="selective")) == 4 * A * S * B
    assert any("log-sum-exp only" in note for note in estimate(llama(recompute="selective")).notes)


def test_optimizers() -> None:
    sizes = {
        name: estimate(configure("gpt2", optimizer=name)).stages[0].optimizer_bytes // 124439808
        for name in ("adam", "adamw", "momentum", "sgd")
    }
    assert sizes == {"adam": 12, "adamw": 12, "momentum": 8, "sgd": 4}
    assert estimate(configure("gpt2", dtype="fp32")).stages[0].optimizer_bytes == 8 * 124439808


def test_stage_parameters_sum_to_the_model() -> None:
    """Over all stages and ranks, replicated parameters taken once, and the copy of a tied embedding on the
    last stage.
    """
    for model in ("22b", "llama3-8b"):
        config = configure(model, tp=8, pp=4)
        found = estimate(config)
        shape = config.model
        replicated = shape.layers * shape.layer_shared_parameters() + shape.norm_vectors * shape.hidden
        replicated += shape.sequence * shape.hidden if shape.positions == "learned" else 0
        copy = shape.vocab * shape.hidden if shape.tied else 0
        assert (
            sum(8 * stage.parameters for stage in found.stages) == shape.parameters() + 7 * replicated + copy
        )


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([1, 2, 3, 4, 8]), st.sampled_from([1, 2, 3]), st.integers(1, 5))
def test_in_flight_is_what_the_schedule_holds(p: int, m: int, rounds: int) -> None:
    """The closed form of each stage against a walk through its schedule."""
    m = 1 if p == 1 else m
    count = rounds * p if m > 1 else rounds
    config = configure(layers=p * m * 2, hidden=64, heads=2, pp=p, interleave=m, global_batch=count)
    for stage in range(p):
        assert layers_in_flight(config, stage) == 2 * most_chunks_held(config, stage)
        done = list(turns(config, stage))
        assert sorted(done) == sorted(
            (kind, batch, chunk)
            for kind in ("forward", "backward")
            for batch in range(count)
            for chunk in range(m)
        )
        for batch in range(count):
            for chunk in range(m):
                assert done.index(("forward", batch, chunk)) < done.index(("backward", batch, chunk))


def test_interleaved_7b() -> None:
    """7B at p = 4, m = 2: the first stage holds L (1 + 3/8) layers, the last one L (1 - 3/8 + ...)."""
    config = configure("llama2-7b", pp=4, interleave=2, global_batch=16)
    assert [layers_in_flight(config, stage) for stage in range(4)] == [
        Fraction(32) * n / 8 for n in (11, 9, 7, 5)
    ]


def test_chunked_loss_takes_the_logits_off() -> None:
    plain, chunked = (estimate(llama(loss=kind)).stages[0] for kind in ("torch", "chunked"))
    logits = S * B * 128256
    assert plain.activations_bytes - chunked.activations_bytes == 4 * logits - 4 * S * B
    assert chunked.total_bytes < plain.total_bytes


def test_zero_3_gathers_weights() -> None:
    stage = estimate(llama(dp=8, zero=3)).stages[0]
    assert "gathered weights" in [line.name for line in stage.lines]
    assert stage.weights_bytes == pytest.approx(2 * 8030261248 / 8)


def test_offloaded_activations_are_two_layers() -> None:
    stage = estimate(llama(offload_activations=True)).stages[0]
    assert stage.layer_activations_bytes == 2 * layer_bytes(llama())
    assert estimate(llama(offload_activations=True)).host_link_bytes == 2 * 32 * layer_bytes(llama())


def test_every_line_names_a_source() -> None:
    for config in (
        configure("22b", as_published=True),
        llama(tp=8, sequence_parallel=True, dp=4, zero=3),
        configure(
            "1t", as_published=True, recompute="full", partition_activations=True, offload_activations=True
        ),
        configure(
            "530b",
            as_published=True,
            interleave=1,
            keep_output_tensors=True,
            recompute="selective",
            offload_optimizer=0.5,
        ),
        configure("gpt2", recompute="sqrt", loss="chunked"),
    ):
        found = estimate(config)
        for stage, traffic in zip(found.stages, found.traffic, strict=True):
            assert all(line.bytes >= 0 for line in stage.lines)
            assert all(item.bytes > 0 and item.source for item in traffic)
            for line in stage.lines:
                assert line.source.startswith(("arXiv", "liveness")), line


def test_mfu_needs_both() -> None:
    assert estimate(configure("gpt2", iteration_seconds=1.0)).mfu is None
    found = estimate(configure("gpt2", iteration_seconds=1.0, peak_flops=1e15))
    assert found.mfu == found.flops.model / 1e15


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from(["22b", "175b", "llama3-8b", "llama3-70b", "nemotron-15b", "gpt2-xl", "qwen3-8b"]),
    st.sampled_from([1, 2, 4, 8]), st.booleans(), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]),
    st.sampled_from([1, 2, 8]),
    st.sampled_from([0, 1, 2, 3]), st.sampled_from(["none", "selective", "full", "sqrt", 2]),
    st.sampled_from(["fused", "unfused"]),
    st.sampled_from(["bf16", "fp32", "autocast"]), st.sampled_from([0.0, 0.5, 1.0]),
)  # fmt: skip
def test_any_valid_configuration_has_an_estimate(
    model: str,
    tp: int,
    sp: bool,
    pp: int,
    m: int,
    dp: int,
    zero: int,
    recompute: object,
    attention: str,
    dtype: str,
    offload: float,
) -> None:
    """No crash, no negative line; and recomputation never keeps more than none, nor costs fewer FLOPs."""
    try:
        config = configure(
            model, tp=tp, sequence_parallel=sp, pp=pp, interleave=m, dp=dp, zero=zero, recompute=recompute,
            attention=attention, dtype=dtype,
            offload_optimizer=offload,
        )  # fmt: skip
    except EstimateError as error:
        assert "--" in str(error)
        return
    found = estimate(config)
    plain = estimate(
        configure(
            model,
            tp=tp,
            sequence_parallel=sp,
            pp=pp,
            interleave=m,
            dp=dp,
            zero=zero,
            attention=attention,
            dtype=dtype,
        )
    )
    for stage, other in zip(found.stages, plain.stages, strict=True):
        assert stage.activations_bytes <= other.activations_bytes
        assert all(line.bytes >= 0 for line in stage.lines)
    assert found.flops.model == plain.flops.model <= found.flops.executed <= found.flops.hardware
