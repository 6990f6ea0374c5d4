"""`suggest`: what it offers fits, is ranked as it says, and matches the estimate; the speed model against
published iteration times.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from lowtide.cli import app
from lowtide.errors import LowtideError
from lowtide.estimate import EstimateError, configure, estimate
from lowtide.estimate.devices import DEVICES, device
from lowtide.estimate.speed import step_time
from lowtide.estimate.suggest import TIE, Suggestion, fullest_stages, suggest

A100 = device("a100")


def test_llama_3_8b_at_8k_on_four_cards() -> None:
    """The newcomer's question."""
    found = suggest("llama3-8b", devices=4, device=A100, memory_bytes=80 * 10**9, seq=8192)
    assert found.fits and 0 < found.fitting < found.tried
    best = found.best[0].time.total
    for one in found.best:
        full = estimate(one.config, A100)
        assert full.reserved_bytes == one.reserved_bytes
        assert full.reserved_expandable_bytes == one.reserved_expandable_bytes <= found.usable_bytes
        assert full.total_bytes == one.total_bytes <= found.usable_bytes
        assert one.config.devices == 4 and one.config.seq == 8192
    ranks = [one.time.total / best for one in found.best]
    assert min(ranks) > 1 / (1 + TIE) ** 1.01
    flags = found.best[0].flags().split()
    done = CliRunner().invoke(
        app, ["estimate", "--model", "llama3-8b", *flags, "--json"], catch_exceptions=False
    )
    assert json.loads(done.output)["total_bytes"] == found.best[0].total_bytes


@pytest.mark.parametrize("devices", [3, 6, 12])
def test_any_number_of_devices_has_a_step_that_divides_among_them(devices: int) -> None:
    found = suggest("llama3-8b", devices=devices, device=A100, memory_bytes=80 * 10**9, seq=8192)
    assert found.fits
    for one in found.best:
        assert one.config.global_batch % one.config.dp == 0 and one.config.global_batch * 8192 >= 1 << 22


def test_the_order_is_the_one_that_is_told() -> None:
    """Steps of 3 % in time, in each the simpler first, of equals the faster; the command says so above its
    table.
    """
    found = suggest("llama3-8b", devices=4, device=A100, memory_bytes=80 * 10**9, seq=8192, count=1000)
    fastest = min(one.time.total for one in found.best)

    def place(one: Suggestion) -> tuple[int, bool, bool, int, float]:
        config, step = one.config, 0
        while one.time.total >= fastest * 1.03 ** (step + 1) * (1 + 1e-12):
            step += 1
        spared = (config.recompute != "none") + (config.zero == 3)
        return step, config.offload_optimizer > 0, config.pp > 1, spared, one.time.total

    places = [place(one) for one in found.best]
    assert places == sorted(places) and places[0][0] == 0 < places[-1][0]
    done = CliRunner().invoke(
        app, ["suggest", "--model", "llama3-8b", "--seq", "8192", "--devices", "4", "--memory", "80GB"]
    )
    told = " ".join(done.output.split())
    assert (
        "Order: the fastest predicted first; in steps of 3% times count as equal, and there the simpler "
        "goes first: without offload" in told
    )
    assert told.index("Order:") < told.index("tok/s")


def test_the_ends_need_most() -> None:
    """`suggest` looks at the first and the last stage only."""
    for model, pp in (("llama3-70b", 8), ("175b", 16), ("gpt2-xl", 4)):
        for recompute in ("none", "full"):
            config = configure(model, pp=pp, recompute=recompute, global_batch=64)
            assert max(one.total_bytes for one in fullest_stages(config)) == estimate(config).total_bytes


def test_what_is_given_is_not_varied() -> None:
    found = suggest(
        "llama3-8b", devices=8, device=A100, tp=2, recompute="full", zero=1, micro_batch=2, count=20
    )
    for one in found.best:
        config = one.config
        assert (config.tp, config.recompute, config.zero, config.micro_batch) == (2, "full", 1, 2)


def test_more_memory_is_never_slower() -> None:
    small = suggest("llama3-8b", devices=2, device=A100, memory_bytes=60 * 10**9)
    large = suggest("llama3-8b", devices=2, device=A100, memory_bytes=180 * 10**9)
    assert large.fitting > small.fitting
    assert min(one.time.total for one in large.best) <= min(one.time.total for one in small.best) * (1 + TIE)


def test_nothing_fits() -> None:
    found = suggest("llama3-70b", devices=1, device=device("rtx4090"))
    assert not found.fits and len(found.best) == 1
    assert found.best[0].total_bytes > found.usable_bytes
    assert found.best[0].config.recompute == "full" and found.best[0].config.offload_optimizer == 1


def test_faster_devices_are_faster() -> None:
    config = configure("llama3-8b", tp=4, global_batch=64)
    times = [step_time(config, DEVICES[name]).total for name in ("v100", "a100", "h100", "b200")]
    assert times == sorted(times, reverse=True)
    slow_links = replace(A100, node_bandwidth=A100.node_bandwidth / 10)
    assert step_time(config, slow_links).tensor == pytest.approx(10 * step_time(config, A100).tensor)


def test_command() -> None:
    text = (
        CliRunner()
        .invoke(
            app,
            ["suggest", "--model", "llama3-8b", "--seq", "8192", "--devices", "4", "--memory", "80GB"],
            env={"COLUMNS": "120"},
        )
        .output
    )
    assert text.startswith("It fits") and "lowtide estimate --model llama3-8b" in text and "assumed:" in text
    refused = CliRunner().invoke(
        app, ["suggest", "--model", "llama3-70b", "--devices", "1", "--device", "rtx4090"]
    )
    assert refused.output.startswith("It does not fit") and refused.exit_code == 1
    assert (
        CliRunner()
        .invoke(app, ["suggest", "--model", "llama3-70b", "--devices", "1", "--device", "rtx4090", "--json"])
        .exit_code
        == 1
    )
    flags = [
        "--model",
        "gpt2",
        "--devices",
        "1",
        "--json",
        "--peak-tflops",
        "100",
        "--memory-bandwidth",
        "1000",
    ]
    data = json.loads(CliRunner().invoke(app, ["suggest", *flags], catch_exceptions=False).output)
    assert data["fits"] and data["suggestions"][0]["seconds"] > 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (dict(devices=0), "--devices=0"),
        (dict(devices=7, tp=2), "--devices=7 .* at --tp=2"),
        (dict(devices=4, reserve=1.5), "--reserve=1.5"),
        (dict(devices=4, count=0), "--count=0"),
        (dict(devices=4, hiden=1), "did you mean 'hidden'"),
    ],
)
def test_refusals(arguments: dict[str, object], says: str) -> None:
    with pytest.raises(EstimateError, match=says):
        suggest("llama3-8b", device=A100, **arguments)  # type: ignore[arg-type]
    with pytest.raises(LowtideError, match="did you mean 'h100'"):
        device("h1000")


@pytest.mark.parametrize("flag", ["--node", "--node-bandwidth", "--host-bandwidth", "--peak-tflops"])
def test_a_number_that_cannot_be_is_named_as_it_was_given(flag: str) -> None:
    command = ["suggest", "--model", "llama3-8b", "--devices", "4", flag, "-1"]
    done = CliRunner().invoke(app, command)
    told = f"{done.output} {done.exception}"
    assert done.exit_code != 0 and f"{flag}=-1" in told and "above 0" in told


def test_a_name_s_case_and_aliases_change_nothing() -> None:
    """``Llama3-8B`` was looked for among all that has a formula, ``llama3-8b`` among what lowtide runs."""
    rows = ["suggest", "--devices", "4", "--seq", "8192", "--model"]
    asked = [CliRunner().invoke(app, [*rows, name]).output for name in ("llama3-8b", "Llama3.1-8B")]
    assert asked[0] == asked[1]
    assert "Looked through what lowtide runs (--for any: " in asked[0]
    titan = suggest("LLAMA3-8B", devices=4, device=A100, runs_with="torchtitan")
    assert "--model.flavor 8B" in (titan.best[0].command or "")


def test_memory_in_powers_of_1000_is_told_apart_from_the_card() -> None:
    rows = ["--model", "llama3-8b", "--memory"]
    for command in (["suggest", "--devices", "4"], ["estimate", "--tp", "4"]):
        told = " ".join(CliRunner().invoke(app, [*command, *rows, "80GB"]).output.split())
        assert "80GB is 74.5 GiB (GB are powers of 1000, GiB of 1024): --device a100 has 79.1 GiB" in told
        of_h100 = CliRunner().invoke(app, [*command, *rows, "80GB", "--device", "h100"]).output
        assert "--device h100 has " in " ".join(of_h100.split())
        assert "powers of 1000" not in CliRunner().invoke(app, [*command, *rows, "80GiB"]).output


def test_another_model_is_not_taken_for_a_slip() -> None:
    with pytest.raises(EstimateError, match=r"no model 'bamba-9b': the models.*--from-hf"):
        suggest("bamba-9b", devices=4, device=A100)
    with pytest.raises(EstimateError, match="did you mean 'llama3-8b'"):
        suggest("lama3-8b", devices=4, device=A100)


def test_where_nothing_fits_it_says_what_to_do() -> None:
    command = ["suggest", "--model", "llama3-8b", "--devices", "1", "--device", "a100"]
    done = CliRunner().invoke(app, [*command, "--for", "lowtide"], env={"COLUMNS": "100"})
    told = " ".join(done.output.split())
    assert done.exit_code == 1 and "Give more --devices" in told and "--for any looks beyond" in told
    assert "--optimizer-host-fraction 1 keeps" in told and "Given and not" not in told
    given = ["--offload-optimizer", "1", "--for", "any", "--model", "llama3-70b"]
    told = " ".join(CliRunner().invoke(app, [*command, *given]).output.split())
    assert "Given and not varied: --offload-optimizer 1.0; leave that out. Give more --devices" in told


def test_an_offload_that_a_framework_does_not_have_is_refused_in_words() -> None:
    with pytest.raises(EstimateError, match=r"--for torchtitan, --offload-optimizer can be 0\. Leave it out"):
        suggest("llama3-8b", devices=1, device=A100, runs_with="torchtitan", offload_optimizer=0.3)


@pytest.mark.parametrize(
    "given", [("llama3-8b", "4", "a100"), ("gpt2", "2", "v100"), ("llama3-70b", "64", "h100")]
)
def test_lowtide_s_commands_are_parsed_by_lowtide(given: tuple[str, str, str]) -> None:
    """Every row's command is one that `lowtide train` takes, for as many processes as there are devices."""
    model, devices, kind = given
    asked = ["suggest", "--model", model, "--devices", devices, "--device", kind, "--json"]
    rows = json.loads(CliRunner().invoke(app, asked).output)["suggestions"]
    assert len(rows) > 2
    cli: Any = typer.main.get_command(app)
    train = cli.commands["train"]
    for row in rows:
        before, _, flags = row["command"].partition(" train ")
        start = shlex.split(before)
        given_to = train.make_context("train", shlex.split(flags)).params
        nodes = int(start[start.index("--nnodes") + 1]) if "--nnodes" in start else 1
        processes = int(start[start.index("--nproc-per-node") + 1]) * nodes
        assert processes == given_to["tp"] * given_to["pp"] * given_to["dp"] == int(devices)
        assert given_to["batch"] * given_to["grad_accum"] == row["global_batch"]
        assert ("$MASTER_ADDR" in before) == (nodes > 1)


def test_the_printed_command_says_all_that_was_given() -> None:
    """`lowtide estimate` with the suggested flags counts the same bytes, whatever was given."""
    given = [
        "--optimizer",
        "sgd",
        "--dtype",
        "fp32",
        "--attention",
        "unfused",
        "--dropout",
        "0.2",
        "--seq",
        "512",
    ]
    data = json.loads(
        CliRunner().invoke(app, ["suggest", "--model", "gpt2", "--devices", "2", "--json", *given]).output
    )
    best = data["suggestions"][0]
    again = CliRunner().invoke(
        app, ["estimate", "--model", "gpt2", "--json", *best["flags"].split()], catch_exceptions=False
    )
    stages = json.loads(again.output)["stages"]
    assert max(stage["total_bytes"] for stage in stages) == best["total_bytes"]
    for name in ("total_bytes", "reserved_bytes", "reserved_expandable_bytes"):
        assert json.loads(again.output)[name] == best[name]


def test_help_promises_no_fixed_default_for_what_varies() -> None:
    text = " ".join(CliRunner().invoke(app, ["suggest", "--help"]).output.split())
    assert "[default: 1]" not in text and "(t). [default: varied]" in text


def answered(question: str) -> tuple[str, int]:
    done = CliRunner().invoke(app, ["suggest", *question.split()], env={"COLUMNS": "80"})
    return " ".join(done.output.split()), done.exit_code


def test_llama_3_8b_at_8k_on_one_card_of_24_gb() -> None:
    """What no trainer of whole models fits is answered with recipes, and with what all of it would need."""
    told, code = answered("--model llama3-8b --seq 8192 --devices 1 --memory 24GB")
    assert code == 0
    assert "With lowtide it does not fit: it needs 1" in told and "With trl: It fits" in told
    assert "To train all weights, with the optimizer on the devices, takes 6" in told
    for row in ("1 all full host fused-linear", "LoRA full device", "QLoRA full device fused-linear"):
        assert row in told
    assert "--optim paged_adamw_8bit --use_peft --lora_r 16 --lora_target_modules all-linear" in told
    found = suggest("llama3-8b", devices=1, device=A100, memory_bytes=24 * 10**9, seq=8192, runs_with="trl")
    assert found.whole and found.whole.reserved_expandable_bytes > 60 * 2**30
    for one in found.best:
        flags = ["estimate", "--model", "llama3-8b", *one.flags().split(), "--json"]
        done = CliRunner().invoke(app, flags, catch_exceptions=False)
        assert json.loads(done.output)["total_bytes"] == one.total_bytes


def test_qwen_3_30b_a3b_on_8_cards_of_80_gb() -> None:
    told, code = answered("--model qwen3-30b-a3b --devices 8 --memory 80GB --seq 4096")
    assert code == 0 and "torchtitan/train.py --model.name qwen3 --model.flavor 30B-A3B" in told
    assert "--parallelism.expert_parallel_degree 4" in told and "4 e4" in told


def test_1b_with_128k_tokens_on_2_cards_of_40_gb() -> None:
    """From 32k tokens on context parallelism is looked at."""
    told, code = answered("--model llama3-1b --seq 131072 --devices 2 --memory 40GB")
    assert code == 0 and "--parallelism_config_cp_size 2" in told and "1 c2" in told
    assert "c2" not in answered("--model llama3-1b --seq 16384 --devices 2 --memory 40GB")[0]


def test_adapters_are_offered_only_where_nothing_else_fits() -> None:
    found = suggest("llama3-1b", devices=1, device=A100, seq=4096, runs_with="trl")
    assert found.whole is None and not any(one.config.lora for one in found.best)
    asked = suggest("llama3-1b", devices=1, device=A100, seq=4096, runs_with="trl", lora=8)
    assert {one.config.lora for one in asked.best} == {8}


@pytest.mark.parametrize("name", ["trl", "axolotl"])
def test_recipes_say_what_the_rows_are(name: str) -> None:
    room: dict[str, Any] = dict(devices=1, device=A100, memory_bytes=24 * 10**9, seq=8192, runs_with=name)
    host, lora, qlora = (one.command for one in suggest("llama3-8b", **room).best)
    if name == "trl":
        assert "--use_deepspeed --zero_stage 2 --offload_optimizer_device cpu" in host
        assert "--use_peft" in lora and "--load_in_4bit" not in lora and "--load_in_4bit" in qlora
        return
    given = json.loads(shlex.split(qlora)[1])
    assert given["adapter"] == "qlora" and given["load_in_4bit"] and given["micro_batch_size"] == 2
    assert json.loads(shlex.split(lora)[1])["adapter"] == "lora"
    assert "deepspeed" in json.loads(shlex.split(host)[1])


@pytest.mark.slow
def test_trl_takes_its_recipes() -> None:
    """Each flag is one of TRL's or of accelerate's."""
    from dataclasses import fields

    trl = pytest.importorskip("trl")
    launch = pytest.importorskip("accelerate.commands.launch").launch_command_parser()
    known = {f.name for kind in (trl.SFTConfig, trl.ModelConfig, trl.ScriptArguments) for f in fields(kind)}
    known |= {name.lstrip("-") for action in launch._actions for name in action.option_strings}
    for question in (
        dict(devices=1, memory_bytes=24 * 10**9, seq=8192),
        dict(devices=16, memory_bytes=80 * 10**9, seq=1 << 17),
    ):  # fmt: skip
        for one in suggest("llama3-8b", device=A100, runs_with="trl", **question).best:
            words = shlex.split(one.command)
            assert words[:2] == ["trl", "sft"]
            assert {word.lstrip("-") for word in words if word.startswith("--")} <= known


@pytest.mark.parametrize("model", ["llama3-8b --for torchtitan", "22b", "llama3-8b --memory 30GiB"])
def test_estimate_shows_the_bytes_of_the_row_that_it_explains(model: str) -> None:
    """The figure in the table is the one under "reserved"."""
    asked = ["suggest", "--model", *model.split(), "--devices", "8"]
    data = json.loads(CliRunner().invoke(app, [*asked, "--json"]).output)["suggestions"][0]
    told, _ = answered(f"--model {model} --devices 8")
    assert f" {data['reserved_expandable_bytes'] / 2**30:.1f} " in told
    flags = ["estimate", "--model", model.split()[0], "--brief", *data["flags"].split()]
    shown = CliRunner().invoke(app, flags, catch_exceptions=False).output
    assert f" {data['reserved_expandable_bytes'] / 2**30:.2f} " in shown


def test_a_shorter_sequence_that_fits_is_found() -> None:
    model = "--model gpt2 --devices 1 --for lowtide --micro-batch 16 --recompute none --loss torch"
    longest, half = (suggested_bytes(f"{model} --seq {seq}") for seq in (1024, 512))
    memory = f"--memory {(longest + half) // 2} --reserve 0"
    told, code = answered(f"{model} {memory}")
    assert code == 0 and "At 1024 tokens it does not fit: it needs" in told and "gpt2 at 512 tokens" in told
    told, code = answered(f"{model} {memory} --seq 1024")
    assert code == 1 and "It fits at 512 tokens: give --seq 512." in told, "what is given is not varied"


def suggested_bytes(asked: str) -> int:
    done = CliRunner().invoke(app, ["suggest", *asked.split(), "--device", "a100", "--json"])
    return json.loads(done.output)["suggestions"][0]["reserved_expandable_bytes"]
