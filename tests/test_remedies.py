"""What holds memory at a peak is named with what would free how much of it."""

from __future__ import annotations

import pytest

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
    largest,
)

MIB = 1 << 20


@pytest.mark.parametrize(
    ("name", "words", "freed"),
    [
        (LOSS, "8 chunks", 56 * MIB),
        (STATE, "HostOptimizer", 64 * MIB),
        (PARAMETERS, "FSDP2", 32 * MIB),
        (GRADIENTS, "FSDP2", 32 * MIB),
        (WORKSPACES, "CUBLAS_WORKSPACE_CONFIG", 64 * MIB),
        (UPDATE, "fused=True", 64 * MIB),
        (ACTIVATIONS, "a batch half as large", 32 * MIB),
    ],
)
def test_a_remedy_frees_no_more_than_the_holder_has(name: str, words: str, freed: int) -> None:
    remedy, bytes_freed = Holder(name, 64 * MIB).remedy
    assert words in remedy and bytes_freed == freed


@pytest.mark.parametrize("name", [BUFFERS, RESIDENT, REDUCED])
def test_where_nothing_helps_nothing_is_proposed(name: str) -> None:
    assert Holder(name, MIB).remedy == ("", 0)
    assert in_lines([Holder(name, MIB, module="norm")]) == [f"1 MiB of {name}, in module 'norm'"]


def test_the_largest_are_named_and_nothing_that_is_small_beside_them() -> None:
    made = [Holder(ACTIVATIONS, size * MIB) for size in (1, 300, 200)]
    found = largest(made, {PARAMETERS: 400 * MIB, STATE: 100 * MIB, ACTIVATIONS: 10**12})
    assert [holder.bytes // MIB for holder in found] == [400, 300, 200] and len(found) == SHOWN
    assert [holder.bytes // MIB for holder in largest(made[:1], {PARAMETERS: 400 * MIB})] == [400]
