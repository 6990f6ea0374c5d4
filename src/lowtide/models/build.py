"""From a model's name on the command line to a module with random weights.

Four kinds of names: a preset (``gpt2``; all spellings are in `lowtide.model_names`), a Hugging Face model
type, with settings if wanted (``hf:llama:hidden_size=256,num_hidden_layers=4``), the path of a Hugging Face
``config.json`` or of the folder that holds one, and a model's name on the hub (``owner/name``). Weights are
random, unless those of a folder or of the hub are asked for. All become a module
``f(tokens, targets=None)`` that returns a `CausalOutput`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.model_names import HUGGING_FACE, HUGGING_FACE_PREFIX, meant
from lowtide.models.common import CausalOutput, next_token_loss
from lowtide.models.gpt import GPT
from lowtide.models.llama import Llama
from lowtide.models.presets import PRESETS, ModelConfig, ModelError, preset
from lowtide.progress import current


@dataclass(frozen=True)
class ModelSpec:
    """A model's name, understood but not built.

    Attributes:
        name: as the user gave it.
        config: the shape of a built-in model, or ``None``.
        hugging_face: a Hugging Face configuration object, or ``None``.
        vocabulary: number of tokens it knows.
        positions: longest sequence, or ``None`` where the configuration names none.
        source: the folder or the name on the hub that may have weights, or ``None``.
        pretrained: whether the model begins with those.
    """

    name: str
    vocabulary: int
    positions: int | None
    config: ModelConfig | None = None
    hugging_face: Any = field(default=None, compare=False)
    source: str | None = None
    pretrained: bool = False

    @property
    def layers(self) -> int:
        """How many layers it has."""
        if self.config is not None:
            return self.config.layers
        return self.hugging_face.get_text_config().num_hidden_layers

    @property
    def tied(self) -> bool:
        """Whether the embedding of tokens is also the output layer."""
        if self.config is not None:
            return self.config.tied
        return bool(self.hugging_face.get_text_config().tie_word_embeddings)

    def describe(self) -> dict[str, Any]:
        """Everything that shapes the model, as plain values: two specs with equal descriptions build equal
        models.
        """
        if self.config is not None:
            return asdict(self.config)
        return json.loads(self.hugging_face.to_json_string(use_diff=False))


def model_spec(name: str, changes: Mapping[str, Any] | None = None) -> ModelSpec:
    """Understand a model's name.

    Args:
        name: a preset, ``hf:TYPE[:key=value,...]``, the path of a ``config.json`` or its folder, or a name on
            the hub.
        changes: settings of a built-in model's `ModelConfig` to change.

    Raises:
        ModelError: the name is unknown, or a setting does not fit the model.
    """
    changes = dict(changes or {})
    if not Path(name).exists():
        name = meant(name, (*PRESETS, *HUGGING_FACE.values())) or name
    if name in PRESETS:
        config = preset(name, **changes)
        return ModelSpec(name, config.vocabulary, config.positions, config=config)
    is_path = Path(name).exists() or name.endswith(".json") or "/" in name
    of_type = name.lower().startswith(HUGGING_FACE_PREFIX)
    if not of_type and not is_path:
        preset(name)  # raises, with the names that exist
    if changes:
        raise ModelError(
            f"{', '.join(changes)}: only built-in models take this; set it in the configuration of {name!r} "
            "under the name it has there"
        )
    source = None
    if of_type:
        hugging_face = _config_of_type(name)
    elif is_hub_name(name):
        hugging_face, source = _config_from_hub(name), name
    else:
        hugging_face = config_from_file(Path(name))
        source = str(Path(name) if Path(name).is_dir() else Path(name).parent)
    hugging_face.use_cache = False
    if getattr(hugging_face, "is_decoder", None) is False:
        hugging_face.is_decoder = True  # BERT and its kin look both ways unless told that they are decoders
    text = hugging_face.get_text_config()
    if not isinstance(getattr(text, "vocab_size", None), int):
        raise ModelError(f"{name!r} has no vocabulary: choose the configuration of a causal language model")
    positions = getattr(text, "max_position_embeddings", None)
    return ModelSpec(name, text.vocab_size, positions, hugging_face=hugging_face, source=source)


def is_hub_name(name: str) -> bool:
    """Whether a model's name can only be one on the hub.

    >>> is_hub_name("Qwen/Qwen3-0.6B"), is_hub_name("configs/tiny.json"), is_hub_name("gpt2")
    (True, False, False)
    """
    return bool(_HUB_NAME.fullmatch(name)) and not name.endswith(".json") and not Path(name).exists()


_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def build_model(
    spec: ModelSpec | ModelConfig | str, group: Any = None, sequence_parallel: bool = False
) -> nn.Module:
    """The model with random weights, on the current default device and in its default dtype; seed before, for
    reproducible ones.

    Args:
        spec: a name, its meaning, or a built-in model's shape.
        group: ranks that share every layer of a built-in model, as `lowtide.parallel.tensor_group` takes
            them.
        sequence_parallel: they share the sequence, too.
    """
    if isinstance(spec, str):
        spec = model_spec(spec)
    if isinstance(spec, ModelConfig):
        spec = ModelSpec(spec.family, spec.vocabulary, spec.positions, config=spec)
    if spec.config is None:
        if group is not None or sequence_parallel:
            raise ModelError(
                f"{spec.name!r}: build a Hugging Face model on one process, then "
                "lowtide.parallel.parallelize(model, group)"
            )
        return HuggingFaceModel(spec)
    return (GPT if spec.config.family == "gpt" else Llama)(spec.config, group, sequence_parallel)


def untouched(build: Callable[[], nn.Module], device: torch.device) -> nn.Module:
    """What ``build`` makes, with uninitialised parameters and buffers, tied ones still tied.

    Main memory that nobody wrote to costs nothing, so a model larger than the machine can be built and
    traced.
    """
    with torch.device("meta"):
        model = build()
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    empty = torch.empty_like(tensor, device=device)
                    made[id(tensor)] = (
                        nn.Parameter(empty, tensor.requires_grad)
                        if isinstance(tensor, nn.Parameter)
                        else empty
                    )
                tensors[name] = made[id(tensor)]  # type: ignore[assignment]
    return model


class HuggingFaceModel(nn.Module):
    """A Hugging Face causal language model behind the interface of the built-in ones."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        transformers = _transformers(spec.name)
        current().say(f"building {spec.name}", silent=True)
        try:
            self.model: nn.Module = (
                _with_weights(transformers, spec)
                if spec.pretrained
                else transformers.AutoModelForCausalLM.from_config(spec.hugging_face)
            )
        except (ValueError, ImportError) as error:
            raise ModelError(
                f"{spec.name!r} does not build as a causal language model: {_first_lines(error)}"
            ) from error

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> CausalOutput:
        """Logits of every next token, or the loss against ``targets`` (the tokens one place later)."""
        logits = self.model(input_ids=tokens, use_cache=False).logits
        if targets is None:
            return CausalOutput(None, logits)
        context: Any = getattr(self.model, "context", None)
        if context is None:
            return CausalOutput(next_token_loss(logits, nn.Identity(), targets), None)
        counted, own = (targets != -100).sum(), context.take(targets, 1, -100)
        loss = next_token_loss(logits, nn.Identity(), own, counted=counted)
        return CausalOutput(context.total(loss), None)


def _with_weights(transformers: Any, spec: ModelSpec) -> nn.Module:
    """The model with the safetensors of its source: formats that can execute code are not read."""
    assert spec.source is not None
    try:
        return transformers.AutoModelForCausalLM.from_pretrained(
            spec.source,
            config=spec.hugging_face,
            dtype=torch.float32,
            use_safetensors=True,
            local_files_only=Path(spec.source).is_dir(),
        ).train()
    except OSError as error:
        raise ModelError(
            f"cannot read weights for {spec.name!r} from {spec.source!r} ({_first_lines(error)}): a "
            "model.safetensors is needed there"
        ) from error


def _config_from_hub(name: str) -> Any:
    """The configuration of a model on the hub, or in the cache of those that were there once; code that it
    names is not run."""
    try:
        return _transformers(name).AutoConfig.from_pretrained(name)
    except Exception as error:  # the hub's, the network's and the configuration's own, of many types
        raise ModelError(
            f"there is no folder {name!r} here, and no model of that name can be had from the hub "
            f"({_first_lines(error)}): check the name and the network"
        ) from error


def _transformers(name: str) -> Any:
    if "transformers" not in sys.modules:
        current().say("importing transformers", silent=True)
    try:
        import transformers
    except ImportError as error:
        raise ModelError(
            f"{name!r} is a Hugging Face model, and transformers is not installed: pip install 'lowtide[hf]'"
        ) from error
    return transformers


def _config_of_type(name: str) -> Any:
    """The configuration of ``hf:TYPE[:key=value,...]``."""
    kind, _, settings = name[len(HUGGING_FACE_PREFIX) :].partition(":")
    transformers = _transformers(name)
    kind = kind if kind in transformers.CONFIG_MAPPING else kind.lower()
    changes: dict[str, Any] = {}
    for setting in filter(None, settings.split(",")):
        key, equals, text = setting.partition("=")
        if not equals:
            raise ModelError(f"{setting!r} in {name!r}: write settings as key=value, separated by commas")
        try:
            changes[key] = json.loads(text)
        except json.JSONDecodeError:
            changes[key] = text
    return _make_config(transformers, name, kind, changes, strict=True)


def config_from_file(path: Path) -> Any:
    """The configuration in a ``config.json``; only data is read, code that it names is not run."""
    file = path / "config.json" if path.is_dir() else path
    transformers = _transformers(str(path))
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(
            f"cannot read the model configuration {str(file)!r}: {error.strerror or error}"
        ) from error
    except ValueError as error:
        raise ModelError(f"{str(file)!r} is no JSON: {error}") from error
    if not isinstance(data, dict) or not isinstance(data.get("model_type"), str):
        raise ModelError(f"{str(file)!r} names no 'model_type': is it a Hugging Face config.json?")
    data.pop("auto_map", None)
    return _make_config(transformers, str(path), data.pop("model_type"), data, strict=False)


def _make_config(transformers: Any, name: str, kind: str, values: dict[str, Any], strict: bool) -> Any:
    if kind not in transformers.CONFIG_MAPPING:
        raise ModelError(
            f"transformers {transformers.__version__} knows no model type {kind!r} (from {name!r}): write "
            "what 'model_type' says"
        )
    if strict:
        default = transformers.AutoConfig.for_model(kind)
        known = set(default.to_dict()) | set(getattr(default, "attribute_map", {}))
        for key in values:
            if key not in known:
                raise ModelError(f"{key!r} in {name!r}: a {kind!r} configuration has no such setting")
    try:
        return transformers.AutoConfig.for_model(kind, **values)
    except Exception as error:  # transformers raises its own validation errors, of several types
        raise ModelError(
            f"the configuration {name!r} does not hold together: {_first_lines(error, 2)}"
        ) from error


def _first_lines(error: Exception, count: int = 1) -> str:
    """What an error says, or its kind where it says nothing; validation errors give the reason on their
    second line.
    """
    return " ".join(line.strip() for line in str(error).splitlines()[:count]) or type(error).__name__
