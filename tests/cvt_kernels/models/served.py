"""Models whose stages or layers are served as one, their inputs, and what is noted of them."""

import contextlib
import copy
import dataclasses

import torch

import cvt_kernels as ck
from cvt_kernels import backends
from cvt_kernels.models import matching
from tests.upstream import glpn, huggingface, images, microsoft, ours, pvt, pvt_v2, segformer

#: The makers of models of each kind, with the numbers of their stages or layers, and of their blocks.
CVTS = {huggingface: (3, 6), microsoft: (3, 4), ours: (3, 4)}
LAYERED = {segformer: (3, 3), pvt: (3, 3), pvt_v2: (3, 3), glpn: (4, 4)}
MODELS = CVTS | LAYERED


def inputs(make, batch=2, height=32, width=48, dtype=torch.float32):
    """Returns images; PVT only takes one size, and GLPN halves sizes five times."""
    return images(batch, *{pvt: (70, 70), glpn: (32, 64)}.get(make, (height, width)), dtype=dtype)


def frozen(model):
    """Returns a frozen copy of a model in evaluation."""
    return ck.accelerate(copy.deepcopy(model).eval(), freeze=True)


def found_in(model):
    """Returns path → the stage of a CvT, or the layer of another model, that is served as one."""
    found = matching.find_stages(model)
    return {path: module for path, module, entry in found if entry.noun == found[-1][2].noun}


def stages_of(model):
    """Returns the stages of a CvT, or the layers of another model, that are served as one."""
    return list(found_in(model).values())


def outermost_of(model):
    """Returns the stages, and the layers that are in none, which a forward serves as one."""
    found = {path: stage for path, stage, _ in matching.find_stages(model)}
    return [stage for path, stage in found.items() if path.partition(".blocks.")[0] not in {*found} - {path}]


def rows_of_stages(model, x=None):
    """Returns the rows that coverage has of them."""
    paths = found_in(model).keys()
    return [row for row in ck.coverage(model, x) if row.path in paths]


def decibels(expected, actual):
    """Returns the ratio of a signal to the noise in another version of it."""
    noise = (actual.double() - expected.double()).square().sum()
    return float(10 * torch.log10(expected.double().square().sum() / noise))


@contextlib.contextmanager
def noted_backends():
    """Lists the operators that are called within a block, each with the backend that serves it."""
    noted = []

    def noting(operator, backend, implementation):
        def serve(call):
            noted.append((operator, backend))
            return implementation.load().function(call)

        return dataclasses.replace(implementation, function=serve)

    with backends.replaced(noting):
        yield noted


@contextlib.contextmanager
def noted_queries():
    """Lists the number of queries of each attention, alone or within a block."""
    noted = []

    def noting(operator, backend, implementation):
        def serve(call):
            if operator == "attention":
                noted.append(call.q.shape[1])
            elif operator == "transformer_block":
                noted.append(call.x.shape[1] if call.rows is None else call.rows.shape[1])
            return implementation.load().function(call)

        return dataclasses.replace(implementation, function=serve)

    with backends.replaced(noting):
        yield noted
