"""Triton kernels compiled in processes beside: launches find them, and what fails there does not matter."""

import pytest
import torch
import transformers

import cvt_kernels as ck
from cvt_kernels import compiling
from tests.processes import run_python

#: Three small kernels, and a driver with which Triton launches them into its cache without a GPU.
KERNELS = """
import os, signal, subprocess, sys, threading, time
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from cvt.tools.commands.compile import launches
from cvt_kernels import compiling
from cvt_kernels.launching import Chip, settle_key

class Driver:
    get_current_device = get_current_stream = lambda self, *device: 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

driver.set_active(Driver())
started = []
for stage in launches.stages("cvt_13"):
    with torch.no_grad():
        attend = launches.TRITON_OPERATORS["attention"]
        started += attend(stage, torch.bfloat16, Chip(90, 132), batch=1, training=False)
kernels = [compiling.specialize(launch, 90) for launch in started]
assert len(kernels) == 3

def files():
    return sorted(os.listdir(os.environ["TRITON_CACHE_DIR"]))

def server():
    return compiling._compilations._server

def launch_all():
    for launch in started:
        settle_key(launch.kernel)
        assert launch.kernel.warmup(**launch.arguments, grid=launch.grid, **launch.options) is not None

def wait_for(condition):
    until = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)

def children(process):
    with open(f"/proc/{process}/task/{process}/children") as lines:
        return [int(each) for each in lines.read().split()]
"""


def run(tmp_path, program, workers="2"):
    result = run_python(
        KERNELS + program,
        TRITON_INTERPRET="0",
        TRITON_CACHE_DIR=str(tmp_path),
        CVT_KERNELS_COMPILE_WORKERS=workers,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result


def test_launches_find_what_was_compiled_beside(tmp_path):
    """Another process does too, whatever it launches first; and nothing that is cached is compiled again."""
    run(
        tmp_path,
        """
keys = compiling.begin(kernels)
assert len(keys) == 3 and compiling.begin(kernels) == keys
assert compiling.wait(keys)
assert compiling.pending(keys) == [] == compiling.begin(kernels)
kept = files()
launch_all()
assert files() == kept
""",
    )
    run(
        tmp_path,
        """
kept = files()
started.reverse()
launch_all()
assert files() == kept
assert compiling.begin(kernels) == [] and server() is None
""",
    )


@pytest.mark.parametrize(
    "fault",
    [
        # a compiling process, the server, the server before it has read anything, one that answers no more
        "wait_for(lambda: children(server().process.pid))\n"
        "os.kill(children(server().process.pid)[0], signal.SIGKILL)",
        "wait_for(lambda: children(server().process.pid))\nos.kill(server().process.pid, signal.SIGKILL)",
        "os.kill(server().process.pid, signal.SIGKILL)",
        "os.kill(server().process.pid, signal.SIGSTOP)\ncompiling._SILENCE = 1.0",
    ],
)
def test_a_killed_process_costs_time_only(tmp_path, fault):
    run(tmp_path, f"keys = compiling.begin(kernels)\n{fault}\nassert compiling.wait(keys)\nlaunch_all()")


def test_an_error_beside_is_left_to_the_launch(tmp_path):
    run(
        tmp_path,
        """
wrong = [kernel._replace(name="_no_such_kernel") for kernel in kernels]
wrong += [kernel._replace(module="cvt_kernels.no_such_module") for kernel in kernels]
keys = compiling.begin([*wrong, *kernels])
assert len(keys) == 9 and compiling.wait(keys)
kept = files()
launch_all()
assert files() == kept
unpicklable = [kernels[0]._replace(options={"num_warps": 4, str(i): lambda: None}) for i in range(3)]
assert compiling.begin(unpicklable) == []
""",
    )


def test_without_a_process_the_launches_compile(tmp_path):
    run(tmp_path, "sys.executable = '/no/such/python'\nassert compiling.begin(kernels) == []\nlaunch_all()")
    run(tmp_path, "assert compiling.begin(kernels) == [] and server() is None", workers="0")


def test_a_frozen_application_is_not_started_as_a_compiler(tmp_path):
    """Its ``sys.executable`` is the application, which would start once more."""
    application = tmp_path / "application"
    application.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    application.chmod(0o755)
    program = f"sys.frozen, sys.executable = True, {str(application)!r}\n"
    program += """
assert compiling.workers() == 0
keys = compiling.begin(kernels)
assert compiling.wait(keys)
assert server() is None
launch_all()
"""
    run(tmp_path / "cache", program)
    assert not (tmp_path / "started").exists()


def test_few_kernels_start_no_process(tmp_path):
    """Unless the call goes on meanwhile."""
    run(
        tmp_path,
        """
keys = compiling.begin(kernels[:2])
assert len(keys) == 2 and server() is None
assert compiling.wait(keys) and server() is None
launch_all()
compiling._compilations = compiling._Compilations()
wrong = [kernels[0]._replace(name="_no_such_kernel")]
keys = compiling.begin(wrong)
assert not compiling.wait(keys, seconds=0.0) and server() is not None
assert compiling.wait(keys)
""",
    )


def test_a_fork_has_compilations_of_its_own(tmp_path):
    """It does not keep the parent's server alive, nor take its answers."""
    run(
        tmp_path,
        """
keys = compiling.begin(kernels)
process = os.fork()
if not process:
    status = 1
    try:
        assert server() is None and compiling.pending(keys) == []
        assert len(compiling.begin(kernels[:1])) == 1
        time.sleep(1000)
    finally:
        os._exit(status)
assert compiling.wait(keys)
number = server().process.pid
server().connection.close()  # as the end of this process does
wait_for(lambda: server().process.poll() is not None)
os.kill(process, signal.SIGKILL)
os.waitpid(process, 0)
""",
    )


def test_threads_share_the_processes(tmp_path):
    run(
        tmp_path,
        """
threads = [threading.Thread(target=lambda: compiling.wait(compiling.begin(kernels))) for _ in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
kept = files()
launch_all()
assert files() == kept
""",
    )


def test_processes_end_with_the_one_that_asks(tmp_path):
    result = run(
        tmp_path,
        """
compiling.begin(kernels)
wait_for(lambda: children(server().process.pid))
print(server().process.pid, *children(server().process.pid))
""",
    )
    run(
        tmp_path,
        f"""
def is_running(process):
    try:
        with open(f"/proc/{{process}}/stat") as line:
            return line.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
wait_for(lambda: not any(map(is_running, {[int(each) for each in result.stdout.split()]})))
""",
    )


ORDERS = """
import hashlib, importlib, sys, torch
from cvt_kernels import launching
modules = (
    "linear.triton.forward", "attention.triton.forward", "attention.triton.backward", "mlp.triton.forward",
    "conv_projection.triton.sliding_forward", "conv_linear.triton.forward", "linear.gluon",
)
kernels = [
    value
    for module in modules
    for name, value in sorted(vars(importlib.import_module(f"cvt_kernels.ops.{module}")).items())
    if name.endswith("_kernel") and hasattr(type(value), "cache_key")
]
for kernel in kernels[::ORDER]:
    launching.settle_key(kernel)
print(sorted((kernel.__name__, kernel.cache_key) for kernel in kernels))
"""


def test_keys_of_kernels_do_not_depend_on_the_order():
    keys = [run_python(ORDERS.replace("ORDER", order), TRITON_INTERPRET="0").stdout for order in ("1", "-1")]
    assert keys[0]
    assert keys[0] == keys[1]


REHEARSED = """
import pickle, torch
from cvt.tools.commands.compile import launches
from cvt_kernels import backends, compiling, choose, launching

stage, found = launches.stages("cvt_13", 64)[2], 0

class Step(launches.Step):
    def tensor(self, *shape, dtype=None):
        if dtype == torch.int64 and len(shape) == 2:  # the index of rows
            return torch.arange(shape[1]).repeat(shape[0], 1)
        return super().tensor(*shape, dtype=dtype)

    def call(self, operator, *args, backward=True, backend="triton", **settings):
        global found
        call = backends.operators[operator].bind(*args, **settings)
        implementation = backends.implementations[operator][backend].load()
        if implementation.why_unsupported(call) is not None or not backward and self.training:
            return
        expected = []
        with launching.intercepted_launches(expected.append, launching.Chip(90, 1)):
            out = implementation.function(call)
            if self.training:
                outs = out if isinstance(out, tuple) else (out,)
                torch.autograd.backward(outs, [torch.empty_like(each) for each in outs])
        interception, launching.interception = launching.interception, None
        asked = choose._kernels_of(operator, [backend], call)
        launching.interception = interception
        kernels = {repr(compiling.specialize(each, 90)) for each in expected}
        assert kernels and kernels <= {repr(each) for each in asked}, operator
        assert [repr(pickle.loads(pickle.dumps(each))) for each in asked] == list(map(repr, asked))
        found += len(kernels)

launches.Step = Step
for name, run in launches.TRITON_OPERATORS.items():
    for training in (False, True):
        run(stage, torch.bfloat16, launching.Chip(90, 1), batch=2, training=training, device="cpu")
print(found)
"""


def test_what_a_call_will_launch_is_known_before():
    """It is known of every operator with Triton kernels, with gradients or without, and can be pickled."""
    result = run_python(REHEARSED, TRITON_INTERPRET="0")
    assert result.returncode == 0, result.stderr[-3000:]
    assert int(result.stdout) > 60


@pytest.mark.parametrize("wrong", ["two", "-1", "1.5", "²"])
def test_a_wrong_number_of_processes_is_named(monkeypatch, wrong):
    monkeypatch.setenv("CVT_KERNELS_COMPILE_WORKERS", wrong)
    with pytest.raises(ValueError, match=f"CVT_KERNELS_COMPILE_WORKERS: got '{wrong}', expected a number"):
        compiling.workers()


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "training", "most"), [(1, False, 40), (256, False, 44), (256, True, 33)])
def test_a_first_call_asks_for_few_kernels(tuning, monkeypatch, batch, training, most):
    """CvT-13 in bfloat16, frozen (37 and 42, with those of parts in compositions) and in training (30)."""
    asked: dict[str, compiling.TritonKernel] = {}

    def begin(kernels):
        found = {repr(kernel): kernel for kernel in kernels}
        asked.update(found)
        return list(found)

    monkeypatch.setenv("CVT_KERNELS_AUTOTUNE_SECONDS", "0")
    monkeypatch.setattr(compiling, "workers", lambda: 2)
    monkeypatch.setattr(compiling, "begin", begin)
    monkeypatch.setattr(compiling, "pending", list)
    monkeypatch.setattr(compiling, "wait", lambda *groups, **how: False)
    model, x = (
        transformers.CvtForImageClassification(transformers.CvtConfig()),
        torch.randn(batch, 3, 224, 224),
    )
    if training:
        model, x = ck.accelerate(model.train().cuda()), x.cuda()
        with torch.autocast("cuda", torch.bfloat16):
            model(x)
    else:
        model, x = ck.accelerate(model.eval().bfloat16().cuda(), freeze=True), x.bfloat16().cuda()
        with torch.inference_mode():
            model(x)
    assert 20 < len(asked) <= most
