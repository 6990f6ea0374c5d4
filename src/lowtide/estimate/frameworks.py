"""What can run a suggestion: which ways of sparing memory a framework has, and how it calls them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lowtide.estimate.config import Config
from lowtide.estimate.errors import unknown


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
        command: the command that runs a model under a configuration, on nodes of so many devices.
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


_ALL_RUN = {
    "lora": (0,),
    "quantize": ("none",),
    "optimizer": ("adam", "adamw", "momentum", "sgd"),
    "update": ("auto", "fused"),
}
"""What the frameworks here run, of what `lowtide.estimate.config.Config` has more of."""


def beyond(asked: Mapping[str, Any]) -> list[str]:
    """Names of the settings that no framework here runs: adapters, optimizers of 8 bits and paged ones, and
    updates that are not fused.

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


def _joined(start: str, flags: dict[str, Any]) -> str:
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
    **{name: name for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "llama2-7b", "llama3-8b",
                               "llama3-70b")},
}  # fmt: skip
"""What ``lowtide train`` calls the presets that it has."""


def _lowtide(model: str, config: Config, node: int) -> str:
    start = f"{launcher(config, node)} -m lowtide train" if config.devices > 1 else "lowtide train"
    flags = {
        "--model": LOWTIDE_MODELS.get(model, model),
        "--device": "cuda",
        "--dtype": "bf16",
        "--seq": config.seq,
        "--batch": config.micro_batch * config.dp,
        "--grad-accum": config.micro_batches,
        "--tp": _more_than(config.tp),
        "--sequence-parallel": config.sequence_parallel,
        "--pp": _more_than(config.pp),
        "--dp": _more_than(config.dp),
        "--shard-parameters": config.zero == 3,
        "--policy": "full" if config.recompute == "full" else "keep_all",
        "--loss-chunks": config.loss_chunks if config.loss_kind == "chunked" else None,
    }
    return _joined(start, flags)


def _torchtitan(model: str, config: Config, node: int) -> str:
    kinds = {"none": "none", "selective-op": "selective", "full": "full"}
    flags = {
        "--model.flavor": model.rpartition("-")[2].upper(),
        "--training.seq_len": config.seq,
        "--training.local_batch_size": config.micro_batch,
        "--training.global_batch_size": config.global_batch,
        "--parallelism.data_parallel_shard_degree": config.dp,
        "--parallelism.tensor_parallel_degree": _more_than(config.tp),
        "--parallelism.context_parallel_degree": _more_than(config.cp),
        "--activation_checkpoint.mode": kinds[str(config.recompute)],
        "--training.compile": config.compile,
        "--parallelism.enable_async_tensor_parallel": config.overlap_tensor,
    }
    return _joined(f"{launcher(config, node)} torchtitan/train.py", flags)


def _megatron(model: str, config: Config, node: int) -> str:
    del model  # its sizes are flags of their own
    shape, full = config.model, config.recompute == "full"
    flags = {
        "--num-layers": shape.layers,
        "--hidden-size": shape.hidden,
        "--num-attention-heads": shape.heads,
        "--group-query-attention": shape.kv_heads != shape.heads,
        "--num-query-groups": shape.kv_heads if shape.kv_heads != shape.heads else None,
        "--ffn-hidden-size": shape.ffn,
        "--swiglu": shape.mlp == "swiglu",
        "--seq-length": config.seq,
        "--micro-batch-size": config.micro_batch,
        "--global-batch-size": config.global_batch,
        "--tensor-model-parallel-size": config.tp,
        "--sequence-parallel": config.sequence_parallel,
        "--tp-comm-overlap": config.overlap_tensor,
        "--pipeline-model-parallel-size": _more_than(config.pp),
        "--num-virtual-stages-per-pipeline-rank": _more_than(config.interleave),
        "--context-parallel-size": _more_than(config.cp),
        "--use-distributed-optimizer": config.zero == 1,
        "--recompute-granularity": "full" if full else None,
        "--recompute-method": "uniform" if full else None,
        "--recompute-num-layers": 1 if full else None,
        "--bf16": True,
        "--use-flash-attn": True,
    }
    return _joined(f"{launcher(config, node)} pretrain_gpt.py", flags)


def _estimate(model: str, config: Config, node: int) -> str:
    del model, config, node
    return ""


FRAMEWORKS = {
    one.name: one
    for one in (
        Framework(
            "lowtide", (0, 3), (0,), ("none", "full"), ("auto", "chunked"), (0.0,), _lowtide,
            dict(dtype="autocast", update="fused", unfused_mlp=True, interleave=1), frozenset(LOWTIDE_MODELS),
        ),
        Framework(
            "torchtitan", (3,), (), ("none", "selective-op", "full"), ("compiled",), (0.0,), _torchtitan,
            dict(compile=True, update="fused", interleave=1, pp=1, reduce_dtype="fp32"),
            frozenset({"llama3-8b", "llama3-70b", "llama3-405b"}), keep_gathered=True,
        ),
        Framework(
            "megatron", (0, 1), (0, 1), ("none", "full"), ("in-place",), (0.0,), _megatron,
            dict(compile=True, gradient_dtype="fp32", reentrant=True),
        ),
        Framework(
            "any", (0, 1, 2, 3), (0, 1), ("none", "selective", "full"), ("auto", "chunked"), (0.0, 1.0),
            _estimate,
        ),
    )
}  # fmt: skip
"""``lowtide train`` under autocast; torchtitan's FSDP2 with `torch.compile`; Megatron-Core with its
distributed optimizer; and anything that `lowtide.estimate` has formulas for."""


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
