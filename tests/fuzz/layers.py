"""Random layers on random inputs, held to the contract.

A case is drawn from one number: a mechanism of the registry with its options, a dtype, sizes (one
token, one head, channels of size one, odd lengths), masks with holes and empty sequences, NaN in
the padding, a context, and the memory layout of tokens and masks. By hand, as many as you like:

    python -m tests.fuzz.layers --cases 10000
    python -m tests.fuzz.layers --first 4711 --cases 1        # what a failing case prints

Exits with 1 where a case breaks the contract.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from primal_attention import ATTENTIONS, build_attention, ksvd_loss

SIZES = (1, 2, 3, 5, 7, 12, 17, 23, 33, 50, 70, 130)
LAYOUTS = ("contiguous", "batch second", "channels first", "strided", "sliced", "expanded")


class Bound(NamedTuple):
    """How far two results may be apart, relative to the norm of one of them."""

    outputs: float
    gradients: float


BOUNDS = {
    torch.float64: Bound(1e-8, 1e-7),
    torch.float32: Bound(1e-4, 1e-3),
    torch.bfloat16: Bound(0.1, 0.3),
}
SOFT = Bound(1e-5, 1e-4)  # in float64: an iterated inverse multiplies rounding by up to 2^20


@dataclass(frozen=True)
class Case:
    """What one number stands for."""

    number: int
    name: str
    dim: int
    num_heads: int
    options: dict[str, Any]
    dtype: torch.dtype
    training: bool
    batch: int
    length: int
    context: int | None
    mask: str
    context_mask: str
    poison: bool
    layout: str
    mask_layout: str
    causal: bool = field(default=False)

    def build(self) -> nn.Module:
        """The layer, in its mode."""
        torch.manual_seed(self.number)
        layer = build_attention(
            self.name, self.dim, self.num_heads, causal=self.causal, **self.options
        )
        return layer.to(self.dtype).train(self.training)

    @property
    def bound(self) -> Bound:
        """How near two results of this layer are."""
        return SOFT if self.name == "soft" else BOUNDS[self.dtype]


def draw(number: int) -> Case:
    """The case of that number."""
    rng = random.Random(number)
    name = rng.choice([*ATTENTIONS, "primal", "primal", "primal"])
    about = ATTENTIONS[name].mechanism
    large = rng.random() < 0.03  # where a CPU has quicker products
    heads = rng.choice((1, 2, 3, 4))
    head_dim = rng.choice((1, 2, 3, 4, 5, 8))
    if name == "yoso":
        head_dim = max(2, head_dim)
    batch, length = rng.choice((1, 1, 2, 3, 4)), rng.choice(SIZES)
    if large and name not in ("soft", "softmax_bn_sh", "softmax_sh"):
        heads, head_dim, batch, length = 4, 32, rng.choice((2, 3)), rng.choice((511, 640))
    causal = about.causal and rng.random() < 0.4
    options = _options(rng, name, heads, causal)
    if options.get("weights") == "sampled":
        causal = False
    crosses = about.cross and not causal and options.get("weights") != "static"
    dtype = torch.float64
    if name != "soft":  # whose low-rank form has few digits in float32
        dtype = rng.choice((torch.float64, torch.float64, torch.float32, torch.bfloat16))
    masks = ("none", "all", "end", "end", "holes", "holes", "front", "empty", "nothing")
    return Case(
        number,
        name,
        heads * head_dim,
        heads,
        options,
        torch.float32 if large and dtype is torch.float64 and name != "soft" else dtype,
        rng.random() < 0.5,
        batch,
        length,
        rng.choice(SIZES) if crosses and rng.random() < 0.4 else None,
        rng.choice(masks),
        rng.choice(masks),
        rng.random() < 0.6,
        rng.choice(LAYOUTS),
        rng.choice(LAYOUTS),
        causal,
    )


class Draws(NamedTuple):
    """What several mechanisms draw their options from."""

    rng: random.Random
    causal: bool
    few: int
    scales: list[int] | None
    norm: dict[str, Any]


def _options(rng: random.Random, name: str, heads: int, causal: bool) -> dict[str, Any]:
    few = rng.choice((1, 2, 3, 5, 8))
    given = {"bias": rng.random() < 0.7, "dropout": rng.choice((0.0,) * 9 + (0.4,))}
    scales = rng.choice((None, [rng.choice((1, 2, 3, 4)) for _ in range(heads)]))
    norm = {
        "beta": rng.choice((1.0, 0.3)),
        "rescale": rng.random() < 0.8,
        "eps": rng.choice((1e-3, 1e-2)),
        "learnable_beta": rng.random() < 0.3,
    }
    own = OPTIONS.get(name)
    return given | ({} if own is None else own(Draws(rng, causal, few, scales, norm)))


def _of_primal(draws: Draws) -> dict[str, Any]:
    rng = draws.rng
    maps = ("cosine", "elu", "relu", "identity", "exponential", ("cosine", "elu"))
    given = {
        "weights": rng.choice(
            ("static", "dual") if draws.causal else ("sampled", "static", "dual")
        ),
        "feature_map": rng.choice(maps),
        "scores": rng.choice(("both", "both", "e", "r")),
        "num_directions": draws.few,
        "samples_per_direction": rng.choice((1, 3, 10)),
        "max_tokens": rng.choice((None, None, 4)),
    }
    if given["weights"] == "sampled":
        given["landmark_dropout"] = rng.choice((0.0, 0.0, 0.0, 0.5))
        given["landmark_jitter"] = rng.choice((0.0, 0.0, 0.0, 0.6))
    return given


def _of_linear(draws: Draws) -> dict[str, Any]:
    feature_map = draws.rng.choice(("elu", "relu", ("elu", "relu")))
    return {"feature_map": feature_map} | ({} if draws.causal else {"scales": draws.scales})


OPTIONS: dict[str, Callable[[Draws], dict[str, Any]]] = {
    "primal": _of_primal,
    "softmax_bn": lambda draws: draws.norm,
    "softmax_sh": lambda draws: {"scales": draws.scales},
    "softmax_bn_sh": lambda draws: draws.norm | {"scales": draws.scales},
    "linear": _of_linear,
    "linear_bn": lambda draws: draws.norm | {"scales": draws.scales},
    "performer": lambda draws: {"num_features": draws.rng.choice((None, draws.few))},
    "linformer": lambda draws: {
        "max_tokens": 1000,
        "num_projected": draws.few,
        "share_kv": draws.rng.random() < 0.5,
    },
    "nystrom": lambda draws: {
        "num_landmarks": draws.few,
        "conv_kernel_size": draws.rng.choice((None, 1, 3, 9)),
    },
    "reformer": lambda draws: {
        "num_hashes": draws.rng.choice((1, 2, 3)),
        "bucket_size": draws.rng.choice((1, 2, 8, 64)),
        "max_tokens": draws.rng.choice((8, 64, 1024)),
    },
    "longformer": lambda draws: {
        "window": 2 * draws.few,
        "num_global_tokens": draws.rng.choice((0, 1, 3)),
    },
    "yoso": lambda draws: {"num_bits": draws.rng.choice((1, 4, 9))},
    "cosformer": lambda draws: {"max_tokens": draws.rng.choice((None, 1000))},
    "soft": lambda draws: {"num_landmarks": draws.few},
    "sparse": lambda draws: {"stride": draws.few},
}


class Inputs(NamedTuple):
    """What a layer is called with, and what its outputs are multiplied by."""

    x: Tensor
    mask: Tensor | None
    context: Tensor | None
    context_mask: Tensor | None
    cotangent: Tensor

    def arguments(self) -> dict[str, Tensor]:
        """The keyword arguments that are given."""
        given = {
            "token_mask": self.mask,
            "context": self.context,
            "context_mask": self.context_mask if self.context is not None else None,
        }
        return {name: value for name, value in given.items() if value is not None}


class Result(NamedTuple):
    """Outputs, and the gradients of inputs and parameters."""

    output: Tensor
    gradients: dict[str, Tensor]


def inputs_of(case: Case) -> Inputs:
    """The tokens and masks of a case, in contiguous memory."""
    generator = torch.Generator().manual_seed(case.number)

    def tokens(length: int) -> Tensor:
        shape = case.batch, length, case.dim
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(case.dtype)

    x, cotangent = tokens(case.length), tokens(case.length)
    if case.layout == "expanded":
        x = x[:1].expand_as(x).contiguous()
    mask = _mask(case.mask, case.batch, case.length, generator, case.mask_layout)
    x = _with_padding(case, x, mask)
    context = context_mask = None
    if case.context is not None:
        context = tokens(case.context)
        context_mask = _mask(case.context_mask, case.batch, case.context, generator, "contiguous")
        context = _with_padding(case, context, context_mask)
    return Inputs(x, mask, context, context_mask, cotangent)


def _mask(
    kind: str, batch: int, length: int, generator: torch.Generator, layout: str
) -> Tensor | None:
    lengths = torch.randint(1, length + 1, (batch, 1), generator=generator)
    places = torch.arange(length)
    holes = torch.rand(batch, length, generator=generator) < 0.6
    made = {
        "none": None,
        "all": torch.ones(batch, length, dtype=torch.bool),
        "end": places < lengths,
        "front": places >= length - lengths,
        "holes": holes,
        "empty": holes & (torch.arange(batch)[:, None] > 0),
        "nothing": torch.zeros(batch, length, dtype=torch.bool),
    }[kind]
    if made is not None and layout == "expanded":
        made = made[:1].expand_as(made).contiguous()
    return made


def _with_padding(case: Case, x: Tensor, mask: Tensor | None) -> Tensor:
    filling = float("nan") if case.poison else 1e3
    return x if mask is None else torch.where(mask[..., None], x, torch.full_like(x, filling))


def laid_out(z: Tensor, layout: str) -> Tensor:
    """The same numbers in another memory layout."""
    match layout:
        case "batch second":
            return z.transpose(0, 1).contiguous().transpose(0, 1)
        case "channels first":
            return z.transpose(0, -1).contiguous().transpose(0, -1)
        case "strided":
            return torch.stack([z, z.logical_not() if z.dtype is torch.bool else -z], dim=-1)[
                ..., 0
            ]
        case "sliced":
            return torch.cat([z[:, :1], z, z[:, :1]], dim=1)[:, 1:-1]
        case "expanded":
            same = torch.equal(z.nan_to_num(), z[:1].expand_as(z).nan_to_num())
            return z[:1].expand_as(z) if same else z
    return z


def run(layer: nn.Module, inputs: Inputs, *, seed: int = 0) -> Result:
    """Outputs and gradients."""
    torch.manual_seed(seed)
    leaves = {"x": inputs.x.detach().requires_grad_()}
    if inputs.context is not None:
        leaves["context"] = inputs.context.detach().requires_grad_()
    output = layer(
        leaves["x"], **inputs.arguments() | {k: v for k, v in leaves.items() if k != "x"}
    )
    parameters = {name: p for name, p in layer.named_parameters() if p.requires_grad}
    wanted = leaves | parameters
    made = torch.autograd.grad(
        output,
        list(wanted.values()),
        inputs.cotangent,
        allow_unused=True,
        materialize_grads=True,
    )
    return Result(output.detach(), dict(zip(wanted, made, strict=True)))


class Checker:
    """Collects what a case breaks, and what was not asked of it."""

    def __init__(self, case: Case, layer: nn.Module) -> None:
        self.case, self.layer = case, layer
        self.violations: list[str] = []
        self.left_out: set[str] = set()

    def check(self) -> None:
        """All that is asked of the case."""
        case, layer = self.case, self.layer
        plain = inputs_of(case)
        inputs = plain._replace(
            x=laid_out(plain.x, case.layout),
            mask=None if plain.mask is None else laid_out(plain.mask, case.mask_layout),
        )
        before = [z.clone() for z in inputs if z is not None]
        result = run(layer, inputs)
        if not _equal(before, [z for z in inputs if z is not None]):
            self.violations.append("an input was modified")
        self._finite_and_zero(inputs, result)
        again = run(layer, inputs)
        self._identical("a second call", again, result)
        random_in_training = case.training and _draws(case)
        if random_in_training:
            self.left_out.add("random numbers are drawn in training, for the shape of the input")
            return
        if _hashes(case) and case.dtype is torch.bfloat16:
            self.left_out.add("rounding to bfloat16 moves tokens to other buckets")
            return
        self._close("contiguous inputs", run(layer, plain), result)
        self._padded(plain, result)
        self._alone(plain, result)
        if case.causal:
            self._causal(plain, result)
            if ATTENTIONS[case.name].mechanism.decode:
                self._decoded(plain, result)
        if case.name == "primal" and case.context is None:
            self._packed(plain, result)
        if case.name == "primal" and case.training and case.dtype is torch.float64:
            self._objective(plain)

    def _finite_and_zero(self, inputs: Inputs, result: Result) -> None:
        for name, z in {"outputs": result.output, **result.gradients}.items():
            if not z.isfinite().all():
                self.violations.append(f"{name} not finite")
        for name, mask, tensors in (
            ("x", inputs.mask, [result.output, result.gradients["x"]]),
            ("context", inputs.context_mask, [result.gradients.get("context")]),
        ):
            for z in tensors:
                if mask is not None and z is not None and z[~mask].count_nonzero():
                    self.violations.append(f"not zero at the padding of {name}")

    def _padded(self, inputs: Inputs, result: Result) -> None:
        """More padding, anywhere, with other content."""
        rng = random.Random(self.case.number)
        N = inputs.x.shape[1]
        places = torch.tensor(sorted(rng.sample(range(N + 4), N)))
        longer = _spread(inputs.x, places, N + 4, -55.0)
        real = (
            torch.ones(inputs.x.shape[:2], dtype=torch.bool) if inputs.mask is None else inputs.mask
        )
        mask = _spread(real, places, N + 4, False)
        moved = Inputs(
            torch.where(mask[..., None], longer, torch.full_like(longer, -55.0)),
            mask,
            inputs.context,
            inputs.context_mask,
            _spread(inputs.cotangent, places, N + 4, 1.0),
        )
        if inputs.context is not None:
            T = inputs.context.shape[1]
            there = torch.tensor(sorted(rng.sample(range(T + 3), T)))
            real = inputs.context_mask
            real = torch.ones(inputs.context.shape[:2], dtype=torch.bool) if real is None else real
            context_mask = _spread(real, there, T + 3, False)
            context = _spread(inputs.context, there, T + 3, float("nan"))
            moved = moved._replace(context=context, context_mask=context_mask)
        got = run(self.layer, moved)
        gradients = {**got.gradients, "x": got.gradients["x"][:, places]}
        if inputs.context is not None:
            gradients["context"] = gradients["context"][:, there]
        self._close("more padding", Result(got.output[:, places], gradients), result)

    def _alone(self, inputs: Inputs, result: Result) -> None:
        """Each sequence by itself, its padding cut out; gradients of parameters add up."""
        output = torch.zeros_like(result.output)
        total = {name: torch.zeros_like(g) for name, g in result.gradients.items()}
        for row in range(len(inputs.x)):
            real = torch.ones(inputs.x.shape[1], dtype=torch.bool)
            if inputs.mask is not None:
                real = inputs.mask[row]
            if not real.any():
                continue
            some = slice(row, row + 1)
            alone = Inputs(
                inputs.x[some][:, real], None, None, None, inputs.cotangent[some][:, real]
            )
            if inputs.context is not None:
                mask = None if inputs.context_mask is None else inputs.context_mask[some]
                alone = alone._replace(context=inputs.context[some], context_mask=mask)
            got = run(self.layer, alone)
            output[row, real] = got.output[0]
            for name, gradient in got.gradients.items():
                if name == "x":
                    total[name][row, real] = gradient[0]
                elif name == "context":
                    total[name][row] = gradient[0]
                else:
                    total[name] += gradient
        self._close("each sequence alone", Result(output, total), result)

    def _causal(self, inputs: Inputs, result: Result) -> None:
        t = random.Random(self.case.number).randrange(inputs.x.shape[1])
        x = inputs.x.clone()
        x[:, t:] = 3.0
        mask = inputs.mask
        if mask is not None:
            mask = torch.cat([mask[:, :t], ~mask[:, t:]], dim=1)
        output = run(self.layer, inputs._replace(x=x, mask=mask)).output[:, :t]
        self._near("another future", output, result.output[:, :t], self.case.bound.outputs)

    @torch.no_grad()
    def _decoded(self, inputs: Inputs, result: Result) -> None:
        rng, layer, x = random.Random(self.case.number), self.layer, inputs.x
        state, outputs, at = layer.init_state(len(x)), [], 0
        while at < x.shape[1]:
            size = rng.choice((1, 1, 2, 3, 8, 40))
            if size == 1 and inputs.mask is None:
                y_t, state = layer.step(x[:, at], state)
                outputs.append(y_t[:, None])
            else:
                mask = None if inputs.mask is None else inputs.mask[:, at : at + size]
                y, state = layer.prefill(x[:, at : at + size], state, token_mask=mask)
                outputs.append(y)
            at += size
        got = torch.cat(outputs, dim=1)
        self._near("decoding", got, result.output, self.case.bound.outputs)

    def _packed(self, inputs: Inputs, result: Result) -> None:
        real = (
            torch.ones(inputs.x.shape[:2], dtype=torch.bool) if inputs.mask is None else inputs.mask
        )
        if not real.any():
            return
        bounds = torch.cat([torch.zeros(1, dtype=torch.long), real.sum(1).cumsum(0)])
        flat = inputs.x[real].detach().requires_grad_()
        output = self.layer(flat, cu_seqlens=bounds)
        names = {n: p for n, p in self.layer.named_parameters() if p.requires_grad}
        d_x, *rest = torch.autograd.grad(
            output,
            [flat, *names.values()],
            inputs.cotangent[real],
            allow_unused=True,
            materialize_grads=True,
        )
        got = Result(output.detach(), {"x": d_x, **dict(zip(names, rest, strict=True))})
        want = {**result.gradients, "x": result.gradients["x"][real]}
        self._close("packed", got, Result(result.output[real], want))

    def _objective(self, inputs: Inputs) -> None:
        """The objectives of a batch do not see its padding."""
        longer = inputs._replace(
            x=nn.functional.pad(inputs.x, (0, 0, 2, 1), value=float("nan")),
            mask=nn.functional.pad(
                torch.ones(inputs.x.shape[:2], dtype=torch.bool)
                if inputs.mask is None
                else inputs.mask,
                (2, 1),
            ),
        )
        for objective in ("zero", "released", "released_batch", "explained_energy"):
            values = []
            for each in (longer, inputs):
                self.layer(each.x, **each.arguments())
                values.append(ksvd_loss(self.layer, objective=objective).detach())
            self._near(f"objective {objective} with more padding", *values, 1e-6)

    def _identical(self, what: str, got: Result, want: Result) -> None:
        tensors = ([one.output, *one.gradients.values()] for one in (got, want))
        if not _equal(*tensors):
            self.violations.append(f"{what} gives other bits")

    def _close(self, what: str, got: Result, want: Result) -> None:
        bound = self.case.bound
        self._near(f"{what}: outputs", got.output, want.output, bound.outputs)
        if _rectifies(self.case) and self.case.dtype is not torch.float64:
            self.left_out.add("rectified queries: their gradients jump at 0 or grow like 1 / q")
            return
        if self.case.name == "yoso" and self.case.dtype is torch.bfloat16:
            self.left_out.add("unit outputs in bfloat16: gradients grow like 1 / |sum of values|")
            return
        joined = [torch.cat([g.flatten() for g in one.gradients.values()]) for one in (got, want)]
        self._near(f"{what}: gradients", *joined, bound.gradients)

    def _near(self, what: str, got: Tensor, want: Tensor, bound: float) -> None:
        got, want = got.double(), want.double()
        scale = want.norm().clamp(min=1e-2 * max(want.numel(), 1) ** 0.5)
        off = float((got - want).norm() / scale)
        if not off <= bound:
            self.violations.append(f"{what} differ by {off:.1e}, bound {bound:.0e}")


def _equal(ones: list[Tensor], others: list[Tensor]) -> bool:
    """Whether they agree bit for bit; here NaN equals NaN."""
    pairs = zip(ones, others, strict=True)
    return all(torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0)) for one, other in pairs)


def _draws(case: Case) -> bool:
    """Whether the layer draws random numbers in training: hashes, landmarks, dropout."""
    rates = ("dropout", "landmark_dropout", "landmark_jitter")
    return _hashes(case) or any(case.options.get(rate, 0.0) > 0.0 for rate in rates)


def _rectifies(case: Case) -> bool:
    """Whether rounding may move a feature across the kink of relu."""
    return case.name == "cosformer" or "relu" in case.options.get("feature_map", ())


def _hashes(case: Case) -> bool:
    return case.name == "reformer"


def _spread(z: Tensor, places: Tensor, length: int, filling: float | bool) -> Tensor:
    """The tokens z [B, N, ...] at the given places of a longer sequence."""
    longer = z.new_full((z.shape[0], length, *z.shape[2:]), filling)
    return longer.index_copy(1, places, z)


def examine(number: int, build: Callable[[Case], nn.Module] = Case.build) -> Checker:
    """What the case of that number breaks; a crash is one more."""
    case = draw(number)
    checker = Checker(case, build(case))
    try:
        checker.check()
    except Exception as error:
        line = f"{type(error).__name__}: {error}".splitlines()[0]
        checker.violations.append(f"crashes with {line[:200]}")
    return checker


def main() -> int:
    """Try many cases."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--cases", type=int, default=1000)
    given = parser.parse_args()
    torch.set_num_threads(1)
    broken, left_out, names, start = 0, Counter(), Counter(), time.time()
    for number in range(given.first, given.first + given.cases):
        if number > given.first and number % 500 == 0:
            print(f"up to {number}: {broken} break the contract", flush=True)
        checker = examine(number)
        names[checker.case.name] += 1
        left_out.update(checker.left_out)
        if checker.violations:
            broken += 1
            print(f"python -m tests.fuzz.layers --first {number} --cases 1  # {checker.case}")
            for each in checker.violations:
                print("   ", each)
    print(f"{given.cases} cases, {broken} break the contract, {time.time() - start:.0f} s")
    print(f"mechanisms: {dict(names)}")
    print(f"not compared: {dict(left_out)}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
