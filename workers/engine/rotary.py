"""Rotary position embeddings, computed as transformers does: frequencies and angles in float32.

Owns: frequencies with their scaling, and the rotation. Does not know: batches or layers.
"""

import math
from functools import lru_cache

import torch

from workers.engine.spec import ModelSpec, RopeKind


@lru_cache(maxsize=8)
def inverse_frequencies(spec: ModelSpec) -> torch.Tensor:
    """Return the angle per position of each pair of dimensions: float32 `[head_dim / 2]`, on the CPU."""
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.float32) / spec.head_dim
    frequencies = 1.0 / (spec.rope_theta**exponents)
    scaling = spec.rope_scaling
    if scaling.kind is RopeKind.LINEAR:
        return frequencies / scaling.factor
    if scaling.kind is RopeKind.LLAMA3:
        return _llama3_frequencies(spec, frequencies)
    return frequencies


def _llama3_frequencies(spec: ModelSpec, frequencies: torch.Tensor) -> torch.Tensor:
    """Return frequencies scaled as in Llama 3.1.

    Long wavelengths are stretched by `factor`, short wavelengths are kept, medium ones are interpolated.
    """
    scaling = spec.rope_scaling
    original, low, high = scaling.original_max_position, scaling.low_freq_factor, scaling.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    stretched = torch.where(wavelengths > original / low, frequencies / scaling.factor, frequencies)
    smooth = (original / wavelengths - low) / (high - low)
    smoothed = (1 - smooth) * stretched / scaling.factor + smooth * stretched
    is_medium = ~(wavelengths < original / high) & ~(wavelengths > original / low)
    return torch.where(is_medium, smoothed, stretched)


@lru_cache(maxsize=8)
def _frequencies_on(spec: ModelSpec, device: torch.device) -> torch.Tensor:
    """Return the inverse frequencies on a device, float32 `[head_dim / 2]`.

    The result is cached, as a copy would make every batch wait.
    """
    return inverse_frequencies(spec).to(device)


def cos_sin(spec: ModelSpec, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines of the angles at int64 `positions` [T]: float32 `[T, head_dim / 2]` each."""
    angles = positions[:, None].to(torch.float32) * _frequencies_on(spec, positions.device)
    return angles.cos(), angles.sin()


def rotation_factors(
    cos: torch.Tensor, sin: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the factors of `rotate` from `cos_sin`: two tensors `[T, 1, head_dim]` in `dtype`.

    The first half of the sines is negated, so that `rotate` needs no negation.
    """
    cos, sin = cos.to(dtype), sin.to(dtype)
    return torch.cat((cos, cos), dim=-1)[:, None], torch.cat((-sin, sin), dim=-1)[:, None]


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate `heads` [T, heads, head_dim] by `rotation_factors`' result; pairs are (i, i + head_dim / 2)."""
    first, second = heads.chunk(2, dim=-1)
    return (heads * cos).add_(torch.cat((second, first), dim=-1).mul_(sin))
