"""Whole models, in inference and in training steps (forward, loss, backward).

The contenders are ``cvt bench``'s, and ours compiled. The time is the wall clock's; for small batches
on a GPU most of it is the host's, unless a CUDA graph is replayed. Ours run under ``auto``, autotuned
in a first run that is not timed.
"""

import contextlib
import copy
import functools
import importlib.util
import itertools
from typing import NamedTuple

import pytest
import torch

import cvt_kernels as ck
from cvt import CvTConfig
from cvt.commands.bench.contenders import (
    COMPILED,
    FROZEN,
    GRAPHED,
    HUGGINGFACE,
    INT8,
    OURS,
    build_contender,
    build_huggingface,
    build_ours,
    freezing,
    logits_of,
    training_step,
)
from cvt.evaluation import cost

from . import suites


class Measured(NamedTuple):
    """A model to be measured.

    Attributes:
        model: A preset, or a configuration.
        image_size: Pixels of each side.
        cpu_batches: The batches of inference on a CPU, where time is short; training takes the first.
    """

    model: str | CvTConfig
    image_size: int
    cpu_batches: tuple[int, ...]


MODELS = {
    "cvt_13 at 224": Measured("cvt_13", 224, (8, 1, 32)),
    "cvt_21 at 224": Measured("cvt_21", 224, (8, 1)),
    "cvt_13 at 384": Measured("cvt_13", 384, (8, 1)),
    "cvt_w24 at 384": Measured("cvt_w24", 384, (1,)),
}
#: Images on which training is checked at most, lest float32 take more memory than there is.
CHECKED = 32
if suites.TINY:
    small = CvTConfig(embed_dims=(16, 32, 48), num_heads=(1, 2, 3), depths=(1, 2, 3))
    MODELS = {"small at 64": Measured(small, 64, (2,))}


def batches(model, training):
    """Returns the batch sizes of a model, what says most first."""
    if suites.CUDA and not suites.TINY:
        return (256, 32) if training else (256, 32, 1)
    return MODELS[model].cpu_batches[:1] if training else MODELS[model].cpu_batches


def names(training):
    """Lists the plain contenders, then those that torch.compile takes long for."""
    theirs = importlib.util.find_spec("transformers") is not None
    plain = ["hf", "accelerate"] if theirs else ["eager"]
    plain.append("cvt")
    if not training:
        others = (*COMPILED, *INT8)
        served = [name for name in FROZEN if name not in others and (name in GRAPHED) == suites.CUDA]
        plain += [name for name in served if theirs or name not in HUGGINGFACE]
    if suites.TINY:
        return plain
    compiled = ["compile", "cvt-compile"] if theirs else ["cvt-compile"]
    if theirs and not suites.CUDA:  # where minutes are fewer
        compiled += ["accelerate-compile", *([] if training else ["accelerate-frozen-compile"])]
    if suites.CUDA and theirs and not training:
        compiled.append("compile-max")
    return plain + compiled


def cases():
    """Lists everything, what says most first in case time runs out."""
    rows = [
        (model, mode, batch, dtype, name)
        for model, mode in itertools.product(MODELS, ("inference", "training"))
        for batch, dtype, name in itertools.product(
            batches(model, mode == "training"), suites.dtypes(), names(mode == "training")
        )
    ]

    def rank(row):
        model, _, batch, _, name = row
        compiled, first = name in COMPILED, model == next(iter(MODELS))
        if first and not compiled:
            return 0
        if first and batch == batches(model, False)[0]:
            return 1
        return 3 if compiled else 2

    return sorted(rows, key=rank)


@functools.lru_cache(maxsize=1)
def originals(model):
    """Returns ours and, if it is installed, Hugging Face's, both in float32 with the same weights."""
    _, ours = build_ours(MODELS[model].model)
    theirs = importlib.util.find_spec("transformers") is not None
    return ours, build_huggingface(ours) if theirs else None


def build(model, name, dtype, training):
    """Returns the contender; for training in half precision in float32, since autocast does the rest."""
    if training and dtype != torch.float64:
        dtype = torch.float32
    ours, theirs = originals(model)
    module = copy.deepcopy(theirs if name in HUGGINGFACE else ours).to(suites.DEVICE, dtype).train(training)
    return build_contender(name, module, module)


def infer(module, x):
    """Runs a forward; returns the logits."""
    with torch.inference_mode():
        return logits_of(module(x))


def step(module, x, dtype):
    """Runs a training step; returns the loss, and the gradients of the first and the last parameter."""
    loss = training_step(module, x, dtype if dtype.itemsize == 2 else None).loss
    first, *_, last = module.parameters()
    gradients = first.grad, last.grad
    module.zero_grad(set_to_none=True)  # or the peak memory of the next step would lack them
    return loss, *gradients


@functools.cache
def operations_per_image(model):
    """Counts the operations of the forward's products and convolutions."""
    return 2 * cost(originals(model)[0].config, MODELS[model].image_size).multiply_adds


@pytest.fixture(autouse=True)
def _no_compiled_code_stays():
    yield
    torch.compiler.reset()


@functools.lru_cache(maxsize=4)
def plain(model, batch, dtype, training):
    """Returns what the plain operators make of the same weights, in this dtype and in the next wider one."""
    outputs = []
    for kind in (dtype, torch.float64 if dtype == torch.float32 else torch.float32):
        eager = build(model, "eager", kind, training)
        with ck.use_backend(*eager.backends):
            outputs.append(run(eager.model, images(model, batch, kind, training), kind))
    return outputs


def images(model, batch, dtype, training):
    """Returns the images of a batch, for training in float32 as long as autocast does the rest."""
    size = MODELS[model].image_size
    few = suites.randn(CHECKED, 3, size, size, dtype=torch.float32, seed=0)
    x = few.repeat(-(-batch // CHECKED), 1, 1, 1)[:batch]  # so that the first are the same in every batch
    return x if training and dtype != torch.float64 else x.to(dtype)


def run(module, x, dtype):
    """Runs a forward or, in training mode, a training step."""
    return step(module, x, dtype) if module.training else [infer(module, x)]


def tune(module, x, dtype):
    """Autotunes a model under ``auto`` before it is compiled or timed; returns operator → backends."""
    module = getattr(module, "_orig_mod", module)  # of a compiled one, what it is made of
    return suites.backends_serving(functools.partial(run, module, x, dtype))


@pytest.mark.parametrize(
    ("model", "mode", "batch", "dtype", "name"),
    cases(),
    ids=lambda value: suites.short(value) if isinstance(value, torch.dtype) else None,
)
def test_model(benchmark, model, mode, batch, dtype, name):
    training = mode == "training"
    compiling = contextlib.nullcontext()
    if name in COMPILED and not suites.CUDA and not training:
        compiling, _ = freezing()
    try:
        contender = build(model, name, dtype, training)
        x = images(model, batch, dtype, training)
        call = functools.partial(run, contender.model, x, dtype)
        with ck.use_backend(*contender.backends), compiling:
            launched = contender.launched().model  # a replay calls no backend and allocates nothing
            tuned = {} if contender.backends == ("reference",) else tune(launched, x, dtype)
            few = min(batch, CHECKED if training else 2)
            if name in COMPILED:  # for this batch and no other
                few = batch if training else few  # in training images depend on each other
                outputs = call() if training else [logits[:few] for logits in call()]
            else:
                outputs = run(contender.model, images(model, few, dtype, training), dtype)
            suites.check(outputs, *plain(model, few, dtype, training), dtype)
            facts = {
                "suite": "model",
                "case": f"{model}, {mode}",
                "contender": name,
                "dtype": suites.short(dtype),
                "batch": batch,
            }
            if name in OURS:  # graphs may take other backends
                facts["backends"] = tuned
            if name in GRAPHED:
                facts["peak_memory_bytes"] = suites.peak_memory(functools.partial(run, launched, x, dtype))
                call()
                assert contender.why_not_graphed(x) is None
            passes = 3 if training else 1
            operations = passes * batch * operations_per_image(model)
            suites.record(benchmark, call, facts, operations=operations, host=True)
    except torch.OutOfMemoryError:
        pytest.skip("out of memory")
