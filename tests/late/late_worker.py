"""A process on devices whose streams run late: reads requests as lines of JSON, answers each with one.

``{"scenario": name, "seeds": [first, end], "seconds": most, "without": the name of a site}``: runs the
scenario for these seeds, until one fails or the seconds are over.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
import traceback
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "run"), str(HERE.parent / "extensions" / "moves")]

import late_cuda  # noqa: E402

if __name__ == "__main__":
    late_cuda.load()

import late_bytes  # noqa: E402, F401
import late_mistakes  # noqa: E402, F401
import late_optimizers  # noqa: E402, F401
import late_steps  # noqa: E402, F401
import late_threads  # noqa: E402
import torch  # noqa: E402
from late_mutations import sites, without  # noqa: E402
from late_scenarios import SCENARIOS, Run  # noqa: E402

from lowtide.extensions.moves.store import host  # noqa: E402

LONGEST_SECONDS = 60
"""A seed that takes longer stands still."""


class Worker:
    """Scenarios that are set up, by name."""

    def __init__(self) -> None:
        self.runs: dict[str, Run] = {}

    def once(self, run: Any, seed: int) -> tuple[Any, str]:
        """What one interleaving returned, and what it found wrong."""
        late_cuda.NATIVE.late_begin(seed)
        late_threads.CHANCE.seed(seed)
        faulthandler.dump_traceback_later(LONGEST_SECONDS, exit=True)
        found, wrong = None, ""
        try:
            found = run(seed)
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            wrong = f"{type(error).__name__}: {error} ({Path(last.filename).name}, line {last.lineno})"
        late_cuda.NATIVE.late_end()
        faulthandler.cancel_dump_traceback_later()
        return found, "; ".join([*late_cuda.faults()[:1], *[wrong] * bool(wrong)])

    def answer(self, scenario: str, seeds: list[int], seconds: float, away: str) -> dict[str, Any]:
        """Run one scenario."""
        if scenario not in self.runs:
            run, wrong = self.once(lambda _: SCENARIOS[scenario](), 0)
            if wrong:
                return {"ran": 0, "orders": 0, "jobs": 0, "seed": -1, "wrong": f"set-up: {wrong}"}
            self.runs[scenario] = run
        run, orders, jobs, end = self.runs[scenario], set(), 0, time.monotonic() + seconds
        site = next(site for site in sites() if str(site) == away) if away else None
        seed = seeds[0]
        while True:
            with without(site) if site is not None else nullcontext():
                _, wrong = self.once(run, seed)
            orders.add(late_cuda.count("order"))
            jobs += late_cuda.count("ran")
            if wrong or seed + 1 >= seeds[1] or time.monotonic() > end:
                break
            seed += 1
        if wrong:  # whatever it left behind is no part of the next
            del self.runs[scenario]
        return {"ran": seed + 1 - seeds[0], "orders": len(orders), "jobs": jobs, "seed": seed, "wrong": wrong}


def main() -> None:
    """Answer until nobody asks."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    late_threads.install()
    host.check_free = lambda count: None  # asks the system for each buffer
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what others print
    worker = Worker()
    for line in sys.stdin:
        request = json.loads(line)
        answer = worker.answer(
            request["scenario"], request["seeds"], request.get("seconds", 1e9), request.get("without", "")
        )
        print(json.dumps(answer), file=out, flush=True)
    os._exit(0)  # autograd's threads never end


if __name__ == "__main__":
    main()
