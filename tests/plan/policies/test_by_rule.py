"""The policies that follow a rule store and replay what the rule says."""

from __future__ import annotations

from collections import Counter

import pytest
from synthetic import Layers, Tape, transformer, within

from lowtide import policies
from lowtide.errors import PlanError
from lowtide.graph import StepGraph
from lowtide.plan import Plan

LAYERS = 4


@pytest.fixture(scope="module")
def graph() -> StepGraph:
    return transformer(LAYERS)


def replayed(graph: StepGraph, plan: Plan) -> Counter[str]:
    return Counter(graph.operations[i].name for i in plan.replayed)


def test_keep_all(graph: StepGraph):
    plan = policies.keep_all()(graph)
    assert plan.replayed == () and plan.predicted_peak_bytes == plan.plain_peak_bytes


def test_full_keeps_what_enters_a_block(graph: StepGraph):
    plan = policies.full()(graph)
    names = replayed(graph, plan)
    assert names["aten.addmm.default"] == 3 * LAYERS, (
        "qkv, attention's projection, the first of the MLP; not the last"
    )
    assert names["aten.native_layer_norm.default"] == 2 * LAYERS
    assert plan.predicted_peak_bytes < 0.6 * plan.plain_peak_bytes
    kept = [
        v for v in plan.stored if graph.operations[graph.values[v].producer or 0].name == "aten.add.Tensor"
    ]
    assert len(kept) == LAYERS, "the output of every block"


def test_full_takes_names_of_blocks(graph: StepGraph):
    plan = policies.full(blocks=["h.0", "h.2"])(graph)
    assert {graph.operations[i].module.split(".")[1] for i in plan.replayed} == {"0", "2"}
    with pytest.raises(PlanError, match=r"h\.9"):
        policies.full(blocks=["h.9"])(graph)


def test_scope_evicts_only_what_lies_inside(graph: StepGraph):
    plan = policies.scope(["h.1.mlp"])(graph)
    assert replayed(graph, plan) == {
        "aten.addmm.default": 1,
        "aten.gelu.default": 1,
        "aten.bernoulli_.float": 1,
        "aten.div_.Scalar": 1,
    }
    nested = policies.scope(["h.1", "h.1.mlp"])(graph)
    assert nested.replayed == policies.full(blocks=["h.1"])(graph).replayed


def test_sqrt_keeps_the_borders_of_segments():
    graph = transformer(16)
    plans = {k: policies.sqrt(k)(graph) for k in (1, 2, 4, 8)}
    assert policies.sqrt()(graph).stored == plans[4].stored
    assert plans[4].predicted_peak_bytes < plans[1].predicted_peak_bytes
    assert plans[4].predicted_peak_bytes < 0.6 * plans[4].plain_peak_bytes
    with pytest.raises(PlanError):
        policies.sqrt(0)


def test_selective_replays_core_attention(graph: StepGraph):
    plan = policies.selective()(graph)
    assert replayed(graph, plan) == {
        "aten.bmm.default": LAYERS,  # the scores; the second product's output is kept
        "aten._softmax.default": LAYERS,
        "aten.bernoulli_.float": LAYERS,
        "aten.div_.Scalar": LAYERS,
        "aten.mul.Tensor": LAYERS,
    }
    assert plan.predicted_peak_bytes < plan.plain_peak_bytes


def test_selective_by_operations(graph: StepGraph):
    for name in ("gelu", "aten.gelu", "aten.gelu.default", "aten::gelu"):
        assert replayed(graph, policies.selective(recompute_ops=[name])(graph)) == {
            "aten.gelu.default": LAYERS
        }
    saved = policies.selective(save_ops=["aten.addmm", "aten.bmm"])(graph)
    assert not {"aten.addmm.default", "aten.bmm.default"} & set(replayed(graph, saved))
    assert saved.predicted_peak_bytes < saved.plain_peak_bytes
    with pytest.raises(PlanError, match="conv9d"):
        policies.selective(recompute_ops=["conv9d"])(graph)
    with pytest.raises(PlanError, match="not both"):
        policies.selective(recompute_ops=["gelu"], save_ops=["gelu"])


def test_selective_discards_the_output_of_fused_attention():
    tape = Tape()
    make = Layers(tape, 64, 32)
    x = tape.before(64, "input")
    tape.module = "h.0.attn"
    q = make.linear(x, 32, 32)
    y, statistics = tape.op(
        "aten._scaled_dot_product_flash_attention_for_cpu.default", [q], [4 * 64 * 32, 256], seconds=1e-3
    )
    saved = [tape.save(q), tape.save(y), tape.save(statistics)]
    tape.node("attention_back", saved, y, [q], 2e-3)
    (flat,) = tape.op("aten.clone.default", [y], [4 * 64 * 32])
    tape.node("clone_back", [], flat, [y])
    z = within(tape, "h.0.attn.proj", lambda: make.linear(flat, 32, 32))
    (loss,) = tape.op("aten.mean.default", [z], [4])
    tape.node("mean_back", [], loss, [z])
    tape.backward()
    graph = tape.graph()
    plan = policies.selective()(graph)
    assert replayed(graph, plan) == {
        "aten._scaled_dot_product_flash_attention_for_cpu.default": 1,
        "aten.clone.default": 1,
    }
    assert flat not in plan.stored and y not in plan.stored


def test_selective_without_attention_says_what_to_do():
    tape = Tape()
    x = tape.before(8)
    (y,) = tape.op("aten.relu.default", [x], [8])
    tape.node("relu_back", [tape.save(y)], y, [x])
    tape.backward()
    with pytest.raises(PlanError, match="recompute_ops="):
        policies.selective()(tape.graph())


def test_a_name_is_no_list_of_names():
    for policy in (policies.full, policies.scope):
        with pytest.raises(PlanError, match=r"give \['blocks.0'\]"):
            policy("blocks.0")
