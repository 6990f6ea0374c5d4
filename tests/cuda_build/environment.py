"""PyTorch's CUDA build on a machine without a card: ``make cuda-build``, or

    python tests/cuda_build/environment.py .venv-cuda     # what `pip install` takes may follow

It makes a virtual environment (the CUDA wheel of this Python's torch, 527 MB, and its Triton; all else is
this environment's), compiles the libraries that stand for CUDA's (`runtime.c`) and the values (`values.cpp`),
and runs the tests that need a card, then those of this folder. What is there already is not made again.
Another program in that environment, whose operations compute nothing:

    python tests/cuda_build/environment.py .venv-cuda --run benchmarks reserved
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LIBRARIES = ("libcu", "libnccl", "libnvrtc", "libnvshmem_host")
"""How the names of the libraries begin that a driver and CUDA's packages bring."""

_ASKED = re.compile(r" U ((?:__cuda|cu|nccl|nvrtc|nvshmem|nvml)\w+)(?:@([\w.]+))?")
_NAMED = re.compile(r"\bcu[A-Z]\w+")
_WRITTEN = re.compile(r"^\w[\w *]*?[ *](\w+)\([^;]*?\) *\{", re.MULTILINE)

Environment = dict[str, str]


def run(*command: str | Path, env: Environment | None = None) -> str:
    """What a command prints.

    Raises:
        SystemExit: it failed; it has said why.
    """
    done = subprocess.run(
        list(map(str, command)), stdout=subprocess.PIPE, text=True, check=False, cwd=ROOT, env=env
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))} ended with {done.returncode}\n{done.stdout}")
    return done.stdout


def wanted(requirements: list[str], package: str) -> str:
    """What a list of requirements, as a package's metadata has them, asks of another package for Linux."""
    for line in requirements:
        if line.startswith(package) and re.match(r"[\w-]+==", line):
            return line.partition(";")[0].strip()
    return package


def install(folder: Path, options: list[str]) -> None:
    """The environment: torch and Triton of its own, headers of CUDA's runtime, all else from this one."""
    python = folder / "bin" / "python"
    version = importlib.metadata.version("torch").partition("+")[0]
    run(sys.executable, "-m", "venv", "--clear", folder)
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", *options]
    run(*pip, f"torch=={version},!={version}+cpu")
    ask = "import importlib.metadata as m; print(*m.requires('torch'), sep=chr(10))"
    requirements = run(python, "-c", ask).splitlines()
    run(*pip, wanted(requirements, "triton"))
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (site / "rest.pth").write_text(sysconfig.get_path("purelib") + "\n")
    cuda = re.search(r"cuda: .*?= '(\d+)\.(\d+)'", (site / "torch" / "version.py").read_text())
    if cuda is None:
        raise SystemExit(
            f"the torch {version} that pip found has no CUDA: name an index that has the CUDA build, with "
            'make cuda-build PIP_ARGS="--index-url ..."'
        )
    major, minor = cuda.groups()
    suffix = "" if int(major) > 12 else f"-cu{major}"
    headers = [f"nvidia-cuda-runtime{suffix}=={major}.{minor}.*"]
    if int(major) > 12:  # of before the compiler's headers are in the same package
        headers.append(f"nvidia-cuda-crt=={major}.{minor}.*")
    run(*pip, "--target", folder / "headers", *headers)
    for real in [*(folder / "headers").rglob("*.so*"), *(folder / "headers").rglob("*.a")]:
        real.unlink()  # the compiler, too, is to find those that are built here


def torch_folder(folder: Path) -> Path:
    """Of an environment."""
    return next((folder / "lib").glob("python*/site-packages/torch"))


def build(folder: Path) -> Path:
    """Compile the libraries and the values for an environment; returns their folder."""
    sources = (HERE / "runtime.c", HERE / "values.cpp", Path(__file__))
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]
    out, torch = folder / f"libraries-{digest}", torch_folder(folder)
    if (out / "values.so").exists():
        return out
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    include = next((folder / "headers").rglob("cuda_runtime_api.h")).parent
    sonames, asked = set[str](), defaultdict[str, set[str]](set)
    for library in (torch / "lib").glob("*.so"):
        found = re.findall(r"NEEDED.*\[(.*?)\]", run("readelf", "-d", library))
        sonames |= {name for name in found if name.startswith(LIBRARIES)}
        for name, version in _ASKED.findall(run("nm", "-D", "--undefined-only", library)):
            asked[version].add(name)
    for driver in torch.parent.glob("triton/backends/nvidia/driver.c"):  # compiled when a kernel is
        asked[""] |= set(_NAMED.findall(driver.read_text()))
    written = set(_WRITTEN.findall((HERE / "runtime.c").read_text()))
    for soname in sorted(sonames):
        # a function may be asked for by the version of its library's symbols
        version = "NVSHMEM" if "nvshmem" in soname else soname if soname in asked else ""
        names = sorted((asked[version] | asked[""]) - written)
        (out / "stubs.c").write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in names))
        (out / "versions").write_text(f"{version} {{ *; }};\n")
        script = [f"-Wl,--version-script={out / 'versions'}"] if version else []
        command = ["cc", "-O1", "-w", "-shared", "-fPIC", "-fno-builtin", f"-I{include}", *script]
        command += [f"-Wl,-soname,{soname}", HERE / "runtime.c", out / "stubs.c", "-lpthread"]
        run(*command, "-o", out / soname)
    includes = [f"-I{torch / 'include'}", f"-I{torch / 'include' / 'torch' / 'csrc' / 'api' / 'include'}"]
    libraries = [f"-L{torch / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
    values = ["c++", "-std=c++20", "-O1", "-w", "-shared", "-fPIC", *includes, HERE / "values.cpp"]
    run(*values, *libraries, "-o", out / "values.part")
    (out / "values.part").rename(out / "values.so")
    return out


def environment(folder: Path, values: bool, devices: int = 1) -> Environment:
    """Variables for a process on that build.

    Args:
        folder: as `install` made it.
        values: whether operations compute; where not, models may be large, and nothing can be compared.
        devices: how many cards there seem to be.
    """
    out = build(folder)
    return {
        **os.environ,
        "LD_LIBRARY_PATH": os.pathsep.join([str(out), os.environ.get("LD_LIBRARY_PATH", "")]).rstrip(":"),
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(HERE), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
        "NO_CARD_BUILD": str(folder),
        "NO_CARD_VALUES": str(int(values)),
        "NO_CARD_LIBRARY": str(out / "values.so") if values else "",
        "NO_CARD_COMPUTES": str(out / "values.so"),
        "NO_CARD_DEVICES": str(devices),
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
    }


SMALL_WORKSPACES = {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}
"""For models that are small beside those of 64 MiB."""

SUITES: tuple[tuple[str, bool, int, Environment], ...] = (
    ("tests/gpu", True, 1, {}),
    ("-m slow tests/cuda_build/test_values.py", True, 1, SMALL_WORKSPACES),
    ("-m slow tests/cuda_build/test_two_cards.py", True, 2, SMALL_WORKSPACES),
    ("-m slow tests/cuda_build/test_bytes.py", False, 1, {}),
    ("-m slow tests/cuda_build/test_compiled.py", False, 1, SMALL_WORKSPACES),
)
"""What pytest is given, whether operations compute, how many cards, and variables; each in a process of its
own.
"""


def main(arguments: list[str]) -> int:
    """Make what is not there, and run the tests, or a module with its arguments."""
    folder = Path(arguments[0]).absolute()
    at = arguments.index("--run") if "--run" in arguments else len(arguments)
    arguments, program = arguments[:at], arguments[at + 1 :]
    if not (folder / ".installed").exists():
        install(folder, arguments[1:])
        (folder / ".installed").touch()
    if program:
        command = [f"{folder}/bin/python", "-m", "no_card", *program]
        return subprocess.run(command, cwd=ROOT, env=environment(folder, False), check=False).returncode
    worst = 0
    for what, values, devices, variables in SUITES:
        env = environment(folder, values, devices) | variables
        print(f"{what}{'' if values else ', without values'}", flush=True)
        command = f"{folder}/bin/python -m pytest -p no_card -p no:cacheprovider {what}".split()
        worst = max(worst, subprocess.run(command, cwd=ROOT, env=env, check=False).returncode)
    return worst


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
