"""The parts of an estimate: lines that name their equation, summed up by pipeline stage."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import Any, Literal

Kind = Literal["weights", "gradients", "optimizer", "activations", "temporaries"]
Place = Literal["model", "layers", "ends"]
Moment = Literal["loss", "backward", "update"]
MOMENTS: tuple[Moment, ...] = ("loss", "backward", "update")
"""The moments of a step one of which is its peak: the loss, with all that autograd keeps; the fullest of
backward; the optimizer's update.
"""
KINDS: tuple[Kind, ...] = ("weights", "gradients", "optimizer", "activations", "temporaries")

KORTHIKANTI = "arXiv 2205.05198"
ZERO = "arXiv 1910.02054"
ZERO_OFFLOAD = "arXiv 2101.06840"
CHEN = "arXiv 1604.06174"
FULLY_SHARD = f"{ZERO} Sec. 5.3; torch.distributed.fsdp.fully_shard"


@dataclass(frozen=True, slots=True)
class Line:
    """One term of an estimate.

    Attributes:
        kind: the sum that the term belongs to.
        name: the tensors that it counts.
        bytes: on one device.
        formula: in the symbols of arXiv 2205.05198, Table 1.
        source: the equation or the paper.
        note: a remark.
        place: ``layers`` for activations of transformer layers (Equations 1 to 6), ``ends`` for embedding,
            last norm and output layer (Section 4.3), ``model`` for all others.
        at: the bytes that are live at each of `MOMENTS`; ``None`` means all bytes at each moment.
    """

    kind: Kind
    name: str
    bytes: int
    formula: str
    source: str
    note: str = ""
    place: Place = "model"
    at: tuple[int, int, int] | None = None

    @property
    def moments(self) -> dict[Moment, int]:
        """Live bytes at each moment."""
        return dict(zip(MOMENTS, self.at or (self.bytes,) * 3, strict=True))

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        names = ("kind", "place", "name", "bytes", "formula", "source", "note", "moments")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True)
class Term:
    """A line before it is multiplied: exact bytes of one micro-batch in one layer (or at one place).

    Attributes:
        name, formula, source, note: as in `Line`.
        bytes: exact, possibly a fraction where something does not divide.
        part: ``input`` for the layer's input, ``attention``, ``core`` for what lies between queries, keys and
            values and the output of attention, ``mlp``, or ``loss``.
    """

    name: str
    bytes: Fraction
    formula: str
    source: str
    part: Literal["input", "attention", "core", "mlp", "embedding", "loss", "output"]
    note: str = ""

    def line(self, times: Fraction | int = 1, note: str = "") -> Line:
        """The line of ``times`` such terms."""
        place: Place = "ends" if self.part in ("embedding", "loss", "output") else "layers"
        notes = "; ".join(filter(None, (self.note, note)))
        size = ceil(self.bytes * times)
        at = (size, 0 if self.part == "loss" else size, 0)  # the loss lets go of its tensors first
        return Line("activations", self.name, size, self.formula, self.source, notes, place, at)


def total(terms: Iterable[Term]) -> Fraction:
    """Sum of the terms' bytes."""
    return sum((term.bytes for term in terms), Fraction(0))


@dataclass(frozen=True, slots=True)
class Stage:
    """One rank of one pipeline stage.

    Attributes:
        index: the stage, from 0.
        layers: transformer layers on it.
        parameters: parameters on one of its devices.
        layers_in_flight: layers times microbatches whose activations are live at the stage's peak.
        micro_batches_in_flight: microbatches in flight at the stage's peak: p - stage under 1F1B.
        lines: the terms.
        whole_micro_batches: number of microbatches in flight that need no recomputation (2205.05198, Appendix
            C); ``None`` without a memory.
    """

    index: int
    layers: int
    parameters: int
    layers_in_flight: Fraction
    micro_batches_in_flight: Fraction
    lines: tuple[Line, ...]
    whole_micro_batches: int | None = None

    def bytes(self, kind: Kind) -> int:
        """Bytes of all lines of a kind."""
        return sum(line.bytes for line in self.lines if line.kind == kind)

    @property
    def weights_bytes(self) -> int:
        """Weights."""
        return self.bytes("weights")

    @property
    def gradients_bytes(self) -> int:
        """Gradients."""
        return self.bytes("gradients")

    @property
    def optimizer_bytes(self) -> int:
        """Optimizer state, master weights included."""
        return self.bytes("optimizer")

    @property
    def activations_bytes(self) -> int:
        """The largest number of bytes that autograd keeps from forward to backward."""
        return self.bytes("activations")

    @property
    def layer_activations_bytes(self) -> int:
        """The part of the activations that lies in transformer layers: what Equations 1 to 6 and Figures 1
        and 7 of 2205.05198 count.
        """
        return sum(line.bytes for line in self.lines if line.kind == "activations" and line.place == "layers")

    @property
    def temporaries_bytes(self) -> int:
        """The bytes of activations and temporaries, in the loss or in backward, less `activations_bytes`."""
        return self.activation_peak_bytes - self.activations_bytes

    @property
    def activation_peak_bytes(self) -> int:
        """Activations and temporaries: what a memory profile has above weights, gradients and optimizer."""
        made = [line for line in self.lines if line.kind in ("activations", "temporaries")]
        moments = (sum(line.moments[name] for line in made) for name in ("loss", "backward"))
        return max(self.activations_bytes, *moments)

    @property
    def moments(self) -> dict[Moment, int]:
        """Live bytes in the loss, in backward and in the optimizer's update."""
        return {name: sum(line.moments[name] for line in self.lines) for name in MOMENTS}

    @property
    def peak_at(self) -> Moment:
        """The moment of the peak."""
        moments = self.moments
        return max(MOMENTS, key=lambda name: moments[name])

    @property
    def total_bytes(self) -> int:
        """The peak: the largest of the moments."""
        return max(self.moments.values())

    @property
    def cached_bytes(self) -> int:
        """The peak as PyTorch's allocator has it: the gradients of a step before leave small blocks, which
        stay reserved, and none of which can hold logits.
        """
        spare = dict.fromkeys(MOMENTS, 0)
        for line in self.lines:
            if line.kind == "gradients" and line.moments["update"]:
                for name, live in line.moments.items():
                    spare[name] += line.bytes - live
        return max(size + spare[name] for name, size in self.moments.items())

    @property
    def scattered_bytes(self) -> int:
        """The same where layers are recomputed: blocks of one, cached since forward, are small for logits."""
        at = [line.at for line in self.lines if line.at is not None]
        alone = (sum(one[place] for one in at if one[place] == sum(one)) for place in range(2))
        return self.moments["loss"] + min(alone)

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "stage": self.index, "layers": self.layers, "parameters": self.parameters,
            "micro_batches_in_flight": float(self.micro_batches_in_flight),
            "whole_micro_batches": self.whole_micro_batches,
            **{f"{kind}_bytes": getattr(self, f"{kind}_bytes") for kind in KINDS},
            "layer_activations_bytes": self.layer_activations_bytes,
            "activation_peak_bytes": self.activation_peak_bytes, "total_bytes": self.total_bytes,
            "moments": self.moments, "peak_at": self.peak_at,
            "lines": [line.to_json() for line in self.lines],
        }  # fmt: skip
