"""Kernels that are compiled together are those that Inductor compiles one by one."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import config as inductor_config
from torch._inductor.codecache import CppPythonBindingsCodeCache
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.cpp_builder import CppBuilder
from torch._inductor.exc import CppCompileError
from torch.fx.experimental.proxy_tensor import make_fx

from lowtide.private import inductor
from lowtide.private.kernels import compile_kernels

TYPES = ["float*", "const float*", "const int64_t"]

Built = list[str]


def source(line: str, before: str = "") -> str:
    return f"""
#include <torch/csrc/inductor/cpp_prefix.h>
{before}
extern "C" void kernel(float* out, const float* x, const int64_t size)
{{
    for (int64_t n = 0; n < size; n += 1) out[n] = {line};
}}
"""


def text(*sources: str) -> str:
    lines = [
        f"cpp_fused_{n} = async_compile.cpp_pybinding({TYPES}, r'''{one}''')" for n, one in enumerate(sources)
    ]
    return "\n".join(["async_compile = AsyncCompile()", *lines, "async_compile.wait(globals())"])


def run(one: str) -> torch.Tensor:
    """What Inductor's own loader makes of a kernel."""
    kernel = CppPythonBindingsCodeCache.load_pybinding(TYPES, one)
    x = torch.linspace(-2, 2, 1000)
    out = torch.empty_like(x)
    kernel(out, x, len(x))
    return out


def library(one: str) -> Path:
    """Where Inductor keeps a kernel's library."""
    kernel = CppPythonBindingsCodeCache.load_pybinding(TYPES, one)
    return Path(kernel.__self__.__spec__.origin)


def forget() -> None:
    """Be as a new process, which has loaded no kernel."""
    CppPythonBindingsCodeCache.cache_clear()
    for name in [name for name in sys.modules if name.endswith(".kernel")]:  # PyTorch 2.11 leaves them
        del sys.modules[name]


@pytest.fixture(autouse=True)
def an_empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[str], None]]:
    def empty(name: str) -> None:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / name))
        (tmp_path / name).mkdir()
        forget()

    empty("first")
    with inductor_config.patch(compile_threads=1):
        yield empty


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> Built:
    """The calls of the compiler that make a library."""
    seen: Built = []
    build = CppBuilder.build

    def counted(self: Any) -> None:
        if self.get_target_file_path().endswith(("main.so", "kernels.so")):
            seen.append(self.get_target_file_path())
        build(self)

    monkeypatch.setattr(CppBuilder, "build", counted)
    return seen


SOURCES = tuple(
    source(line) for line in ("std::exp(x[n]) * 3.1f", "std::sin(x[n]) / 1.7f", "x[n] * x[n] + 0.1f")
)


def test_one_call_of_the_compiler_makes_them_all(built: Built, an_empty_cache: Callable[[str], None]) -> None:
    alone = [run(one) for one in SOURCES]
    assert len(built) == 3
    an_empty_cache("second")
    built.clear()
    compile_kernels(text(*SOURCES))
    assert len(built) == 1
    assert all(map(torch.equal, alone, map(run, SOURCES)))
    assert len(built) == 1
    assert len({library(one) for one in SOURCES}) == 3
    assert len({library(one).stat().st_ino for one in SOURCES}) == 1
    assert not Path(built[0]).exists()


def test_what_is_on_disk_is_not_compiled_again(built: Built) -> None:
    run(SOURCES[1])
    compile_kernels(text(*SOURCES))
    assert len(built) == 2
    forget()
    compile_kernels(text(*SOURCES))
    assert len(built) == 2 and torch.equal(run(SOURCES[2]), run(SOURCES[2]))


def test_each_thread_of_inductors_compiles_a_part(built: Built) -> None:
    with inductor_config.patch(compile_threads=2):
        compile_kernels(text(*SOURCES))
    assert len(built) == 2
    assert [run(one)[0].isfinite() for one in SOURCES] == [True] * 3 and len(built) == 2


def test_what_cannot_stand_together_is_compiled_alone(built: Built) -> None:
    clash = 'extern "C" float helper(float x) {{ return {}; }}'
    sources = [source("helper(x[n])", clash.format(body)) for body in ("x * 2", "x * 4")]
    compile_kernels(text(*sources))
    assert len(built) == 3
    assert torch.equal(run(sources[0]) * 2, run(sources[1]))


def test_helpers_may_have_one_name(built: Built) -> None:
    sources = [
        source("helper(x[n])", f"static float helper(float x) {{ return {body}; }}")
        for body in ("x", "x + 2")
    ]
    compile_kernels(text(*sources))
    assert len(built) == 1
    assert torch.equal(run(sources[0]) + 2, run(sources[1]))


def test_an_error_is_inductors() -> None:
    with pytest.raises(CppCompileError, match="no_such_function"):
        compile_kernels(text(*SOURCES, source("no_such_function(x[n])")))
    assert run(SOURCES[0])[0].isfinite()


def test_another_process_may_be_faster(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def late(a: Any, b: Any) -> None:
        if not Path(b).exists():
            link(a, b)
        link(a, b)

    monkeypatch.setattr(os, "link", late)
    compile_kernels(text(*SOURCES))
    assert len(built) == 1 and run(SOURCES[0])[0].isfinite()


def test_no_links_on_this_disk(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(a: Any, b: Any) -> None:
        raise PermissionError(a, b)

    monkeypatch.setattr(os, "link", refused)
    compile_kernels(text(*SOURCES))
    assert len(built) == 4 and run(SOURCES[0])[0].isfinite()


def test_a_graphs_kernels_are_compiled_so(built: Built, an_empty_cache: Callable[[str], None]) -> None:
    def step(x: torch.Tensor) -> tuple[torch.Tensor]:
        return ((x.sin() @ x).cos() @ x.exp(),)

    x = torch.randn(32, 32)
    graph = make_fx(step)(x)
    compiled = inductor.compile_half(graph, [x])
    assert len(built) == 1
    an_empty_cache("second")
    alone = compile_fx_inner(make_fx(step)(x), [x])
    assert len(built) > 2
    assert torch.equal(compiled([x])[0], alone([x])[0])
