"""How long a step would take: products, attention, pointwise operations, links and the bubble, each at the
efficiency that published runs reach.

seconds = (products / (peak x efficiency) + attention / (peak x its efficiency)
           + passes over the activations / memory bandwidth) x (1 + pipeline bubble) x what the slowest stage
           is slower
          + what tensor parallelism sends / the link that it uses
          + what context parallelism sends, less what attention hides
          + what pipeline stages send / the slower link they cross
          + what data parallelism sends, less what compute hides
          + the optimizer's reads and writes / memory bandwidth, or the host link and the host's Adam

The efficiencies stand in ``efficiency.json``. ``python -m benchmarks estimate_published`` fits them to some
of the published runs (``tests/estimate/published/runs_*.csv``), and says how far off every run is.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from fractions import Fraction
from typing import Any, get_args

from lowtide.estimate.config import Config
from lowtide.estimate.devices import Device
from lowtide.estimate.edges import logit_elements
from lowtide.estimate.fitted import fitted
from lowtide.estimate.flops import (
    attention_flops,
    iteration_flops,
    layer_flops,
    logit_flops,
    recomputed_flops,
)
from lowtide.estimate.layer import kept_terms, layer_terms
from lowtide.estimate.lines import total
from lowtide.estimate.schedule import bubble_share
from lowtide.estimate.states import stage_parameters
from lowtide.estimate.traffic import Link, stage_traffic
from lowtide.estimate.working import loss_moment_bytes

HOST_ADAM_BYTES_PER_SECOND = 110e9
"""What the host's Adam reads and writes a second, at 28 bytes a parameter (arXiv 2101.06840, Table 4: 93 to
127 GB/s).
"""

ASSUMPTIONS = (
    "products, attention and pointwise operations reach the shares of a device's peaks that published runs "
    "do (lowtide/estimate/efficiency.json); devices without such runs take those of the nearest",
    "tensor-parallel collectives are not hidden; data-parallel ones hide behind the last micro-batch's "
    "backward, ZeRO-3's behind all compute, context-parallel ones behind attention",
    "tensor-parallel groups stay within a node; causal attention is counted whole",
    "what goes to the host hides behind backward; the optimizer there does not, and runs at "
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
        float8: how many times faster the layers' products are in float8.
        links: share of the links' bandwidth that collectives reach.
        interference: share of a hidden collective's time that compute is slowed by.
    """

    products: float
    attention: float
    eager_passes: float
    fused_passes: float
    float8: float
    links: float
    interference: float


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
    bubble: float
    tensor: float
    context: float
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


def step_time(config: Config, device: Device, efficiency: Efficiency | None = None) -> StepTime:
    """Predicted time of a step on devices of one kind.

    Args:
        config: what is run.
        device: on what.
        efficiency: how well; what published runs say of the device where ``None``.

    Example:
        >>> from lowtide.estimate.config import configure
        >>> from lowtide.estimate.devices import device
        >>> config = configure("llama3-8b", dp=8, zero=3, micro_batch=2, recompute="selective-op")
        >>> tokens = config.global_batch * config.seq / config.devices
        >>> 5000 < tokens / step_time(config, device("h100")).total < 10000
        True
    """
    known = efficiency or efficiencies()[device.measured]
    products, attention = _product_seconds(config, device, known)
    pointwise = _pointwise_bytes(config, known) / device.memory_bandwidth
    compute = products + attention + pointwise
    waiting = float((1 + bubble_share(config)) * _slowest_stage(config) - 1)
    sent = _sent(config)
    links = {name: bandwidth * known.links for name, bandwidth in _links(config, device).items()}
    data = sent["data"] / links["data"]
    cover = compute if config.zero == 3 else compute * 2 / 3 / config.micro_batches
    away, parameters = (
        config.offload_optimizer,
        stage_parameters(config, 0) / (config.shards if config.zero else 1),
    )
    states = config.optimizer_bytes + config.gradient_bytes + config.weight_bytes
    host_rate = HOST_ADAM_BYTES_PER_SECOND / min(device.node, config.devices)
    return StepTime(
        products=products,
        attention=attention,
        pointwise=pointwise,
        bubble=compute * waiting,
        tensor=sent["tensor"] / links["tensor"],
        context=max(0.0, sent["context"] / links["context"] - attention),
        pipeline=sent["pipeline"] / links["pipeline"],
        data=max(0.0, data - cover) + known.interference * min(data, cover),
        optimizer=(1 - away) * parameters * 2 * states / device.memory_bandwidth,
        host=max(0.0, sent["host"] / device.host_bandwidth - compute * 2 / 3)
        + away * parameters * 28 / host_rate,
    )


def _product_seconds(config: Config, device: Device, known: Efficiency) -> tuple[float, float]:
    """Seconds in products and in attention on each device."""
    batch, layers = config.global_batch, config.model.layers
    flops = iteration_flops(config)
    core = attention_flops(config, batch)
    again = config.recomputed_share + (1 if config.recompute == "selective" else 0)
    attention = float(core * layers * (3 + again))
    linear = 3.0 * layers * (layer_flops(config, batch) - core) + recomputed_flops(config, batch)
    linear -= float(core * layers * again)
    logits = flops.executed - linear - attention
    peak = config.devices * device.flops
    attention_share = known.attention if config.attention == "fused" else known.products
    faster = known.float8 if config.float8 else 1.0
    return (linear / faster + logits) / (peak * known.products), attention / (peak * attention_share)


def _slowest_stage(config: Config) -> Fraction:
    """FLOPs of the stage with the output layer over those of the mean stage: the others wait for it."""
    layers, logits = config.model.layers * layer_flops(config, 1), logit_flops(config, 1)
    return Fraction(layers + config.pp * logits, layers + logits)


def _pointwise_bytes(config: Config, known: Efficiency) -> float:
    """Bytes that operations other than products move through a device's memory in a step."""
    layer = total(layer_terms(config))
    evicted = layer - sum((term.bytes * share for term, share in kept_terms(config)), Fraction(0))
    passes = known.fused_passes if config.compile else known.eager_passes
    layers = float(layer + max(evicted, Fraction(0)) / 2) * passes * config.stage_layers
    kept = {"compiled": config.element_bytes}.get(config.loss_kind, 4)
    loss = 2 * float(logit_elements(config)) * (kept + loss_moment_bytes(config))
    return (layers + loss) * config.micro_batches


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
        "pipeline": node if config.devices <= device.node else network,
        "data": node if inside else min(node, together * network),
    }
