"""The arithmetic of the released layer, written out from its formulas, as the thing to beat.

It keeps the features, both scores and their concatenation for the backward pass, has no mask, and
builds its objective from the explicit scores.

Letters: B batch, N tokens, D model dim, H heads, C head dim, S directions, M landmarks.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def scores(q: Tensor, k: Tensor, w_e: Tensor, w_r: Tensor) -> tuple[Tensor, Tensor]:
    """The scores e and r [B, H, N, S] of queries and keys [B, H, N, C]."""
    return F.normalize(q, dim=-1) @ w_e, F.normalize(k, dim=-1) @ w_r


def heads_out(e: Tensor, r: Tensor, score_proj: nn.Linear) -> Tensor:
    """What both scores are mapped to, the heads side by side, [B, N, D]."""
    out: Tensor = score_proj(torch.cat([e, r], dim=-1)).transpose(1, 2).flatten(2)
    return out


def energy(score: Tensor, lambda_diag: Tensor) -> Tensor:
    """The half mean square of scores times Lambda, [B]."""
    scaled = score @ torch.diag_embed(lambda_diag)
    mean: Tensor = scaled.norm(dim=-1).square().mean(2).mean(1)
    return mean / 2


class ReleasedArithmetic(nn.Module):
    """Data-dependent weights from M landmarks, or causal with data-independent ones."""

    def __init__(
        self, dim: int, num_heads: int, num_directions: int, num_landmarks: int, *, causal: bool
    ):
        super().__init__()
        self.num_heads, self.num_landmarks, self.causal = num_heads, num_landmarks, causal
        head_dim = dim // num_heads
        rows = head_dim if causal else num_landmarks
        self.q_proj, self.k_proj = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.w_e = nn.Parameter(torch.empty(num_heads, rows, num_directions))
        self.w_r = nn.Parameter(torch.empty(num_heads, rows, num_directions))
        nn.init.orthogonal_(self.w_e)
        nn.init.orthogonal_(self.w_r)
        self.lambda_diag = nn.Parameter(torch.rand(num_heads, num_directions))
        self.score_proj = nn.Linear(2 * num_directions, head_dim)
        self.out_proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs [B, N, D] and J^2, mean over tokens, squared for each sequence."""
        out, e, r = self.attend(x)
        return out, self.objective(e, r)

    def attend(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Outputs [B, N, D] and the scores e, r [B, H, N, S]."""
        B, N, D = x.shape
        H = self.num_heads
        q = self.q_proj(x).view(B, N, H, -1).transpose(1, 2)  # [B, H, N, C]
        k = self.k_proj(x).view(B, N, H, -1).transpose(1, 2)
        w_e: Tensor = self.w_e
        w_r: Tensor = self.w_r
        if self.causal:
            t = torch.arange(1, N + 1, device=x.device, dtype=x.dtype)[:, None]
            q, k = q.cumsum(2) / t, k.cumsum(2) / t
        else:
            index = torch.linspace(0, N - 1, self.num_landmarks).long().to(x.device)
            sampled = x[:, index].view(B, -1, H, D // H).permute(0, 2, 3, 1)  # [B, H, C, M]
            w_e, w_r = sampled @ w_e, sampled @ w_r
        e, r = scores(q, k, w_e, w_r)
        return self.out_proj(heads_out(e, r, self.score_proj)), e, r

    def objective(self, e: Tensor, r: Tensor) -> Tensor:
        """J^2 from the scores."""
        energies = energy(e, self.lambda_diag) + energy(r, self.lambda_diag)
        trace = torch.diagonal(self.w_e.mT @ self.w_r, dim1=-2, dim2=-1).sum(-1).mean()
        squared: Tensor = (energies - trace).square()
        return squared.mean()
