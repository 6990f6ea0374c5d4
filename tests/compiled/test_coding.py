"""Codecs in compiled code: budgets are held as predicted, and gradients are nearly the same."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from test_compile import Model, gradients, real_peak
from torch import fx

import lowtide
from lowtide.compiled.coding import coded
from lowtide.compiled.cut import cut
from lowtide.compiled.joint import Joint
from lowtide.meter import available, peak
from lowtide.private import inductor, partitioning


def close(model: torch.nn.Module, twin: torch.nn.Module, share: float) -> bool:
    pairs = zip(gradients(model), gradients(twin), strict=True)
    return all((a - b).norm() <= share * b.norm() for a, b in pairs)


def test_a_codec_goes_below_every_lossless_plan_as_predicted() -> None:
    model, x = Model(), torch.randn(1024, 32)
    twin = copy.deepcopy(model)
    twin(x).backward()
    lossless = lowtide.compile(copy.deepcopy(model), "min", backend="aot_eager")
    lossless(x).backward()
    compiled = lowtide.compile(model, "min", backend="aot_eager", codecs="bfloat16")
    compiled(x).backward()
    handle = lowtide.handle_of(compiled)
    assert {one.decision.codec for one in handle.plan.moves} == {"bfloat16"}
    assert not all(torch.equal(a, b) for a, b in zip(gradients(model), gradients(twin), strict=True))
    assert close(model, twin, 0.01)
    real = real_peak(compiled, model, x)
    assert abs(real - handle.predicted_peak_bytes) <= 16, "the loss and its gradient are outside the graph"
    assert real < 0.98 * lowtide.handle_of(lossless).predicted_peak_bytes


class EncodeAll(inductor.CustomPartitionerFn):
    """Keeps every result of the forward, each through one codec."""

    def __init__(self, codec: str) -> None:
        self.codec = codec
        self.plain_bytes = self.handed_bytes = 0

    def __call__(self, gm: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **_: Any) -> Any:
        partitioning.clean_joint(gm)
        joint = Joint(gm, num_fwd_outputs, ())
        halves = cut(joint, [key for call in joint.calls if call.forward for key in call.writes])
        names = {key: self.codec for key, node in joint.root.items() if not partitioning.is_primal(node)}
        self.plain_bytes = saved_bytes(halves[0], num_fwd_outputs)
        halves = coded(*halves, num_fwd_outputs, names)
        self.handed_bytes = saved_bytes(halves[0], num_fwd_outputs)
        return halves

    def uuid(self) -> str:
        return self.codec


def saved_bytes(forward: fx.GraphModule, outputs: int) -> int:
    (returned,) = next(iter(reversed(forward.graph.nodes))).args
    made = [node for node in returned[outputs:] if node.op != "placeholder"]
    return sum({node.name: node.meta["val"].untyped_storage().nbytes() for node in made}.values())


def check_encoded(backend: Any, partitioner: EncodeAll, share: float) -> None:
    model, x = Model(layers=2), torch.randn(1024, 32)
    twin = copy.deepcopy(model)
    twin(x).backward()
    compiled = torch.compile(model, backend=backend)
    compiled(x).backward()
    assert close(model, twin, share)
    assert not all(torch.equal(a, b) for a, b in zip(gradients(model), gradients(twin), strict=True))
    model.zero_grad()
    with peak("cpu") as seen:
        loss = compiled(x)
        assert seen.live_bytes == partitioner.handed_bytes + loss.nbytes
    bits = {"bfloat16": 16, "int8": 8.2, "int4": 4.6}[partitioner.codec]
    norms = 2 * 2 * 4 * 1024  # two words a row each
    assert partitioner.handed_bytes <= bits / 32 * partitioner.plain_bytes + norms


@pytest.mark.skipif(not available(), reason="needs a C++ compiler for the counting allocator")
@pytest.mark.parametrize(("codec", "share"), [("bfloat16", 0.01), ("int8", 0.02), ("int4", 0.2)])
def test_what_is_handed_over_takes_the_encoded_bytes(codec: str, share: float) -> None:
    partitioner = EncodeAll(codec)
    backend = inductor.aot_autograd(fw_compiler=inductor.boxed_nop, partition_fn=partitioner)
    check_encoded(backend, partitioner, share)


@pytest.mark.slow
@pytest.mark.parametrize(("codec", "share"), [("bfloat16", 0.01), ("int8", 0.02)])
def test_what_inductor_hands_over_takes_the_encoded_bytes(codec: str, share: float) -> None:
    partitioner = EncodeAll(codec)

    def backend(module: Any, inputs: Any) -> Any:
        return inductor.compile_with(module, inputs, {"custom_partitioner_fn": partitioner})

    check_encoded(backend, partitioner, share)


def test_int8_rounds_without_bias() -> None:
    x = torch.rand(1 << 16)
    codes, ranges = torch.ops.lowtide.encode(x, 8)
    back = torch.ops.lowtide.decode(codes, ranges, 8, [1 << 8, 1 << 8], [1, 1 << 8], torch.float32)
    assert back.stride() == (1, 1 << 8)
    error = back.t().reshape(-1) - x
    assert error.abs().max() <= 1.02 / 255 + 1 / 128
    assert error.mean().abs() <= 5 * (1 / 255) / 256  # five standard errors of a uniform step's mean
    torch.library.opcheck(torch.ops.lowtide.encode, (x, 8), test_utils=("test_schema", "test_faketensor"))


def test_what_codecs_cannot_do_is_refused() -> None:
    with pytest.raises(lowtide.PlanError, match="knows no 'mask': give some of bfloat16, int8, int4"):
        lowtide.compile(Model(), "60%", codecs="mask")
    with pytest.raises(lowtide.PlanError, match="leave out codecs, or regional"):
        lowtide.compile(Model(), "60%", codecs="int8", regional=True)
    compiled = lowtide.compile(torch.nn.Linear(8, 8), "60%", backend="aot_eager", codecs="int8")
    with pytest.raises(lowtide.PlanError, match="one graph and returns its loss alone"):
        compiled(torch.randn(4, 8))
