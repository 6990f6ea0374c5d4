"""What a step needs for moments only: how far its peak stands above everything that is kept.

Autograd's tensors are all there when the loss is reached; from then on each backward node lets go of what it
held and makes gradients. The peak is therefore at one of a few moments, and each is written down here with
the tensors that exist then: the loss, and within the first layer to go backward the last linear layer of the
MLP, its activation, its first linear layer, and the attention core. Under recomputation the layer's own
activations come on top.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from math import ceil

from lowtide.estimate.config import Config
from lowtide.estimate.edges import logit_elements, loss_terms
from lowtide.estimate.layer import (
    TORCHTITAN,
    checkpoint_term,
    core_terms,
    layer_terms,
    operation_terms,
    segment_layers,
)
from lowtide.estimate.lines import CHEN, FULLY_SHARD, KORTHIKANTI, ZERO, Line, total
from lowtide.estimate.states import stage_parameters


def loss_moment_bytes(config: Config) -> int:
    """Bytes a logit above what is kept (`lowtide.estimate.edges.loss_terms`), at the loss.

    PyTorch's cross entropy keeps float32 log-probabilities and makes two float32 gradients of their size,
    while the caller still holds low-precision logits: 14 bytes in all in bfloat16. DTensor's
    ``loss_parallel`` (t > 1) makes one more. On logits that are not cast, all of them have the logits' own
    dtype: 8. Megatron's, in place, has the low-precision logits beside the
    float32 ones: 6. Compiled, it is one kernel from low-precision logits to their gradient. A chunked loss
    does all of it for one chunk.

    >>> from lowtide.estimate.settings import configure
    >>> [loss_moment_bytes(configure("llama3-8b", loss=kind)) for kind in ("torch", "in-place", "compiled")]
    [10, 2, 4]
    """
    e = config.element_bytes
    held = e if e < 4 else 0
    parallel = config.tp > 1 and not config.gather_logits
    if config.loss_kind == "chunked":
        return 12 if config.tp == 1 else 4 + e
    if config.loss_kind == "torch":
        return (12 if parallel else 8) + held
    if config.loss_kind == "torch-uncast":
        return (4 if parallel else 3) * e
    return 4 if config.loss_kind == "compiled" else e


def loss_moment(config: Config) -> Fraction:
    """Bytes above what is kept, at the loss."""
    logits = logit_elements(config)
    if config.loss_kind == "chunked":
        logits = Fraction(ceil(logits / config.loss_chunks))
    return logits * loss_moment_bytes(config)


def backward_moments(config: Config) -> Mapping[str, Fraction]:
    """Bytes above what one layer keeps, at each moment of its backward; below zero where more was let go than
    made.
    """
    model, t = config.model, config.tp
    e, x = config.element_bytes, config.residual_bytes
    full = Fraction(config.tokens * model.hidden)
    shared = full / config.replication
    inner = Fraction(config.tokens * model.ffn, t)
    first = inner * (2 if model.mlp == "swiglu" else 1)
    queries = Fraction(config.tokens * model.query_width, t)
    qkv = queries + 2 * Fraction(config.tokens * config.local_kv_width)
    gathered = e * full if config.sequence_parallel else Fraction(0)
    terms = layer_terms(config)
    down = next(term.bytes for term in terms if term.name.startswith("input of the MLP's last"))
    act = sum(
        (
            term.bytes
            for term in terms
            if term.name in ("input of GELU", "input of the square", "gate and up projections", "silu(gate)")
        ),
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
    return {
        "last linear layer of the MLP": stream + branch + gathered + e * inner,
        "activation of the MLP": stream + e * inner + e * first - down,
        "first linear layer of the MLP": stream + e * first + gathered + e * full - down - act,
        "attention core": stream + e * queries + (e + 2 * softmax) * scores + e * qkv - mlp,
        "q, k, v projection": stream + e * qkv + gathered + e * full - mlp - core,
    }


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


def temporary_lines(config: Config, stage: int) -> list[Line]:
    """What the peak of a step stands above all that is kept, on one device of a stage."""
    last = stage == config.pp - 1
    freed = total(loss_terms(config)) if last else Fraction(0)
    recomputed, source = recomputed_bytes(config)
    moments = {name: more + recomputed - freed for name, more in backward_moments(config).items()}
    if last:
        moments["loss"] = loss_moment(config)
    name, most = max(moments.items(), key=lambda item: item[1])
    most = max(most, Fraction(0))
    note = "" if name == "loss" or not freed else "the loss has let go of its tensors by then"
    lines = []
    if name == "loss":
        lines.append(
            Line(
                "temporaries",
                "gradients of the loss",
                ceil(most),
                _loss_formula(config),
                f"{KORTHIKANTI} Sec. 4.3, its backward",
                note,
            )
        )
    elif recomputed:
        again = min(recomputed, most)
        what = {"selective": "attention core", "sqrt": "segment"}.get(str(config.recompute), "layer")
        lines.append(
            Line("temporaries", f"one {what}, recomputed", ceil(again), "kept terms of it", source, note)
        )
        if most > again:
            lines.append(
                Line(
                    "temporaries",
                    f"gradients, at the {name}",
                    ceil(most - again),
                    "tensors made by its backward",
                    "liveness, Sec. 4.1",
                )
            )
    else:
        lines.append(
            Line(
                "temporaries",
                f"gradients, at the {name}",
                ceil(most),
                "tensors made by its backward",
                "liveness, Sec. 4.1",
                note,
            )
        )
    if config.pp > 1:
        e = config.residual_bytes
        buffer = Fraction(e * config.tokens * config.model.hidden, config.replication)
        lines.append(
            Line(
                "temporaries",
                "receive buffers of the pipeline",
                ceil(2 * buffer),
                f"2 x {e}sbh",
                f"{KORTHIKANTI} App. B",
            )
        )
    lines += _zero3(config, stage)
    return lines


def _loss_formula(config: Config) -> str:
    pieces = " / chunks" if config.loss_kind == "chunked" else ""
    over = "" if config.tp == 1 or config.gather_logits else "/t"
    return f"{loss_moment_bytes(config)}sbv{over}{pieces}"


def _zero3(config: Config, stage: int) -> list[Line]:
    """What fully sharded weights and gradients are gathered into."""
    if config.zero < 3 or config.shards == 1:
        return []
    model = config.model
    if config.pp > 1:
        count = stage_parameters(config, stage)
        size, formula = (config.weight_bytes + 4) * count, f"{config.weight_bytes + 4}Ψ"
        note = "micro-batches of a pipeline share one gather, and one reduction of float32 gradients"
        return [Line("temporaries", "gathered weights and gradients", size, formula, FULLY_SHARD, note)]
    layer = model.layer_matrix_parameters(config.tp) + model.layer_shared_parameters()
    table = -(-model.vocab // config.tp) * model.hidden * (1 if model.tied else 2)
    size = config.weight_bytes * (2 * layer + table)
    note = "a layer in use, one fetched ahead; the root's stay until the next step"
    return [Line("temporaries", "gathered weights", size, "two layers, the embeddings", FULLY_SHARD, note)]


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
            line.kind,
            line.name,
            ceil(line.bytes * share / flying),
            f"{line.formula}, 2 layers",
            source,
            note,
            line.place,
        )
        for line in lines
    ]
