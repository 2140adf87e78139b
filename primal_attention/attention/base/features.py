"""From queries and keys to the two sides of the kernel, ready for the ops.

Letters: B batch, N tokens, H heads, C head dim, P feature dim.
"""

from typing import NamedTuple

from torch import Tensor, nn

from primal_attention.feature_maps import FeatureMap, FeatureMapSpec, feature_map_pair


class FeatureSide(NamedTuple):
    """Queries or keys z [B, N, H, C] and the name of the fixed map that makes features of them.

    Where the layer's map is a module, z holds its features already and the name is ``identity``.
    """

    z: Tensor
    feature_map: str = "identity"


class FeaturePair(nn.Module):
    """The maps g_q and g_k, shared or not, with the normaliser of Remark 4.1 where they have it."""

    def __init__(self, spec: FeatureMapSpec, head_dim: int):
        super().__init__()
        pair = feature_map_pair(spec, head_dim)
        queries, keys = (
            each if isinstance(each, str) else "identity" for each in (pair[0], pair[-1])
        )
        self.names = queries, keys
        self.maps = nn.ModuleList(one for one in pair if isinstance(one, FeatureMap))
        self._is_module = [isinstance(one, FeatureMap) for one in (pair[0], pair[-1])]
        self.has_modules = len(self.maps) > 0
        self.normalised = any(one.normalised for one in self.maps)
        dims = [one.feature_dim for one in pair if isinstance(one, FeatureMap)]
        self.feature_dim: int = dims[0] if dims else head_dim

    def queries(self, q: Tensor) -> FeatureSide:
        """Return the side phi_q of the queries."""
        return FeatureSide(self.maps[0](q) if self._is_module[0] else q, self.names[0])

    def keys(self, k: Tensor) -> FeatureSide:
        """Return the side phi_k of the keys."""
        return FeatureSide(self.maps[-1](k) if self._is_module[1] else k, self.names[1])
