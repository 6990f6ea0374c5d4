"""arXiv 1910.02054, ZeRO: published value beside ours.

The 33 GB of checkpoints of the 100B example is half of what fp16 makes of the paper's own 60 GB, so the
16-fold ratio is tested, not the value. Table 4's hidden size for 40B to 60B must be about 6144.
"""

from __future__ import annotations

import pytest
from published_tables import facts, table

from lowtide.estimate import Shape, configure, estimate, model_states

FACTS = facts("1910.02054")
SIZES = {"7.5B": 7.5e9, "128B": 128e9, "1T": 1e12}


@pytest.mark.parametrize(
    "row", table("1910.02054_table1_model_states"), ids=lambda row: f"{row['model']}-{row['dp_degree']}"
)
def test_table_1_within_one_unit(row: dict[str, str]) -> None:
    for stage, column in ((1, "P_os_GB"), (2, "P_os+g_GB"), (3, "P_os+g+p_GB")):
        ours = float(model_states(SIZES[row["model"]], dp=int(row["dp_degree"]), zero=stage).total) / 1e9
        digits = len(row[column].partition(".")[2])
        assert ours == pytest.approx(float(row[column]), abs=10**-digits)
        assert ours == pytest.approx(float(row[f"formula_{column}"]), abs=6e-4)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_the_estimate_divides_as_table_1_does(zero: int) -> None:
    """Through the whole call: bytes per parameter of a real model at dp = 64."""
    found = estimate(configure("llama-7b", dp=64, zero=zero))
    stage = found.stages[0]
    states = stage.weights_bytes + stage.gradients_bytes + stage.optimizer_bytes
    assert states == pytest.approx(float(model_states(found.parameters, dp=64, zero=zero).total), abs=3)


def gpt(layers: int, hidden: int, heads: int, **changes: object) -> object:
    return configure(Shape(layers=layers, hidden=hidden, heads=heads, vocab=50257, sequence=1024), **changes)


def test_gpt2_activations() -> None:
    """Section 3.2: GPT-2 1.5B, sequence 1K, batch 32: the rule 12 h b s L elements gives 60 GB; with
    checkpointing about 8 GB.
    """
    rule = 2 * 12 * 1600 * 32 * 1024 * 48
    assert rule / 1e9 == pytest.approx(
        float(FACTS["GPT-2 1.5B activations, seq 1K, batch 32"]["value"]), abs=0.5
    )
    whole, checkpointed = (
        estimate(gpt(48, 1600, 25, micro_batch=32, attention="fused", recompute=recompute)).stages[0]
        for recompute in ("none", "full")
    )
    # Their rule of thumb counts 24 bytes an element of the residual stream, Equation 1 of 2205.05198 with
    # fused attention 34.
    assert whole.layer_activations_bytes / rule == pytest.approx(34 / 24, rel=0.02)
    one_layer = whole.layer_activations_bytes / 48
    ours = (checkpointed.layer_activations_bytes + one_layer) / 1e9
    assert ours == pytest.approx(float(FACTS["same, with activation checkpointing"]["value"]), abs=1.5)


def test_100b_checkpoints() -> None:
    """Section 3.2: a 100B model at batch 32 keeps about 60 GB of checkpoints."""
    found = estimate(gpt(125, 8192, 64, micro_batch=32, recompute="full")).stages[0]
    assert found.layer_activations_bytes / 1e9 == pytest.approx(67.1, abs=0.05)
    assert found.layer_activations_bytes / 1e9 == pytest.approx(60, rel=0.12)


def test_p_a_keeps_a_sixteenth() -> None:
    """Section 6.1: split over MP = 16, and nearly nothing under P_a+cpu."""
    settings = dict(micro_batch=32, recompute="full", tp=16)
    whole, split, host = (
        estimate(gpt(125, 8192, 64, **settings, **more)).stages[0].layer_activations_bytes
        for more in (
            {},
            dict(partition_activations=True),
            dict(partition_activations=True, offload_activations=True),
        )
    )
    printed = float(FACTS["100B model b=32 s=1024 MP=16: checkpoints per GPU (Sec 6.1)"]["value"]) / float(
        FACTS["same with P_a"]["value"]
    )
    assert whole == 16 * split
    assert whole / split == pytest.approx(printed, abs=0.6)
    assert host < 0.02 * split


def test_p_a_traffic_is_a_twelfth() -> None:
    """Section 8: model parallelism moves 12 seq hidden a block under checkpointing, P_a one more."""
    settings = dict(recompute="full", tp=16, reentrant=True)
    plain = estimate(gpt(125, 8192, 64, **settings))
    split = estimate(gpt(125, 8192, 64, **settings, partition_activations=True))
    layers = sum(item.bytes for item in plain.traffic[0] if "layers" in item.name)
    message = 2 * 1024 * 8192 * 15 / 16  # bytes of seq x hidden as a ring sends them
    assert layers == 12 * message * 125
    assert 12 * (split.network_bytes - plain.network_bytes) == layers
    host = estimate(gpt(125, 8192, 64, **settings, partition_activations=True, offload_activations=True))
    kept = split.stages[0].layer_activations_bytes
    assert host.host_link_bytes == 2 * kept  # to the host and back


def test_data_parallel_volume() -> None:
    """Section 7: 2 Psi, 2 Psi, 3 Psi."""
    found = {
        zero: estimate(configure("gpt2", dp=64, zero=zero, gradient_dtype="bf16")).network_bytes
        for zero in (0, 1, 2, 3)
    }
    volume = 2 * 124439808 * 63 / 64
    for zero, size in found.items():
        assert size == pytest.approx((3 if zero == 3 else 2) * volume, abs=3)


@pytest.mark.parametrize(
    ("layers", "hidden", "billions"),
    [
        (48, 1600, 1.5),
        (72, 3072, 8),
        (88, 6144, 40),
        (132, 6144, 60),
        (100, 8192, 80),
        (125, 8192, 100),
        (212, 8192, 170),
    ],
)
def test_table_4_models(layers: int, hidden: int, billions: float) -> None:
    """Parameters of Table 4's models, the 40B and 60B ones with the hidden size that fits them (6144, printed
    4096).
    """
    shape = Shape(
        layers=layers,
        hidden=hidden,
        heads=16 if hidden == 1600 else hidden // 128,
        head_width=100 if hidden == 1600 else 128,
        vocab=50257,
    )
    assert shape.parameters() / 1e9 == pytest.approx(billions, rel=0.05)


def test_fused_buffers() -> None:
    """Section 3.2 and 6.2: a flattened float32 buffer of a 1.5B and a 3B model."""
    for billions, fact in ((1.5, "1.5B flattened fp32 buffer"), (3.0, "3B fp32 fused buffer (C_B motive)")):
        assert float(model_states(billions * 1e9, weight_bytes=4).weights) / 1e9 == float(
            FACTS[fact]["value"]
        )
