"""Every change of a model, in every way of serving, for every family: tests/changes.py.

After a change an accelerated model computes what an equally changed plain model does, or raises what is
documented.
"""

import collections
import contextlib
import copy
import dataclasses
import functools
import itertools
import zlib

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils import _pytree as pytree

import cvt_kernels as ck
from cvt import CvTConfig, create_model
from cvt.factory import randomize
from cvt_kernels import backends
from tests import tape, upstream
from tests.changes import CHANGES, Source, floats, steps
from tests.cvt.models import two_stages
from tests.upstream import images, logits, relative

#: Two stages, of a block or two.
_SMALL = {"embed_dims": (16, 32), "num_heads": (1, 2), "depths": (1, 2)}


def ours(**config):
    """Returns a model of cvt."""
    sizes = {"patch_sizes": (7, 3), "patch_strides": (4, 2), "patch_paddings": (2, 1)}
    lists = {"mlp_ratio": 2.0, "qkv_bias": True, "stride_kv": 2, "cls_token": (False, True)}
    lists |= {"drop_rate": 0.0, "attn_drop_rate": 0.0, "drop_path_rate": 0.0, "stride_q": 1, "kernel_size": 3}
    model = create_model(CvTConfig(**_SMALL | sizes | lists | {"num_classes": 10} | config))
    randomize(model)
    return model


def pruned():
    """Returns a model of cvt that drops tokens."""
    config = dataclasses.replace(
        two_stages(), depths=(1, 3), cls_token=(False, True), token_keep=0.6, token_keep_bounds=(0.3, 0.9),
        drop_path_rate=0.0,
    )  # fmt: skip
    model = create_model(config)
    randomize(model)
    return model


FAMILIES = {
    "huggingface": lambda: upstream.huggingface(
        embed_dim=[16, 32], num_heads=[1, 2], depth=[1, 2], cls_token=[False, True]
    ),
    "microsoft": lambda: upstream.microsoft_plain(**_SMALL),
    "ours": ours,
    "segformer": upstream.segformer,
    "pvt": upstream.pvt,
    "pvt_v2": upstream.pvt_v2,
    "glpn": upstream.glpn,
    "vit": upstream.vit,
    "dinov2": upstream.dinov2,
    "clip": upstream.clip,
    "timm_vit": upstream.timm_vit,
    "timm_pvt_v2": upstream.timm_pvt_v2,
    "pruned": pruned,
}


#: How a model is served.
WAYS = {
    "live": functools.partial(ck.accelerate, freeze=False),
    "gradients": ck.accelerate,
    "training": ck.accelerate,
    "served": ck.accelerate,
    "frozen": functools.partial(ck.accelerate, freeze=True),
    "quantized": ck.accelerate,
    "quantized and frozen": functools.partial(ck.accelerate, freeze=True),
    "graphed": lambda model: ck.graphed(ck.accelerate(model)),
    "frozen and graphed": lambda model: ck.graphed(ck.accelerate(model, freeze=True)),
}


@functools.cache
def plain(family, is_quantized):
    """Returns a model in evaluation, which tests copy."""
    torch.manual_seed(0)
    model = FAMILIES[family]().eval()
    if is_quantized:
        ck.quantize(model)
    return model


@functools.cache
def images_for(family):
    sizes = {"pvt": (70, 70), "glpn": (64, 64), "pruned": (20, 20), "vit": (32, 32), "clip": (32, 32)}
    sizes |= {"timm_vit": (32, 32)}
    return images(2, *sizes.get(family, (32, 48)))


class Models:
    """A plain model and the same one as it is served."""

    def __init__(self, family, way):
        self.family, self.way, self.images = family, way, images_for(family)
        self.tolerance = 1e-4
        self.own = copy.deepcopy(plain(family, "quantized" in way))
        self.model = WAYS[way](copy.deepcopy(self.own))
        if way == "training":
            self.own.train()
            self.model.train()
        self.has_gradients = way in ("gradients", "training")

    def results_of(self, model, rounded_to=None):
        """Returns the tensors of a call, and its gradients and the buffers after it where there are some."""
        torch.manual_seed(0)
        images = self.images.to(rounded_to).to(dtype_of(model))
        model.zero_grad()
        with torch.set_grad_enabled(self.has_gradients):
            out = model(images)
            found = [t for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
            if self.has_gradients and logits(out).requires_grad:
                logits(out).sin().mean().backward()
        gradients = [p.grad for p in model.parameters()] if self.has_gradients else []
        buffers = [b.clone() for b in model.buffers()] if self.way == "training" else []
        return [[t.detach() for t in found], gradients, buffers]

    def expected(self):
        """Returns what the plain model computes, by its modules and PyTorch alone; None if it cannot."""
        try:
            return self.results_of_plain()
        except Exception:
            return None

    def results_of_plain(self):
        if "quantized" in self.way:
            return self.results_of(copy.deepcopy(self.model))
        with ck.use_backend("reference"):
            if self.family not in ("ours", "pruned"):
                return self.results_of(self.own)
            with torch_module.register_module_forward_hook(lambda *_: None):  # or its blocks would be fused
                return self.results_of(self.own)

    def compare(self):
        """Compares results, the second time by what the first one has kept; returns the plain model's."""
        if "frozen" in self.way and self.model.training:
            with pytest.raises(RuntimeError, match="is frozen for serving and cannot train"):
                self.results_of(self.model)
            return None
        expected = self.expected()
        counts = any(isinstance(m, nn.BatchNorm2d) and m.training for m in self.model.modules())
        for number in range(3 if "graphed" in self.way else 1 if self.way == "training" else 2):
            if counts and number:
                expected = self.expected()
            if expected is not None:
                self.assert_same(self.results_of(self.model), expected)
        return expected

    def assert_same(self, results, expected):
        """Compares with a tolerance; the errors of 16 bits with the plain model's, where it has them."""
        dtype = dtype_of(self.own)
        if dtype not in (torch.bfloat16, torch.float16) or "quantized" in self.way:
            assert_same(results, expected, self.tolerance)
            return
        exact = self.results_of(copy.deepcopy(self.own).double(), rounded_to=dtype)
        kinds = zip(results, expected, exact, (2, 3, 2), strict=True)  # results, gradients, buffers
        for *kind, factor in kinds:
            mine, theirs, right = ([None if t is None else t.double() for t in part] for part in kind)
            error, allowed = distance([mine], [right]), factor * distance([theirs], [right])
            assert error <= allowed + torch.finfo(dtype).eps, f"{error:.2g} where {allowed:.2g} is allowed"


def dtype_of(model):
    return next(p for p in model.parameters() if p.is_floating_point()).dtype


def assert_same(results, expected, tolerance):
    difference = distance(results, expected)
    assert difference < tolerance, f"differs by {difference:.2g} of the largest value"


def distance(results, expected):
    """Returns the largest difference over the largest value of its kind; infinity for other forms."""
    worst = 0.0
    for mine, theirs in zip(results, expected, strict=True):
        if len(mine) != len(theirs):
            return float("inf")
        largest = max([1e-30, *(t.abs().max().item() for t in theirs if t is not None)])
        for a, b in zip(mine, theirs, strict=True):
            if (a is None) != (b is None) or (a is not None and (a.shape, a.dtype) != (b.shape, b.dtype)):
                return float("inf")
            if b is not None and not torch.equal(a, b):
                worst = max(
                    worst, ((a.double() - b.double()).abs().max() / largest).nan_to_num(torch.inf).item()
                )
    return worst


def is_possible(name, way, family):
    change = CHANGES[name]
    families = change.only or tuple(family for family in FAMILIES if family != "pruned")
    return family in families and not any(part in way for part in change.not_in)


def run_change(name, way, family):
    """Compares the results of a served model after each step of a change with the plain model's."""
    change, seed = CHANGES[name], zlib.crc32(f"{name} {way} {family}".encode())
    graphs = tape.taped() if "graphed" in way else contextlib.nullcontext()
    with graphs, contextlib.ExitStack() as stack:
        models = Models(family, way)
        before = models.compare()
        models.tolerance = change.tolerance
        sources = Source(seed, models.images), Source(seed, models.images, WAYS[way])
        if change.is_global:
            of_both = zip(steps(name, [models.own, models.model], sources[1]), strict=True)
        else:
            of_own = itertools.repeat(models.own)
            if "quantized" not in way:
                of_own = stack.enter_context(contextlib.closing(steps(name, models.own, sources[0])))
            of_served = stack.enter_context(contextlib.closing(steps(name, models.model, sources[1])))
            of_both = zip(of_own, of_served, strict=False)
        largest = 0.0
        for both in of_both:
            models.own, models.model = both if len(both) == 2 else both[0]
            after = models.compare()
            if after is not None:
                largest = max(largest, distance(after, before))
        assert largest > 3 * change.tolerance or not shows(change, way), "nothing has changed"


def shows(change, way):
    """Returns whether the results of a way of serving must be others than before."""
    return {"gradients": way in ("gradients", "training"), "training": way == "training"}.get(
        change.shows, change.shows == "always"
    )


#: In how many ways of serving ``make test`` makes a change, each for another family: 3, and 2 of hooks.
_WAYS_OF_TEST = collections.defaultdict(lambda: 3, hooks=2)


def cases():
    """Yields every change in every way for every family, and marks those that take too long for CI."""
    for number, name in enumerate(CHANGES):
        ways = [way for way in WAYS if any(is_possible(name, way, family) for family in FAMILIES)]
        stride = max(1, len(ways) // _WAYS_OF_TEST[CHANGES[name].kind])
        for i, way in enumerate(ways):
            possible = [family for family in FAMILIES if is_possible(name, way, family)]
            for k, family in enumerate(possible):
                is_first = (number + i) % stride == 0 and k == (number + i) % len(possible)
                marks = [] if is_first and not CHANGES[name].is_long else [pytest.mark.slow]
                yield pytest.param(name, way, family, marks=marks, id=f"{name}-{way}-{family}")


@pytest.mark.filterwarnings(
    "ignore:Full backward hook is firing:UserWarning",
    "ignore:For backward hooks to be called:UserWarning",
    "ignore:cvt_kernels. a frozen model was called where gradients:RuntimeWarning",
)
@pytest.mark.parametrize(("name", "way", "family"), [*cases()])
def test_a_change(name, way, family):
    run_change(name, way, family)


#: Changes after which a compiled model computes otherwise: a frozen one those within its operators, too.
_WITHIN = ["another parameter", "eps of LayerNorm", "a forward hook on a part"]
_KEEPING = [
    name
    for name, each in CHANGES.items()
    if each.kind == "weights" and not each.is_long and name not in ("load_state_dict(assign=True)",)
]


_COMPILED_IN_TEST = ("ours", "pvt_v2")


@pytest.mark.parametrize(
    ("way", "family"),
    [
        *(("frozen", family) for family in _COMPILED_IN_TEST),
        *(
            pytest.param(way, family, marks=pytest.mark.rest)
            for way in ("frozen", "served")
            for family in FAMILIES
            if family != "pruned" and not (way == "frozen" and family in _COMPILED_IN_TEST)
        ),
    ],
)
def test_weights_of_a_compiled_model(way, family):
    """One that is compiled once."""
    torch.compiler.reset()
    models = Models(family, way)
    backend = "aot_eager" if way == "frozen" else "eager"
    compiled = torch.compile(models.model, backend=backend)
    start = [tensor.detach().clone() for tensor in floats(models.own)]
    for name in [*_KEEPING, *(_WITHIN if way == "frozen" else [])]:
        if not is_possible(name, way, family):
            continue
        sources = (Source(zlib.crc32(name.encode()), models.images) for _ in range(2))
        for _ in zip(*map(functools.partial(steps, name), (models.own, models.model), sources), strict=True):
            assert_same(models.results_of(compiled), models.expected(), 1e-4)
        for model in (models.own, models.model):
            for tensor, kept in zip(floats(model), start, strict=True):
                tensor.data.copy_(kept)
    torch.compiler.reset()


@pytest.mark.parametrize("freeze", [None, True])
@torch.no_grad()
def test_another_backend_serves_at_once(freeze):
    """One that is registered between two calls."""
    model, x = ck.accelerate(copy.deepcopy(plain("pvt_v2", False)), freeze=freeze), images_for("pvt_v2")
    for _ in range(2):
        before = logits(model(x))

    def scaling(operator, backend, implementation):
        def serve(call):
            return 2 * implementation.load().function(call)

        is_block = operator == "transformer_block"
        return dataclasses.replace(implementation, function=serve) if is_block else implementation

    with backends.replaced(scaling):
        assert relative(logits(model(x)), before) > 1e-2
    assert torch.equal(logits(model(x)), before)
