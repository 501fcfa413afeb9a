"""The norms that some models (Qwen3) apply to each query and key before rotation.

Owns: their weights. Does not know: how they are computed.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Weights `[head_dim]`, in the heads' dtype, of the norm of each query and of each key."""

    query: torch.Tensor
    key: torch.Tensor
    eps: float
