"""Inductor shows the text that it generates, and compiles a backward at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor_config
from torch._inductor.codecache import PyCodeCache

from lowtide.private import inductor


class Stop(BaseException):
    """Ends a compilation."""


def test_text_is_read_before_it_is_loaded_and_the_backward_comes_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str] = []
    load = PyCodeCache.load_by_key_path

    def loading(*args: Any, **kwargs: Any) -> Any:
        seen.append("loaded")
        return load(*args, **kwargs)

    monkeypatch.setattr(PyCodeCache, "load_by_key_path", loading)

    def half(module: Any, inputs: Any, **how: Any) -> Any:
        def look(text: str) -> None:
            seen.append("backward" if how.get("is_backward") else "forward")
            assert "def call(" in text
            if how.get("is_backward"):
                raise Stop

        with inductor.reading(look):
            return inductor.compile_half(module, inputs, **how)

    def backend(module: Any, inputs: Any) -> Any:
        assert inductor.writes_python()
        return inductor.compile_with(module, inputs, {}, half, at_once=True)

    model: Any = torch.compile(nn.Sequential(nn.Linear(8, 8), nn.GELU()), backend=backend)
    with inductor_config.patch(inductor.UNCACHED), pytest.raises(Stop):
        model(torch.randn(4, 8))
    assert [one for one in seen if one != "loaded"] == ["forward", "backward"]
    assert seen[0] == "forward" and seen[-1] == "backward"
    assert inductor.GraphLowering.save_output_code is None
