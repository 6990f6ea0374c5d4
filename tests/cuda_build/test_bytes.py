"""What PyTorch's allocator takes on a card for models of some size. Nothing is computed: memory that nobody
touches costs none here.
"""

from __future__ import annotations

import pytest
import torch
from card_models import ON_THE_CUDA_BUILD, UNCOMPUTED, check_peak, family_on_the_card, within_a_third

from benchmarks import reserved

pytestmark = [*ON_THE_CUDA_BUILD, pytest.mark.filterwarnings("ignore::lowtide.LowtideWarning")]


@pytest.mark.parametrize("budget", reserved.BUDGETS)
@pytest.mark.parametrize("name", reserved.MODELS)
def test_requested_and_reserved_bytes_are_those_predicted(name: str, budget: str) -> None:
    row = reserved.predicted_row(name, budget)
    assert row["requested_bytes"] <= row["budget_bytes"]
    assert row["requested_bytes"] == pytest.approx(row["predicted_peak_bytes"], rel=0.001)
    assert row["reserved_bytes"] == pytest.approx(row["predicted_reserved_bytes"], rel=0.02)


@pytest.mark.parametrize("name", reserved.MODELS)
def test_budgets_of_reserved_bytes_are_held(name: str) -> None:
    row = reserved.held_row(name)
    assert row["reserved_bytes"] <= row["budget_bytes"] < row["plain_reserved_bytes"]


@pytest.mark.parametrize("name", UNCOMPUTED)
def test_families_take_what_was_predicted(name: str) -> None:
    pytest.importorskip("transformers")
    model, batch = family_on_the_card(name)

    def step() -> None:
        torch.manual_seed(1)
        model(**batch).loss.backward()
        model.zero_grad(set_to_none=True)

    check_peak(within_a_third(model, step, verify="never"), model, batch, step)
