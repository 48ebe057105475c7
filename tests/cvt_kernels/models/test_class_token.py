"""The last block of a classifier computes its class token alone, where nobody sees the other tokens."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import cvt_kernels as ck
from cvt_kernels.models import class_token
from tests.cvt_kernels.models.served import noted_queries
from tests.upstream import huggingface, images, last_stage, logits, microsoft, ours, relative, with_all_tokens

every_classifier = pytest.mark.parametrize("make", [huggingface, microsoft, ours])
every_form = pytest.mark.parametrize("freeze", [None, True, False])


def last_block(model):
    """Returns the last block."""
    stage = last_stage(model)
    return (stage.layers if hasattr(stage, "layers") else stage.blocks)[-1]


def queries_of(model, x, **settings):
    """Returns the numbers of queries in a call of a model, and its logits."""
    with torch.no_grad(), noted_queries() as noted:
        out = logits(model(x, **settings))
    return noted, out


@every_form
@every_classifier
def test_last_block_has_one_query(make, freeze):
    original, x = make().eval(), images(2, 32, 48)
    model = ck.accelerate(copy.deepcopy(original), freeze=freeze) if make is not ours or freeze else original
    queries, out = queries_of(model, x)
    assert queries[-1] == 1
    assert 1 not in queries[:-1]
    _, repeated = queries_of(model, x)
    assert torch.equal(out, repeated)
    with torch.no_grad():
        everything = original.forward_features(x)[:, 0] if make is ours else None
        expected = logits(original(x)) if make is not ours else original.head(everything)
    assert relative(out, expected) < 1e-5


def hooked_block(model):
    """Watches the last block."""
    last_block(model).register_forward_hook(lambda *_: None)


def hooked_layer(model):
    """Watches a linear layer of the last block."""
    next(m for m in last_block(model).modules() if isinstance(m, torch.nn.Linear)).register_forward_hook(
        lambda *_: None
    )


def patched(model):
    """Gives the last block a forward of its own."""
    block = last_block(model)
    forward = block.forward
    block.forward = lambda *args, **kwargs: forward(*args, **kwargs)


@pytest.mark.parametrize("change", [with_all_tokens, hooked_block, hooked_layer, patched])
@every_form
@every_classifier
def test_watched_tokens_are_all_computed(make, freeze, change):
    model, x = make().eval(), images(2, 32, 48)
    model = ck.accelerate(model, freeze=freeze) if make is not ours or freeze else model
    queries_of(model, x)
    change(model)
    assert 1 not in queries_of(model, x)[0]


@every_form
@torch.no_grad()
def test_a_classifier_of_the_same_name_may_read_all_tokens(freeze):
    """One of somebody else's, which is not in transformers."""
    own, x = huggingface().eval(), images(2, 32, 48)

    class CvtForImageClassification(type(own)):
        def forward(self, pixel_values, labels=None, output_hidden_states=None, return_dict=None):
            return self.cvt(pixel_values).last_hidden_state

    own.__class__ = CvtForImageClassification
    assert relative(ck.accelerate(copy.deepcopy(own), freeze=freeze)(x), own(x)) < 1e-5


@every_form
def test_loss_and_tuples_of_hugging_face(freeze):
    original, x = huggingface().eval(), images(2, 32, 48)
    model = ck.accelerate(copy.deepcopy(original), freeze=freeze)
    settings = {"labels": torch.tensor([1, 2]), "return_dict": False}
    with torch.no_grad():
        queries, (loss, out) = queries_of(model, x, **settings)
        true_loss, expected = original(x, **settings)
    assert queries[-1] == 1
    assert relative(out, expected) < 1e-5
    torch.testing.assert_close(loss, true_loss)


@every_form
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@torch.no_grad()
def test_head_of_hugging_face_returns_what_it_did(freeze, dtype):
    own = huggingface().eval().to(dtype)
    model, x = ck.accelerate(copy.deepcopy(own), freeze=freeze), images(2, 32, 48).to(dtype)
    out, expected, true = model(x), own(x), copy.deepcopy(own).double()(x.double()).logits
    assert type(out) is type(expected)
    assert out.keys() == expected.keys() == {"logits"}
    assert out.logits.dtype == dtype
    for (alone,) in (model(x, return_dict=False), model(x, None, None, False)):
        assert torch.equal(out.logits, alone)
    bound = max(2 * relative(expected.logits.double(), true), 1e-6)
    assert relative(out.logits.double(), true) <= bound


def test_head_of_hugging_face_under_autocast():
    own, x = huggingface().eval(), images(2, 32, 48)
    model = ck.accelerate(copy.deepcopy(own), freeze=False)
    with torch.no_grad():
        true = own(x).logits
        with torch.autocast("cpu", torch.bfloat16):
            out, expected = model(x).logits, own(x).logits
    assert out.dtype == expected.dtype
    assert relative(out.float(), true) <= 2 * relative(expected.float(), true)


def test_hugging_face_answers_what_the_head_does_not_take():
    own, x = huggingface().eval(), images(2, 32, 48)
    model = ck.accelerate(copy.deepcopy(own), freeze=False)
    with torch.no_grad():
        expected = own(x)
        model.config = copy.deepcopy(model.config)
        model.config.return_dict = False
        assert isinstance(model(x), tuple)
        assert relative(model(x)[0], expected.logits) < 1e-5
        out = model(pixel_values=x, interpolate=True, return_dict=True)  # upstream takes any keyword
        assert relative(out.logits, expected.logits) < 1e-5


@every_classifier
def test_an_error_and_another_thread_leave_later_calls_whole(make):
    model = ck.accelerate(make().eval(), freeze=False)
    stage, block = last_stage(model), last_block(model)

    def fail():
        with ThreadPoolExecutor(1) as pool:
            assert not pool.submit(class_token.is_block_wanted, block).result()
        assert class_token.is_stage_wanted(stage)
        assert class_token.is_block_wanted(block)
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        class_token.with_class_token_only(stage, block, fail)
    assert not class_token.is_stage_wanted(stage)
    assert not class_token.is_block_wanted(block)


@every_classifier
def test_training_and_gradients_have_all_tokens(make):
    model, x = ck.accelerate(make().eval(), freeze=False), images(2, 32, 48)
    with noted_queries() as noted:
        logits(model(x)).sum().backward()
        model.train()
        logits(model(x)).sum().backward()
    assert 1 not in noted
    assert all(parameter.grad is not None for parameter in model.parameters())
