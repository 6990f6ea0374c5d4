"""What Inductor's kernels take for functions and for booleans is this machine's."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lowtide.compiled import vector_costs
from lowtide.compiled.vector_costs import KernelCosts, kernel_costs
from lowtide.private import inductor

ELEMENTS = 1 << 15


def seconds_of(call: Callable[..., object], *given: torch.Tensor) -> float:
    """An element's share of the quickest of several calls, compiled."""
    compiled = torch.compile(call)
    with torch.no_grad():
        compiled(*given)
        times = []
        for _ in range(40):
            begin = time.perf_counter()
            compiled(*given)
            times.append(time.perf_counter() - begin)
    return min(times) / ELEMENTS


@pytest.fixture(autouse=True)
def _folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured here is kept for no other process."""
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))


@pytest.mark.slow
def test_costs_are_those_of_what_inductor_generates() -> None:
    """Within a half, on whatever processor this runs."""
    found = kernel_costs()
    x = torch.rand(ELEMENTS, generator=torch.Generator().manual_seed(0))
    mask = x.flip(0) > 0.5
    base = seconds_of(lambda x: x + 1, x)
    written = seconds_of(lambda x: (x + 1, x > 0.5), x) - base
    read = seconds_of(lambda x, mask: torch.where(mask, x, 1.0), x, mask) - base
    tanh = seconds_of(torch.tanh, x) - base
    assert found.mask_written == pytest.approx(written, rel=0.5)
    assert found.mask_read == pytest.approx(read, rel=0.5)
    assert found.functions["tanh"] == pytest.approx(tanh, rel=0.5)


def test_costs_are_measured_once_for_so_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that takes ten times as long for booleans is said to."""
    passes: list[tuple[int, int]] = []
    now = 0.0

    def kernel(given: torch.Tensor, taken: object, mask: object, what: int, count: int, threads: int) -> None:
        nonlocal now
        passes.append((what, threads))
        now += count * {1: 11e-9, 2: 4e-9}.get(what, 1e-9)

    monkeypatch.setattr(inductor, "cpp_kernel", lambda *_: kernel)
    monkeypatch.setattr(vector_costs, "time", SimpleNamespace(perf_counter=lambda: now))
    vector_costs._known.cache_clear()
    try:
        found = kernel_costs()
        assert (found.mask_written, found.mask_read) == (pytest.approx(10e-9), pytest.approx(3e-9))
        assert found.functions and max(found.functions.values()) < 1e-15
        assert {threads for _, threads in passes} == {torch.get_num_threads()}
        assert len({what for what, _ in passes}) == len(vector_costs._NAMES)
        before = len(passes)
        assert kernel_costs() is found and len(passes) == before
        vector_costs._known.cache_clear()  # as in another process
        assert kernel_costs() == found and len(passes) == before
    finally:
        vector_costs._known.cache_clear()


def test_without_a_compiler_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> object:
        raise inductor.NoCompiler[1]

    monkeypatch.setattr(inductor, "cpp_kernel", none)
    vector_costs._known.cache_clear()
    try:
        assert kernel_costs() == KernelCosts()
    finally:
        vector_costs._known.cache_clear()
