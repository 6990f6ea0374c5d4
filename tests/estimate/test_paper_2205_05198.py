"""arXiv 2205.05198, "Reducing Activation Recomputation in Large Transformer Models": published value beside
ours.

What the paper prints against its own formulas follows the formula here: "extra terms < 0.01 %" works out at
0.57 % (tested below as that), and Figure 8's 141 % against Table 4's 139 % is a time, which this room does
not print.
"""

from __future__ import annotations

import re
from fractions import Fraction
from itertools import pairwise

import pytest
from published_tables import facts, table

from lowtide.estimate import Config, configure, estimate
from lowtide.estimate.edges import loss_terms
from lowtide.estimate.flops import attention_flops, layer_flops, logit_flops
from lowtide.estimate.layer import kept_terms, layer_terms
from lowtide.estimate.presets import PRESETS
from lowtide.estimate.schedule import bubble_share, layers_in_flight

GIB = 2**30
MODELS = {row["model"]: row for row in table("2205.05198_table3_models")}
FACTS = facts("2205.05198")
TECHNIQUES = {
    "baseline": {},
    "present work": dict(sequence_parallel=True, recompute="selective"),
    "+ sequence parallel": dict(sequence_parallel=True),
    "+ selective recompute": dict(recompute="selective"),
    "+ both": dict(sequence_parallel=True, recompute="selective"),
    "full recompute": dict(recompute="full"),
}
ROWS = {
    "no parallelism": dict(tp=1),
    "tensor parallel (baseline)": {},
    "tensor + sequence parallel": dict(sequence_parallel=True),
    "tensor parallel + selective recompute": dict(recompute="selective"),
    "tensor + sequence parallel + selective recompute": dict(sequence_parallel=True, recompute="selective"),
    "full activation recomputation": dict(recompute="full"),
}


def published(model: str, **changes: object) -> Config:
    return configure(model, as_published=True, **changes)


def per_layer(config: Config) -> Fraction:
    return sum((term.bytes * share for term, share in kept_terms(config)), Fraction(0))


@pytest.mark.parametrize("model", MODELS)
def test_table_3_models(model: str) -> None:
    row = MODELS[model]
    config = published(model)
    ours = dict(
        heads_a=config.model.heads, hidden_h=config.model.hidden, layers_L=config.model.layers,
        tensor_parallel_t=config.tp,
        pipeline_parallel_p=config.pp, interleave_m=config.interleave, n_gpus=config.devices,
        global_batch_B=config.global_batch,
        micro_batch_b=config.micro_batch, seq_s=config.seq, vocab_v=config.model.vocab,
    )  # fmt: skip
    assert ours == {name: int(row[name]) for name in ours}


@pytest.mark.parametrize(
    "row", table("2205.05198_sec41_breakdown"), ids=lambda row: f"{row['block']}-{row['item']}"
)
def test_section_4_1_item_by_item(row: dict[str, str]) -> None:
    names = {
        ("attention", "out-projection input"): ["input of the output projection"],
        ("attention", "attention(output) dropout mask"): ["mask of the attention's dropout"],
        ("attention", "QKV shared input"): ["input of the q, k, v projection"],
        ("attention", "Q and K"): ["queries", "keys"],
        ("attention", "softmax output"): ["output of softmax"],
        ("attention", "softmax dropout mask"): ["mask of softmax's dropout"],
        ("attention", "dropout output"): ["output of softmax's dropout"],
        ("attention", "V"): ["values"],
        ("MLP", "linear1 input"): ["input of the MLP"],
        ("MLP", "linear2 input"): ["input of the MLP's last layer"],
        ("MLP", "GeLU input"): ["input of GELU"],
        ("MLP", "dropout mask"): ["mask of the MLP's dropout"],
        ("layernorm", "2 x input"): ["input of the attention norm", "input of the MLP norm"],
    }
    config = published("22b", tp=1)
    terms = {term.name: term.bytes for term in layer_terms(config)}
    groups = {
        "attention": [n for key, ns in names.items() if key[0] == "attention" for n in ns],
        "MLP": [n for key, ns in names.items() if key[0] == "MLP" for n in ns],
        "layer": list(terms),
    }
    wanted = names.get((row["block"], row["item"])) or groups[row["block"]]
    s, b, h, a = config.seq, config.micro_batch, config.model.hidden, config.model.heads
    formula = row["bytes"].replace("sbh(34+5as/h)", "34sbh+5as^2b")
    sizes = {"sbh": s * b * h, "as^2b": a * s * s * b}
    theirs = sum(int(number or 1) * sizes[what] for number, what in re.findall(r"(\d*)(sbh|as\^2b)", formula))
    assert sum(terms[name] for name in wanted) == theirs


@pytest.mark.parametrize("t", [1, 2, 4, 8])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("row", table("2205.05198_table2_formulas"), ids=lambda row: row["configuration"])
def test_table_2_to_the_byte(row: dict[str, str], model: str, t: int) -> None:
    changes = dict(ROWS[row["configuration"]])
    if changes.get("sequence_parallel") and t == 1:
        pytest.skip("sequence parallelism takes two ranks")
    config = published(model, **(dict(tp=t) | changes))
    names = dict(s=config.seq, b=config.micro_batch, h=config.model.hidden, a=config.model.heads, t=config.tp)
    theirs = eval(row["python"], {}, {name: Fraction(value) for name, value in names.items()})
    assert per_layer(config) == theirs


def test_table_2_through_the_call() -> None:
    """The same through `estimate`: one layer of a one-layer model."""
    found = estimate(configure("22b", layers=1, micro_batch=4, tp=8, sequence_parallel=True))
    s, b, h, a, t = 2048, 4, 6144, 64, 8
    assert found.stages[0].layer_activations_bytes == (34 * s * b * h + 5 * a * s * s * b) // t


@pytest.mark.parametrize(
    "row", table("2205.05198_fig1_memory"), ids=lambda row: f"{row['model']}-{row['case']}"
)
def test_figure_1_within_half_a_gib(row: dict[str, str]) -> None:
    found = estimate(published(row["model"], **TECHNIQUES[row["case"]]))
    assert found.mean_states_bytes / GIB == pytest.approx(float(row["fig_param_optimizer_GB"]), abs=0.5)
    assert found.stages[0].layer_activations_bytes / GIB == pytest.approx(
        float(row["fig_activation_GB"]), abs=0.5
    )
    assert found.stages[0].layer_activations_bytes / GIB == pytest.approx(
        float(row["pred_activation_GiB"]), abs=0.006
    )
    sum_bytes = found.mean_states_bytes + found.stages[0].layer_activations_bytes
    assert sum_bytes / GIB == pytest.approx(float(row["fig_total_GB"]), abs=0.5)


@pytest.mark.parametrize(
    "row", table("2205.05198_fig7_percent_of_baseline"), ids=lambda row: f"{row['model']}-{row['technique']}"
)
def test_figure_7_within_0_3_points(row: dict[str, str]) -> None:
    base = estimate(published(row["model"])).stages[0].layer_activations_bytes
    ours = estimate(published(row["model"], **TECHNIQUES[row["technique"]])).stages[0].layer_activations_bytes
    assert 100 * ours / base == pytest.approx(float(row["formula_pct"]), abs=0.01)
    assert 100 * ours / base == pytest.approx(float(row["fig_pct"]), abs=0.3)


@pytest.mark.parametrize("row", table("2205.05198_table5_e2e"), ids=lambda row: row["model"])
def test_table_5_mfu_and_hfu_within_0_2_points(row: dict[str, str]) -> None:
    seconds = float(row["present_work_iter_s"])
    found = estimate(
        published(row["model"], **TECHNIQUES["present work"], iteration_seconds=seconds, peak_flops=312e12)
    )
    assert found.mfu is not None and found.hfu is not None
    assert 100 * found.mfu == pytest.approx(float(row["MFU_pct"]), abs=0.2)
    assert 100 * found.hfu == pytest.approx(float(row["HFU_pct"]), abs=0.2)
    assert found.flops.model == pytest.approx(float(row["derived_model_FLOPs_eq7"]), rel=1e-6)
    assert found.flops.hardware == pytest.approx(float(row["derived_hw_FLOPs_eq8"]), rel=1e-6)
    slow = estimate(
        published(
            row["model"],
            recompute="full",
            iteration_seconds=float(row["full_recompute_iter_s"]),
            peak_flops=312e12,
        )
    )
    assert slow.mfu is not None
    assert 100 * slow.mfu == pytest.approx(float(row["derived_MFU_pct_of_full_recompute"]), abs=0.01)


def test_data_parallel_530b_mfu() -> None:
    """Section 6.3: 8-way data parallelism on 2240 GPUs."""
    seconds = float(FACTS["530B 8-way DP 2240 GPUs iteration time"]["value"])
    found = estimate(
        published("530b", dp=8, global_batch=280 * 8, iteration_seconds=seconds, peak_flops=312e12)
    )
    assert found.config.devices == 2240 and found.mfu is not None
    assert 100 * found.mfu == pytest.approx(float(FACTS["530B 2240 GPU MFU"]["value"]), abs=0.2)


def test_appendix_a_flops() -> None:
    config = published("175b", recompute="selective")
    s, h, v, layers, batch = 2048, 12288, 51200, 96, 64
    found = estimate(config).flops
    assert layer_flops(config, batch) == 24 * batch * s * h**2 + 4 * batch * s**2 * h
    assert logit_flops(config, batch) == 2 * batch * s * h * v
    lead = 72 * batch * layers * s * h**2
    assert found.model == pytest.approx(lead * (1 + s / (6 * h) + v / (12 * h * layers)), rel=1e-12)
    assert found.hardware == pytest.approx(lead * (1 + s / (3 * h) + v / (12 * h * layers)), rel=1e-12)
    # Equation 9 leaves the logits out
    assert found.hardware / found.model == pytest.approx(1 + s / (6 * h), rel=1e-3)
    # Equation 8 charges three forwards of the core; one is run.
    assert (
        3 * (found.executed - found.model)
        == found.hardware - found.model
        == 3 * layers * attention_flops(config, batch)
    )


@pytest.mark.parametrize(("model", "fact"), [("175b", "GPT-3"), ("530b", "MT-NLG")])
def test_section_5_shares(model: str, fact: str) -> None:
    base, both = (published(model, tp=1, **changes) for changes in ({}, dict(recompute="selective")))
    saved = 1 - per_layer(both) / per_layer(base)
    assert float(100 * saved) == pytest.approx(
        float(FACTS[f"selective memory saving {fact}"]["value"]), abs=0.6
    )
    core = per_layer(base) - per_layer(both)
    assert core / (base.tokens * base.model.hidden) == int(FACTS[f"5as/h {fact}"]["value"])
    flops = estimate(both).flops
    assert 100 * (flops.hardware / flops.model - 1) == pytest.approx(
        float(FACTS[f"selective FLOPs overhead {fact}"]["value"]), abs=0.1
    )


def test_section_6_1_shares() -> None:
    for model in MODELS:
        base, both, full = (
            per_layer(published(model, **TECHNIQUES[name]))
            for name in ("baseline", "present work", "full recompute")
        )
        assert float(both / base) < 0.205  # "under 20 %", printed as about a fifth
        assert float(full / base) == pytest.approx(0.10, abs=0.025)


def test_section_4_2_3_interleaving() -> None:
    config = published("175b")
    assert layers_in_flight(config, 0) == 96 * (1 + Fraction(8 - 1, 8 * 3))
    assert bubble_share(config) == Fraction(7, 64 * 3)
    first = estimate(published("1t")).stages[0]
    equation_5 = 2048 * 25600 * 128 * (10 + Fraction(24, 8) + Fraction(5 * 160 * 2048, 25600 * 8))
    assert first.layer_activations_bytes == equation_5


def test_section_4_3_extra_terms() -> None:
    """The whole of Section 4.3 at p = 1: sbhL/t (p/L + 4/L (1 + v/h)); for the 22B model 0.57 % of the
    layers, not the printed 0.01 %.
    """
    config = published("22b", sequence_parallel=True)
    s, b, h, layers, t, v = 2048, 4, 6144, 48, 8, 51200
    stage = estimate(config).stages[0]
    extra = stage.activations_bytes - stage.layer_activations_bytes
    assert extra == Fraction(s * b * h * layers, t) * (
        Fraction(1, layers) + Fraction(4, layers) * (1 + Fraction(v, h))
    )
    assert 100 * extra / stage.layer_activations_bytes == pytest.approx(0.57, abs=0.005)
    parts = {term.name: term.bytes for term in loss_terms(config)}
    assert parts == {
        "input of the last norm": Fraction(2 * s * b * h, t),
        "input of the output layer": Fraction(2 * s * b * h, t),
        "logits in float32": Fraction(4 * s * b * v, t),
    }


def test_section_4_3_behind_a_pipeline() -> None:
    """With p > 1 the first stage has the embedding's masks of p micro-batches, the last stage the output
    layer.
    """
    found = estimate(published("1t", sequence_parallel=True))
    first, last = found.stages[0], found.stages[-1]
    names = {line.name: line.bytes for line in first.lines if line.place == "ends"}
    assert names == {"mask of the embedding's dropout": 2048 * 25600 * 64 // 8}
    assert [line.name for line in last.lines if line.place == "ends"] == [
        "input of the last norm", "input of the output layer", "logits in float32",
    ]  # fmt: skip


FIGURE_9 = {
    (row["case"], int(row["pipeline_rank"])): float(row["fig_GB"])
    for row in table("2205.05198_fig9_pipeline_rank")
}


@pytest.mark.parametrize(
    "row", table("2205.05198_fig9_pipeline_rank"), ids=lambda row: f"{row['case']}-{row['pipeline_rank']}"
)
def test_figure_9(row: dict[str, str]) -> None:
    """530B, p = 35, full recomputation without sequence parallelism: what is kept, then with the layer at
    work on top, as the figure shows.
    """
    config = published(
        "530b", interleave=1, recompute="full", keep_output_tensors=row["case"] == "no dealloc"
    )
    stage = estimate(config).stages[int(row["pipeline_rank"])]
    ends = [
        line
        for line in stage.lines
        if line.kind == "activations" and line.name not in {term.name for term in loss_terms(config)}
    ]
    assert sum(line.bytes for line in ends) / GIB == pytest.approx(
        float(row["pred_ckpt_bytes_GiB_excl_one_layer_workspace"]), abs=0.01
    )
    if int(row["pipeline_rank"]) < 34:
        assert stage.activation_peak_bytes / GIB == pytest.approx(float(row["fig_GB"]), rel=0.05)


def test_figure_9_shape() -> None:
    """A straight fall from the first rank to the last, and Appendix B's saving of sbh per micro-batch in
    flight.
    """
    kept, freed = (
        [
            stage.layer_activations_bytes + sum(line.bytes for line in stage.lines if "sent" in line.name)
            for stage in estimate(config).stages
        ]
        for config in (
            published("530b", interleave=1, recompute="full", keep_output_tensors=keep)
            for keep in (True, False)
        )
    )
    assert len({a - b for a, b in pairwise(freed)}) == 1
    saving = [(a - b) / GIB for a, b in zip(kept, freed, strict=True)]
    assert saving[0] == pytest.approx(float(FACTS["dealloc saving 530B rank 0"]["value"]), abs=0.005)
    assert saving[0] == pytest.approx(FIGURE_9["no dealloc", 0] - FIGURE_9["dealloc", 0], abs=0.05)
    assert saving[1] == pytest.approx(FIGURE_9["no dealloc", 1] - FIGURE_9["dealloc", 1], abs=0.05)


def test_appendix_c_outstanding_micro_batches_and_window() -> None:
    config = published("1t", **TECHNIQUES["present work"], memory_bytes=80 * 10**9)
    found = estimate(config)
    assert [int(stage.micro_batches_in_flight) for stage in found.stages] == [
        max(0, 64 - stage) for stage in range(64)
    ]
    whole = [stage.whole_micro_batches for stage in found.stages]
    assert all(count is not None for count in whole)
    # later stages have more room for fewer micro-batches
    assert whole[-1] == 1 and whole[0] is not None and 0 < whole[0] < 64
    for stage, count in zip(found.stages, whole, strict=True):
        assert count is not None
        core = per_layer(published("1t", sequence_parallel=True)) - per_layer(config)
        left = 80 * 10**9 - stage.total_bytes
        assert count * core * 2 <= left
        assert count == stage.micro_batches_in_flight or (count + 1) * core * 2 > left


def test_collectives_per_layer() -> None:
    """Section 4.2.2: sequence parallelism moves what tensor parallelism moves, and one more gather for each
    column-parallel layer.
    """
    plain, split = (estimate(published("22b", **changes)) for changes in ({}, dict(sequence_parallel=True)))
    message = 2 * 2048 * 4 * 6144
    ring = Fraction(7, 8)
    assert plain.network_bytes == (4 * 2 * 48 + 4) * message * ring
    assert split.network_bytes - plain.network_bytes == 2 * 48 * message * ring


@pytest.mark.parametrize(
    ("model", "billions"), [("22b", 22.0), ("175b", 175.0), ("530b", 530.0), ("1t", 1008.0)]
)
def test_parameters(model: str, billions: float) -> None:
    assert PRESETS[model].shape.parameters() / 1e9 == pytest.approx(billions, rel=0.005)
