"""Stages that are served as one: accelerate(freeze=True)."""

import copy
import dataclasses
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

import cvt_kernels as ck
from cvt import create_model
from cvt.factory import randomize
from cvt_kernels import backends
from cvt_kernels.acceleration import freezing, stages
from tests.checks import assert_accurate, not_built
from tests.upstream import (
    KERNELS_FIRST,
    UPSTREAMS,
    huggingface,
    images,
    in_float64,
    logits,
    microsoft,
    microsoft_plain,
    ours,
    relative,
)

MODELS = [*UPSTREAMS, ours]


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


def frozen(model):
    """Returns a frozen copy of a model in evaluation."""
    return ck.accelerate(copy.deepcopy(model).eval(), freeze=True)


def stages_of(model):
    return [stage for _, stage, _ in freezing.find_stages(model)]


def rows_of_stages(model, inputs=None):
    paths = {path for path, _, _ in freezing.find_stages(model)}
    return [row for row in ck.coverage(model, inputs) if row.path in paths]


def served(model, x):
    """Returns the logits of a model and how many of its stages were served as one."""
    before = len(calls)
    out = logits(model(x))
    return out, len(calls) - before


calls = []


@pytest.fixture(autouse=True)
def _counted(monkeypatch):
    """Counts the stages that are served as one, in ``calls``."""
    calls.clear()

    def serve(*args):
        calls.append(args)
        return stages.serve(*args)

    monkeypatch.setattr(freezing, "serve", serve)


# The same results ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(64, 64), (45, 70)], ids=str)
@pytest.mark.parametrize("make", MODELS)
def test_results_are_as_accurate(make, size):
    own = make().eval()
    x = images(3, *size)
    exact = logits(in_float64(copy.deepcopy(own))(x.double()))
    with ck.use_backend(*KERNELS_FIRST):
        out, count = served(frozen(own), x)
    assert count == 3
    assert_accurate(out, logits(own(x)), exact)


def test_tritons_kernels_serve_whole_stages(monkeypatch):
    """The launches are those of a GPU, whose biases are in the stream from its start."""
    monkeypatch.setattr(freezing, "fold", lambda parts, device_type: stages.fold(parts, "cuda"))
    own = microsoft(embed_dims=(16, 32, 80), num_heads=(1, 2, 5)).eval()
    fused = frozen(own)
    x = images(1, 48, 32)
    exact = logits(in_float64(copy.deepcopy(own))(x.double()))
    asked = set()

    def noting(operator, backend, implementation):
        def serve(call):
            asked.add((operator, backend))
            return implementation.load().function(call)

        return dataclasses.replace(implementation, function=serve)

    with backends.replaced(noting), ck.use_backend("triton", "native", "reference"):
        out, count = served(fused, x)
    by_triton = {"conv_embedding", "conv_linear", "attention", "linear_add", "layer_norm_mlp"}
    by_triton |= {"linear_add_layer_norm", "linear_gelu"}
    assert asked == {(operator, "triton") for operator in by_triton} | {("layer_norm", "native")}
    assert count == 3
    assert_accurate(out, logits(own(x)), exact)


@pytest.mark.parametrize("backend", ["composed", "onednn"])
@pytest.mark.parametrize("make", MODELS)
def test_a_block_is_one_operator_on_a_cpu(make, backend):
    own = make().eval()
    fused = frozen(own)
    x = images(2)
    exact = logits(in_float64(copy.deepcopy(own))(x.double()))
    asked = []

    def noting(operator, backend, implementation):
        def serve(call):
            asked.append((operator, backend))
            return implementation.load().function(call)

        return dataclasses.replace(implementation, function=serve)

    with backends.replaced(noting), ck.use_backend(backend, "native", "sdpa"):
        out, count = served(fused, x)
    blocks = sum(len(parts.blocks) for parts in (folded.parts for folded, *_ in calls))
    assert count == 3
    assert asked.count(("transformer_block", backend)) == blocks > 3
    assert_accurate(out, logits(own(x)), exact, floor=4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("make", [huggingface, microsoft_plain, ours])
def test_dtypes(make, dtype):
    own = make().eval().to(dtype)
    x = images(dtype=dtype)
    exact = logits(in_float64(copy.deepcopy(own))(x.double()))
    out, count = served(frozen(own), x)
    assert count == 3
    assert out.dtype == dtype
    # A stream that has its biases early rounds them with other numbers.
    error, usual = (out.double() - exact).abs().max(), (logits(own(x)).double() - exact).abs().max()
    assert error <= 3 * usual + 4 * torch.finfo(dtype).eps * exact.abs().max()


def test_everything_that_cvt_can_be_is_folded():
    model = create_model(
        "cvt_13",
        embed_dims=(16, 80, 96),
        num_heads=(1, 5, 6),
        depths=(2, 2, 2),
        num_classes=10,
        layer_scale=0.3,
        embed_norm="batch_layer_norm",
        cls_token=(False, True, True),
        stride_kv=(1, 2, 3),
        qkv_bias=False,
        pool="avg",
        activation="gelu_tanh",
    )
    randomize(model)
    model.eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    x = images()
    exact = logits(copy.deepcopy(model).double()(x.double()))
    out, count = served(frozen(model), x)
    assert count == 3
    assert relative(out.double(), exact) < 1e-5


def test_microsofts_stage_returns_the_class_token_and_a_map():
    own = microsoft().eval()
    fused = frozen(own)
    x = images()
    for mine, theirs in zip(stages_of(fused), stages_of(own), strict=True):
        (a, token), (b, expected) = mine(x), theirs(x)
        assert relative(a, b) < 1e-5
        assert a.stride() == b.stride()
        assert (token is None) == (expected is None)
        x = b
    assert relative(token, expected) < 1e-5


def test_nothing_of_the_users_is_overwritten():
    own = huggingface().eval()
    fused = frozen(own)
    x = images()
    given = x.clone()
    hidden = fused(x, output_hidden_states=True).hidden_states
    kept = [state.clone() for state in hidden]
    fused(images(2) + 1)
    assert torch.equal(x, given)
    assert all(map(torch.equal, hidden, kept))
    expected = own(x, output_hidden_states=True).hidden_states
    assert all(relative(a, b) < 1e-5 for a, b in zip(hidden, expected, strict=True))
    state = fused.state_dict()
    assert all(torch.equal(state[name], value) for name, value in own.state_dict().items())


# What is watched -------------------------------------------------------------------------------------------


def bias_in_place(model):
    next(m for n, m in model.named_parameters() if "fc2.bias" in n or n.endswith("output.dense.bias")).add_(1)


def class_token_in_place(model):
    token = next(p for name, p in model.named_parameters() if name.endswith("cls_token"))
    token.add_(torch.arange(token.numel()) % 3)


def norm_bias_data(model):
    parameter = stages_of(model)[0].get_parameter("patch_embed.norm.bias")
    parameter.data = parameter.data + 1


def weight_in_place(model):
    stages_of(model)[1].get_parameter("blocks.0.attn.proj_k.weight").mul_(2)


def weight_data(model):
    parameter = stages_of(model)[2].get_parameter("blocks.0.mlp.fc1.weight")
    parameter.data = parameter.data * 2


def narrowed_data(model):
    mlp = stages_of(model)[1].get_submodule("blocks.0.mlp")
    hidden = mlp.fc1.out_features // 2
    for parameter in mlp.fc1.parameters():
        parameter.data = parameter.data[:hidden]
    mlp.fc2.weight.data = mlp.fc2.weight.data[:, :hidden]


def narrowed_kernel(model):
    weight = stages_of(model)[0].get_parameter("patch_embed.proj.weight")
    weight.data = weight.data[:, :, :5, :5]


def another_parameter(model):
    linear = stages_of(model)[1].get_submodule("blocks.0.mlp.fc1")
    linear.weight = nn.Parameter(linear.weight * 2)


def another_module(model):
    attn = stages_of(model)[1].get_submodule("blocks.0.attn")
    attn.proj = copy.deepcopy(attn.proj_q)


def running_mean(model):
    stages_of(model)[0].get_buffer("blocks.0.attn.conv_proj_v.bn.running_mean").add_(1)


def another_eps(model):
    stages_of(model)[1].get_submodule("blocks.0.norm1").eps = 1.0


def loaded(model):
    state = {name: t * 1.1 if t.is_floating_point() else t for name, t in model.state_dict().items()}
    model.load_state_dict(state)


def loaded_by_assignment(model):
    state = {name: t * 1.1 if t.is_floating_point() else t for name, t in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


CHANGES = [
    class_token_in_place,
    norm_bias_data,
    narrowed_kernel,
    another_parameter,
    another_module,
    running_mean,
    another_eps,
    loaded,
    loaded_by_assignment,
]


@pytest.mark.parametrize("change", [bias_in_place, *CHANGES])
def test_changed_weights_are_noticed(change):
    own = microsoft().eval()
    fused = frozen(own)
    x = images()
    before = served(fused, x)[0]
    change(own)
    change(fused)
    out, count = served(fused, x)
    assert count == 3
    assert relative(before, logits(own(x))) > 1e-3
    assert relative(out, logits(own(x))) < 1e-5


def transposed_data(model):
    """Another layout of the same memory, which PyTorch does not count."""
    linear = stages_of(model)[1].get_submodule("blocks.0.attn.proj")
    assert len(set(linear.weight.shape)) == 1
    linear.weight.data = linear.weight.data.t()


def step_of_an_optimizer(model):
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(parameters, lr=0.1, fused=True).step()


WEIGHTS = [weight_in_place, weight_data, narrowed_data, transposed_data, step_of_an_optimizer]


@pytest.mark.skipif(not_built(), reason="there is no C++ compiler, hence no extension")
@pytest.mark.parametrize("backend", ["onednn", "native"])
@pytest.mark.parametrize("change", [*WEIGHTS, bias_in_place, *CHANGES])
def test_changed_weights_are_packed_anew(change, backend):
    own = microsoft().eval()
    fused = frozen(own)
    x = images()
    with ck.use_backend(backend, "native", "reference"):
        for _ in range(2):
            before = served(fused, x)[0]
        change(fused)
        outs = [served(fused, x)[0] for _ in range(2)]
    assert torch.equal(*outs)
    out = outs[0]
    change(own)
    expected = logits(own(x))
    assert relative(before, expected) > 1e-3
    assert relative(out, expected) < 1e-5


def test_moving_to_another_dtype_is_noticed():
    fused = frozen(ours())
    x = images()
    before = served(fused, x)[0]
    out, count = served(fused.double(), x.double())
    assert count == 3
    assert out.dtype == torch.float64
    assert (out - before).abs().max() < 1e-4


def hook_inside(model):
    model.get_submodule("stage1.blocks.0.norm2").register_forward_hook(lambda *args: None)


def backward_hook_inside(model):
    model.get_submodule("stage1.blocks.0.mlp").register_full_backward_hook(lambda *args: None)


def own_forward_inside(model):
    linear = model.get_submodule("stage1.blocks.0.attn.proj_q")
    linear.forward = lambda x: nn.Linear.forward(linear, x) * 2


def adapter_inside(model):
    mlp = model.get_submodule("stage1.blocks.0.mlp")
    mlp.fc1 = nn.Sequential(mlp.fc1, nn.Identity())


def batch_norm_in_training(model):
    model.get_submodule("stage1.blocks.0.attn.conv_proj_v.bn").train()


def another_padding(model):
    model.get_submodule("stage1.blocks.0.attn.conv_proj_q.conv").padding_mode = "reflect"


def norm_of_another_kind(model):
    model.get_submodule("stage1.blocks.0").norm1 = nn.Identity()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (hook_inside, "blocks.0 is not as upstream has it: norm2 has forward hooks"),
        (backward_hook_inside, "blocks.0 is not as upstream has it: mlp has backward hooks"),
        (own_forward_inside, "blocks.0.attn.proj_q has a forward of its own"),
        (adapter_inside, "a linear layer is not a plain nn.Linear"),
        (batch_norm_in_training, "a module within it is in training mode"),
        (another_padding, "a convolution pads by 'reflect'"),
        (norm_of_another_kind, "norm1 is a Identity, expected LayerNorm"),
    ],
)
def test_a_stage_whose_modules_matter_runs_them(change, reason):
    own = ours().eval()
    fused = frozen(own)
    x = images(4)
    logits(fused(x))
    for model in (own, fused):
        change(model)
    out, count = served(fused, x)
    assert count == 2
    assert relative(out, own(x)) < 1e-5
    row = rows_of_stages(fused)[1]
    assert not row.fused
    assert reason in row.reason


@pytest.mark.parametrize("place", ["pos_drop", "blocks.0.attn.proj_drop", "blocks.0.drop_path"])
@pytest.mark.parametrize("module", [nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU()], ids=repr)
@pytest.mark.parametrize("make", [microsoft, ours])
def test_work_in_another_place_is_done(make, module, place):
    own = make().eval()
    fused = frozen(own)
    x = images()
    served(fused, x)
    for model in (own, fused):
        stage = stages_of(model)[1]
        parent, _, name = place.rpartition(".")
        setattr(stage.get_submodule(parent), name, copy.deepcopy(module))
    out, count = served(fused, x)
    assert count == 2
    assert relative(out, logits(own(x))) < 1e-5
    reason = f"{place} is a {type(module).__name__}, which upstream does not have there"
    assert rows_of_stages(fused)[1].reason == reason


def test_a_hook_on_a_stage_fires_and_leaves_it_served():
    fused = frozen(ours())
    seen = []
    stages_of(fused)[1].register_forward_hook(lambda module, args, out: seen.append(out[0].shape))
    assert served(fused, images())[1] == 3
    assert len(seen) == 1


def test_a_hook_on_all_modules_sees_all_of_them():
    own, seen = ours().eval(), []
    fused = frozen(own)
    with nn.modules.module.register_module_forward_hook(lambda module, *rest: seen.append(module)):
        assert served(fused, images())[1] == 0
        assert "hook on all modules" in rows_of_stages(fused)[0].reason
    assert len(seen) > 50


# Not for training -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", MODELS)
def test_it_refuses_to_train(make):
    fused = frozen(make())
    fused.train()
    with pytest.raises(RuntimeError, match=r"is frozen for serving and cannot train.*restore"):
        fused(images())
    assert {row.reason for row in rows_of_stages(fused)} == {"is in training mode"}
    assert served(fused.eval(), images())[1] == 3


@pytest.mark.parametrize("make", MODELS)
def test_gradients_are_those_of_the_blocks(make):
    own = make().eval()
    fused = frozen(own)
    x = images()
    with torch.enable_grad():
        with pytest.warns(RuntimeWarning, match="gradients are recorded"):
            logits(fused(x)).sum().backward()
        logits(own(x)).sum().backward()
    assert calls == []
    for mine, theirs in zip(fused.parameters(), own.parameters(), strict=True):
        assert (mine.grad - theirs.grad).abs().max() <= 1e-4 * max(theirs.grad.abs().max(), 1)


def test_without_parameters_that_require_gradients_none_are_recorded():
    fused = frozen(ours()).requires_grad_(False)
    with torch.enable_grad():
        assert served(fused, images())[1] == 3


def test_under_autocast_the_blocks_run():
    fused, own = frozen(huggingface()), huggingface().eval()
    with torch.autocast("cpu", torch.bfloat16):
        out, count = served(fused, images())
    assert count == 0
    assert relative(out.float(), logits(own(images()))) < 0.1


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(2, 4, 64, 64),
        torch.randn(2, 3, 64, 64).double(),
        torch.zeros(2, 3, 64, 64, dtype=torch.uint8),
    ],
    ids=["channels", "dtype", "integers"],
)
@pytest.mark.parametrize("make", MODELS)
def test_wrong_images_get_the_errors_of_the_model(make, x):
    own = make().eval()
    errors = []
    for model in (own, frozen(own)):
        with pytest.raises((RuntimeError, TypeError, ValueError)) as caught:
            model(x)
        errors.append((caught.type, str(caught.value)))
    assert errors[0] == errors[1]
    assert calls == []


@pytest.mark.parametrize("make", MODELS)
def test_an_empty_batch(make):
    own = make().eval()
    x = torch.empty(0, 3, 64, 64)
    out, count = served(frozen(own), x)
    assert count == 3
    assert out.shape == logits(own(x)).shape == (0, 10)


def test_inference_mode():
    fused = frozen(ours())
    with torch.inference_mode():
        out, count = served(fused, images())
    assert count == 3
    assert torch.equal(out, fused(images()))


def test_parameters_of_inference_mode_are_refused():
    with torch.inference_mode():
        model = ours().eval()
    with pytest.raises(ValueError, match="made in inference mode"):
        ck.accelerate(model, freeze=True)


def test_a_model_in_training_mode_is_refused_and_left_alone():
    model = huggingface()
    model.train()
    with pytest.raises(ValueError, match=r"model: is in training mode, expected model.eval\(\)"):
        ck.accelerate(model, freeze=True)
    assert not any(row.fused for row in ck.coverage(model))


def test_a_block_without_its_stage_is_refused():
    with pytest.raises(ValueError, match="has no whole stage"):
        ck.accelerate(ours().eval().get_submodule("stage0.blocks.0"), freeze=True)


def test_stages_that_cannot_be_frozen_are_refused():
    model = microsoft().eval()
    for stage in stages_of(model):
        stage.get_submodule("blocks.0.mlp.fc1").register_forward_hook(lambda *args: None)
    with pytest.raises(
        ValueError, match=r"none of the 3 stages .*stage0: blocks.0.mlp.fc1 has forward hooks"
    ):
        ck.accelerate(model, freeze=True)


# The model stays what it is ---------------------------------------------------------------------------------


@pytest.mark.parametrize("make", MODELS)
def test_restore_undoes_it(make):
    own = make().eval()
    classes = [type(module) for module in own.modules()]
    model = ck.accelerate(own, freeze=True)
    assert [cls.__name__ for cls in classes] == [type(module).__name__ for module in model.modules()]
    assert all(row.fused for row in ck.coverage(model))
    model(images())
    ck.restore(model)
    assert [type(module) for module in model.modules()] == classes
    model.train()
    model(images())


@pytest.mark.parametrize("make", MODELS)
def test_copies_and_pickles_are_frozen(make):
    fused = frozen(make())
    x = images()
    expected = served(fused, x)[0]
    for other in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        out, count = served(other, x)
        assert count == 3
        assert torch.equal(out, expected)
        assert other.state_dict().keys() == fused.state_dict().keys()


def test_a_model_that_is_accelerated_already_can_be_frozen():
    model = ck.accelerate(huggingface().eval(), freeze=False)
    assert served(model, images())[1] == 0
    assert served(ck.accelerate(model, freeze=True), images())[1] == 3


def test_a_frozen_model_is_not_kept_alive():
    fused = frozen(ours())
    fused(images())
    known = weakref.ref(stages_of(fused)[0])
    calls.clear()
    del fused
    gc.collect()
    assert known() is None


def test_coverage_names_the_operators():
    fused = frozen(ours())
    rows = rows_of_stages(fused)
    assert [row.path for row in rows] == ["stage0", "stage1", "stage2"]
    with ck.use_backend("reference"):
        assert rows_of_stages(fused, images())[0].backends.keys() == {"layer_norm", "transformer_block"}
    with ck.use_backend("composed", "reference"):
        found = rows_of_stages(fused, images())[0].backends
    assert found["transformer_block"] == "composed"
    assert {"layer_norm", "conv_projection", "attention", "gelu"} <= found.keys()


def test_verify_compares_frozen_stages():
    model = frozen(huggingface())
    report = ck.verify(model, images(), rounds=1)
    assert report.passed, report
    assert [layer.path for layer in report.layers if layer.class_name == "CvtStage"] == [
        f"cvt.encoder.stages.{i}" for i in range(3)
    ]
    assert calls


def test_verify_finds_a_wrong_frozen_stage(monkeypatch):
    model = frozen(ours())

    def serve(*args):
        tokens, grid = stages.serve(*args)
        return tokens * 1.01, grid

    monkeypatch.setattr(freezing, "serve", serve)
    failures = ck.verify(model, images(), rounds=1).failures
    assert any(failure.startswith("stage0, evaluation") for failure in failures)
    assert not any("training" in failure for failure in failures)
