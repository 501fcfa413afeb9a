"""Draws of the next token from logits (greedy, temperature, min-p, top-k, top-p), and logprobs.

A draw depends on the request's seed and the token's position only (`uniform`), not on the worker that
makes it nor on the batch around it: a request that moves to another instance continues with the same text.

Owns: the draw, the ranking of tokens. Does not know: penalties, logit biases, grammars, which change the
logits before (`logit_changes`).
"""

import hashlib
from typing import NamedTuple

import numpy as np
import torch

_NUM_LIKELY = 1024
"""Most likely tokens that are ranked for a draw. With most models nearly all draws lie among them."""


def uniform(seed: int, position: int) -> float:
    """Return the number in [0, 1) that draws the token at `position`. `seed` and `position` are any
    integers."""
    digest = hashlib.sha256(f"{seed}:{position}".encode()).digest()
    return (int.from_bytes(digest[:8], "little") >> 11) * 2.0**-53


@torch.inference_mode()
def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniforms: torch.Tensor,
) -> torch.Tensor:
    """Draw the next token of each row of `logits` [S, V] (float32, finite or -inf): int64 `[S]`.

    The five parameters are `[S]`, best on the CPU (then an all-greedy batch never waits for the device).
    `temperature` 0 is greedy. `min_p` in [0, 1] keeps tokens whose probability is at least this fraction of
    the largest (arXiv 2407.01082). `top_k` 0 keeps all. `top_p` in (0, 1] keeps the smallest set of most
    likely tokens whose mass reaches it, among the tokens that min-p and top-k keep. Equal logits rank by
    token id. `uniforms`: float64 in [0, 1). Rows are independent of one another.
    """
    tokens = logits.argmax(-1)
    is_drawn = temperature > 0
    if bool(is_drawn.any()):
        rows = is_drawn.nonzero()[:, 0].to(logits.device)
        limits = [values.to(logits.device)[rows] for values in (temperature, top_k, top_p, min_p, uniforms)]
        tokens[rows] = _draw(logits[rows], *limits, num_ranked=_NUM_LIKELY)
    return tokens


def _draw(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniforms: torch.Tensor,
    *,
    num_ranked: int,
) -> torch.Tensor:
    """Invert each row's cumulative distribution, in float64, over its tokens in order of descending
    probability.

    Only the `num_ranked` most likely tokens are ranked, as sorting a vocabulary takes longer than a step of
    decoding on a GPU. The others are one rank behind them; rows for which this does not suffice are drawn
    among all.
    """
    vocab_size = logits.shape[-1]
    num_ranked = min(num_ranked, vocab_size)
    values, tokens = _rank(logits, num_ranked)
    weights = values.double().sub_(values[:, :1]).div_(temperature[:, None]).exp_()
    cumulative = weights.cumsum(-1)
    if num_ranked < vocab_size:
        everything = logits.double().sub_(values[:, :1]).div_(temperature[:, None]).exp_().sum(-1)
        cumulative = torch.cat((cumulative, torch.maximum(everything, cumulative[:, -1])[:, None]), dim=-1)
    num_ranks = cumulative.shape[-1]
    num_by_k = torch.where(top_k > 0, top_k.clamp(max=num_ranks), num_ranks)
    num_likely = (weights >= min_p[:, None]).sum(-1).clamp(min=1)
    num_by_k = torch.where(num_likely < num_ranked, torch.minimum(num_by_k, num_likely), num_by_k)
    mass_by_k = cumulative.gather(-1, num_by_k[:, None] - 1)
    num_by_p = torch.searchsorted(cumulative, top_p[:, None] * mass_by_k) + 1
    num_kept = torch.minimum(num_by_k[:, None], num_by_p)
    kept_mass = cumulative.gather(-1, num_kept - 1)
    rank = torch.searchsorted(cumulative, uniforms[:, None] * kept_mass, right=True)
    rank = torch.minimum(rank, num_kept - 1)[:, 0]
    drawn = tokens.gather(-1, rank.clamp(max=num_ranked - 1)[:, None])[:, 0]
    if num_ranked == vocab_size:
        return drawn
    is_cut_behind = (num_by_k == num_ranks) & ((top_k > 0) | (min_p > 0))
    is_cut_behind |= (num_kept[:, 0] == num_ranks) & (top_p < 1)
    behind = (is_cut_behind | (rank == num_ranked)).nonzero()[:, 0]
    if len(behind):
        limits = (temperature, top_k, top_p, min_p, uniforms)
        drawn[behind] = _draw(logits[behind], *(limit[behind] for limit in limits), num_ranked=vocab_size)
    return drawn


class Logprobs(NamedTuple):
    """Logprobs of R rows: of the drawn tokens, float32 `[R]`; ids and logprobs of the N most likely tokens,
    int64 and float32 `[R, N]`."""

    drawn: torch.Tensor
    top_tokens: torch.Tensor
    top: torch.Tensor


@torch.inference_mode()
def logprobs(logits: torch.Tensor, tokens: torch.Tensor, num_top: int) -> Logprobs:
    """Return the logprobs of `tokens` [R] by `logits` [R, V] (float32), and of the `num_top` most likely
    tokens.

    The most likely tokens are in descending order, equal ones by id.
    """
    values, top_tokens = _rank(logits, num_top)
    log_mass = logits.logsumexp(-1, keepdim=True)
    return Logprobs(
        (logits.gather(-1, tokens[:, None]) - log_mass)[:, 0],
        top_tokens,
        values - log_mass,
    )


def _rank(logits: torch.Tensor, num_ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `num_ranks` largest logits of each row, descending, and their token ids; equal ones by id.

    Sorts integers that hold both: the float's bits, made monotonic, above the complement of the id. No two
    are equal, so any sort is stable, and on the CPU numpy's vectorised one is 15 times as fast as torch's.
    """
    vocab_size = logits.shape[-1]
    bits = (logits + 0.0).view(torch.int32)  # + 0.0 makes -0.0 equal to 0.0
    monotonic = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    complement = torch.arange(vocab_size - 1, -1, -1, device=logits.device)
    keys = (monotonic.long() << 32).add_(complement)
    is_few = 0 < num_ranks < vocab_size
    if is_few and keys.device.type == "cpu":
        keys = torch.from_numpy(np.partition(keys.numpy(), vocab_size - num_ranks, axis=-1)[:, -num_ranks:])
    elif is_few:
        keys = keys.topk(num_ranks, dim=-1, sorted=False).values
    if keys.device.type == "cpu":
        keys = torch.from_numpy(np.sort(keys.numpy(), axis=-1)).flip(-1)[:, :num_ranks]
    else:
        keys = keys.sort(dim=-1, descending=True).values[:, :num_ranks]
    monotonic = (keys >> 32).int()
    values = (monotonic ^ ((monotonic >> 31) & 0x7FFFFFFF)).view(torch.float32)
    return values, vocab_size - 1 - (keys & 0xFFFFFFFF)
