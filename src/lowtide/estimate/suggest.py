"""`suggest`: which parallel sizes, micro-batch, recomputation and offload fit a memory, in the order of
predicted time and simplicity.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import log, log1p
from typing import Any

from lowtide.errors import expect, is_count
from lowtide.estimate.config import Config, flag
from lowtide.estimate.devices import Device
from lowtide.estimate.errors import EstimateError
from lowtide.estimate.frameworks import Framework, beyond, framework
from lowtide.estimate.lines import Stage
from lowtide.estimate.presets import preset_name
from lowtide.estimate.settings import SHAPE_SETTINGS, configure
from lowtide.estimate.shape import check_size
from lowtide.estimate.speed import StepTime, step_time
from lowtide.estimate.states import host_bytes
from lowtide.estimate.total import reserved, stage_estimate

RESERVE = 0.04
"""Share of a device's memory left for the driver's context and communication buffers: 3 GiB of 80."""
TIE = 0.03
"""Predicted times this close to each other are taken for equal."""
ORDER = (
    f"the fastest predicted first; in steps of {TIE:.0%} times count as equal, and there the simpler goes "
    "first: without offload, then without a pipeline, then without recomputation and ZeRO 3"
)
"""What `Suggestions.best` goes by, in words."""
STEP_TOKENS = 1 << 22
"""Tokens in a step where no global batch is given."""


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A configuration and what it is predicted to need.

    Attributes:
        config: the configuration.
        total_bytes: peak of the device that needs most.
        reserved_bytes: what PyTorch's allocator holds for it: what has to fit.
        host_bytes: host memory that all of a node's devices take for what is offloaded.
        command: what runs it, where a framework was chosen.
        time: predicted seconds of a step.
        settings: what was given beside the sizes and ways that vary, by name.
    """

    config: Config
    total_bytes: int
    reserved_bytes: int
    time: StepTime
    host_bytes: int = 0
    command: str = ""
    settings: tuple[tuple[str, Any], ...] = ()

    @property
    def tokens_per_second(self) -> float:
        """Tokens that all devices work through in a second."""
        return self.config.global_batch * self.config.seq / self.time.total

    def flags(self) -> str:
        """The flags of ``lowtide estimate`` that say the same, the model left out."""
        config = self.config
        parts = [
            f"--seq {config.seq}",
            f"--micro-batch {config.micro_batch}",
            f"--global-batch {config.global_batch}",
        ]
        for name in ("tp", "pp", "interleave", "dp", "zero"):
            value = getattr(config, name)
            if value > (0 if name == "zero" else 1):
                parts.append(f"--{name} {value}")
        parts += [flag(name) for name in ("sequence_parallel", "keep_gathered") if getattr(config, name)]
        if config.recompute != "none":
            parts.append(f"--recompute {config.recompute}")
        if config.loss != "auto":
            parts.append(f"--loss {config.loss}")
        if config.offload_optimizer:
            parts.append(f"--offload-optimizer {config.offload_optimizer:g}")
        parts += [f"{flag(name)} {value}" for name, value in self.settings if not isinstance(value, bool)]
        parts += [flag(name) for name, value in self.settings if value is True]
        return " ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        config = self.config
        names = (
            "tp", "sequence_parallel", "pp", "interleave", "dp", "zero", "seq", "micro_batch",
            "global_batch", "recompute", "loss",
            "offload_optimizer",
        )  # fmt: skip
        return {
            **{name: getattr(config, name) for name in names},
            "total_bytes": self.total_bytes,
            "reserved_bytes": self.reserved_bytes,
            "host_bytes": self.host_bytes,
            "seconds": self.time.total,
            "seconds_by_part": self.time.to_json(),
            "tokens_per_second": self.tokens_per_second,
            "flags": self.flags(),
            "command": self.command,
        }


@dataclass(frozen=True)
class Suggestions:
    """What was found.

    Attributes:
        best: configurations that fit, in the order of `ORDER`; where none fits, the one that needs least.
        tried, fitting: how many were looked at, and how many of them fit. What a simpler one that fits makes
            pointless is not looked at.
        usable_bytes: the memory less what is reserved.
    """

    best: tuple[Suggestion, ...]
    tried: int
    fitting: int
    usable_bytes: int

    @property
    def fits(self) -> bool:
        """Whether any configuration fits."""
        return self.fitting > 0


def fullest_stages(config: Config) -> list[Stage]:
    """Those of the stages that may need most: the first has the embedding and most in flight, the last one
    the loss.
    """
    return [stage_estimate(config, stage) for stage in sorted({0, config.pp - 1})]


def suggest(
    model: Any,
    *,
    devices: int,
    device: Device,
    memory_bytes: int | None = None,
    reserve: float = RESERVE,
    count: int = 8,
    runs_with: str = "any",
    **settings: Any,
) -> Suggestions:
    """Look through parallel sizes, micro-batches, recomputation, ZeRO stages and offload for what fits and is
    fastest.

    Args:
        model: as `configure` takes it.
        devices: how many there are; all are used.
        device: their kind.
        memory_bytes: memory of one, where it is not the kind's own.
        reserve: share of the memory to leave alone.
        count: how many to return, at most one for each set of parallel sizes.
        runs_with: one of `lowtide.estimate.frameworks.FRAMEWORKS`: only what it can run is looked at, and
            each suggestion has its command.
        settings: settings that are given: they are not varied.

    Raises:
        EstimateError: a setting is wrong, or no parallel sizes divide the model and the devices.

    Example:
        >>> from lowtide.estimate.devices import device
        >>> found = suggest("llama3-8b", devices=4, device=device("a100"))
        >>> found.fits, found.best[0].config.devices
        (True, 4)
    """
    model = preset_name(model) if isinstance(model, str) else model
    check_size("--devices", devices, 1 << 20)
    check_size("--count", count, 1000)
    expect(isinstance(device, Device), "suggest(device=)", device, "device('h100') or another", EstimateError)
    expect(isinstance(runs_with, str), "suggest(runs_with=)", runs_with, "a framework's name", EstimateError)
    known = memory_bytes is None or is_count(memory_bytes, 1)
    expect(known, "suggest(memory_bytes=)", memory_bytes, "bytes, 1 or more, or None", EstimateError)
    if not isinstance(reserve, int | float) or not 0 <= reserve < 1:
        raise EstimateError(f"--reserve={reserve}: a share of at least 0 and below 1 is needed")
    way = framework(runs_with)
    asked = {key: value for key, value in settings.items() if value is not None}
    given = _with_framework(model, way, asked)
    base = configure(
        model,
        **{key: value for key, value in given.items() if key not in VARIED or key == "micro_batch"}
        | _alone(given),
    )
    usable = int((memory_bytes or device.memory_bytes) * (1 - reserve))
    batch = given.pop("global_batch", None) or _usual_batch(base.seq, devices)
    tried, fitting = 0, 0
    by_sizes: dict[tuple[Any, ...], Suggestion] = {}
    least: Suggestion | None = None
    reasons: list[str] = []
    stated = tuple((name, value) for name, value in given.items() if name not in (*VARIED, "seq"))

    def suggestion(config: Config) -> Suggestion:
        stages = fullest_stages(config)
        need, held = max(stage.total_bytes for stage in stages), max(reserved(config, one) for one in stages)
        together = min(devices, device.node) * max(host_bytes(config, stage) for stage in {0, config.pp - 1})
        command = way.command(str(model), config, device.node)
        time = step_time(config, device)
        return Suggestion(config, need, held, time, together, command, stated)

    ways = list(_spare(base, given, way))
    plain, sparest = ways[0], ways[-1]
    for sizes in _sizes(base, devices, device.node, given, way):
        for micro_batch in [given["micro_batch"]] if "micro_batch" in given else (1, 2, 4, 8, 16, 32):
            any_fits = False
            for spare in dict.fromkeys([len(ways) - 1, *range(len(ways) - 1)]):
                try:
                    config = replace(
                        base, **sizes, **ways[spare], micro_batch=micro_batch, global_batch=batch
                    )
                except EstimateError as error:
                    reasons.append(str(error))
                    continue
                tried += 1
                found = suggestion(config)
                if least is None or found.reserved_bytes < least.reserved_bytes:
                    least = found
                if found.reserved_bytes <= usable:
                    fitting += 1
                    any_fits = True
                    key = (config.tp, config.pp, config.interleave, config.zero, config.offload_optimizer > 0)
                    if key not in by_sizes or _rank(found) < _rank(by_sizes[key]):
                        by_sizes[key] = found
                    if ways[spare] == plain:
                        break  # sparing more only takes longer
                elif ways[spare] == sparest:
                    break  # nothing needs less
            if not any_fits:
                break  # a larger micro-batch needs more
    if least is None:
        why = f": {reasons[0]}" if reasons else ": give other sizes, or leave out those that may vary"
        fixed = "".join(
            f" {flag(name)}={asked[name]}"
            for name in ("tp", "pp", "dp", "cp", "interleave", "micro_batch")
            if name in asked
        )
        raise EstimateError(
            f"no parallel sizes divide the model and --devices={devices} with a global batch of "
            f"{batch}{fixed and ' at' + fixed}{why}"
        )
    best = sorted(by_sizes.values(), key=lambda one: _order(one, min(map(_rank, by_sizes.values()))[0]))[
        :count
    ] or [least]
    return Suggestions(tuple(best), tried, fitting, usable)


VARIED = (
    "tp",
    "sequence_parallel",
    "pp",
    "interleave",
    "dp",
    "zero",
    "micro_batch",
    "recompute",
    "loss",
    "offload_optimizer",
    "keep_gathered",
)
"""Settings that `suggest` chooses where they are not given."""


def _with_framework(model: Any, way: Framework, asked: dict[str, Any]) -> dict[str, Any]:
    """The settings that are given, the framework's among them.

    Raises:
        EstimateError: a setting is asked for that the framework does not have.
    """
    if way.models is not None and model not in way.models:
        raise EstimateError(
            f"--for {way.name}: it has {', '.join(sorted(way.models))}, and not --model {model}; give "
            "--for any"
        )
    if way.name != "any" and (more := beyond(asked)):
        raise EstimateError(
            f"{flag(more[0])} {asked[more[0]]}: --for {way.name} does not run it; give --for any to see what "
            "fits. TRL and axolotl (adapters, quantised weights, paged optimizers) and torchtune run it"
        )
    swiglu = (
        configure(model, **{name: asked[name] for name in SHAPE_SETTINGS if name in asked}).model.mlp
        == "swiglu"
    )
    own = {name: value for name, value in way.settings.items() if name != "unfused_mlp" or swiglu}
    has = {
        "zero": {*way.zero, *way.zero_pipelined},
        "loss": {*way.losses, *(("torch",) if "auto" in way.losses else ())},
        "recompute": {*way.recompute, "none"},
        "offload_optimizer": set(way.offload),
        "pp": {own["pp"]} if "pp" in own else None,
        "interleave": {own["interleave"]} if "interleave" in own else None,
    }
    for name, known in has.items():
        if way.name != "any" and known is not None and name in asked and asked[name] not in known:
            runs = ", ".join(
                f"{one:g}" if isinstance(one, float) else str(one) for one in sorted(known, key=str)
            )
            raise EstimateError(
                f"{flag(name)} {asked[name]}: with --for {way.name}, {flag(name)} can be {runs}. Leave "
                "it out, or give --for any to look at all that there are formulas for"
            )
    return own | asked


def _alone(given: dict[str, Any]) -> dict[str, Any]:
    """What the first check of the settings needs beside them: a batch that any size divides."""
    return {"global_batch": given["micro_batch"]} if "micro_batch" in given else {"global_batch": 1}


def _rank(found: Suggestion) -> tuple[float, int]:
    return (found.time.total, found.total_bytes)


def _order(found: Suggestion, fastest: float) -> tuple[int, tuple[bool, bool, int], float]:
    """What `ORDER` says; of equals the faster goes first."""
    config = found.config
    means = config.offload_optimizer > 0, config.pp > 1, (config.recompute != "none") + (config.zero == 3)
    return int(log(found.time.total / fastest) / log1p(TIE)), means, found.time.total


def _usual_batch(seq: int, devices: int) -> int:
    """Sequences in a step: about four million tokens, at least one a device, and as many on each: a power of
    two, times what is odd in the number of devices.
    """
    batch = devices // (devices & -devices)
    while batch * seq < STEP_TOKENS or batch < devices:
        batch *= 2
    return batch


def _sizes(
    base: Config, devices: int, node: int, given: dict[str, Any], way: Framework
) -> Iterator[dict[str, Any]]:
    """Parallel sizes whose product is the devices."""
    model = base.model
    for tp in (
        [given["tp"]]
        if "tp" in given
        else [t for t in (1, 2, 4, 8, 16) if t <= node and model.heads % t == 0 and model.ffn % t == 0]
    ):
        for pp in (
            [given["pp"]]
            if "pp" in given
            else [p for p in range(1, model.layers + 1) if model.layers % p == 0]
        ):
            used = tp * pp * base.cp
            if devices % used or ("dp" in given and given["dp"] != devices // used):
                continue
            dp = devices // used
            known = way.zero if pp == 1 else way.zero_pipelined
            zeros = [given["zero"]] if "zero" in given else [0] if dp * base.cp == 1 else list(known)
            chunks = [1] if pp == 1 else [m for m in (1, 2, 3, 4) if model.layers % (pp * m) == 0]
            interleaves = [given["interleave"]] if "interleave" in given else chunks
            split = given.get("sequence_parallel", tp > 1 and base.seq % tp == 0)
            for zero, interleave in product(zeros, interleaves):
                yield dict(
                    tp=tp, pp=pp, dp=dp, zero=zero, interleave=interleave, sequence_parallel=split,
                    keep_gathered=given.get("keep_gathered", split and way.keep_gathered),
                )  # fmt: skip


def _spare(base: Config, given: dict[str, Any], way: Framework) -> Iterator[dict[str, Any]]:
    """Ways to spare memory, from none to most: recomputation, a chunked loss, the optimizer on the host."""
    usual = [kind for kind in way.recompute if kind != "selective" or not base.fused_attention]
    recompute = [given["recompute"]] if "recompute" in given else usual
    losses = [given["loss"]] if "loss" in given else way.losses
    offload = [given["offload_optimizer"]] if "offload_optimizer" in given else way.offload
    for choice, loss, away in product(recompute, losses, offload):
        yield dict(recompute=choice, loss=loss, offload_optimizer=away)
