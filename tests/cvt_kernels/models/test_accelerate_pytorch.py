"""Accelerated models under autocast, torch.compile, export, ONNX, DDP, SyncBatchNorm, FSDP2, CUDA graphs."""

import collections
import copy
import functools
import gc
import sys
import warnings

import pytest
import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import cvt_kernels as ck
from cvt_kernels import modes
from cvt_kernels.tuning import accuracy
from tests import upstream
from tests.checks import assert_accurate, record_calls
from tests.processes import run_ranks
from tests.upstream import assert_same_step, images, in_float64, logits, one_block, pair, relative, step

# Autocast --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("make", upstream.UPSTREAMS)
def test_autocast_has_the_dtypes_of_the_upstream_model(make, dtype):
    own, fused = pair(make, "train")
    exact = in_float64(copy.deepcopy(own))
    x = images()
    expected = step(exact, x.double())
    dtypes, outputs = [], []
    for model in (own, fused):
        seen = []
        for row in ck.coverage(fused):

            def note(module, args, out, path=row.path, seen=seen):
                seen.append((path, args[0].dtype, out.dtype))

            model.get_submodule(row.path).register_forward_hook(note)
        with torch.autocast("cpu", dtype):
            out = logits(model(x))
        out.double().sin().sum().backward()
        dtypes.append(seen)
        outputs.append(out.detach())
    assert dtypes[0] == dtypes[1]
    assert_accurate(outputs[1], outputs[0], expected)
    scale = max(p.grad.abs().max() for p in exact.parameters())
    errors = []
    for model in (own, fused):
        assert all(p.grad.dtype == torch.float32 for p in model.parameters())
        pairs = zip(model.parameters(), exact.parameters(), strict=True)
        errors.append(max((a.grad.double() - b.grad).abs().max() for a, b in pairs) / scale)
    assert errors[1] <= 3 * errors[0] + torch.finfo(dtype).eps
    assert all(row.fused for row in ck.coverage(fused))


@pytest.mark.parametrize(
    "make", [upstream.huggingface, pytest.param(upstream.microsoft, marks=pytest.mark.rest)]
)
def test_gradient_scaling(make):
    """Steps with GradScaler go as upstream; gradients overflow in the first, which are skipped."""
    own, fused = pair(make, "train")
    results = []
    for model in (own, fused):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30)
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        scales = []
        for _ in range(16):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = logits(model(images())).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        results.append((scales, loss.item(), [p.detach() for p in model.parameters()]))
    (own_scales, own_loss, own_parameters), (scales, loss, parameters) = results
    assert scales[0] == own_scales[0] == 2.0**29
    assert abs(scales.index(scales[-1]) - own_scales.index(own_scales[-1])) <= 1
    assert scales[-1] < 2.0**29
    assert loss == pytest.approx(own_loss, rel=0.05)
    assert all(torch.isfinite(p).all() for p in parameters)
    for a, b in zip(parameters, own_parameters, strict=True):
        torch.testing.assert_close(a, b, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("make", upstream.UPSTREAMS)
def test_no_nan_where_float32_has_none(make, dtype):
    """Scores before their scale overflow float16, in which the upstream models give NaN."""
    own, fused = pair(make, "train")
    for model in (own, fused):
        for name, parameter in model.named_parameters():
            if name.endswith(
                ("proj_q.weight", "proj_k.weight", "projection_query.weight", "projection_key.weight")
            ):
                parameter.data *= 70
    assert step(own, images()).isfinite().all()
    with torch.autocast("cpu", dtype):
        assert step(own, images()).isfinite().all() == (dtype == torch.bfloat16)
        assert step(fused, images()).isfinite().all()
    assert not any(p.grad.isnan().any() for p in fused.parameters())  # GradScaler is for what overflows


# torch.compile, export, ONNX -------------------------------------------------------------------------------


def few_blocks(make, drop_path):
    """Returns a model in training mode, and how many blocks it has and how many of these drop branches."""
    if make is upstream.huggingface:
        model = one_block(make)
        (block,) = model.cvt.encoder.stages[0].layers
        if drop_path > 0:
            block.drop_path = sys.modules[type(block).__module__].CvtDropPath(drop_path)
        return model.train(), 1, int(drop_path > 0)
    blocks = 4 if make is upstream.glpn else 2  # the first has a rate of 0
    depths = {} if make is upstream.glpn else {"depths": [1, 1]}
    return make(drop_path=drop_path, **depths).train(), blocks, (blocks - 1) * (drop_path > 0)


@pytest.mark.parametrize(
    ("make", "drop_path"),
    [
        *((upstream.huggingface, 0.5), (upstream.pvt_v2, 0.0)),
        pytest.param(upstream.huggingface, 0.0, marks=pytest.mark.rest),
        *(
            pytest.param(make, 0.5, marks=pytest.mark.rest)
            for make in (upstream.segformer, upstream.pvt, upstream.pvt_v2_linear, upstream.glpn)
        ),
    ],
)
def test_a_compiled_training_step_has_few_passes(make, drop_path, monkeypatch):
    """By what the compiler of the graphs gets; gradients are as accurate as those of the step without it."""
    monkeypatch.setattr(modes, "dtype_for_layers", modes.autocast_dtype)  # as on a GPU
    draw = torch.rand  # of which stochastic depth makes the same choices for every dtype
    monkeypatch.setattr(torch, "rand", lambda *size, dtype, device: draw(*size, device=device).to(dtype))
    model, blocks, dropping = few_blocks(make, drop_path)
    plain, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    ck.accelerate(model)
    found = [collections.Counter(), collections.Counter()]

    def note(graph, _, seen):
        seen.update(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        # Inductor would lay out what has four dimensions and is saved as images with channels last.
        for node in graph.graph.nodes:
            if "cvt_kernels.attention" in str(node.target):
                assert all(given.meta["val"].ndim == 3 for given in node.args[:3])
        return make_boxed_func(graph.forward)

    compilers = (functools.partial(note, seen=each) for each in found)
    backend = aot_autograd(fw_compiler=next(compilers), bw_compiler=next(compilers))
    x = images(height=70, width=70) if make is upstream.pvt else images()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def train(called, x, enabled=True):
        """Returns the gradients and the buffers of a step, of which every one draws the same numbers."""
        getattr(called, "_orig_mod", called).load_state_dict(before, strict=False)
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out = logits(called(x))
        out.to(torch.promote_types(out.dtype, torch.float32)).square().mean().backward()
        gradients = [each.grad.double() for each in called.parameters() if each.grad is not None]
        called.zero_grad()
        return gradients, [each.clone() for each in called.buffers()]

    exact, plain = train(exact, x.double(), enabled=False)[0], train(plain, x)[0]
    with ck.use_backend("triton", "reference"):
        eager, *written = train(model, x)
        compiled, *again = train(torch.compile(model, fullgraph=True, backend=backend), x)
    forward, backward = ({name.removesuffix(".default"): n for name, n in each.items()} for each in found)
    assert forward["cvt_kernels.cast_together"] == backward["cvt_kernels.cast_apart"] == blocks
    assert forward["cvt_kernels.attention"] == backward["cvt_kernels.attention_backward"] == blocks
    # The end of each MLP, and of attention where images are dropped; the start of these in the backward.
    ends = blocks + dropping
    assert forward["cvt_kernels.linear_ends"] == ends
    # GELU's derivative is a start too, but where a convolution's kernel applies it.
    mixes = make not in (upstream.huggingface, upstream.pvt)
    assert forward.get("cvt_kernels.triton_depthwise_conv_gelu", 0) == blocks * mixes
    assert backward["cvt_kernels.linear_starts"] == ends + blocks * (not mixes)
    for right, *others in zip(exact, plain, eager, compiled, strict=True):
        *known, error = ((gradient - right).abs().max().item() for gradient in others)
        rounding = torch.finfo(torch.bfloat16).eps * right.abs().max().item()
        assert error <= accuracy.GRADIENT_FACTOR * max(known) + rounding
    for eager, compiled in zip(*written, *again, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "make", [upstream.huggingface, pytest.param(upstream.microsoft, marks=pytest.mark.rest)]
)
def test_a_compiled_model_is_accelerated(make):
    own = one_block(make).eval()
    called = record_calls("attention")
    compiled = torch.compile(copy.deepcopy(own), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        expected = logits(own(images()))
        assert relative(logits(compiled(images())), expected) < 1e-5
        assert not called
        assert ck.accelerate(compiled) is compiled
        assert all(row.fused and row.path.startswith("_orig_mod.") for row in ck.coverage(compiled))
        assert relative(logits(compiled(images())), expected) < 1e-5
        assert len(called) == 1
        ck.restore(compiled)
        assert relative(logits(compiled(images())), expected) < 1e-5
        assert len(called) == 1


# Several processes -----------------------------------------------------------------------------------------

SHARES = (3, 2)  # images per process, not equal


def _process(rank, directory):
    dist.init_process_group("gloo", init_method=f"file://{directory}/init", rank=rank, world_size=2)
    torch.set_num_threads(1)
    ck.use_backend(*upstream.KERNELS_FIRST)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's own deprecations
        for make in upstream.UPSTREAMS:
            _ddp_step(rank, make)
            _synchronized_batch_norm_step(rank, make)
            for accelerated in ("before", "after"):
                _fsdp_step(rank, make, accelerated)
    gc.collect()  # of what still holds the group, whose threads abort a process if they outlive Python
    dist.barrier()
    dist.destroy_process_group()


def _share(x, rank):
    return x[: SHARES[0]] if rank == 0 else x[SHARES[0] :]


def _assert_joined(own, model, x, rank, reduce):
    """Compares a step of two processes, each with its share, with the upstream's on the joined batch."""
    out = logits(model(_share(x, rank)))
    out.sin().sum().backward()
    expected = step(own, x)
    assert relative(out.detach(), _share(expected, rank)) < 2e-5
    largest = max(p.grad.abs().max() for p in own.parameters())
    for (name, p), q in zip(own.named_parameters(), model.parameters(), strict=True):
        assert (reduce(q.grad) - p.grad).abs().max() < 2e-5 * largest, name


def _without_batch_statistics(model):
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    return model


def _ddp_step(rank, make):
    """Wraps before and after; BatchNorm is frozen, since each process has statistics of its own."""
    own = _without_batch_statistics(make().train())
    before = DistributedDataParallel(ck.accelerate(copy.deepcopy(own)))
    after = ck.accelerate(DistributedDataParallel(copy.deepcopy(own)))
    for model in (before, after):
        assert all(row.fused and row.path.startswith("module.") for row in ck.coverage(model))
        # The loss is a sum over images, and DistributedDataParallel averages over processes.
        _assert_joined(own, model, images(sum(SHARES)), rank, lambda gradient: 2 * gradient)


def _synchronized_batch_norm_step(rank, make):
    """Does without DistributedDataParallel, which takes nn.SyncBatchNorm on GPUs only."""

    def total(gradient):
        dist.all_reduce(gradient)
        return gradient

    own = make().train()
    convert = nn.SyncBatchNorm.convert_sync_batchnorm
    before = convert(ck.accelerate(copy.deepcopy(own)))
    after = ck.accelerate(convert(copy.deepcopy(own)))
    for model in (before, after):
        assert all(row.fused for row in ck.coverage(model))
        twin = copy.deepcopy(own)
        _assert_joined(twin, model, images(sum(SHARES)), rank, total)
        for (name, expected), buffer in zip(twin.named_buffers(), model.buffers(), strict=True):
            torch.testing.assert_close(buffer, expected, msg=name)


def _fsdp_step(rank, make, accelerated):
    """Parameters sharded by blocks; accelerated before or after ``fully_shard``, restored at the end."""
    own = _without_batch_statistics(make().train())
    sharded = copy.deepcopy(own)
    if accelerated == "before":
        ck.accelerate(sharded)
    mesh = init_device_mesh("cpu", (2,))
    for module in list(sharded.modules()):
        if type(module).__name__ in ("CvtLayer", "Block"):
            fully_shard(module, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    if accelerated == "after":
        ck.accelerate(sharded)
    assert all(row.fused for row in ck.coverage(sharded))
    x = images(sum(SHARES))
    optimizer = torch.optim.SGD(sharded.parameters(), 1e-2)
    _assert_joined(own, sharded, x, rank, lambda gradient: 2 * gradient.full_tensor())
    optimizer.step()
    for p in own.parameters():
        p.grad /= 2
    torch.optim.SGD(own.parameters(), 1e-2).step()
    names = [type(m).__name__ for m in sharded.modules()]
    ck.restore(sharded)
    assert [type(m).__name__ for m in sharded.modules()] == names
    assert not any(row.fused for row in ck.coverage(sharded))
    assert relative(logits(sharded(_share(x, rank))).detach(), _share(logits(own(x)).detach(), rank)) < 1e-4


@pytest.mark.rest
def test_two_processes(tmp_path):
    """DDP and SyncBatchNorm against one process with the joined batch, and FSDP2."""
    run_ranks(_process, str(tmp_path))


# On a GPU --------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.usefixtures("_without_tf32")
@pytest.mark.parametrize("size", [(2, 224, 224), (2, 160, 256), (1, 224, 224)], ids=str)
@pytest.mark.parametrize("make", upstream.UPSTREAMS)
def test_gpu_evaluation_and_training(make, size):
    """Fused models compute on a GPU what they do on a CPU, dropout and drop path included."""
    own, fused = pair(make, "train", **upstream.RANDOM)
    own, fused, x = own.cuda(), fused.cuda(), images(*size).cuda()
    assert_same_step(own, fused, x, 5e-5)
    with torch.no_grad():
        assert relative(logits(fused.eval()(x)), logits(own.eval()(x))) < 5e-5


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("make", [upstream.huggingface, upstream.microsoft_plain])
def test_gpu_half_precision(make, dtype):
    own, fused = pair(make)
    x = images(2, 224, 224)
    exact = logits(in_float64(copy.deepcopy(own)).cuda()(x.cuda().double()))
    own, fused, x = own.cuda().to(dtype), fused.cuda().to(dtype), x.cuda().to(dtype)
    with torch.no_grad():
        assert_accurate(logits(fused(x)), logits(own(x)), exact)


@pytest.mark.gpu
@pytest.mark.parametrize("make", upstream.UPSTREAMS)
def test_gpu_graph_capture(make):
    own, fused = pair(make)
    own, fused, x = own.cuda(), fused.cuda(), images(2, 224, 224).cuda()
    stream = torch.cuda.Stream()
    with torch.inference_mode():
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            fused(x)  # warms up
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = logits(fused(x))
        x.copy_(images(2, 224, 224).cuda().flip(0))
        graph.replay()
        assert relative(captured, logits(own(x))) < 1e-3
