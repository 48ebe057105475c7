"""The cache keys that are collected on fake tensors equal the ones that models use when they run."""

import dataclasses
import gc

import pytest
import torch

import cvt_kernels as ck
from cvt import PRESETS, create_model
from cvt.tools.commands import pyramids
from cvt.tools.commands.tune.cache_keys import COMPOSED, TensorLike, Workload, collect
from cvt_kernels import backends, dispatch
from tests.checks import operators_asked_on_a_cpu
from tests.upstream import huggingface, microsoft

CPU = torch.device("cpu")


def asked_by(model, images):
    """Returns the cache keys of a forward, with the operators that have kernels on this machine."""
    asked = set()

    def recording(operator, backend, implementation):
        plain = backends.operators[operator].reference

        def serve(call):
            asked.add(dispatch.cache_key(operator, **call._asdict()))
            return (implementation.function if backend == "composed" else plain)(call)

        return dataclasses.replace(implementation, function=serve, why_unsupported=None)

    with backends.replaced(recording), backends.use_backend(*COMPOSED):
        model(images)
    return asked


@pytest.fixture(scope="module")
def models():
    """Returns a CvT-13 of each kind, of as few blocks as the preset has here."""
    depths = PRESETS["cvt_13"].depths
    upstream = huggingface(size="full", depth=list(depths)), microsoft(size="full", depths=depths)
    return create_model("cvt_13"), *upstream


@pytest.mark.parametrize(
    ("dtype", "train", "batch_size"),
    [("bfloat16", False, 2), ("float32", True, 1), ("bfloat16", True, 2)],  # training has a forward too
)
def test_cache_keys_match_the_models(models, dtype, train, batch_size):
    cache_keys = {q.text for q in collect(Workload("cvt_13", 64, [batch_size], [dtype], train=train), CPU)}
    steps = [False, True] if train else [False]
    expected = set()
    for training in steps:
        weights = torch.float32 if training else getattr(torch, dtype)
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=training and dtype != "float32")
        images = torch.randn(batch_size, 3, 64, 64, dtype=weights)
        for model in models:
            if dtype != "float32" and "ConvolutionalVisionTransformer" in type(model).__name__:
                continue  # its LayerNorm computes in float32 whatever comes
            model.to(weights).train(training)
            for freeze in (False,) if training else (False, True):
                with torch.set_grad_enabled(training), autocast:
                    expected |= asked_by(ck.accelerate(model, freeze=freeze), images)
                ck.restore(model)
    more = set()
    if batch_size > 1:  # later stages are strided for a single image only
        more |= {q for q in cache_keys if q.endswith(("192 channels, strided", "384 channels, strided"))}
    assert cache_keys == expected | more
    assert {q.split(", ")[0] for q in cache_keys} == operators_asked_on_a_cpu()


@pytest.mark.parametrize(
    "name",
    [
        *("segformer_b0", "pvt_tiny", "pvt_v2_b2_linear"),
        *(pytest.param(name, marks=pytest.mark.rest) for name in ("pvt_v2_b0", "glpn")),
    ],
)
def test_cache_keys_match_the_models_of_transformers(monkeypatch, name):
    known = pyramids.PYRAMIDS[name]
    sizes = {**known.sizes, "depths": [1] * len(known.sizes["depths"])}
    monkeypatch.setitem(pyramids.PYRAMIDS, name, known._replace(sizes=sizes))
    cache_keys = {q.text for q in collect(Workload(name, 64, [2], ["float32"], train=True), CPU)}
    model, images, expected = pyramids.build_pyramid(name, None, 64), torch.randn(2, 3, 64, 64), set()
    for training in (False, True):
        model.train(training)
        for freeze in (False,) if training else (False, None):
            with torch.set_grad_enabled(training):
                expected |= asked_by(ck.accelerate(model, freeze=freeze), images)
            ck.restore(model)
    assert cache_keys == expected


def test_cache_keys_of_a_quantized_model_are_collected_too():
    workload = Workload("cvt_13", 64, [2], ["float32"], train=False)
    plain, both = (collect(workload._replace(quantized=quantized), CPU) for quantized in (False, True))
    more = {cache_key.text for cache_key in both} - {cache_key.text for cache_key in plain}
    model, images = create_model("cvt_13").eval(), torch.randn(2, 3, 64, 64)
    ck.quantize(model)
    with torch.no_grad():
        asked = asked_by(model, images) | asked_by(ck.accelerate(model, freeze=True), images)
    assert asked - {cache_key.text for cache_key in plain} <= more
    assert {q.split(", ")[0] for q in more} >= {"linear_int8", "layer_norm_quantize", "transformer_block"}
    others = {q.replace("quick", "exact") for q in asked}
    assert more <= asked | others
    for cache_key in both:
        if cache_key.operator == "linear_int8":
            weight = cache_key.make_arguments(CPU)["weight"]
            assert weight.dtype == torch.int8
            assert weight.unique().numel() > 100


def test_each_cache_key_is_listed_once_for_all_sizes_of_its_class():
    workload = Workload("cvt_13", 64, [2, 3], ["float32"], train=False)
    texts = [cache_key.text for cache_key in collect(workload, CPU)]
    assert len(texts) == len(set(texts))
    parts = [collect(workload._replace(batch_sizes=[batch]), CPU) for batch in (2, 3)]
    alone = [cache_key.text for part in parts for cache_key in part]
    assert set(alone) == set(texts)
    assert len(texts) < len(alone)


def test_what_matters_most_is_asked_first():
    workload = Workload("cvt_13", 64, [2], ["bfloat16", "float32"], train=True, quantized=True)
    asked = collect(workload, CPU)
    trained = ["forward+backward" in cache_key.text for cache_key in asked]
    assert not any(trained[: trained.index(True)])
    inference = workload._replace(train=False, quantized=False)
    first, other = (collect(inference._replace(dtypes=[dtype]), CPU) for dtype in workload.dtypes)
    for alone in (first, other):
        operators = [cache_key.operator for cache_key in alone]
        assert operators.index("transformer_block") > operators.index("attention")
        assert operators.index("conv_embedding") > operators.index("layer_norm")
    assert [cache_key.text for cache_key in asked[: len(first)]] == [cache_key.text for cache_key in first]


@pytest.mark.gpu
def test_cache_keys_match_the_model_on_a_gpu():
    model = create_model("cvt_13").cuda()
    images = torch.randn(2, 3, 64, 64, device="cuda")
    gc.collect()  # tensors of other tests, whose memory would be given back meanwhile
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    collected = collect(Workload("cvt_13", 64, [2], ["bfloat16"], train=True), images.device)
    assert torch.cuda.max_memory_allocated() <= before + 2**12  # scalars, but nothing of the images' size
    cache_keys = {cache_key.text for cache_key in collected}
    with torch.autocast("cuda", torch.bfloat16):
        assert asked_by(model.train(), images) <= cache_keys
    with torch.no_grad():
        assert asked_by(model.bfloat16().eval(), images.bfloat16()) <= cache_keys


def test_arguments_are_made_as_they_were():
    for cache_key in collect(Workload("cvt_13", 32, [2], ["float32"], train=True), CPU):
        made, again = (cache_key.make_arguments(CPU) for _ in range(2))
        assert dispatch.cache_key(cache_key.operator, **made) == cache_key.text
        first = next(iter(made))
        assert torch.equal(made[first], again[first])


def test_tensors_are_made_with_strides_and_gradients():
    generator = torch.Generator().manual_seed(0)
    strided = TensorLike.of(torch.empty(4, 3, requires_grad=True).t())
    tensor = strided.make(CPU, generator)
    assert (tensor.stride(), tensor.requires_grad, tensor.is_leaf) == ((1, 3), True, True)
    variance = TensorLike.of(torch.empty(100)).make(CPU, generator)
    assert variance.min() > 0
    assert TensorLike.of(torch.zeros((), dtype=torch.int64)).make(CPU, generator) == 1
    with torch.no_grad():
        assert not TensorLike.of(torch.empty(4, requires_grad=True)).requires_grad
