"""arXiv 1604.06174, sublinear memory: the square-root plan. Its measured figures (ResNet, LSTM) are not
transformers; its equations are tested.
"""

from __future__ import annotations

import math

import pytest
from published_tables import facts

from lowtide.estimate import configure, estimate
from lowtide.estimate.layer import checkpoint_term, layer_terms, segment_layers
from lowtide.estimate.lines import total

FACTS = facts("1604.06174")


def peak_of_layers(layers: int, recompute: object) -> float:
    config = configure("22b", layers=layers, recompute=recompute)
    if recompute == "none":
        return float(total(layer_terms(config)) * layers)
    segments = -(-layers // segment_layers(config))
    checkpoint = float(checkpoint_term(config).bytes)
    return segments * checkpoint + segment_layers(config) * float(
        total(layer_terms(config)) - checkpoint_term(config).bytes
    )


@pytest.mark.parametrize("layers", [16, 64, 256, 1024])
def test_the_best_segment_is_about_the_square_root(layers: int) -> None:
    """O(n/k) + O(k) is least at k = sqrt(n R) with R the ratio of an input to a layer's activations."""
    config = configure("22b", layers=layers, recompute="sqrt")
    ratio = float(
        checkpoint_term(config).bytes / (total(layer_terms(config)) - checkpoint_term(config).bytes)
    )
    assert FACTS["memory of k segments"]["value"].startswith("O(n/k)+O(k)")
    assert segment_layers(config) == pytest.approx(math.sqrt(layers * ratio), abs=1)


def test_memory_grows_with_the_square_root() -> None:
    """Doubling of layers once segments have more than one: 4 times the layers, twice the memory."""
    small, large = peak_of_layers(4096, "sqrt"), peak_of_layers(4 * 4096, "sqrt")
    assert large / small == pytest.approx(2, rel=0.05)
    assert peak_of_layers(4096, "none") / peak_of_layers(1024, "none") == 4


def test_one_extra_forward() -> None:
    """The price: one forward of the layers more (Section 4.1), a third of the layers' FLOPs."""
    plain, again = (estimate(configure("22b", recompute=recompute)).flops for recompute in ("none", "sqrt"))
    assert FACTS["extra cost of sqrt plan"]["value"] == "one extra forward per mini-batch"
    assert again.executed / again.model == pytest.approx(4 / 3, rel=0.005)
    assert plain.executed == plain.model == again.model


def test_between_none_and_full() -> None:
    sizes = {
        recompute: estimate(configure("22b", layers=1024, recompute=recompute))
        .stages[0]
        .activation_peak_bytes
        for recompute in ("none", "full", "sqrt")
    }
    assert sizes["sqrt"] < sizes["full"] < sizes["none"]
