"""The closed form beside the trace: what each keeps of a stage's micro-batches, line by line, and why they
differ.

A traced storage that is alive between forward and backward is named after the operation and the module that
made it; the names are those of the closed form's lines where there is one.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from lowtide.estimate.config import Config
from lowtide.estimate.lines import Stage
from lowtide.estimate.simulation.compose import Chunk

STATISTICS = "statistics of the norms"
QKV = "queries, keys and values"
TABLES = "rotary tables in the activations' dtype"
NORM_COPIES = "copies within RMS norm"
REST = "small integers, sums and scales"
SHARED = "queries, keys, values and results of attention"

WHY = {
    STATISTICS: "a mean and an inverse deviation of every token; the formulas leave them out",
    "silu(gate)": "SwiGLU in separate operations also keeps silu(gate); --unfused-mlp counts it",
    TABLES: "cosines and sines are copied in each layer; a kernel would read them where they are",
    NORM_COPIES: "RMS norm in separate operations keeps float32 copies of its input and its result; a "
    "kernel keeps the input",
    "logits in float32": "the loss keeps log-probabilities; the vocabulary-parallel one keeps the "
    "low-precision logits and a sum a row instead",
    REST: "masks of the embedding's range, index tensors, the loss itself",
    "queries": "queries, keys and values come from one product",
    "output of the chunk": "kept until its gradient comes",
    "mask of the embedding's dropout": "interleaving holds up to 2p - 1 micro-batches of the first chunk; "
    "the paper counts p",
    "output of softmax": "autocast on the CPU leaves softmax in bfloat16, which is then kept once; on a "
    "GPU it works in float32",
    "attention weights in bfloat16": "autocast on the CPU leaves softmax in bfloat16; on a GPU its result "
    "is cast",
    "keys": "each rank holds whole heads",
    "log-sum-exp of the scores": "one float32 a row",
    SHARED: "lowtide's exchange of heads keeps the result of this rank's tokens alone; other ones also keep "
    "that of its heads",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the comparison.

    Attributes:
        name: what is kept.
        closed_bytes, traced_bytes: by the formula, and in the trace.
        why: what the difference comes from, empty where there is none.
    """

    name: str
    closed_bytes: int
    traced_bytes: int
    why: str

    @property
    def difference_bytes(self) -> int:
        """Traced less closed form."""
        return self.traced_bytes - self.closed_bytes

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "name": self.name,
            "closed_bytes": self.closed_bytes,
            "traced_bytes": self.traced_bytes,
            "difference_bytes": self.difference_bytes,
            "why": self.why,
        }


def held_by_name(config: Config, chunk: Chunk) -> dict[str, int]:
    """Bytes that one micro-batch of a chunk holds between forward and backward, by what they are."""
    graph, split = chunk.steady.graph, chunk.steady.split
    run = chunk.steady_run
    position = {op: place for place, (kind, op) in enumerate(graph.events) if kind == "op"}
    freed = {storage: place for place, (kind, storage) in enumerate(graph.events) if kind == "free"}
    until = dict(freed)
    for storage, place in run.held_until.items():
        until[storage] = max(until.get(storage, 0), place)
    found: dict[str, int] = defaultdict(int)
    outputs: dict[int, list[int]] = defaultdict(list)
    for storage in graph.storages:
        if storage.producer is not None:
            outputs[storage.producer].append(storage.id)
    end = len(graph.events)
    for storage in graph.storages:
        made = storage.producer
        if made is None or position[made] >= split:
            continue
        if until.get(storage.id, end) >= split:
            op = graph.operations[made]
            reads_weight = any(
                graph.storages[graph.values[value].storage].kind == "parameter" for value in op.reads
            )
            found[name_of(config, op, outputs[made].index(storage.id), storage.bytes, reads_weight)] += (
                storage.bytes
            )
    return dict(found)


def name_of(config: Config, op: Any, output: int, size: int, reads_weight: bool) -> str:
    """What a storage is, by the operation that made it."""
    module = re.sub(r"^(?:\w+\.)*?(?:blocks|layers|h)\.\d+\.?", "block.", op.module).rstrip(".")
    name = op.name.removeprefix("aten.").split(".")[0]
    if size <= 8 * config.tokens:
        return (
            STATISTICS if "norm" in module else "log-sum-exp of the scores" if "attention" in name else REST
        )
    if name == "_to_copy" and module.split(".")[-1] in _LINEAR:
        if reads_weight:
            return (
                "bfloat16 copy of the output layer" if module == "head" else "bfloat16 copies of the weights"
            )
        return _LINEAR[module.split(".")[-1]]
    if "native_layer_norm" in name or name == "_fused_rms_norm":
        if output > 0:
            return STATISTICS
        return {"block.norm1": "input of the q, k, v projection", "block.norm2": "input of the MLP"}.get(
            module, "input of the output layer"
        )
    if "norm" in module:
        if (
            name in ("mul", "_to_copy")
            and size <= config.tokens * config.model.hidden * config.element_bytes // config.replication
        ):
            return {"block.norm1": "input of the q, k, v projection", "block.norm2": "input of the MLP"}.get(
                module, "input of the output layer"
            )
        return NORM_COPIES
    for pattern, what in _NAMES:
        if re.search(pattern, f"{module}:{name}:{output}"):
            return what
    if module == "block" and name in ("add", "add_", "native_dropout"):
        return "residual stream"
    return f"{name} in {module or 'the model'}"


_LINEAR = {
    "qkv": "input of the q, k, v projection", "q": "input of the q, k, v projection",
    "k": "input of the q, k, v projection", "v": "input of the q, k, v projection",
    "out": "input of the output projection", "up": "input of the MLP", "gate": "input of the MLP",
    "down": "input of the MLP's last layer", "head": "input of the output layer",
}  # fmt: skip
"""What a linear layer's cast of its input is a copy of."""

_NAMES = (
    (r"core\.dropout:native_dropout:1", "mask of softmax's dropout"),
    (r"core\.dropout:native_dropout:0", "output of softmax's dropout"),
    (r"core:.*softmax", "output of softmax"),
    (r"core:_scaled_dot_product.*:0", "input of the output projection"),
    (r"core:_scaled_dot_product.*:1", "log-sum-exp of the scores"),
    (r"attention\.core:_to_copy", "attention weights in bfloat16"),
    (r"attention\.dropout:native_dropout:1", "mask of the attention's dropout"),
    (r"mlp\.dropout:native_dropout:1", "mask of the MLP's dropout"),
    (r"^block\.dropout:native_dropout:1", "masks of the layer's dropouts"),
    (r"^dropout:native_dropout:1", "mask of the embedding's dropout"), (r"attention\.(qkv|q|k|v):", QKV),
    (r"attention:(mm|addmm|add|cat|stack|view|linear)", QKV), (r"attention:_to_copy|^:index", TABLES),
    (r"attention\.core:(cat|_c10d)", SHARED),
    (r"attention\.core:(clone|expand|repeat|index|_unsafe_view|mul)", QKV),
    (r"attention:(clone|_unsafe_view|copy)", "input of the output projection"),
    (r"mlp\.(up|gate):", "input of the MLP's activation"),
    (r"mlp:(addmm|mm)", "input of the MLP's activation"),
    (r"mlp(\.act\w*)?:gelu", "input of the MLP's last layer"), (r"mlp(\.act\w*)?:silu", "silu(gate)"),
    (r"mlp:mul", "input of the MLP's last layer"),
    (r"^:zeros_like", "gradient of the output layer's weight"),
    (r"^:empty_like", "gradient of the output layer's input"),
    (r"^(head|):(_log_softmax|mm|_to_copy|exp|sub|addmm)", "logits in float32"),
    (r"^:(empty|zeros)|^dropout:native_dropout:0|^tokens:|^:add|^embed|^:embedding", "residual stream"),
)  # fmt: skip

_MERGED = {
    "input of the attention norm": "residual stream", "input of the MLP norm": "residual stream",
    "input of the last norm": "residual stream", "input of the layer": "residual stream",
    "inputs of the segments": "residual stream", "queries": QKV, "keys": QKV, "values": QKV,
    "input of GELU": "input of the MLP's activation",
    "gate and up projections": "input of the MLP's activation",
}  # fmt: skip
"""Lines of the closed form that one kind of storage in the trace answers to."""

_EXCHANGED = (
    QKV, "input of the output projection", "log-sum-exp of the scores",
    "output of attention before its exchange",
)  # fmt: skip
"""What the operations of an exchange make, which are of one kind."""


def comparison(config: Config, stage: Stage, held: dict[str, int]) -> list[Row]:
    """Rows for every kind of activation that either side keeps."""
    closed: dict[str, int] = defaultdict(int)
    for line in stage.lines:
        if line.kind == "activations":
            closed[_together(config, _MERGED.get(line.name, line.name))] += line.bytes
    traced: dict[str, int] = defaultdict(int)
    for name, size in held.items():
        traced[_together(config, _merged_trace(name, closed))] += size
    names = [*closed, *(name for name in traced if name not in closed)]
    return [
        Row(
            name,
            closed.get(name, 0),
            traced.get(name, 0),
            _why(config, name, traced.get(name, 0) - closed.get(name, 0)),
        )
        for name in names
    ]


def _together(config: Config, name: str) -> str:
    return SHARED if config.cp > 1 and name in _EXCHANGED else name


def _merged_trace(name: str, closed: dict[str, int]) -> str:
    if name == "masks of the layer's dropouts" and "mask of the MLP's dropout" in closed:
        return "mask of the MLP's dropout"
    return name


def _why(config: Config, name: str, difference: int) -> str:
    if difference == 0:
        return ""
    if name in WHY:
        return WHY[name]
    if name == "residual stream":
        if config.recompute not in ("none", "selective"):
            return "what leaves a region is kept where the next one begins: the last layer's output too"
        return "the output of the last layer is the last norm's input; on inner stages it is sent and freed"
    if name == QKV and config.model.kv_heads != config.model.heads:
        return "key and value heads as this rank holds them; rotated keys beside their product"
    if name == QKV:
        return "rotated queries and keys beside their products"
    return "kept by the operations of the project's model"
