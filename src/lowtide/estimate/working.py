"""What a step needs for moments only: how far its peak is above everything that is kept.

Autograd's tensors are all there when the loss is reached; from then on each backward node lets go of what it
held and makes gradients. The peak is therefore at one of a few moments, and each is written down here with
the tensors that exist then: the loss; within a layer that goes backward the last linear layer of the
MLP, its activation, its first linear layer, and the attention core; and the optimizer's update. Under
recomputation the layer's own activations come on top.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from math import ceil

from lowtide.estimate.adapters import QLORA, largest_matrix, layer_adapters, layer_bytes
from lowtide.estimate.config import Config
from lowtide.estimate.edges import logit_elements, loss_bytes, output_layer_terms, reads_once
from lowtide.estimate.layer import (
    TORCHTITAN,
    checkpoint_term,
    core_terms,
    layer_terms,
    operation_terms,
    segment_layers,
)
from lowtide.estimate.lines import CHEN, FULLY_SHARD, KORTHIKANTI, ZERO, Line, total
from lowtide.estimate.optimizers import OPTIMIZERS
from lowtide.estimate.shape import SEPARATE, kv_heads_per_rank
from lowtide.estimate.states import (
    first_gradients,
    frozen_bytes,
    layer_parameters,
    trained_parameters,
    updated_parameters,
)

ACTIVATION = (
    "input of GELU", "operations of GELU", "input of the square", "gate and up projections", "silu(gate)",
)  # fmt: skip
"""Terms of a layer that the MLP's activation keeps."""


def loss_moment(config: Config) -> Fraction:
    """Bytes above what is kept, at the loss."""
    pieces = ceil(logit_elements(config) / config.chunks)
    return Fraction(pieces) * loss_bytes(config)[1]


def backward_moments(config: Config) -> Mapping[str, Fraction]:
    """Bytes above what one layer keeps, at each moment of its backward; below zero where more was let go than
    made.
    """
    model, t = config.model, config.tp
    e, x = config.element_bytes, config.residual_bytes
    full = Fraction(config.tokens * model.hidden)
    shared = full / config.replication
    inner, rows = config.inner_elements, config.expert_rows * model.hidden
    first = inner * (model.mlp_matrices - 1)
    queries = Fraction(config.tokens * model.query_width, t)
    keys = config.key_copies * Fraction(config.tokens * (config.local_kv_width + config.local_value_width))
    qkv = queries + keys
    gathered = e * full if config.sequence_parallel else Fraction(0)
    terms = layer_terms(config)
    given = ("input of the MLP's last layer", "outputs of the experts")
    down = total(term for term in terms if term.name in given)
    act = sum(
        (term.bytes for term in terms if term.name in ACTIVATION),
        Fraction(0),
    )
    mlp = total(term for term in terms if term.part == "mlp")
    core = total(core_terms(config))
    stream = x * shared
    branch = e * shared
    scores = (
        Fraction(model.heads * config.tokens, t) * config.seq if not config.fused_attention else Fraction(0)
    )
    softmax = 4 if config.dtype == "autocast" else e
    mlps = {
        "last linear layer of the MLP": stream + branch + gathered + e * inner + 2 * e * rows,
        "activation of the MLP": stream + e * inner + e * first - down,
        "first linear layer of the MLP": stream + e * (first + rows) + gathered + e * full - down - act,
    }
    if config.score_before_experts:  # what is weighed, its gradient, and two products of that: float32
        mlps["weighing of the experts' inputs"] = stream + (12 - e) * rows - down - act
    elif model.experts:  # their gradient, and two products of that
        weighed = 4 if config.weigh_float32 else e
        mlps["weighing of the experts' outputs"] = stream + 3 * weighed * rows
    if config.tiles > 1:  # forward again and backward of one, beside the gradient of the MLP's input
        tile = 2 * first + inner * (1 + (SEPARATE.get(model.mlp, 0) if config.unfused_mlp else 0))
        mlps = {"tile of the MLP": stream + branch + e * full + e * tile / config.tiles}
    # a layer that runs to its end keeps its output and the gradient of that, which first is the stream's
    ends = stream if config.reentrant and config.recomputed_share else Fraction(0)
    mlps = {name: size + ends for name, size in mlps.items()}
    stream += 2 * ends
    if config.head_chunks > 1:  # of a slice queries, keys and values, output and gradients, sent and received
        sliced = e * 2 * (qkv + queries * (config.cp > 1)) + max(kernel_scratch(config), exchanged(config))
        return mlps | {
            "attention core, slice by slice": stream
            + e * (queries + full)
            + sliced / config.head_chunks
            - mlp
        }
    beside = max(kernel_scratch(config), exchanged(config)) if config.fused_attention else Fraction(0)
    return mlps | {
        "attention core": stream + e * queries + (e + 2 * softmax) * scores + e * qkv - mlp + beside,
        "q, k, v projection": stream + e * qkv + gathered + e * full - mlp - core,
    }


def kernel_scratch(config: Config) -> Fraction:
    """Bytes that a fused attention kernel has for itself in backward: gradients of queries in float32, summed
    over blocks of keys. Where heads share keys and values FlashAttention 2 makes the gradients of these for
    each head, FlashAttention 3 in float32.
    """
    queries = Fraction(config.tokens * config.model.query_width, config.tp)
    keys = config.key_copies * Fraction(config.tokens * (config.local_kv_width + config.local_value_width))
    heads = config.model.heads // config.tp
    grouped = config.key_copies * kv_heads_per_rank(config.model.kv_heads, config.tp) < heads
    shared = 4 * keys if config.attention == "flash-3" else 2 * config.element_bytes * queries
    return 4 * queries + (shared if grouped else 0)


def exchanged(config: Config) -> Fraction:
    """Bytes that context parallelism has besides in attention's backward. Around a ring: another rank's keys
    and values, the next one's on their way, and both gradients in float32, which go around with them. Where
    they are gathered: all of them, with all of their gradients. All-to-all: what is sent of queries, keys,
    values and their gradients, beside what is received.
    """
    e = config.element_bytes
    keys = Fraction(config.tokens * (config.local_kv_width + config.local_value_width))
    if config.cp == 1:
        return Fraction(0)
    if config.cp_exchange == "ring":
        return 2 * e * keys + 2 * 4 * keys
    if config.cp_exchange == "all-gather":
        return 2 * e * (config.cp - 1) * keys
    return e * (keys + Fraction(config.tokens * config.model.query_width, config.tp))


def recomputed_bytes(config: Config) -> tuple[Fraction, str]:
    """What recomputation brings back of one layer (or segment) at a time, and the equation."""
    terms = layer_terms(config)
    whole = total(terms) - (0 if config.partition_activations else checkpoint_term(config).bytes)
    if config.recompute == "none":
        return Fraction(0), ""
    if config.recompute == "selective-op":
        return total(terms) - total(operation_terms(config)), TORCHTITAN
    if config.recompute == "selective":
        return total(core_terms(config)), f"{KORTHIKANTI} Sec. 5"
    if config.recompute == "sqrt":
        layers = segment_layers(config)
        return whole * layers + checkpoint_term(config).bytes * (layers - 1), f"{CHEN} Eq. 1"
    return whole, f"{KORTHIKANTI} Sec. 5"


def _working(config: Config) -> tuple[Fraction, Fraction, str, str]:
    """What is live at most in backward of a layer above what is kept, what of it was recomputed, from which
    equation, and the moment.
    """
    recomputed, source = recomputed_bytes(config)
    name, most = max(backward_moments(config).items(), key=lambda item: item[1])
    return max(most + recomputed, Fraction(0)), recomputed, source, name


def temporary_lines(config: Config, stage: int) -> list[Line]:
    """What stands for moments only, on one device of a stage."""
    lines = []
    if stage == config.pp - 1:
        source = f"{KORTHIKANTI} Sec. 4.3, its backward"
        name, size = "gradients of the loss", ceil(loss_moment(config))
        note = f"{config.loss_kind}: {config.loss_form.what}"
        lines.append(_at(0, Line("temporaries", name, size, _loss_formula(config), source, note)))
        if reads_once(config):
            copies, inputs = output_layer_terms(config)
            lines += [_at(0, replace(term.line(), kind="temporaries")) for term in (*copies, inputs)]
    most, recomputed, source, name = max(_working(kind) for _, kind in config.kinds)
    again = min(recomputed, most)
    if again:
        what = {"selective": "attention core", "sqrt": "segment"}.get(str(config.recompute), "layer")
        one = f"one {what}, recomputed"
        lines.append(_at(1, Line("temporaries", one, ceil(again), "kept terms of it", source)))
    if most > again:
        made = f"gradients, at the {name}"
        size = ceil(most - again)
        formula = "tensors made by its backward"
        lines.append(_at(1, Line("temporaries", made, size, formula, "liveness, Sec. 4.1")))
    if config.model.experts:
        size = config.element_bytes * max(kind.expert_rows for _, kind in config.kinds) * config.model.hidden
        name, note = "rows of the experts, once more", "in which order is not known"
        formula, source = f"{config.element_bytes}sbkh", "fitted: runs of prime-rl and TRL"
        lines.append(_at(1, Line("temporaries", name, ceil(size), formula, source, note)))
    if config.pp > 1:
        e = config.residual_bytes
        buffer = Fraction(e * config.tokens * config.model.hidden, config.replication)
        size, source = ceil(2 * buffer), f"{KORTHIKANTI} App. B"
        name = "receive buffers of the pipeline"
        lines.append(_not_update(Line("temporaries", name, size, f"2 x {e}sbh", source)))
    if config.quantize != "none" or config.dora:
        e, note = config.element_bytes, "the largest matrix, while it is read"
        what = "cast back" if config.quantize != "none" else "whose norms DoRA takes"
        line = Line("temporaries", f"weights {what}", e * largest_matrix(config), f"{e}hf", QLORA, note)
        lines.append(_at(1, line))
    if config.ddp_buckets:
        name, size = "buckets of gradients", config.gradient_bytes * trained_parameters(config, stage)
        lines.append(Line("temporaries", name, size, f"{config.gradient_bytes}Ψ", "DistributedDataParallel"))
    lines += _zero3(config, stage)
    return lines


def _at(moment: int, line: Line) -> Line:
    """The line, at one of the moments only."""
    return replace(line, at=tuple(line.bytes if place == moment else 0 for place in range(3)))


def _not_update(line: Line) -> Line:
    return replace(line, at=(line.bytes, line.bytes, 0))


def update_lines(config: Config, stage: int) -> list[Line]:
    """What the optimizer's update needs beside the states."""
    copies = OPTIMIZERS[config.optimizer].copies
    if config.update_kind != "foreach" or not copies or config.optimizer_in_backward:
        return []
    count = updated_parameters(config, stage) * (1 - Fraction(config.offload_optimizer))
    size = ceil(copies * config.state_bytes * count)
    over = "/d" if config.zero else ""
    name = "square roots of the second moments"
    formula = f"{copies * config.state_bytes}Ψ{over}"
    line = Line("temporaries", name, size, formula, "liveness: torch.optim's foreach")
    return [_at(2, line)] if size else []


def at_moments(config: Config, stage: int, lines: Sequence[Line]) -> list[Line]:
    """The lines with what is live of gradients, layers' activations and paged states at each moment.

    Gradients that nothing holds from before are made while backward lets go of the layers' activations: it
    is fullest as it begins, with the gradients of the output layer and of one layer, or as it ends, with all
    of them and the activations of one layer.
    """
    kept = sum(line.bytes for line in lines if line.kind == "activations" and line.place == "layers")
    whole = sum(line.bytes for line in lines if line.kind == "gradients")
    first = min(whole, ceil(whole * first_gradients(config, stage)))
    ends = Fraction(1) if config.offload_activations else Fraction(1, config.stage_layers)
    late = not config.gradients_resident and not config.optimizer_in_backward
    late = late and kept * ends + whole > kept + first
    found = []
    for line in lines:
        if line.kind == "gradients":
            if config.optimizer_in_backward:
                line = replace(line, at=(0, first, 0))
            elif not config.gradients_resident:
                line = replace(line, at=(0, line.bytes if late else first, line.bytes))
        elif line.kind == "optimizer" and OPTIMIZERS[config.optimizer].paged:
            line = _at(2, line)
        elif late and line.kind == "activations" and line.place == "layers":
            line = replace(line, at=(line.bytes, ceil(line.bytes * ends), 0))
        found.append(line)
    return found


def _loss_formula(config: Config) -> str:
    pieces = f"/{config.chunks}" if config.chunks > 1 else ""
    over = "" if config.tp == 1 or config.gather_logits else "/t"
    return f"{loss_bytes(config)[1]}sbv{over}{pieces}"


def _zero3(config: Config, stage: int) -> list[Line]:
    """What fully sharded weights and gradients are gathered into."""
    e = min(config.gathered_bytes, config.frozen_bytes) if config.lora else config.gathered_bytes
    there = config.shards == 1 and e == config.weight_bytes and not config.offload_weights
    if config.zero < 3 or there:
        return []
    model = config.model
    if config.pp > 1:
        count = trained_parameters(config, stage)
        size, formula = (e + 4) * count + ceil(frozen_bytes(config, stage)), f"{e + 4}Ψ"
        note = "micro-batches of a pipeline share one gather, and one reduction of float32 gradients"
        name = "gathered weights and gradients"
        return [_not_update(Line("temporaries", name, size, formula, FULLY_SHARD, note))]
    layer = e * max(layer_parameters(kind) for _, kind in config.kinds)
    if config.lora:  # quantised weights are gathered as they are
        layer = max(
            min(e * layer_parameters(kind), layer_bytes(kind)) + e * layer_adapters(kind)
            for _, kind in config.kinds
        )
    table = -(-model.vocab // config.tp) * model.hidden * (1 if model.tied or config.embedding_unit else 2)
    size = ceil(2 * layer + e * table)
    note = "a layer in use, one fetched ahead; the root's stay until the next step"
    formula = "two layers, the output layer" if config.embedding_unit else "two layers, the embeddings"
    if config.keep_weights:
        size, formula = e * trained_parameters(config, stage) + ceil(frozen_bytes(config, stage)), f"{e}Ψ"
        note = "autograd's views of them hold them until their backward"
    gathered = Line("temporaries", "gathered weights", size, formula, FULLY_SHARD, note)
    if config.lora and not config.flat_parameters:
        return [_not_update(gathered)]
    head = e * -(-model.vocab // config.tp) * model.hidden
    name, note = "gradients that are not split yet", "the root's are reduced as backward ends"
    whole = Line("temporaries", name, ceil(layer) + head, "a layer, the output layer", FULLY_SHARD, note)
    return [_not_update(gathered), _at(1, whole)]


def offload_lines(config: Config, lines: list[Line]) -> list[Line]:
    """The activation lines when what is kept lies on the host: only the layers at work are on the device
    (1910.02054, P_a+cpu).
    """
    share = Fraction(min(2, config.stage_layers), config.stage_layers)
    flying = min(config.pp, config.micro_batches)
    source = f"{ZERO} Sec. 6.1 (P_a+cpu)"
    note = "on the host but for the two layers at work: one in use, one on its way"
    return [
        Line(
            line.kind, line.name, size, f"{line.formula}, 2 layers", source, note, line.place, (size, size, 0)
        )
        for line in lines
        for size in (ceil(line.bytes * share / flying),)
    ]
