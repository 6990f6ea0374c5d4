"""`estimate`: a configuration -> bytes by pipeline stage, FLOPs, utilisation, traffic."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import ceil
from typing import Any

from lowtide.estimate.adapters import layer_adapters, targets
from lowtide.estimate.config import Config, check_config
from lowtide.estimate.devices import Device
from lowtide.estimate.edges import edge_lines, loss_bytes
from lowtide.estimate.fitted import fitted
from lowtide.estimate.flops import Flops, iteration_flops, utilization
from lowtide.estimate.layer import kept_terms, layer_terms
from lowtide.estimate.lines import Line, Moment, Stage, total
from lowtide.estimate.schedule import layers_in_flight, micro_batches_in_flight
from lowtide.estimate.settings import describe
from lowtide.estimate.speed import StepTime, step_time
from lowtide.estimate.states import host_bytes, model_states, stage_parameters, state_lines
from lowtide.estimate.traffic import Traffic, stage_traffic
from lowtide.estimate.working import at_moments, offload_lines, temporary_lines, update_lines

RESIDUAL = (
    "autocast leaves the residual stream in float32; FSDP2's "
    "MixedPrecisionPolicy(param_dtype=torch.bfloat16) has it in bfloat16: "
    "--dtype mixed with --zero 3 counts that"
)
"""What estimates under autocast should say."""


@dataclass(frozen=True)
class Estimate:
    """What a configuration costs.

    Attributes:
        config: the configuration.
        stages: one rank of each pipeline stage.
        parameters: number of parameters of the whole model.
        flops: FLOPs of one step, of all devices together.
        traffic: bytes that one device of each stage sends in a step.
        host_bytes: host memory for each device, of the stage with the most.
        notes: assumptions, and contradictions in a source.
        time: predicted seconds of a step; ``None`` if no device was named.
    """

    config: Config
    stages: tuple[Stage, ...]
    parameters: int
    flops: Flops
    traffic: tuple[tuple[Traffic, ...], ...]
    host_bytes: int = 0
    notes: tuple[str, ...] = field(default=())
    time: StepTime | None = None

    @property
    def total_bytes(self) -> int:
        """Peak of the device with the largest peak, in bytes."""
        return max(stage.total_bytes for stage in self.stages)

    @property
    def moments(self) -> dict[Moment, int]:
        """Bytes in the loss, in backward and in the update, of the device with the largest peak."""
        return max(self.stages, key=lambda stage: stage.total_bytes).moments

    @property
    def loss(self) -> dict[str, Any]:
        """How the loss is computed: its kind, in words, and bytes a logit at its fullest moment (of a piece's
        logits where they are there piece by piece).
        """
        config = self.config
        return {
            "kind": config.loss_kind, "what": config.loss_form.what,
            "bytes_a_logit": sum(loss_bytes(config)), "pieces": config.chunks,
        }  # fmt: skip

    @property
    def reserved_bytes(self) -> int:
        """Largest reserved memory of a device: the peak and the gaps between the allocator's blocks."""
        return max(reserved(self.config, stage) for stage in self.stages)

    @property
    def reserved_expandable_bytes(self) -> int:
        """The same under ``PYTORCH_ALLOC_CONF=expandable_segments:True``."""
        return max(reserved(self.config, stage, expandable=True) for stage in self.stages)

    @property
    def mean_states_bytes(self) -> float:
        """Weights, gradients and optimizer state of a device on average over the pipeline: what 2205.05198,
        Figure 1 shows.
        """
        config = self.config
        if config.lora:
            kinds = ("weights", "gradients", "optimizer")
            return sum(stage.bytes(kind) for stage in self.stages for kind in kinds) / config.pp
        states = model_states(
            self.parameters, dp=config.shards, zero=config.zero, offload=config.offload_optimizer,
            weight_bytes=config.weight_bytes, gradient_bytes=config.gradient_bytes,
            optimizer_bytes=config.optimizer_bytes, offload_weights=config.offload_weights,
        )  # fmt: skip
        return float(states.total / (config.tp * config.pp))

    @property
    def fits(self) -> bool | None:
        """Whether reserved memory fits ``memory_bytes``; ``None`` without ``memory_bytes``."""
        return None if self.config.memory_bytes is None else self.reserved_bytes <= self.config.memory_bytes

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation, when iteration time and peak rate are known (2205.05198, Section 6.3)."""
        return self._utilization(self.flops.model)

    @property
    def hfu(self) -> float | None:
        """Hardware FLOPs utilisation, which counts recomputation (2205.05198, Equation 8)."""
        return self._utilization(self.flops.hardware)

    def _utilization(self, flops: int) -> float | None:
        seconds, peak = self.config.iteration_seconds, self.config.peak_flops
        return (
            None
            if seconds is None or peak is None
            else utilization(flops, seconds, self.config.devices, peak)
        )

    @property
    def tokens_per_second(self) -> float | None:
        """Predicted tokens a second on each device."""
        config = self.config
        return config.global_batch * config.seq / config.devices / self.time.total if self.time else None

    @property
    def network_bytes(self) -> int:
        """Bytes over the network in a step, of the device that sends most."""
        return max(sum(item.bytes for item in items if item.link != "host") for items in self.traffic)

    @property
    def host_link_bytes(self) -> int:
        """Bytes over the host link in a step, in both directions, of the device that moves most."""
        return max(sum(item.bytes for item in items if item.link == "host") for items in self.traffic)

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "config": dict(describe(self.config)),
            "parameters": self.parameters,
            "active_parameters": self.config.model.active_parameters(),
            "devices": self.config.devices,
            "stages": [
                stage.to_json() | {"traffic": [item.to_json() for item in items]}
                for stage, items in zip(self.stages, self.traffic, strict=True)
            ],
            "total_bytes": self.total_bytes,
            "moments": self.moments,
            "loss": self.loss,
            "reserved_bytes": self.reserved_bytes,
            "reserved_expandable_bytes": self.reserved_expandable_bytes,
            "mean_states_bytes": self.mean_states_bytes,
            "fits": self.fits,
            "model_flops": self.flops.model,
            "hardware_flops": self.flops.hardware,
            "executed_flops": self.flops.executed,
            "mfu": self.mfu,
            "hfu": self.hfu,
            "network_bytes": self.network_bytes,
            "host_link_bytes": self.host_link_bytes,
            "host_bytes": self.host_bytes,
            "predicted_seconds": self.time.total if self.time else None,
            "predicted_tokens_per_second": self.tokens_per_second,
            "notes": list(self.notes),
        }


def reserved(config: Config, stage: Stage, expandable: bool = False) -> int:
    """What the allocator reserves on a device of a stage: the share on top is fitted to runs that print it
    (``efficiency.json``), and larger where gathered weights of many sizes come and go. Expandable segments
    join what is freed, which otherwise leaves blocks that logits do not fit in, until the memory is full.
    """
    gathered = config.zero == 3 and config.shards > 1
    share = 1 + fitted()["reserved"]["gathered" if gathered else "plain"]
    held = ceil(stage.cached_bytes * share)
    if expandable or config.recomputed_share < 1:
        return held
    more = ceil(stage.scattered_bytes * share)
    return max(held, more if config.memory_bytes is None else min(more, int(config.memory_bytes)))


def activation_lines(config: Config, stage: int) -> list[Line]:
    """Everything that autograd keeps on one device of a stage at its fullest moment."""
    flying = layers_in_flight(config, stage)
    lines = [term.line(share * flying) for term, share in kept_terms(config)]
    if config.offload_activations:
        lines = offload_lines(config, lines)
    return [*lines, *edge_lines(config, stage)]


def estimate(config: Config, device: Device | None = None) -> Estimate:
    """Bytes, FLOPs and traffic of a training step, by closed formulas.

    Args:
        config: what is trained, and how.
        device: the accelerator: says how long a step is predicted to take, and what PyTorch keeps there for
            cuBLAS.

    Example:
        >>> from lowtide.estimate import configure, estimate
        >>> found = estimate(
        ...     configure("22b", as_published=True, sequence_parallel=True, recompute="selective"))
        >>> found.stages[0].activations_bytes // 2**20
        10022
        >>> found.stages[0].lines[3].name, found.stages[0].lines[3].source
        ('input of the attention norm', 'arXiv 2205.05198 Sec. 4.1')
    """
    check_config("estimate", config)
    stages = tuple(stage_estimate(config, index, device) for index in range(config.pp))
    return Estimate(
        config=config, stages=stages, parameters=config.model.parameters(), flops=iteration_flops(config),
        traffic=tuple(tuple(stage_traffic(config, index)) for index in range(config.pp)),
        host_bytes=max(all_host_bytes(config, index) for index in range(config.pp)),
        notes=tuple(_notes(config)), time=step_time(config, device) if device is not None else None,
    )  # fmt: skip


def stage_estimate(config: Config, index: int, device: Device | None = None) -> Stage:
    """One device of one pipeline stage; with what PyTorch keeps for products where the device is named."""
    lines = [
        *state_lines(config, index),
        *activation_lines(config, index),
        *temporary_lines(config, index),
        *update_lines(config, index),
    ]
    if device is not None:
        size, source = device.workspaces_bytes, "liveness: CUBLAS_WORKSPACE_CONFIG"
        name, note = "workspaces of cuBLAS", "one for forward's thread, one for backward's"
        lines.append(Line("temporaries", name, size, "2 a device", source, note))
    stage = Stage(
        index=index,
        layers=config.stage_layers,
        parameters=stage_parameters(config, index),
        layers_in_flight=layers_in_flight(config, index),
        micro_batches_in_flight=micro_batches_in_flight(config, index),
        lines=tuple(at_moments(config, index, lines)),
    )
    if config.memory_bytes is None:
        return stage
    return replace(stage, whole_micro_batches=whole_micro_batches(config, stage))


def whole_micro_batches(config: Config, stage: Stage) -> int:
    """How many of a stage's micro-batches in flight can be kept without recomputation in the memory that is
    left (2205.05198, Appendix C).

    All of them where nothing is recomputed and the stage fits, none where it does not fit.
    """
    assert config.memory_bytes is not None
    left = config.memory_bytes - stage.total_bytes
    flying = int(stage.micro_batches_in_flight)
    if left < 0:
        return 0
    saved = config.mean_layer(lambda kind: total(layer_terms(kind))) - sum(
        (term.bytes * share for term, share in kept_terms(config)), Fraction(0)
    )
    return flying if saved <= 0 else min(flying, int(left / (saved * config.stage_layers)))


def all_host_bytes(config: Config, stage: int) -> int:
    """Host memory that one device of a stage takes: offloaded states, and activations."""
    size = host_bytes(config, stage)
    if config.offload_activations:
        layer = sum((term.bytes * share for term, share in kept_terms(config)), Fraction(0))
        size += ceil(layer * layers_in_flight(config, stage))
    return size


def _notes(config: Config) -> list[str]:
    notes = []
    if config.recompute == "selective":
        if config.fused_attention:
            notes.append(
                "selective recomputation of a fused kernel frees its log-sum-exp only: the output "
                "projection keeps the kernel's output"
            )
        notes.append(
            "hardware FLOPs follow 2205.05198, Equation 8, which charges recomputed attention three times "
            "(12Bs²hL); executed FLOPs count what is run (4Bs²hL)"
        )
    if config.gradient_dtype == "auto" and config.gradient_bytes != config.weight_bytes:
        notes.append(
            "gradients are summed in float32 (2205.05198: 18 bytes a parameter); --gradient-dtype bf16 "
            "counts ZeRO's 16"
        )
    if config.dtype == "autocast":
        notes.append(RESIDUAL)
    if config.lora:
        own = ",".join(targets(config.lora_targets, config.model))
        count = int(config.model.layers * config.mean_layer(lambda kind: layer_adapters(kind, tp=1, ep=1)))
        notes.append(
            f"adapters of rank {config.lora} on {own}: {count:,} parameters are trained. With recomputation "
            "the embedding's output has to require gradients (enable_input_require_grads), which takes no "
            "bytes"
        )
    if config.zero and config.shards == 1:
        notes.append(
            f"--zero {config.zero} with --dp 1: there is one data-parallel rank, so it holds everything"
        )
    if config.model.kv_heads < config.tp:
        notes.append(
            f"{config.model.kv_heads} key-value heads on {config.tp} tensor-parallel ranks: each is held by "
            f"{config.tp // config.model.kv_heads}"
        )
    if config.tp > 1 and config.model.vocab % config.tp:
        notes.append(f"the vocabulary of {config.model.vocab} is padded to a multiple of {config.tp}")
    if config.offload_optimizer or config.offload_activations:
        notes.append(
            "PyTorch rounds each pinned block of host memory up to a power of two: up to twice as much is "
            "taken"
        )
    if config.recompute == "full" and config.sequence_parallel:
        notes.append(
            "full recomputation keeps layer inputs split along the sequence: 2sbh/t, where Table 2's last "
            "row is without sequence parallelism"
        )
    return notes
