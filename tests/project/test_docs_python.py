"""The Python of the pages of docs/ runs as it stands, and they name all that there is."""

import json
import re
from pathlib import Path

import pytest
import torch

import cvt_kernels as ck
from cvt import create_model, read_checkpoint
from cvt.factory import randomize
from cvt.hub import MICROSOFT
from cvt_kernels import backends, choose
from cvt_kernels.models.families import SERVED, TABLE
from tests.checks import DOCS, python_blocks, run_blocks, section_of
from tests.processes import run_python

ROOT = Path(__file__).parents[2]

PYRAMIDS = "## SegFormer, PVT, PVT v2 and GLPN"
ACCELERATED = section_of("accelerated.md", "# Inside accelerated models", until=PYRAMIDS)


def text_of(page):
    return (DOCS / page).read_text(encoding="utf-8")


def run_page(page):
    """Runs the Python of a page, and returns the names that it leaves."""
    return run_blocks(python_blocks(text_of(page)))


@pytest.mark.slow
def test_accelerated_page(capsys):
    names = run_blocks(python_blocks(ACCELERATED))
    printed = capsys.readouterr().out
    assert "12 of 12 blocks fused" in printed
    assert "36 of 36 layers quantized" in printed
    assert (names["quantized"] - names["before"]).norm() < 0.1 * names["before"].norm()
    assert "as accurate as it was" in printed
    assert printed.rstrip().splitlines()[-1].startswith("tensor(")
    assert not any("cvt_kernels" in str(node.target) for node in names["program"].graph.nodes)
    assert torch.isfinite(names["loss"])


def test_accelerate_page(capsys):
    run_page("accelerate.md")
    assert "as accurate as it was" in capsys.readouterr().out


#: The user's pages, by the first list of docs/README.md.
FOR_USERS = re.findall(r"\]\((\w+\.md)\)", text_of("README.md").partition("**For authors")[0])


@pytest.mark.parametrize("page", FOR_USERS)
def test_a_page_for_users_is_short(page):
    assert len(text_of(page).split()) <= 1200
    assert len(FOR_USERS) <= 8


def test_trainer_page(tmp_path, monkeypatch):
    pytest.importorskip("accelerate", reason="transformers' Trainer needs the package accelerate")
    monkeypatch.chdir(tmp_path)
    (block, *_) = python_blocks(text_of("training.md"))
    assert run_blocks([block])["trainer"].model.training


def test_graphs_page():
    text = section_of("serve.md", "## CUDA graphs")
    names = run_blocks(python_blocks(text))
    assert names["logits"].shape == (2, 2)
    assert f'`"{names["why_not"]}"`' in text
    with torch.device("meta"):
        model = create_model("cvt_13")
    count = len([*model.parameters(), *model.buffers()])
    assert f"{count} parameters and buffers" in section_of("serving.md", "### Weights may change")


def test_training_graphs_page():
    text = section_of("training.md", "## CUDA graphs")
    names = run_blocks(python_blocks(text))
    assert names["logits"].shape == (4, 10)
    assert all(each.grad is None for each in names["model"].parameters())


def test_the_pages_list_every_class():
    upstream, listed = "", set()
    for cells in re.findall(r"^\|(.*?)\|(.*?)\|.*\|$", ACCELERATED, flags=re.MULTILINE):
        upstream = cells[0].replace("`", "").strip() or upstream
        listed |= {(upstream, name) for name in re.findall("`(.*?)`", cells[1])}
    pyramids = section_of("accelerated.md", "### Classes")
    for classes in re.findall(r"^\| (`.*?) \|", pyramids, flags=re.MULTILINE):
        upstream = "Hugging Face, in evaluation" if "in evaluation" in classes else "Hugging Face"
        listed |= {(upstream, name) for name in re.findall("`(.*?)`", classes)}
    blocks = {(entry.upstream, entry.name) for entry in TABLE.values()}
    frozen = {(entry.upstream, entry.name) for entry in SERVED.values()} - blocks
    assert listed == blocks | {(f"{upstream}, in evaluation", name) for upstream, name in frozen}


@pytest.mark.slow
def test_model_page(tmp_path, monkeypatch, recwarn, hub):
    monkeypatch.chdir(tmp_path)
    model = create_model("cvt_13")
    randomize(model)
    torch.save(model.state_dict(), "CvT-13-224x224-IN-1k.pth")
    hub.publish("microsoft/cvt-13", model)
    names = run_blocks(python_blocks(section_of("model.md", "# The model", until="## timm and torch.hub")))
    assert [str(warning.message).split(":")[0] for warning in recwarn] == [
        "microsoft/cvt-13 has a head of 1000 classes and the model one of 10"
    ]
    assert names["logits"].shape == (2, 1000)
    assert [tuple(m.shape) for m in names["maps"]] == [(2, 64, 16, 24), (2, 192, 8, 12), (2, 384, 4, 6)]
    assert names["own"].config.stride_kv == (2, 2, 1)
    assert names["again"].labels[3] == read_checkpoint("for-transformers").labels[3] == "class 3"


def test_the_model_page_lists_the_published_weights():
    page = text_of("model.md")
    rows = "".join(re.findall(r"^\| `cvt_.*$", page, flags=re.MULTILINE))
    assert re.findall(r"`(microsoft/[^`]*)`", rows) == list(MICROSOFT)


def test_quantize_page(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = run_page("quantize.md")
    assert "12 of 18 layers quantized" in capsys.readouterr().out
    assert sum(type(module) is ck.LinearInt8 for module in names["again"].modules()) == 12
    assert not any(type(module) is ck.LinearInt8 for module in names["model"].modules())


def test_serve_page(tmp_path, monkeypatch):
    """A worker computes with two threads, although the process that was forked has computed."""
    app, settings = python_blocks(section_of("serve.md", "# Serve requests", until="## CUDA graphs"))
    (tmp_path / "app.py").write_text(app)
    (tmp_path / "settings.py").write_text(settings)
    monkeypatch.syspath_prepend(tmp_path)
    result = run_python(FORKED)
    assert (result.returncode, result.stderr) == (0, "")
    (status, answer), *others = [line.split(" | ") for line in result.stdout.splitlines()]
    assert status == "200 OK"
    assert sum(json.loads(answer)) == pytest.approx(1)
    assert len(others) == 7
    for status, answer in others:
        assert status == "400 Bad Request"
        assert json.loads(answer) == {"error": "expected a JPEG or PNG image of at most 16777216 bytes"}


FORKED = """
import io, os, signal, torch, warnings
from PIL import Image

torch.set_num_threads(2)
import app, settings

def compute():
    with torch.inference_mode():
        app.model(torch.ones(64, 3, 32, 32))

compute()
warnings.filterwarnings("ignore", ".*use of fork")  # of Python 3.12, beside any thread
worker = os.fork()
if worker:
    raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]))
signal.alarm(60)
settings.post_fork(None, None)
torch.set_num_threads(2)
compute()

def ask(body, length=None):
    environ = {"wsgi.input": io.BytesIO(body)}
    environ |= {} if length == "" else {"CONTENT_LENGTH": str(len(body) if length is None else length)}
    parts = app.app(environ, lambda status, headers: print(status, end=" | "))
    print(*(part.decode() for part in parts), flush=True)

Image.effect_noise((20, 24), 50).save(file := io.BytesIO(), "PNG")
Image.new("1", (1, 200000)).save(long := io.BytesIO(), "PNG")
image = file.getvalue()
ask(image)
ask(b"")
ask(b"no image")
ask(image[: len(image) // 2])
ask(image, "many")
ask(image, "")
ask(image, 2**30)
ask(b"GIF89a" + image)
os._exit(0)
"""


def test_operators_page(capsys):
    try:
        names = run_page("operators.md")
    finally:
        ck.use_backend("auto")
    printed = capsys.readouterr().out
    assert ck.doctor().splitlines()[0] in printed
    assert "gelu: backend 'triton' is unavailable: not implemented in this version" in printed
    assert names["k"].shape == (2, 49, 3, 64)
    assert names["z"].shape == (2, 196, 192)
    assert names["w"].shape == (2, 196, 768)
    assert names["seen"].distance.shape == (2, 3, 1)


def test_the_operators_page_names_every_backend():
    page = text_of("operators.md")
    rows = "".join(re.findall(r"^\|([^|]*)\|", page, flags=re.MULTILINE))
    named = set(re.findall(r"`([a-z0-9_]+)`", rows)) - set(backends.operators)
    assert named == set(backends.BACKENDS)


def test_the_page_of_entries_shows_a_kind_of_call_as_files_write_it():
    page = text_of("tune.md")
    x, weight = (torch.empty(size, 192, dtype=torch.bfloat16) for size in (2048, 768))
    assert f"\n{choose.cache_key('linear', x, weight, None)}\n" in page


def test_the_installation_page_names_every_environment_variable():
    sources = [ROOT / "setup.py", *(ROOT / "cvt_kernels").rglob("*.py"), *(ROOT / "csrc").rglob("*.cpp")]
    read = {name for path in sources for name in re.findall(r'"(CVT_KERNELS_[A-Z_]+)"', path.read_text())}
    page = text_of("start.md")
    read.remove("CVT_KERNELS_CHECK_CACHED")  # for tests only, in CONTRIBUTING.md
    assert read == set(re.findall("`(CVT_KERNELS_[A-Z_]+)`", page))


OPTIONS = sorted(set(re.findall(r'`(\w+)="(\w+)"`', text_of("model.md"))))


@pytest.mark.parametrize(("field", "value"), OPTIONS)
def test_every_option_that_the_model_page_names_builds_a_model(field, value):
    assert {"activation", "drop_path_schedule", "pool", "scale"} <= {field for field, _ in OPTIONS}
    model = create_model("cvt_13", depths=1, num_classes=10, **{field: value})
    assert getattr(model.config, field) == value
