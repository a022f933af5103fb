"""The architecture as a test: which component may use which, and what stays out of it.

How much one function may do is said by ruff's rules in pyproject.toml. How long a file is follows from its idea.

The components are those of docs/architecture.md. A new file needs no entry here; a new component needs one.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

CPP_COMPONENTS = ("core", "comm", "memory", "kernels", "runtime", "ops", "bindings")
CPP_FOLDERS = (
    *("core/ir", "core/generators", "core/passes", "core/network", "core/sim", "core/memory", "core/random"),
    *("core/rivals", "core"),
    "core/plan",
    *(
        "comm/base",
        "comm/arbiter",
        "comm/p2p",
        "comm/ring",
        "comm/bucket",
        "comm/socket",
        "comm/rendezvous",
        "comm/tcp",
        "comm/tensor",
    ),
    *(
        "memory/slot",
        "memory",
        "memory/room",
        "kernels",
        "runtime/device",
        "runtime/kernels",
        "runtime/offload",
        "runtime/executor",
        "runtime/c10d",
        "runtime/collectives",
        "runtime/skip",
        "runtime/watch",
    ),
    *("runtime/memory", "ops", "ops/fused", "bindings"),
)
"""Each may include itself and the folders before it."""
PYTHON_COMPONENTS = (
    "errors",
    "cluster",
    "offload",
    "recompute",
    "config",
    "device",
    "seeding",
    "topology",
    "torch_private",
    "schedule",
    "trace",
    "sharding",
    "weights",
    "placement",
    "plan",
    "rivals",
    "faults",
    "comms",
    "profile",
    "observe",
    "doctor",
    "tensor_parallel",
    "stage",
    "splitting",
    "data_parallel",
    "engine",
    "checkpoint",
    "trainer",
    "cli",
)
"""Each may import itself and the components before it; `fold3d/__init__.py` and `__main__.py` only pass on."""

MAY_NOT_IMPORT_EXTENSION = {
    "errors",
    "cluster",
    "config",
    "device",
    "topology",
    "weights",
    "checkpoint",
    "trainer",
    "cli",
}
WITHOUT_TORCH = {"errors", "cluster"}
MAY_IMPORT_TRANSFORMERS = {"trace", "sharding", "weights", "tensor_parallel", "stage", "checkpoint", "trainer"}
WITHOUT_PROCESS_GROUPS = {
    *("errors", "cluster", "config", "device", "seeding", "topology"),
    *("schedule", "trace", "sharding", "weights", "placement", "plan", "stage", "splitting"),
}
MAY_PRINT = {"cli"}

TORCH_HEADER = re.compile(r"^(torch|ATen|c10|caffe2)/")
PYTHON_HEADER = re.compile(r"^(pybind11/|Python\.h|torch/csrc/.*(python|pybind)|torch/extension\.h)")
CORE_FORBIDS = {
    "thread",
    "mutex",
    "condition_variable",
    "atomic",
    "future",
    "chrono",
    "ctime",
    "random",
    "iostream",
    "fstream",
}
CPP_FORBIDS = re.compile(r"std::(cout|cerr|exit|abort|terminate|getenv)\b|\b(f?printf|getenv|assert)\s*\(")


def cpp_files(*components: str) -> list[Path]:
    return sorted(
        path
        for component in components
        for path in (ROOT / "csrc" / component).rglob("*")
        if path.suffix in {".h", ".cpp", ".cu"}
    )


def python_files(*components: str) -> list[Path]:
    found: list[Path] = []
    for component in components:
        base = ROOT / "fold3d" / component
        found += sorted(base.rglob("*.py")) if base.is_dir() else [base.with_suffix(".py")]
    return found


def room_of(path: Path) -> str:
    """Returns the component of a file below csrc/ or fold3d/."""
    first = path.relative_to(ROOT).parts[1]
    return first.removesuffix(".py")


def includes(path: Path) -> Iterator[tuple[str, bool]]:
    """Yields (header, whether in quotes) of a C++ file."""
    for quote, header in re.findall(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', path.read_text(), re.MULTILINE):
        yield header, quote == '"'


def imports(path: Path) -> Iterator[str]:
    """Yields every module a file imports, in functions too; `from a.b import c` yields a.b and a.b.c."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_the_components_are_known() -> None:
    folders = {str(path.parent.relative_to(ROOT / "csrc")) for path in cpp_files(*CPP_COMPONENTS)}
    assert folders == set(CPP_FOLDERS)
    modules = {
        path.name.removesuffix(".py")
        for path in (ROOT / "fold3d").iterdir()
        if path.suffix == ".py" or (path.is_dir() and any(path.glob("*.py")))
    }
    assert modules - {"__init__", "__main__"} == set(PYTHON_COMPONENTS)


def test_pages_list_the_components_in_their_order() -> None:
    rules = re.findall(r"`([^`]* <- [^`]*)`", (ROOT / "CONTRIBUTING.md").read_text())
    assert [re.findall(r"\w+", components) for components in rules] == [["csrc", *CPP_COMPONENTS], [*PYTHON_COMPONENTS]]
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = re.findall(r"^\|([^|]*)\|", page.split("## Components")[1].split("\n## ")[0], re.MULTILINE)
    named = [component for row in table for component in re.findall(r"`(?:csrc/|fold3d/)?(\w+)(?:\.py)?`", row)]
    assert named == [*CPP_COMPONENTS, *PYTHON_COMPONENTS]


@pytest.mark.parametrize("folder", CPP_FOLDERS)
def test_cpp_includes_point_backwards(folder: str) -> None:
    allowed = CPP_FOLDERS[: CPP_FOLDERS.index(folder) + 1]
    wrong = [
        f"{name(path)} includes {header}"
        for path in (ROOT / "csrc" / folder).iterdir()
        if path.suffix in {".h", ".cpp", ".cu"}
        for header, quoted in includes(path)
        if quoted and str(Path(header).parent) not in allowed
    ]
    assert not wrong, "\n".join(wrong)


def test_core_comm_memory_and_kernels_know_no_torch_and_no_python() -> None:
    wrong = [
        f"{name(path)} includes {header}"
        for path in cpp_files("core", "comm", "memory", "kernels")
        for header, _ in includes(path)
        if TORCH_HEADER.match(header) or PYTHON_HEADER.match(header)
    ]
    assert not wrong, "\n".join(wrong)


def test_core_is_deterministic() -> None:
    wrong = [
        f"{name(path)} includes <{header}>: core has no threads, clocks, random numbers or I/O"
        for path in cpp_files("core")
        for header, _ in includes(path)
        if header in CORE_FORBIDS
    ]
    assert not wrong, "\n".join(wrong)


def test_only_bindings_know_python() -> None:
    wrong = [
        f"{name(path)} includes {header}"
        for path in cpp_files("core", "comm", "memory", "kernels", "runtime", "ops")
        for header, _ in includes(path)
        if PYTHON_HEADER.match(header)
    ]
    assert not wrong, "\n".join(wrong)


def test_cpp_reports_by_exceptions_only() -> None:
    wrong = [
        f"{name(path)}:{number}: {line.strip()}"
        for path in cpp_files(*CPP_COMPONENTS)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if CPP_FORBIDS.search(line.split("//")[0])
    ]
    assert not wrong, "\n".join(wrong)


def test_headers_are_included_once() -> None:
    wrong = [name(p) for p in cpp_files(*CPP_COMPONENTS) if p.suffix == ".h" and "#pragma once" not in p.read_text()]
    assert not wrong


@pytest.mark.parametrize("component", PYTHON_COMPONENTS)
def test_python_imports_point_backwards(component: str) -> None:
    allowed = {"_C", *PYTHON_COMPONENTS[: PYTHON_COMPONENTS.index(component) + 1]}
    wrong = []
    for path in python_files(component):
        for module in imports(path):
            parts = module.split(".")
            if module.startswith("."):
                wrong.append(f"{name(path)}: relative import {module}")
            elif parts[0] == "fold3d" and len(parts) > 1 and parts[1] not in allowed | {"__version__"}:
                wrong.append(f"{name(path)} imports {module}")
    assert not wrong, "\n".join(sorted(set(wrong)))


@pytest.mark.parametrize(
    "module, components",
    [
        ("fold3d._C", set(PYTHON_COMPONENTS) - MAY_NOT_IMPORT_EXTENSION),
        ("transformers", MAY_IMPORT_TRANSFORMERS),
        ("accelerate", {"trainer"}),
        ("torch", set(PYTHON_COMPONENTS) - WITHOUT_TORCH),
    ],
)
def test_only_these_components_import(module: str, components: set[str]) -> None:
    wrong = [
        f"{name(path)} imports {found}"
        for path in python_files(*(set(PYTHON_COMPONENTS) - components))
        for found in imports(path)
        if found == module or found.startswith(module + ".")
    ]
    assert not wrong, "\n".join(wrong)


def test_planning_needs_no_process_group() -> None:
    wrong = [
        f"{name(path)} imports {found}"
        for path in python_files(*WITHOUT_PROCESS_GROUPS)
        for found in imports(path)
        if found.startswith("torch.distributed") and not found.startswith("torch.distributed.pipelining")
    ]
    assert not wrong, "\n".join(wrong)


def test_one_file_makes_process_groups() -> None:
    texts = {name(path): path.read_text() for path in python_files(*PYTHON_COMPONENTS)}
    assert [path for path, text in texts.items() if "dist.new_group(" in text] == ["fold3d/comms/shared_gloo.py"]
    assert [path for path, text in texts.items() if "import new_group" in text] == ["fold3d/comms/groups.py"]


def test_no_module_imports_in_a_circle() -> None:
    """Imports in functions and for type checkers count, too: what needs one to be imported late is in the wrong place.

    `fold3d/__init__.py` only passes on.
    """
    paths = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for folder in ("fold3d", "benchmarks", "tests", "zoo", "simdevice")
        for path in (ROOT / folder).rglob("*.py")
    }
    paths.pop("fold3d")
    graph = {module: {found for found in imports(path) if found in paths} - {module} for module, path in paths.items()}
    # A package's own file is imported with each of its modules, and may import them.
    graph = {module: {one for one in found if not module.startswith(f"{one}.")} for module, found in graph.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_print_is_for_the_command_line() -> None:
    wrong = [
        f"{name(path)}:{node.lineno}"
        for path in python_files(*(set(PYTHON_COMPONENTS) - MAY_PRINT))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert not wrong, "\n".join(wrong)


def test_every_module_says_what_it_is() -> None:
    wrong = [name(p) for p in python_files(*PYTHON_COMPONENTS) if not ast.get_docstring(ast.parse(p.read_text()))]
    assert not wrong


def test_private_names_stay_in_their_file() -> None:
    """What a file defines with an underscore in front is nobody else's: others use what it says of itself."""
    wrong = []
    for path in python_files(*PYTHON_COMPONENTS):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fold3d."):
                private = [alias.name for alias in node.names if alias.name.startswith("_") and alias.name != "_C"]
                wrong += [f"{name(path)} imports {node.module}.{one}" for one in private]
    assert not wrong, "\n".join(wrong)


def test_rank_arithmetic_stands_in_topology_alone() -> None:
    """Who divides by pp or tp elsewhere will forget an axis when one is added."""
    divides = re.compile(r"(%|//|::|divmod\([^()]*,) *(\w+\.)*(pp|tp|num_stages|stages)\b")
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sorted((ROOT / "fold3d").rglob("*.py"))
        if path.name != "topology.py"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if divides.search(line)
    ]
    assert not found, found


OTHERS_FIELDS = {"grad", "data", "state", "param_groups", "timeout", "_timeout", "forward", "group"}
"""Of torch's objects, which are assigned to as torch's users do; some classes of ours have fields of the same name."""
SETTINGS = {"model", "options"}
"""Variables that hold structs of C++ or torch, which are filled field by field."""


def test_nobody_assigns_to_another_object_s_fields() -> None:
    """An object is handed what it needs, or told by a method: so one file shows how its fields change."""
    trees = {path: ast.parse(path.read_text()) for path in python_files(*PYTHON_COMPONENTS)}
    fields: dict[int, set[str]] = {}  # by the assignment's node: those of the class that it stands in
    ours: set[str] = set()
    for tree in trees.values():
        for found in ast.walk(tree):
            if isinstance(found, ast.ClassDef):
                own = set(own_fields(found))
                ours |= own
                for target in assigned(found):
                    fields.setdefault(id(target), set()).update(own)
    wrong = [
        f"{name(path)}:{target.lineno}: {ast.unparse(target)}"
        for path, tree in trees.items()
        for target in assigned(tree)
        if target.attr in ours - OTHERS_FIELDS - fields.get(id(target), set())
        and not (isinstance(target.value, ast.Name) and target.value.id in {"self", "cls", *SETTINGS})
    ]
    assert not wrong, "\n".join(wrong)


def assigned(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Yields the attributes that are assigned to."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node


def own_fields(found: ast.ClassDef) -> Iterator[str]:
    """Yields the names of a class's fields, as far as its own body shows them."""
    for node in found.body:
        targets = (
            [node.target] if isinstance(node, ast.AnnAssign) else node.targets if isinstance(node, ast.Assign) else []
        )
        yield from (target.id for target in targets if isinstance(target, ast.Name))
    for target in assigned(found):
        if isinstance(target.value, ast.Name) and target.value.id == "self":
            yield target.attr
