"""How long a step would take: products, attention, pointwise operations, links and the bubble, each at the
efficiency that published runs reach.

seconds = (products / (peak x efficiency) + attention / (peak x its efficiency)
           + passes over the activations and float8 casts / memory bandwidth,
           or where that is longer what the host takes to start it all)
          x (1 + pipeline bubble) x what the slowest stage is slower
          + what tensor parallelism sends / the link that it uses, or where it runs beside products the share
            of it that shows
          + what context parallelism sends, less what attention hides
          + what goes to experts of other ranks and back
          + what pipeline stages send / the slower link they cross, less what compute hides where stages
            interleave
          + what data parallelism sends, less what compute hides
          + the optimizer's reads and writes / memory bandwidth, or the host link and the host's Adam

The efficiencies stand in ``efficiency.json``. ``python -m benchmarks estimate_published`` fits them to some
of the published runs (``tests/estimate/published/runs_*.csv``), and says how far off every run is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from fractions import Fraction
from typing import Any, get_args

from lowtide.estimate.adapters import adapted, adapter_traffic, layer_bytes, unadapted
from lowtide.estimate.config import Config
from lowtide.estimate.devices import DEVICES, Device
from lowtide.estimate.edges import logit_elements, loss_bytes
from lowtide.estimate.fitted import fitted
from lowtide.estimate.flops import (
    adapter_flops,
    attention_flops,
    layer_flops,
    logit_flops,
    recomputed_flops,
    sliced_flops,
    tiled_flops,
)
from lowtide.estimate.layer import kept_terms, layer_terms
from lowtide.estimate.lines import total
from lowtide.estimate.schedule import bubble_share
from lowtide.estimate.states import updated_parameters
from lowtide.estimate.traffic import Link, offloaded_bytes, stage_traffic

HOST_ADAM_BYTES_PER_SECOND = 110e9
"""What the host's Adam reads and writes a second, at 28 bytes a parameter (arXiv 2101.06840, Table 4: 93 to
127 GB/s).
"""

ATTENTION_BACKWARD = 2.5
"""FLOPs of a fused attention kernel's backward over its forward's: it computes the scores again (arXiv
2307.08691, Section 4.1).
"""

_SHORT = 8192
"""Tokens up to which `Efficiency.attention` holds."""

_SOFTMAX = 32
"""A score's softmax, in columns of a head: 16 exponentials a cycle beside 1,024 multiplications (A100)."""

FLOAT8_CAST_BYTES = {"tensorwise": 7, "rowwise": 10, "mxfp8": 6, "nvfp4": 5}
"""What casting an element of bfloat16 moves. A tensor with one scale is read for its largest value, read and
written as one byte, and that read and written once more, transposed, for the product that makes weights'
gradients. Rows and columns have scales of their own: each way reads twice and writes one byte; blocks of a
row or column, which fit in registers, are read once.
"""

ASSUMPTIONS = (
    "products, attention and pointwise operations reach the shares of a device's peaks that published runs "
    "do (lowtide/estimate/efficiency.json); devices without such runs take those of the nearest",
    "tensor-parallel collectives are not hidden without --overlap-tensor; data-parallel ones hide behind the "
    "last micro-batch's backward, ZeRO-3's behind all compute, context-parallel ones behind attention, what "
    "interleaved stages send behind compute; what hides slows compute",
    "tensor-parallel groups stay within a node; causal attention is counted whole",
    "gradients on their way to the host hide behind backward; activations, and the optimizer there, do not, "
    "which runs at "
    f"{HOST_ADAM_BYTES_PER_SECOND / 1e9:.0f} GB/s on the host (arXiv 2101.06840, Table 4)",
    "predicted times within 3 % of each other are ties, which the simpler configuration wins",
)


@dataclass(frozen=True, slots=True)
class Efficiency:
    """What of a device's peaks its operations reach.

    Attributes:
        products: share of the peak FLOP/s in the matrix products.
        attention: the same in a fused attention kernel, whose FLOPs are counted without the causal mask.
        eager_passes, fused_passes: how often an activation goes through memory in a step, at the full
            bandwidth: as separate operations, and where pointwise ones are fused.
        float8: how many times faster the layers' products are in float8, the casts not counted.
        rowwise: share of that speed that products have whose rows and columns are scaled.
        experts: share of ``products`` that experts reach, whose rows are few and uneven.
        flash_3: how many times faster attention is with ``--attention flash-3``, up to 8,192 tokens.
        ceiling: what it nears with longer sequences, where what a kernel does once a row weighs less.
        launch: seconds in which the host starts a layer's forward and backward: less the device cannot take.
        alone: seconds in which an expert whose products are not grouped with others' runs forward and
            backward: on devices without kernels for that, those with adapters.
        turn: seconds of the host for each step besides: batch, loss, clipping, optimizer.
        collective: seconds that each gather and reduction of a fully sharded unit takes of the host.
        links: share of the links' bandwidth that collectives reach.
        interference: share of a hidden collective's time that compute is slowed by.
        exposed: share of a tensor-parallel collective's time that shows though it runs beside products.
        flash_2: PFLOP/s that ``--attention fused`` nears with longer sequences on devices of generations
            after FlashAttention 2, which has Ampere's instructions; 0 where that is unknown.
    """

    products: float
    attention: float
    eager_passes: float
    fused_passes: float
    float8: float
    rowwise: float
    experts: float
    flash_3: float
    ceiling: float
    launch: float
    alone: float
    turn: float
    collective: float
    links: float
    interference: float
    exposed: float
    flash_2: float = 0.0


def efficiencies() -> dict[str, Efficiency]:
    """The fitted efficiencies by device, from ``efficiency.json``.

    >>> 0 < efficiencies()["a100"].products < 1
    True
    """
    data = fitted()
    return {name: Efficiency(**data["common"], **own) for name, own in data["devices"].items()}


@dataclass(frozen=True, slots=True)
class StepTime:
    """Predicted seconds of one optimizer step, by what they go to."""

    products: float
    attention: float
    pointwise: float
    launches: float
    bubble: float
    tensor: float
    context: float
    expert: float
    pipeline: float
    data: float
    optimizer: float
    host: float

    @property
    def total(self) -> float:
        """All of them."""
        return sum(getattr(self, part.name) for part in fields(self))

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Work:
    """What a step does on one device, whatever its efficiency.

    Attributes:
        layers, logits, attention: FLOPs of the layers' products, of the output layer's, and of attention.
        activations: bytes of activations that pointwise operations pass over.
        moved: bytes that the loss and float8 casts move.
        optimizer: bytes that the optimizer reads and writes on the device.
        host_optimizer: seconds of the optimizer on the host.
        offloaded: bytes of activations moved to the host and back.
        sent: bytes sent, by link.
        links: bytes a second of each link.
    """

    config: Config
    device: Device
    layers: float
    logits: float
    attention: float
    activations: float
    moved: float
    optimizer: float
    host_optimizer: float
    offloaded: float
    sent: Mapping[Link, float]
    links: Mapping[str, float]


def step_time(config: Config, device: Device, efficiency: Efficiency | None = None) -> StepTime:
    """Predicted time of a step on devices of one kind.

    Args:
        config: what is run.
        device: on what.
        efficiency: how well; what published runs say of the device where ``None``.

    Example:
        >>> from lowtide.estimate.settings import configure
        >>> from lowtide.estimate.devices import device
        >>> config = configure("llama3-8b", dp=8, zero=3, micro_batch=2, recompute="selective-op")
        >>> tokens = config.global_batch * config.seq / config.devices
        >>> 5000 < tokens / step_time(config, device("h100")).total < 10000
        True
    """
    return priced(step_work(config, device), efficiency or efficiencies()[device.measured])


def step_work(config: Config, device: Device) -> Work:
    """What one device does in a step."""
    layers, logits, attention = _flops(config)
    away = config.offload_optimizer
    parameters = float(updated_parameters(config, 0))
    states = float(config.optimizer_bytes) + config.gradient_bytes + config.weight_bytes
    host_rate = HOST_ADAM_BYTES_PER_SECOND / min(device.node, config.devices)
    return Work(
        config=config, device=device, layers=layers / config.devices, logits=logits / config.devices,
        attention=attention / config.devices, activations=_activation_bytes(config),
        moved=_loss_bytes(config) + _cast_bytes(config) + _frozen_bytes(config),
        optimizer=(1 - away) * parameters * 2 * states, host_optimizer=away * parameters * 28 / host_rate,
        offloaded=offloaded_bytes(config),
        sent=_sent(config), links=_links(config, device),
    )  # fmt: skip


def priced(work: Work, known: Efficiency) -> StepTime:
    """The seconds that the work takes at an efficiency."""
    config, device = work.config, work.device
    rate = device.flops * known.products
    logits = work.logits / rate
    layers = work.layers * (1 + _experts_share(config) * (1 / known.experts - 1))
    gain = known.float8 * (known.rowwise if config.scaling == "rowwise" else 1.0)
    products = layers / (gain if config.float8 else 1.0) / rate + logits
    width, short = config.model.head_width, min(1.0, _SHORT / config.seq)
    own = known.flash_2 * 1e15 / DEVICES[device.measured].flops or known.attention
    slower = (1 + _SOFTMAX / width) / (1 + _SOFTMAX / 128)
    kernel = {
        "unfused": known.products,
        "flash-1": known.attention / slower,
        "fused": _near(own, known.attention, short) / slower,
        "flash-3": _near(known.ceiling, known.attention * known.flash_3, short) / slower,
    }
    attention = work.attention / (device.flops * kernel[config.attention])
    passes = known.fused_passes if config.compile else known.eager_passes
    pointwise = (work.activations * passes + work.moved) / device.memory_bandwidth
    starts = float(1 + config.recomputed_share / 3) * config.stage_layers * config.micro_batches
    busy = products + attention + pointwise
    launches = max(0.0, known.launch * starts - busy)
    turn = max(0.0, known.launch * starts + known.turn - busy) - launches
    launches += known.alone * starts * _lone_experts(config, device)
    compute = busy + launches
    slowest = compute + (config.pp - 1) * logits  # the others wait for the stage with the output layer
    sent = {
        name: size / (work.links[name] * known.links) for name, size in work.sent.items() if name != "host"
    }
    return StepTime(
        products=products, attention=attention, pointwise=pointwise, launches=launches + turn,
        bubble=slowest * float(1 + bubble_share(config)) - compute,
        tensor=sent["tensor"] * (known.exposed if config.overlap_tensor else 1.0), context=sent["context"]
        if config.cp_exchange == "all-to-all" else max(0.0, sent["context"] - attention),
        expert=sent["expert"],
        pipeline=_beside(sent["pipeline"], compute if config.interleave > 1 else 0.0, known),
        data=_beside(sent["data"], compute * _data_cover(config), known)
        + known.collective * _collectives(config),
        optimizer=work.optimizer / device.memory_bandwidth,
        host=max(0.0, (work.sent["host"] - work.offloaded) / device.host_bandwidth - compute * 2 / 3)
        + work.host_optimizer + work.offloaded / (device.host_bandwidth * known.links),
    )  # fmt: skip


def _near(ceiling: float, usual: float, short: float) -> float:
    """Share of the peak that a kernel reaches: what it does once a row weighs ``short`` of what it usually
    does.
    """
    return 1 / (1 / ceiling + max(0.0, 1 / usual - 1 / ceiling) * short)


def _data_cover(config: Config) -> float:
    """Share of a step's compute that data-parallel collectives run beside: all of it where every micro-batch
    gathers weights, one micro-batch's where a pipeline gathers them once, else the last one's backward.
    """
    if config.zero == 3:
        return 1.0 if config.pp == 1 else 1 / config.micro_batches
    return 2 / 3 / config.micro_batches


def _collectives(config: Config) -> int:
    """Gathers, forward and backward, and reductions of a step's fully sharded layers, and adapters, each of
    which is sharded by itself: FSDP 1 wraps what is trained, FSDP 2 goes parameter by parameter.
    """
    if config.zero < 3:
        return 0
    units = (config.shards > 1) + (2 * len(adapted(config)) if config.lora else 0)
    return 3 * units * config.stage_layers * (config.micro_batches if config.pp == 1 else 1)


def _beside(seconds: float, cover: float, known: Efficiency) -> float:
    """What a collective of so many seconds adds to a step that can hide ``cover`` seconds of it."""
    return max(0.0, seconds - cover) + known.interference * min(seconds, cover)


def _flops(config: Config) -> tuple[float, float, float]:
    """FLOPs of all devices in the layers' products, in the output layer, and in attention as its kernel runs
    it.
    """
    batch, layers = config.global_batch, config.model.layers
    core = attention_flops(config, batch) * layers
    again = config.recomputed_share + (1 if config.recompute == "selective" else 0)
    linear = (2.0 if config.lora else 3.0) * (layers * layer_flops(config, batch) - core)
    linear += 3.0 * layers * adapter_flops(config, batch)
    linear += recomputed_flops(config, batch) - float(core * again) + tiled_flops(config, batch)
    linear += sliced_flops(config, batch)
    passes = 3 + config.loss_form.again - (config.lora > 0)  # a frozen output layer has no gradient
    logits = logit_flops(config, batch) * passes
    backward = ATTENTION_BACKWARD if config.fused_attention else 2
    return linear, logits, float(core * (1 + again)) + core * backward


def _experts_share(config: Config) -> float:
    """Share of the layers' products that experts do."""

    def done(least: int) -> Fraction:
        return config.mean_layer(
            lambda kind: sum(one.active for one in kind.model.matrices().values() if one.copies > least)
        )

    return float(done(1) / done(0)) if config.model.experts else 0.0


def _lone_experts(config: Config, device: Device) -> float:
    """Experts of a layer on one rank that run one after the other, on average over the layers."""
    if device.grouped or not config.lora or all(one.copies == 1 for one in adapted(config)):
        return 0.0
    return float(config.mean_layer(lambda kind: kind.model.experts)) / config.ep


def _activation_bytes(config: Config) -> float:
    """Bytes of the layers' activations in a step; of what is recomputed one half more, its forward."""
    if config.lora:  # pointwise operations pass over what nothing keeps, too
        config = unadapted(config)
    layer = config.mean_layer(lambda kind: total(layer_terms(kind)))
    evicted = layer - sum((term.bytes * share for term, share in kept_terms(config)), Fraction(0))
    return float(layer + max(evicted, Fraction(0)) / 2) * config.stage_layers * config.micro_batches


def _loss_bytes(config: Config) -> float:
    """Bytes that the loss moves in a step."""
    kept, above = loss_bytes(config)
    if config.loss_form.pieces:
        kept = 4
    moved = config.loss_form.moved or 2 * (kept + above)
    return float(logit_elements(config)) * moved * config.micro_batches


def _frozen_bytes(config: Config) -> float:
    """Bytes that adapters move, and that are moved to cast quantised weights back: in forward, where it runs
    again, and in backward.
    """
    if not config.lora:
        return 0.0
    moved = config.mean_layer(adapter_traffic)
    if config.quantize != "none":
        whole = config.element_bytes * config.mean_layer(_matrices)
        moved += (2 + config.recomputed_share) * (config.mean_layer(layer_bytes) + whole)
    return float(moved * config.stage_layers * config.micro_batches)


def _cast_bytes(config: Config) -> float:
    """Bytes that are moved to cast inputs, output gradients and weights of the layers' products to float8.
    Inputs are cast again where they are recomputed, weights in every micro-batch.
    """
    if not config.float8:
        return 0.0
    again = {"selective-op": 0.5}.get(str(config.recompute), float(config.recomputed_share))
    return (
        FLOAT8_CAST_BYTES[config.scaling]
        * float(config.mean_layer(lambda kind: _cast_elements(kind, again)))
        * (config.stage_layers * config.micro_batches)
    )


def _cast_elements(config: Config, again: float) -> float:
    """Elements of one layer that are cast."""
    model, t = config.model, config.tp
    queries, inner = model.output_width / t, float(config.inner_elements / config.tokens)
    inputs = (2 * model.hidden + queries + inner) * (1 + again)
    keys = config.local_kv_width + config.local_value_width
    outputs = queries + keys + (model.mlp_matrices - 1) * inner + 2 * model.hidden
    return config.tokens * (inputs + outputs) + _matrices(config)


def _matrices(config: Config) -> int:
    """Elements of one layer's matrices on one rank."""
    return config.model.layer_weight_elements(config.tp, config.ep)


def _sent(config: Config) -> dict[Link, float]:
    """Bytes that the busier of the first and the last stage's devices sends, by link."""
    found: dict[Link, float] = dict.fromkeys(get_args(Link), 0.0)
    for stage in {0, config.pp - 1}:
        here: dict[Link, float] = dict.fromkeys(found, 0.0)
        for item in stage_traffic(config, stage):
            here[item.link] += item.bytes
        found = {name: max(found[name], size) for name, size in here.items()}
    return found


def _links(config: Config, device: Device) -> dict[str, float]:
    """Bytes a second that each kind of group has for one device.

    Ranks are numbered tensor first, then context and data, then pipeline. Data-parallel ranks in one node
    share its network cards: a ring through all of them crosses the network once for all.
    """
    node, network = device.node_bandwidth, device.network_bandwidth
    inside = config.tp * config.shards <= device.node
    together = max(1, min(config.shards, device.node // config.tp))
    return {
        "tensor": node if config.tp <= device.node else network,
        "context": node if config.tp * config.cp <= device.node else network,
        "expert": node if config.tp * config.ep <= device.node else network,
        "pipeline": node if config.devices <= device.node else network,
        "data": node if inside else min(node, together * network),
    }
