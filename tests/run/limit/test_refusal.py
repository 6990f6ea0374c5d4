"""What is said when CUDA runs out of memory in a limited step. The allocator's word is given by hand here;
`tests/gpu` waits for the real one.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from small_model import batch, small

import lowtide
from lowtide import LowtideWarning, private
from lowtide.run.limit.refusal import OutOfMemory


def told(observer: OutOfMemory) -> list[str]:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        observer.warn(0, 3 << 30)
    return [str(one.message) for one in shown if issubclass(one.category, LowtideWarning)]


def test_it_says_what_holds_most_and_what_would_help(monkeypatch: pytest.MonkeyPatch) -> None:
    attached = []
    monkeypatch.setattr(private, "on_cuda_out_of_memory", attached.append)
    observer, model = OutOfMemory(), small()
    handle = lowtide.limit_memory(model, "80%")
    limiter = model.__dict__["forward"]
    for _ in range(2):
        observer.follow(limiter)
    assert attached == [observer.warn], "PyTorch cannot take one away: attached once"
    assert told(observer) == [], "nothing is planned yet"
    model(batch()).backward()
    (text,) = told(observer)
    assert text.startswith("CUDA device 0 has no 3 GiB more, in a process with a model limited to ")
    assert text.count("\n  - ") == 3 and "frees about" in text
    handle.remove()
    assert told(observer) == []
    del limiter, handle, model
    assert told(observer) == []


def test_on_a_cpu_nobody_is_attached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private, "on_cuda_out_of_memory", lambda _: pytest.fail("there is no CUDA here"))
    model = small()
    lowtide.limit_memory(model, "80%")
    for _ in range(2):
        model(batch()).backward()
    assert not torch.cuda.is_initialized()
