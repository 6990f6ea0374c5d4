"""Sequences that two processes share over Gloo: a ring beside an exchange of heads. Time, bytes sent and
saved, and peak of a step, of grouped and of single keys, and what ``exchange="auto"`` chooses.

python -m benchmarks context_parallel [--quick]
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from benchmarks.common import keep_pages, paired, quick, save
from lowtide import meter
from lowtide import parallel as lp
from lowtide.models import preset
from lowtide.models.llama import Llama
from lowtide.parallel import collectives
from lowtide.parallel.context.share import context_of

RANKS, LAYERS, WIDTH, HEADS, VOCABULARY = 2, 2, 256, 8, 512
LENGTHS = (512, 1024, 2048)
KEY_HEADS = (8, 2)
EXCHANGES = ("ring", "all-to-all")


def model(key_heads: int, exchange: Any) -> nn.Module:
    """A Llama whose ranks share sequences."""
    torch.manual_seed(0)
    shape = preset(
        "llama-nano", layers=LAYERS, width=WIDTH, heads=HEADS, key_value_heads=key_heads,
        hidden_width=2 * WIDTH, vocabulary=VOCABULARY, positions=max(LENGTHS), loss_chunks=8,
    )  # fmt: skip
    return lp.context_parallel(Llama(shape), dist.group.WORLD, exchange)


@contextmanager
def sent_bytes(found: list[int]) -> Iterator[None]:
    """Add up in ``found`` what this rank sends to others in exchanges within the block."""
    own = collectives.functional.all_to_all_single

    def counted(x: Tensor, outputs: list[int], inputs: list[int], name: str) -> Tensor:
        rows = sum(inputs) - inputs[dist.get_rank()]
        found[0] += rows * x[:1].numel() * x.element_size() if rows else 0
        return own(x, outputs, inputs, name)

    with patch.object(collectives.functional, "all_to_all_single", counted):
        yield


def saved_bytes(module: nn.Module, tokens: Tensor) -> int:
    """Bytes of storages that autograd keeps of a forward, without parameters."""
    kept: dict[int, int] = {}
    weights = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        held = module(tokens, tokens)
    assert held.loss is not None
    return sum(kept.values())


def step_of(module: nn.Module, tokens: Tensor) -> Callable[[], None]:
    """A step whose ranks begin together."""

    def step() -> None:
        module.zero_grad(set_to_none=True)
        module(tokens, tokens).loss.backward()
        lp.allreduce_sequence_parallel_gradients(module)

    return step


def compared(length: int, key_heads: int, rounds: int) -> dict[str, Any]:
    """A row: both exchanges in turn. One is faster where the middle half of all pairs says so."""
    models: dict[str, nn.Module] = {one: model(key_heads, one) for one in EXCHANGES}
    tokens = torch.randint(VOCABULARY, (1, length), generator=torch.Generator().manual_seed(1))
    steps = {exchange: step_of(one, tokens) for exchange, one in models.items()}
    seconds: dict[str, list[float]] = dict(
        zip(EXCHANGES, paired(list(steps.values()), rounds, warmup=2), strict=True)
    )
    auto: Any = context_of(model(key_heads, "auto"))
    row: dict[str, Any] = {"length": length, "heads": HEADS, "key_heads": key_heads, "auto": auto.exchange}
    for exchange, one in models.items():
        sent = [0]
        with sent_bytes(sent):
            peak = meter.measure(steps[exchange], timeline=False).peak_bytes
        dist.all_reduce(total := torch.tensor(sent[0]))  # in a ring not all ranks send alike
        row[exchange] = {
            "seconds": statistics.median(seconds[exchange]),
            "sent_bytes": int(total) // RANKS,
            "saved_bytes": saved_bytes(one, tokens),
            "peak_bytes": peak,
        }
    shares = [ring / heads for ring, heads in zip(*seconds.values(), strict=True)]
    low, middle, high = statistics.quantiles(shares, n=4)
    row["ring_over_all_to_all"] = {"low": low, "median": middle, "high": high}
    row["faster"] = "ring" if high < 1 else "all-to-all" if low > 1 else None
    return row


def run(rank: int, folder: str, rounds: int) -> None:
    """One of the processes; the first writes what it found."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    keep_pages()
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    rows = [compared(length, key_heads, rounds) for key_heads in KEY_HEADS for length in LENGTHS]
    if not rank:
        Path(folder, "rows").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Measure, and write the result file."""
    with TemporaryDirectory() as folder:
        mp.start_processes(run, (folder, 3 if quick() else 15), RANKS, start_method="spawn")  # pyright: ignore
        rows = json.loads(Path(folder, "rows").read_text())
    for row in rows:
        share = row["ring_over_all_to_all"]
        print(
            f"{row['length']:5} tokens, {row['key_heads']} key heads: ring takes {share['median']:.2f} "
            f"({share['low']:.2f} to {share['high']:.2f}) of all-to-all's time; auto is {row['auto']}"
        )
    save("context_parallel", rows, ranks=RANKS, layers=LAYERS, width=WIDTH, vocabulary=VOCABULARY)


if __name__ == "__main__":
    main()
