"""The choice of a backend: what was requested, what was tuned, the table's row, PyTorch; and nothing else."""

import itertools
import warnings

import pytest
import torch
from torch import nn

import cvt_kernels as ck
from cvt_kernels import backends, choose, machine
from cvt_kernels.choose import Row
from cvt_kernels.launch import launching
from cvt_kernels.machine import toolkit
from cvt_kernels.tuning import choices
from tests.checks import implementation, not_built, remember_entry
from tests.contract.examples import example

CPU = torch.device("cpu")
SETS = tuple(toolkit.CPU_SETS)
needs_extension = pytest.mark.skipif(bool(not_built()), reason="the extension is not built")


@pytest.fixture
def on(monkeypatch):
    """Lets the table be read as on a processor: a CPU with sets up to one and with others, or a GPU."""

    def put(processor):
        choose._rows.cache_clear()
        newest, *others = processor.split()
        if newest in SETS:
            sets = frozenset(SETS[: SETS.index(newest) + 1]) | {*others}
            monkeypatch.setattr(machine, "cpu_sets", lambda: sets)
        else:
            monkeypatch.setattr(choose, "_processor", lambda device: processor)

    yield put
    monkeypatch.undo()
    choose._rows.cache_clear()


def names(operator, dtype, *, gradient=False) -> tuple[str, ...]:
    """Returns the backends that the table has for a call, without the operator's defaults."""
    call = example(operator, "reference", "usual").call.record
    rows = choose._rows_for(operator, CPU, dtype, gradient)
    row = next((row for row in rows if row.where is None or row.where(call)), None)
    return () if row is None else row.backends


# The table ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("processor", SETS)
def test_cpus_have_our_kernels_but_for_linear_layers_of_16_bits(on, processor):
    on(processor)
    for operator, dtype, gradient in itertools.product(
        backends.operators, (torch.float32, torch.bfloat16, torch.float16, torch.float64), (False, True)
    ):
        if operator != "linear":
            rows = choose._rows_for(operator, CPU, dtype, gradient)
            assert [row.backends for row in rows] == [("cpu",)], operator


def linear_row(dtype, rows, inputs, gradient=False):
    call = backends.operators["linear"].bind(torch.empty(rows, inputs, dtype=dtype), torch.empty(8, inputs))
    for row in choose._rows_for("linear", CPU, dtype, gradient):
        if row.where is None or row.where(call):
            return row.backends
    return None


@pytest.mark.parametrize(
    ("processor", "dtype", "rows", "inputs", "gradient", "expected"),
    [
        ("plain", torch.bfloat16, 4, 64, False, "float32"),
        ("avx2", torch.bfloat16, 4096, 64, False, "float32"),
        ("avx512_vnni", torch.float16, 4, 64, False, "float32"),
        ("avx512_vnni", torch.float32, 4, 64, False, "cpu"),
        ("avx512_vnni", torch.float64, 4, 64, False, "cpu"),
        ("avx512_vnni", torch.bfloat16, 4, 64, True, "cpu"),
        ("avx512_bf16", torch.bfloat16, 1023, 64, False, "cpu"),
        ("avx512_bf16", torch.bfloat16, 1024, 256, False, "convolution"),
        ("amx_bf16", torch.bfloat16, 1024, 256, False, "convolution"),
        ("amx_bf16", torch.bfloat16, 1024, 257, False, "cpu"),
        ("amx_bf16", torch.bfloat16, 1024, 256, True, "cpu"),
        ("avx512_bf16", torch.float16, 1024, 256, False, "float32"),
        ("amx_bf16 avx512_fp16", torch.float16, 1024, 256, False, "cpu"),
        ("avx512_vnni avx512_fp16", torch.float16, 1024, 256, False, "cpu"),
        ("avx512_vnni avx512_fp16", torch.bfloat16, 1024, 256, False, "float32"),  # slow pairs
        ("amx_bf16", torch.float32, 1024, 256, False, "cpu"),
    ],
)
def test_linear_layers_by_instruction_set(on, processor, dtype, rows, inputs, gradient, expected):
    on(processor)
    assert linear_row(dtype, rows, inputs, gradient) == (expected,)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_an_h200_has_what_it_has_run(on, dtype):
    on("9.0")
    for gradient in (False, True):
        for operator in ("layer_norm", "add_layer_norm"):
            assert names(operator, dtype, gradient=gradient) == ("cuda",)
        assert names("conv_projection", dtype, gradient=gradient) == ("triton",)
    for operator in ("attention", "conv_embedding", "layer_norm_mlp"):
        assert names(operator, dtype) == ("triton",)
        assert names(operator, dtype, gradient=True) == ()
    assert names("linear_gelu", dtype) == ("gluon", "triton")
    assert names("linear_gelu", dtype, gradient=True) == ()


@pytest.mark.parametrize(
    ("operator", "shape", "outputs", "expected"),
    [
        ("linear_add", (2**14 - 1, 256), 8, ("gluon", "triton")),
        ("linear_add", (2**14, 256), 8, ("composed",)),  # by cuBLAS
        ("linear_add", (2**14, 255), 8, ("gluon", "triton")),
        ("conv_linear", (2**20, 64), 0, ("triton",)),
        ("conv_linear", (2**20, 65), 0, ("composed",)),
        ("conv_linear", (2**15, 192), 0, ("triton",)),
        ("conv_linear", (2**15 + 1, 192), 0, ("composed",)),
        ("conv_linear", (10, 193), 0, ("composed",)),
    ],
)
def test_sizes_decide_on_an_h200(on, operator, shape, outputs, expected):
    on("9.0")
    call = torch.empty(shape, device="meta"), torch.empty(outputs, shape[1], device="meta")
    call = backends.operators[operator].bind(*call, None, call[0]) if outputs else call[:1]
    rows = choose._rows_for(operator, CPU, torch.bfloat16, False)
    assert next(row.backends for row in rows if row.where is None or row.where(call)) == expected


@pytest.mark.parametrize(
    ("processor", "dtype"),
    [
        *((processor, torch.bfloat16) for processor in ("8.0", "8.9", "10.0", "12.0")),
        ("9.0", torch.float32),
        ("9.0", torch.float64),
    ],
)
def test_a_gpu_that_has_run_nothing_has_no_rows(on, processor, dtype):
    on(processor)
    for operator in backends.operators:
        assert choose._rows_for(operator, CPU, dtype, False) == ()


def test_kernels_that_wait_for_their_first_run_are_in_no_row():
    on_gpus = [row for row in choose.TABLE if row.processor != "cpu"]
    assert all(row.operators for row in on_gpus)
    waiting = {
        "transformer_blocks",
        "reduction_linear",
        "segmentation_head",
        "depthwise_conv_gelu",
        "mlp_add",
    }
    assert not waiting & {operator for row in on_gpus for operator in row.operators}


def test_every_row_can_be_reached_and_names_what_exists():
    for i, row in enumerate(choose.TABLE):
        assert row.reason
        assert set(row.operators) <= backends.operators.keys()
        assert row.has in ("", *SETS)
        assert row.lacks in ("", "avx512_fp16", *SETS)
        for name in row.backends if row.operators else ():
            assert any(name in backends.implementations[operator] for operator in row.operators)
        for before in choose.TABLE[:i]:
            covers = not before.operators or set(row.operators) & set(before.operators)
            same = before.processor == row.processor and not (before.has or before.lacks or before.where)
            wider = (not before.dtypes or before.dtypes == row.dtypes) and before.gradient in (
                None,
                row.gradient,
            )
            assert not (covers and same and wider), row


# The order ------------------------------------------------------------------------------------------------


def served(x) -> str:
    """Returns the backend that serves a GELU of a tensor."""
    call = backends.operators["gelu"].bind(x, approximate="none")
    chosen = choose.choose("gelu", call)
    (name,) = (name for name, each in backends.implementations["gelu"].items() if each is chosen)
    return name


@needs_extension
def test_requests_come_before_what_was_tuned_and_that_before_the_table():
    x = torch.randn(2, 3)
    assert served(x) == "cpu"
    remember_entry("reference", "gelu", x, approximate="none")
    assert served(x) == "reference"
    assert ck.fallbacks()["gelu", "cpu"] == "reference was the fastest when this machine was tuned"
    assert served(torch.randn(200, 300)) == "cpu"  # of another cost class
    with ck.use_backend("cpu"):
        assert served(x) == "cpu"


def test_pytorch_serves_where_the_tables_backend_cannot(monkeypatch):
    backends.register(
        "gelu",
        "cpu",
        implementation("gelu", lambda *_, **__: 1 / 0, why_unsupported=lambda *_, **__: "is away"),
    )
    x = torch.randn(2, 3)
    assert served(x) == "reference"
    assert ck.fallbacks()["gelu", "cpu"] == "is away"
    with ck.use_backend("cpu"), pytest.raises(ck.BackendUnavailable, match="is away"):
        ck.gelu(x)


def test_a_cost_class_of_any_size_takes_what_most_entries_say():
    x = torch.randn(2, 3)
    keys = [choose.cache_key("gelu", torch.randn(4**i, 3), approximate="none") for i in range(1, 4)]
    for key, name in zip(keys, ("cpu", "reference", "reference"), strict=True):
        choices.use(CPU, {key: choices.Entry(name, {})})
    parts = keys[0].split(", ", 3)
    anywhere = parts[3].replace(parts[3].split(" elements")[0].split(", ")[-1], backends.ANY_SIZE)
    assert choose._remembered("gelu", x.dtype, CPU, False, anywhere) == "reference"
    choices.use(CPU, {keys[1]: choices.Entry("reference", {"reference": "wrong: by 1"})})
    assert choose._remembered("gelu", x.dtype, CPU, False, anywhere) == "cpu"


@needs_extension
def test_a_compiled_function_takes_the_row_that_is_for_all_sizes(monkeypatch):
    rows = (
        Row(("attention",), "cpu", ("reference",), "sizes", where=lambda call: pytest.fail("is asked")),
        Row((), "cpu", ("cuda", "sdpa"), "all"),
    )
    monkeypatch.setattr(choose, "TABLE", rows)
    choose._rows.cache_clear()
    q = torch.randn(1, 8, 2, 4)
    compiled = torch.compile(ck.attention, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(q, q, q), nn.functional.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (q, q, q))).transpose(1, 2))  # fmt: skip
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    names, reason = choose._names_for("attention", backends.operators["attention"].bind(q, q, q))
    assert (names[:2], reason) == (("cuda", "sdpa"), "all")
    choose._rows.cache_clear()


# Questions ------------------------------------------------------------------------------------------------


def test_what_may_serve_an_operator(on):
    on("avx2")
    assert choose.chosen_backends("linear", CPU) == [
        ("float32", "this CPU has no fast products of bfloat16: float32 takes 0.1 to 1"),
        ("reference", "PyTorch's own"),
    ]
    expected = [("reference", "PyTorch's own")] if not_built() else [("cpu", "ours are ahead on CPUs")]
    assert choose.chosen_backends("gelu", CPU) == expected
    remember_entry("reference", "gelu", torch.randn(2, 3), approximate="none")
    assert choose.chosen_backends("gelu", CPU)[0] == ("reference", "tuned on this machine")
    with ck.use_backend("sdpa", "reference"):
        assert choose.chosen_backends("attention", CPU) == [("sdpa", "requested")]


@pytest.mark.parametrize(("capability", "tuned", "warns"), [(90, 0, 0), (86, 0, 1), (86, 1, 0)])
def test_an_unknown_gpu_is_said_once(monkeypatch, capability, tuned, warns):
    monkeypatch.setattr(launching, "chip", lambda device: launching.Chip(capability, 100))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A10")
    monkeypatch.setattr(choose, "_said", set())
    gpu = torch.device("cuda", 0)
    monkeypatch.setitem(choices._known, gpu, {"a": choices.Entry("triton", {})} if tuned else {})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            choose.warn_of_unknown_gpu(gpu)
            choose.warn_of_unknown_gpu(CPU)
    assert len(caught) == warns
    for warning in caught:
        assert "NVIDIA A10" in str(warning.message)
        assert "cvt_kernels.tune(model, images)" in str(warning.message)
        assert warning.filename == __file__


def test_an_unknown_gpu_leaves_a_reason(on, monkeypatch):
    on("8.6")
    monkeypatch.setattr(choose, "_why_no_row", lambda device: "no GPU like this one has run it yet")
    assert served(torch.randn(2, 3)) == "reference"
    if not not_built():
        assert ck.fallbacks()["gelu", "cpu"] == "no GPU like this one has run it yet"
