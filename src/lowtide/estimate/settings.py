"""A configuration from a model's name, a file, or sizes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from lowtide.errors import expect
from lowtide.estimate.config import Config
from lowtide.estimate.errors import EstimateError, unknown
from lowtide.estimate.hugging_face import as_path, from_hugging_face, read_hugging_face, read_json
from lowtide.estimate.presets import PAPER, PRESETS, Preset, changed, preset, preset_name
from lowtide.estimate.shape import Shape
from lowtide.model_names import HUGGING_FACE_PREFIX, on_hub

SHAPE_SETTINGS = tuple(f.name for f in fields(Shape) if f.name != "sequence")
RUN_SETTINGS = tuple(f.name for f in fields(Config) if f.name != "model")


def configure(
    model: str | Path | Shape | None = None, *, as_published: bool = False, **settings: Any
) -> Config:
    """A `Config` from a model's name and any settings, of the run or of the model.

    Args:
        model: a preset (``llama3-8b``), ``hf:TYPE[:key=value,...]``, the path of a Hugging Face
            ``config.json`` or its folder, a `Shape`, or ``None`` with ``layers``, ``hidden`` and ``heads``
            among the settings.
        as_published: begin with the parallel sizes and batches of the model's publication.
        settings: fields of `Config` and of `Shape`; ``None`` means not given.

    Raises:
        EstimateError: a name or key is not known, or the settings do not hold together.

    Example:
        >>> config = configure("llama3-8b", tp=4, sequence_parallel=True)
        >>> config.attention, config.devices
        ('fused', 4)
        >>> configure(layers=12, hidden=768, heads=12, vocab=50257).model.ffn
        3072
    """
    given = {key: value for key, value in settings.items() if value is not None}
    for key in given:
        if key not in RUN_SETTINGS and key not in SHAPE_SETTINGS:
            raise unknown("setting", key, (*RUN_SETTINGS, *SHAPE_SETTINGS, "model"))
    shape_given = {key: given.pop(key) for key in SHAPE_SETTINGS if key in given}
    found = _find(model, shape_given, given)
    run: dict[str, Any] = dict(found.usual)
    if as_published:
        if not found.published:
            raise EstimateError(
                f"--as-published: {model!r} has no published parallel sizes here; 22b, 175b, 530b and 1t have"
            )
        run |= found.published
    return Config(model=found.shape, **(run | given))


def _find(model: str | Path | Shape | None, shape: dict[str, Any], run: dict[str, Any]) -> Preset:
    if model is None:
        missing = [name for name in ("layers", "hidden", "heads") if name not in shape]
        if missing:
            raise EstimateError(
                "no model: give --model (22b, llama3-8b, a Hugging Face config.json, ...) or its sizes; "
                f"missing are --{', --'.join(missing)}"
            )
        modern = shape.get("mlp", "gelu") != "gelu"
        style: dict[str, Any] = dict(positions="rotary", bias=False) if modern else {}
        if isinstance(run.get("seq"), int) and run["seq"] > 0:
            style["sequence"] = run["seq"]
        return Preset(
            Shape(**(style | shape)), {"attention": "fused", "dropout": 0.0} if modern else dict(PAPER)
        )
    if isinstance(model, Shape):
        return Preset(changed(model, **shape))
    name = isinstance(model, str | os.PathLike)
    expect(name, "configure(model=)", model, "a preset's name, a config.json or a Shape", EstimateError)
    found = _named(str(model))
    return Preset(changed(found.shape, **shape), found.usual, found.published)


_OTHERS = "; give the name of a preset, or the path of the model's config.json"


def _named(name: str) -> Preset:
    if name.lower().startswith(HUGGING_FACE_PREFIX) and preset_name(name) not in PRESETS:
        from lowtide.models import model_spec  # and transformers, which take seconds

        return from_hugging_face(model_spec(name).describe(), repr(name))
    path = Path(name)
    if path.suffix == ".json" or path.is_dir() or path.exists():
        return read_hugging_face(path)
    if "/" not in name:
        return preset(name)
    same = on_hub(name)
    hint = f"; the preset for it is {same!r}: give --model {same}" if same in PRESETS else ""
    raise EstimateError(
        f"cannot read {name!r}: no such file or folder, and nothing is fetched from the hub{hint or _OTHERS}"
    )


def read_config(path: str | os.PathLike[str], **settings: Any) -> Config:
    """A `Config` from a JSON file whose keys are the flags' names, with some settings changed.

    ``{"model": "llama3-8b", "seq": 8192, "tp": 4, "sequence_parallel": true}``. Dashes and underscores are
    alike.

    Raises:
        EstimateError: the file cannot be read, or has a key that is no setting.
    """
    data = {key.replace("-", "_"): value for key, value in read_json(as_path("read_config", path)).items()}
    known = (*RUN_SETTINGS, *SHAPE_SETTINGS, "model", "as_published")
    for key in data:
        if key not in known:
            raise EstimateError(f"in {str(path)!r}: {unknown('setting', key, known)}")
    return configure(**(data | {key: value for key, value in settings.items() if value is not None}))


def describe(config: Config) -> Mapping[str, Any]:
    """All settings as plain values, the model's among them."""
    shape = {
        f"model_{f.name}" if f.name == "sequence" else f.name: getattr(config.model, f.name)
        for f in fields(Shape)
    }
    return shape | {name: getattr(config, name) for name in RUN_SETTINGS}
