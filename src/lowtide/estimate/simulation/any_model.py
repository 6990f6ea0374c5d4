"""Any Hugging Face configuration, where no formula fits: its step traced on fake tensors, without weights.

A model with a vision tower is traced in its two parts, the tower on one image a sequence and the language
model on the tokens; the projector between them is left out.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.errors import TraceError
from lowtide.estimate.config import Config
from lowtide.estimate.errors import EstimateError
from lowtide.estimate.lines import Line, Stage
from lowtide.estimate.optimizers import OPTIMIZERS
from lowtide.estimate.settings import configure
from lowtide.estimate.simulation.pieces import DTYPES
from lowtide.estimate.simulation.traced import default_dtype, precision
from lowtide.estimate.states import model_states
from lowtide.models.build import config_from_file, untouched
from lowtide.plan.reserved_bytes import reserved_either_way
from lowtide.plan.simulate import plain
from lowtide.trace.fake import trace_fake

TAKEN = ("seq", "micro_batch", "global_batch", "dp", "zero", "recompute", "dtype", "gradient_dtype",
         "optimizer", "update")  # fmt: skip
"""Settings that a traced model takes: those that say nothing about what its layers are."""
_HEADS = {
    "CausalLM": "CAUSAL_LM",
    "ImageTextToText": "IMAGE_TEXT_TO_TEXT",
    "Seq2SeqLM": "SEQ_TO_SEQ_CAUSAL_LM",
    "MaskedLM": "MASKED_LM",
    "SpeechSeq2Seq": "SPEECH_SEQ_2_SEQ",
    "ImageClassification": "IMAGE_CLASSIFICATION",
}
"""The kinds of models that are tried, as ``AutoModelFor...``, and ``MODEL_FOR_..._MAPPING``, which has their
configurations.
"""
_SOURCE = "trace on fake tensors"


@dataclass(frozen=True)
class Part:
    """What was traced of a model or its tower: parameters, and bytes above them and the inputs: kept as
    backward begins, and the most before and after that; and what PyTorch's allocator reserves for its steps
    over its peak.
    """

    name: str
    parameters: int
    operations: int
    kept: int
    loss: int
    backward: int
    reserved: float


def any_model(path: Path, **settings: Any) -> tuple[Config, Stage, list[Part]]:
    """One device's step of the model in a ``config.json``.

    Returns:
        The settings (the model in them is none of its own), the lines, and what was traced.

    Raises:
        EstimateError: a setting is given that a trace does not take, or the model cannot be traced.
    """
    if more := [name for name in settings if name not in TAKEN]:
        flags = ", ".join("--" + name.replace("_", "-") for name in TAKEN)
        raise EstimateError(f"{more[0]}: {str(path)!r} has no formula, and a traced model takes {flags}")
    run: dict[str, Any] = {"seq": 1024} | settings
    if run.get("zero", 0) > 1 or run.get("recompute", "none") not in ("none", "full"):
        raise EstimateError("a traced model is counted with --zero 0 or 1, and --recompute none or full")
    config = configure(layers=1, hidden=64, heads=1, positions="rotary", **run)
    parts = [_traced(config, *one) for one in _parts(config_from_file(path))]
    return config, Stage(0, 0, sum(one.parameters for one in parts), Fraction(0), Fraction(0),
                         tuple(_lines(config, parts))), parts  # fmt: skip


def _parts(found: Any) -> list[tuple[str, Callable[[], nn.Module], Any]]:
    """The parts to trace: of each a name, what builds it, and its configuration."""
    import transformers

    if hasattr(found, "vision_config") and hasattr(found, "text_config"):
        vision, text = found.vision_config, found.text_config
        return [
            ("vision tower", lambda: transformers.AutoModel.from_config(vision), vision),
            ("language model", lambda: transformers.AutoModelForCausalLM.from_config(text), text),
        ]
    named = getattr(transformers, (found.architectures or [""])[0], None)
    heads = [
        f"AutoModelFor{head}"
        for head, name in _HEADS.items()
        if type(found) in getattr(transformers, f"MODEL_FOR_{name}_MAPPING")
    ]
    auto: Any = getattr(transformers, heads[0]) if heads else transformers.AutoModel
    build = (lambda: named(found)) if named else lambda: auto.from_config(found)
    return [("model", build, found)]


def _inputs(model: nn.Module, found: Any, config: Config) -> dict[str, Tensor]:
    """Inputs by the names that forward has: tokens, or an image, and labels where it takes them.

    Raises:
        EstimateError: it takes something else.
    """
    known, batch = inspect.signature(model.forward).parameters, config.micro_batch
    tokens = torch.zeros(batch, config.seq, dtype=torch.long)
    if getattr(model, "main_input_name", "input_ids") == "input_ids":
        given = {"input_ids": tokens}
        if "decoder_input_ids" in known:
            given["decoder_input_ids"] = tokens.clone()
        return given | ({"labels": tokens.clone()} if "labels" in known else {})
    side = getattr(found, "image_size", None)
    if model.main_input_name != "pixel_values" or side is None or "grid_thw" in known:
        raise EstimateError(
            f"a {found.model_type!r} model reads {model.main_input_name!r} of no one size: what can be "
            "traced reads tokens, or images of the configuration's image_size"
        )
    sides = (side, side) if isinstance(side, int) else tuple(side)
    image = torch.zeros(batch, getattr(found, "num_channels", 3), *sides, dtype=torch.get_default_dtype())
    return {"pixel_values": image} | ({"labels": tokens[:, 0]} if "labels" in known else {})


def _traced(config: Config, name: str, build: Callable[[], nn.Module], found: Any) -> Part:
    with default_dtype(DTYPES[config.dtype]):
        model = untouched(build, torch.device("cpu")).train()
        inputs = _inputs(model, found, config)
    if config.recompute == "full":
        model.gradient_checkpointing_enable()  # type: ignore[operator]
    if config.gradients_resident:
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)
    cached = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}

    def step(**given: Tensor) -> Tensor:
        with precision(config):
            out = model(**given, **cached)
        return out.loss if "labels" in given else out[0].float().mean()

    try:
        graph = trace_fake(step, (), inputs, [model], "cpu", lambda specs: {}, model.buffers())
    except TraceError as error:
        raise EstimateError(f"the {name} cannot be traced: {error}") from error
    split = next(place for place, event in enumerate(graph.events) if event[0] == "unpack")
    done = plain(graph)
    before, after = max(done.top_bytes[:split]), max(done.top_bytes[split:])
    above = (int(size) - graph.resident_bytes for size in (done.live_bytes[split - 1], before, after))
    count = sum(one.numel() for one in model.parameters())
    held, _ = reserved_either_way(graph, {saved.value for saved in graph.saved}, steps=3)
    return Part(name, count, len(graph.operations), *above, reserved=held / max(done.top_bytes))


def _lines(config: Config, parts: list[Part]) -> list[Line]:
    count = sum(one.parameters for one in parts)
    states = model_states(
        count, dp=config.shards, zero=config.zero, weight_bytes=config.weight_bytes,
        gradient_bytes=config.gradient_bytes, optimizer_bytes=config.optimizer_bytes,
    )  # fmt: skip
    made = ceil(states.gradients)
    at = (made if config.gradients_resident else 0, made, made)
    optimizer, told = f"{config.optimizer} state", f"{count:,} parameters"
    found = [
        Line("weights", "weights", ceil(states.weights), f"{config.weight_bytes}Ψ", _SOURCE, told),
        Line("gradients", "gradients", made, f"{config.gradient_bytes}Ψ", _SOURCE, at=at),
        Line(
            "optimizer", optimizer, ceil(states.optimizer), f"{float(config.optimizer_bytes):.4g}Ψ", _SOURCE
        ),
    ]
    resident = 0 if config.gradients_resident else made
    for one in parts:
        stays = one.kept if one is not parts[-1] else 0
        kept, most = (one.kept, stays, 0), (one.loss - one.kept, 0, 0)
        found.append(Line("activations", f"kept by the {one.name}", one.kept, "", _SOURCE, at=kept))
        if one is parts[-1]:
            found.append(Line("temporaries", f"loss of the {one.name}", most[0], "", _SOURCE, at=most))
    last = max(0, max(one.backward for one in parts) - resident)
    found.append(
        Line("temporaries", "activations and gradients in backward", last, "", _SOURCE, at=(0, last, 0))
    )
    if config.update_kind == "foreach" and (copies := OPTIMIZERS[config.optimizer].copies):
        share = ceil(Fraction(copies * config.state_bytes * count, config.shards if config.zero else 1))
        name, source = "square roots of the second moments", "liveness: torch.optim's foreach"
        found.append(Line("temporaries", name, share, f"{config.state_bytes}Ψ", source, at=(0, 0, share)))
    return found
