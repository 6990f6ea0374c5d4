"""Gradients that backward puts together column by column: where no mode watches it, it writes them into zeros that it made before the first."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from lowtide import private
from lowtide.graph import Event
from lowtide.ops import OpInfo

if TYPE_CHECKING:
    from lowtide.trace.eager import Tracer

_CAT = "aten.cat.default"
_REFLECTORS = ("LinalgHouseholderProduct", "Ormqr")


class Columns:
    """Backward of products of Householder reflectors, as it runs unwatched.

    Where a mode is active, ``householder_product_backward`` (torch/csrc/autograd/FunctionsManual.cpp) holds the columns of all its turns and joins
    them after the last; without one a column is copied into its place in the turn that made it, and goes when that has ended. A turn ends
    with the reflectors that it applies in place.

    Args:
        tracer: whose storages and events are put right.
    """

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._joined: list[int] = []

    def seen(self, info: OpInfo, index: int) -> None:
        """An operation has run, as number ``index``."""
        if info.name == _CAT and private.backward_node().startswith(_REFLECTORS) and not torch.is_grad_enabled():
            self._joined.append(index)

    def events(self) -> list[Event]:
        """The tracer's events, where columns go when their turns end; what they are joined to is made before the first turn."""
        tracer = self._tracer
        operations, values, storages = tracer.operations, tracer.values, tracer.storages
        ends: dict[int, int] = {}  # storage of a column -> the last operation of its turn
        for joined in self._joined:
            parts = [values[value] for value in operations[joined]["reads"]]
            for part in parts:
                if not operations[part["producer"]]["reads"]:  # zeros, which stand there already
                    storages[part["storage"]]["bytes"] = 0
            columns = sorted((part["producer"], part["storage"]) for part in parts if operations[part["producer"]]["reads"])
            if not columns:
                continue
            before = self._in_place_before(columns[0][0])
            storages[values[operations[joined]["writes"][0]]["storage"]]["producer"] = before + 1
            for (_, storage), (following, _) in pairwise(columns):
                ends[storage] = self._in_place_before(following)
            ends[columns[-1][1]] = joined - 1
        if not ends:
            return tracer.events
        gone: dict[int, list[Event]] = {}
        for storage, last in ends.items():
            gone.setdefault(last, []).append(Event("free", storage))
        found: list[Event] = []
        for event in tracer.events:
            if not (event.kind == "free" and event.index in ends):
                found.append(event)
            if event.kind == "op":
                found += gone.get(event.index, [])
        return found

    def _in_place_before(self, index: int) -> int:
        """The last operation before number ``index`` that writes in place."""
        operations, values = self._tracer.operations, self._tracer.values
        return next(i for i in range(index - 1, -1, -1) if any(values[value]["version"] for value in operations[i]["writes"]))
