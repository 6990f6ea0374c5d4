"""Batches of a corpus."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from lowtide.train.data import Blocks, batches
from lowtide.train.text import DataError


def test_blocks_of_one_token_too_few_are_refused() -> None:
    assert len(Blocks(np.arange(9), 8)) == 1
    with pytest.raises(DataError, match="--seq 9 needs at least 10"):
        Blocks(np.arange(9), 9)


def test_an_epoch_has_every_block_once_and_targets_come_one_later() -> None:
    order = iter(batches(Blocks(np.arange(91), 10), batch=3, seed=0))
    epoch = [next(order) for _ in range(3)]
    assert all(torch.equal(tokens + 1, targets) for tokens, targets in epoch)
    assert sorted(int(row[0]) for tokens, _ in epoch for row in tokens) == list(range(0, 90, 10))
    other = [next(order) for _ in range(3)]
    assert [tokens.tolist() for tokens, _ in epoch] != [tokens.tolist() for tokens, _ in other]


@pytest.mark.parametrize("done", [0, 1, 3, 7])
def test_a_loader_goes_on_where_another_stopped_and_draws_nothing_of_others(done: int) -> None:
    before = torch.get_rng_state()
    whole = batches(Blocks(np.arange(91), 10), batch=4, seed=5)
    order = iter(whole)
    for _ in range(done):
        next(order)
    state = whole.state_dict()
    resumed = batches(Blocks(np.arange(91), 10), batch=4, seed=5)
    resumed.load_state_dict(json.loads(json.dumps(state)))
    rest = iter(resumed)
    for _ in range(6):
        assert torch.equal(next(order)[0], next(rest)[0])
    assert torch.equal(before, torch.get_rng_state())


def test_validation_batches_span_the_text() -> None:
    found = list(Blocks(np.arange(1001), 10).spread(3, batch=2))
    assert [tokens.shape for tokens, _ in found] == [(2, 10)] * 3
    assert found[0][0][0, 0] == 0
    assert found[-1][1][-1, -1] == 1000
