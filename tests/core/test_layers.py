"""The order of the house: who may import whom, where torch lives, and what the package says it has."""

import ast
import importlib
import os
import subprocess
import sys
from functools import cache

import pytest

import moeyard

LAYERS = {
    0: {"arrays", "errors", "kernels", "units", "version", "workers"},
    1: {
        "assignment",
        "chrome",
        "cluster",
        "crossing",
        "demand",
        "forms",
        "links",
        "migration",
        "model",
        "placement",
        "presets",
        "program",
        "provenance",
        "routing",
        "schedule",
        "stepplan",
        "timeline",
        "trace",
        "traffic",
    },
    2: {
        "advise",
        "assign",
        "bounds",
        "breakeven",
        "bundles",
        "choices",
        "compare",
        "cost",
        "dedup",
        "demands",
        "estimate",
        "execute",
        "fold",
        "fit",
        "forecast",
        "formats",
        "lower",
        "planners",
        "ports",
        "replay",
        "schedulers",
        "sim",
        "steps",
        "verify",
        "warm",
        "workloads",
    },
    3: {"eplb", "runtime"},  # eplb takes and gives tensors
    4: {"__main__", "cli", "lab", "live", "report", "reproduce", "titan", "train"},
}
LAYER = {name: layer for layer, names in LAYERS.items() for name in names}
APART = [("planners", "schedulers"), ("schedulers", "planners"), ("runtime", "sim")]
# A planner that asks the simulator, and so the schedulers: imports that are still there. None may be added.
KNOWN_DETOURS = {("planners.domains", "sim.step"), ("planners.domains", "sim.transport")}


@cache
def modules(root):
    """Every module of the package as (dotted name below moeyard, its syntax tree), but not the package's own face."""
    source, found = root / "src" / "moeyard", []
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__")
        if name:
            found.append((name, ast.parse(path.read_text(encoding="utf-8"), str(path))))
    return found


def statements(tree):
    """Every node, also inside functions, but not what only a type checker sees."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for other in node.orelse:
                yield other
                yield from statements(other)
        else:
            yield node
            yield from statements(node)


def imports(tree):
    """Every module that is imported, also inside functions."""
    for node in statements(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: import by full name"
            if node.module == "moeyard":
                yield from (f"moeyard.{alias.name}" for alias in node.names)
            else:
                yield node.module


def ours(tree):
    return {name.split(".")[1] for name in imports(tree) if name.startswith("moeyard.")}


@cache
def graph(root):
    """Module -> the modules of ours that it imports, by full name below moeyard."""
    trees = dict(modules(root))
    found = {}
    for name, tree in trees.items():
        found[name] = set()
        for node in statements(tree):
            named = []
            if isinstance(node, ast.Import):
                named = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                whole = [f"{node.module}.{alias.name}" for alias in node.names]
                named = [one if one.removeprefix("moeyard.") in trees else node.module for one in whole]
            found[name] |= {
                one.removeprefix("moeyard.") for one in named if one.startswith("moeyard.")
            } & trees.keys()
        found[name].discard(name)
    return found


def reached(edges, start):
    """All that is imported by importing `start`."""
    seen, todo = set(), [start]
    while todo:
        for other in edges[todo.pop()] - seen:
            seen.add(other)
            todo.append(other)
    return seen


def circles(edges):
    """Sets of modules that import one another, by whatever way."""
    below = {name: reached(edges, name) for name in edges}
    found = {frozenset(other for other in below[name] if name in below[other]) for name in edges}
    return [set(circle) for circle in sorted(found - {frozenset()}, key=sorted)]


def test_a_circle_is_seen_and_what_only_a_type_checker_imports_is_not():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}) == [{"b", "c"}]
    late = "if TYPE_CHECKING:\n    import moeyard.x\ndef f():\n    from moeyard.y import z\n"
    assert list(imports(ast.parse(late))) == ["moeyard.y"]


def test_no_modules_import_one_another_late_imports_counted(root):
    edges = graph(root)
    found = [{name: sorted(edges[name] & circle) for name in sorted(circle)} for circle in circles(edges)]
    assert not found


def test_nothing_is_reached_from_below(root):
    edges = graph(root)
    wrong = [
        f"{name} (layer {LAYER[name.split('.')[0]]}) reaches {other} (layer {LAYER[other.split('.')[0]]})"
        for name in edges
        for other in reached(edges, name)
        if LAYER[other.split(".")[0]] > LAYER[name.split(".")[0]]
    ]
    assert not wrong


@pytest.mark.parametrize(("family", "other"), APART)
def test_families_do_not_reach_each_other(root, family, other):
    edges = {name: set(others) for name, others in graph(root).items()}
    assert not {pair for pair in KNOWN_DETOURS if pair[1] not in edges[pair[0]]}, "take it off the list"
    for name, far in KNOWN_DETOURS:
        edges[name].discard(far)
    own = [name for name in edges if name.split(".")[0] == family]
    assert own
    assert not [(name, far) for name in own for far in reached(edges, name) if far.split(".")[0] == other]


def test_nouns_know_no_files(root):
    edges = graph(root)
    nouns = [name for name in edges if LAYER[name.split(".")[0]] <= 1]
    assert "cluster" in nouns
    assert "timeline" in nouns
    assert not [(name, far) for name in nouns for far in reached(edges, name) if far.startswith("formats")]


def test_every_module_has_a_layer(root):
    unknown = {name.split(".")[0] for name, _ in modules(root)} - LAYER.keys()
    assert not unknown, f"give {sorted(unknown)} a layer in this test and in ARCHITECTURE.md"


def test_a_module_imports_its_own_layer_or_below(root):
    wrong = [
        f"{name} (layer {LAYER[name.split('.')[0]]}) imports {other} (layer {LAYER[other]})"
        for name, tree in modules(root)
        for other in ours(tree)
        if LAYER[other] > LAYER[name.split(".")[0]]
    ]
    assert not wrong


def test_nobody_below_the_command_line_imports_the_face_of_the_package(root):
    # It would import everything, and so make every layer depend on every other.
    assert not [
        name for name, tree in modules(root) if LAYER[name.split(".")[0]] < 4 and "moeyard" in imports(tree)
    ]


def test_kernels_import_only_kernels(root):
    assert not [
        name for name, tree in modules(root) if name.startswith("kernels") and ours(tree) - {"kernels"}
    ]


def test_there_is_no_torch_below_the_runtime(root):
    wrong = [
        name
        for name, tree in modules(root)
        if LAYER[name.split(".")[0]] < 3 and any(m.split(".")[0] == "torch" for m in imports(tree))
    ]
    assert not wrong


def test_importing_moeyard_imports_no_torch(root):
    code = "import sys, moeyard, moeyard.cli; sys.exit('torch' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": str(root / "src")}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


def packages():
    return ["moeyard", *(f"moeyard.{name}" for name in ("cli", "formats", "runtime"))]


@pytest.mark.parametrize("name", packages())
def test_all_is_sorted_and_true(name):
    package = importlib.import_module(name)
    assert package.__all__ == sorted(package.__all__)
    assert len(set(package.__all__)) == len(package.__all__)
    for public in package.__all__:
        assert getattr(package, public) is not None


def test_a_public_name_is_never_the_module_of_the_same_name():
    # `moeyard.schedule` is both a module and a function; the face of the package must show the function.
    assert not [name for name in moeyard.__all__ if type(getattr(moeyard, name)).__name__ == "module"]


def test_the_public_contract_is_there():
    nouns = {
        "Assignment",
        "Cluster",
        "Contention",
        "Demand",
        "ModelSpec",
        "Placement",
        "Port",
        "Program",
        "Schedule",
        "Traffic",
    }
    functions = {"assign", "bound", "estimate", "lower", "place", "run_local", "schedule", "verify"}
    contract = nouns | functions | {"PLANNERS", "SCHEDULERS"}
    assert not contract - set(moeyard.__all__)


def test_files_stay_readable(root):
    sizes = {p.name: len(p.read_text().splitlines()) for p in (root / "src").rglob("*.py")}
    assert not {name: lines for name, lines in sizes.items() if lines > 420}
