"""What has to hold between the settings of a `lowtide.estimate.config.Config`."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

from lowtide.estimate.adapters import LORA_ONLY, targets
from lowtide.estimate.errors import EstimateError, divisors
from lowtide.estimate.losses import CHUNKED
from lowtide.estimate.shape import SEPARATE
from lowtide.words import count_text

Config = Any
"""A `lowtide.estimate.config.Config`, which is built on these checks."""

Ways = Literal["none", "selective", "selective-op", "selective-layer", "full", "sqrt"]
RECOMPUTE = get_args(Ways)


def check_together(config: Config) -> None:
    """Refuse settings that do not hold together.

    Raises:
        EstimateError: the message names the flags and what would be valid.
    """
    _check_model(config)
    _check_parallel(config)
    _check_recompute(config)
    _check_training(config)


def _check_model(config: Config) -> None:
    model, tp = config.model, config.tp
    if model.positions == "learned" and config.seq > model.sequence:
        raise EstimateError(
            f"--seq={config.seq} is longer than the {model.sequence} positions that the model has learned: "
            "choose at most that"
        )
    for name, size in (("heads", model.heads), ("ffn", model.ffn)):
        if size % tp:
            raise EstimateError(
                f"--tp={tp} does not divide --{name}={size}: choose a divisor "
                f"({divisors(math.gcd(model.heads, model.ffn))})"
            )
    if model.kv_heads % tp and tp % model.kv_heads:
        raise EstimateError(
            f"--tp={tp} and --kv-heads={model.kv_heads}: one has to divide the other, so that every rank "
            f"holds whole heads (of the divisors of the heads: {divisors(model.heads)})"
        )
    if config.ep > 1 and (not model.experts or model.experts % config.ep or config.shards % config.ep):
        raise EstimateError(
            f"--ep={config.ep} with --experts={model.experts} and --dp x --cp={config.shards}: it has to "
            f"divide both; choose of {divisors(math.gcd(model.experts, config.shards))}"
        )
    for name in ("score_before_experts", "weigh_float32"):
        if getattr(config, name) and not model.experts:
            raise EstimateError(f"--{name.replace('_', '-')}: the model has no experts; leave it out")
    if config.score_before_experts and config.weigh_float32:
        raise EstimateError("--score-before-experts --weigh-float32: the outputs are not weighed; give one")
    if config.imbalance > 1 and config.ep == 1:
        raise EstimateError(
            f"--imbalance={config.imbalance:g} with --ep=1: every rank has all experts; give --ep 2 or more"
        )
    if config.unfused_norms and model.norm != "rmsnorm":
        raise EstimateError(f"--unfused-norms with --norm={model.norm}: it is for rmsnorm; leave it out")
    if config.unfused_mlp and model.mlp not in SEPARATE:
        raise EstimateError(
            f"--unfused-mlp changes nothing in a model with --mlp={model.mlp}: it is for swiglu and gelu; "
            "leave it out"
        )


def _check_parallel(config: Config) -> None:
    if config.sequence_parallel and config.tp == 1:
        raise EstimateError(
            "--sequence-parallel with --tp=1: there are no tensor-parallel ranks to split a sequence "
            "among; give --tp 2 or more"
        )
    if config.overlap_tensor and config.tp == 1:
        raise EstimateError(
            "--overlap-tensor with --tp=1: there are no collectives to overlap; give --tp 2 or more"
        )
    if config.gather_logits and (config.tp == 1 or config.loss_form.pieces):
        raise EstimateError(
            f"--gather-logits with --tp={config.tp} --loss={config.loss}: it is for --tp of 2 or more and a "
            "loss that is not in pieces; leave it out"
        )
    if config.no_sync and (config.zero < 2 or config.shards == 1 or config.micro_batches == 1):
        raise EstimateError(
            f"--no-sync with --zero={config.zero} --dp={config.dp} and "
            f"{count_text(config.micro_batches, 'micro-batch', 'micro-batches')}: "
            "it is for gradients that are split, and summed over several micro-batches; leave it out, or "
            "give --zero 2 or 3, --dp 2 or more and a larger --global-batch"
        )
    if config.no_sync and config.zero == 3 and config.pp > 1:
        raise EstimateError(
            f"--no-sync with --zero=3 --pp={config.pp}: a pipeline's gradients are reduced once as it is; "
            "leave it out"
        )
    if config.embedding_unit and (config.zero < 3 or config.model.tied):
        raise EstimateError(
            f"--embedding-unit with --zero={config.zero}: for --zero 3 and an output layer that does not "
            "share the embedding; leave it out"
        )
    if config.keep_weights and (config.zero < 3 or config.shards == 1 or config.recompute != "none"):
        raise EstimateError(
            f"--keep-weights with --zero={config.zero} --dp={config.dp} --recompute={config.recompute}: for "
            "--zero 3 --dp 2 or more without recomputation"
        )
    if config.ddp_buckets and (config.zero or config.shards == 1):
        raise EstimateError(
            f"--ddp-buckets with --zero={config.zero} --dp={config.dp}: for --zero 0 --dp 2 or more"
        )
    if config.cp_exchange != "ring" and config.cp == 1:
        raise EstimateError(f"--cp-exchange={config.cp_exchange} with --cp=1: give --cp 2 or more")
    heads = config.model.heads // config.tp
    if config.cp_exchange == "all-to-all" and heads % config.cp:
        raise EstimateError(
            f"--cp-exchange=all-to-all --cp={config.cp}: it has to divide the {heads} heads of a rank; give "
            "a divisor, or --cp-exchange ring"
        )
    slices = heads // config.cp if config.cp_exchange == "all-to-all" else heads
    if config.head_chunks > 1 and slices % config.head_chunks:
        raise EstimateError(
            f"--head-chunks={config.head_chunks}: it has to divide the {slices} heads that a rank works on; "
            f"choose of {divisors(slices)}"
        )
    ring = config.cp > 1 and config.cp_exchange != "all-to-all"
    whole = config.fused_attention and not config.model.kv_latent and not config.lora
    if config.head_chunks > 1 and (ring or not whole or config.recompute == "selective-op"):
        raise EstimateError(
            f"--head-chunks={config.head_chunks}: it is for --attention fused without --lora or latents, "
            "--cp-exchange all-to-all where there is --cp, and not for --recompute selective-op; leave it out"
        )
    if config.cp > 1 and not config.fused_attention:
        raise EstimateError(
            f"--cp={config.cp} passes keys and values around a ring, which a fused kernel does: give "
            "--attention fused"
        )
    split = config.tp * config.cp if config.sequence_parallel else config.cp
    if config.seq % split:
        by = "--tp" if config.cp == 1 else "--cp x --tp" if config.sequence_parallel else "--cp"
        raise EstimateError(
            f"--seq={config.seq} does not divide by {by}={split}, among whose ranks it is split: choose a "
            f"multiple of {split}"
        )
    if config.keep_gathered and not config.sequence_parallel:
        raise EstimateError(
            "--keep-gathered without --sequence-parallel: nothing is gathered; give both or neither"
        )
    layers = config.model.layers
    if config.interleave > 1 and config.pp == 1:
        raise EstimateError(
            f"--interleave={config.interleave} with --pp=1: there is no pipeline to interleave; give --pp "
            "2 or more"
        )
    if layers % (config.pp * config.interleave):
        raise EstimateError(
            f"--layers={layers} do not divide by --pp={config.pp} x --interleave={config.interleave}: choose "
            f"them so that their product is one of {divisors(layers)}"
        )
    step = config.micro_batch * config.dp
    if config.global_batch % step:
        raise EstimateError(
            f"--global-batch={config.global_batch} is no multiple of --micro-batch={config.micro_batch} x "
            f"--dp={config.dp}: choose a multiple of {step}"
        )
    if config.interleave > 1 and config.micro_batches % config.pp:
        raise EstimateError(
            f"--interleave={config.interleave}: the {config.micro_batches} micro-batches of a step do not "
            f"divide by --pp={config.pp}; choose a --global-batch that is a multiple of {step * config.pp}"
        )
    if config.keep_output_tensors and config.pp == 1:
        raise EstimateError(
            "--keep-output-tensors with --pp=1: no stage sends its outputs anywhere; leave it out, or "
            "give --pp 2 or more"
        )


def _check_recompute(config: Config) -> None:
    given, stage_layers = config.recompute, config.stage_layers
    if isinstance(given, int) and not isinstance(given, bool):
        if not 1 <= given <= stage_layers or given % config.interleave:
            many = f", in steps of --interleave={config.interleave}" if config.interleave > 1 else ""
            raise EstimateError(
                f"--recompute={given}: a number of layers of each pipeline stage, from 1 to "
                f"{stage_layers}{many}"
            )
    elif given not in RECOMPUTE:
        raise EstimateError(
            f"--recompute={given!r}: choose {', '.join(RECOMPUTE)} or a number of layers of each stage"
        )
    if config.partition_activations:
        if given not in ("full", "sqrt"):
            raise EstimateError(
                f"--partition-activations with --recompute={given}: it splits the layer inputs that full "
                "recomputation keeps; give --recompute full"
            )
        if config.tp == 1:
            raise EstimateError(
                "--partition-activations with --tp=1: there are no tensor-parallel ranks to split "
                "among; give --tp 2 or more"
            )
        if config.sequence_parallel:
            raise EstimateError(
                "--partition-activations with --sequence-parallel: layer inputs are already split along "
                "the sequence; choose one of the two"
            )


def _check_training(config: Config) -> None:
    targets(config.lora_targets, config.model)
    for name, usual in LORA_ONLY.items():
        if not config.lora and getattr(config, name) != usual:
            flag = f"--{name.replace('_', '-')}" + ("" if usual is False else f"={getattr(config, name)}")
            raise EstimateError(
                f"{flag} without --lora: all weights are trained, and in their own dtype; give --lora 16 or "
                "another rank too"
            )
    if config.dtype == "mixed" and config.zero != 3:
        raise EstimateError(
            f"--dtype=mixed with --zero={config.zero}: FSDP casts weights where it gathers them; give "
            "--zero 3, or --dtype autocast"
        )
    if config.offload_weights and (config.zero < 3 or config.offload_optimizer < 1):
        raise EstimateError(
            f"--offload-weights with --zero={config.zero} "
            f"--offload-optimizer={config.offload_optimizer:g}: for weights that ZeRO 3 gathers, with their "
            "optimizer on the host too; give --zero 3 --offload-optimizer 1"
        )
    if config.scaling != "tensorwise" and not config.float8:
        raise EstimateError(f"--scaling={config.scaling} without --float8: give both or neither")
    one_dtype = config.frozen_bytes == config.weight_bytes
    if config.flat_parameters and (config.zero < 3 or not one_dtype):
        raise EstimateError(
            f"--flat-parameters with --zero={config.zero} --lora-dtype={config.lora_dtype}: for --zero 3 "
            "and adapters in the dtype of the frozen weights (--lora-dtype same); leave it out"
        )
    if config.tiles > 1 and (config.model.experts or config.recompute == "selective-op" or config.lora):
        raise EstimateError(
            f"--tiles={config.tiles}: it is for the MLP of a dense model whose weights are all trained, and "
            "not for --recompute selective-op; leave it out"
        )
    if config.loss_chunks != 8 and config.loss not in CHUNKED:
        raise EstimateError(
            f"--loss-chunks={config.loss_chunks} without --loss {', '.join(CHUNKED[:-1])} or {CHUNKED[-1]}: "
            "give both or neither"
        )
    if config.optimizer_in_backward and config.micro_batches > 1:
        raise EstimateError(
            f"--optimizer-in-backward with {config.micro_batches} micro-batches: a gradient is gone when its "
            "parameter is updated, so nothing can be summed; give --global-batch as --micro-batch x --dp"
        )
    if config.optimizer_in_backward and config.master_bytes and config.gradient_bytes > config.weight_bytes:
        raise EstimateError(
            f"--optimizer-in-backward with --dtype={config.dtype}: gradients have a float32 buffer of their "
            "own, which stays; give --dtype bf16-true, autocast or fp32, or --gradient-dtype bf16"
        )
