"""Triton kernels compiled without a launch, into the cache where launches find them."""

import pytest

from tests.processes import run_pieces, run_python

#: Three small kernels, and a driver with which Triton launches them into its cache without a GPU.
KERNELS = """
import multiprocessing, os, pickle
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from cvt.tools.commands.compile import launches
from cvt_kernels.launch import launching
from cvt_kernels.launch.launching import Chip, settle_key

class Driver:
    get_current_device = get_current_stream = lambda self, *device: 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

driver.set_active(Driver())
started = []
for stage in launches.stages_of("cvt_13"):
    with torch.no_grad():
        attend = launches.TRITON_OPERATORS["attention"]
        started += attend(stage, torch.bfloat16, Chip(90, 132), batch=1, training=False)
kernels = [launching.specialize(launch, 90) for launch in started]
assert len(kernels) == 3

def files():
    return sorted(os.listdir(os.environ["TRITON_CACHE_DIR"]))

def launch_all():
    for launch in started:
        settle_key(launch.kernel)
        assert launch.kernel.warmup(**launch.arguments, grid=launch.grid, **launch.options) is not None
"""


PIECES = {
    "launches find what was compiled": """
for kernel in kernels:
    pickle.loads(pickle.dumps(kernel)).compile()
before = files()
launch_all()
assert files() == before
""",
    "a kernel that does not compile raises": """
wrong = kernels[0]._replace(signature={}, constants={})
try:
    wrong.compile()
except RuntimeError as error:
    assert "does not compile for sm_90" in str(error), error
else:
    raise AssertionError("it compiled")
""",
    "the process of tune compiles several at once": """
from cvt_kernels.launch import launching
from cvt_kernels.tuning import calls, tuner, worker
os.sched_getaffinity = lambda process: {0, 1}
launching.chip = lambda device: Chip(90, 132)
launching.TritonKernel.compile_into_cache = launching.TritonKernel.compile  # there is no driver
tuner.launches_of = lambda task, chip: started
multiprocessing.process.current_process()._config["daemon"] = False  # as tests start this one
server = worker._Server(torch.device("cpu"))
server.compile([calls.call_of("gelu", torch.empty(2, 4))])
before = files()
assert len(before) >= len(kernels)
launch_all()
assert files() == before
worker.ProcessPoolExecutor = None  # no more is started: all are there
server.compile([calls.call_of("gelu", torch.empty(2, 4))])
""",
}


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """Returns the exit code and the words of each piece, with a cache of its own."""
    folder = tmp_path_factory.mktemp("cache")
    pieces = {
        name: f"os.environ['TRITON_CACHE_DIR'] = {str(folder / str(i))!r}\n"
        f"os.mkdir({str(folder / str(i))!r}){code}"
        for i, (name, code) in enumerate(PIECES.items())
    }
    return run_pieces(KERNELS, pieces, TRITON_INTERPRET="0")


@pytest.mark.parametrize("name", PIECES)
def test_ahead(told, name):
    assert told[name] == (0, "")


ORDERS = """
import hashlib, importlib, sys, torch
from cvt_kernels.launch import launching
modules = (
    "linear.triton.forward", "attention.triton.forward", "attention.triton.backward", "mlp.triton.forward",
    "conv_projection.triton.forward", "conv_linear.triton.forward", "linear.gluon",
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
from cvt_kernels import backends
from cvt_kernels.launch import launching
from cvt_kernels.tuning import tuner

stage, found = launches.stages_of("cvt_13", 64)[2], 0

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
        made = tuner.Call(call, self.training)
        task = tuner.Task({backend: implementation.function}, made, made, backends.operators[operator])
        asked = [launching.specialize(each, 90) for each in tuner.launches_of(task, launching.Chip(90, 1))]
        kernels = {repr(launching.specialize(each, 90)) for each in expected}
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
