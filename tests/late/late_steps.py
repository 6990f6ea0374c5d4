"""Limited steps on devices whose streams run late: bit by bit what a plain model computes."""

from __future__ import annotations

import gc
import tempfile
import threading
from typing import Any
from unittest.mock import patch

import late_cuda
import torch
from late_scenarios import Run, check, scenario
from moving_net import LOSSLESS, X, both, net, same, step
from torch import Tensor, nn

import lowtide
from lowtide import accelerator, policies
from lowtide.extensions.moves import auto
from lowtide.extensions.moves.store.gradients import GradientSlab
from lowtide.extensions.moves.store.host import Host
from lowtide.extensions.moves.store.stores import Stores
from lowtide.graph import StepGraph
from lowtide.optim import HostOptimizer
from lowtide.plan.data import Link, Plan
from lowtide.trace.costs.roofline import calibrate

FOLDER = tempfile.gettempdir()
_FAST = {"host": Link(1e15, 1e15)}


def _limited(policy: Any = None, device: str = "cuda:0", drop: float = 0.1, **options: Any) -> Run:
    """Steps of a limited model beside a plain one's bits."""
    x = X[:64].to(device)
    plain, limited = (net(layers=2).to(device) for _ in range(2))
    for module in (*plain.modules(), *limited.modules()):
        if isinstance(module, nn.Dropout):
            module.p = drop
    wanted = [step(plain, x, seed) for seed in range(3)]
    if policy is not None:
        options["policy"] = policy
    handle = lowtide.limit_memory(limited, **options)
    step(limited, x, 0)
    step(limited, x, 0)
    plan = handle.plan
    check(plan and (plan.moves or plan.replayed), "there is nothing to do")

    def run(seed: int) -> None:
        check(same(wanted[seed % 3], step(limited, x, seed % 3)), "other gradients than the plain step's")

    return run


@scenario
def recompute() -> Run:
    """A budget that recomputes, on the second device while the first is current."""
    return _limited(policies.optimal(), budget="86%", device="cuda:1")


@scenario
def auto_by_default() -> Run:
    """The default: the link is measured, and what it says decides."""
    return _limited(budget="86%", device="cuda:1", host_budget="1MiB")


@scenario
def auto_over_a_fast_link() -> Run:
    """What the default does where the link is fast: values move, as many as main memory may hold."""
    with patch.object(auto, "_MIN_BYTES", 1), patch.object(auto, "_measured", lambda _: _FAST):
        return _limited(budget="86%", host_budget="64KiB")


@scenario
def offload_host() -> Run:
    """Every saved value goes to page-locked memory and is fetched ahead of need."""
    return _limited(policies.offload("host", min_bytes=1, window_bytes=20_000, slab=True))


@scenario
def offload_wide() -> Run:
    """The same with a window that never holds a copy up."""
    return _limited(policies.offload("host", min_bytes=1, window_bytes=100_000), device="cuda:1")


@scenario
def offload_disk() -> Run:
    """Through a staging buffer, on two threads."""
    return _limited(policies.offload("disk", FOLDER, min_bytes=1))


@scenario
def recompute_and_offload() -> Run:
    """Some of the kept values to the host, some to disk."""
    return _limited(both("full"))


@scenario
def encoded() -> Run:
    """Masks are packed, and what is packed leaves the device."""
    return _limited(LOSSLESS["masks on disk"])


class Sides(nn.Module):
    """Branches on a stream of the user's own, ordered as PyTorch asks for; backward runs there, too: the last
    one first, which recomputes what all read, then the one beside it, then the first, which reuses memory.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.left, self.right, self.other = (nn.Linear(48, 48) for _ in range(4))
        self.side = torch.cuda.Stream()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.nn.functional.gelu(self.first(x))
        current = torch.cuda.current_stream()
        self.side.wait_stream(current)
        with torch.cuda.stream(self.side):
            other = torch.nn.functional.gelu(self.other(x).sin())
        right = torch.nn.functional.gelu(self.right(h).cos())
        with torch.cuda.stream(self.side):
            left = torch.nn.functional.gelu(self.left(h).sin())
            h.record_stream(self.side)
        current.wait_stream(self.side)
        left.record_stream(current)
        other.record_stream(current)
        return (left + right + other).sum()  # whose backward needs none of them


def _sides(policy: Any) -> Run:
    x = X[:64].cuda()
    plain, limited = Sides().cuda(), Sides().cuda()
    wanted = step(plain, x)
    handle = lowtide.limit_memory(limited, policy=policy)
    step(limited, x)
    step(limited, x)
    plan = handle.plan
    check(plan and len(plan.moves or plan.replayed) >= 6, "`record_stream` keeps values where they are")

    def run(seed: int) -> None:
        check(same(wanted, step(limited, x)), "other gradients than the plain step's")

    return run


def _keep_nothing(graph: StepGraph, budget: int | None = None) -> Plan:
    return policies.make_plan(graph, stored=())


@scenario
def plain_streams_of_the_user() -> Run:
    """No limit: the scenario itself is in order."""
    x, plain = X[:64].cuda(), Sides().cuda()
    wanted = step(plain, x)

    def run(seed: int) -> None:
        check(same(wanted, step(plain, x)), "other gradients than before")

    return run


@scenario
def streams_of_the_user() -> Run:
    """What is recomputed on one stream is read on another."""
    return _sides(_keep_nothing)


@scenario
def offload_from_two_streams() -> Run:
    """What leaves from one stream comes back on another, into a slab."""
    return _sides(policies.offload("host", min_bytes=1, window_bytes=20_000, slab=True))


@scenario
def offload_into_memory_of_its_own() -> Run:
    """The same without a slab: memory that is taken on one stream is read on another."""
    return _sides(policies.offload("host", min_bytes=1, window_bytes=26_000, slab=False))


class Third(nn.Module):
    """Three streams: what is made on the first is read on the second, and that on the third, whose backward
    recomputes it from the first's. Then nobody holds that, and the first stream uses its memory again.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(48, 200), nn.Linear(48, 200)
        self.second, self.third = torch.cuda.Stream(), torch.cuda.Stream()

    def forward(self, x: Tensor) -> Tensor:
        current = torch.cuda.current_stream()
        h = self.first(x)
        self.second.wait_stream(current)
        with torch.cuda.stream(self.second):
            y = h * 2.0  # whose backward needs neither
            h.record_stream(self.second)
        del h
        beside = self.last(x).sin().exp().cos().exp().sin()  # whose backward is between the two others
        self.third.wait_stream(self.second)
        with torch.cuda.stream(self.third):
            z = y.sin()
            y.record_stream(self.third)
        del y
        current.wait_stream(self.third)
        z.record_stream(current)
        return beside.sum() + z.sum()


@scenario
def three_streams_of_the_user() -> Run:
    """What a replay on the third stream reads of the first is not used again before."""
    x = X[:64].cuda()
    plain, limited = Third().cuda(), Third().cuda()
    wanted = step(plain, x)

    def keep_sources(graph: StepGraph, budget: int | None = None) -> Plan:
        made = {w for op in graph.operations if "mul" not in op.name for w in op.writes}
        return policies.make_plan(graph, stored=made)

    handle = lowtide.limit_memory(limited, policy=keep_sources)
    step(limited, x)
    step(limited, x)
    check(handle.plan and len(handle.plan.replayed) == 1, "not one thing is recomputed")

    def run(seed: int) -> None:
        check(same(wanted, step(limited, x)), "other gradients than the plain step's")

    return run


class Filled(nn.Module):
    """Reads a table, in what backward runs again on the stream of the forward."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(3))
        self.register_buffer("table", torch.rand(48))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.nn.functional.gelu((layer(x) + self.table).sin())
        return x.square().sum()


def _filled(of_another: bool, in_backward: bool) -> Run:
    """Steps whose table is overwritten on a stream of its own, once the forward has read it."""
    x = X[:64].cuda()
    side = torch.cuda.Stream()

    def steps(model: Filled, seed: int) -> list[Tensor]:
        model.zero_grad()
        model.table.fill_(0.5)
        loss = model(x)
        over = torch.cuda.Event()
        over.record(torch.cuda.current_stream())

        def write() -> None:
            with torch.cuda.stream(side):
                side.wait_event(over)
                other = torch.full((48,), float(seed), device="cuda")
                for _ in range(10):
                    other = other.sin()
                model.table.data.copy_(other)

        def fill(*_: object) -> None:
            if not of_another:
                return write()
            thread = threading.Thread(target=write)
            thread.start()
            thread.join()

        if in_backward:
            loss.register_hook(fill)
        else:
            fill()
        loss.backward()
        torch.cuda.current_stream().wait_stream(side)
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    plain, limited = Filled().cuda(), Filled().cuda()
    wanted = steps(plain, 0)
    handle = lowtide.limit_memory(limited, policy=_keep_nothing)
    steps(limited, 0)
    steps(limited, 0)
    check(handle.plan and handle.plan.replayed, "nothing is recomputed")

    def run(seed: int) -> None:
        check(same(wanted, steps(limited, seed)), "other gradients than the plain step's")

    return run


@scenario
def filled_beside_backward() -> Run:
    """A table that a replay starts from is overwritten on another stream: the replay starts from a copy."""
    return _filled(of_another=False, in_backward=False)


@scenario
def filled_by_another_thread() -> Run:
    """The same by a thread that lowtide has not met."""
    return _filled(of_another=True, in_backward=False)


@scenario
def filled_within_backward() -> Run:
    """The same by that thread, while replays are under way."""
    return _filled(of_another=True, in_backward=True)


@scenario
def retained_graph() -> Run:
    """Backward runs twice: each saved tensor is asked for again."""
    x = X[:64].cuda()
    limited = net(layers=2).cuda()
    wanted = _twice(net(layers=2).cuda(), x)
    lowtide.limit_memory(limited, policy=both("full"))

    def run(seed: int) -> None:
        check(same(wanted, _twice(limited, x)), "other gradients than the plain step's")

    run(0)
    return run


def _twice(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(3)
    loss = model(x)
    loss.backward(retain_graph=True)
    loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@scenario
def abandoned() -> Run:
    """A forward that no backward follows, while its copies are under way; then a step."""
    x = X[:64].cuda()
    plain, limited = net(layers=2).cuda(), net(layers=2).cuda()
    wanted = step(plain, x)
    lowtide.limit_memory(limited, policy=policies.offload("host", min_bytes=1, window_bytes=100_000))
    step(limited, x)

    def run(seed: int) -> None:
        torch.manual_seed(0)
        limited(x)
        check(same(wanted, step(limited, x)), "other gradients than the plain step's")

    return run


@scenario
def stores_closed() -> Run:
    """Stores end while copies are under way: page-locked memory outlives what copies from it."""
    x = torch.arange(5000, device="cuda", dtype=torch.float32).view(torch.uint8)

    def run(seed: int) -> None:
        host = Host(torch.device("cuda", 0))
        data = x * 1
        lease = host.take(data.numel())
        out = torch.empty_like(data)
        writing = host.write(data, lease)
        del data
        reading = host.read(lease, out)
        if seed % 2:
            writing.join()
        host.close()
        reading.join()
        check(torch.equal(out, x), "another value came back")

    return run


@scenario
def tier_reused() -> Run:
    """Values go out and come back through the same places, while the program never waits."""
    stores = Stores()
    tier = stores.tier("host", "", torch.device("cuda"))
    tier.expect([0, 2048], [2000, 2000])
    base = torch.arange(2000, device="cuda").to(torch.uint8)

    def run(seed: int) -> None:
        seen: list[Tensor] = []
        for turn in range(4):
            data, lease = base + turn, tier.take(2000, turn % 2)
            writing = tier.write(data, lease)
            if seed % 3:
                writing.join()
            del writing, data
            other = base * 2  # in the freed memory, if it is free
            out = torch.empty_like(base)
            reading = tier.read(lease, out)
            if turn % 2 or seed % 2:
                reading.join()
                seen += [out - turn, other]
            del reading, out, other
        check(all(torch.equal(a, base) for a in seen[::2]), "another value came back")

    return run


@scenario
def read_at_once() -> Run:
    """What a thread still writes to disk is asked for."""
    tier = Stores().tier("disk", FOLDER, torch.device("cuda"))
    base = torch.arange(5000, device="cuda").to(torch.uint8)

    def run(seed: int) -> None:
        lease, out = tier.take(5000), torch.empty_like(base)
        data = base + seed
        tier.write(data, lease)
        tier.read(lease, out).join()
        check(torch.equal(out, data), "another value came back")

    return run


@scenario
def two_devices() -> Run:
    """A model on each device, in turns and on threads of their own."""
    runs = [
        _limited(
            policies.offload("host", min_bytes=1, window_bytes=20_000), f"cuda:{at}", drop=0.0
        )  # they have one generator
        for at in (0, 1)
    ]
    seen: list[BaseException] = []

    def one(at: int, seed: int) -> None:
        try:
            runs[at](seed)
        except BaseException as error:
            seen.append(error)

    def run(seed: int) -> None:
        threads = [threading.Thread(target=one, args=(at, 0)) for at in (0, 1)]
        for thread in threads if seed % 2 else ():
            thread.start()
        for at, thread in enumerate(threads):
            if seed % 2:
                thread.join()
            else:
                one(at, 0)
        if seen:
            raise seen.pop()

    return run


@scenario
def second_device() -> Run:
    """A model on the second device while the first is current: what is timed, traced, planned and measured
    for it takes not a byte of the first, and what is free is asked of the second. Nor is memory page-locked
    for the first, whichever thread asks.
    """
    x, asked = X[:64].to("cuda:1"), set[object]()

    def run(seed: int) -> None:
        gc.collect()
        late_cuda.locked_on.clear()
        torch.cuda.reset_peak_memory_stats(0)
        before = late_cuda.count("requested", 0)
        calibrate("cuda:1", dtype=torch.float64 if seed else torch.float32)
        graph = lowtide.trace(net(layers=1).to("cuda:1"), x)
        for budget, policy in (("auto", "optimal"), ("97%", policies.mixed("host", "auto"))):
            model = net(layers=1).to("cuda:1")
            handle = lowtide.limit_memory(model, "100%", policy=policy, reserved=False)
            step(model, x)
            handle.set_budget(budget)  # planned for on this thread
            step(model, x)
            check(handle.plan, "nothing is planned")
            handle.remove()
        model = net(layers=1).to("cuda:1")
        host = HostOptimizer(torch.optim.AdamW, model.parameters(), stream_gradients=True)
        for _ in range(2):
            model(x).square().mean().backward()
            host.step()
        host.close()
        del model, handle, host
        gc.collect()
        check(not late_cuda.locked_on - {1}, f"memory was page-locked on {late_cuda.locked_on}")
        check(late_cuda.locked_on, "no memory was page-locked")
        check(torch.cuda.current_device() == 0, "another device is current")
        check(late_cuda.count("most_requested", 0) == before, "memory of the first device was used")
        check(asked == {torch.device("cuda", 1)}, f"{asked} were asked what is free, or kept busy")
        check(sum(s.bytes for s in graph.storages if s.kind == "parameter"), "no parameter was seen")

    def noted(what: Any) -> Any:
        def noting(*given: Any) -> Any:
            device = next((one for one in given if isinstance(one, torch.device)), None)
            if device is None or device.index is None:
                device = torch.device("cuda", torch.cuda.current_device())
            asked.add(device)
            return what(*given)

        return noting

    for module, name in ((accelerator, "free_bytes"), (torch.cuda, "_sleep")):
        setattr(module, name, noted(getattr(module, name)))
    return run


@scenario
def on_both_devices() -> Run:
    """A model that is on both is refused, by each way to limit or trace it."""
    x, model = X[:64].to("cuda:0"), nn.Sequential(net(layers=1).to("cuda:0"), nn.Linear(8, 8).to("cuda:1"))
    ways: dict[str, Any] = {
        "limit": lambda: lowtide.limit_memory(model, "80%"),
        "compile": lambda: lowtide.compile(model, "80%", backend="aot_eager"),
        "trace": lambda: lowtide.trace(model, x),
    }

    def run(seed: int) -> None:
        for name, way in ways.items():
            try:
                way()
            except lowtide.LowtideError as error:
                check("cuda:0" in str(error) and "cuda:1" in str(error), f"{name}: {error}")
            else:
                check(False, f"{name}: it is taken")

    return run


@scenario
def beside_another_device() -> Run:
    """What a step computes on another device counts no bytes of the model's own."""
    x = X[:64].to("cuda:1")

    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net(layers=1)

        def forward(self, x: Tensor) -> Tensor:
            other = torch.ones(1000, 1000, device="cuda:0").sum()
            return self.net(x) + other.to(x.device)

    def run(seed: int) -> None:
        with_it, without = (
            sum(storage.bytes for storage in lowtide.trace(model.to("cuda:1"), x, costs=False).storages)
            for model in (Beside(), net(layers=1))
        )
        check(0 <= with_it - without < 1000, f"{with_it - without} bytes more")

    return run


@scenario
def pinned_inputs() -> Run:
    """Batches from page-locked memory, copied beside the steps of a limited model."""
    plain, limited = net(layers=1).cuda(), net(layers=1).cuda()
    batches = [X[16 * i : 16 * (i + 1)] for i in range(3)]
    wanted = [step(plain, batch.cuda()) for batch in batches]
    lowtide.limit_memory(limited, policy="full")

    def run(seed: int) -> None:
        found = []
        for batch in batches:
            memory = batch.pin_memory()
            found.append(step(limited, memory.to("cuda", non_blocking=True)))
            del memory
        check(all(map(same, wanted, found)), "other gradients than the plain step's")

    run(0)
    return run


@scenario
def gradient_slab() -> Run:
    """Gradients move into one slab as backward makes them."""
    x = X[:64].cuda()
    plain, limited = net(layers=1).cuda(), net(layers=1).cuda()
    wanted = step(plain, x)
    GradientSlab(limited.parameters())
    lowtide.limit_memory(limited, policy="full")
    step(limited, x)

    def run(seed: int) -> None:
        check(same(wanted, step(limited, x)), "other gradients than the plain step's")

    return run
