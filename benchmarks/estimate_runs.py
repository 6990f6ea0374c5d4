"""How near `lowtide.estimate` comes to runs that public projects measured, and which it can express.

python -m benchmarks estimate_runs

Two numbers of ``efficiency.json`` are fitted to these runs (`FITTED`), and printed is how far off each source
is where the others alone say them. The runs' settings are the projects' own words
(``tests/estimate/published/runs_2026.csv``); `words` says them in the words of `configure`. Written is the
result file and the table in docs/estimate.md; printed is each run, and how many are within the marks.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from lowtide.estimate import Config, EstimateError, configure, estimate
from lowtide.estimate.adapters import adapted
from lowtide.estimate.devices import Device, device
from lowtide.estimate.presets import PRESETS
from lowtide.estimate.settings import SHAPE_SETTINGS
from lowtide.estimate.speed import efficiencies, step_time
from lowtide.estimate.suggest import RESERVE
from lowtide.model_names import meant, on_hub

TABLE = Path(__file__).parent.parent / "tests" / "estimate" / "published" / "runs_2026.csv"
DOCS = Path(__file__).parent.parent / "docs" / "estimate.md"
TIGHT, WIDE, SPEED = 0.05, 0.10, 0.15
TOY = 100_000_000
"""Models of fewer parameters, whose steps wait for their launches: their speeds are left aside."""

_QWEN3 = dict(
    kv_heads=8, head_width=128, vocab=151936, mlp="swiglu", norm="rmsnorm",
    positions="rotary", bias=False, qk_norm=True,
)  # fmt: skip
_LLAMA = dict(norm="rmsnorm", mlp="swiglu", positions="rotary", bias=False)
_NEOX = dict(positions="rotary", attention="fused", dropout=0.0, tied=False)
MODELS: dict[str, dict[str, Any]] = {
    "mistralai/Mistral-7B-v0.1": {"model": "mistral-7b"},
    "NousResearch/Meta-Llama-3-8B": {"model": "llama3-8b"},
    "ibm/PowerLM-3b": dict(_LLAMA, layers=40, hidden=2304, heads=36, ffn=9216, vocab=49152),
    "bigcode/gpt_bigcode-santacoder (1.1B, MQA)": dict(
        layers=24, hidden=2048, heads=16, kv_heads=1, vocab=49280, attention="fused"
    ),
    "Qwen/Qwen3-0.6B": dict(_QWEN3, layers=28, hidden=1024, heads=16, ffn=3072),
    "Qwen/Qwen3-4B-Instruct-2507": dict(_QWEN3, layers=36, hidden=2560, heads=32, ffn=9728),
    "qwen3-0.6b": dict(_QWEN3, layers=28, hidden=1024, heads=16, ffn=3072),
    "qwen2.5-7b": {"model": "qwen2-7b"},
    "qwen2.5-32b": dict(_LLAMA, layers=64, hidden=5120, heads=40, kv_heads=8, ffn=27648, vocab=152064,
                        qkv_bias=True, tied=False),
    "llama-3.2-1b": {"model": "llama3-1b"},
    "llama3.1-8b": {"model": "llama3-8b"},
    "llama3.1-70b": {"model": "llama3-70b"},
    "phi-1.5 (1.3B)": dict(_NEOX, layers=24, hidden=2048, heads=32, vocab=51200),
    "StableLM-alpha-3b": dict(_NEOX, layers=16, hidden=4096, heads=32, vocab=50688),
    "dense 254M h1024 L12 a16 v50000": dict(
        layers=12, hidden=1024, heads=16, vocab=50000, attention="fused", dropout=0.0, tied=False,
    ),
    "mistralai/Mixtral-8x7B-Instruct-v0.1": {"model": "mixtral-8x7b"},
    "PrimeIntellect/INTELLECT-3": {"model": "glm4.5-air"},
    "Qwen/Qwen3-30B-A3B-Instruct-2507": {"model": "qwen3-30b-a3b"},
    "Qwen/Qwen3-235B-A22B-Instruct-2507": {"model": "qwen3-235b-a22b"},
    "llama-3.2-3b": {"model": "llama3-3b"},
    "llama3.2-3b": {"model": "llama3-3b"},
    **{name: {"model": name} for name in ("llama2-7b", "llama2-13b", "llama3-8b", "llama3-70b", "mistral-7b",
                                          "qwen3-8b", "qwen3-30b-a3b", "qwen3-32b")},
}  # fmt: skip
"""Models by the name that the table has: a preset's, or sizes."""

KINDS = {
    "A100-80GB": "a100", "A100-40GB": "a100-40gb", "A100": "a100", "H100": "h100",
    "H100 80GB HBM3": "h100", "H200": "h200", "B200": "b200", "B200 (power-limited)": "b200",
    "GB200": "b200", "Blackwell ~184 GiB": "b200",
}  # fmt: skip
"""Devices by the name that the table has. Others have no speed here."""
LIMITED = 0.55
"""Rate of the B200 that is limited to 750 of 1,000 W over that of others, from its three runs. An H100 of 500
W reaches 0.71 of what one of 700 W does.
"""

LOSSES = {
    "plain logits": "torch",
    "chunked lm head (RL)": "chunked-vocabulary",
    "chunked_nll": "chunked",
    "fused_linear_ce": "fused-linear",
    "cut_ce": "chunked-vocabulary",
}
_PLAIN = {
    "seq", "micro_batch", "dp", "tp", "pp", "cp", "ep", "zero", "global_batch", "recompute",
}  # fmt: skip
OPTIMIZERS = {"bnb_8bit_adamw": "adamw-8bit", "muon": "momentum", "sgd": "sgd"}
"""Optimizers other than AdamW, by the name that the table has; Muon keeps one momentum of a matrix."""
ASSUMED_LENGTH, ASSUMED_RANK = 2048, 8
"""Tokens of a sequence and rank of adapters where neither a row nor its project's defaults tell."""
_RL_PIECE, _TRL_PIECE = 2048, 8192
"""Entries of the vocabulary that prime-rl's output layer takes at a time (its default then), and tokens that
TRL's does.
"""


class Unsaid(Exception):
    """A run that cannot be expressed; the message says why."""


@dataclass(frozen=True)
class Run:
    """A measured run.

    Attributes:
        name: source, model, devices and place in the table.
        grade: A or B where its configuration is whole, C where something is guessed, as the table says.
        device: the accelerator; ``None`` where none of its kind is known here.
        config: what was run.
        memory_gib: peak on one device; ``None`` where none was published.
        memory_kind: what kind of peak that is.
        tokens_per_second: of one device; ``None`` where not published.
        ran: whether it ran; else it ran out of memory, as far as its source tells.
        last: whether the memory is the last pipeline stage's.
        assumed: what neither the row nor its project's defaults tell.
    """

    name: str
    grade: str
    device: Device | None
    config: Config
    memory_gib: float | None
    memory_kind: str
    tokens_per_second: float | None
    ran: bool
    last: bool
    assumed: tuple[str, ...] = ()


def fields(text: str) -> dict[str, str]:
    """The settings in ``seq=4096 loss=plain logits compile``: words without ``=`` belong to the one before
    where that is a loss, else they stand alone.

    >>> fields("seq=4096 loss=plain logits optimizer=adamw compile")
    {'seq': '4096', 'loss': 'plain logits', 'optimizer': 'adamw', 'compile': ''}
    """
    found: dict[str, str] = {}
    last = ""
    for part in text.split():
        name, given, value = part.partition("=")
        if given and not name.startswith("Alpaca"):
            found[name] = value
            last = name
        elif last in ("loss",) and part not in ("optimizer", "compile"):
            found[last] += f" {part}"
        else:
            found[part] = ""
            last = part
    return found


def words(row: dict[str, str]) -> dict[str, Any]:
    """A row's settings in the words of `configure`.

    Raises:
        Unsaid: there are none, or something must be known that the row does not say.
    """
    given, source = fields(row["settings"]), row["run"]
    if source.startswith("Megatron-LM"):
        return _megatron(row, given)
    if "cumulative:" in given:
        raise Unsaid("neither batch nor length")
    shape = _model(row["model"])
    found = dict(shape)
    own = ("flash_attention_3", "flash_attention_4")  # written for the device
    found["attention"] = "flash-3" if given.get("attention") in own else "fused"
    found["seq"] = _length(row, given)
    if optimizer := OPTIMIZERS.get(given.get("optimizer", "")):
        found["optimizer"] = optimizer
    if source.startswith("TRL"):  # PyTorch's kernel on Hopper: cuDNN's
        found["attention"] = "flash-3"
    for name in _PLAIN & given.keys() - {"seq", "recompute"}:
        number = re.match(r"\d+", given[name])
        if not number:
            raise Unsaid(f"no number of {name}")
        found[name] = int(number[0])
    if "dp" not in found and row["gpus"]:
        found["dp"] = int(row["gpus"]) // math.prod(found.get(name, 1) for name in ("tp", "pp", "cp"))
    if "fsdp" in given and given["fsdp"].isdigit():
        found |= dict(dp=int(given["fsdp"]), zero=3)
    sharded = "fsdp" in given or "fsdp2" in given or given.get("zero") == "3"
    if sharded:
        found["zero"] = 3
    if sharded and _away(source, given, configure(**shape).model.parameters()):
        found |= dict(offload_weights=True, offload_optimizer=1.0)
    accumulated = int(given.get("grad_accum", 1))
    if "global_batch" not in found:
        found["global_batch"] = found.get("micro_batch", 1) * found.get("dp", 1) * accumulated
    found["recompute"] = _recompute(source, given)
    found["offload_activations"] = "offload" in given.get("recompute", "")
    found["compile"] = "compile" in given or "fused_kernels" in given
    found["float8"] = any(name.startswith(("float8", "fp8", "mxfp8", "nvfp4")) for name in given)
    found |= _scaling(given)
    apart = source.startswith(("prime-rl", "torchtitan")) or (
        source.startswith("torchao/") and row["device"] != "H100"
    )
    found["embedding_unit"] = apart and sharded and not configure(**shape).model.tied
    found["loss"], more = _loss(row, given, found)
    found |= more
    found |= _precision(source, given, sharded)
    if source.startswith("DeepSpeed") and sharded and found.get("dp", 1) > 1:
        found["keep_weights"] = found["recompute"] == "none"
    if source.startswith("Megatron-Bridge"):  # Megatron's kernels and optimizer
        found |= dict(zero=1, sequence_parallel=found.get("tp", 1) > 1, compile=True, attention="flash-3",
                      loss="in-place-fused", reentrant=True)  # fmt: skip
    found |= _adapters(given)
    if "lora" in given and not source.startswith("fms"):  # else peft's
        found["lora_dtype"] = "same"
    if source.startswith("litgpt"):
        found |= {"lora_dropout": 0.05, "fused_qkv": True}  # its default, its attention
        found["flat_parameters"] = sharded and found.get("dp", 1) > 1  # it wraps layers, as FSDP 1 does
    liger = source.startswith("NeMo Automodel")  # its models have Liger's norms and MLPs
    separate = not (found["compile"] or liger) or source.startswith(
        "fms"
    )  # their kernels leave the MLP alone
    model = configure(**shape).model
    found["unfused_mlp"] = separate and model.mlp == "swiglu"
    if source.startswith("prime-rl"):  # its norms and MLPs are transformers'
        found |= dict(unfused_norms=True, unfused_mlp=True, weigh_float32=model.experts > 0)
    return {name: value for name, value in found.items() if value is not False or name in SHAPE_SETTINGS}


def _model(name: str) -> dict[str, Any]:
    """Sizes, or the preset that a name means, whatever is said of it in brackets."""
    if name in MODELS:
        return MODELS[name]
    plain = name.partition(" (")[0]
    found = meant(plain, PRESETS) or on_hub(plain)
    if found is None:
        raise Unsaid("no such model here")
    return {"model": found}


def _length(row: dict[str, str], given: dict[str, str]) -> int:
    """Tokens of a sequence: those told, at most those to which it is cut, or what most recipes pack.

    LitGPT puts the longest sample on one of several ranks, and prints rank 0's memory: a quarter is assumed.
    """
    told = row["settings"].partition("seq=longest")[2] or given.get("seq") or given.get("max_seq")
    length = re.search(r"\d+", told or given.get("seq<") or str(ASSUMED_LENGTH))
    assert length, row
    alone = "seq=longest" not in row["settings"] or int(row["gpus"]) == 1
    return int(length[0]) if alone else int(length[0]) // 4


def _away(source: str, given: dict[str, str], parameters: int) -> bool:
    """Whether weights and optimizer are on the host: TRL's guide does so for models from 30B on."""
    return "cpu_offload" in given or (source.startswith("TRL") and parameters > 30e9)


def assumed(row: dict[str, str]) -> tuple[str, ...]:
    """What neither the row nor its project's defaults tell."""
    given = fields(row["settings"])
    found = {
        "model or batch": row["grade"] == "C",
        "length": not {"seq", "max_seq", "seq<"} & given.keys(),
        "length of rank 0": "seq=longest" in row["settings"] and int(row["gpus"]) > 1,
        "rank of the adapters": "lora" in given and not given["lora"].startswith("r"),
    }
    return tuple(name for name, so in found.items() if so)


def _recompute(source: str, given: dict[str, str]) -> str:
    usual = "selective-op" if source.startswith("torchtitan") else "none"
    if source.startswith("torchtune") or "torchtune" in given:
        usual = "full"  # its recipes'
    text = given.get("recompute", usual)
    if text.startswith("selective("):
        return "selective-layer"
    return text.partition("+")[0]


def _scaling(given: dict[str, str]) -> dict[str, Any]:
    """How products of low precision are scaled."""
    told = {name: name for name in ("mxfp8", "nvfp4")} | {"float8": given.get("float8")}
    kinds = [kind for name, kind in told.items() if name in given and kind]
    return {"scaling": kinds[0]} if kinds else {}


def _loss(row: dict[str, str], given: dict[str, str], found: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """How the loss is computed: what is named, else what the framework does."""
    source = row["run"]
    named = given.get("loss", "")
    if named:
        if named not in LOSSES:
            raise Unsaid(f"no loss {named!r} here")
        kind = LOSSES[named]
        if source.startswith("prime-rl") and kind == "torch":  # FSDP casts the logits that it gives out
            return "float32", {}
        if kind == "chunked":
            tokens = found.get("micro_batch", 1) * found["seq"] // found.get("cp", 1)
            return kind, {"loss_chunks": max(2, tokens // _TRL_PIECE)}
        if source.startswith("prime-rl") and kind == "chunked-vocabulary":
            return "vocabulary-eager", {
                "loss_chunks": -(-configure(**_model(row["model"])).model.vocab // _RL_PIECE)
            }
        return kind, {}
    if "ce" in given.get("fused_kernels", "").split("+"):
        return "in-place-copy", {}
    if source.startswith("fms"):  # transformers casts no logits of gpt_bigcode
        return ("torch-uncast" if "bigcode" in row["model"] else "transformers"), {}
    if source.startswith("litgpt"):
        return "torch-uncast", {}
    early = source.startswith("torchao") and row["device"] == "H100"  # torchtitan compiled no loss yet
    return ("compiled" if "compile" in given and not early else "torch"), {}


def _precision(source: str, given: dict[str, str], sharded: bool) -> dict[str, Any]:
    """Weights' and states' precision, and how the optimizer updates."""
    weights = given.get("weights", "")
    if source.startswith("DeepSpeed"):
        own = "bf16" in given and "fp32" not in given
        return {"dtype": "bf16-true" if own else "bf16", "update": "fused"}
    if weights.startswith("bf16"):
        return {"dtype": "bf16-true", "update": "foreach"}
    if weights == "fp32_master_in_fsdp":  # adapters in float32 leave their sum with the stream in float32
        return {"dtype": "autocast" if "lora" in given else "mixed", "update": "foreach"}
    if source.startswith(("torchtitan", "torchao/", "torchao float8")):
        return {"dtype": "mixed", "update": "fused"}
    if weights.startswith("fp32") or (sharded and not source.startswith("fsdp_qlora")):
        return {"dtype": "mixed", "update": "foreach"}
    if "bf16" in given or source.startswith(("torchtune", "fsdp_qlora")):
        return {"dtype": "bf16-true", "update": "foreach"}
    return {"dtype": "bf16", "update": "fused"}  # Megatron's, where a project tells none


def _adapters(given: dict[str, str]) -> dict[str, Any]:
    if "lora" not in given:
        return {}
    named = re.fullmatch(r"r(\d+)(?:\[([a-z,]+)\])?", given["lora"])
    if not named:
        return {"lora": ASSUMED_RANK}
    targets = named[2] or "all-linear"
    return {"lora": int(named[1]), "lora_targets": "q,k,v" if targets == "qkv" else targets}


def _megatron(row: dict[str, str], given: dict[str, str]) -> dict[str, Any]:
    """Megatron-LM's tests on a node of eight; the vocabulary is padded to 128 times the tensor ranks."""
    if "frozen" in row["model"]:
        raise Unsaid("frozen parts")
    tp, pp, cp = (int(given.get(name, 1)) for name in ("tp", "pp", "cp"))
    vocab = int(given.get("vocab", 50257))
    local = "mcore_tp" in row["model"]  # its own kernels, not TransformerEngine's
    found: dict[str, Any] = dict(
        layers=int(given["L"]), hidden=int(given["h"]), heads=int(given["a"]),
        vocab=-(-vocab // (128 * tp)) * 128 * tp,
        kv_heads=int(given.get("kv", given["a"])), tp=tp, pp=pp, cp=cp, dp=8 // (tp * pp * cp),
        seq=int(given["seq"]), micro_batch=int(given["micro_batch"]),
        global_batch=int(given["global_batch"]), tied="untie-embeddings-and-output-weights" not in given,
        zero=1 if "use-distributed-optimizer" in given else 0, recompute=given.get("recompute", "none"),
        sequence_parallel="sequence-parallel" in given, dtype="bf16",
        gradient_dtype="fp32", compile=True,
        attention="unfused" if local or given.get("attention") == "unfused" else "fused", reentrant=True,
    )  # fmt: skip
    if found["micro_batch"] * found["dp"] > found["global_batch"]:
        raise Unsaid("no number of devices")
    found["loss"] = "in-place-fused" if "cross-entropy-loss-fusion" in given else "in-place"
    if "layers_per_vstage" in given:
        found["interleave"] = found["layers"] // pp // int(given["layers_per_vstage"])
    return found


def read() -> tuple[list[Run], list[tuple[str, str]]]:
    """The runs that there are words for, and the names of the others with the reason."""
    runs, others = [], []
    with open(TABLE, encoding="utf-8", newline="") as file:
        for place, row in enumerate(csv.DictReader(file)):
            name = f"{place} {row['run']}: {row['model']} x{row['gpus']}"
            try:
                config = configure(**words(row))
            except (Unsaid, EstimateError) as why:
                others.append((name, str(why)))
                continue
            runs.append(
                Run(
                    name, row["grade"], _device(row), config,
                    float(row["memory_gib"]) if row["memory_gib"] else None, row["memory_kind"],
                    _speed(row, config), row["outcome"] == "ran", row["run"].startswith("Megatron-LM"),
                    assumed(row),
                )
            )  # fmt: skip
    return runs, others


def _device(row: dict[str, str]) -> Device | None:
    kind = KINDS.get(row["device"])
    if kind is None:
        return None
    if kind == "h100" and row["run"].startswith("torchao"):  # torchtitan's machines
        kind = "h100-96gb"
    found = device(kind)
    return replace(found, flops=found.flops * LIMITED) if "limited" in row["device"] else found


def _speed(row: dict[str, str], config: Config) -> float | None:
    if row["tokens_per_second_per_device"]:
        together = int(row["gpus"]) if "8-GPU tokens/s" in row["notes"] else 1  # as torchtune prints them
        return float(row["tokens_per_second_per_device"]) / together
    if row["seconds_per_step"]:
        return config.global_batch * config.seq / config.devices / float(row["seconds_per_step"])
    return None


def scored(run: Run) -> dict[str, Any]:
    """What was measured beside what is predicted."""
    room = run.device.memory_bytes if run.device else None
    found = estimate(replace(run.config, memory_bytes=room), run.device)
    row: dict[str, Any] = {"run": run.name, "grade": run.grade, "kind": run.memory_kind}
    if run.assumed:
        row["assumed"] = list(run.assumed)
    if not run.ran:
        fits = room is not None and found.reserved_bytes <= room * (1 - RESERVE)  # as lowtide suggest does
        return row | {"ran": False, "said_to_fit": fits}
    if run.memory_gib is not None and run.memory_kind != "process memory":
        peak = found.stages[-1].total_bytes if run.last else found.total_bytes
        if "allocated" not in run.memory_kind and "active" not in run.memory_kind:
            titan = _source(run.name).startswith("torch")  # its run_train.sh sets expandable segments
            peak = found.reserved_expandable_bytes if titan else found.reserved_bytes
        ours = peak / 2**30
        row |= {"memory_gib": run.memory_gib, "predicted_gib": round(ours, 2)}
        row["memory_off"] = round(ours / run.memory_gib - 1, 4)
    config = run.config
    toy = config.model.parameters() < TOY
    if run.tokens_per_second is not None and run.device is not None and not toy:
        tokens = config.global_batch * config.seq / config.devices
        ours = tokens / step_time(config, run.device).total
        row |= {"tokens_per_second": run.tokens_per_second, "predicted_tokens_per_second": round(ours, 1)}
        row["speed_off"] = round(ours / run.tokens_per_second - 1, 4)
    return row


def summary(rows: Iterable[dict[str, Any]], given: int) -> dict[str, int]:
    """How many runs can be expressed, and how many are within the marks."""
    rows = list(rows)
    memory = [abs(row["memory_off"]) for row in rows if "memory_off" in row]
    speed = [abs(row["speed_off"]) for row in rows if "speed_off" in row]
    failed = [row["said_to_fit"] for row in rows if "said_to_fit" in row]
    return {
        "runs": given,
        "expressible": len(rows),
        "with_memory": len(memory),
        "memory_within_5": sum(off <= TIGHT for off in memory),
        "memory_within_10": sum(off <= WIDE for off in memory),
        "with_speed": len(speed),
        "speed_within_15": sum(off <= SPEED for off in speed),
        "failed": len(failed),
        "failed_but_said_to_fit": sum(failed),
    }


def by_source(rows: Iterable[dict[str, Any]], others: Iterable[tuple[str, str]]) -> list[list[str]]:
    """A row of the docs' table for each source: how many runs are within the marks."""
    rows, others = list(rows), list(others)
    sources = dict.fromkeys(_source(name) for name in (row["run"] for row in rows))
    lines = []
    known = [row for row in rows if "assumed" not in row]
    for source in (*sources, "nothing assumed", "all"):
        here = {"all": rows, "nothing assumed": known}.get(source) or [
            row for row in rows if _source(row["run"]) == source
        ]
        given = len(here)
        if source != "nothing assumed":
            given += sum(source in ("all", _source(name)) for name, _ in others)
        found = summary(here, given)
        cells = [source, f"{found['expressible']} of {given}"]
        for name, marks in (("memory", (5, 10)), ("speed", (15,))):
            of = found[f"with_{name}"]
            cells += [f"{found[f'{name}_within_{mark}']} of {of}" if of else "-" for mark in marks]
        lines.append(cells)
    return lines


def _source(name: str) -> str:
    return name.split(": ")[0].split(" ", 1)[1]


def write_docs(lines: list[list[str]]) -> None:
    """The table in docs/estimate.md, between its marks."""
    head = ["source", "can be expressed", "memory within 5 %", "within 10 %", "tokens a second within 15 %"]
    text = DOCS.read_text(encoding="utf-8")
    block = "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *lines))
    start, end = "<!-- runs -->", "<!-- end of runs -->"
    before, rest = text.split(start, 1)
    DOCS.write_text(f"{before}{start}\n{block}\n{end}{rest.split(end, 1)[1]}", encoding="utf-8")


def _long(run: Run) -> bool:
    return run.config.seq >= 32768 and run.config.attention == "flash-3" and not run.config.model.experts


def _flash_2(run: Run) -> bool:
    new = run.device is not None and run.device.measured == "b200"
    return (
        new and run.config.seq >= 32768 and run.config.attention == "fused" and not run.config.model.experts
    )


def _grouped(run: Run) -> bool:
    """Experts, but for prime-rl's with adapters on Blackwell, which go one by one."""
    return run.config.model.experts > 0 and run.device is not None and run.device.measured != "b200"


def _rowwise(run: Run) -> bool:
    return run.config.scaling == "rowwise" and run.device is not None and run.device.measured != "b200"


def _lone(run: Run) -> bool:
    return run.device is not None and not run.device.grouped and run.config.lora > 0 and _mixture(run)


def _mixture(run: Run) -> bool:
    return any(one.copies > 1 for one in adapted(run.config))


def _sharded_adapters(run: Run) -> bool:
    return run.config.zero == 3 and run.config.lora > 0 and (not run.config.model.experts or _grouped(run))


def _small(run: Run) -> bool:
    return run.config.model.parameters() < TOY


FITTED: dict[str, tuple[Callable[[Run], bool], tuple[float, ...]]] = {
    "ceiling": (_long, tuple(0.7 + 0.01 * step for step in range(51))),
    "experts": (_grouped, tuple(0.4 + 0.01 * step for step in range(61))),
    "flash_2": (_flash_2, tuple(0.3 + 0.01 * step for step in range(71))),
    "rowwise": (_rowwise, tuple(0.5 + 0.01 * step for step in range(51))),
    "launch": (_small, tuple(0.002 + 0.0002 * step for step in range(51))),
    "turn": (_small, tuple(0.005 * step for step in range(31))),
    "alone": (_lone, tuple(0.0001 * step for step in range(51))),
    "collective": (_sharded_adapters, tuple(0.00001 * step for step in range(101))),
}
"""What of `lowtide.estimate.speed.Efficiency` is fitted here: to which runs, and the values tried."""


def _off(run: Run, name: str, value: float) -> float:
    """Logarithm of the predicted seconds of a step over the measured, at a value of an efficiency."""
    config, kind = run.config, run.device
    assert kind is not None and run.tokens_per_second is not None
    known = replace(efficiencies()[kind.measured], **{name: value})
    told = config.global_batch * config.seq / config.devices / run.tokens_per_second
    return math.log(step_time(config, kind, known).total / told)


def left_out(runs: Iterable[Run]) -> list[tuple[str, str, float, float, float]]:
    """Of each fitted number: the value that all sources of its runs give, every source weighing alike
    by its mean squared error, and that they give without one of them, where there are several; with the
    median and the largest error of all runs at it, or of those left out.
    """
    found = []
    for name, (belongs, values) in FITTED.items():
        by_source: dict[str, list[Run]] = {}
        for run in runs:
            if belongs(run) and run.device and run.tokens_per_second and not run.assumed:
                by_source.setdefault(_source(run.name), []).append(run)
        for source in ("", *(by_source if len(by_source) > 1 else ())):
            others = [here for one, here in by_source.items() if one != source]
            tried = {
                one: sum(fmean(_off(run, name, one) ** 2 for run in here) for here in others)
                for one in values
            }
            value = min(tried, key=lambda one: tried[one])
            told = by_source.get(source) or [run for here in by_source.values() for run in here]
            off = [abs(_off(run, name, value)) for run in told]
            found.append((name, source, round(value, 4), round(median(off), 3), round(max(off), 3)))
    return found


def main() -> None:
    """Score, print and write."""
    from benchmarks.common import save

    runs, others = read()
    rows = [scored(run) for run in runs]
    whole = [row for row in rows if "assumed" not in row]
    found = {"all": summary(rows, len(rows) + len(others)), "nothing assumed": summary(whole, len(whole))}
    fits = left_out(runs)
    save("estimate_runs", rows, summary=found, left_out=fits, without_words=[list(other) for other in others])
    write_docs(by_source(rows, others))
    for row in rows:
        told = [f"{row[name]:+.1%}" if name in row else "" for name in ("memory_off", "speed_off")]
        print(row["run"], row.get("memory_gib", ""), row.get("predicted_gib", ""), *told, sep="  ")
    for other in others:
        print("cannot be expressed:", *other)
    for name, source, value, off, most in fits:
        print(f"{name} without {source or 'none'}: {value}, its runs off by {off:.0%}, at most {most:.0%}")
    for name, counts in found.items():
        print(name, counts)


if __name__ == "__main__":
    main()
