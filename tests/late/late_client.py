"""Asks a process on devices whose streams run late (`late_worker`)."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from lowtide.interception import cpp_module
from lowtide.native import build

HERE = Path(__file__).parent


class StandsStill(Exception):
    """No answer came; the worker's last words say where it stood."""


class Late:
    """A worker, made anew when it is asked after it has died.

    Raises:
        BuildError: the device cannot be compiled here.
    """

    def __init__(self) -> None:
        cpp_module()  # compiled here, where nobody waits for an answer
        folder = HERE.parents[1]
        self._environment = {
            **os.environ,
            "LATE_DEVICE": str(build(HERE / "late_device.cpp", "c10")),
            "PYTHONPATH": os.pathsep.join(
                [str(folder), str(folder / "src"), os.environ.get("PYTHONPATH", "")]
            ),
            "OMP_NUM_THREADS": "1",
        }
        self._process: Any = None

    def ask(
        self, scenario: str, first: int, end: int, seconds: float = 1e9, without: str = ""
    ) -> dict[str, Any]:
        """What `late_worker` answers.

        Raises:
            StandsStill: it died, or stood still for a minute.
        """
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "late_worker.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=self._environment,
                text=True,
            )
        request = {"scenario": scenario, "seeds": [first, end], "seconds": seconds, "without": without}
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            code, self._process = self._process.wait(), None
            raise StandsStill(f"the worker ended with {code} in {request}: what it last said is above")
        return json.loads(line)

    def close(self) -> None:
        """End the worker."""
        if self._process is not None:
            self._process.stdin.close()
            self._process.wait(60)
            self._process.stdout.close()


def scenario_names() -> list[str]:
    """Of all scenarios. They are not imported: they are for devices that this process does not have."""
    return [
        node.name
        for file in ("late_steps.py", "late_bytes.py", "late_optimizers.py")
        for node in ast.parse((HERE / file).read_text()).body
        if isinstance(node, ast.FunctionDef) and node.decorator_list
    ]


def reason_against() -> str:
    """Why these devices cannot be had here, empty where they can."""
    if torch.version.cuda is not None or torch.version.hip is not None:
        return "this PyTorch has CUDA of its own"
    return "" if sys.platform == "linux" else "needs Linux"
