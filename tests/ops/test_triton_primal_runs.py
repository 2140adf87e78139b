"""Programs of the backward pass that take several short sequences, where weights are shared."""

import pytest
import torch

from .formulas import MAPS, token_masks
from .fused import assert_bits, assert_fits, built_for_hopper, poisoned_memory
from .primal_case import MARKS, SPLIT, Case, H, N, check, device, fused

from primal_attention.ops.triton_launch import in_runs, shares_of  # isort: skip - needs triton

__all__ = ["device", "poisoned_memory"]
pytestmark = MARKS

MANY, RUN = 7, 3  # sequences, and those of a program: 3, 3 and 1
RUNS = SPLIT._replace(programs=-(-MANY // RUN) * H, least=4)
MANY_MASKS = token_masks(MANY, N)


def many(device, dtype=torch.float32, **options):
    """A case of many sequences with the same weights, which programs take in runs."""
    options = {"batch": MANY, "kinds": ("shared", "shared"), **options}
    case = Case(device, dtype, **options)
    case.grams = tuple(case.cotangents[name] is not None for name in ("d_gram_q", "d_gram_k"))
    shares = shares_of(case.tensors["q"], RUNS)
    assert in_runs(case.tensors["q"], shares, RUNS).sequences == RUN
    return case


@pytest.mark.parametrize("without", [(), ("d_gram_q", "d_gram_k"), ("a_e",), ("bias", "d_gram_k")])
@pytest.mark.parametrize(
    ("mask", "dtype", "maps"),
    [
        ("none", torch.float32, ("cosine", "identity")),
        ("padded", torch.float16, ("cosine", "cosine")),
        ("holes", torch.bfloat16, ("cosine", "elu")),
        ("empty", torch.float32, ("relu", "cosine")),
    ],
)
def test_runs_of_sequences(device, mask, dtype, maps, without):
    case = many(device, dtype, mask=MANY_MASKS[mask], maps=maps, without=without)
    check(case, dtype, config=RUNS)


@pytest.mark.parametrize(("sequences", "dtype"), [(RUN, torch.float32), (MANY, torch.bfloat16)])
def test_runs_of_one_side(device, sequences, dtype):
    """Up to that of all sequences, whose sums are the gradients."""
    case = many(device, dtype, without=("k", "a_r", "d_gram_k"), mask=MANY_MASKS["holes"])
    config = RUNS._replace(programs=-(-MANY // sequences) * H // 2)  # beside another side
    check(case, dtype, config=config)


@pytest.mark.parametrize(
    ("width", "dtype"), [(16, torch.float32), (64, torch.float16), (64, torch.bfloat16)]
)
def test_runs_of_whole_blocks(device, width, dtype):
    case = many(device, dtype, length=48, width=width, columns=width)
    check(case, dtype, config=RUNS)


@pytest.mark.parametrize("kinds", [("batched", "shared"), ("batched", "batched")])
def test_weights_of_its_own_take_one_sequence_at_a_time(device, kinds):
    check(many(device, kinds=kinds, mask=MANY_MASKS["holes"]), config=RUNS)


@pytest.mark.parametrize("feature_map", MAPS)
def test_what_stands_at_masked_tokens_of_a_run_reaches_nothing(device, feature_map):
    mask = MANY_MASKS["empty"].to(device)
    clean = many(device, mask=mask, maps=(feature_map, feature_map))
    gradients = fused.backward(*clean.backward(), RUNS)
    for group, name in (
        (clean.tensors, "q"),
        (clean.tensors, "k"),
        (clean.cotangents, "d_out"),
    ):
        group[name] = torch.where(mask[..., None, None], group[name], float("nan"))
    assert_bits(fused.backward(*clean.backward(), RUNS), gradients)


def test_runs_give_the_same_bits(device):
    arguments = many(device, length=32).backward()
    assert_bits(fused.backward(*arguments, RUNS), fused.backward(*arguments, RUNS))


@pytest.mark.parametrize(
    ("batch", "heads", "length", "sequences"),
    [
        (64, 8, 1024, 3),  # 176 programs instead of 512, of which 198 run at once
        (256, 8, 256, 11),
        (1024, 8, 64, 43),
        (24, 8, 1024, 1),  # all run at once
        (32, 8, 1024, 1),  # in shares
        (7, 97, 1024, 4),
        (7, 199, 1024, 1),  # never less than one for each head
    ],
)
def test_how_many_sequences_a_program_takes(batch, heads, length, sequences):
    config = fused.BACKWARD[torch.bfloat16][64]
    z = torch.empty(batch, length, heads, 64, device="meta")
    shares = shares_of(z, config)
    runs = in_runs(z, shares, config)
    assert runs.sequences == sequences
    assert runs == shares or shares.splits == 1
    assert runs.programs == -(-batch // sequences) * heads * shares.splits


@pytest.mark.slow
def test_as_many_programs_fit_that_take_runs():
    """Three of them. In float16 memory holds a little of what each sequence begins with."""
    cases = [f"runs:64:{dtype}:{mask}" for dtype in ("bfloat16", "float16") for mask in (0, 1)]
    for build in built_for_hopper("hopper_primal.py", *cases):
        assert_fits(build, spilled=80 if "float16" in build.case.split(":") else 0)
        assert build.name != "backward_blocks" or build.registers <= 168, build
