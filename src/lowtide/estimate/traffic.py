"""Bytes of one device in a step: those that it sends over the network, and those to and from the host.

Collectives are counted as rings send them: an all-reduce of N bytes among n ranks sends 2N(n-1)/n from each,
an all-gather or a reduce-scatter of N bytes in all N(n-1)/n. Sums travel in the tensors' own precision, as
Megatron's do; `lowtide.parallel` makes them in float32 unless it is given ``reduce_dtype=torch.bfloat16``.
Papers that count volumes (1910.02054: 2Ψ, 3Ψ, 12sh) leave the (n-1)/n out.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import Any, Literal

from lowtide.estimate.config import Config
from lowtide.estimate.edges import logit_elements
from lowtide.estimate.layer import kept_terms
from lowtide.estimate.lines import FULLY_SHARD, KORTHIKANTI, ZERO, ZERO_OFFLOAD, total
from lowtide.estimate.states import frozen_bytes, trained_parameters, updated_parameters, weight_shard

Link = Literal["tensor", "context", "expert", "pipeline", "data", "host"]


@dataclass(frozen=True, slots=True)
class Traffic:
    """One kind of communication of one device in a step, such as the all-reduce of gradients.

    Attributes:
        link: the parallel group in which the bytes travel (``tensor``, ``context``, ``expert``, ``pipeline``
            or ``data``), or ``host`` for bytes between the device and the host's memory.
        name: what travels.
        bytes: bytes that the device sends to other ranks in a step. For ``host``, bytes that it sends to the
            host and receives from it.
        formula: the bytes as a formula, in the symbols of arXiv 2205.05198.
        source: the paper or the program that the formula comes from.
    """

    link: Link
    name: str
    bytes: int
    formula: str
    source: str

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {name: getattr(self, name) for name in ("link", "name", "bytes", "formula", "source")}


def _ring(size: Fraction | int, ranks: int) -> Fraction:
    """What a rank sends in an all-gather or reduce-scatter of ``size`` bytes in all."""
    return Fraction(size) * (ranks - 1) / ranks


def stage_traffic(config: Config, stage: int) -> list[Traffic]:
    """All communication of one device of a stage in a step."""
    return [
        *_tensor(config, stage), *_context(config), *_experts(config), *_pipeline(config, stage),
        *_data(config, stage), *_host(config, stage),
    ]  # fmt: skip


def _tensor(config: Config, stage: int) -> list[Traffic]:
    t, n, e = config.tp, config.micro_batches, config.element_bytes
    if t == 1:
        return []
    message = Fraction(e * config.tokens * config.model.hidden)
    one = _ring(message, t)
    layers = config.stage_layers * n
    again = config.recomputed_share * layers
    spared = config.early_share * layers  # the reduction behind the last product
    section = f"{KORTHIKANTI} Sec. 4.2.2"
    if config.sequence_parallel:
        rows = [
            ("gathers and reduce-scatters of the layers", 8 * one * layers, "8 x 2sbh", section),
            ("second gather of the saved shards", 2 * one * layers, "2 x 2sbh", f"{section} (Y in backward)"),
            ("collectives of recomputed layers", one * (4 * again - spared), "4 x 2sbh", section),
        ]
    else:
        twice = one * (4 * again - 2 * spared)
        rows = [
            ("all-reduces of the layers", 8 * one * layers, "4 all-reduces of 2sbh", section),
            ("all-reduces of recomputed layers", twice, "2 all-reduces of 2sbh", f"{ZERO} Sec. 8"),
        ]
    if config.partition_activations:
        count = _ring(Fraction(total(term for term, _ in kept_terms(config)) * t), t) * layers
        rows.append(("gather of the split checkpoints", count, "2sbh", f"{ZERO} Sec. 8 (P_a)"))
    last = stage == config.pp - 1
    ends = 2 * one * n * ((stage == 0) + last)
    rows.append(("embedding and output layer", ends, "2sbh each way", f"{KORTHIKANTI} Sec. 4.3"))
    if config.gather_logits and last:
        logits = _ring(e * logit_elements(config), t) * n
        rows.append(("gather of the logits", logits, f"{e}sbv", "all-gather of what is split"))
    return [Traffic("tensor", name, ceil(size), *told) for name, size, *told in rows if size]


EXCHANGES = {
    "ring": ("keys and values around the ring", "4(c-1)sbkd", "arXiv 2310.01889"),
    "all-gather": ("gathers of keys and values, scatters of their gradients", "4(c-1)sbkd", "2411.01783"),
    "all-to-all": (
        "all-to-alls of queries, keys, values and outputs",
        "2sb(2a+2k)d(c-1)/c",
        "arXiv 2309.14509",
    ),
}


def _context(config: Config) -> list[Traffic]:
    """What context-parallel ranks exchange in forward (again where it is recomputed) and in backward, where
    keys and values travel with their gradients; all-to-all queries and outputs, but no more than a rank has.
    """
    if config.cp == 1:
        return []
    keys, model = config.key_copies * (config.local_kv_width + config.local_value_width), config.model
    once, rounds = (config.cp - 1) * Fraction(keys), 3 + config.recomputed_share
    if config.cp_exchange == "all-to-all":
        wide = keys + Fraction(model.query_width + model.output_width, config.tp)
        once, rounds = _ring(wide, config.cp), 2 + config.recomputed_share + (config.head_chunks > 1)
    size = config.element_bytes * config.tokens * once * rounds * config.stage_layers * config.micro_batches
    name, formula, source = EXCHANGES[config.cp_exchange]
    return [Traffic("context", name, ceil(size), formula, source)]


def _experts(config: Config) -> list[Traffic]:
    """Rows to the ranks of their experts and back, in forward (again where recomputed) and backward."""
    if config.ep == 1:
        return []
    message = config.element_bytes * config.expert_rows * config.model.hidden / config.tp
    layers = config.stage_layers * config.mean_layer(lambda kind: kind.model.experts > 0)
    rounds = 4 + 2 * config.recomputed_share
    size = ceil(_ring(message, config.ep) * rounds * layers * config.micro_batches)
    source = "arXiv 2006.16668 Sec. 3.2"
    return [Traffic("expert", "all-to-alls of the experts' rows", size, "4 x 2sbkh(e-1)/e", source)]


def _pipeline(config: Config, stage: int) -> list[Traffic]:
    if config.pp == 1:
        return []
    message = Fraction(config.residual_bytes * config.tokens * config.model.hidden, config.replication)
    sends = 2 * config.interleave - (1 if stage in (0, config.pp - 1) else 0)
    size = ceil(message * sends * config.micro_batches)
    what, formula = "activations and their gradients between stages", f"{sends}n x 2sbh"
    return [Traffic("pipeline", what, size, formula, "arXiv 2104.04473 Sec. 2.2")]


def _data(config: Config, stage: int) -> list[Traffic]:
    d, n = config.shards, config.micro_batches
    if d == 1:
        return []
    # of what has c copies on d ranks, (c - 1) / c travels: all but the rank's own share of the whole
    count = trained_parameters(config, stage) - Fraction(trained_parameters(config, stage, ep=1), d)
    size = config.gathered_bytes if config.zero == 3 else config.weight_bytes
    gradients, weights = count * config.reduced_bytes, count * size
    if config.zero == 3:
        cast = min(Fraction(1), Fraction(config.gathered_bytes, config.frozen_bytes))
        weights += cast * (frozen_bytes(config, stage) - frozen_bytes(config, stage, ep=1) / d)
    source = f"{ZERO} Sec. 7"
    if config.zero == 3 and config.pp > 1:
        return [
            Traffic("data", "reduce-scatter of gradients", ceil(gradients), "Ψ", FULLY_SHARD),
            Traffic("data", "gather of weights, kept for all micro-batches", ceil(weights), "Ψ", FULLY_SHARD),
        ]
    if config.zero == 0:
        return [Traffic("data", "all-reduce of gradients", ceil(2 * gradients), "2Ψ", source)]
    if config.zero == 1 or config.no_sync:
        scatter = Traffic("data", "reduce-scatter of gradients", ceil(gradients), "Ψ", source)
    else:  # gradients that are split cannot be summed over micro-batches before they are
        scatter = Traffic("data", "reduce-scatters of gradients", ceil(n * gradients), "nΨ", source)
    if config.zero < 3:
        return [scatter, Traffic("data", "gather of weights", ceil(weights), "Ψ", source)]
    return [
        scatter,
        Traffic("data", "gathers of weights, forward and backward", ceil(2 * n * weights), "2nΨ", source),
    ]


def offloaded_bytes(config: Config) -> int:
    """Bytes of activations that a device moves to the host in a step, and back."""
    if not config.offload_activations:
        return 0
    layer = sum((term.bytes * share for term, share in kept_terms(config)), Fraction(0))
    return ceil(2 * layer * config.stage_layers * config.micro_batches)


def _host(config: Config, stage: int) -> list[Traffic]:
    found = []
    if config.offload_optimizer:
        share = Fraction(config.offload_optimizer) * updated_parameters(config, stage)
        source = f"{ZERO_OFFLOAD} Sec. 3"
        # no room on the device to sum them over micro-batches
        down = ceil(share * config.gradient_bytes * config.micro_batches)
        found.append(Traffic("host", "gradients to the host", down, f"{config.gradient_bytes}Mn", source))
        if config.offload_weights:
            name, gathers = "weights from the host, for each gather", 2 * config.micro_batches
            size = ceil(gathers * weight_shard(config, stage))
            found.append(Traffic("host", name, size, f"2n x {config.weight_bytes}M", FULLY_SHARD))
        else:
            up = ceil(share * config.weight_bytes)
            found.append(Traffic("host", "weights from the host", up, f"{config.weight_bytes}M", source))
    if size := offloaded_bytes(config):
        name, source = "activations to and from the host", f"{ZERO} Sec. 8 (P_a+cpu)"
        found.append(Traffic("host", name, size, "2 x what is kept", source))
    return found
