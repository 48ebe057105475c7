"""Every public argument of cvt_kernels is checked by name; a new one without an entry here fails a test."""

import inspect
from typing import get_type_hints

import numpy as np
import pytest
import torch
from torch import nn

import cvt_kernels as ck
from cvt_kernels import backends, records
from cvt_kernels.ops.cards import card_of, make
from cvt_kernels.ops.transformer_block import transformer_block
from cvt_kernels.records import DepthwiseConv, Linear, Norm, QuantizedLinear, Reduction, TransformerBlock
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
    of_type,
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
    return Norm(randn(C), randn(C))


def layer(outputs=C, inputs=C):
    return Linear(randn(outputs, inputs), randn(outputs))


def quantized_layer():
    return QuantizedLinear(torch.ones(C, C, dtype=torch.int8), torch.ones(C), randn(C))


def block():
    linears = layer(), layer(), quantized_layer()
    convs = conv(), conv(), conv()
    return TransformerBlock(norm(), convs, linears, HEADS, 0.5, layer(), norm(), layer(), "none", layer())


def pyramid():
    reduction = Reduction(randn(C, C, 2, 2), randn(C), norm())
    conv = DepthwiseConv(randn(C, 1, 3, 3), randn(C))
    return TransformerBlock(
        norm(), reduction, (layer(),) * 3, HEADS, 0.5, layer(), norm(), layer(), "none", layer(), conv
    )


def position():
    table = randn(HEADS, 2 * H - 1, 2 * W - 1)
    return ck.PositionBias(table, GRID, GRID, 1, torch.arange(T).expand(B, T).contiguous())


def rows():
    return torch.arange(3).expand(B, 3).contiguous()


# Calls ----------------------------------------------------------------------------------------------------

#: What most operators take by these names, and its kind.
USUAL = {
    "x": (lambda: randn(B, T, C), tensor((), (0,), first=True)),
    "residual": (lambda: randn(B, T, C), tensor((C,), (B, T, 3))),
    "approximate": (lambda: "none", choice()),
    "dtype": (lambda: None, optional(dtype())),
    "inplace": (lambda: False, flag()),
    "training": (lambda: False, flag()),
    "grid": (lambda: GRID, grid((3, 3))),
    "convs": (lambda: [conv(), conv()], each(parts(IN_EVALUATION), (), [()])),
    "rows": (rows, tensor((B,), (3, 3))),
    "model": (lambda: create_model(ONE_STAGE).eval(), module()),
    "progress": (lambda: False, flag()),
}
#: Those of tokens by image and of attention.
TOKENS = {"x": (USUAL["x"][0], tensor((), (C,), (B, C), first=True))}
HEADS_SHAPE = (T, HEADS, 4)
ATTENTION = {
    "q": (lambda: randn(B, *HEADS_SHAPE), tensor(HEADS_SHAPE, (B, 0, HEADS, 4), (B, T, 0, 4), first=True)),
    "k": (lambda: randn(B, *HEADS_SHAPE), tensor(HEADS_SHAPE, (B, T, HEADS, 3))),
    "v": (lambda: randn(B, *HEADS_SHAPE), tensor(HEADS_SHAPE, (B, T, HEADS, 3), (1, T, HEADS, 4))),
    "scale": (lambda: 0.5, optional(number())),
    "bias": (lambda: randn(T, T), optional(tensor((3,), (T, 3)))),
    "position": (position, optional(parts(POSITION))),
    "dropout_p": (lambda: 0.0, number(-0.1, 1.0, 2)),
}
BLOCKS = TOKENS | {"grid": (lambda: GRID, grid((3, 3), [H, W]))}


def public(name):
    """Returns a public function, or an operator that is none."""
    return getattr(ck, name, None) or backends.operators[name].public


def call_of(function, **others):
    """Returns a good call of a function, with the usual arguments and others by their names."""
    given = {name: (USUAL | others)[name] for name in names_of(function)}
    return Call(
        lambda: {name: make() for name, (make, _) in given.items()},
        {name: kind for name, (_, kind) in given.items()},
        function,
    )


def call_by_card(operator):
    """Returns a good call of an operator, an example with other examples' tensors where it has none."""
    usual = card_of(operator).settings(card_of(operator).examples["usual"])

    def arguments(settings):
        return make(operator, settings).call.record._asdict()

    def missing(settings):
        return sum(value is None for value in arguments(settings).values())

    for example in card_of(operator).examples.values():
        usual |= example if missing(usual | example) < missing(usual) else {}
    hints, good = get_type_hints(public(operator)), arguments(usual)
    kinds = {
        name: SPECIAL.get(name) or of_type(hints[name], value, wrong_of(operator, name, value), first=not i)
        for i, (name, value) in enumerate(good.items())
    }
    return Call(lambda: arguments(usual), kinds, public(operator))


def wrong_of(operator, name, value):
    """Returns the wrong shapes of an operator's tensor; None for the usual ones."""
    card, is_first = card_of(operator), name == next(iter(backends.operators[operator].signature.parameters))
    if name in card.wrong or not is_first:
        return card.wrong.get(name)
    if "leading" in card.choices:  # any number of dimensions
        return ((),) if "outputs" in card.choices else ((), (0,))
    return [value.shape[i:] for i in range(1, value.ndim + 1)]


LINEARS = each(parts(LINEAR), [], [1, 2], [None, None], [(), ()])
#: Arguments by names that say more than their types.
SPECIAL = {
    "convs": USUAL["convs"][1],
    "eps": positive(),
    "grid": grid((3, 3), [3, 4]),
    "linears": also_named(LINEARS, "linears"),
    "others": each(each(tensor((C,), (3, 5)), ()), [()]),
    "padding": PADDING,
    "stride": STRIDE,
}
SELECTED = of_values("a", 1.5, [1.5], [], [T], -T - 1, [True], torch.ones(2), [None], ["a"])
OPERATORS = {
    "accelerate": {"freeze": (lambda: False, optional(flag()))},
    "attention": ATTENTION,
    "attention_map": ATTENTION
    | {
        "rows": (lambda: 0, SELECTED),
        "grid": (lambda: GRID, optional(grid((3, 3)))),
        "query_grid": (lambda: GRID, optional(grid((3, 3)))),
    },
    "conv_linear": TOKENS | {"linears": (lambda: [layer(), layer()], also_named(LINEARS, "linears"))},
    "coverage": {"inputs": (lambda: randn(1, 3, 16, 16), optional(of_values("a", 3, [], ())))},
    "graphed": {
        "model": (lambda: nn.Linear(2, 2), of_values("a", 3, nn.Linear)),
        "most": (lambda: 8, of_values("a", True, 1.5, 0, -1, [1])),
    },
    "linear_int8": {
        name: (lambda name=name: getattr(quantized_layer(), name), kind) for name, kind in QUANTIZED.items()
    }
    | {
        "x": (USUAL["x"][0], tensor((), first=True)),
        "approximate": (lambda: None, optional(choice())),
        "residual": (USUAL["residual"][0], optional(tensor((C,), (B, T, 3)))),
    },
    "merge_convolutions": {"convs": (USUAL["convs"][0], also_named(USUAL["convs"][1], "bn_weight"))},
    "quantize": {
        "calibration": (lambda: None, optional(of_values(3, True, [], ["a"], torch.ones(2)))),
        "keep_float": (lambda: (), strings()),
        "min_sqnr": (lambda: 20.0, number()),
        "embeddings": (lambda: False, flag()),
        "dtype": (lambda: torch.int8, dtype()),
    },
    "refresh": {"model": (lambda: nn.Linear(2, 2), of_values("a", 3, nn.Linear))},
    "resized_argmax": {
        "logits": (lambda: randn(B, 3, H, W), tensor((3, H, W), (B, 0, H, W), (B, 3, 0, W), first=True)),
        "size": (lambda: (4, 5), of_values("a", 3, (4,), (4, 0), (4, -1), (4.0, 5), None)),
    },
    "restore": {"model": (lambda: nn.Linear(2, 2), of_values("a", 3, nn.Linear))},
    "transformer_block": BLOCKS
    | {
        "block": (block, parts(BLOCK)),
        "rows": (rows, optional(tensor((B,), (3, 3), (B, T + 1)))),
        "scores": (lambda: None, optional(choice())),
    },
    "transformer_blocks": BLOCKS | {"blocks": (lambda: [block(), block()], each(parts(BLOCK)))},
    "verify": {
        "inputs": (lambda: randn(1, 3, 16, 16), of_values("a", 3, [], ())),
        "rounds": (lambda: 1, of_values("a", True, 1.5, 0, -1)),
        "evaluation_only": (lambda: False, flag()),
    },
    "LinearInt8": {
        "in_features": (lambda: 2, integer()),
        "out_features": (lambda: 3, integer()),
        "bias": (lambda: True, flag()),
        "dtype": (lambda: torch.int8, dtype()),
    },
}

CALLS = {name: call_of(public(name), **others) for name, others in OPERATORS.items()}
CALLS |= {name: call_by_card(name) for name in backends.operators if name not in OPERATORS}
CALLS |= {
    "conv_projection in training": Call(
        lambda: {"x": randn(B, T, C), "grid": GRID, "convs": [conv(), conv()], "training": True},
        {"convs": each(parts(CONV))},
        ck.conv_projection,
    ),
    "linear_int8 of rows": Call(
        lambda: {
            "x": ck.quantize_rows(randn(T, C)),
            **quantized_layer()._asdict(),
        },
        {"x": also_named(parts(QUANTIZED_ROWS), "scales", "weight")},
        ck.linear_int8,
    ),
    "transformer_block of SegFormer": Call(
        lambda: {"x": randn(B, T, C), "grid": GRID, "block": pyramid(), "inplace": False},
        {name: kind for name, (_, kind) in BLOCKS.items()} | {"block": parts(PYRAMID), "inplace": flag()},
        transformer_block,
    ),
    "LinearInt8.from_float": Call(
        lambda: {"linear": nn.Linear(2, 2), "dtype": torch.int8},
        {"linear": of_values("a", 3, nn.Linear, nn.Conv2d(2, 2, 1)), "dtype": dtype()},
        ck.LinearInt8.from_float,
    ),
    "tune": Call(
        lambda: {"model": nn.Sequential()},
        {"model": of_values("a", 3, None, nn.Linear)},
        lambda model: ck.tune(model, randn(1, 2)),
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
OTHERS += ["register_layers", "release_memory", "use_backend"]


def test_every_public_name_and_argument_has_an_entry():
    assert {*ck.__all__} <= {*CALLS, *FIELDS, *OTHERS}
    for name in FIELDS:
        assert getattr(records, name)._fields == tuple(FIELDS[name]), name
    for name in {*ck.__all__, *backends.operators} & {*CALLS}:
        assert sorted(CALLS[name].kinds) == sorted(names_of(public(name))), name
    for name in OTHERS:
        assert not inspect.isfunction(getattr(ck, name)) or not names_of(getattr(ck, name)), name


@pytest.mark.parametrize("name", CALLS)
def test_bad_arguments_are_refused_by_name(name):
    call = CALLS[name]
    function = call.function
    with torch.no_grad(), ck.use_backend("cpu", "reference"):
        if name != "verify":  # which runs for seconds
            function(**call.arguments())  # what is remembered of it must not let bad arguments pass
        found = problems(name, call, function)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("kind", [float, np.float32, np.float64, torch.tensor])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
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
    (y,) = ck.conv_projection(x, GRID, [one._replace(padding=W + 4)], training=False)
    assert y.shape[1] == (H + 2 * W + 6) * (W + 2 * W + 6)
    with pytest.raises(
        ValueError, match=r"convs\[0\].padding: got 65, expected at most 64, for a map of 4×5"
    ):
        ck.conv_projection(x, GRID, [one._replace(padding=65)], training=False)
    wide = one._replace(padding=2**20, dilation=2**20)  # as large as the map
    (y,) = ck.conv_projection(x, GRID, [wide], training=False)
    assert y.shape == x.shape
    with pytest.raises(ValueError, match="expected fewer than 2\\*\\*31"):
        ck.conv_projection(x, GRID, [wide._replace(weight=randn(C, 1, 2, 2))], training=False)
