"""Bytes on devices whose streams run late: what a limited step takes, and memory that is let go of."""

from __future__ import annotations

import torch
from late_scenarios import Run, check, scenario
from moving_net import X, net, step

import lowtide
from lowtide import meter, policies
from lowtide.extensions.moves.store.host import host_bytes


@scenario
def report() -> Run:
    """A limited step under the meter: its timeline, and the bytes that the plan predicts."""
    return _reported(20_000)


@scenario
def report_wide() -> Run:
    """The same where much is under way when backward begins."""
    return _reported(100_000)


def _reported(window: int) -> Run:
    x = X[:64].cuda()
    model = net(layers=2).cuda()
    handle = lowtide.limit_memory(model, policy=policies.offload("host", min_bytes=1, window_bytes=window))
    step(model, x)
    step(model, x)
    gradients = sum(p.nbytes for p in model.parameters())
    resident = meter.resident_bytes(model) - gradients + x.nbytes

    def run(seed: int) -> None:
        model.zero_grad()
        torch.manual_seed(0)
        found = meter.measure(lambda: model(x).backward(), timeline=bool(seed % 2), device="cuda:0")
        plan = handle.plan
        assert plan is not None
        taken = resident + plan.slab_bytes + found.peak_bytes
        check(taken == plan.predicted_peak_bytes, f"{taken} bytes, not {plan.predicted_peak_bytes}")

    run(0)
    return run


@scenario
def locked_memory() -> Run:
    """Page-locked memory is let go of while a copy from it may be under way; who copies waits."""

    def run(seed: int) -> None:
        memory = host_bytes(1000, torch.device("cuda:0"))
        memory.fill_(seed % 200)
        out = torch.empty(1000, dtype=torch.uint8, device="cuda")
        out.copy_(memory, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        del memory
        check(bool((out == seed % 200).all()), "other bytes")

    return run
