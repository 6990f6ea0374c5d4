"""Inductor's C++ kernels, compiled together.

Inductor compiles each kernel by itself. Of the half second that most take, 0.4 s are the same every time: the
compiler starts, and instantiates what the header of vectors asks for, and the linker looks through PyTorch's
libraries. Here the kernels that the text of a graph names, and that are not on disk, are compiled in as many
pieces as Inductor has threads to compile. Each piece is one library, with a name on disk for each of its
kernels, there where Inductor looks for that one. What cannot be compiled so is compiled by Inductor.

Seen in PyTorch 2.11 to 2.15.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import ast
import contextlib
import functools
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch._inductor.async_compile import get_compile_threads
from torch._inductor.codecache import CppPythonBindingsCodeCache
from torch._inductor.cpp_builder import CppBuilder
from torch._inductor.exc import CppCompileError
from torch._inductor.runtime.cache_dir_utils import cache_dir

Work = Callable[[], None]
"""Inductor's: compiles one kernel, if it is not on disk."""


def compile_kernels(text: str) -> None:
    """Compile the C++ kernels that a text of Inductor's names, so that it finds them on disk.

    Args:
        text: Python, before it is run.

    Raises:
        CppCompileError: as Inductor does, of a kernel that the compiler refuses.
        InvalidCxxCompiler: as Inductor does, where there is no compiler.
    """
    works: list[Work] = []
    done: Future[None] = Future()

    def submit(work: Work) -> Future[None]:
        works.append(work)
        return done

    try:
        for types, source in _kernels_in(text):
            CppPythonBindingsCodeCache.load_pybinding_async(types, source, submit_fn=submit)
        threads = min(len(works), get_compile_threads())
        if threads > 1:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(_compile, [works[n::threads] for n in range(threads)]))
        elif works:
            _compile(works)
    finally:
        done.set_result(None)  # Inductor compiles what is still not there


def _kernels_in(text: str) -> Iterator[tuple[list[str], str]]:
    """The C++ kernels that a text defines: types of the arguments, and source."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Call(func=ast.Attribute(attr="cpp_pybinding"), args=[types, source]):
                yield ast.literal_eval(types), ast.literal_eval(source)
            case _:
                pass


def _compile(works: Sequence[Work]) -> None:
    """Compile these kernels in one piece, and those for which that does not go, one by one."""
    builders = [found for found in map(_builder_of, works) if found is not None]
    if len(builders) == len(works) > 1 and len(set(map(_flags, builders))) == 1:
        with contextlib.suppress(CppCompileError, OSError):
            _compile_together(builders)
    for work in works:
        work()


def _builder_of(work: Work) -> Any:
    """What compiles a kernel, where that is one call of the compiler."""
    match work:
        case functools.partial(args=(_, (CppBuilder() as builder,))):
            return builder
        case _:
            return None


def _library_of(builder: Any) -> Path:
    return Path(builder.get_target_file_path())


def _source_of(builder: Any) -> Path:
    return _library_of(builder).with_suffix(".cpp")


def _flags(builder: Any) -> str:
    """The compiler's command without the names of this kernel."""
    return builder.get_command_line().replace(str(_library_of(builder).with_suffix("")), "")


def _compile_together(builders: Sequence[Any]) -> None:
    """Make one library of these kernels, and give it the name of each one's own."""
    with tempfile.TemporaryDirectory(prefix="kernels", dir=cache_dir()) as folder:
        source = Path(folder, "kernels.cpp")
        source.write_text(_joined([(_key(one), _source_of(one).read_text()) for one in builders]))
        options = builders[0]._build_option
        together = CppBuilder(name="kernels", sources=str(source), BuildOption=options, output_dir=folder)
        together.build()
        for one in builders:
            with contextlib.suppress(FileExistsError):  # another process was faster
                os.link(_library_of(together), _library_of(one))


def _key(builder: Any) -> str:
    """By what Inductor names the kernel's library, and the module that is made of it."""
    return _library_of(builder).name.split(".")[0]


def _joined(kernels: Sequence[tuple[str, str]]) -> str:
    """One source of several: each ``kernel``, and what makes a module of it, under a name of its own.

    Args:
        kernels: of each its key, and the source with its ``PyInit_kernel``.
    """
    lines = [text.splitlines() for _, text in kernels]
    included = dict.fromkeys(line for each in lines for line in each if line.startswith("#include"))
    parts = ["#define PY_SSIZE_T_CLEAN", "#include <cstring>", "#include <Python.h>", *included]
    for number, each in enumerate(lines):
        parts += [
            f"#define kernel kernel_{number}",
            f"#define PyInit_kernel PyInit_kernel_{number}",
            f"namespace of_kernel_{number} {{",
            *(line for line in each if not line.startswith("#include")),
            "}",
            f"using of_kernel_{number}::PyInit_kernel;",
            "#undef kernel",
            "#undef PyInit_kernel",
        ]
    cases = "\n".join(
        f'    if (!std::strncmp(name, "{key}.", {len(key) + 1})) return PyInit_kernel_{number}();'
        for number, (key, _) in enumerate(kernels)
    )
    return "\n".join([*parts, _FIND.format(cases=cases)])


_FIND = """
static PyObject* module_of(const char* name) {{
{cases}
    PyErr_Format(PyExc_ImportError, "this library has no kernel for a module named %s", name);
    return nullptr;
}}

static PyObject* create(PyObject* spec, PyModuleDef*) {{
    PyObject* name = PyObject_GetAttrString(spec, "name");
    const char* text = name ? PyUnicode_AsUTF8(name) : nullptr;
    PyObject* module = text ? module_of(text) : nullptr;
    if (module && PyObject_SetAttrString(module, "__name__", name) < 0) Py_CLEAR(module);
    Py_XDECREF(name);
    return module;
}}

static PyModuleDef_Slot slots[] = {{
    {{Py_mod_create, reinterpret_cast<void*>(create)}},
#ifdef Py_GIL_DISABLED
    {{Py_mod_gil, Py_MOD_GIL_NOT_USED}},
#endif
    {{0, nullptr}}}};

static PyModuleDef found = {{PyModuleDef_HEAD_INIT, "kernel", nullptr, 0, nullptr, slots}};

PyMODINIT_FUNC PyInit_kernel(void) {{ return PyModuleDef_Init(&found); }}
"""
"""Makes the module of the kernel whose library's name was asked for: the module's says which (PEP 489)."""
