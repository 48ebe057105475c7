"""Every kernel compiles with the oldest and the newest Triton, and waits for the kernel before it.

What only a compiler of one version refuses is looked for in the sources too, which takes no time. Triton 3.6
takes an attribute of a constexpr as an argument of a jit function only if it is a number, a bool or a dtype,
and no tuple as a default. Every version makes an integer argument of 1 a constant, which has no methods.
Triton 3.9 makes a tuple of a record within a record, which has its fields but not its properties. And code
after a return is compiled even where a static condition rules it out.
"""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import cvt_kernels
from tests.processes import run_python

ROOT = Path(__file__).parents[3]


def _called(node):
    return ast.unparse(node.func if isinstance(node, ast.Call) else node)


OPERATORS = Path(cvt_kernels.__file__).parent / "ops"
#: The files of Triton's kernels, each as a tree.
SOURCES = {
    "/".join(path.parts[-3:]): ast.parse(path.read_text())
    for path in sorted(OPERATORS.rglob("*.py"))
    if "triton" in str(path.relative_to(OPERATORS)) or "@triton.jit" in path.read_text()
}
JIT = {
    name: [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and "triton.jit" in map(_called, node.decorator_list)
    ]
    for name, tree in SOURCES.items()
}
JIT_NAMES = {function.name for functions in JIT.values() for function in functions}
_MEMBERS = [
    member
    for tree in SOURCES.values()
    for record in ast.walk(tree)
    if isinstance(record, ast.ClassDef)
    for member in record.body
]
#: The fields of the records that kernels get as constants, but for numbers, bools and dtypes.
FIELDS = {
    member.target.id
    for member in _MEMBERS
    if isinstance(member, ast.AnnAssign)
    and not {"int", "bool", "float", "Any"} & {ast.unparse(member.annotation)}
}
#: The properties of these records.
PROPERTIES = {
    member.name
    for member in _MEMBERS
    if isinstance(member, ast.FunctionDef) and "property" in map(ast.unparse, member.decorator_list)
}
KERNELS = [
    node
    for path in sorted(OPERATORS.rglob("*.py"))
    for node in ast.parse(path.read_text()).body
    if isinstance(node, ast.FunctionDef)
    and node.name.endswith("_kernel")
    and {"triton.jit", "gluon.jit"} & set(map(_called, node.decorator_list))
]


def printed_by(program):
    """Returns the words that a program prints which compiles kernels."""
    child = run_python(program, TRITON_INTERPRET="0")
    assert child.returncode == 0, child.stderr[-2000:]
    return child.stdout.split()


#: Compiles kernels for sm_90 with every integer 1 that may become a constant then; prints their names.
ONES = """
import torch
from cvt.tools.commands.compile import launches, triton_kernels
from cvt_kernels.launch.launching import Chip, specialize

def with_ones(value):
    if isinstance(value, tuple):
        parts = map(with_ones, value)
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return 1 if type(value) is int else value

kernels = {}
for operator, launches_of in launches.TRITON_OPERATORS.items():
    model = "segformer_b0" if operator == "depthwise_conv_gelu" else "cvt_13"
    stage = launches.stages_of(model, launches.image_size_of(model))[0]
    for training in (False, True):
        for launch in launches_of(stage, torch.bfloat16, Chip(90, 132), batch=1, training=training):
            plain = {each.name for each in launch.kernel.params if not each.is_constexpr}
            arguments = {
                name: with_ones(value) if name in plain else value for name, value in launch.arguments.items()
            }
            if arguments != dict(launch.arguments):
                kernel = specialize(launch._replace(arguments=arguments), 90)
                kernels[repr(kernel)] = kernel
for kernel in kernels.values():
    triton_kernels.examine(kernel)
    print(kernel.name)
"""


@pytest.mark.slow
def test_kernels_compile_where_integers_are_1():
    assert len(set(printed_by(ONES))) > 20


def _faults_of(function):
    """Yields what some version of Triton does not compile in a jit function, each with the reason."""
    plain = {each.arg for each in function.args.args if each.annotation is None}
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and _called(node) in JIT_NAMES:
            for each in node.args:
                if (
                    isinstance(each, ast.Attribute)
                    and each.attr in FIELDS
                    and ast.unparse(each.value).isupper()
                ):
                    yield each, "is given to a jit function"
        if isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Attribute) and node.attr in PROPERTIES:
                yield node, "is a property of a record within a record"
            name = ast.unparse(node.value)
            is_number = name in plain and not name.endswith("_ptr") and function.name.endswith("_kernel")
            if node.attr == "to" and is_number:
                yield node, "of an argument that may be a constant"
    yield from ((each, "by default") for each in function.args.defaults if isinstance(each, ast.Tuple))
    early = [
        each
        for each in function.body
        if isinstance(each, ast.If) and any(isinstance(inner, ast.Return) for inner in ast.walk(each))
    ]
    returns = sum(isinstance(each, ast.Return) for each in ast.walk(function))
    if early and returns > 1 and "None" in ast.unparse(early[0].test) and not early[0].orelse:
        yield early[0].test, "returns early, before code that is compiled"


@pytest.mark.parametrize("name", SOURCES)
def test_sources(name):
    assert {"approximate", "parts"} <= FIELDS
    assert {"activate", "load_vector"} <= JIT_NAMES
    assert {"chunks"} <= PROPERTIES
    faults = [(node, reason) for function in JIT[name] for node, reason in _faults_of(function)]
    assert not [f"{name}:{node.lineno}: {ast.unparse(node)} {reason}" for node, reason in faults]


#: The oldest Triton that is supported, which torch 2.11 brings along, and the newest, of torch 2.15.
OLDEST, NEWEST = "3.6.0", "3.9.0"


def install_triton(version, folder):
    """Installs a version of Triton in a folder, to be put in front of ``PYTHONPATH``, and returns that."""
    command = ["pip", "install", "--quiet", "--no-deps", "--target", str(folder), f"triton=={version}"]
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"triton {version} cannot be had: {done.stderr.strip().splitlines()[-1]}")
    return str(folder)


@pytest.mark.slow
@pytest.mark.parametrize("version", [None, OLDEST, NEWEST], ids=["installed", OLDEST, NEWEST])
def test_every_kernel_compiles(version, tmp_path):
    places = [install_triton(version, tmp_path / "triton")] if version else []
    report = tmp_path / "report.json"
    command = ["--arch", "sm_80", "sm_90", "sm_100", "--dtype", "bfloat16", "float32"]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join([*places, str(ROOT)])}
    child = subprocess.run(
        [sys.executable, "-m", "cvt", "compile", *command, "--json", str(report)],
        capture_output=True, text=True, env=environment, cwd=tmp_path, check=False,
    )  # fmt: skip
    output = child.stdout[-3000:] + child.stderr[-3000:]
    assert report.exists(), output
    written = json.loads(report.read_text())
    flaws = {flaw for row in written["kernels"] for flaw in row["flaws"]}
    if version == NEWEST:  # whose code spills a little
        assert all(flaw.startswith("spills") for flaw in flaws), flaws
    else:
        assert child.returncode == 0, output
    assert version is None or written["versions"]["triton"] == version
    assert len({row["kernel"] for row in written["kernels"]}) > 30


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_every_kernel_waits_for_the_one_before(kernel):
    """It does by its first statement in Triton, in Gluon before the partitions, behind its mbarriers."""
    calls = [ast.unparse(statement) for statement in kernel.body]
    where = calls.index("grid_dependency_synchronize()")
    if "triton.jit" in map(_called, kernel.decorator_list):
        assert where == 1  # behind the docstring
    else:
        assert not any(
            word in call for call in calls[:where] for word in ("gl.load", "tma.", "warp_specialize")
        )


def _launched(**settings):
    """Returns the options of a launch on a chip."""
    from cvt_kernels.launch import launching

    with launching.recorded_launches(launching.Chip(settings.get("capability", 90), 132)) as launches:
        launching.launch(None, (1,), torch.empty(1), {"num_warps": 4})
    return launches[0].options


@pytest.mark.parametrize(
    ("capability", "setting", "driver", "overlaps"),
    [
        (90, None, 13000, True), (100, "1", 12030, True), (90, "", 0, True), (90, "0", 13000, False),
        (89, None, 13000, False), (90, None, 12020, False),
    ],
)  # fmt: skip
def test_launches_overlap(capability, setting, driver, overlaps, monkeypatch):
    """They do from sm_90 on, where CUDA graphs keep that, unless they are told not to."""
    from cvt_kernels import machine
    from cvt_kernels.launch import launching

    if setting is None:
        monkeypatch.delenv("CVT_KERNELS_PDL", raising=False)
    else:
        monkeypatch.setenv("CVT_KERNELS_PDL", setting)
    monkeypatch.setattr(machine, "cuda_driver_version", lambda: driver)
    monkeypatch.setattr(launching, "_graphs_keep_overlaps", launching._graphs_keep_overlaps.__wrapped__)
    assert _launched(capability=capability).get("launch_pdl", False) == overlaps


def test_a_setting_that_is_neither_0_nor_1(monkeypatch):
    monkeypatch.setenv("CVT_KERNELS_PDL", "off")
    with pytest.raises(ValueError, match=r"CVT_KERNELS_PDL: got 'off', expected 0 or 1"):
        _launched()
