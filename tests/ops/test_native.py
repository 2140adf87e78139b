"""Code that is compiled where it runs: made once, kept, done without where it cannot be had."""

import logging

import pytest
import torch

from primal_attention import PrimalAttention, ksvd_loss
from primal_attention.ops import native
from primal_attention.ops.scores import piece, primal_scores, reference

from .formulas import assert_identical, gradients, randn

ADD = 'extern "C" long add(long a, long b) { return a + b; }\n'


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder of its own for what is compiled."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(native.OFF, raising=False)
    monkeypatch.delenv("CXX", raising=False)
    return tmp_path


@pytest.fixture
def source(place):
    path = place / "sums.cpp"
    path.write_text(ADD)
    return path


def kept(place):
    return sorted((place / "cache" / "primal_attention").iterdir())


needs_compiler = pytest.mark.skipif(
    native.library(native.Path(reference.__file__).with_name("native.cpp")) is None,
    reason="no compiler for C++ here",
)


@needs_compiler
def test_it_is_compiled_once_and_kept(source, place):
    assert native.library(source).add(2, 3) == 5
    (made,) = kept(place)
    changed = made.stat().st_mtime_ns
    native._library.cache_clear()  # as in another process
    assert native.library(source).add(3, 4) == 7
    assert kept(place) == [made] and made.stat().st_mtime_ns == changed


@needs_compiler
def test_another_source_is_another_library(source, place):
    native.library(source)
    source.write_text(ADD.replace("a + b", "a - b"))
    native._library.cache_clear()
    assert native.library(source).add(2, 3) == -1
    assert len(kept(place)) == 2


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_without_a_compiler_there_is_none_and_the_log_says_why(
    source, place, monkeypatch, caplog, compiler
):
    monkeypatch.setenv("CXX", compiler)
    with caplog.at_level(logging.INFO):
        assert native.library(source) is None
    assert "sums.cpp is not used" in caplog.text and compiler in caplog.text
    assert kept(place) == []  # nothing half-made is left


@needs_compiler
def test_a_compiler_that_refuses_is_quoted(source, place, caplog):
    source.write_text("no code at all")
    with caplog.at_level(logging.INFO):
        assert native.library(source) is None
    assert "error" in caplog.text and kept(place) == []


def test_a_folder_that_cannot_be_made(source, place):
    (place / "cache").write_text("in the way")
    assert native.library(source) is None


def test_without_a_home(source, monkeypatch):
    def none():
        raise RuntimeError("there is no home")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(native.Path, "home", none)
    assert native.library(source) is None


def test_it_can_be_turned_off(source, place, monkeypatch):
    monkeypatch.setenv(native.OFF, "0")
    assert native.library(source) is None
    assert not (place / "cache").exists()


def inputs(batch, length, heads, width, directions, *, shared):
    qk = randn(batch, length, 2, heads, width)
    qk[0, length // 2] = 0.0  # a token without a direction
    shape = (heads, width, directions) if shared else (batch, heads, width, directions)
    return [x.float() for x in (qk, randn(*shape, seed=1), randn(*shape, seed=2))]


def both_ways(tensors, mask, monkeypatch):
    """Outputs and gradients, by the library and by PyTorch's operations."""

    def run():
        return gradients(lambda *x: primal_scores(*x, token_mask=mask), tensors)

    compiled = run()
    with monkeypatch.context() as patch:
        patch.setenv(native.OFF, "0")
        return compiled, run()


SIZES = [  # batch, tokens, heads, feature dim, directions
    (1, 211, 3, 64, 32),
    (3, 37, 2, 13, 5),
    (2, 17, 5, 67, 31),
    (1, 1, 1, 1, 1),
    (2, 5, 1, 130, 70),
    (2, 1061, 2, 13, 30),  # several tasks for a sequence
]


@pytest.fixture
def written(monkeypatch):
    """Whether the library did it, call by call: else what is compared below were the same code."""
    answers = []
    for name in ("wrote_scores", "wrote_gradients"):
        write = getattr(piece, name)

        def told(*inputs, write=write):
            answers.append(write(*inputs))
            return answers[-1]

        monkeypatch.setattr(piece, name, told)
    return answers


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_library_does_what_is_in_float32(written, dtype):
    tensors = [x.to(dtype) for x in inputs(2, 37, 3, 13, 5, shared=False)]
    gradients(primal_scores, tensors)
    assert written == [dtype == torch.float32] * 2


@needs_compiler
def test_a_layer_trains_by_the_library(written):
    layer = PrimalAttention(256, 4, 32)
    loss = layer(torch.randn(1, 300, 256)).sum() + ksvd_loss(layer)
    loss.backward()
    assert written and all(written)


@needs_compiler
def test_other_maps_are_not_for_the_library(written):
    gradients(lambda *x: primal_scores(*x, map_k="relu"), inputs(2, 37, 3, 13, 5, shared=False))
    assert written == []


@needs_compiler
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_compiled_scores_are_as_exact_as_those_of_pytorch(
    sizes, shared, masked, written, monkeypatch
):
    tensors = inputs(*sizes, shared=shared)
    mask = randn(*sizes[:2], seed=3) < 0.5 if masked else None
    compiled, composed = both_ways(tensors, mask, monkeypatch)
    assert written == [True, True, False, False]
    exact = gradients(
        lambda *x: reference.primal_scores(*x, token_mask=mask), [x.double() for x in tensors]
    )
    flat = ([*outputs, *grads] for outputs, grads in (compiled, composed, exact))
    for one, other, right in zip(*flat, strict=True):
        error, usual = (float((x - right).abs().max()) for x in (one, other))
        step = torch.finfo(torch.float32).eps * float(right.abs().max())
        assert error <= 2 * usual + 4 * step


@needs_compiler
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_stands_at_masked_tokens_reaches_nothing(bad, written):
    qk, *weights = inputs(2, 37, 3, 13, 5, shared=False)
    mask = randn(2, 37, seed=3) < 0.5

    def run(*x):
        return primal_scores(*x, token_mask=mask)

    poisoned = torch.where(mask[:, :, None, None, None], qk, bad)
    assert_identical(gradients(run, [poisoned, *weights]), gradients(run, [qk, *weights]))
    assert all(written)


@needs_compiler
@pytest.mark.parametrize("length", [211, 1061])
def test_results_do_not_depend_on_the_number_of_threads(length, written):
    tensors, results = inputs(1, length, 3, 13, 5, shared=True), []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5, 11):
            torch.set_num_threads(threads)
            results.append(gradients(primal_scores, tensors))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert_identical(other, results[0])
    assert all(written)


@needs_compiler
def test_what_is_laid_out_otherwise_is_computed_all_the_same():
    qk, *weights = inputs(2, 37, 3, 13, 5, shared=False)
    turned = qk.transpose(1, 3).contiguous().transpose(1, 3)
    one, other = (
        gradients(primal_scores, [turned, *weights]),
        gradients(primal_scores, [qk, *weights]),
    )
    for a, b in zip([*one[0], *one[1]], [*other[0], *other[1]], strict=True):
        torch.testing.assert_close(a, b)
