"""Requests of backends in threads, asyncio tasks and compiled functions."""

import asyncio
import contextvars
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import cvt_kernels as ck
from cvt.tools import evaluation
from cvt_kernels import backends
from cvt_kernels.backends import requested_backends, requesting
from tests.checks import add_marked_backend
from tests.upstream import ONE_STAGE

AUTO, CPU_KERNELS, REFERENCE = ("auto",), ("cpu",), ("reference",)


def in_thread(function):
    """Returns what a function returns in a thread of its own."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result(timeout=60)


def test_a_block_holds_for_its_thread():
    with ck.use_backend("cpu"):
        assert (requested_backends(), in_thread(requested_backends)) == (CPU_KERNELS, AUTO)

        def other():
            with ck.use_backend("reference"):
                return requested_backends()

        assert (in_thread(other), requested_backends()) == (REFERENCE, CPU_KERNELS)
    assert requested_backends() == AUTO


def test_a_statement_of_the_main_thread_holds_for_those_that_make_none():
    def other():
        before = requested_backends()
        ck.use_backend("reference")
        return before, requested_backends()

    ck.use_backend("cpu")
    assert in_thread(other) == (CPU_KERNELS, REFERENCE)
    assert (requested_backends(), in_thread(requested_backends)) == (CPU_KERNELS, CPU_KERNELS)
    with ck.use_backend("sdpa"):
        assert in_thread(requested_backends) == CPU_KERNELS
        ck.use_backend("reference")  # until the end of the block
        assert (requested_backends(), in_thread(requested_backends)) == (REFERENCE, CPU_KERNELS)
    assert (requested_backends(), in_thread(requested_backends)) == (CPU_KERNELS, CPU_KERNELS)


def test_the_librarys_own_requests_are_never_the_processs(monkeypatch):
    seen = []
    with requesting("cpu"):
        seen += [requested_backends(), in_thread(requested_backends)]
    assert (seen, requested_backends()) == ([CPU_KERNELS, AUTO], AUTO)
    with monkeypatch.context() as patch:
        patch.setattr(ck.use_backend, "__init__", lambda *_: pytest.fail("requests for the whole process"))
        evaluation.cost(ONE_STAGE, 32)


def test_one_object_nested_and_in_several_threads():
    block = ck.use_backend("cpu")
    with block:
        with block, ck.use_backend("sdpa"), block:
            assert requested_backends() == CPU_KERNELS
        assert requested_backends() == CPU_KERNELS

        def other():
            before = requested_backends()
            with block:
                return before, requested_backends()

        assert in_thread(other) == (AUTO, CPU_KERNELS)
        with pytest.raises(ValueError, match="different Context"):
            in_thread(lambda: block.__exit__())
    assert (requested_backends(), in_thread(requested_backends)) == (AUTO, AUTO)


def test_tasks_of_one_thread():
    async def task(names):
        with ck.use_backend(*names):
            for _ in range(5):
                await asyncio.sleep(0)
                assert requested_backends() == names
            return await asyncio.to_thread(requested_backends)

    async def together():
        return await asyncio.gather(*map(task, (CPU_KERNELS, REFERENCE, AUTO)))

    assert asyncio.run(together()) == [CPU_KERNELS, REFERENCE, AUTO]


def test_compiled_functions_follow_the_context():
    add_marked_backend("cpu", 10.0)
    traced = []

    def backend(graph, inputs):
        traced.append(graph)
        return graph

    @torch.compile(backend=backend, fullgraph=True)
    def gelu(x):
        with ck.use_backend("cpu"):
            inner = ck.gelu(x)
        return ck.gelu(x), inner

    x = torch.zeros(3)
    context = contextvars.copy_context()
    context.run(ck.use_backend("cpu").__enter__)
    ck.use_backend("reference")
    for _ in range(2):
        for run, outer in ((context.run, 10), (lambda f, *args: f(*args), 0)):
            assert [float(out[0]) for out in run(gelu, x)] == [outer, 10]
    assert len(traced) == 2
    assert requested_backends() == REFERENCE


def test_replacements_wait_for_each_other():
    before = backends.implementations
    inside, entered, go_on = (threading.Event() for _ in range(3))

    def first():
        with backends.replaced(lambda operator, backend, implementation: implementation):
            inside.set()
            assert go_on.wait(60)

    def second():
        with backends.replaced(lambda operator, backend, implementation: implementation):
            entered.set()

    with ThreadPoolExecutor(2) as pool:
        tasks = [pool.submit(first)]
        assert inside.wait(60)
        tasks.append(pool.submit(second))
        try:
            assert not entered.wait(0.3)  # as long as the first is inside
        finally:
            go_on.set()
        for task in tasks:
            task.result(timeout=60)
    assert backends.implementations is before


def test_what_is_forgotten_while_a_call_is_decided_is_not_kept():
    """Another thread does so when it registers or replaces an implementation."""
    add_marked_backend("cpu", 10.0, why_unsupported=lambda x, *_, **settings: backends.forget())
    ck.gelu(torch.zeros(3))
    assert backends.dispatch_cache == {}
