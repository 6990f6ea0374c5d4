"""Weights, gradients and optimizer state: on one device under tensor and pipeline parallelism, ZeRO (arXiv
1910.02054) and ZeRO-Offload (arXiv 2101.06840).
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import ceil, inf
from numbers import Real

from lowtide.errors import expect
from lowtide.estimate.adapters import LORA, QLORA, adapted, layer_adapters, layer_bytes
from lowtide.estimate.config import Config
from lowtide.estimate.errors import EstimateError
from lowtide.estimate.lines import FULLY_SHARD, ZERO, ZERO_OFFLOAD, Line
from lowtide.estimate.optimizers import OPTIMIZERS

FLAT = "torch.distributed.fsdp.FullyShardedDataParallel, use_orig_params"


def layer_parameters(config: Config, ep: int = 0) -> Fraction:
    """Parameters of one layer on one device (of so many expert-parallel ones, where given), on average over
    the kinds of layers.
    """
    t, ep = config.tp, ep or config.ep
    return config.mean_layer(
        lambda kind: kind.model.layer_matrix_parameters(t, ep) + kind.model.layer_shared_parameters(ep)
    )


def edge_parameters(config: Config, stage: int) -> int:
    """Parameters on one device of a pipeline stage that belong to no layer.

    The first stage holds the embedding, the last the final norm and the output layer, which is a copy of the
    embedding where they are tied and the pipeline has more than one stage. The vocabulary is split over the
    tensor-parallel ranks (rounded up), learned positions are not.
    """
    model, count = config.model, 0
    table = -(-model.vocab // config.tp) * model.hidden
    first, last = stage == 0, stage == config.pp - 1
    if first:
        count += table + (model.sequence * model.hidden if model.positions == "learned" else 0)
    if last:
        count += model.norm_vectors * model.hidden + model.more
        if not (model.tied and first):
            count += table
    return count


def stage_parameters(config: Config, stage: int, ep: int = 0) -> int:
    """Parameters on one device of a pipeline stage, before ZeRO splits them (with so many expert-parallel
    ranks, where given: 1 counts what ZeRO splits among all).
    """
    return int(config.stage_layers * layer_parameters(config, ep)) + edge_parameters(config, stage)


def trained_parameters(config: Config, stage: int, ep: int = 0) -> int:
    """Parameters on one device of a stage that the optimizer updates, before ZeRO splits them."""
    if config.lora:
        return int(config.stage_layers * config.mean_layer(lambda kind: layer_adapters(kind, ep=ep)))
    return stage_parameters(config, stage, ep)


def updated_parameters(config: Config, stage: int) -> Fraction:
    """Parameters that one device of a stage updates: its share, where ZeRO splits the optimizer."""
    if config.zero:
        return Fraction(trained_parameters(config, stage, ep=1), config.shards)
    return Fraction(trained_parameters(config, stage))


def frozen_bytes(config: Config, stage: int, ep: int = 0) -> Fraction:
    """Bytes of the weights on one device of a stage that are not trained, before ZeRO splits them."""
    if not config.lora:
        return Fraction(0)
    layers = config.stage_layers * config.mean_layer(lambda kind: layer_bytes(kind, ep))
    return layers + config.frozen_bytes * edge_parameters(config, stage)


def first_gradients(config: Config, stage: int) -> Fraction:
    """Share of a stage's gradients that exist as backward begins: of the output layer and of one layer; with
    the optimizer in backward, of the largest matrix alone.
    """
    model, t = config.model, config.tp
    table = -(-model.vocab // t) * model.hidden if stage == config.pp - 1 else 0
    layer, ranks = layer_parameters(config), (t, config.ep)
    if config.lora:
        table, layer = 0, config.mean_layer(layer_adapters)
    if config.optimizer_in_backward and config.lora:
        found = config.lora * max(one.copies * max(one.inputs, one.outputs) for one in adapted(config))
    elif config.optimizer_in_backward:
        found = max(table, *(one.elements for one in model.matrices(*ranks).values()))
    else:
        found = table + layer
    return min(Fraction(1), Fraction(found) / trained_parameters(config, stage))


@dataclass(frozen=True, slots=True)
class ModelStates:
    """Bytes of weights, gradients and optimizer state on one device."""

    weights: Fraction
    gradients: Fraction
    optimizer: Fraction

    @property
    def total(self) -> Fraction:
        """All of them."""
        return self.weights + self.gradients + self.optimizer


def model_states(
    parameters: int | float,
    *,
    dp: int = 1,
    zero: int = 0,
    offload: float = 0.0,
    weight_bytes: int = 2,
    gradient_bytes: int = 2,
    optimizer_bytes: int | Fraction = 12,
    no_sync: bool = False,
    whole: int | float | None = None,
    offload_weights: bool = False,
) -> ModelStates:
    """Bytes of the model states of ``parameters`` parameters (Psi) on each of ``dp`` devices (N_d).

    ZeRO (1910.02054, Figure 1): nothing split 16 Psi; stage 1 (P_os) 4 Psi + 12 Psi/N_d; stage 2 (P_os+g) 2
        Psi + 14 Psi/N_d; stage 3
    (P_os+g+p) 16 Psi/N_d. ZeRO-Offload (2101.06840, Table 1): of the offloaded fraction the gradients and the
    optimizer leave the device, 16 M becoming 2 M. With ``no_sync`` gradients are not split. ``whole`` are the
    parameters that are split, where each device has only its experts' of ``parameters``. With
    ``offload_weights`` no weights stay on the device.

    >>> float(model_states(7.5e9, dp=64, zero=2).total)
    16640625000.0
    >>> float(model_states(1e9, offload=1.0).total)
    2000000000.0
    """
    number = isinstance(parameters, Real) and 0 < parameters < inf
    expect(number, "model_states(parameters=)", parameters, "a number above 0", EstimateError)
    if dp < 1 or zero not in (0, 1, 2, 3) or not 0 <= offload <= 1:
        raise EstimateError(
            f"dp={dp}, zero={zero}, offload={offload}: dp of at least 1, zero from 0 to 3 and offload from 0 "
            "to 1 are needed"
        )
    count, stays = Fraction(parameters), 1 - Fraction(offload)
    split = Fraction(parameters if whole is None else whole) / dp
    return ModelStates(
        weights=weight_bytes * (Fraction(0) if offload_weights else split if zero >= 3 else count),
        gradients=gradient_bytes * stays * (split if zero >= 2 and not no_sync else count),
        optimizer=optimizer_bytes * stays * (split if zero >= 1 else count),
    )


def state_lines(config: Config, stage: int) -> list[Line]:
    """The lines of one device of a stage."""
    count = trained_parameters(config, stage)
    weight, optimizer = config.weight_bytes, config.optimizer_bytes
    gradient = config.reduced_bytes if config.no_sync else config.gradient_bytes
    offload, zero = config.offload_optimizer, config.zero
    states = model_states(
        count, dp=config.shards, zero=zero, offload=offload, weight_bytes=weight, gradient_bytes=gradient,
        optimizer_bytes=optimizer, no_sync=config.no_sync, whole=trained_parameters(config, stage, ep=1),
        offload_weights=config.offload_weights,
    )  # fmt: skip
    figure = f"{ZERO} Fig. 1"
    plain = f"{ZERO} Sec. 3.1" if gradient == weight else "arXiv 2205.05198 Fig. 1"
    host = f" x (1 - {offload:g})" if offload else ""
    away = (
        f"; the rest on the host: {ZERO_OFFLOAD} Table 1"
        + (", split as in ZeRO-Offload++ (Twin-Flow)" if 0 < offload < 1 else "")
        if offload
        else ""
    )
    frozen = []
    if config.lora:
        split = frozen_bytes(config, stage, ep=1) / config.shards
        size = 0 if config.offload_weights else ceil(split if zero >= 3 else frozen_bytes(config, stage))
        kind = "" if config.quantize == "none" else f", the layers' matrices in {config.quantize}"
        formula = "frozen" + ("/d" if zero >= 3 else "")
        source = LORA if config.quantize == "none" else QLORA
        whole = stage_parameters(config, stage)
        note = f"{whole:,} parameters on this device"
        frozen = [Line("weights", f"frozen weights{kind}", size, formula, source, note)]
    shared = []
    if config.flat_parameters:
        size = ceil(frozen_bytes(config, stage, ep=1) / config.shards)
        note = "of the flat parameters that adapters share; no optimizer reads them, and they stay"
        shared = [Line("gradients", "gradients of the frozen weights", size, "frozen/d", FLAT, note)]
    parts = "master weights and " if weight < 4 and config.dtype != "bf16-true" else ""
    name = "adapters" if config.lora else "weights"
    return [
        *frozen,
        Line("weights", name, ceil(states.weights), f"{weight}Ψ{'/d' if zero >= 3 else ''}",
            figure if zero >= 3 else plain, _count(count)),
        Line(
            "gradients", "gradients", ceil(states.gradients),
            f"{gradient}Ψ{host}{'/d' if zero >= 2 and not config.no_sync else ''}",
            (FULLY_SHARD if config.no_sync else figure if zero >= 2 else plain) + away,
            "whole until the last micro-batch (--no-sync)" if config.no_sync else "",
        ),
        Line(
            "optimizer", f"{parts}{config.optimizer} state", ceil(states.optimizer),
            f"{float(optimizer):.4g}Ψ{host}{'/d' if zero >= 1 else ''}",
            (figure if zero >= 1 else plain) + away,
        ),
        *shared,
    ]  # fmt: skip


def host_bytes(config: Config, stage: int) -> int:
    """Host memory that one device's share of the offloaded states takes: optimizer state and gradients
    (2101.06840, Table 1: 14 M), and weights that are offloaded; of a paged optimizer all of its state.
    """
    count = updated_parameters(config, stage)
    away = Fraction(config.offload_optimizer)
    paged = (1 - away) * config.optimizer_bytes if OPTIMIZERS[config.optimizer].paged else 0
    states = count * (away * (config.optimizer_bytes + config.gradient_bytes) + paged)
    return ceil(states + (weight_shard(config, stage) if config.offload_weights else 0))


def weight_shard(config: Config, stage: int) -> Fraction:
    """Bytes of weights that one device has to itself where ZeRO 3 splits them."""
    trained = Fraction(config.weight_bytes * trained_parameters(config, stage, ep=1))
    return (trained + frozen_bytes(config, stage, ep=1)) / config.shards


def _count(count: int) -> str:
    return f"Ψ = {count:,} parameters on this device"
