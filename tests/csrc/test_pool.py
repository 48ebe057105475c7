"""The threads of served models (``csrc/common/pool.h``)."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import cvt_kernels as ck
from tests.processes import run_python
from tests.upstream import huggingface, images, logits, pvt_v2, segformer

#: Makes ``model`` and ``x``, whose forward starts no thread of PyTorch, and counts threads and descriptors.
START = """
import os, time, torch
torch.set_num_threads(1)
import cvt_kernels as ck
from tests.upstream import images, logits, segformer

def threads_now():
    return len(os.listdir("/proc/self/task"))

def more_threads(expected, than):
    # The thread that hushes PyTorch's ends later than the calls. Ten seconds at most.
    unchanged, ends = 0, time.monotonic() + 10
    while unchanged < 20 and time.monotonic() < ends:
        time.sleep(0.01)
        unchanged = unchanged + 1 if threads_now() - than == expected else 0
    return threads_now() - than

@torch.inference_mode()
def serve():
    return logits(model(x))

model, x = ck.accelerate(segformer().eval(), freeze=True), images(1, 64, 96)
expected, before = serve(), threads_now()
"""


def child(code):
    """Returns what code prints behind START in a process of its own; at most a minute."""
    done = run_python(f"import signal; signal.alarm(60)\n{START}\n{code}")
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_threads_are_as_many_as_set_and_stay():
    code = """
most = 1
for count in (1, 2, 5, 3, 1):
    torch.set_num_threads(count)
    assert torch.equal(serve(), expected)
    most = max(count, most)
    print(more_threads(most - 1, before))
"""
    assert child(code) == ["0", "1", "4", "4", "4"]


def test_a_forked_process_has_threads_of_its_own():
    code = """
torch.set_num_threads(3)
serve()
for _ in range(2):
    pid = os.fork()
    if pid == 0:
        alone = threads_now()
        same = torch.equal(serve(), expected)
        os._exit(10 * same + more_threads(2, alone))
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
print(torch.equal(serve(), expected))
"""
    assert child(code) == ["12", "12", "True"]


def test_forks_while_another_thread_serves():
    code = """
import threading
torch.set_num_threads(3)
ends = threading.Event()
def others():
    torch.set_num_threads(3)
    while not ends.is_set():
        serve()
server = threading.Thread(target=others)
server.start()
for _ in range(10):
    pid = os.fork()
    if pid == 0:
        os._exit(torch.equal(serve(), expected))
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
ends.set()
server.join()
"""
    assert child(code) == ["1"] * 10


def test_one_cpu_serves_all_threads():
    code = """
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
torch.set_num_threads(4)
print(torch.equal(serve(), expected), more_threads(3, before))
"""
    assert child(code) == ["True", "3"]


def test_the_process_ends_while_threads_wait_or_work():
    code = """
import threading
torch.set_num_threads(3)
serve()
def others():
    torch.set_num_threads(3)
    while True:
        serve()
threading.Thread(target=others, daemon=True).start()
print("end")
"""
    assert child(code) == ["end"]


def test_a_thread_that_the_system_refuses_is_done_without():
    code = """
import resource
size = int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
most = size + 2**22  # the stack of a thread is larger
resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
torch.set_num_threads(3)
same = torch.equal(serve(), expected)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
print(same, more_threads(0, before))
serve()
print(more_threads(2, before))
"""
    assert child(code) == ["True", "0", "2"]


def test_models_that_are_freed_leave_no_threads_and_no_descriptors():
    code = """
import copy, gc
def counts():
    return more_threads(1, before), len(os.listdir("/proc/self/fd"))

torch.set_num_threads(2)
models = [copy.deepcopy(model) for _ in range(20)]
for number in range(20):
    model = models.pop()
    serve()
    first = first if number else counts()
del model
gc.collect()
print(counts() == first)
"""
    assert child(code) == ["True"]


def test_pytorchs_threads_are_hushed_while_models_are_served_and_no_longer():
    code = """
cpus = len(os.sched_getaffinity(0))
torch.set_num_threads(cpus)
for _ in range(2):
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        serve()
    print(threads_now() - before - (cpus - 1))
    print(more_threads(cpus - 1, before) - (cpus - 1))
"""
    hushed = 2 if len(os.sched_getaffinity(0)) > 1 else 0  # the thread, and one of its team
    assert child(code) == [str(hushed), "0"] * 2


@pytest.mark.parametrize("make", [huggingface, segformer, pvt_v2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_calls_at_once_with_any_threads_give_the_same_bits(make, dtype):
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # threads that start later begin with it
    model, x = ck.accelerate(make().eval().to(dtype), freeze=True), images(2, 96, 64, dtype)

    @torch.inference_mode()
    def serve(count):
        torch.set_num_threads(count)
        return [logits(model(x)) for _ in range(5)]

    try:
        expected = serve(1)[0]
        with ThreadPoolExecutor(6) as callers:
            found = [each for results in callers.map(serve, 2 * [1, 2, 3, 4, 7, 2]) for each in results]
    finally:
        torch.set_num_threads(before)
    assert len(found) == 60
    assert all(torch.equal(each, expected) for each in found)
