"""The parts of a step's predicted time, each against an independent count."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lowtide.estimate import EstimateError, configure, estimate
from lowtide.estimate.devices import device
from lowtide.estimate.flops import attention_flops, logit_flops, recomputed_flops
from lowtide.estimate.layer import kept_terms, layer_terms
from lowtide.estimate.speed import efficiencies, step_time

H100 = device("h100")
KNOWN = efficiencies()["h100"]
L, S, H, KV, F = 32, 8192, 4096, 1024, 14336


def test_attention_s_backward_computes_the_scores_again() -> None:
    """Two products forward and five backward (arXiv 2307.08691): 3.5 forwards, 4.5 with recomputation."""
    for recompute, forwards in (("none", 3.5), ("full", 4.5)):
        config = configure("llama3-8b", recompute=recompute)
        seconds = forwards * L * attention_flops(config, 1) / (H100.flops * KNOWN.attention)
        assert step_time(config, H100).attention == pytest.approx(seconds)


def test_newer_attention_kernels_are_faster_and_keep_the_same() -> None:
    old, new = (configure("llama3-8b", attention=kind) for kind in ("fused", "flash-3"))
    ratio = step_time(old, H100).attention / step_time(new, H100).attention
    assert ratio == pytest.approx(KNOWN.flash_3) and ratio > 1
    assert estimate(old).total_bytes == estimate(new).total_bytes
    assert configure("llama3-8b", attention="flash-3", cp=2).cp == 2  # a ring needs a fused kernel


@pytest.mark.parametrize(("recompute", "inputs"), [("none", 1), ("full", 2), ("selective-op", 1.5)])
def test_float8_casts_inputs_gradients_and_weights(recompute: str, inputs: float) -> None:
    """Seven bytes an element: of what enters the four groups of products, of the gradients of what leaves
    them, and of the weights.
    """
    plain, cast = (
        step_time(configure("llama3-8b", recompute=recompute, float8=way), H100) for way in (False, True)
    )
    entering, leaving = H + H + H + F, (H + 2 * KV) + H + 2 * F + H
    weights = H * (2 * H + 2 * KV + 3 * F)
    moved = 7 * L * (S * (inputs * entering + leaving) + weights)
    assert cast.pointwise - plain.pointwise == pytest.approx(moved / H100.memory_bandwidth)
    assert cast.products < plain.products


def test_overlapped_tensor_collectives_show_in_part() -> None:
    plain, hidden = (
        step_time(configure("llama3-8b", tp=4, sequence_parallel=True, overlap_tensor=way), H100)
        for way in (False, True)
    )
    assert hidden.tensor == pytest.approx(KNOWN.exposed * plain.tensor) and hidden.tensor < plain.tensor
    assert hidden.products == plain.products
    with pytest.raises(EstimateError, match="--overlap-tensor with --tp=1"):
        configure("llama3-8b", overlap_tensor=True)


def test_interleaved_stages_send_beside_compute() -> None:
    plain, chunks = (
        step_time(configure("llama3-8b", pp=4, interleave=m, global_batch=16), H100) for m in (1, 2)
    )
    sent = plain.pipeline * 3  # 1F1B's ends send once each way, two chunks three times
    assert chunks.pipeline == pytest.approx(KNOWN.interference * sent)


def test_the_stage_with_the_output_layer_is_waited_for() -> None:
    """Without idle turns at the ends (many micro-batches) the wait is what the output layer takes on top of
    its share: its time on p - 1 stages of p.
    """
    config = configure("llama3-8b", pp=4, global_batch=1 << 20)
    batch = config.global_batch
    logits = 3 * logit_flops(config, batch) / 4 / (H100.flops * KNOWN.products)
    assert step_time(config, H100).bubble == pytest.approx(3 * logits, rel=1e-4)
    faster = step_time(configure("llama3-8b", pp=4, global_batch=1 << 20, float8=True), H100)
    assert faster.bubble == pytest.approx(3 * logits, rel=1e-4)  # the output layer stays in bfloat16


def test_data_parallel_collectives_hide_behind_their_compute() -> None:
    """FSDP's behind all micro-batches; what a pipeline gathers once, behind one of them."""
    slow = device("h100", node_bandwidth=1e9, network_bandwidth=1e9)
    for pp, share in ((1, 1.0), (2, 1 / 4)):
        config = configure("llama3-8b", dp=2, zero=3, pp=pp, global_batch=8)
        took = step_time(config, slow)
        sent = max(
            sum(item.bytes for item in items if item.link == "data") for items in estimate(config).traffic
        )
        cover = share * (took.products + took.attention + took.pointwise)
        seconds = sent / (1e9 * KNOWN.links)
        assert seconds > cover
        started = KNOWN.collective * 3 * (32 * 4 if pp == 1 else 16)  # two gathers and a reduction a layer
        assert took.data == pytest.approx(seconds - (1 - KNOWN.interference) * cover + started)


def test_sharded_adapters_are_gathered_by_themselves() -> None:
    """An A and a B of each target beside the layer; on one device, too, where `fully_shard` is called."""
    usual: dict[str, Any] = dict(zero=3, dtype="bf16-true", lora=16)
    few, all_linear = (
        step_time(configure("llama3-8b", **usual, dp=2, lora_targets=kind), H100).data
        for kind in ("q,k,v,o", "all-linear")
    )
    assert all_linear - few == pytest.approx(KNOWN.collective * 3 * 2 * 3 * 32, rel=0.02)
    alone = step_time(configure("llama3-8b", **usual, dp=1, lora_targets="q,k,v,o"), H100).data
    assert alone == pytest.approx(KNOWN.collective * 3 * 2 * 4 * 32)


def test_products_of_experts_reach_less_of_the_peak() -> None:
    """Their share of a layer's products takes longer; what is dense does not."""
    config = configure("qwen3-30b-a3b", seq=4096)
    plain = replace(KNOWN, experts=1.0)
    own, none = (step_time(config, H100, known).products for known in (KNOWN, plain))
    dense = 2048 * (2 * 32 + 2 * 4) * 128
    share = 8 * 3 * 2048 * 768 / (8 * 3 * 2048 * 768 + dense)
    layers = none - 3 * logit_flops(config, 1) / (H100.flops * KNOWN.products)
    assert own - none == pytest.approx(layers * share * (1 / KNOWN.experts - 1), rel=1e-3)
    assert step_time(configure("llama3-8b"), H100) == step_time(configure("llama3-8b"), H100, plain)


def test_narrow_heads_wait_for_their_softmax() -> None:
    """A score's exponential stands beside 64 columns of products, or 128: a fifth more time."""
    wide, narrow = (
        step_time(configure("llama3-8b", heads=heads, kv_heads=8, head_width=4096 // heads), H100).attention
        for heads in (32, 64)
    )
    assert narrow == pytest.approx(1.2 * wide)


@pytest.mark.parametrize("card", ["h100", "h200", "b200"])
def test_flash_attention_2_nears_one_rate_on_devices_after_it(card: str) -> None:
    """Its instructions are Ampere's: Hopper and Blackwell run it at one rate with long sequences, which
    Hopper is below at 8,192 tokens. Kernels of 2023 stay there.
    """

    def rate(kind: str, seq: int) -> float:
        config = configure("llama3-8b", seq=seq, attention=kind)
        return 3.5 * 32 * 4 * seq**2 * 4096 / step_time(config, device(card)).attention

    known = efficiencies()[card]
    assert rate("fused", 1 << 24) == pytest.approx(known.flash_2 * 1e15, rel=1e-3)
    usual = min(known.attention * device(card).flops, known.flash_2 * 1e15)
    assert rate("fused", 8192) == pytest.approx(usual)
    assert rate("flash-1", 1 << 20) == pytest.approx(known.attention * device(card).flops)
    assert {one.flash_2 for name, one in efficiencies().items() if name in ("h100", "h200", "b200")} == {0.63}


def test_products_that_torchtitan_does_not_know_are_not_kept() -> None:
    """NVFP4's are operations of torchao: of a layer the input and attention's output stay."""
    usual: dict[str, Any] = dict(dp=4, zero=3, recompute="selective-op", compile=True, float8=True)
    plain, four = (configure("llama3-8b", **usual, scaling=kind) for kind in ("mxfp8", "nvfp4"))
    names = {term.name for term, _ in kept_terms(four)}
    assert names == {"input of the layer", "output of attention", "log-sum-exp of the scores"}
    freed = sum(term.bytes for term, _ in kept_terms(plain)) - sum(term.bytes for term, _ in kept_terms(four))
    assert freed == 2 * S * (H + KV + F)
    every = 2 * L * S * 4 * (2 * H * H + 2 * H * KV + 3 * H * F)
    assert recomputed_flops(four, 4) == every


def test_scaled_rows_take_more_time_than_scaled_tensors() -> None:
    """Products of torchao's rowwise float8 are slower, and each cast reads twice; blocks are read once."""
    known = efficiencies()["h100"]
    usual: dict[str, Any] = dict(zero=3, dp=8, compile=True, float8=True)
    tensor, row, block = (
        step_time(configure("llama3-8b", **usual, scaling=kind), H100)
        for kind in ("tensorwise", "rowwise", "mxfp8")
    )
    logits = 3 * 2 * 8192 * 4096 * 128256 / (H100.flops * known.products)
    assert (row.products - logits) * known.rowwise == pytest.approx(tensor.products - logits)
    assert block.products == tensor.products
    more = row.pointwise - tensor.pointwise, tensor.pointwise - block.pointwise
    assert more[0] == pytest.approx(3 * more[1]) and more[1] > 0
    with pytest.raises(EstimateError, match="--scaling=rowwise without --float8"):
        configure("llama3-8b", scaling="rowwise")


def test_a_small_model_waits_for_its_host() -> None:
    """A layer's forward and backward take no less than their start, recomputed ones a third more, and a step
    no less than its turn besides.
    """
    h100, known = device("h100"), efficiencies()["h100"]
    usual: dict[str, Any] = dict(layers=12, hidden=512, heads=8, vocab=50304, seq=1024, attention="fused")
    for recompute, share in (("none", 1), ("full", 4 / 3)):
        small = step_time(configure(**usual, recompute=recompute, global_batch=4), h100)
        assert small.products + small.attention + small.pointwise + small.launches == pytest.approx(
            4 * 12 * known.launch * share + known.turn
        )
    assert step_time(configure("llama3-8b"), h100).launches == 0


def test_experts_with_adapters_run_one_by_one_without_grouped_kernels() -> None:
    """Each expert of each layer waits for its own start, forward, again and backward; Hopper groups them."""
    usual: dict[str, Any] = dict(dtype="bf16-true", recompute="full", seq=32768)
    alone = efficiencies()["b200"].alone
    for lora, device_name, waits in ((16, "b200", 128), (16, "h100", 0), (0, "b200", 0)):
        config = configure("qwen3-30b-a3b", lora=lora, **usual)
        attention = configure("qwen3-30b-a3b", lora=16, lora_targets="attention", **usual)
        assert step_time(attention, device(device_name)).launches == 0
        found = step_time(config, device(device_name)).launches
        assert found == pytest.approx(48 * 4 / 3 * waits * alone)


def test_activations_on_the_host_wait_for_the_link() -> None:
    """What a layer keeps goes there and comes back, beside nothing; kept layer inputs of a short step too."""
    kept = configure("llama3-8b", offload_activations=True, micro_batch=2)
    layer = sum(term.bytes for term in layer_terms(kept))
    seconds = step_time(kept, H100).host
    assert seconds == pytest.approx(2 * L * layer / (H100.host_bandwidth * KNOWN.links))
    assert step_time(kept, H100).total == pytest.approx(
        seconds + step_time(configure("llama3-8b", micro_batch=2), H100).total
    )
