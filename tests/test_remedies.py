"""What holds memory at a peak is named with what would free how much of it."""

from __future__ import annotations

import pytest

from lowtide.budget import parse
from lowtide.remedies import (
    ACTIVATIONS,
    BUFFERS,
    GRADIENTS,
    LOSS,
    PARAMETERS,
    REDUCED,
    RESIDENT,
    SHOWN,
    STATE,
    UPDATE,
    WORKSPACES,
    Holder,
    in_lines,
    in_short,
    largest,
    rounded_up,
    what_to_do,
)

MIB, GIB = 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("name", "words", "freed"),
    [
        (LOSS, "8 chunks", 56 * MIB),
        (STATE, "HostOptimizer", 64 * MIB),
        (PARAMETERS, "FSDP2", 32 * MIB),
        (GRADIENTS, "FSDP2", 32 * MIB),
        (WORKSPACES, "CUBLAS_WORKSPACE_CONFIG", 64 * MIB),
        (ACTIVATIONS, "a batch half as large", 32 * MIB),
    ],
)
def test_a_remedy_frees_no_more_than_the_holder_has(name: str, words: str, freed: int) -> None:
    remedy, bytes_freed = Holder(name, 64 * MIB).remedy
    assert words in remedy and bytes_freed == freed


@pytest.mark.parametrize("name", [BUFFERS, RESIDENT, REDUCED, UPDATE])
def test_where_nothing_helps_nothing_is_proposed(name: str) -> None:
    assert Holder(name, MIB).remedy == ("", 0)
    assert in_lines([Holder(name, MIB, module="norm")]) == [f"1 MiB of {name}, in module 'norm'"]


def test_the_largest_are_named_and_nothing_that_is_small_beside_them() -> None:
    made = [Holder(ACTIVATIONS, size * MIB) for size in (1, 300, 200)]
    found = largest(made, {PARAMETERS: 400 * MIB, STATE: 100 * MIB, ACTIVATIONS: 10**12})
    assert [holder.bytes // MIB for holder in found] == [400, 300, 200] and len(found) == SHOWN
    assert [holder.bytes // MIB for holder in largest(made[:1], {PARAMETERS: 400 * MIB})] == [400]


def test_only_what_helps_is_proposed() -> None:
    def remedies(missing: int, **parts: int) -> str:
        known = {PARAMETERS: 6 * GIB, **parts}
        return "\n".join(what_to_do(sum(known.values()) - missing, sum(known.values()), known))

    loss, activations, state = ({name: 2 * GIB} for name in (LOSS, ACTIVATIONS, STATE))
    assert "lowtide.chunked_loss(model)" in remedies(GIB, **loss)
    assert "chunks" in remedies(GIB, **loss) and "chunks" not in remedies(GIB, **activations)
    assert "batch" in remedies(GIB, **activations) and "make the batch" not in remedies(
        3 * GIB, **activations
    )
    assert "make the batch" not in remedies(int(1.9 * GIB), **activations), "95 % smaller is no batch"
    assert "host_fraction=0.5" in remedies(GIB, **state) and "HostOptimizer" not in remedies(3 * GIB, **state)
    assert "split the model among devices" in remedies(3 * GIB, **activations)


def test_where_no_one_thing_is_enough_the_advice_follows_what_holds_most() -> None:
    def remedies(holders: tuple[Holder, ...] = (), **parts: int) -> str:
        total = sum(parts.values())
        return "\n".join(what_to_do(total // 50, total, parts, holders=holders)[1:])

    few = {PARAMETERS: 64 * MIB}
    assert "make the batch and the sequences smaller" in remedies(**few, **{ACTIVATIONS: 10 * GIB})
    assert "make the buffers smaller" in remedies(**few, **{BUFFERS: 10 * GIB})
    for name in (ACTIVATIONS, BUFFERS):
        assert "FSDP2" not in remedies(**few, **{name: 10 * GIB})
    many = {PARAMETERS: 10 * GIB, STATE: 20 * GIB}
    assert "FSDP2" in remedies(**many) and "batch" not in remedies(**many)
    assert "several of the remedies" not in remedies((Holder(STATE, 20 * GIB),), **many)
    assert "several of the remedies" in remedies((Holder(STATE, 20 * GIB), Holder(LOSS, 20 * GIB)), **many)


def test_what_is_known_of_a_holder_comes_before_what_its_name_says() -> None:
    holder = Holder(UPDATE, 3 * GIB, known_remedy=("AdamW(..., fused=True)", 2 * GIB))
    assert in_lines([holder])[0].endswith(": AdamW(..., fused=True) frees about 2 GiB")
    found = what_to_do(9 * GIB, 10 * GIB, {UPDATE: 3 * GIB}, holders=[holder])
    assert found[0] == "use AdamW(..., fused=True), which frees about 2 GiB"
    assert found[1].startswith("give a budget of 10GiB")


def test_what_one_remedy_frees_of_several_holders_counts_together() -> None:
    tiled = [
        Holder(name, GIB, known_remedy=("tiles", GIB // 2)) for name in ("made", "recomputed", "passing")
    ]
    assert what_to_do(9 * GIB, 10 * GIB, {}, holders=tiled)[0] == "use tiles, which frees about 1.5 GiB"


@pytest.mark.parametrize(
    ("budget", "needed", "said"),
    [
        (4 << 20, 6 << 20, "budget of 4 MiB is too small: parameters 6 take 6 MiB"),
        (1 << 10, 6 << 20, "budget of 1 KiB is too small"),
        (600 << 20, 2 << 30, "budget of 0.58 GiB is too small: parameters 2 take 2 GiB"),
        ((6 << 20) - 40_000, 6 << 20, "budget of 5.96 MiB is too small: parameters 6 take 6 MiB"),
        (100, 2000, "budget of 100 B is too small: parameters 1.96 take 1.96 KiB"),
    ],
)
def test_units_fit_the_size_and_the_budget_is_below_what_is_needed(
    budget: int, needed: int, said: str
) -> None:
    assert said in in_short(budget, needed, {"parameters": needed})


@pytest.mark.parametrize("count", [1, 1023, 1024, 5_067_477, (6 << 20) + 1, 12_345_678_901])
def test_a_budget_that_is_proposed_is_enough(count: int) -> None:
    assert count <= parse(rounded_up(count)) <= 1.01 * count + 1024


@pytest.mark.parametrize("smallest", [1000, 2_076_180, 26 * GIB + 1, 26 * GIB + 12_345_678])
@pytest.mark.parametrize("shares", [(1,), (3, 3, 3), (0.3, 1, 50), (33, 33, 33), (7, 0.01, 0.4, 70)])
def test_the_items_of_a_refusal_add_up_to_the_budget_that_it_proposes(
    smallest: int, shares: tuple[float, ...]
) -> None:
    names = (PARAMETERS, BUFFERS, STATE, ACTIVATIONS)
    parts = {name: int(smallest * share / 100) for name, share in zip(names, shares, strict=False)}
    said = in_short(500, smallest, parts)
    items, _, needed = said.partition("too small: ")[2].partition(" take ")
    shown = [round(100 * float(item.split()[-1])) for item in items.split(", ")]
    assert sum(shown) == round(100 * float(needed.split()[0]))
    assert f"budget of {needed.replace(' ', '')} or more" in what_to_do(500, smallest, parts)[0]
    assert "left free" in items, "more is needed than is live"
