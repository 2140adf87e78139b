"""Blending the outputs of machine and networks, chosen on cases held out of both.

Each of them counts with a factor. For classes the factors are those with the least log loss, so
they are a temperature too: probabilities are calibrated on what was held out.
"""

import torch
from torch import Tensor

Blend = tuple[float, float]
FACTORS = (0.0, *(2 ** (power / 2) for power in range(-8, 13)))


def blend_of_classes(
    scores: Tensor | None, logits: Tensor | None, target: Tensor, weight: Tensor
) -> Blend:
    """Choose the factors of scores and logits [m, K] for classes [m] of cases with weights [m].

    Missing outputs have the factor 0; at least one of the two is given. As in Platt's calibration a
    class gets a little less than all of the probability, so that a few cases that are all right do
    not ask for certainty. Logits beside scores count where they lower the log loss by more than a
    standard error: a few cases are soon matched by chance.
    """
    present = [each for each in (scores, logits) if each is not None]
    m, K = present[0].shape
    smoothed = torch.full((m, K), 1 / (m + 2) / K, dtype=torch.float64, device=target.device)
    smoothed[torch.arange(m), target] += 1 - 1 / (m + 2)
    factors = torch.tensor(FACTORS, dtype=torch.float64, device=target.device)
    first = factors if scores is not None else factors[:1]
    second = factors if logits is not None else factors[:1]
    weighted = smoothed * (weight / weight.sum())[:, None]
    losses = torch.stack(  # [first, second, m], of each case
        [
            -(weighted * (a * _or_zero(scores) + b * _or_zero(logits)).log_softmax(-1)).sum(-1)
            for a in first
            for b in second
        ]
    ).view(len(first), len(second), m)
    totals = losses.sum(-1)
    totals[0, 0] = torch.inf  # one class for all cases
    i, j = divmod(int(totals.argmin()), len(second))
    if scores is not None and logits is not None:
        alone = int(totals[:, 0].argmin())
        gains = losses[alone, 0] - losses[i, j]
        if gains.sum() < m**0.5 * gains.std():
            i, j = alone, 0
    return float(first[i]), float(second[j])


def blend_of_numbers(
    scores: Tensor | None, outputs: Tensor | None, target: Tensor, weight: Tensor
) -> Blend:
    """Choose the shares of scores and outputs [m, 1] for numbers [m] by their squared error."""
    if scores is None or outputs is None:
        return float(scores is not None), float(outputs is not None)
    shares = [step / 20 for step in range(21)]
    errors = [
        float((weight * (share * scores + (1 - share) * outputs)[:, 0].sub(target).square()).sum())
        for share in shares
    ]
    share = shares[errors.index(min(errors))]
    return share, 1 - share


def _or_zero(outputs: Tensor | None) -> Tensor:
    return torch.zeros(1, 1, dtype=torch.float64) if outputs is None else outputs.double()
