"""Inductor shows the text that it generates, and compiles a backward at once."""

from __future__ import annotations

import re
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor_config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import PyCodeCache
from torch._inductor.select_algorithm import AlgorithmSelectorCache
from torch.fx.experimental.proxy_tensor import make_fx

from lowtide.private import inductor, partitioning


def body(text: str) -> list[str]:
    """What the function ``call`` does, kernels by what they are given, checks left out."""
    lines = map(str.strip, text[text.index("def call(") : text.index("\n        return (")].splitlines())
    plain = (re.sub(r"^cpp_fused\w*\(", "kernel(", re.sub(r"\s*#.*", "", line)) for line in lines)
    return [line for line in plain if line and not line.startswith("assert_")]


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

    halves: list[tuple[Any, str]] = []

    def half(module: Any, inputs: Any, **how: Any) -> Any:
        as_given = partitioning.twin(module)

        def look(text: str) -> None:
            seen.append("backward" if how.get("is_backward") else "forward")
            assert "def call(" in text
            halves.append((as_given, text))
            if how.get("is_backward"):
                raise Stop

        with inductor.reading(look):
            return inductor.compile_half(module, inputs, **how)

    def backend(module: Any, inputs: Any) -> Any:
        assert inductor.writes_python({})
        return inductor.compile_with(module, inputs, {}, half, at_once=True)

    model: Any = torch.compile(nn.Sequential(nn.Linear(8, 8), nn.GELU()), backend=backend)
    with inductor_config.patch(inductor.UNCACHED), pytest.raises(Stop):
        model(torch.randn(4, 8))
    assert [one for one in seen if one != "loaded"] == ["forward", "backward"]
    (forward, first), (backward, second) = halves
    lowered, strides = inductor.generated(forward, False, {})
    donated = inductor.donated_inputs(forward, backward, 1)
    for text, other in (
        (first, lowered),
        (second, inductor.generated(backward, True, {}, strides, donated)[0]),
    ):
        assert "cpp_pybinding" in text and "cpp_pybinding" not in other, "no kernel is defined"
        assert len(body(text)) > 5 and body(other) == body(text), "and all else is what runs"
    assert "def call(" in inductor.generated(forward, False, {"cpp_wrapper": True})[0]
    planned, _ = inductor.generated(forward, False, {"memory_planning": True})
    assert body(planned) == body(lowered), "where gradients are wanted no pool is laid out"
    assert seen[0] == "forward" and seen[-1] == "backward"
    assert inductor.GraphLowering.save_output_code is None
    pools: list[bool] = []
    codegen = inductor.GraphLowering.codegen

    def generating(*given: Any) -> Any:
        pools.append(AsyncCompile.use_process_pool())
        return codegen(*given)

    monkeypatch.setattr(inductor.GraphLowering, "codegen", generating)
    ready = Future[None]()
    ready.set_result(None)
    monkeypatch.setattr(AsyncCompile, "_ready_future", ready)
    with inductor_config.patch(compile_threads=4):  # Triton's kernels go to warm processes
        assert AsyncCompile.use_process_pool()
        inductor.generated(forward, False, {})
    assert pools == [False]


def test_a_kernel_is_compiled_as_generated_ones_are() -> None:
    source = """
#include <torch/csrc/inductor/cpp_prefix.h>
extern "C" void kernel(const float* in, float* out, const int64_t count) {
  using Vector = at::vec::Vectorized<float>;
  for (int64_t at = 0; at < count; at += Vector::size()) {
    (Vector::loadu(in + at) * Vector(2.0f)).store(out + at);
  }
}
"""
    given, taken = torch.rand(64), torch.zeros(64)
    inductor.cpp_kernel(["const float*", "float*", "const int64_t"], source)(given, taken, 64)
    assert torch.equal(taken, 2 * given)
    with pytest.raises(inductor.NoCompiler):
        inductor.cpp_kernel(["const float*"], "what no compiler knows")


def test_a_lowering_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `max_autotune` each product of each cut that is looked at would be timed in several ways."""

    def measured(_: object, name: str, *__: object, **___: object) -> None:
        raise Stop(name)

    monkeypatch.setattr(AlgorithmSelectorCache, "do_autotuning", measured)
    options = {"max_autotune": True, "max_autotune_gemm_backends": "CPP,ATEN"}
    given = torch.empty(4, 128, 64), torch.empty(4, 64, 64)
    half = make_fx(lambda x, w: [torch.bmm(x, w)], tracing_mode="fake")(*given)
    assert len(inductor._unmeasured()) > 4
    text, _ = inductor.generated(half, False, options)
    assert "extern_kernels.bmm(" in text
    monkeypatch.setattr(inductor, "_unmeasured", dict)
    with pytest.raises(Stop, match="bmm"):
        inductor.generated(half, False, options)
