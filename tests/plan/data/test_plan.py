"""The table of a plan: alike modules in one row, layers as the model has them."""

from __future__ import annotations

from dataclasses import replace

from synthetic import transformer

from lowtide.plan.data import ModuleRow
from lowtide.plan.data.text import fold
from lowtide.plan.simulate import Simulator
from lowtide.plan.simulate.holders import MADE, holders_at_peak


def rows_of(names: list[str], kept: tuple[str, ...] = ()) -> list[ModuleRow]:
    """Rows of equal bytes, of which the plan keeps some."""
    return [ModuleRow(name, 100, 100 * (name in kept), name not in kept, 0.5) for name in names]


def test_layers_that_are_treated_differently_stand_side_by_side() -> None:
    names = [f"h.{k}.{part}" for k in range(6) for part in ("norm", "attn", "mlp")]
    found = fold(rows_of(["wte", *names, "head"], kept=("h.2.attn", "h.4.attn")))
    expected = ["wte", "h.0-5.norm", "h.0-1,3,5.attn", "h.2,4.attn", "h.0-5.mlp", "head"]
    assert [row.module for row in found] == expected
    assert sum(row.saved_bytes for row in found) == 20 * 100


def test_a_list_within_a_list_is_folded_too() -> None:
    """In the stages of a Swin, and in Sequential(encoder, head)."""
    names = [f"0.{k}.{part}" for k in range(3) for part in ("norm", "mlp.0", "mlp.2")]
    assert [row.module for row in fold(rows_of([*names, "1"]))] == [
        "0.0-2.norm", "0.0-2.mlp.0", "0.0-2.mlp.2", "1",
    ]  # fmt: skip


def test_members_of_one_layer_stay_apart() -> None:
    """The two products of an MLP are no layers."""
    names = ["h.0.mlp.0", "h.0.mlp.2"]
    assert [row.module for row in fold(rows_of(names))] == names


def test_a_refusal_names_the_members_of_a_list_within_a_list_as_one() -> None:
    plain = transformer(4)
    graph = plain.with_operations(lambda op: replace(op, module=f"0.{op.module}" if op.module else ""))
    sim = Simulator(graph)
    found = holders_at_peak(sim, sim.simulate(frozenset(sim.droppable)))
    most = max((holder for holder in found if holder.name == MADE), key=lambda holder: holder.bytes)
    assert "0-3" in most.module and most.module.startswith("0.")
