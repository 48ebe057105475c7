"""Tests of the time that a call may tune: the default serves the rest, which later calls tune."""

import types

import pytest
import torch
from filelock import FileLock
from torch import nn
from torch.utils.checkpoint import checkpoint

import cvt_kernels as ck
from cvt_kernels import autotune, backends, dispatch, reference
from cvt_kernels.autotune import limit, tuner
from tests.checks import implementation
from tests.contract.examples import example

CPU = torch.device("cpu")
WHY = "not tuned yet: the call had no time left (CVT_KERNELS_AUTOTUNE_SECONDS), a later one goes on"


class Gelu(nn.Module):
    """A GELU, of which every number of channels is a key of its own."""

    def forward(self, x):
        return ck.gelu(x)


class Model(nn.Module):
    """Calls operators of four keys, by modules within it and by itself."""

    def __init__(self):
        super().__init__()
        self.inner = Gelu()

    def forward(self, x):
        for channels in (16, 8):
            self.inner(x[:, :channels].contiguous())
        for channels in (4, 2):
            ck.gelu(x[:, :channels].contiguous())
        return ck.gelu(x[:, :16].contiguous())


@pytest.fixture
def tuned(tuning, monkeypatch):
    """Lets each task take 1.5 s of a clock that otherwise stands still; lists the channels that are tuned."""
    now, tune, channels = [0.0], tuner.tune, []

    def takes_time(task, known, has_time):
        channels.append(task.sample.record[0].shape[-1])
        entry = tune(task, known, has_time)
        now[0] += 1.5
        return entry

    monkeypatch.setattr(limit, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(tuner, "tune", takes_time)
    monkeypatch.setenv("CVT_KERNELS_AUTOTUNE_SECONDS", "2")
    backends.register("gelu", "cpu", implementation("gelu", reference.gelu))
    return channels


def channels_of(keys):
    return [int(key.split(" channels")[0].split(", ")[-1]) for key in keys]


def test_a_call_of_a_model_tunes_for_some_seconds_and_later_ones_go_on(tuned):
    model, x = Model(), torch.randn(3, 16)
    torch.testing.assert_close(model(x), reference.gelu(x))
    assert tuned == [16, 8]
    assert channels_of(backends.untuned()) == [4, 2]
    assert set(backends.untuned().values()) == {WHY}
    assert ck.fallbacks()["gelu", "cpu"] == WHY
    assert (
        f"not tuned in this process:\n  gelu, forward, float32, exact, 4+ elements, 4 channels: {WHY}"
        in ck.doctor()
    )
    model(x)
    assert (tuned, backends.untuned()) == ([16, 8, 4, 2], {})
    assert "not tuned in this process" not in ck.doctor()
    model(x)
    assert tuned == [16, 8, 4, 2]
    assert len(autotune.cache_for(CPU).cached_entries()) == 4


def test_operators_outside_of_modules_are_calls_of_their_own(tuned):
    for channels in (16, 8, 4):
        ck.gelu(torch.randn(3, channels))
    assert tuned == [16, 8, 4]


def test_without_a_limit_or_without_time(tuned, monkeypatch):
    monkeypatch.setenv("CVT_KERNELS_AUTOTUNE_SECONDS", "0")
    x = torch.randn(3, 16)
    for _ in range(2):
        torch.testing.assert_close(Model()(x), reference.gelu(x))
    assert tuned == []
    monkeypatch.setenv("CVT_KERNELS_AUTOTUNE_SECONDS", "inf")
    Model()(x)
    assert tuned == [16, 8, 4, 2]


def test_a_block_without_a_limit(tuned):
    with autotune.unlimited() as call:
        Model()(torch.randn(3, 16))
    assert tuned == channels_of(call.tuned) == [16, 8, 4, 2]


def test_reproducible_calls_have_no_limit(tuned):
    """They would compute something else where later calls have other backends."""
    torch.use_deterministic_algorithms(True)
    try:
        Model()(torch.randn(3, 16))
    finally:
        torch.use_deterministic_algorithms(False)
    assert tuned == [16, 8, 4, 2]
    tuned.clear()
    x = torch.randn(3, 16, requires_grad=True)
    checkpoint(Model(), x, use_reentrant=False).sum().backward()
    assert tuned == [16, 8, 4, 2]


def test_a_call_does_not_wait_for_another_process_beyond_its_limit(tuned, monkeypatch):
    monkeypatch.setenv("CVT_KERNELS_AUTOTUNE_SECONDS", "0.1")
    monkeypatch.setattr(limit, "time", __import__("time"))
    cache, x = autotune.cache_for(CPU), torch.randn(3, 16)
    cache.path.parent.mkdir(parents=True)
    cache.path.parent.chmod(0o700)
    with FileLock(cache.path.with_suffix(".tuning"), is_singleton=False):
        assert torch.equal(Model()(x), reference.gelu(x))
    assert tuned == []
    assert sorted(channels_of(backends.untuned())) == [2, 4, 8, 16]
    ck.gelu(x)
    assert tuned == [16]


# A default that is ours -----------------------------------------------------------------------------------


def served():
    entries = autotune.cache_for(CPU).entries().items()
    return next(entry for cache_key, entry in entries if cache_key.startswith("transformer_block, "))


def register_block(function):
    backends.register("transformer_block", "cpu", implementation("transformer_block", function))


@torch.no_grad()
def test_a_default_of_ours_is_checked_without_time_and_timed_later(tuning, monkeypatch):
    calls = []

    def ours(*args, **kwargs):
        calls.append(1)
        return reference.transformer_block(*args, **kwargs)

    register_block(ours)
    call = example("transformer_block", "reference", "usual").call.record
    monkeypatch.setenv("CVT_KERNELS_AUTOTUNE_SECONDS", "0")
    expected = reference.transformer_block(*call[:3])
    for count in (2, 3):  # one is the check
        torch.testing.assert_close(ck.transformer_block(*call[:3]), expected)
        assert len(calls) == count
    entry = served()
    assert (entry.chosen, entry.timings, list(entry.measurements)) == ("cpu", 0, ["cpu"])
    assert autotune.cache_for(CPU).cached_entries() == {}
    assert list(backends.untuned().values()) == [WHY]
    monkeypatch.setenv("CVT_KERNELS_AUTOTUNE_SECONDS", "inf")
    ck.transformer_block(*call[:3])
    entry = served()
    assert (entry.timings, len(entry.measurements) > 1, backends.untuned()) == (1, True, {})
    assert entry in autotune.cache_for(CPU).cached_entries().values()


@torch.no_grad()
def test_a_default_of_ours_that_is_wrong_does_not_serve(tuning, monkeypatch):
    register_block(lambda x, *_, **__: x + 1)
    call = example("transformer_block", "reference", "usual").call.record
    monkeypatch.setenv("CVT_KERNELS_AUTOTUNE_SECONDS", "0")
    expected = reference.transformer_block(*call[:3])
    with pytest.warns(RuntimeWarning, match=r"'cpu' failed its check .* reference serves instead"):
        torch.testing.assert_close(ck.transformer_block(*call[:3]), expected)
    for seconds in ("0", "inf"):  # without another warning
        monkeypatch.setenv("CVT_KERNELS_AUTOTUNE_SECONDS", seconds)
        torch.testing.assert_close(ck.transformer_block(*call[:3]), expected, rtol=1e-4, atol=1e-5)
    assert served().timings == 1


def test_what_was_checked_is_not_checked_again(tuning):
    x = torch.randn(3, 16)
    backends.register("gelu", "cpu", implementation("gelu", reference.gelu))
    task = dispatch.task_of("gelu", x)
    answers = iter((True, False))
    entry = tuner.tune(task, None, lambda: next(answers))  # time for the check only
    assert entry.timings == 0
    assert entry.measurements.keys() == task.candidates.keys()
    assert all(each.seconds is None for each in entry.measurements.values())
    unchecked = task._replace(reference=None, sample=task.sample)
    again = tuner.tune(unchecked, entry)
    assert again.timings == 1
    assert all(each.seconds is not None for each in again.measurements.values())


# Kernels that are being compiled --------------------------------------------------------------------------


@pytest.fixture
def compiler(monkeypatch):
    """A compiler whose kernels, one for each number of channels, are ready when a test says so."""
    state = types.SimpleNamespace(begun=[], left=set(), waits=[])

    def begin(kernels):
        state.begun += kernels
        state.left.update(kernels)
        return list(kernels)

    def wait(*groups, seconds=float("inf"), most_left=0):
        state.waits.append(([*groups], seconds, most_left))
        if seconds == float("inf"):  # the first ones are ready, as many as it waits for
            for keys in groups[: len(groups) - most_left]:
                state.left.difference_update(keys)
        return not any(state.left.intersection(keys) for keys in groups)

    monkeypatch.setattr(dispatch, "_has_compilers", lambda device: True)
    monkeypatch.setattr(dispatch, "_begun", {})
    monkeypatch.setattr(dispatch, "_kernels_of", lambda operator, able, call: [call.x.shape[-1]])
    monkeypatch.setattr(dispatch.compiling, "begin", begin)
    monkeypatch.setattr(dispatch.compiling, "wait", wait)
    monkeypatch.setattr(dispatch.compiling, "pending", lambda keys: [k for k in keys if k in state.left])
    return state


def test_all_kernels_of_a_call_are_begun_before_it_waits_for_any(tuned, compiler):
    """Each run tunes what half of the rest has become by then; the last one has everything."""
    model, x = Model(), torch.randn(3, 16)
    with torch.no_grad():
        out = autotune.run_until_tuned(lambda: model(x))
    assert compiler.begun == [16, 8, 4, 2]
    assert [(groups, most_left) for groups, _, most_left in compiler.waits] == [
        ([[16], [8], [4], [2]], 2),
        ([[4], [2]], 1),
        ([[2]], 0),
    ]
    assert tuned == [16, 8, 4, 2]
    assert torch.equal(out, ck.gelu(x))


def test_a_call_with_a_limit_waits_within_its_time_and_begins_everything(tuned, compiler):
    model, x = Model(), torch.randn(3, 16)
    with torch.no_grad():
        model(x)
        assert (compiler.begun, tuned) == ([16, 8, 4, 2], [])
        assert all(0 <= seconds <= 2 for _, seconds, _ in compiler.waits)
        assert "its kernels are being compiled" in str(ck.doctor())
        compiler.left.clear()
        model(x)
    assert tuned == [16, 8]


def test_without_a_limit_an_operator_waits_for_its_own_kernels(tuned, compiler):
    with torch.no_grad(), limit.unlimited():
        Model()(torch.randn(3, 16))
    assert [groups for groups, *_ in compiler.waits] == [[[16]], [[8]], [[4]], [[2]]]
    assert tuned == [16, 8, 4, 2]
