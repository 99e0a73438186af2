"""Write src/moeyard/kernels/signatures.json from what really runs: `make signatures`, after kernels have changed.

Commands run with the JIT off, where a kernel is a plain function: so it is seen which ones Python calls, and with which types.
From those numba works out the types of every kernel below them.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import json
import os
import pickle
import subprocess
import sys
import threading
import warnings
from collections import defaultdict
from importlib import import_module

COMMANDS = {
    "schedule": ["schedule", "h200-4x8", "zipf:0.9"],
    "plan": ["plan", "h200-4x8", "mixtral-8"],
    "simulate": ["simulate", "h200-4x8", "zipf:0.9"],
    "train": [],
    "": [],  # whatever else the tests' warm-up calls
}


def train():
    """What `moeyard train` prepares by default, in a lab and on one machine."""
    import moeyard as my
    from moeyard.lab import LabSpec
    from moeyard.train.options import Options
    from moeyard.train.prepare import prepare

    for cluster in (
        LabSpec.load("lab-4x4").cluster,
        my.Cluster(1, 2, my.Port(1e9, 1e-5), my.Port(1e9, 1e-5)),
    ):
        prepare(cluster, Options(out="", modes=("plain", "direct", "moeyard")))


def run(name):
    """One command, here."""
    if COMMANDS[name]:
        from moeyard.cli import app

        app(COMMANDS[name], standalone_mode=False)
    elif name == "train":
        train()
    else:
        from tests import warm

        warm.schedules()
        warm.placements()
        warm.codecs()


def watch():
    """Make `@kernel` note every call from outside of kernels. {kernel: {its signatures}}, filled as they come."""
    from numba import typeof

    from moeyard.kernels import compile as objects
    from moeyard.kernels.signatures import written

    seen, inside = defaultdict(set), threading.local()

    def noted(function=None, **_):
        if function is None:
            return noted
        name, order = objects.kernel_name(function), inspect.signature(function)

        @functools.wraps(function)
        def call(*args, **named):
            args = order.bind(*args, **named).args
            if getattr(inside, "kernel", False):
                return function(*args)
            seen[name].add(", ".join(written(typeof(arg)) for arg in args))
            inside.kernel = True
            try:
                return function(*args)
            finally:
                inside.kernel = False

        return call

    objects.kernel = noted
    return seen


def calls(name):
    """{entry: its signatures} of a command, found in a process with the JIT off."""
    made = subprocess.run(
        [sys.executable, "-m", "tests.signatures", "--calls", name],
        env=os.environ | {"NUMBA_DISABLE_JIT": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(made.stdout.splitlines()[-1])


def types_below(entries):
    """{kernel: its signatures} of these entries and all that they call: numba finds the types, and is kept from making code. And
    the `@inner` kernels that get hold of an array that somebody would have to let go of."""
    from numba.core.compiler import _LowerResult
    from numba.core.typed_passes import BaseNativeLowering

    from moeyard.kernels import compile as objects
    from moeyard.kernels.signatures import arguments, written

    found = defaultdict(set)

    def no_code(self, state):
        state["cr"] = _LowerResult(fndesc=None, call_helper=None, cfunc=print, env=None)
        return True

    def note(self, sig, target_context):
        found[self.name].add(", ".join(map(written, sig)))

    BaseNativeLowering.run_pass = no_code
    objects._Objects.load_overload = note
    objects._Objects.save_overload = lambda self, sig, data: None
    for name, several in entries.items():
        import_module(f"moeyard.kernels.{name.rpartition('.')[0]}")
        for text in several:
            objects.KERNELS[name].compile(arguments(text))
    made = {name: [one.signature for one in objects.KERNELS[name].overloads.values()] for name in found}
    return found, leaking(made)


def compiled():
    """The same of what `moeyard warm` compiled: a caller with other types than the table's had its callee compiled for them too."""
    from moeyard.kernels import compile as objects
    from moeyard.kernels.build import _with_callees, prepare
    from moeyard.kernels.signatures import table

    prepare()
    found, made = defaultdict(set), defaultdict(list)
    for name in _with_callees(table().entries):
        found[name], made[name] = set(), []
    for path in sorted(objects.folder().glob("*-*.*")):
        head, _, data = path.read_bytes().partition(b"\n")
        how, _, signature = head.decode().partition(" ")
        if how == "ahead":  # not what a test called in its own way
            name = path.name.rpartition("-")[0]
            found[name].add(signature)
            made[name].append(pickle.loads(data)[3])
    return found, leaking(made)


def leaking(made):
    """Of these kernels with their signatures, the `@inner` ones that return an array or call a kernel that does: they count no
    references."""
    from numba import types

    from moeyard.kernels import compile as objects
    from moeyard.kernels.build import callees

    def has_array(kind):
        return isinstance(kind, types.Array) or (
            isinstance(kind, types.BaseTuple) and any(has_array(one) for one in kind)
        )

    def gives_array(name):
        return any(has_array(one.return_type) for one in made.get(name, ()))

    inner = [name for name in made if not objects.KERNELS[name].targetoptions["_nrt"]]
    return [name for name in inner if any(map(gives_array, [name, *callees(name)]))]


def record(names):
    """The table as data, every kernel with more than one signature, and every `@inner` kernel that leaks."""
    called = {name: calls(name) for name in names}
    entries = defaultdict(set)
    for one in called.values():
        for name, several in one.items():
            entries[name].update(several)
    found, leaks = types_below(entries)
    table = {
        "commands": {name: sorted(one) for name, one in called.items() if name},
        "entries": sorted(entries),
        "kernels": {name: min(entries.get(name, several)) for name, several in sorted(found.items())},
    }
    return table, {name: sorted(several) for name, several in found.items() if len(several) > 1}, leaks


if __name__ == "__main__":
    if sys.argv[1:2] == ["--calls"]:
        seen = watch()
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # uint64 wraps around in a hash
            run(sys.argv[2])
        print(json.dumps({name: sorted(several) for name, several in seen.items()}))
    elif sys.argv[1:2] == ["--compiled"]:
        found, leaks = compiled()
        print(json.dumps([{name: sorted(several) for name, several in found.items()}, leaks]))
    elif sys.argv[1:2] == ["--show"]:
        print(json.dumps(record(list(COMMANDS))))
    else:
        from moeyard.kernels.signatures import FILE

        data, twice, leaks = record(list(COMMANDS))
        FILE.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        for name, several in twice.items():
            print(f"{name} has {len(several)} signatures:\n  " + "\n  ".join(several), file=sys.stderr)
        for name in leaks:
            print(f"{name} is @inner, but gets hold of an array: make it a @kernel", file=sys.stderr)
