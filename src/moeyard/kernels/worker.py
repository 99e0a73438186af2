"""A process that compiles kernels for others: `python -m moeyard.kernels.worker STAMP` reads names and writes objects.

It runs nothing of what it compiles. So it makes machine code and a way in from Python for entries alone; of a kernel that only
kernels call it keeps what a caller links in. numba by itself makes all three for everything it touches.
"""

from __future__ import annotations

import gc
import sys
from importlib import import_module
from typing import Any

from numba.core import codegen, dispatcher

from moeyard.kernels import compile as objects
from moeyard.kernels.signatures import arguments, table


def work(stamp: str) -> None:
    """A worker's life: names in, objects out, the name back when it is done (or cannot be: its caller will say why)."""
    if stamp != objects.STAMP:
        sys.exit("the kernels were edited while they were being compiled: run it again")
    _compile_only()
    gc.freeze()  # a tenth of the time went into looking for garbage among what numba keeps
    gc.set_threshold(100_000, 50, 50)
    known = table()
    for line in sys.stdin:
        name = line.strip()
        import_module(f"moeyard.kernels.{name.rpartition('.')[0]}")
        try:
            objects.KERNELS[name].compile(arguments(known.kernels[name]))
        except Exception as error:
            print(f"moeyard: {name} does not compile ahead: {str(error).splitlines()[0]}", file=sys.stderr)
        print(name, flush=True)


def _compile_only() -> None:
    """Make this process one that compiles and never calls: no code is loaded, no machine code made except to be kept."""
    entries = table().entries
    library, compiler = codegen.JITCodeLibrary, dispatcher._FunctionCompiler  # type: ignore[attr-defined]
    objects.TRY_TO_BUILD.clear()
    objects._Objects.callable_here = False

    def without_wrapper(self: Any, flags: Any) -> Any:
        name = objects.kernel_name(self.py_func)
        flags.no_cpython_wrapper = name not in entries
        return flags

    optimise = library._optimize_final_module

    def entries_alone(self: Any) -> None:
        if _is_entry(self):  # the rest is optimised where it is linked in
            optimise(self)

    def done(self: Any) -> None:
        self._finalize_dynamic_globals()
        self._verify_declare_only_symbols()
        self._finalized = True

    def kept(self: Any) -> Any:
        self._ensure_finalized()
        code = self._codegen._tm.emit_object(self._final_module) if _is_entry(self) else b""
        return self.name, "object", (code, self._get_module_for_linking().as_bitcode())

    compiler._customize_flags = without_wrapper
    library._optimize_final_module = entries_alone
    library._finalize_final_module = done
    library.get_pointer_to_function = lambda self, name: self._ensure_finalized() or 0
    library.serialize_using_object_code = kept
    codegen.JITCPUCodegen.set_env = lambda self, name, env: None


def _is_entry(library: Any) -> bool:
    """Has a way in from Python."""
    functions = library._final_module.functions
    return any(one.name.startswith("_ZN7cpython") and not one.is_declaration for one in functions)


if __name__ == "__main__":
    work(sys.argv[1])
