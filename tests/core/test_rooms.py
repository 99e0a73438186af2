"""The rooms of the runtime: imports go downwards, late ones too, and code asks for a role, not for the Yard."""

import ast
import os
import subprocess
import sys

import pytest

ROOMS = (  # from the ground up
    "block",
    "codec",
    "faults",
    "agree",
    "options",
    "transport",
    "roles",
    "yard",
    "layers",
    "hf",
    "weights",
    "state",
    "observe",
)
FLOOR = {room: i for i, room in enumerate(ROOMS)}
LONGEST_FILE, LONGEST_FUNCTION = 400, 60


@pytest.fixture(scope="module")
def trees(root):
    """{module below moeyard.runtime: its syntax tree}, but not the runtime's own face."""
    source = root / "src" / "moeyard" / "runtime"
    found = {}
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__")
        if name:
            found[name] = ast.parse(path.read_text(encoding="utf-8"), str(path))
    return found


@pytest.fixture(scope="module")
def graph(trees):
    """{module: modules of the runtime that it imports, anywhere in it}."""
    return {name: set(imported(tree, trees)) for name, tree in trees.items()}


def imported(tree, modules):
    """Inside functions and under TYPE_CHECKING too; `from package import module` is the module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (below(alias.name) for alias in node.names if below(alias.name) is not None)
        elif isinstance(node, ast.ImportFrom) and below(node.module) is not None:
            package = below(node.module)
            for alias in node.names:
                inner = f"{package}.{alias.name}" if package else alias.name
                yield inner if inner in modules else package


def below(name):
    """moeyard.runtime.agree.plans -> agree.plans; moeyard.runtime -> "", its face; else None."""
    if name == "moeyard.runtime":
        return ""
    return name.removeprefix("moeyard.runtime.") if name.startswith("moeyard.runtime.") else None


def room(module):
    return module.split(".")[0]


def circle(graph):
    """A list of modules in which each imports the next and the last the first; empty if there is none."""
    done, path = set(), []

    def walk(module):
        if module in path:
            return path[path.index(module) :]
        if module in done:
            return []
        path.append(module)
        for other in sorted(graph.get(module, ())):
            found = walk(other)
            if found:
                return found
        path.pop()
        done.add(module)
        return []

    for module in sorted(graph):
        found = walk(module)
        if found:
            return found
    return []


def test_a_circle_is_found():
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]
    assert circle({"a": {"a"}}) == ["a"]
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_late_imports_count():
    tree = ast.parse(
        "def f():\n    from moeyard.runtime.agree import plans\n    import moeyard.runtime.yard\n"
    )
    assert set(imported(tree, {"agree.plans", "agree", "yard"})) == {"agree.plans", "yard"}


def test_every_module_is_in_a_room(graph):
    assert {room(module) for module in graph} == set(ROOMS)


def test_no_circle(graph):
    assert circle(graph) == []


def test_rooms_import_downwards(graph):
    wrong = [
        f"{module} imports {other}"
        for module, others in graph.items()
        for other in others
        if other == "" or FLOOR[room(other)] > FLOOR[room(module)]
    ]
    assert not wrong, "nobody inside imports the runtime's face, or a room above"


def test_nobody_inside_knows_the_yard(graph):
    assert not [module for module, others in graph.items() if "yard" in others], "ask for a role of roles.py"


def test_files_and_functions_stay_readable(root, trees):
    source = root / "src" / "moeyard" / "runtime"
    files = {p.name: len(p.read_text(encoding="utf-8").splitlines()) for p in source.rglob("*.py")}
    assert not {name: lines for name, lines in files.items() if lines > LONGEST_FILE}
    assert not {
        f"{module}.{node.name}": node.end_lineno - node.lineno + 1
        for module, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= LONGEST_FUNCTION
    }


COLLECTIVES = {
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single", "barrier",
    "batch_isend_irecv", "broadcast", "broadcast_object_list", "gather", "gather_object", "irecv", "isend", "monitored_barrier",
    "new_group", "recv", "reduce", "reduce_scatter_tensor", "scatter", "scatter_object_list", "send",
}  # fmt: skip
WATCHED = {  # function that makes a collective -> who watches over it
    "agree.floor.reduce": "Floor.all_reduce hands it to the guard",
    "observe.measure.once": "handed to Floor.watched",
    "weights.export._whole": "called under Floor.watched",
    "transport.channels.make_group": "the yard makes its groups under Guard.watched",
    "transport.channels.warm": "called under Guard.watched",
    "transport.groups.warm": "called under Guard.watched",
    "transport.groups.background": "Floors makes it under Guard.watched",
    "transport.nccl.batch": "turned into our error by Queue; the vigil has its works",
}


def collectives(tree):
    """(innermost function, line) of every collective of torch.distributed that is not inside a call of something.watched(...)."""
    found = []

    def walk(node, function, watched):
        if isinstance(node, ast.FunctionDef):
            function = node.name
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            watched = watched or node.func.attr == "watched"
            ours = ast.unparse(node.func.value) in ("dist", "torch.distributed")
            batch = node.func.attr == "_end_coalescing"  # of a group itself
            if (batch or (ours and node.func.attr in COLLECTIVES)) and not watched:
                found.append((function, node.lineno))
        for child in ast.iter_child_nodes(node):
            walk(child, function, watched)

    walk(tree, "", False)
    return found


def test_an_unwatched_collective_is_seen():
    tree = ast.parse("def f():\n    guard.watched('x', lambda: dist.barrier())\n    dist.all_reduce(t)\n")
    assert collectives(tree) == [("f", 3)]


def test_every_collective_is_watched(trees):
    found = {f"{module}.{function}" for module, tree in trees.items() for function, _ in collectives(tree)}
    assert found == set(WATCHED), "make it under yard.floor(...).watched, or say here who watches over it"


def test_nothing_is_set_on_a_yard_from_outside(root):
    """`yard.something = ...`, but for a class that keeps a yard of its own."""
    wrong = []
    for path in sorted((root / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            targets = node.targets if isinstance(node, ast.Assign) else []
            for target in (one for t in targets for one in ast.walk(t) if isinstance(one, ast.Attribute)):
                inside = ast.unparse(target.value)
                if isinstance(target.ctx, ast.Store) and inside.split(".")[-1] == "yard":
                    wrong.append(f"{path.name}:{node.lineno}: {ast.unparse(target)}")
            pokes = isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr"
            if pokes and ast.unparse(node.args[0]).split(".")[-1] == "yard":
                wrong.append(f"{path.name}:{node.lineno}: {ast.unparse(node)}")
    assert not wrong


def test_the_runtime_loads_no_compiler(root):
    pytest.importorskip("torch")
    code = "import sys, moeyard.runtime; sys.exit('torch._dynamo' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": str(root / "src")}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
