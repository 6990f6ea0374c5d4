"""One part, in a process of its own: ``python -m benchmarks.gpu.child PART small|full ROW ...``

Writes a JSON line to standard output when it is ready and after each row; all else that is printed goes to
standard error. It ends after a row that failed, as the process may not be what it was. What its rows share
and cannot be made is a failure of each of them.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import traceback
import warnings
from typing import Any

from benchmarks.gpu.parts import part
from benchmarks.gpu.rows import Measure, Row, Unmeasured, Where, bytes_alone


def end_with_parent() -> None:
    """End this process, and all that it started, when the one that started it ends, however that happens: a
    later run would share the card with it. Nothing is ever written to this one's standard input.
    """

    def watch() -> None:
        os.read(0, 1)  # returns when nobody holds the other end
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def outcome(measure: Measure, name: str) -> Row:
    """A row, or why there is none: ``refused`` in lowtide's own words, ``skipped``, ``failed``."""
    from lowtide.errors import LowtideError

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            row: Row = {"state": "done", **measure(name)}
        except Unmeasured as error:
            row = {"state": "skipped", "error": str(error)}
        except LowtideError as error:
            row = {"state": "refused", "error": f"{type(error).__name__}: {error}"}
        except Exception as error:
            traceback.print_exc()
            row = {"state": "failed", "error": f"{type(error).__name__}: {error}"[:2000]}
    ours = dict.fromkeys(str(one.message)[:500] for one in said if one.category.__name__ == "LowtideWarning")
    return {**row, "warnings": list(ours)} if ours else row


def main(name: str, size: str, rows: list[str]) -> None:
    """Measure these rows of a part."""
    faulthandler.enable()
    end_with_parent()
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def tell(**what: Any) -> None:
        print(json.dumps(what), file=lines, flush=True)

    import torch

    device, card = "cuda" if torch.cuda.is_available() else "cpu", "NO_CARD_BUILD" not in os.environ
    where = Where(device, size == "small" or (not card and part(name).on_host), card)
    opened: list[Measure] = []

    def opening(_: str) -> Row:
        opened.append(part(name).open(where))
        return {}

    shared = outcome(opening, "")
    tell(ready=True)
    for row in rows:
        found = outcome(opened[0], row) if opened else shared
        found = found if card or name == "doctor" else bytes_alone(found)
        tell(row=row, found=found)
        if opened and found["state"] == "failed":
            return


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
