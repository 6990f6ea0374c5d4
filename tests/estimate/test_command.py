"""``lowtide estimate``: what it prints, what it refuses, and that it needs no torch."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lowtide.cli import app
from lowtide.errors import LowtideError
from lowtide.estimate import EstimateError, configure, estimate


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["estimate", *arguments], catch_exceptions=False, env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    return result.output


NO_TORCH = """
import sys
sys.modules["torch"] = None  # any import of it fails
{code}
assert sys.modules["torch"] is None
"""


@pytest.mark.parametrize(
    "code",
    [
        "import lowtide.estimate as e; e.estimate(e.configure('22b', as_published=True))",
        "import lowtide; lowtide.estimate.estimate(lowtide.estimate.configure('gpt2'))",
        "sys.argv = ['lowtide', 'estimate', '--model', 'llama3-8b', '--json']\nfrom lowtide.cli import main\n"
        "try:\n    main()\nexcept SystemExit as stop:\n    assert not stop.code",
    ],
)
def test_no_torch(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", NO_TORCH.format(code=code)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_json_is_the_call() -> None:
    flags = [
        "--model",
        "22b",
        "--tp",
        "8",
        "--sequence-parallel",
        "--micro-batch",
        "4",
        "--recompute",
        "selective",
        "--json",
    ]
    ours = estimate(configure("22b", tp=8, sequence_parallel=True, micro_batch=4, recompute="selective"))
    assert json.loads(run(*flags)) == json.loads(json.dumps(ours.to_json()))


def test_every_flag_of_the_issue() -> None:
    text = run(
        "--layers", "24", "--hidden", "2048", "--heads", "16", "--kv-heads", "8", "--ffn", "8192", "--vocab",
        "32000", "--seq", "4096",
        "--micro-batch", "2", "--global-batch", "64", "--tp", "2", "--pp", "2", "--interleave", "2", "--dp",
        "4", "--zero", "1",
        "--recompute", "full", "--attention", "fused", "--mlp", "swiglu", "--norm", "rmsnorm", "--dropout",
        "0.1", "--dtype", "bf16",
        "--optimizer", "adam", "--offload-optimizer", "0.5", "--partition-activations",
        "--offload-activations", "--loss", "chunked",
        "--tied-embeddings", "--iteration-time", "2.0", "--peak-tflops", "312", "--json",
    )  # fmt: skip
    data = json.loads(text)
    assert len(data["stages"]) == 2 and 0 < data["mfu"] < data["hfu"]
    config = data["config"]
    assert (config["kv_heads"], config["ffn"], config["mlp"], config["norm"], config["tied"]) == (
        8,
        8192,
        "swiglu",
        "rmsnorm",
        True,
    )
    assert (config["global_batch"], config["interleave"], config["zero"], config["recompute"]) == (
        64,
        2,
        1,
        "full",
    )


def test_each_flag_changes_the_answer() -> None:
    """No flag is silently ignored."""
    base = [
        "--layers",
        "24",
        "--hidden",
        "2048",
        "--heads",
        "16",
        "--tp",
        "2",
        "--pp",
        "2",
        "--dp",
        "4",
        "--global-batch",
        "64",
        "--recompute",
        "full",
    ]
    plain = json.loads(run(*base, "--json"))
    changes = [
        ["--kv-heads", "8"], ["--ffn", "4096"], ["--vocab", "32000"], ["--seq", "1024"],
        ["--micro-batch", "2"], ["--global-batch", "128"],
        ["--sequence-parallel"], ["--interleave", "2"], ["--zero", "1"], ["--zero", "2"], ["--zero", "3"],
        ["--recompute", "none"], ["--recompute", "4"],
        ["--recompute", "selective"], ["--recompute", "sqrt"], ["--attention", "fused"], ["--mlp", "swiglu"],
        ["--mlp", "squared-relu"],
        ["--norm", "rmsnorm"], ["--dropout", "0"], ["--dtype", "fp32"], ["--dtype", "autocast"],
        ["--gradient-dtype", "bf16"], ["--optimizer", "sgd"],
        ["--offload-optimizer", "0.3"], ["--partition-activations"], ["--offload-activations"],
        ["--loss", "chunked"], ["--loss", "torch"], ["--loss", "torch-uncast"], ["--loss", "compiled"],
        ["--gather-logits"], ["--zero", "2", "--no-sync"], ["--dtype", "bf16-true"],
        ["--recompute", "selective-op"],
        ["--recompute", "selective-layer"], ["--untied-embeddings"],
        ["--loss", "fused-linear"], ["--loss", "transformers"], ["--update", "foreach"],
        ["--optimizer", "adamw-8bit"], ["--optimizer", "paged-adamw"], ["--lora", "8"],
        ["--lora", "8", "--lora-targets", "q,v"], ["--lora", "8", "--lora-dtype", "same"],
        ["--lora", "8", "--lora-dropout", "0.1"], ["--lora", "8", "--dora"],
        ["--lora", "8", "--quantize", "nf4"],
        ["--head-width", "64"], ["--positions", "rotary"], ["--no-bias"], ["--keep-output-tensors"],
    ]  # fmt: skip
    for change in changes:
        changed = json.loads(run(*base, *change, "--json"))
        before = {key: value for key, value in plain.items() if key not in ("config", "notes")}
        assert {key: value for key, value in changed.items() if key not in ("config", "notes")} != before, (
            change
        )


def test_csv() -> None:
    rows = list(csv.DictReader(io.StringIO(run("--model", "530b", "--as-published", "--csv"))))
    assert {int(row["stage"]) for row in rows} == set(range(35))
    found = estimate(configure("530b", as_published=True))
    for name, size in found.stages[3].moments.items():
        assert sum(int(row[name]) for row in rows if row["stage"] == "3") == size


def test_table() -> None:
    text = run("--model", "llama3-8b", "--tp", "4", "--device", "a100", "--recompute", "full")
    assert "Sec. 5" in text and "fits" in text and "GiB" in text
    assert "does not fit" in run("--model", "llama3-70b", "--memory", "80GB", "--brief")


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "stages.png"
    run("--model", "530b", "--as-published", "--plot", str(file), "--brief")
    assert file.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(LowtideError, match="--plot"):
        run("--model", "gpt2", "--plot", str(tmp_path / "none" / "x.png"))


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--model", "22b", "--tp", "3"], "--tp=3"),
        (["--model", "22b", "--json", "--csv"], "choose one"),
        (["--model", "22b", "--stage", "1"], "--stage=1"),
        (["--model", "22b", "--recompute", "-1"], "--recompute=-1"),
        (["--model", "22b", "--iteration-time", "1"], "--peak-tflops"),
        (["--model", "22b", "--device", "a1000"], "did you mean 'a100'"),
        (["--model", "22b", "--memory", "80 giraffes"], "giraffes"),
        (["--model", "22b", "--memory", "80"], "--memory 80: .* with their unit"),
        (["--model", "22b", "--memory", "50%"], "--memory 50%"),
        (["--model", "22b", "--seq", "0"], "--seq=0: .* at least 1"),
        (["--model", "22b", "--global-batch", "0"], "--global-batch=0: .* at least 1"),
    ],
)
def test_refusals(flags: list[str], says: str) -> None:
    with pytest.raises(LowtideError, match=says):
        run(*flags)


@pytest.mark.parametrize("command", [["estimate"], ["suggest", "--devices", "4"], ["simulate"]])
@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("meta-llama/Llama-3.1-8B", "llama3-8b"),
        ("meta-llama/Llama-3.2-1B-Instruct", "llama3-1b"),
        ("Qwen/Qwen3-8B-Base", "qwen3-8b"),
        ("meta-llama/Llama-2-7b-chat-hf", "llama2-7b"),
    ],
)
def test_a_name_of_the_hub_is_answered_with_the_preset(command: list[str], name: str, preset: str) -> None:
    with pytest.raises(EstimateError, match=f"the preset for it is '{preset}': give --model {preset}"):
        CliRunner().invoke(app, [*command, "--model", name], catch_exceptions=False)


def test_what_nobody_said_is_said() -> None:
    told = " ".join(run("--model", "falcon-7b", "--brief").split())
    assert "not given, and assumed: --seq 2048, the longest that the model takes; --dtype bf16" in told
    told = run("--model", "falcon-7b", "--brief", "--seq", "512", "--dtype", "bf16-true")
    assert "assumed" not in told
