"""Steps of GPT and Llama in bfloat16 with flash attention: gradients, memory and time of plain steps, of
checkpointing per block and of steps within a budget, side by side over the same parameters.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import lowtide
from benchmarks.cases import language
from benchmarks.common import (
    UNSETTLED,
    Case,
    median_difference,
    paired,
    rounds_within,
    total_peak,
)
from benchmarks.curve_engines import OwnBackend, checkpoint_blocks, shared_copy
from benchmarks.gpu.rows import AS_PER_BLOCK, Row, Where
from lowtide import meter
from lowtide.extensions.reserved.card import caching_allocator
from lowtide.meter.resident import workspace_bytes
from lowtide.plan.reserved_bytes import reserved_after

Gradients = list[torch.Tensor]


def flash_alone() -> None:
    """Of the fused attentions leave flash; what it cannot do fails, and is not done by another."""
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_math_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)


def case_of(family: str, where: Where, batch: int = 16, dropout: float = 0.0) -> Case:
    """A model of 6 layers and about 340 million parameters on 32,768 tokens; a tiny one where asked."""
    if where.small:
        layers, width, batch, sequence, vocabulary, head = 3, 64, 2, 128, 96, 32
    else:
        layers, width, sequence, vocabulary, head = 6, 2048, 2048, 16384, 128
    heads = width // head
    shape: dict[str, Any] = {"hidden_width": 4 * width, "key_value_heads": heads}
    if family == "llama":
        shape = {"hidden_width": 11 * width // 4, "key_value_heads": heads // 2}
    return language(
        family,
        batch,
        sequence,
        vocabulary=vocabulary,
        family=family,
        layers=layers,
        width=width,
        heads=heads,
        dropout=dropout,
        **shape,
    )


def placed(case: Case, where: Where) -> tuple[torch.nn.Module, dict[str, Any]]:
    """The model in bfloat16 and its batch, on the device."""
    with torch.device(where.device):
        return case.build().to(torch.bfloat16), case.batch()


@dataclass
class Contender:
    """A way to run the model.

    Attributes:
        model: a copy over parameters that all contenders share.
        step: one forward and backward from cleared gradients, waited for.
        loss: of the latest step.
        handle: lowtide's, or ``None``.
    """

    model: torch.nn.Module
    step: Callable[[], None]
    loss: list[float]
    handle: Any = None


def stepping(model: torch.nn.Module, callee: Any, batch: dict[str, Any], handle: Any = None) -> Contender:
    """A contender whose step calls ``callee``."""
    losses: list[float] = []

    def step() -> None:
        model.zero_grad(set_to_none=True)
        loss = callee(**batch).loss
        loss.backward()
        losses[:] = [loss.item()]  # waits for the device

    return Contender(model, step, losses, handle)


def gradients(model: torch.nn.Module) -> Gradients:
    """Copies in main memory: they stand in nobody's peak."""
    return [p.grad.cpu() for p in model.parameters() if p.grad is not None]


def compared(expected: Gradients, model: torch.nn.Module) -> Row:
    """Whether a model's gradients are these, bit by bit, and how far away the farthest is by its norm."""
    found = [p.grad for p in model.parameters() if p.grad is not None]
    same, farthest = len(found) == len(expected), 0.0
    for a, b in zip(expected, found, strict=False):
        a = a.to(b.device)
        if not torch.equal(a, b):
            same = False
            apart = (a.float() - b.float()).norm() / a.float().norm().clamp_min(1e-30)
            farthest = max(farthest, apart.item())
    return {"same_gradients": same, "largest_difference": farthest}


class Contest:
    """Contenders over one set of parameters, each paired with the plain step of its engine.

    Args:
        family: ``gpt`` or ``llama``.
        compiled: under `torch.compile` and `lowtide.compile`, or eagerly.
        where: on what.
    """

    def __init__(self, family: str, compiled: bool, where: Where) -> None:
        flash_alone()
        self.where, self.compiled = where, compiled
        self.original, self.batch = placed(case_of(family, where), where)
        self.tokens = self.batch["tokens"].numel()
        self.plain = self._contender("plain")
        for _ in range(3):
            self.plain.step()
        self.exact = gradients(self.original)
        self.loss = self.plain.loss[0]
        self.plain.step()
        self.repeats = compared(self.exact, self.original)["same_gradients"]

    def _contender(self, name: str) -> Contender:
        model = shared_copy(self.original)
        if name in ("plain", "per block"):
            if name == "per block":
                checkpoint_blocks(model, selective=False)
            callee = torch.compile(model, backend=OwnBackend()) if self.compiled else model
            return stepping(model, callee, self.batch)
        budget, _, way = name.partition(", ")
        budget = self._per_block_bytes() if budget == AS_PER_BLOCK else budget.replace(" ", "")
        if self.compiled:
            how: dict[str, Any] = {
                "regional": {"regional": True},
                "max-autotune": {"mode": "max-autotune-no-cudagraphs"},
            }.get(way, {})
            callee = lowtide.compile(model, budget, **how)
            return stepping(model, callee, self.batch, lowtide.handle_of(callee))
        policy = "optimal" if way == "recomputing" else None
        return stepping(model, model, self.batch, lowtide.limit_memory(model, budget, policy=policy))

    def _per_block_bytes(self) -> int:
        """What checkpointing per block takes, counted as a limit counts: with the resident workspaces."""
        rival = self._contender("per block")
        for _ in range(2):
            rival.step()
        rival.model.zero_grad(set_to_none=True)
        workspaces = workspace_bytes(torch.device(self.where.device))
        return workspaces + total_peak(rival.model, self.batch, rival.step)

    def row(self, name: str) -> Row:
        """One contender: gradients, memory, seconds."""
        one = self.plain if name == "plain" else self._contender(name)
        one.model.zero_grad(set_to_none=True)
        begin = time.perf_counter()
        first = total_peak(one.model, self.batch, one.step)  # compiles, or profiles the step
        first_seconds = time.perf_counter() - begin
        bits = [compared(self.exact, one.model)]
        for _ in range((3 if self.compiled else UNSETTLED) - 1 if one.handle else 2):
            one.step()
        settled = time.perf_counter() - begin
        bits.append(compared(self.exact, one.model))
        row = {
            "same_gradients": all(bit["same_gradients"] for bit in bits),
            "largest_difference": max(bit["largest_difference"] for bit in bits),
            "plain_repeats": self.repeats,
            "same_loss": one.loss[0] == self.loss,
            "first_step_bytes": first,
            "first_step_seconds": first_seconds,
            "settling_seconds": settled,
            **self._memory(one),
            **self._seconds(one),
            **(promised(one.handle, self.compiled) if one.handle else {}),
        }
        one.model.zero_grad(set_to_none=True)
        return row

    def _memory(self, one: Contender) -> Row:
        """``counted_bytes`` are what a plan predicts: the model, its inputs, and what the step adds. On CUDA
        also what the allocator was asked for, gave and reserved, and what of it is live beside the model.
        """
        row: Row = {"counted_bytes": total_peak(one.model, self.batch, one.step)}
        if self.where.device == "cuda":
            one.model.zero_grad(set_to_none=True)
            row |= allocator_peaks(one.step, None if self.compiled else one.handle)
            one.model.zero_grad(set_to_none=True)
            inputs = sum(tensor.nbytes for tensor in self.batch.values())
            resident = meter.resident_bytes(one.model) + inputs
            row["beside_bytes"] = torch.cuda.memory_allocated() - resident
        return row

    def _seconds(self, one: Contender) -> Row:
        """Medians; of what is not the plain step itself in pairs with it."""
        steps = [one.step] if one is self.plain else [self.plain.step, one.step]
        rounds = rounds_within(steps, self.where.seconds, least=3, most=31)
        seconds = paired(steps, rounds)
        row: Row = {"rounds": rounds, "seconds": statistics.median(seconds[-1])}
        row["tokens_a_second"] = self.tokens / row["seconds"]
        if one is not self.plain:
            row["plain_seconds"] = plain = statistics.median(seconds[0])
            row["extra"] = median_difference(seconds[1], seconds[0]) / plain
        return row


def allocator_peaks(step: Callable[[], None], handle: Any = None) -> Row:
    """Requested, allocated and reserved bytes of the whole process at their most, over three steps that begin
    with nothing cached. A limited step resets the statistics, so each is read by itself. With the handle of a
    limit, what is predicted to be reserved, too.
    """
    names = {f"{what}_bytes": f"{what}_bytes.all.peak" for what in ("requested", "allocated", "reserved")}
    found = dict.fromkeys(names, 0)
    gc.collect()
    torch.cuda.empty_cache()
    predicted: Row = {}
    if handle is not None:
        allocator, _ = caching_allocator(torch.device("cuda"))
        reserved_after(handle.graph, handle.plan.stored, allocator, steps=3, batch_resident=True)
        predicted = {"predicted_reserved_bytes": allocator.peak_reserved_bytes}
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        step()
        stats = torch.cuda.memory_stats()
        found = {name: max(found[name], stats[peak]) for name, peak in names.items()}
    return found | predicted


def promised(handle: Any, compiled: bool) -> Row:
    """What lowtide says of a step, and which operations it recomputes."""
    plan = handle.plan
    row = {
        "budget_bytes": plan.budget_bytes,
        "predicted_peak_bytes": handle.predicted_peak_bytes if compiled else plan.predicted_peak_bytes,
        "plan_plain_bytes": handle.plain_peak_bytes if compiled else plan.plain_peak_bytes,
        "predicted_extra": plan.predicted_extra,
        "gap": plan.gap,
        "replays": len(plan.replayed),
    }
    return row if compiled else {**row, "kept": handle.kept, **recomputed(handle.graph, plan)}


def recomputed(graph: lowtide.StepGraph, plan: lowtide.Plan) -> Row:
    """Forward operations by name, with how often they run again; and of those that made a value which a plan
    may evict and do not run again, how often and how many bytes.
    """
    again, kept = dict[str, int](), dict[str, list[int]]()
    for index in plan.replayed:
        name = graph.operations[index].name
        again[name] = again.get(name, 0) + 1
    for value in {saved.value for saved in graph.saved if saved.droppable}:
        maker = graph.values[value].producer
        if maker is not None and maker not in plan.replayed:
            counts = kept.setdefault(graph.operations[maker].name, [0, 0])
            counts[0] += 1
            counts[1] += graph.storages[graph.values[value].storage].bytes
    return {"recomputed": again, "not_recomputed": kept}


def deterministic_row(name: str, where: Where) -> Row:
    """Four steps within a budget against the plain step, with deterministic algorithms; GPT with dropout."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
    flash_alone()
    torch.use_deterministic_algorithms(True)
    family, _, budget = name.partition(" ")
    case = case_of(family.lower(), where, batch=4, dropout=0.1 if family == "GPT" else 0.0)
    model, batch = placed(case, where)

    def step() -> Gradients:
        torch.manual_seed(2)
        stepping(model, model, batch).step()
        return gradients(model)

    exact = step()
    step()
    repeats = compared(exact, model)["same_gradients"]
    handle = lowtide.limit_memory(model, budget.replace(" ", ""))
    bits = []
    for _ in range(4):
        step()
        bits.append(compared(exact, model))
    plan = handle.plan
    assert plan is not None
    return {
        "same_gradients": all(bit["same_gradients"] for bit in bits),
        "largest_difference": max(bit["largest_difference"] for bit in bits),
        "plain_repeats": repeats,
        "replays": len(plan.replayed),
        "kept": handle.kept,
    }


def optimizer_row(name: str, where: Where) -> Row:
    """AdamW's state and the scratch of its step, worked out beforehand and measured; or a training step whose
    limit counts them.
    """
    flash_alone()
    model, batch = placed(case_of("gpt", where), where)
    if name.startswith("GPT"):
        return _training_row(model, batch)
    options = {"default": {}, "fused": {"fused": True}, "one by one": {"foreach": False}}[name]
    from lowtide.extensions.optimizer.need import optimizer_need

    adamw = torch.optim.AdamW(model.parameters(), **options)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    need = optimizer_need(adamw)
    first, second = (meter.measure(adamw.step, timeline=False) for _ in range(2))
    state = meter.resident_bytes(model, adamw) - meter.resident_bytes(model)
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "predicted_state_bytes": need.state_bytes,
        "state_bytes": state,
        "predicted_step_bytes": need.step_bytes,
        "step_bytes": max(first.peak_bytes - first.end_bytes, second.peak_bytes),
        "unknown": need.unknown,
    }


def _training_row(model: torch.nn.Module, batch: dict[str, Any]) -> Row:
    adamw = torch.optim.AdamW(model.parameters())
    handle = lowtide.limit_memory(model, "60%", optimizer=adamw)
    forward = stepping(model, model, batch).step

    def step() -> None:
        forward()
        adamw.step()
        adamw.zero_grad(set_to_none=True)

    for _ in range(4):
        step()
    inputs = sum(tensor.nbytes for tensor in batch.values())
    resident = meter.resident_bytes(model, adamw) + inputs
    plan = handle.plan
    assert plan is not None
    return {
        "budget_bytes": plan.budget_bytes,
        "predicted_peak_bytes": plan.predicted_peak_bytes,
        "counted_bytes": resident + meter.measure(step, timeline=False).peak_bytes,
    }
