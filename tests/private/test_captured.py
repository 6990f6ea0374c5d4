"""Graphs that Dynamo has captured, compiled again later."""

from __future__ import annotations

import contextvars
import threading

import pytest
import torch
import torch._inductor.config
from torch import nn
from torch._functorch import partitioners

from lowtide.private import captured, inductor, partitioning


def test_a_captured_graph_compiles_again_after_its_trace() -> None:
    torch._dynamo.reset()
    found: list[captured.Captured] = []
    losses: list[bool] = []

    def backend(module, inputs):
        found.append(captured.Captured(module, inputs))
        losses.append(captured.is_whole_step(module))
        return module.forward

    model, x = nn.Linear(4, 4), torch.randn(8, 4)
    torch.compile(model, backend=backend, dynamic=True)(x)
    torch.compile(lambda y: model(y).sum(), backend=backend)(x)
    torch.compile(lambda y: y.sum(), backend=backend)(model(x))
    assert losses == [False, True, False]
    assert found[0].open_sizes and not found[1].open_sizes
    sizes = found[0].sizes_at([16] * len(found[0].open_sizes))
    assert all(sizes(one) == 16 for one in found[0]._inputs if isinstance(one, torch.SymInt))
    again = found[1].compile(inductor.aot_autograd(fw_compiler=inductor.boxed_nop))
    loss = again(*(p for p in (model.weight, model.bias, x)))[0]
    assert torch.equal(loss, model(x).sum())


def test_a_captured_graph_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    found: list[captured.Captured] = []
    done: list[str] = []

    def counted(module, name):
        before = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, **how: done.append(name) or before(*args, **how))

    counted(captured.aot_autograd, "aot_stage1_graph_capture")
    counted(captured.compile_fx, "_recursive_joint_graph_passes")

    def backend(module, inputs):
        found.append(captured.Captured(module, inputs))
        return module.forward

    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.BatchNorm1d(4)).double()
    x = torch.randn(8, 4, dtype=torch.float64)
    torch.compile(lambda y: model(y).square().sum(), backend=backend)(x)
    linear, _, norm = model
    given = [*linear.parameters(), x, norm.num_batches_tracked, norm.running_mean, norm.running_var]
    given += norm.parameters()
    wanted = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))

    def by_call(half, inputs, **_):
        return inductor.boxed_nop(half, inputs)

    class Cut(inductor.CustomPartitionerFn):
        def __init__(self, partition) -> None:
            self.partition = partition

        def __call__(self, gm, joint_inputs, *, num_fwd_outputs, **_):
            return self.partition(gm, joint_inputs, num_fwd_outputs=num_fwd_outputs)

        def uuid(self):
            return None

    least, most = partitioning.plain_partition, partitioners.default_partition
    for partition in (least, most, least):
        options = {"fx_graph_cache": False, "custom_partitioner_fn": Cut(partition)}
        run = found[0].compile(
            lambda module, fakes, how=options: inductor.compile_with(module, fakes, how, by_call)
        )
        loss = run(*given)[0]
        torch.testing.assert_close(loss, model(x).square().sum())  # norms are taken apart
        torch.testing.assert_close(torch.autograd.grad(loss, list(model.parameters())), wanted)
    assert done == ["aot_stage1_graph_capture", "_recursive_joint_graph_passes"]


def test_a_captured_graph_compiles_in_the_modes_of_its_capture() -> None:
    """A backward, at whose end graphs are compiled, runs without gradients and in full precision; on a card
    it has a thread of its own, where PyTorch has other settings.
    """
    torch._dynamo.reset()
    found: list[captured.Captured] = []

    def backend(module, inputs):
        found.append(captured.Captured(module, inputs))
        return module.forward

    def modes(*_):
        lower, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        return torch.is_grad_enabled(), lower, dtype, torch._inductor.config.allow_buffer_reuse

    with torch.autocast("cpu", torch.float16), torch._inductor.config.patch(allow_buffer_reuse=False):
        here = contextvars.copy_context()  # PyTorch 2.11's settings are not in it
        torch.compile(nn.Linear(4, 4), backend=backend)(torch.randn(8, 4))

    def elsewhere():
        with torch.no_grad():
            told.append(found[0].compile(modes))
            told.append(modes())

    told: list[object] = []
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    reuse = here.run(lambda: torch._inductor.config.allow_buffer_reuse)
    assert told == [(True, True, torch.float16, reuse), (False, False, torch.bfloat16, True)]


def test_a_backward_says_whether_its_graph_is_kept() -> None:
    told: list[bool] = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda _: told.append(captured.keeps_graph()))
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert told == [True, False]
