"""AOTAutograd's partitioner and Inductor, as the compiled engine uses them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._functorch._aot_autograd.descriptors import SubclassGetAttrAOTInput
from torch._inductor.decomposition import select_decomp_table

from lowtide.private import FakeTensorMode, inductor, partitioning


def joint_of(
    decompositions=None, model: nn.Module | None = None, given: torch.Tensor | None = None
) -> tuple[fx.GraphModule, int, tuple[int, ...]]:
    """A joint graph, forward outputs and static inputs."""
    found: list[tuple[fx.GraphModule, int, tuple[int, ...]]] = []

    def partition(module, inputs, *, num_fwd_outputs, static_lifetime_input_indices=None, **_):
        static = tuple(static_lifetime_input_indices or ())
        found.append((module, num_fwd_outputs, static))
        return partitioning.min_cut(module, num_fwd_outputs, static)

    backend = inductor.aot_autograd(
        fw_compiler=inductor.boxed_nop, partition_fn=partition, decompositions=decompositions
    )
    torch._dynamo.reset()
    model = model or nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1))
    torch.compile(model, backend=backend)(torch.randn(4, 8) if given is None else given).sum().backward()
    return found[0]


def test_weights_that_are_overwritten_after_forward_are_known() -> None:
    assert not partitioning.written_after_forward(joint_of()[0])
    model = nn.Sequential(nn.Embedding(10, 8, max_norm=1.0), nn.Linear(8, 8))
    module, *_ = joint_of(model=model, given=torch.arange(4))
    (weight,) = partitioning.written_after_forward(module)
    assert weight.meta["val"].shape == (10, 8)


def test_a_joint_graph_is_cleaned_told_apart_and_cut() -> None:
    module, outputs, static = joint_of()
    partitioning.clean_joint(module)
    forward, backward = partitioning.sides(module, static, outputs)
    assert forward and backward and not forward & backward
    tangents = [
        node for node in module.graph.nodes if node.op == "placeholder" and partitioning.is_tangent(node)
    ]
    assert len(tangents) == 1 and tangents[0].name in backward
    primals = [node for node in module.graph.nodes if partitioning.is_primal(node)]
    first, second = partitioning.extract(module, primals, [], outputs, static)
    first, second = partitioning.finish(first, False), partitioning.finish(second, True)
    assert {node.name for node in first.graph.nodes if node.op == "call_function"} <= forward
    assert any(node.name in forward for node in second.graph.nodes if node.op == "call_function")


def test_static_inputs_are_found_where_a_subclass_came_apart() -> None:
    module, _, static = joint_of()
    assert partitioning.static_inputs(module, static) == static != ()
    primals = [node for node in module.graph.nodes if partitioning.is_primal(node)]
    assert [node.meta["desc"].idx for node in primals] == list(range(len(primals)))
    whole = primals[0].meta["desc"]
    for node, name in zip(primals[:2], ("_local_tensor", "device_mesh"), strict=True):
        node.meta["desc"] = SubclassGetAttrAOTInput(whole, name)
    for at, node in enumerate(primals[2:], 1):
        node.meta["desc"] = type(whole)(at)
    assert partitioning.static_inputs(module, [0, 2]) == (0, 1, 3)


def test_kinds_of_nodes_are_told() -> None:
    module, *_ = joint_of()
    calls = [node for node in module.graph.nodes if node.op == "call_function"]
    fusible = partitioning.default_fusible()
    assert any(fusible(node) for node in calls) and not all(fusible(node) for node in calls)
    assert not any(partitioning.is_symbol(node) for node in calls)
    assert not any(partitioning.is_effect(node) or partitioning.must_save(node) for node in calls)
    assert not any(partitioning.should_recompute(node) or partitioning.is_item(node) for node in calls)


def test_storages_and_sizes() -> None:
    x = torch.ones(4)
    assert (
        partitioning.storage_of(x) == partitioning.storage_of(x.view(2, 2)) != partitioning.storage_of(x + 1)
    )
    assert partitioning.storage_of(3) is None
    assert partitioning.hint(7) == 7


def test_sizes_left_open_have_names_values_and_guards() -> None:
    seen = []

    def partition(module, inputs, *, num_fwd_outputs, static_lifetime_input_indices=None, **_):
        (free,), unknown = partitioning.free_sizes(module)
        seen.append((free.seen, free.most, free.declared, unknown))
        size = next(node.meta["val"].shape[0] for node in module.graph.nodes if node.name == "tangents_1")
        assert partitioning.SizesAt({free.symbol: 7})(size) == 7
        assert partitioning.hint(size * 2) == 2 * free.seen
        if not free.declared:
            partitioning.guard(module, free.symbol <= 5)
        return partitioning.min_cut(module, num_fwd_outputs, static_lifetime_input_indices or ())

    backend = inductor.aot_autograd(fw_compiler=inductor.boxed_nop, partition_fn=partition)
    torch._dynamo.reset()
    step = torch.compile(torch.sin, backend=backend)
    for rows, declared in ((4, {}), (3, {}), (6, {"min": 2, "max": 9}), (8, {"min": 2, "max": 9})):
        x = torch.ones(rows, 2, requires_grad=True)
        torch._dynamo.mark_dynamic(x, 0, **declared)
        step(x).sum().backward()
    assert seen == [(4, None, False, []), (6, 9, True, [])]


def test_inductor_says_what_it_would_run() -> None:
    module, outputs, static = joint_of(select_decomp_table())
    forward, backward = partitioning.min_cut(module, outputs, static)
    assert "def call(self, args)" in inductor.generated(forward, False)[0]
    assert "def call(self, args)" in inductor.generated(backward, True)[0]


def test_saved_values_that_a_backward_may_write_over_are_those_that_aot_autograd_finds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch._functorch._aot_autograd import graph_compile

    theirs: list[list[int]] = []
    ours: list[list[int]] = []
    collect = graph_compile.collect_bw_donated_buffer_idxs

    def watched(forward: Any, backward: Any, metadata: Any) -> list[int]:
        theirs.append(collect(forward, backward, metadata))
        ours.append(inductor.donated_inputs(forward, backward, metadata.num_forward))
        return theirs[-1]

    monkeypatch.setattr(graph_compile, "collect_bw_donated_buffer_idxs", watched)
    torch._dynamo.reset()
    weight = torch.randn(4, 4, requires_grad=True)
    step = torch.compile(lambda x: ((x @ weight).sin().exp(), x.cos()), backend="aot_eager")
    step(torch.randn(3, 4, requires_grad=True))
    assert ours == theirs and theirs[0]


def test_names_that_are_handed_on() -> None:
    assert inductor.mode_options("max-autotune-no-cudagraphs")["max_autotune"] is True
    assert issubclass(inductor.BackendCompilerFailed, Exception)
    assert callable(inductor.compile_with) and inductor.CustomPartitionerFn.uuid


def test_a_call_with_several_results_runs_on_their_device() -> None:
    graph = fx.Graph()
    with FakeTensorMode():
        (x,) = (graph.placeholder(name) for name in ("x",))
        both = graph.call_function(torch.ops.aten.var_mean.correction, (x, [0]))
        x.meta["val"] = torch.empty(4, device="cpu")
        both.meta["val"] = (torch.empty(1, device="cuda:1"), torch.empty(1, device="cuda:1"))
    assert partitioning.device_of([both]) == torch.device("cuda:1")
    assert partitioning.device_of([x]) == torch.device("cpu")
