"""What can run a suggestion: which ways of sparing memory a framework has, and how it calls them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lowtide.estimate.config import Config
from lowtide.estimate.errors import unknown
from lowtide.estimate.presets import SMALL
from lowtide.model_names import HUB


@dataclass(frozen=True, slots=True)
class Framework:
    """A program that trains.

    Attributes:
        name: what ``--for`` calls it.
        zero: its ZeRO stages, without a pipeline.
        zero_pipelined: the same with one.
        recompute: its ways of recomputation, from the least to the most.
        losses: its cross entropies, from the largest to the smallest.
        offload: shares of the optimizer that it can keep on the host.
        settings: what else of a configuration is always so; given settings go before these.
        models: presets that it has; all where ``None``.
        keep_gathered: as in `lowtide.estimate.config.Config`, under sequence parallelism.
        command: the command or recipe that runs a model under a configuration, on nodes of so many devices.
        finetunes: what it can train, from the whole model in its usual precision to the least: settings each.
        context: whether it has context parallelism.
        experts: whether it has expert parallelism.
        pieces: whether it has what long sequences need beside that: tiles of the MLP and of the loss, slices
            of heads, activations and weights on the host, and heads exchanged for tokens.
    """

    name: str
    zero: tuple[int, ...]
    zero_pipelined: tuple[int, ...]
    recompute: tuple[str, ...]
    losses: tuple[str, ...]
    offload: tuple[float, ...]
    command: Callable[[str, Config, int], str]
    settings: dict[str, Any] = field(default_factory=dict)
    models: frozenset[str] | None = None
    keep_gathered: bool = False
    finetunes: tuple[dict[str, Any], ...] = ({},)
    context: bool = False
    experts: bool = False
    pieces: bool = False


LONG = 1 << 15
"""Tokens of a sequence from which on context parallelism, and work in pieces, are looked at."""

_ALL_RUN = {
    "lora": (0,),
    "quantize": ("none",),
    "optimizer": ("adam", "adamw", "momentum", "sgd"),
    "update": ("auto", "fused"),
}
"""What those without adapters run, of what `lowtide.estimate.config.Config` has more of."""


def beyond(asked: Mapping[str, Any]) -> list[str]:
    """Names of the settings that trainers of whole models do not run: adapters, optimizers of 8 bits and
    paged ones, and updates that are not fused.

    >>> beyond({"lora": 16, "tp": 4, "optimizer": "adam"})
    ['lora']
    """
    return [name for name, known in _ALL_RUN.items() if name in asked and asked[name] not in known]


def launcher(config: Config, node: int) -> str:
    """How the processes of one node are started: on each of several nodes the same, with the first one's name
    in MASTER_ADDR.

    >>> from lowtide.estimate.settings import configure
    >>> launcher(configure("gpt2", dp=8, global_batch=8), node=8)
    'torchrun --nproc-per-node 8'
    >>> launcher(configure("gpt2", dp=16, global_batch=16), node=8)
    'torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint $MASTER_ADDR:29500 --nproc-per-node 8'
    """
    nodes = -(-config.devices // node)
    meet = " --rdzv-backend c10d --rdzv-endpoint $MASTER_ADDR:29500"
    several = f" --nnodes {nodes}{meet}" if nodes > 1 else ""
    return f"torchrun{several} --nproc-per-node {min(node, config.devices)}"


def _join(start: str, flags: dict[str, Any]) -> str:
    """A command line: a flag that is ``True`` stands alone, one that is ``False`` or ``None`` is left out."""
    parts = [start]
    for name, value in flags.items():
        if value is not None and value is not False:
            parts.append(name if value is True else f"{name} {value}")
    return " ".join(parts)


def _more_than(value: int, least: int = 1) -> int | None:
    return value if value > least else None


LOWTIDE_MODELS = {
    "22b": "gpt-22b", "175b": "gpt3-175b",
    **{name: name for name in (
        "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "llama2-7b", "llama3-8b", "llama3-70b", *SMALL)},
}  # fmt: skip
"""What ``lowtide train`` calls the presets that it has."""


def _lowtide(model: str, config: Config, node: int) -> str:
    start = f"{launcher(config, node)} -m lowtide train" if config.devices > 1 else "lowtide train"
    flags = {
        "--model": LOWTIDE_MODELS.get(model, model), "--device": "cuda", "--dtype": "bf16",
        "--seq": config.seq, "--batch": config.micro_batch * config.dp,
        "--grad-accum": config.micro_batches, "--tp": _more_than(config.tp),
        "--sequence-parallel": config.sequence_parallel, "--pp": _more_than(config.pp),
        "--dp": _more_than(config.dp), "--shard-parameters": config.zero == 3,
        "--policy": "full" if config.recompute == "full" else "keep_all",
        "--loss-chunks": config.loss_chunks if config.loss_kind == "chunked-forward" else None,
    }  # fmt: skip
    return _join(start, flags)


TITAN_MODELS = {
    "llama3-8b": ("llama3", "8B"), "llama3-70b": ("llama3", "70B"), "llama3-405b": ("llama3", "405B"),
    "qwen3-30b-a3b": ("qwen3", "30B-A3B"), "qwen3-235b-a22b": ("qwen3", "235B-A22B"),
    "deepseek-v3": ("deepseek_v3", "671B"),
}  # fmt: skip
"""What torchtitan calls the presets that it has, and their flavors."""


def _torchtitan(model: str, config: Config, node: int) -> str:
    kinds = {"none": "none", "selective-op": "selective", "full": "full"}
    name, flavor = TITAN_MODELS[model]
    flags = {
        "--model.name": name, "--model.flavor": flavor, "--training.seq_len": config.seq,
        "--training.local_batch_size": config.micro_batch,
        "--training.global_batch_size": config.global_batch,
        "--parallelism.data_parallel_shard_degree": config.dp,
        "--parallelism.tensor_parallel_degree": _more_than(config.tp),
        "--parallelism.context_parallel_degree": _more_than(config.cp),
        "--parallelism.expert_parallel_degree": _more_than(config.ep),
        "--activation_checkpoint.mode": kinds[str(config.recompute)], "--training.compile": config.compile,
        "--parallelism.enable_async_tensor_parallel": config.overlap_tensor,
    }  # fmt: skip
    return _join(f"{launcher(config, node)} torchtitan/train.py", flags)


def _trl(model: str, config: Config, node: int) -> str:
    quantized, devices = config.quantize == "nf4", config.devices
    deepspeed = config.offload_optimizer > 0
    launch = {
        "--num_processes": devices, "--num_machines": _more_than(-(-devices // node)),
        "--use_deepspeed": deepspeed, "--zero_stage": config.zero if deepspeed else None,
        "--offload_optimizer_device": "cpu" if deepspeed else None, "--use_fsdp": config.zero == 3,
        "--fsdp_version": 2 if config.zero == 3 else None,
        "--fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP" if config.zero == 3 else None,
        "--use_parallelism_config": config.cp > 1, "--parallelism_config_cp_size": _more_than(config.cp),
        "--parallelism_config_dp_shard_size": _more_than(config.dp) if config.cp > 1 else None,
    }  # fmt: skip
    flags = {
        "--model_name_or_path": HUB.get(model, model), "--dataset_name": "$DATASET",
        "--dtype": "bfloat16" if config.dtype.startswith("bf16") else "float32", "--bf16": "true",
        "--packing": "true" if config.cp == 1 else "false", "--max_length": config.seq,
        "--per_device_train_batch_size": config.micro_batch,
        "--gradient_accumulation_steps": config.micro_batches,
        "--gradient_checkpointing": "true" if config.recompute == "full" else "false",
        "--optim": "paged_adamw_8bit" if config.optimizer == "paged-adamw-8bit" else None,
        "--use_peft": config.lora > 0, "--lora_r": config.lora or None,
        "--lora_target_modules": "all-linear" if config.lora else None, "--load_in_4bit": quantized,
        "--use_bnb_nested_quant": quantized,
    }  # fmt: skip
    return _join("trl sft", launch | flags)


def _axolotl(model: str, config: Config, node: int) -> str:
    del node
    given: dict[str, Any] = {
        "base_model": HUB.get(model, model), "datasets": [{"path": "$DATASET", "type": "chat_template"}],
        "bf16": True, "sequence_len": config.seq, "sample_packing": True,
        "micro_batch_size": config.micro_batch, "gradient_accumulation_steps": config.micro_batches,
        "gradient_checkpointing": config.recompute == "full",
        "optimizer": config.optimizer.replace("-", "_").replace("adam_", "adamw_"),
    }  # fmt: skip
    if config.optimizer in ("adam", "adamw"):
        given["optimizer"] = "adamw_torch_fused"
    if config.lora:
        four = config.quantize == "nf4"
        given |= {"adapter": "qlora" if four else "lora", "load_in_4bit": four, "lora_r": config.lora}
        given |= {"lora_alpha": 2 * config.lora, "lora_target_linear": True}
    if config.loss_kind == "fused-linear":
        given |= {"plugins": ["axolotl.integrations.liger.LigerPlugin"]}
        given |= {"liger_fused_linear_cross_entropy": True}
    if config.zero == 3:
        given |= {"fsdp_version": 2, "fsdp_config": {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}}
    if config.cp > 1:
        given["context_parallel_size"] = config.cp
    if config.offload_optimizer:
        given["deepspeed"] = "deepspeed_configs/zero2.json"
    return f"echo '{json.dumps(given)}' > run.yaml && axolotl train run.yaml"


def _megatron(model: str, config: Config, node: int) -> str:
    del model  # its sizes are flags of their own
    shape, full = config.model, config.recompute == "full"
    flags = {
        "--num-layers": shape.layers, "--hidden-size": shape.hidden, "--num-attention-heads": shape.heads,
        "--group-query-attention": shape.kv_heads != shape.heads,
        "--num-query-groups": shape.kv_heads if shape.kv_heads != shape.heads else None,
        "--ffn-hidden-size": shape.ffn, "--swiglu": shape.mlp == "swiglu", "--seq-length": config.seq,
        "--micro-batch-size": config.micro_batch, "--global-batch-size": config.global_batch,
        "--tensor-model-parallel-size": config.tp, "--sequence-parallel": config.sequence_parallel,
        "--tp-comm-overlap": config.overlap_tensor,
        "--pipeline-model-parallel-size": _more_than(config.pp),
        "--num-virtual-stages-per-pipeline-rank": _more_than(config.interleave),
        "--context-parallel-size": _more_than(config.cp), "--use-distributed-optimizer": config.zero == 1,
        "--recompute-granularity": "full" if full else None,
        "--recompute-method": "uniform" if full else None, "--recompute-num-layers": 1 if full else None,
        "--bf16": True, "--use-flash-attn": True,
    }  # fmt: skip
    return _join(f"{launcher(config, node)} pretrain_gpt.py", flags)


def _estimate(model: str, config: Config, node: int) -> str:
    del model, config, node
    return ""


_ADAPTERS = {"dtype": "bf16-true", "lora": 16}
_FINETUNES: tuple[dict[str, Any], ...] = (
    {"dtype": "bf16-true"},
    {"dtype": "bf16", "zero": 2, "offload_optimizer": 1.0},
    _ADAPTERS,
    _ADAPTERS | {"quantize": "nf4", "optimizer": "paged-adamw-8bit"},
)
"""All weights in bfloat16; the optimizer on the host (DeepSpeed); LoRA; QLoRA."""

FRAMEWORKS = {
    one.name: one
    for one in (
        Framework(
            "lowtide", (0, 3), (0,), ("none", "full"), ("auto", "chunked-forward"), (0.0,), _lowtide,
            dict(dtype="autocast", update="fused", unfused_mlp=True, interleave=1), frozenset(LOWTIDE_MODELS),
        ),
        Framework(
            "torchtitan", (3,), (), ("none", "selective-op", "full"), ("compiled",), (0.0,), _torchtitan,
            dict(compile=True, update="fused", interleave=1, pp=1, reduce_dtype="fp32"),
            frozenset(TITAN_MODELS), keep_gathered=True, context=True, experts=True,
        ),
        Framework(
            "megatron", (0, 1), (0, 1), ("none", "full"), ("in-place",), (0.0,), _megatron,
            dict(compile=True, gradient_dtype="fp32", reentrant=True),
        ),
        Framework(
            "any", (0, 1, 2, 3), (0, 1), ("none", "selective", "full"), ("auto", "chunked"), (0.0, 1.0),
            _estimate, context=True, experts=True, pieces=True,
        ),
        *(
            Framework(
                name, (3,), (), ("none", "full"), ("fused-linear",), (0.0,), command,
                dict(update="fused", interleave=1, pp=1, tp=1, unfused_mlp=True),
                finetunes=_FINETUNES, context=True,
            )
            for name, command in (("trl", _trl), ("axolotl", _axolotl))
        ),
    )
}  # fmt: skip
"""``lowtide train`` under autocast; torchtitan's FSDP2 with `torch.compile`; Megatron-Core with its
distributed optimizer; anything that `lowtide.estimate` has formulas for; and recipes for TRL and axolotl,
with Liger's kernels."""


def candidates(model: str, asked: Mapping[str, Any]) -> list[str]:
    """Frameworks that may run what is asked, in the order in which they are looked through: ``lowtide train``
    where it has the model, torchtitan, and TRL where Hugging Face has the weights; for long sequences all
    that there are formulas for, too.

    >>> candidates("llama3-8b", {}), candidates("llama3-1b", {}), candidates("22b", {"lora": 8})
    (['lowtide', 'torchtitan', 'trl'], ['trl'], ['any'])
    """
    found = (
        []
        if beyond(asked)
        else [name for name in ("lowtide", "torchtitan") if model in (FRAMEWORKS[name].models or ())]
    )
    found += ["trl"] if model in HUB or "/" in model else []
    return found + ["any"] * (not found or (asked.get("seq") or 0) >= LONG)


def framework(name: str) -> Framework:
    """The framework called ``name``.

    >>> framework("megatron").zero
    (0, 1)

    Raises:
        EstimateError: there is none of that name.
    """
    if name not in FRAMEWORKS:
        raise unknown("framework", name, FRAMEWORKS)
    return FRAMEWORKS[name]
