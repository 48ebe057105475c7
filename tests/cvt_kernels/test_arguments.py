"""Every public argument of cvt_kernels is checked by name; a new one without an entry here fails a test."""

import inspect

import numpy as np
import pytest
import torch
from torch import nn

import cvt_kernels as ck
from tests.arguments import (
    Call,
    also_named,
    choice,
    dtype,
    each,
    flag,
    grid,
    integer,
    module,
    names_of,
    number,
    of_values,
    optional,
    parts,
    positive,
    problems,
    strings,
    tensor,
)
from tests.upstream import ONE_STAGE, create_model

B, H, W, C, HEADS = 2, 4, 5, 8, 2
T = H * W
GRID = (H, W)


def randn(*shape):
    return torch.randn(shape)


def vector():
    return tensor((3,), (C, C), ())


# Tuples of parameters -------------------------------------------------------------------------------------

MOMENTUM = optional(number(-0.1, 1.5))
STRIDE, PADDING = integer(0), integer()
COUNTS = torch.ones(2, dtype=torch.int64), torch.ones(()), torch.tensor(True), torch.tensor(1).to_sparse()
COUNT = optional(of_values("a", 1, 1.0, True, [1], *COUNTS))
NORM = {"weight": optional(vector()), "bias": optional(vector()), "eps": positive()}
LINEAR = {"weight": tensor((C,), (C, C, 1), (C, 3)), "bias": optional(tensor((3,), ()))}
CONV = {
    "weight": tensor((C, 1, 3, 2), (C, 3, 3), (C, 1, 0, 0), (3, 1, 3, 3)),
    "bn_weight": optional(vector()),
    "bn_bias": optional(vector()),
    "running_mean": vector(),
    "running_var": vector(),
    "num_batches_tracked": COUNT,
    "stride": STRIDE,
    "padding": PADDING,
    "dilation": integer(0),
    "momentum": MOMENTUM,
    "eps": positive(),
    "process_group": optional(of_values("gloo", 1, True)),
}
#: Training alone reads the others.
IN_EVALUATION = {name: CONV[name] for name in CONV if name not in ("num_batches_tracked", "process_group")}
POSITION = {
    "table": tensor((HEADS, 3, 3), (3,)),
    "query_grid": also_named(grid((3, 3)), "table"),
    "key_grid": grid((3, 3)),
    "stride": also_named(integer(0, 3), "table"),
    "rows": optional(tensor((1, T), (T,))),
}
QUANTIZED_ROWS = {"values": tensor((3, 3)), "scales": tensor((3,))}
QUANTIZED = {
    "weight": tensor((C,), (C, 3)),
    "weight_scale": tensor((3,), ()),
    "bias": optional(tensor((3,), ())),
    "input_scale": optional(tensor((3,))),
}
DEPTHWISE = {"weight": tensor((C, 1, 3, 2), (C, 3, 3)), "bias": optional(tensor((3,), ()))}
REDUCTION = {
    "weight": tensor((C, C, 2, 1), (C, C), (C, C, 0, 0), (C, C, 9, 9)),
    "bias": optional(tensor((3,))),
    "norm": parts(NORM),
}
HEADS_OF = integer(0, 3)
BLOCK = {
    "norm1": parts(NORM),
    "reduce": optional(each(parts(IN_EVALUATION), ())),
    "linears": each(parts(QUANTIZED), (), (1, 2, 3)),
    "num_heads": HEADS_OF,
    "scale": optional(number()),
    "proj": parts(LINEAR),
    "norm2": parts(NORM),
    "fc1": parts(LINEAR),
    "approximate": choice(),
    "fc2": parts(LINEAR),
    "mix": optional(of_values(3, torch.ones(2), (randn(C, 1, 3, 3), None))),
}
PYRAMID = BLOCK | {
    "reduce": optional(parts(REDUCTION)),
    "linears": each(parts(LINEAR), (), (1, 2, 3)),
    "mix": optional(parts(DEPTHWISE)),
}
#: The fields of the public tuples, which the operators check that take them.
FIELDS = {
    "ConvBatchNorm": CONV,
    "DepthwiseConv": DEPTHWISE,
    "Linear": LINEAR,
    "Norm": NORM,
    "PositionBias": POSITION,
    "QuantizedLinear": QUANTIZED,
    "QuantizedRows": QUANTIZED_ROWS,
    "Reduction": REDUCTION,
    "TransformerBlock": BLOCK,
}


def conv():
    count = torch.zeros((), dtype=torch.int64)
    statistics = torch.zeros(C), torch.ones(C)
    return ck.ConvBatchNorm(randn(C, 1, 3, 3), randn(C), randn(C), *statistics, count, padding=1)


def norm():
    return ck.Norm(randn(C), randn(C))


def layer(outputs=C, inputs=C):
    return ck.Linear(randn(outputs, inputs), randn(outputs))


def quantized_layer():
    return ck.QuantizedLinear(torch.ones(C, C, dtype=torch.int8), torch.ones(C), randn(C), torch.tensor(0.1))


def block():
    linears = layer(), layer(), quantized_layer()
    convs = conv(), conv(), conv()
    return ck.TransformerBlock(norm(), convs, linears, HEADS, 0.5, layer(), norm(), layer(), "none", layer())


def pyramid():
    reduction = ck.Reduction(randn(C, C, 2, 2), randn(C), norm())
    conv = ck.DepthwiseConv(randn(C, 1, 3, 3), randn(C))
    return ck.TransformerBlock(
        norm(), reduction, (layer(),) * 3, HEADS, 0.5, layer(), norm(), layer(), "none", layer(), conv
    )


def position():
    table = randn(HEADS, 2 * H - 1, 2 * W - 1)
    return ck.PositionBias(table, GRID, GRID, 1, torch.arange(T).expand(B, T).contiguous())


def tokens():
    return {"x": randn(B, T, C)}


def rows():
    return torch.arange(3).expand(B, 3).contiguous()


def of_attention():
    q, k, v = randn(B, T, HEADS, 4), randn(B, T, HEADS, 4), randn(B, T, HEADS, 4)
    return {"q": q, "k": k, "v": v, "scale": 0.5, "bias": randn(T, T), "position": position()}


def of_map():
    arguments = of_attention() | {"rows": 0, "grid": GRID, "query_grid": GRID}
    del arguments["v"]
    return arguments


# Calls ----------------------------------------------------------------------------------------------------

X, XL = tensor((), (0,), first=True), tensor((), first=True)
TOKENS = tensor((), (C,), (B, C), first=True)
WEIGHT = tensor((C,), (C, C, 1), (C, 3))
BIAS = optional(tensor((3,), (C, C)))
ROWS = tensor((B,), (3, 3))
EPS = positive()
INT8 = {"scale": optional(tensor((3,))), "dtype": dtype()}
HEADS_SHAPE = (T, HEADS, 4)
ATTENTION = {
    "q": tensor(HEADS_SHAPE, (B, 0, HEADS, 4), (B, T, 0, 4), first=True),
    "k": tensor(HEADS_SHAPE, (B, T, HEADS, 3)),
    "v": tensor(HEADS_SHAPE, (B, T, HEADS, 3), (1, T, HEADS, 4)),
    "scale": optional(number()),
    "bias": optional(tensor((3,), (T, 3))),
    "position": optional(parts(POSITION)),
}
CONVS = each(parts(IN_EVALUATION), (), [()])
INPLACE = {"inplace": flag()}

CALLS = {
    "accelerate": Call(
        lambda: {"model": create_model(ONE_STAGE).eval(), "freeze": False},
        {"model": module(), "freeze": optional(flag())},
    ),
    "add_layer_norm": Call(
        lambda: (
            tokens()
            | {"residual": randn(B, T, C), "weight": randn(C), "bias": randn(C), "eps": 1e-5}
            | {"dtype": None}
        ),
        {"x": X, "residual": tensor((C,), (B, T, 3)), "weight": optional(vector())}
        | {"bias": optional(vector()), "eps": EPS, "dtype": optional(dtype())},
    ),
    "attention": Call(
        lambda: of_attention() | {"dropout_p": 0.0}, {**ATTENTION, "dropout_p": number(-0.1, 1.0, 2)}
    ),
    "attention_map": Call(
        of_map,
        {name: kind for name, kind in ATTENTION.items() if name != "v"}
        | {"rows": of_values("a", 1.5, [1.5], [], [T], -T - 1, [True], torch.ones(2), [None], ["a"])}
        | {"grid": optional(grid((3, 3))), "query_grid": optional(grid((3, 3)))},
    ),
    "bias_gelu": Call(
        lambda: tokens() | {"bias": randn(C), "approximate": "none"},
        {"x": X, "bias": vector(), "approximate": choice()},
    ),
    "conv_embedding": Call(
        lambda: (
            {"image": randn(B, 3, 9, 9), "weight": randn(C, 3, 3, 3), "bias": randn(C)}
            | {"norm_weight": randn(C), "norm_bias": randn(C), "stride": 2, "padding": 1, "eps": 1e-5}
            | {"class_token": randn(C)}
        ),
        {"image": tensor((3, 9, 9), (B, 2, 9, 9), (B, 3, 0, 0), first=True)}
        | {"weight": tensor((C, 3, 3), (C, 3, 3, 2), (0, 3, 3, 3)), "bias": BIAS, "norm_weight": BIAS}
        | {"norm_bias": BIAS, "stride": STRIDE, "padding": PADDING, "eps": EPS, "class_token": BIAS},
    ),
    "conv_linear": Call(
        lambda: tokens() | {"grid": GRID, "convs": [conv(), conv()], "linears": [layer(), layer()]},
        {"x": TOKENS, "grid": grid((3, 3)), "convs": CONVS}
        | {"linears": also_named(each(parts(LINEAR), [], [1, 2], [None, None], [(), ()]), "linears")},
    ),
    "conv_projection": Call(
        lambda: tokens() | {"grid": GRID, "convs": [conv(), conv()], "training": False},
        {"x": TOKENS, "grid": grid((3, 3), [H, W]), "convs": CONVS, "training": flag()},
    ),
    "conv_projection in training": Call(
        lambda: tokens() | {"grid": GRID, "convs": [conv(), conv()], "training": True},
        {"convs": each(parts(CONV))},
        ck.conv_projection,
    ),
    "coverage": Call(
        lambda: {"model": create_model(ONE_STAGE).eval(), "inputs": randn(1, 3, 16, 16)},
        {"model": module(), "inputs": optional(of_values("a", 3, [], ()))},
    ),
    "depthwise_conv_gelu": Call(
        lambda: (
            tokens() | {"grid": GRID, "weight": randn(C, 1, 3, 3), "bias": randn(C), "approximate": "none"}
        ),
        {"x": TOKENS, "grid": grid((3, 3), [H, W]), **DEPTHWISE, "approximate": choice()},
    ),
    "gather_add_layer_norm": Call(
        lambda: (
            tokens()
            | {"rows": rows(), "branch": randn(B, 3, C), "weight": randn(C), "bias": randn(C)}
            | {"eps": 1e-5, "dtype": None}
        ),
        {"x": TOKENS, "rows": ROWS, "branch": tensor((B, 2, C), (C,)), "weight": BIAS, "bias": BIAS}
        | {"eps": EPS, "dtype": optional(dtype())},
    ),
    "gather_rows": Call(lambda: tokens() | {"rows": rows()}, {"x": TOKENS, "rows": ROWS}),
    "gelu": Call(
        lambda: tokens() | {"approximate": "none"}, {"x": tensor(first=True), "approximate": choice()}
    ),
    "gelu_quantize": Call(
        lambda: (
            tokens()
            | {"bias": randn(C), "approximate": "none", "scale": torch.tensor(0.1)}
            | {"dtype": torch.int8}
        ),
        {"x": X, "bias": BIAS, "approximate": choice(), **INT8},
    ),
    "graphed": Call(
        lambda: {"model": nn.Linear(2, 2), "most": 8},
        {"model": of_values("a", 3, nn.Linear), "most": of_values("a", True, 1.5, 0, -1, [1])},
    ),
    "layer_norm": Call(
        lambda: (
            tokens() | {"weight": randn(C), "bias": randn(C), "eps": 1e-5, "dtype": None, "shift": randn(C)}
        ),
        {"x": X, "weight": BIAS, "bias": BIAS, "eps": EPS, "dtype": optional(dtype()), "shift": BIAS},
    ),
    "layer_norm_gelu": Call(
        lambda: tokens() | {"weight": randn(C), "bias": randn(C), "eps": 1e-5, "approximate": "none"},
        {"x": X, "weight": BIAS, "bias": BIAS, "eps": EPS, "approximate": choice()},
    ),
    "layer_norm_mlp": Call(
        lambda: (
            tokens()
            | {"norm_weight": randn(C), "norm_bias": randn(C), "fc1_weight": randn(3, C)}
            | {"fc1_bias": randn(3), "fc2_weight": randn(C, 3), "fc2_bias": randn(C), "eps": 1e-5}
            | {"approximate": "none", "shift": randn(C)}
        ),
        # The two vectors of LayerNorm are called weight and bias in messages.
        {"x": X, "norm_weight": optional(vector()), "norm_bias": optional(vector())}
        | {"fc1_weight": tensor((C,), (3, 3)), "fc1_bias": optional(tensor((C,)))}
        | {"fc2_weight": tensor((C,), (3, 3)), "fc2_bias": optional(tensor((3,)))}
        | {"eps": EPS, "approximate": choice(), "shift": BIAS},
    ),
    "layer_norm_quantize": Call(
        lambda: (
            tokens()
            | {"weight": randn(C), "bias": randn(C), "eps": 1e-5, "shift": randn(C)}
            | {"scale": torch.tensor(0.1), "dtype": torch.int8}
        ),
        {"x": X, "weight": BIAS, "bias": BIAS, "eps": EPS, "shift": BIAS, **INT8},
    ),
    "linear": Call(lambda: tokens() | layer()._asdict(), {"x": XL, "weight": WEIGHT, "bias": BIAS}),
    "linear_add": Call(
        lambda: tokens() | layer()._asdict() | {"residual": randn(B, T, C), "inplace": False},
        {"x": XL, "weight": WEIGHT, "bias": BIAS, "residual": tensor((C,), (B, T, 3)), **INPLACE},
    ),
    "linear_add_layer_norm": Call(
        lambda: (
            tokens()
            | layer()._asdict()
            | {"residual": randn(B, T, C), "norm_weight": randn(C)}
            | {"norm_bias": randn(C), "eps": 1e-5, "shift": randn(C), "inplace": False}
        ),
        {"x": XL, "weight": WEIGHT, "bias": BIAS, "residual": tensor((C,), (B, T, 3))}
        | {"norm_weight": BIAS, "norm_bias": BIAS, "eps": EPS, "shift": BIAS, **INPLACE},
    ),
    "linear_gelu": Call(
        lambda: tokens() | layer()._asdict() | {"approximate": "none"},
        {"x": XL, "weight": WEIGHT, "bias": BIAS, "approximate": choice()},
    ),
    "linear_int8": Call(
        lambda: (
            tokens()
            | quantized_layer()._asdict()
            | {"approximate": None, "residual": randn(B, T, C)}
            | {"dtype": None}
        ),
        {"x": XL, **QUANTIZED, "approximate": optional(choice())}
        | {"residual": optional(tensor((C,), (B, T, 3))), "dtype": optional(dtype())},
    ),
    "linear_int8 of rows": Call(
        lambda: {
            "x": ck.quantize_rows(randn(T, C)),
            **quantized_layer()._replace(input_scale=None)._asdict(),
        },
        {"x": also_named(parts(QUANTIZED_ROWS), "scales", "weight")},
        ck.linear_int8,
    ),
    "merge_convolutions": Call(
        lambda: {"convs": [conv(), conv()]}, {"convs": also_named(CONVS, "bn_weight")}
    ),
    "quantize": Call(
        lambda: (
            {"model": create_model(ONE_STAGE).eval(), "calibration": None, "scheme": "dynamic"}
            | {"keep_float": (), "embeddings": False, "dtype": torch.int8, "progress": False}
        ),
        {"model": module(), "calibration": optional(of_values(3, True, [], ["a"], torch.ones(2)))}
        | {"scheme": choice(), "keep_float": strings(), "embeddings": flag(), "dtype": dtype()}
        | {"progress": flag()},
    ),
    "quantize_rows": Call(
        lambda: tokens() | {"scale": torch.tensor(0.1), "dtype": torch.int8}, {"x": X, **INT8}
    ),
    "refresh": Call(lambda: {"model": nn.Linear(2, 2)}, {"model": of_values("a", 3, nn.Linear)}),
    "restore": Call(lambda: {"model": nn.Linear(2, 2)}, {"model": of_values("a", 3, nn.Linear)}),
    "scatter_rows": Call(
        lambda: (
            tokens() | {"rows": rows(), "values": randn(B, 3, C), "branch": randn(B, 3, C), "inplace": False}
        ),
        {
            "x": TOKENS,
            "rows": ROWS,
            "values": tensor((B, 2, C)),
            "branch": optional(tensor((C,))),
            **INPLACE,
        },
    ),
    "transformer_block": Call(
        lambda: tokens() | {"grid": GRID, "block": block(), "rows": rows(), "scores": None, "inplace": False},
        {"x": TOKENS, "grid": grid((3, 3), [H, W]), "block": parts(BLOCK)}
        | {
            "rows": optional(tensor((B,), (3, 3), (B, T + 1))),
            "scores": optional(choice()),
            **INPLACE,
        },
    ),
    "transformer_block of SegFormer": Call(
        lambda: tokens() | {"grid": GRID, "block": pyramid(), "rows": None, "scores": None, "inplace": False},
        {"x": TOKENS, "grid": grid((3, 3), [H, W]), "block": parts(PYRAMID), **INPLACE},
        ck.transformer_block,
    ),
    "verify": Call(
        lambda: (
            {"model": create_model(ONE_STAGE).eval(), "inputs": randn(1, 3, 16, 16), "rounds": 1}
            | {"progress": False}
        ),
        {"model": module(), "inputs": of_values("a", 3, [], ()), "rounds": of_values("a", True, 1.5, 0, -1)}
        | {"progress": flag()},
    ),
    # Classes and their methods.
    "LinearInt8": Call(
        lambda: {"in_features": 2, "out_features": 3, "bias": True, "static": False, "dtype": torch.int8},
        {
            "in_features": integer(),
            "out_features": integer(),
            "bias": flag(),
            "static": flag(),
            "dtype": dtype(),
        },
    ),
    "LinearInt8.from_float": Call(
        lambda: {"linear": nn.Linear(2, 2), "input_scale": None, "dtype": torch.int8},
        {"linear": of_values("a", 3, nn.Linear, nn.Conv2d(2, 2, 1)), "input_scale": optional(positive())}
        | {"dtype": dtype()},
        ck.LinearInt8.from_float,
    ),
    "ConvBatchNorm.from_modules": Call(
        lambda: {"conv": nn.Conv2d(2, 2, 3, groups=2, bias=False), "bn": nn.BatchNorm2d(2)},
        {"conv": of_values("a", 3, nn.Conv2d, nn.Linear(2, 2), nn.Conv2d(2, 2, 3))}
        | {"bn": of_values("a", 3, nn.BatchNorm2d, nn.LayerNorm(2), nn.Linear(2, 2))},
        ck.ConvBatchNorm.from_modules,
    ),
}

#: Public names without arguments, or that make nothing of what they are given.
OTHERS = ["AttentionMap", "BackendUnavailable", "__version__", "doctor", "fallbacks", "reference"]
OTHERS += ["register_attention", "release_memory", "use_backend"]


def test_every_public_name_and_argument_has_an_entry():
    assert {*ck.__all__} <= {*CALLS, *FIELDS, *OTHERS}
    for name in {*ck.__all__} & {*FIELDS}:
        assert getattr(ck, name)._fields == tuple(FIELDS[name]), name
    for name in {*ck.__all__} & {*CALLS}:
        assert sorted(CALLS[name].kinds) == sorted(names_of(getattr(ck, name))), name
    for name in OTHERS:
        assert not inspect.isfunction(getattr(ck, name)) or not names_of(getattr(ck, name)), name


@pytest.mark.parametrize("name", CALLS)
def test_bad_arguments_are_refused_by_name(name):
    call = CALLS[name]
    function = call.function or getattr(ck, name)
    with torch.no_grad(), ck.use_backend("native", "reference"):
        if name != "verify":  # which runs for seconds
            function(**call.arguments())  # what is remembered of it must not let bad arguments pass
        found = problems(name, call, function)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("kind", [float, np.float32, np.float64, torch.tensor])
@pytest.mark.parametrize("backend", ["native", "reference"])
@torch.no_grad()
def test_numbers_of_every_kind_are_taken(kind, backend):
    x, q = randn(B, T, C), randn(B, T, HEADS, 4)
    with ck.use_backend(backend, "reference"):
        expected = ck.layer_norm(x, eps=0.25), ck.attention(q, q, q, scale=0.25)
        results = ck.layer_norm(x, eps=kind(0.25)), ck.attention(q, q, q, scale=kind(0.25))
        convs = [conv()._replace(eps=0.25), conv()._replace(eps=kind(0.25), momentum=kind(0.25))]
        outputs = ck.conv_projection(
            x, (np.int64(H), torch.tensor(W)), [convs[0], convs[0]._replace(eps=kind(0.25))], training=False
        )
    assert all(map(torch.equal, results, expected))
    assert torch.equal(*outputs)


def test_a_padding_is_bounded_by_the_map_and_the_kernel():
    x, one = randn(1, T, C), conv()
    (y,) = ck.conv_projection(x, GRID, [one._replace(padding=W + 2)], training=False)
    assert y.shape[1] == (H + 2 * W + 2) * (W + 2 * W + 2)
    with pytest.raises(
        ValueError, match=r"convs\[0\].padding: got 65, expected at most 64, for a map of 4×5"
    ):
        ck.conv_projection(x, GRID, [one._replace(padding=65)], training=False)
    wide = one._replace(padding=2**20, dilation=2**20)  # as large as the map
    (y,) = ck.conv_projection(x, GRID, [wide], training=False)
    assert y.shape == x.shape
    with pytest.raises(ValueError, match="expected fewer than 2\\*\\*31"):
        ck.conv_projection(x, GRID, [wide._replace(weight=randn(C, 1, 2, 2))], training=False)


@pytest.mark.parametrize("names", [(), (None,), ("fast",), (1,), ("auto", "native")], ids=str)
def test_unknown_backends_are_refused(names):
    with pytest.raises(ValueError, match="backend: got"):
        ck.use_backend(*names)
