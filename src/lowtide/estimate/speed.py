"""How long a step would take: a plain model of compute, links and bubble, calibrated on published iteration
times.

seconds = (FLOPs that are run / (devices x peak x `EFFICIENCY`) + `PASSES` x bytes of activations / memory
bandwidth) x (1 + pipeline bubble)
          + what tensor parallelism sends / the link inside a node
          + what pipeline stages send / the slower link they cross
          + what data parallelism sends, less what the last backward hides
          + the optimizer's reads and writes / memory bandwidth, or the host link and the host's Adam where it
          is offloaded

It ranks configurations; it does not promise seconds. `EFFICIENCY` is the one fitted number:
`benchmarks/estimate_speed.py` finds it from the eight iteration times of arXiv 2205.05198, Table 5, and says
how far off each is.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from lowtide.estimate.config import Config
from lowtide.estimate.devices import Device
from lowtide.estimate.flops import iteration_flops, recomputed_layers
from lowtide.estimate.layer import layer_terms
from lowtide.estimate.lines import total
from lowtide.estimate.schedule import bubble_share
from lowtide.estimate.states import stage_parameters
from lowtide.estimate.traffic import stage_traffic

EFFICIENCY = 0.659
"""Share of the peak rate that a device's own operations reach, between collectives."""

PASSES = 4
"""How often an activation is written or read in a step, products not counted: written and read in forward,
read and its gradient written in backward. A recomputed one is written and read once more."""

HOST_ADAM_BYTES_PER_SECOND = 110e9
"""What the host's Adam reads and writes a second, at 28 bytes a parameter (arXiv 2101.06840, Table 4: 93 to
127 GB/s).
"""

ASSUMPTIONS = (
    f"a device's operations reach {100 * EFFICIENCY:.1f} % of its peak (fitted to the eight iteration times "
    "of arXiv 2205.05198, Table 5)",
    "tensor-parallel collectives are not hidden; data-parallel ones hide behind the last micro-batch's "
    "backward, ZeRO-3's behind all compute",
    "tensor-parallel groups stay within a node; causal attention is counted whole",
    f"activations are written and read {PASSES} times at the memory's full bandwidth, on top of the products",
    "what goes to the host hides behind backward; the optimizer there does not, and runs at "
    f"{HOST_ADAM_BYTES_PER_SECOND / 1e9:.0f} GB/s on the host (arXiv 2101.06840, Table 4)",
    "predicted times within 3 % of each other are ties, which the simpler configuration wins",
)


@dataclass(frozen=True, slots=True)
class StepTime:
    """Predicted seconds of one optimizer step, by what they go to."""

    compute: float
    bubble: float
    tensor: float
    pipeline: float
    data: float
    optimizer: float
    host: float

    @property
    def total(self) -> float:
        """All of them."""
        return sum(getattr(self, part.name) for part in fields(self))


def step_time(config: Config, device: Device, efficiency: float = EFFICIENCY) -> StepTime:
    """Predicted time of a step on devices of one kind.

    Example:
        >>> from lowtide.estimate.config import configure
        >>> from lowtide.estimate.devices import device
        >>> config = configure("175b", as_published=True, sequence_parallel=True, recompute="selective")
        >>> round(step_time(config, device("a100")).total)  # Table 5 measured 13.75 s
        13
    """
    flops = iteration_flops(config)
    compute = flops.executed / (config.devices * device.flops * efficiency)
    activations = (
        float(total(layer_terms(config))) * config.micro_batches / config.pp / device.memory_bandwidth
    )
    compute += activations * (PASSES * config.model.layers + 2 * float(recomputed_layers(config)))
    sent = [0.0] * 4
    for stage in {0, config.pp - 1}:
        by_link = dict.fromkeys(("tensor", "pipeline", "data", "host"), 0.0)
        for item in stage_traffic(config, stage):
            by_link[item.link] += item.bytes
        sent = [max(a, b) for a, b in zip(sent, by_link.values(), strict=True)]
    tensor, pipeline, data, host = sent
    inside = config.tp * config.pp * config.dp <= device.node
    between = device.node_bandwidth if inside else device.network_bandwidth
    hidden = compute if config.zero == 3 else compute * 2 / 3 / config.micro_batches
    parameters = stage_parameters(config, 0) / (config.dp if config.zero else 1)
    away = config.offload_optimizer
    states = config.optimizer_bytes + config.gradient_bytes + config.weight_bytes
    on_host = (
        away * parameters * 28 / (HOST_ADAM_BYTES_PER_SECOND / min(device.node, config.devices))
        if away
        else 0.0
    )
    return StepTime(
        compute=compute,
        bubble=compute * float(bubble_share(config)),
        tensor=tensor / (device.node_bandwidth if config.tp <= device.node else device.network_bandwidth),
        pipeline=pipeline / between,
        data=max(0.0, data / between - hidden),
        optimizer=(1 - away) * parameters * 2 * states / device.memory_bandwidth,
        host=max(0.0, host / device.host_bandwidth - compute * 2 / 3) + on_host,
    )
