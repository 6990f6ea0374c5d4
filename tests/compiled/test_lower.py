"""Live bytes of generated text: of the device alone, and refused where memory comes from elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

import lowtide
from lowtide.compiled import lower, price
from lowtide.compiled.capture import PartGraph
from lowtide.compiled.joint import Joint
from lowtide.compiled.lower import memory_of_generated
from lowtide.compiled.price import memory_by_call
from lowtide.private import FakeTensorMode, partitioning
from lowtide.private.captured import Captured
from lowtide.trace.costs.specs import OpCost

GPU, HOST = torch.device("cuda:0"), torch.device("cpu")


def graph_of(device: torch.device) -> fx.GraphModule:
    """On a device and, beside it, on the host: a number for each row, and a table that is read there."""
    graph = fx.Graph()
    with FakeTensorMode():
        values = [torch.empty(1000, device=HOST), torch.empty(50, 20, device=device)]
        numbers, x = (graph.placeholder(name) for name in ("primals_1", "primals_2"))
        table = graph.call_function(torch.ops.aten.exp.default, (numbers,))
        y = graph.call_function(torch.ops.aten.sin.default, (x,))
        z = graph.call_function(torch.ops.aten.cos.default, (y,))
        graph.output((table, z))
        for node, like in ((numbers, 0), (x, 1), (table, 0), (y, 1), (z, 1)):
            node.meta["val"] = torch.empty_like(values[like])
    return fx.GraphModule(torch.nn.Module(), graph)


TEXT = """
def call(args):
    numbers, x = args
    args.clear()
    table = empty_strided_cpu((1000, ), (1, ), torch.float32)
    cpp_fused_exp_0(numbers, table)
    x = copy_if_misaligned(x)
    y = empty_strided_{kind}((50, 20), (20, 1), torch.float32)
    fused_sin_1.run(x, y, 1000)
    z = empty_strided_{kind}((50, 20), (20, 1), torch.float32)
    fused_cos_2.run(y, z, 1000)
    del y
    return (table, z, )
"""


@pytest.mark.parametrize("device", [GPU, HOST], ids=str)
def test_tensors_of_the_host_take_no_memory_of_the_card_in_either_ledger(device: torch.device) -> None:
    module, beside = graph_of(device), 2 * 4000 if device == HOST else 0
    text = TEXT.format(kind=device.type)
    generated = memory_of_generated(text, module, device, (), lambda *_: 0, partitioning.hint)
    by_call, joint = memory_by_call(module, device, ()), Joint(module, 2, ())
    assert generated.peak_bytes == 3 * 4000 + beside
    assert generated.end_bytes == by_call.end_bytes == 4000 + beside // 2
    assert by_call.peak_bytes == 2 * 4000 + beside // 2
    assert joint.device == device
    assert list(joint.bytes.values()) == [beside // 2, 4000, beside // 2, 4000, 4000]


def test_a_graph_on_the_host_takes_nothing_of_the_card_whose_step_it_is_a_part_of() -> None:
    module, text = graph_of(HOST), TEXT.format(kind="cpu")
    generated = memory_of_generated(text, module, GPU, (), lambda *_: 0, partitioning.hint)
    by_call, joint = memory_by_call(module, GPU, ()), Joint(module, 2, (), counted=GPU)
    assert (generated.peak_bytes, generated.end_bytes, generated.traffic.bytes) == (0, 0, 2 * 12000)
    assert (by_call.peak_bytes, by_call.end_bytes) == (0, 0)
    assert joint.device == GPU and set(joint.bytes.values()) == {0}


def test_a_captured_graph_on_the_host_takes_nothing_of_the_card() -> None:
    """A table that is looked up on the host, with a gradient, before the model's card sees it."""
    found: list[PartGraph] = []

    def backend(module: Any, inputs: Any) -> Any:
        seen = Captured(module, inputs)
        found.append(PartGraph(seen, None, lambda graph, _: graph.smallest, lambda: None, GPU))
        return found[-1]

    x = torch.ones(30, 10, requires_grad=True)
    torch.compile(lambda x: (x @ x.t()).sin() * 2, backend=backend)(x).sum().backward()
    candidates = found[0].candidates
    assert candidates is not None and candidates.device == "cuda:0"
    assert candidates.plain.saved_bytes and not any(candidates.plain.saved_bytes.values())
    assert candidates.plain.forward_bytes == candidates.plain.backward_bytes() == 0
    assert candidates.plain.seconds > 0  # of the host


def test_scratch_is_of_the_device_that_a_call_runs_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product on the host may take as much again as its result: of the card it takes nothing."""
    monkeypatch.setattr(lower, "measure_scratch", lambda _: 100)
    like = OpCost(1.0, 100, "measured", 7)
    monkeypatch.setattr(price, "measure_costs", lambda specs, **_: dict.fromkeys(specs, like))
    joint = Joint(graph_of(GPU), 2, ())
    costs = price.costs_of(joint)
    assert {name: (cost.scratch_bytes, cost.surplus_bytes) for name, cost in costs.items()} == {
        "exp_default": (0, 0),
        "sin_default": (100, 7),
        "cos_default": (100, 7),
    }
    ask, exp = lower.Scratch({}).run(GPU), torch.ops.aten.exp.default
    with FakeTensorMode():
        assert [ask(exp, (torch.empty(5, device=one),), {}) for one in (GPU, HOST)] == [100, 0]


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (
            "empty_strided_p2p((50, 20), (20, 1), torch.float32, torch.device('cuda:0'), alloc_id=1)",
            "of collectives",
        ),
        ("get_external_object_by_index(3)", r"torch\.cuda\.stream"),
        ("alloc_from_pool(x, 0, torch.float32, (50, 20), (20, 1))", "'alloc_from_pool'"),
        ("torch.ops.aten.nonzero.default(numbers)", "capture_dynamic_output_shape_ops"),
    ],
)
def test_memory_that_nobody_predicts_is_refused(made: str, says: str) -> None:
    text = TEXT.replace(
        "empty_strided_{kind}((50, 20), (20, 1), torch.float32)\n    fused_sin", f"{made}\n    fused_sin"
    )
    assert made in text
    with pytest.raises(lowtide.PlanError, match=says):
        memory_of_generated(text.format(kind="cuda"), graph_of(GPU), GPU, (), lambda *_: 0, partitioning.hint)


def test_what_lies_askew_is_copied_for_a_kernel_that_takes_it_for_aligned() -> None:
    module = graph_of(GPU)
    x = next(node for node in module.graph.nodes if node.name == "primals_2")
    text = TEXT.format(kind="cuda")
    plain = memory_of_generated(text, module, GPU, ("primals_2",), lambda *_: 0, partitioning.hint)
    with x.meta["val"].fake_mode:
        x.meta["val"] = torch.empty(1001, device=GPU).as_strided((50, 20), (20, 1), 1)
    askew = memory_of_generated(text, module, GPU, ("primals_2",), lambda *_: 0, partitioning.hint)
    assert (plain.peak_bytes, askew.peak_bytes) == (2 * 4000, 3 * 4000)
