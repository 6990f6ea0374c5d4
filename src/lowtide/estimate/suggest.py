"""`suggest`: which parallel sizes, micro-batch, recomputation and offload fit a memory, in the order of
predicted time and simplicity.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import ceil, gcd, log, log1p
from typing import Any

from lowtide.errors import expect, is_count
from lowtide.estimate.config import Config, flag
from lowtide.estimate.devices import Device
from lowtide.estimate.errors import EstimateError
from lowtide.estimate.frameworks import LONG, Framework, beyond, framework
from lowtide.estimate.lines import Stage
from lowtide.estimate.presets import preset_name
from lowtide.estimate.settings import SHAPE_SETTINGS, configure
from lowtide.estimate.shape import GATED, check_size
from lowtide.estimate.speed import StepTime, step_time
from lowtide.estimate.total import all_host_bytes, reserved, stage_estimate

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


PIECES = ("tiles", "head_chunks", "cp_exchange", "offload_activations", "offload_weights")
"""Settings that spare memory with long sequences."""


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A configuration and what it is predicted to need.

    Attributes:
        config: the configuration.
        total_bytes: peak of the device that needs most, as `lowtide.estimate` says it.
        reserved_bytes: what PyTorch's allocator holds for it by default, as `lowtide.estimate` says it.
        reserved_expandable_bytes: the same with expandable segments: what has to fit.
        time: predicted seconds of a step.
        device: on which.
        host_bytes: host memory that all of a node's devices take for what is offloaded.
        command: what runs it, where a framework was chosen.
        settings: what was given beside the sizes and ways that vary, by name.
    """

    config: Config
    total_bytes: int
    reserved_bytes: int
    reserved_expandable_bytes: int
    time: StepTime
    device: Device
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
        parts = [f"--device {self.device.name}"]
        if config.memory_bytes not in (None, self.device.memory_bytes):
            parts.append(f"--memory {config.memory_bytes}")
        parts += [
            f"--seq {config.seq}",
            f"--micro-batch {config.micro_batch}",
            f"--global-batch {config.global_batch}",
        ]
        for name in ("tp", "pp", "interleave", "dp", "cp", "ep", "zero"):
            value = getattr(config, name)
            if value > (0 if name == "zero" else 1):
                parts.append(f"--{name} {value}")
        parts += [f"{flag(name)} {getattr(config, name)}" for name in ("tiles", "head_chunks")
                  if getattr(config, name) > 1]  # fmt: skip
        parts += [f"--cp-exchange {config.cp_exchange}"] * (config.cp_exchange != "ring")
        switches = "sequence_parallel", "keep_gathered", "offload_activations", "offload_weights"
        parts += [flag(name) for name in switches if getattr(config, name)]
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
            "tp", "sequence_parallel", "pp", "interleave", "dp", "cp", "ep", "zero", "seq", "micro_batch",
            "global_batch", "recompute", "loss", "offload_optimizer", "lora", "quantize", *PIECES,
        )  # fmt: skip
        return {
            **{name: getattr(config, name) for name in names},
            "total_bytes": self.total_bytes,
            "reserved_bytes": self.reserved_bytes,
            "reserved_expandable_bytes": self.reserved_expandable_bytes,
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
        whole: where nothing but adapters fits on the devices: what training all weights would need at least.
    """

    best: tuple[Suggestion, ...]
    tried: int
    fitting: int
    usable_bytes: int
    whole: Suggestion | None = None

    @property
    def fits(self) -> bool:
        """Whether any configuration fits."""
        return self.fitting > 0


def fullest_stages(config: Config, device: Device | None = None) -> list[Stage]:
    """Those of the stages that may need most: the first has the embedding and most in flight, the last one
    the loss.
    """
    return [stage_estimate(config, stage, device) for stage in sorted({0, config.pp - 1})]


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
    memory = memory_bytes or device.memory_bytes
    usable = int(memory * (1 - reserve))
    chosen = any(name in asked for finetune in way.finetunes[1:] for name in finetune if name != "dtype")
    tried, fitting = 0, 0
    found: list[Suggestion] = []
    least: list[Suggestion] = []
    reasons: list[str] = []
    for finetune in way.finetunes[:1] if chosen else way.finetunes:
        look = _Look(model, way, devices, device, memory, usable, finetune | given, reasons)
        tried, fitting = tried + look.tried, fitting + look.fitting
        found += look.by_sizes.values()
        least += [look.least] if look.least else []
        if found and not finetune.get("offload_optimizer") and not finetune.get("lora"):
            break
    if not least:
        why = f": {reasons[0]}" if reasons else ": give other sizes, or leave out those that may vary"
        fixed = "".join(
            f" {flag(name)}={asked[name]}"
            for name in ("tp", "pp", "dp", "cp", "interleave", "micro_batch")
            if name in asked
        )
        raise EstimateError(
            f"no parallel sizes divide the model and --devices={devices} with a global batch of "
            f"{look.batch}{fixed and ' at' + fixed}{why}"
        )
    fastest = min(map(_rank, found), default=(1.0, 0))[0]
    best = sorted(found, key=lambda one: _order(one, fastest))[:count] or [
        min(least, key=lambda one: one.reserved_expandable_bytes)
    ]
    whole = [one for one in least if not one.config.lora and not one.config.offload_optimizer]
    held = [one for one in found if not one.config.lora and not one.config.offload_optimizer]
    return Suggestions(tuple(best), tried, fitting, usable, None if held or not whole else whole[0])


class _Look:
    """What was found of one finetune: what fits, the fastest of each set of parallel sizes, and the least."""

    def __init__(
        self, model: Any, way: Framework, devices: int, device: Device, memory: int, usable: int,
        given: dict[str, Any], reasons: list[str],
    ) -> None:  # fmt: skip
        base = configure(
            model,
            **{key: value for key, value in given.items() if key not in VARIED or key == "micro_batch"}
            | _alone(given),
            memory_bytes=memory,
        )
        self.model, self.way, self.devices, self.device = model, way, devices, device
        self.batch = given.pop("global_batch", None) or _usual_batch(base.seq, devices)
        self.stated = tuple((name, value) for name, value in given.items() if name not in (*VARIED, "seq"))
        self.tried, self.fitting = 0, 0
        self.by_sizes: dict[tuple[Any, ...], Suggestion] = {}
        self.least: Suggestion | None = None
        ways = list(_spare(base, given, way))
        for sizes in _sizes(base, devices, device.node, given, way):
            for micro_batch in [given["micro_batch"]] if "micro_batch" in given else (1, 2, 4, 8, 16, 32):
                any_fits = False
                for spare in dict.fromkeys([len(ways) - 1, *range(len(ways) - 1)]):
                    try:
                        config = _chosen(
                            replace(base, **sizes, micro_batch=micro_batch, global_batch=self.batch),
                            ways[spare],
                        )
                    except EstimateError as error:
                        reasons.append(str(error))
                        continue
                    found = self._suggestion(config)
                    if self._keep(found, usable):
                        any_fits = True
                        if spare == 0:
                            break  # sparing more only takes longer
                    elif spare == len(ways) - 1:
                        break  # nothing needs less
                if not any_fits:
                    break  # a larger micro-batch needs more

    def _suggestion(self, config: Config) -> Suggestion:
        stages = fullest_stages(config, self.device)
        need = max(stage.total_bytes for stage in stages)
        held, joined = (max(reserved(config, one, way) for one in stages) for way in (False, True))
        together = min(self.devices, self.device.node)
        host = together * max(all_host_bytes(config, stage) for stage in {0, config.pp - 1})
        command = self.way.command(str(self.model), config, self.device.node)
        return Suggestion(
            config,
            need,
            held,
            joined,
            step_time(config, self.device),
            self.device,
            host,
            command,
            self.stated,
        )

    def _keep(self, found: Suggestion, usable: int) -> bool:
        """Note a configuration; whether it fits."""
        config = found.config
        self.tried, joined = self.tried + 1, found.reserved_expandable_bytes
        if self.least is None or joined < self.least.reserved_expandable_bytes:
            self.least = found
        if joined > usable:
            return False
        self.fitting += 1
        key = (config.tp, config.pp, config.interleave, config.zero, config.offload_optimizer > 0)
        key += (config.cp, config.ep)
        if key not in self.by_sizes or _rank(found) < _rank(self.by_sizes[key]):
            self.by_sizes[key] = found
        return True


VARIED = (
    "tp", "sequence_parallel", "pp", "interleave", "dp", "cp", "ep", "zero", "micro_batch", "recompute",
    "loss", "offload_optimizer", "keep_gathered", *PIECES,
)  # fmt: skip
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
    if way.name != "any" and len(way.finetunes) == 1 and (more := beyond(asked)):
        raise EstimateError(
            f"{flag(more[0])} {asked[more[0]]}: --for {way.name} does not run it; give --for any to see what "
            "fits, or --for trl or axolotl for a recipe (adapters, quantised weights, paged optimizers)"
        )
    shape = configure(model, **{name: asked[name] for name in SHAPE_SETTINGS if name in asked}).model
    own = {name: value for name, value in way.settings.items() if name != "unfused_mlp" or shape.mlp in GATED}
    has = {
        "zero": {*way.zero, *way.zero_pipelined},
        "loss": {*way.losses, *(("torch",) if "auto" in way.losses else ())},
        "recompute": {*way.recompute, "none"},
        "offload_optimizer": set(way.offload),
        **{name: {own[name]} if name in own else None for name in ("tp", "pp", "interleave")},
        "cp": None if way.context else {1},
        **(
            {}
            if way.pieces
            else {
                "tiles": {1},
                "head_chunks": {1},
                "cp_exchange": {"ring"},
                "offload_activations": {False},
                "offload_weights": {False},
            }
        ),
        "ep": None if way.experts else {1},
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
    spared = (config.recompute != "none") + (config.zero == 3) + (config.cp > 1) + (config.ep > 1)
    spared += (config.tiles > 1) + (config.head_chunks > 1)
    means = config.offload_optimizer > 0 or config.offload_activations, config.pp > 1, spared
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
    tps = [t for t in (1, 2, 4, 8, 16) if t <= node and model.heads % t == 0 and model.ffn % t == 0]
    pps = [p for p in range(1, model.layers + 1) if model.layers % p == 0]
    long = way.context and base.fused_attention and base.seq >= LONG
    cps = [c for c in (1, 2, 4, 8, 16, 32) if base.seq % (2 * c) == 0] if long else [1]
    for tp, pp, cp in product(
        [given["tp"]] if "tp" in given else tps, [given["pp"]] if "pp" in given else pps,
        [given["cp"]] if "cp" in given else cps,
    ):  # fmt: skip
        used = tp * pp * cp
        if devices % used or ("dp" in given and given["dp"] != devices // used):
            continue
        dp = devices // used
        known = way.zero if pp == 1 else way.zero_pipelined
        zeros = [given["zero"]] if "zero" in given else [0] if dp * cp == 1 else list(known)
        chunks = [1] if pp == 1 else [m for m in (1, 2, 3, 4) if model.layers % (pp * m) == 0]
        interleaves = [given["interleave"]] if "interleave" in given else chunks
        split = given.get("sequence_parallel", tp > 1 and base.seq % (tp * cp) == 0)
        eps = [1, gcd(dp * cp, model.experts, node)] if way.experts and model.experts else [1]
        eps = [given["ep"]] if "ep" in given else list(dict.fromkeys(eps))
        exchanges = (
            ["ring", "all-to-all"] if way.pieces and cp > 1 and model.heads % (tp * cp) == 0 else ["ring"]
        )
        exchanges = [given["cp_exchange"]] if "cp_exchange" in given else exchanges
        for zero, interleave, ep, exchange in product(zeros, interleaves, eps, exchanges):
            yield dict(
                tp=tp, pp=pp, dp=dp, cp=cp, ep=ep, zero=zero, interleave=interleave, sequence_parallel=split,
                keep_gathered=given.get("keep_gathered", split and way.keep_gathered), cp_exchange=exchange,
            )  # fmt: skip


def _spare(base: Config, given: dict[str, Any], way: Framework) -> Iterator[dict[str, Any]]:
    """Ways to spare memory, from none to most: recomputation, a chunked loss, the optimizer on the host."""
    usual = [kind for kind in way.recompute if kind != "selective" or not base.fused_attention]
    recompute = [given["recompute"]] if "recompute" in given else usual
    losses = [given["loss"]] if "loss" in given else way.losses
    offload = [given["offload_optimizer"]] if "offload_optimizer" in given else way.offload
    fixed = {name: given[name] for name in PIECES if name in given}
    for choice, loss, away in product(recompute, losses, offload):
        yield dict(recompute=choice, loss=loss, offload_optimizer=away) | fixed
    if way.pieces and base.seq >= LONG and base.fused_attention:
        yield from _pieces(base, dict(recompute=recompute[-1], loss=losses[-1]), given, offload, fixed)


def _pieces(
    base: Config, most: dict[str, Any], given: dict[str, Any], offload: Sequence[float], fixed: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Ways to spare more with a long sequence, each with those before it: tiles of the MLP and of the loss,
    activations on the host, the optimizer, the weights, and attention in slices of heads.
    """
    dense = not base.model.experts and not base.lora
    steps: list[dict[str, Any]] = [{"tiles": 0}] if dense else []
    steps.append({"offload_activations": True})
    steps += [{"offload_optimizer": share} for share in offload[-1:] if share == 1]
    steps += [{"offload_weights": True}] if len(steps) == dense + 2 else []
    steps += [{"head_chunks": 0}] if dense and not base.model.kv_latent else []
    way = dict(most, offload_optimizer=offload[0])
    for step in steps:
        way |= step
        yield way | fixed


def _chosen(sizes: Config, way: dict[str, Any]) -> Config:
    """The configuration: of tiles and slices that are 0 as many as others take. A tile has as many tokens as
    the model is wide (DeepSpeed's), a slice one head of each rank (UPipe's).

    Raises:
        EstimateError: the settings do not hold together.
    """
    exchanged = sizes.cp_exchange == "all-to-all"
    if way.get("tiles") == 0:
        way = way | {"tiles": max(1, ceil(sizes.tokens / sizes.model.hidden))}
    if way.get("head_chunks") == 0:
        whole = exchanged or sizes.cp == 1
        way = way | {"head_chunks": sizes.model.heads // sizes.tp // sizes.cp if whole else 1}
    if sizes.zero < 3 and way.get("offload_weights"):
        way = way | {"offload_weights": False}
    return replace(sizes, **way)
