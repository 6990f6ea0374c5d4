"""Step graphs made by hand: a small tape that puts events in the order in which PyTorch's autograd engine
would, and models on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lowtide.graph import Event, Operation, Saved, StepGraph, Storage, Value


@dataclass
class Node:
    """A backward node: unpacks ``saved``, reads the gradients of ``outputs``, makes the gradients of
    ``inputs``.
    """

    name: str
    module: str
    saved: list[int]
    output: int
    inputs: list[int]
    seconds: float
    scratch: int


@dataclass
class Tape:
    """Records forward operations with what autograd saves, and then plays the backward."""

    seconds_per_byte: float = 1e-9
    operations: list[Operation] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    saved: list[Saved] = field(default_factory=list)
    actions: list[Event] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    module: str = ""
    newest: dict[int, int] = field(default_factory=dict)
    last_use: dict[int, int] = field(default_factory=dict)
    held: set[int] = field(default_factory=set)
    resident: int = 0

    def before(self, bytes_: int, kind: Any = "parameter", name: str = "") -> int:
        """A storage that was resident before the step; returns its value."""
        storage = Storage(len(self.storages), bytes_, kind, None, name)
        self.storages.append(storage)
        self.resident += bytes_
        return self._value(storage.id, None)

    def _value(self, storage: int, producer: int | None) -> int:
        old = self.newest.get(storage)
        version = 0 if old is None else self.values[old].version + 1
        if old is not None:
            v = self.values[old]
            self.values[old] = Value(v.id, v.storage, v.version, v.producer, False)
        value = Value(len(self.values), storage, version, producer)
        self.values.append(value)
        self.newest[storage] = value.id
        return value.id

    def op(
        self,
        name: str,
        reads: Sequence[int],
        outs: Sequence[int] = (),
        *,
        mutates: Sequence[int] = (),
        unseen: Sequence[int] = (),
        seconds: float | None = None,
        scratch: int = 0,
        replayable: bool = True,
        random: bool = False,
        phase: Any = "forward",
    ) -> list[int]:
        """One operation: allocates ``outs`` bytes, mutates values in place (``unseen``: without reading
        them); returns what it wrote.
        """
        index = len(self.operations)
        writes: list[int] = []
        for bytes_ in outs:
            self.storages.append(Storage(len(self.storages), bytes_, phase, index))
            writes.append(self._value(len(self.storages) - 1, index))
        for value in [*mutates, *unseen]:
            writes.append(self._value(self.values[value].storage, index))
        every = tuple(dict.fromkeys([*reads, *mutates]))
        if seconds is None:
            seconds = self.seconds_per_byte * sum(
                self.storages[self.values[v].storage].bytes for v in {*every, *writes}
            )
        self.operations.append(
            Operation(
                index,
                name,
                every,
                tuple(writes),
                phase,
                self.module,
                random,
                replayable,
                "" if replayable else "test",
                seconds,
                scratch,
            )
        )
        for value in [*every, *writes]:
            if (
                self.values[value].storage not in self.last_use
                or phase == "forward"
                or self.storages[self.values[value].storage].kind == phase
            ):
                self.last_use[self.values[value].storage] = len(self.actions)
        self.actions.append(Event("op", index))
        return writes

    def save(self, value: int, *, droppable: bool | None = None) -> int:
        """Autograd saves a tensor that lies in ``value``."""
        if droppable is None:
            droppable = self.values[value].producer is not None
        self.saved.append(Saved(len(self.saved), value, droppable, self.module))
        self.actions.append(Event("pack", len(self.saved) - 1))
        return len(self.saved) - 1

    def node(
        self,
        name: str,
        saved: Sequence[int],
        output: int,
        inputs: Sequence[int],
        seconds: float = 0.0,
        scratch: int = 0,
    ) -> None:
        """The backward node of what was just computed."""
        self.nodes.append(Node(name, self.module, list(saved), output, list(inputs), seconds, scratch))

    def backward(self) -> None:
        """Play the recorded nodes in reverse, making and accumulating gradients."""
        grads: dict[int, int] = {}
        for node in reversed(self.nodes):
            self.module = node.module
            for t in node.saved:
                self.actions.append(Event("unpack", t))
            out = [grads.pop(node.output)] if node.output in grads else []
            fresh = list(dict.fromkeys(node.inputs))
            sizes = [self.storages[self.values[v].storage].bytes for v in fresh]
            reads = [self.saved[t].value for t in node.saved] + out
            made = self.op(
                node.name, reads, sizes, seconds=node.seconds, scratch=node.scratch, phase="backward"
            )
            for t in node.saved:
                self.actions.append(Event("done", t))
            for t in node.saved:
                self.actions.append(Event("release", t))
            for v, grad in zip(fresh, made, strict=True):
                if self.values[v].producer is None:
                    self.held.add(self.values[grad].storage)
                if v in grads:
                    grads[v] = self.op("aten.add_.Tensor", [grad], mutates=[grads[v]], phase="backward")[0]
                else:
                    grads[v] = grad

    def graph(self, **keywords: Any) -> StepGraph:
        """The finished graph, with ``free`` events after each storage's last natural use."""
        frees: dict[int, list[int]] = {}
        for storage, at in self.last_use.items():
            if self.storages[storage].producer is not None and storage not in self.held:
                frees.setdefault(at, []).append(storage)
        events: list[Event] = []
        for at, action in enumerate(self.actions):
            # A tensor is packed right after the operation that made it returns: frees come after the packs
            # that follow.
            events.append(action)
            events.extend(Event("free", storage) for storage in frees.get(at, ()))
        return StepGraph(
            operations=tuple(self.operations),
            storages=tuple(self.storages),
            values=tuple(self.values),
            saved=tuple(self.saved),
            events=tuple(events),
            resident_bytes=self.resident,
            plain_seconds=keywords.pop("plain_seconds", sum(o.seconds for o in self.operations)),
            **keywords,
        )


class Layers:
    """The layers that the synthetic models are made of, on a tape. Sizes are in bytes of float32."""

    def __init__(self, tape: Tape, tokens: int, hidden: int) -> None:
        self.tape = tape
        self.tokens = tokens
        self.hidden = hidden
        self.flop_seconds = 1e-11

    def norm(self, x: int, width: int) -> int:
        t = self.tape
        weight = t.before(4 * width)
        size = 4 * self.tokens * width
        y, mean, rstd = t.op(
            "aten.native_layer_norm.default", [x, weight], [size, 4 * self.tokens, 4 * self.tokens]
        )
        t.node(
            "aten.native_layer_norm_backward.default",
            [t.save(x), t.save(mean), t.save(rstd)],
            y,
            [x, weight],
            3e-9 * size,
        )
        return y

    def linear(self, x: int, a: int, b: int) -> int:
        t = self.tape
        weight = t.before(4 * a * b)
        seconds = 2 * self.tokens * a * b * self.flop_seconds
        (y,) = t.op("aten.addmm.default", [x, weight], [4 * self.tokens * b], seconds=seconds)
        t.node("aten.mm.default", [t.save(x)], y, [x, weight], 2 * seconds)
        return y

    def dropout(self, x: int) -> int:
        t = self.tape
        size = t.storages[t.values[x].storage].bytes
        (empty,) = t.op("aten.empty_like.default", [], [size], seconds=1e-6)
        (mask,) = t.op("aten.bernoulli_.float", [], unseen=[empty], random=True, seconds=3e-9 * size)
        (mask,) = t.op("aten.div_.Scalar", [], mutates=[mask])
        (y,) = t.op("aten.mul.Tensor", [x, mask], [size])
        t.node("aten.mul.Tensor", [t.save(mask)], y, [x], 2e-9 * size)
        return y

    def add(self, a: int, b: int) -> int:
        t = self.tape
        (y,) = t.op("aten.add.Tensor", [a, b], [t.storages[t.values[a].storage].bytes])
        t.node("add_backward", [], y, [a, b], 1e-6)
        return y

    def attention(self, x: int, heads: int, sequence: int) -> int:
        """q, k, v in one product, scores, softmax, dropout, values."""
        t = self.tape
        width = self.hidden
        weight = t.before(12 * width * width)
        seconds = 6 * self.tokens * width * width * self.flop_seconds
        size = 4 * self.tokens * width
        (qkv,) = t.op("aten.addmm.default", [x, weight], [3 * size], seconds=seconds)
        t.node("aten.mm.default", [t.save(x)], qkv, [x, weight], 2 * seconds)
        scores_size = 4 * self.tokens * heads * sequence
        product = 2 * self.tokens * sequence * width * self.flop_seconds
        (scores,) = t.op("aten.bmm.default", [qkv], [scores_size], seconds=product)
        t.node("aten.bmm.default", [t.save(qkv)], scores, [qkv], 2 * product)
        (soft,) = t.op("aten._softmax.default", [scores], [scores_size], seconds=4e-9 * scores_size)
        t.node("aten._softmax_backward_data.default", [t.save(soft)], soft, [scores], 3e-9 * scores_size)
        dropped = self.dropout(soft)
        (y,) = t.op("aten.bmm.default", [dropped, qkv], [size], seconds=product)
        t.node("aten.bmm.default", [t.save(dropped), t.save(qkv)], y, [dropped, qkv], 2 * product)
        return y

    def gelu(self, x: int) -> int:
        t = self.tape
        size = t.storages[t.values[x].storage].bytes
        (y,) = t.op("aten.gelu.default", [x], [size], seconds=4e-9 * size)
        t.node("aten.gelu_backward.default", [t.save(x)], y, [x], 5e-9 * size)
        return y


def within(tape: Tape, module: str, make: Callable[[], int]) -> int:
    """Run ``make`` with ``module`` as the current module."""
    old, tape.module = tape.module, module
    result = make()
    tape.module = old
    return result


def transformer(
    layers: int = 4,
    tokens: int = 256,
    hidden: int = 128,
    heads: int = 4,
    sequence: int = 64,
    vocab: int = 256,
    **keywords: Any,
) -> StepGraph:
    """One training step of a GPT-like model: pre-norm blocks with dropout, and a cross-entropy head."""
    tape = Tape()
    make = Layers(tape, tokens, hidden)
    ids = tape.before(8 * tokens, "input", "ids")
    table = tape.before(4 * vocab * hidden, name="wte")
    tape.module = "wte"
    (x,) = tape.op("aten.embedding.default", [table, ids], [4 * tokens * hidden])
    tape.node("aten.embedding_dense_backward.default", [tape.save(ids)], x, [table], 1e-6)
    x = within(tape, "drop", lambda: make.dropout(x))
    for i in range(layers):
        name = f"h.{i}"
        y = within(tape, f"{name}.ln_1", lambda x=x: make.norm(x, hidden))
        y = within(tape, f"{name}.attn", lambda y=y: make.attention(y, heads, sequence))
        y = within(tape, f"{name}.attn.c_proj", lambda y=y: make.linear(y, hidden, hidden))
        y = within(tape, f"{name}.attn.drop", lambda y=y: make.dropout(y))
        x = within(tape, name, lambda x=x, y=y: make.add(x, y))
        y = within(tape, f"{name}.ln_2", lambda x=x: make.norm(x, hidden))
        y = within(tape, f"{name}.mlp.c_fc", lambda y=y: make.linear(y, hidden, 4 * hidden))
        y = within(tape, f"{name}.mlp.act", lambda y=y: make.gelu(y))
        y = within(tape, f"{name}.mlp.c_proj", lambda y=y: make.linear(y, 4 * hidden, hidden))
        y = within(tape, f"{name}.mlp.drop", lambda y=y: make.dropout(y))
        x = within(tape, name, lambda x=x, y=y: make.add(x, y))
    x = within(tape, "ln_f", lambda: make.norm(x, hidden))
    logits = within(tape, "lm_head", lambda: make.linear(x, hidden, vocab))
    tape.module = ""
    size = 4 * tokens * vocab
    (logp,) = tape.op("aten._log_softmax.default", [logits], [size])
    tape.node("aten._log_softmax_backward_data.default", [tape.save(logp)], logp, [logits], 3e-9 * size)
    loss, _total = tape.op("aten.nll_loss_forward.default", [logp, ids], [4, 4])
    tape.node("aten.nll_loss_backward.default", [tape.save(ids), tape.save(logp)], loss, [logp], 1e-9 * size)
    tape.backward()
    return tape.graph(**keywords)


def residual_network(blocks: int = 6, bytes_: int = 1 << 16) -> StepGraph:
    """Convolutions with batch norm (whose statistics move, so it is not replayable as is) and in-place relu,
    widths changing per stage.
    """
    tape = Tape()
    image = tape.before(bytes_, "input", "image")

    def conv(x: int, size: int) -> int:
        weight = tape.before(4096)
        (y,) = tape.op("aten.convolution.default", [x, weight], [size], seconds=3e-8 * size)
        tape.node("aten.convolution_backward.default", [tape.save(x)], y, [x, weight], 6e-8 * size)
        weight = tape.before(256)
        z, mean, _ = tape.op("aten.native_batch_norm.default", [y, weight], [size, 256, 256])
        tape.node(
            "aten.native_batch_norm_backward.default",
            [tape.save(y), tape.save(mean)],
            z,
            [y, weight],
            3e-9 * size,
        )
        return z

    def relu(x: int) -> int:
        (y,) = tape.op("aten.relu_.default", [], mutates=[x])
        tape.node("aten.threshold_backward.default", [tape.save(y)], y, [x], 1e-9 * bytes_)
        return y

    x = conv(image, bytes_)
    for i in range(blocks):
        size = bytes_ >> (i // 2)
        tape.module = f"layers.{i}"
        y = relu(conv(x, size))
        y = conv(y, size)
        if i % 2 == 0 and i:
            x = conv(x, size)
        (z,) = tape.op("aten.add.Tensor", [x, y], [size])
        tape.node("add_backward", [], z, [x, y], 1e-6)
        x = relu(z)
    tape.module = ""
    (loss,) = tape.op("aten.mean.default", [x], [4])
    tape.node("mean_backward", [], loss, [x], 1e-6)
    tape.backward()
    return tape.graph()


def one_linear() -> StepGraph:
    """A product of an input and a parameter, which both stay anyway."""
    tape = Tape()
    tape.module = "linear"
    x, weight = tape.before(64, "input"), tape.before(32, "parameter")
    (out,) = tape.op("mm", [x, weight], [64], seconds=1.0)
    tape.node("mm_backward", [tape.save(x)], out, [weight], 2.0, 0)
    tape.backward()
    return tape.graph(replay_overhead_seconds=0.25, overhead_seconds=0.5)


def chain() -> StepGraph:
    """x (8) -> a (16, saved) -> b (32, saved) -> loss, with one backward node for each saved tensor."""
    tape = Tape()
    x = tape.before(8, "parameter", "x")
    (a,) = tape.op("f", [x], [16], seconds=1)
    tape.node("f_back", [], a, [x], 1)
    (b,) = tape.op("g", [a], [32], seconds=2, scratch=5)
    tape.node("g_back", [tape.save(a)], b, [a], 1)
    (loss,) = tape.op("h", [b], [4], seconds=3)
    tape.node("h_back", [tape.save(b)], loss, [b], 1)
    tape.backward()
    return tape.graph(overhead_seconds=0.5, replay_overhead_seconds=0.125)
