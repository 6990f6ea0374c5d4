"""The optimizer on the host: its throughput against `torch.optim`, and what it hides on a simulated link.

python -m benchmarks host_optimizer

The link is simulated at the ratios of arXiv 2101.06840: per billion parameters Table 4 gives 0.22 s for the
update on the host and 0.1 s for one on the device, and 2 GB each way take 0.167 s at 12 GB/s. All three are
slowed down by one factor, so that this machine's processor can keep every lane at its rate. Copies and
updates are real and take at least that long; backward sleeps, and hands out real gradients.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import RESULTS, machine, paired, save
from benchmarks.throttled_link import Move, ThrottledLink
from lowtide.optim import HostOptimizer

SIZES = (10e6, 30e6, 100e6, 500e6)
LAYERS, WIDTH = 16, 1024
ELEMENTS = LAYERS * WIDTH * WIDTH
SLOWDOWN = 70.0
HOST, DEVICE = SLOWDOWN * 0.22e-9, SLOWDOWN * 0.1e-9  # seconds an element
DOWN = UP = SLOWDOWN * 0.167e-9
BACKWARD = 1.25 * ELEMENTS * DOWN  # seconds: a quarter longer than the gradients take to travel
FRACTIONS = [round(0.1 * tenth, 1) for tenth in range(11)]
CHUNK_BYTES = 4 << 20  # one layer's elements in float32
PICTURE = RESULTS.parent.parent / "docs" / "host_optimizer.png"


# ---- throughput ----------------------------------------------------------------------------------


def throughput_rows(elements: float, threads: tuple[int, ...]) -> list[dict[str, Any]]:
    """`torch.optim.AdamW(fused=True)` and ours, all on the host in main memory, in turn on the same
    parameters and gradients.
    """
    parameters, left = [], int(elements)
    while left > 0:
        parameters.append(nn.Parameter(torch.randn(min(left, 4 << 20)) * 0.02))
        parameters.append(nn.Parameter(torch.zeros(2048)))
        left -= 4 << 20
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter) * 1e-3
    plain = torch.optim.AdamW(parameters, lr=1e-6, fused=True)
    ours = HostOptimizer(torch.optim.AdamW, parameters, lr=1e-6, host="memory")
    rounds = max(17, min(201, round(2.5e9 / elements)))  # some seconds for each row
    count = sum(p.numel() for p in parameters)
    rows = []
    for number in threads:
        torch.set_num_threads(number)
        seconds = paired([plain.step, ours.step], rounds)
        ratio = statistics.median(a / b for a, b in zip(*seconds, strict=True))
        row = {
            "elements": count,
            "threads": number,
            "plain_seconds": statistics.median(seconds[0]),
            "ours_seconds": statistics.median(seconds[1]),
            "throughput_ratio": ratio,
            "rounds": rounds,
            "holds": ratio >= 0.95,
        }
        rows.append(row)
        print(
            {key: round(item, 4) if isinstance(item, float) else item for key, item in row.items()},
            flush=True,
        )
    del plain, ours, parameters
    gc.collect()
    return rows


# ---- the simulated link --------------------------------------------------------------------------


class _Layer(torch.autograd.Function):
    """A layer whose backward takes its time and hands out a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        due = time.perf_counter() + BACKWARD / LAYERS
        gradient = torch.full_like(weight, 1e-3)
        time.sleep(max(0.0, due - time.perf_counter()))
        return gradients[0], gradient


class Stack(nn.Module):
    """Layers in 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            nn.Parameter(torch.zeros(WIDTH, WIDTH, dtype=torch.bfloat16)) for _ in range(LAYERS)
        )

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = _Layer.apply(x, weight)  # type: ignore[assignment]
        return x.sum()


class Run:
    """One way to train the stack, a step at a time.

    Attributes:
        moves: of the last step, with its moments: begin of backward, end of backward, end of `step`.
    """

    def __init__(self, **options: Any) -> None:
        self.link = ThrottledLink(1 / (DOWN / 2), 1 / (UP / 2), 1 / DEVICE, 1 / HOST)
        self.net = Stack()
        options = {"chunk_bytes": CHUNK_BYTES, "stream_gradients": True, **options}
        self.optimizer = HostOptimizer(torch.optim.AdamW, self.net.parameters(), link=self.link, **options)
        self.moves: list[Move] = []
        self.moments = (0.0, 0.0, 0.0)

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        self.link.log.clear()
        loss = self.net(torch.zeros(1, requires_grad=True))
        begin = time.perf_counter()
        loss.backward()
        middle = time.perf_counter()
        self.optimizer.step()
        self.moments = (begin, middle, time.perf_counter())
        self.moves = list(self.link.log)

    def close(self) -> None:
        """Let go of threads and memory."""
        self.optimizer.finish()
        self.optimizer.close()


def seconds_of(run: Callable[[], None], rounds: int) -> list[float]:
    """Seconds of steps after two that set up."""
    return paired([run], rounds, warmup=2)[0]


def busy(moves: list[Move], lanes: set[str], begin: float, end: float) -> list[tuple[float, float]]:
    """When any of these lanes was at work between two moments, merged."""
    found: list[tuple[float, float]] = []
    for a, b in sorted(
        (max(m.begin, begin), min(m.end, end))
        for m in moves
        if m.lane in lanes and m.end > begin and m.begin < end
    ):
        if found and a <= found[-1][1]:
            found[-1] = (found[-1][0], max(b, found[-1][1]))
        else:
            found.append((a, b))
    return found


def shared(a: list[tuple[float, float]], b: list[tuple[float, float]]) -> float:
    """Seconds in which both were at work."""
    return sum(max(0.0, min(x[1], y[1]) - max(x[0], y[0])) for x in a for y in b)


def total(a: list[tuple[float, float]]) -> float:
    """Seconds at work."""
    return sum(y - x for x, y in a)


def hidden(moves: list[Move], begin: float, middle: float, end: float) -> tuple[float, float]:
    """Shares: of gradient transfers that ran within backward; of the host's update that ran beside the
    device's update or a transfer.
    """
    down, host = busy(moves, {"down"}, begin, end), busy(moves, {"host"}, begin, end)
    others = busy(moves, {"device", "up", "down"}, begin, end)
    behind = shared(down, [(begin, middle)]) / total(down) if down else 1.0
    return behind, shared(host, others) / total(host) if host else 1.0


def ideal(fraction: float) -> tuple[list[Move], float, float, float]:
    """The schedule without any cost but those of the lanes: gradients leave as layers finish, then update and
    copy back in a pipeline.
    """
    share = ELEMENTS * fraction
    full, layer = int(share // (WIDTH * WIDTH)), WIDTH * WIDTH
    pieces = [layer] * full + ([share - full * layer] if share > full * layer + 0.5 else [])
    moves: list[Move] = []
    free = 0.0
    for place, piece in enumerate(pieces):
        begin = max(free, (place + 1) * BACKWARD / LAYERS)
        free = begin + piece * DOWN
        moves.append(Move("down", begin, free, 0))
    arrived = [move.end for move in moves]
    clock, up = BACKWARD, BACKWARD
    for place, piece in enumerate(pieces):
        clock = max(clock, arrived[place])
        moves.append(Move("host", clock, clock + piece * HOST, 0))
        clock += piece * HOST
        begin = max(clock, up)
        up = begin + piece * UP
        moves.append(Move("up", begin, up, 0))
    device = BACKWARD + (ELEMENTS - share) * DEVICE
    if fraction < 1:
        moves.append(Move("device", BACKWARD, device, 0))
    return moves, 0.0, BACKWARD, max(up, device)


def sweep(rounds: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Steps at every fraction; returns rows, and the moves of one step for the picture."""
    rows, drawn = [], {}

    def measured(label: str, fraction: float | None, **options: Any) -> dict[str, Any]:
        run = Run(**options)
        seconds = seconds_of(run, rounds)
        behind, beside = hidden(run.moves, *run.moments)
        row: dict[str, Any] = {
            "schedule": label,
            "host_fraction": fraction,
            "seconds": statistics.median(seconds),
        }
        row |= {"transfer_hidden": behind, "host_update_hidden": beside}
        if run.optimizer.balance is not None:
            row["host_fraction"] = run.optimizer.balance.host_fraction
        if label in ("pipelined", "auto"):
            moves, *moments = ideal(row["host_fraction"])
            bound = hidden(moves, *moments)
            row |= {"ideal_seconds": moments[2], "transfer_bound": bound[0], "host_update_bound": bound[1]}
        drawn[label if fraction is None else f"{label} {fraction}"] = (run.moves, run.moments)
        run.close()
        rows.append(row)
        print(
            {key: round(item, 4) if isinstance(item, float) else item for key, item in row.items()},
            flush=True,
        )
        return row

    serial = measured("all on the host after backward", 1.0, host_fraction=1.0, chunk_bytes=ELEMENTS * 4)
    for fraction in FRACTIONS:
        measured("pipelined", fraction, host_fraction=fraction)
    auto = measured("auto", None, host_fraction="auto")
    measured("overlap_update", 1.0, host_fraction=1.0, overlap_update=True)
    measured("delayed", 1.0, host_fraction=1.0, delayed=True, delay_after=0)
    best = min((row for row in rows if row["schedule"] == "pipelined"), key=lambda row: row["seconds"])
    auto["over_best"] = auto["seconds"] / best["seconds"]
    auto["holds"] = auto["over_best"] <= 1.05
    for row in rows:
        row["speedup"] = serial["seconds"] / row["seconds"]
    return rows, drawn


def draw(rows: list[dict[str, Any]], drawn: dict[str, Any], path: Path) -> None:
    """Time per step over the fraction, and what one step did on each lane."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.25))
    line = [row for row in rows if row["schedule"] == "pipelined"]
    by_name = {row["schedule"]: row for row in rows if row["schedule"] != "pipelined"}
    left.plot(
        [r["host_fraction"] for r in line], [r["seconds"] for r in line], "o-", label="pipelined, measured"
    )
    left.plot(
        [r["host_fraction"] for r in line],
        [r["ideal_seconds"] for r in line],
        "--",
        color="tab:gray",
        label="the schedule's bound",
    )
    serial = by_name["all on the host after backward"]["seconds"]
    left.axhline(serial, color="tab:red", linestyle=":", label="all on the host after backward")
    for name, marker in (("auto", "*"), ("overlap_update", "s"), ("delayed", "D")):
        left.plot(
            by_name[name]["host_fraction"],
            by_name[name]["seconds"],
            marker,
            markersize=13 if marker == "*" else 7,
            label=name,
        )
    left.set(xlabel="host fraction", ylabel="seconds per step", ylim=(0, None), title="Time per step")
    left.grid(alpha=0.3)
    left.legend(fontsize="small", loc="lower right")

    moves, (begin, middle, end) = drawn["auto"]
    lanes = {"backward": 4, "down": 3, "host": 2, "up": 1, "device": 0}
    colours = {"down": "tab:blue", "host": "tab:orange", "up": "tab:green", "device": "tab:purple"}
    right.barh(lanes["backward"], middle - begin, left=0, height=0.6, color="tab:gray")
    for move in moves:
        right.barh(
            lanes[move.lane],
            move.end - move.begin,
            left=move.begin - begin,
            height=0.6,
            color=colours[move.lane],
            edgecolor="white",
        )
    right.axvline(middle - begin, color="black", linewidth=0.8)
    right.set_yticks(
        list(lanes.values()), ["backward", "gradients down", "host update", "parameters up", "device update"]
    )
    right.set(
        xlabel="seconds since backward began",
        title=f"One step at the fraction that auto chose ({by_name['auto']['host_fraction']:.2f})",
    )
    right.set_xlim(0, end - begin)
    figure.savefig(path, dpi=140)


def _where() -> str:
    found = machine()
    return (
        f"{found['date']}, {found['processor']}, {found['cores']} cores, {found['threads']} threads, torch "
        f"{found['torch']}, Python {found['python']}, lowtide {found['lowtide']}"
    )


def report(throughput: list[dict[str, Any]], rows: list[dict[str, Any]]) -> str:
    """The tables, as text."""
    lines = [
        "# The optimizer on the host",
        "",
        f"Made by `python -m benchmarks host_optimizer`: {_where()}.",
        "",
        "## Throughput of the update, state in main memory",
        "",
        "In turn on the same parameters and gradients; the ratio is the median of the rounds' ratios and "
        "*holds* at 0.95.",
        "",
        "| parameters | threads | `AdamW(fused=True)` s | HostOptimizer s | throughput, ours / plain | "
        "holds |",
        "|---|---|---|---|---|---|",
    ]
    for row in throughput:
        lines.append(
            f"| {row['elements'] / 1e6:,.0f} M | {row['threads']} | {row['plain_seconds']:.4f} | "
            f"{row['ours_seconds']:.4f} | {row['throughput_ratio']:.3f} | "
            f"{'yes' if row['holds'] else '**no**'} |"
        )
    lines += [
        "",
        "## A step on a simulated link",
        "",
        f"{ELEMENTS / 1e6:.1f} M parameters in bfloat16, masters in float32, AdamW; the rates of arXiv "
        f"2101.06840 slowed down by {SLOWDOWN:.0f}: host update {HOST * 1e9:.1f} ns an element, device "
        f"update {DEVICE * 1e9:.1f}, {DOWN * 1e9:.1f} each way; backward takes {BACKWARD * 1e3:.0f} ms. "
        "*Transfer hidden* is the share of the gradients' way down within backward, *host update hidden* "
        "the share of the host's update beside the device's update or a transfer; the *bounds* are those of "
        "the same schedule with no other cost.",
        "",
        "| schedule | host fraction | s per step | bound s | against all on the host after backward | "
        "transfer hidden (bound) | host update hidden (bound) |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        bounds = [
            f" ({row[name]:.2f})" if name in row else "" for name in ("transfer_bound", "host_update_bound")
        ]
        ideal_text = f"{row['ideal_seconds']:.3f}" if "ideal_seconds" in row else ""
        lines.append(
            f"| {row['schedule']} | {row['host_fraction']:.2f} | {row['seconds']:.3f} | {ideal_text} | "
            f"{row['speedup']:.2f}x | {row['transfer_hidden']:.2f}{bounds[0]} | "
            f"{row['host_update_hidden']:.2f}{bounds[1]} |"
        )
    auto = next(row for row in rows if row["schedule"] == "auto")
    lines += [
        "",
        f"`auto` takes {auto['over_best']:.3f} times the best of the sweep "
        f"({'holds' if auto['holds'] else '**does not hold**'} at 1.05).",
        "",
        "![Time per step over the host fraction, and one step lane by lane](../../docs/host_optimizer.png)",
    ]
    return "\n".join(lines) + "\n"


def main(sizes: tuple[float, ...] = SIZES, rounds: int = 5) -> None:
    """Run, and write benchmarks/results/host_optimizer.{json,md} and the picture."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the lanes of the simulated link are threads themselves
    rows, drawn = sweep(rounds)
    throughput = [row for size in sizes for row in throughput_rows(size, tuple(sorted({1, threads})))]
    torch.set_num_threads(threads)
    save("host_optimizer", rows, throughput=throughput)
    (RESULTS / "host_optimizer.md").write_text(report(throughput, rows))
    draw(rows, drawn, PICTURE)


if __name__ == "__main__":
    main()
