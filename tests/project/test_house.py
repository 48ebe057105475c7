"""The plan of the house: imports go downwards without a circle, and no module is hidden by a function."""

import ast
import functools
import graphlib
import importlib
import inspect
import pkgutil
import sys
from pathlib import Path

import pytest

import cvt
import cvt_kernels

ROOT = Path(__file__).parents[2]
FILES = sorted(path for package in ("cvt_kernels", "cvt") for path in (ROOT / package).rglob("*.py"))

#: From the ground up: a room imports from itself and from rooms of earlier lines.
FLOORS = (
    {"cvt_kernels.messages", "cvt_kernels.modes", "cvt_kernels.machine.toolkit"},
    {"cvt_kernels.checks"},
    {"cvt_kernels.records"},
    {"cvt_kernels.reference"},
    {"cvt_kernels.machine"},
    {"cvt_kernels.changes"},
    {"cvt_kernels.tuning"},
    {"cvt_kernels.backends"},
    {"cvt_kernels.launch"},
    {"cvt_kernels.choose"},
    {"cvt_kernels.tuning.tuner"},
    {"cvt_kernels.tuning.calls"},
    {"cvt_kernels.tuning.worker"},
    {"cvt_kernels.declaration"},
    {"cvt_kernels.ops.cards"},
    {"cvt_kernels.ops"},
    {"cvt_kernels.classes"},
    {"cvt_kernels.graphs.training"},
    {"cvt_kernels.graphs"},
    {"cvt_kernels.tuning.run"},
    {"cvt_kernels.models"},
    {"cvt_kernels.kernelized", "cvt_kernels.quantization"},
    {"cvt_kernels.tuning.diagnosis"},
    {"cvt_kernels"},
    {"cvt_kernels.__main__"},
    {"cvt.config", "cvt.extras", "cvt.files", "cvt.reading"},
    {"cvt.card"},
    {"cvt.huggingface"},
    {"cvt.hub", "cvt.quantized"},
    {"cvt.checkpoints"},
    {"cvt.pretrained"},
    {"cvt.images", "cvt.model"},
    {"cvt.segmentation", "cvt.tiles"},
    {"cvt.factory"},
    {"cvt.weight_pruning"},
    {"cvt.tools"},
    {"cvt.tools.datasets", "cvt.tools.evaluation", "cvt.tools.explanation"},
    {"cvt.tools.label_maps"},
    {"cvt"},
    {"cvt.tools.training"},
    {"cvt.tools.commands"},
    {"cvt.__main__", "cvt.backbone", "cvt.timm"},
)


@functools.cache
def parsed(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in FILES}


def is_for_types(node):
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def imports_of(name):
    """Yields the modules of the project that a file imports, wherever in it, but not for types alone."""
    path = MODULES[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    tree = parsed(path)
    for_types = {each for node in tree.body if is_for_types(node) for each in node.body}
    for node in ast.walk(tree):
        if node in for_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                target = f"{source}.{alias.name}"
                if target in MODULES or source in MODULES:
                    yield target if target in MODULES else source


@functools.cache
def graph():
    """Returns the modules that each module imports; each worker collects this file, one parses the others."""
    return {name: set(imports_of(name)) - {name} for name in MODULES}


def floor_of(name):
    """Returns the index into FLOORS of the innermost room of a module, and that room."""
    parts = name.split(".")
    for size in range(len(parts), 0, -1):
        room = ".".join(parts[:size])
        for index, rooms in enumerate(FLOORS):
            # The packages themselves are their __init__ only: a new file in them needs a line above.
            if room in rooms and (room == name or room not in ("cvt", "cvt.tools", "cvt_kernels")):
                return index, room
    raise AssertionError(f"{name} is on no floor")


def test_imports_go_downwards():
    assert "cvt_kernels.modes" in graph()["cvt_kernels.ops.attention.cpu"]  # imports are understood
    for name, targets in graph().items():
        floor, room = floor_of(name)
        for target in targets:
            assert floor_of(target)[0] < floor or floor_of(target) == (floor, room), f"{name}, {target}"


def test_no_circle_of_files():
    list(graphlib.TopologicalSorter(graph()).static_order())  # whose error names the circle


@pytest.mark.parametrize("package", [cvt_kernels, cvt], ids=lambda package: package.__name__)
def test_no_module_is_hidden_by_a_function_of_its_name(package):
    """``import package.module`` and ``package.module`` mean the same, in every package."""
    for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if info.name.rpartition(".")[2] in ("__main__", "_C"):
            continue
        try:
            module = importlib.import_module(info.name)
        except ImportError:  # the extension or Triton is not installed here
            continue
        parent, _, child = info.name.rpartition(".")
        assert getattr(sys.modules[parent], child) is module, info.name


@pytest.mark.parametrize("package", [cvt_kernels, cvt], ids=lambda package: package.__name__)
def test_public_names_exist_and_have_docstrings(package):
    for name in package.__all__:
        value = getattr(package, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert inspect.getdoc(value), name


def definitions(node):
    """Yields a module, its classes and its functions; expressions, most of a file, are passed over."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
        yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from definitions(child)


def test_docstrings_begin_with_what_a_thing_is_or_does():
    vague = ("What", "Of", "Why", "As", "Whether", "That", "How", "Like")
    vague += ("In", "For", "To", "With", "Before", "Within", "Where", "Which")
    wrong = []
    others = [path for folder in ("tests", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))]
    for path in (*FILES, *others, ROOT / "setup.py"):
        for node in definitions(parsed(path)):
            docstring = ast.get_docstring(node) or "-"
            if docstring.split()[0] in vague:
                wrong.append(f"{path.relative_to(ROOT)}: {docstring.splitlines()[0]}")
    assert not wrong
