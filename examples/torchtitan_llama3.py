"""torchtitan's Llama 3, sharded by torchtitan's own `parallelize_llama`, within a memory budget.

    pip install torchtitan
    pip install triton  # without a card: torchtitan imports it, and PyTorch's builds for CPUs come without it
    torchrun --nproc-per-node 2 examples/torchtitan_llama3.py --budget 60%

It runs on CUDA and, as here on two processes of a laptop, on Gloo. The one line that torchtitan's own trainer
would need more is marked. The model and the function are imported from where torchtitan is installed.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import cross_entropy

import lowtide


def llama(flavor: str, device: torch.device) -> torch.nn.Module:
    """torchtitan's Llama 3 of a flavor, sharded over all processes."""
    try:
        from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
        from torchtitan.distributed import ParallelDims, parallel_dims
        from torchtitan.models.common.attention import ScaledDotProductAttention
        from torchtitan.models.llama3 import llama3_configs, parallelize_llama
    except ImportError as error:
        raise SystemExit(
            "this example trains torchtitan's Llama 3: pip install torchtitan triton (tried with torchtitan "
            f"0.3.0; it imports triton, which PyTorch's builds for CPUs come without). {error}"
        ) from error
    config: Any = llama3_configs[flavor]("flex")
    if device.type == "cpu":  # flex attention is compiled for a card; torchtitan takes one for granted
        parallel_dims.device_type = "cpu"
        for layer in config.layers:
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
    with torch.device("meta"):
        model = config.build()
    parallelism = ParallelismConfig(spmd_backend="partial_dtensor")
    parallelize_llama(
        model,
        parallel_dims=ParallelDims.from_config(parallelism, dist.get_world_size()),
        training=TrainingConfig(mixed_precision_param="float32" if device.type == "cpu" else "bfloat16"),
        parallelism=parallelism,
        compile_config=CompileConfig(enable=False),
        ac_config=None,  # the budget decides what is computed again
        dump_folder="",
    )
    if device.type == "cpu":  # torchtitan scales sums of gradients itself; Gloo has plain sums only
        for unit in (unit for unit in model.modules() if isinstance(unit, FSDPModule)):
            unit.set_force_sum_reduction_for_comms(True)
    model.to_empty(device=device)
    with torch.no_grad():
        model.init_states(buffer_device=None)
    return model


def main() -> None:
    """Train on random tokens, and print what the steps took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--flavor", default="debugmodel", help="one of torchtitan's: debugmodel, 8B, ...")
    parser.add_argument("--budget", default="60%", help="of each process, for the whole step")
    for name, default in (("--batch", 8), ("--seq", 256), ("--steps", 4)):
        parser.add_argument(name, type=int, default=default)
    asked = parser.parse_args()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    torch.manual_seed(0)
    model = llama(asked.flavor, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)

    handle = lowtide.limit_memory(model, asked.budget, optimizer=optimizer)  # the one changed line

    torch.manual_seed(1 + dist.get_rank())
    for step in range(asked.steps):
        tokens = torch.randint(2048, (asked.batch, asked.seq + 1), device=device)
        logits = model(tokens[:, :-1])
        loss = cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()) / dist.get_world_size()
        del logits  # gradients are summed over the processes, so that the loss is a part of their mean
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step + 1}: loss {loss.item() * dist.get_world_size():.4f}", flush=True)
    if dist.get_rank() == 0:
        taken, plan = handle.measured_peak_bytes, handle.plan
        within = f"within {plan.budget_bytes:,}" if plan is not None and plan.budget_bytes else ""
        print(f"a step took {taken:,} bytes {within}; plain it takes {plan.plain_peak_bytes:,}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
