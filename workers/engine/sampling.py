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

from workers.engine.upload import upload

_NUM_LIKELY = 1024
"""The number of most likely tokens that are ranked for a filter.

With most models nearly all draws are among these tokens.
"""


def uniform(seed: int, position: int) -> float:
    """Return the random number in [0, 1) that draws the token at `position`; any integers are allowed."""
    digest = hashlib.sha256(f"{seed}:{position}".encode()).digest()
    return (int.from_bytes(digest[:8], "little") >> 11) * 2.0**-53


class _DeviceLimits(NamedTuple):
    """The sampling limits of S rows on the device of their logits: float64 tensors `[S, 1]`.

    The fields are those of `DrawLimits`.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    uniforms: torch.Tensor


class DrawLimits(NamedTuple):
    """The sampling limits of S rows: float64 arrays `[S]` on the CPU.

    `temperature` 0 is greedy. `min_p` in [0, 1] keeps tokens whose probability is at least this fraction of
    the largest (arXiv 2407.01082). `top_k` 0 keeps all. `top_p` in (0, 1] keeps the fewest most likely tokens
    that have at least this share of the probability that min-p and top-k keep. Equal logits rank by token id.
    `uniforms` are the random numbers of the draws, in [0, 1).
    """

    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    uniforms: np.ndarray

    def of(self, rows: np.ndarray) -> "DrawLimits":
        """Return the limits of these rows (indices)."""
        return DrawLimits(*(values[rows] for values in self))

    def on(self, device: torch.device) -> _DeviceLimits:
        """Return the limits on a device, without waiting for it."""
        columns = upload([values.astype(np.float64)[:, None].view(np.int64) for values in self], device)
        return _DeviceLimits(*(column.view(torch.float64) for column in columns))


@torch.inference_mode()
def sample(logits: torch.Tensor, limits: DrawLimits) -> torch.Tensor:
    """Draw the next token of each row of `logits` [S, V] (float32, finite or -inf): int64 `[S]`.

    Rows are independent of one another. Waits for the device only for rows with a filter.
    """
    is_drawn = limits.temperature > 0
    is_filtered = (limits.top_k > 0) | (limits.top_p < 1) | (limits.min_p > 0)
    ways = (
        (~is_drawn, _most_likely),
        (is_drawn & ~is_filtered, _draw),
        (is_drawn & is_filtered, _draw_filtered),
    )
    for is_so, draw in ways:
        if is_so.all():
            return draw(logits, limits)
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    for is_so, draw in ways:
        if is_so.any():
            (rows,) = is_so.nonzero()
            (at,) = upload([rows], logits.device)
            tokens[at] = draw(logits[at], limits.of(rows))
    return tokens


def _most_likely(logits: torch.Tensor, _limits: DrawLimits) -> torch.Tensor:
    return logits.argmax(-1)


def _draw(logits: torch.Tensor, limits: DrawLimits) -> torch.Tensor:
    """Draw a token of each row from all tokens: int64 `[S]`.

    No token is filtered out. The cumulative distribution, in float64, has the tokens in the order of ids.
    """
    on_device = limits.on(logits.device)
    # In place: new memory for all rows takes longer than the arithmetic.
    weights = logits.double().sub_(logits.amax(-1, keepdim=True)).div_(on_device.temperature).exp_()
    cumulative = weights.cumsum_(-1)
    mass = cumulative[:, -1:].contiguous()
    token = torch.searchsorted(cumulative, on_device.uniforms * mass, right=True)
    # If the product is rounded up to the whole mass, the last token that has mass is drawn.
    token = torch.minimum(token, torch.searchsorted(cumulative, mass))[:, 0]
    # A row whose mass is NaN draws some token: an id outside the vocabulary would fail the whole batch.
    return token.clamp_(max=logits.shape[-1] - 1)


def _draw_filtered(logits: torch.Tensor, limits: DrawLimits, num_ranked: int | None = None) -> torch.Tensor:
    """Draw a token of each row from the tokens that the filters keep: int64 `[S]`.

    The draw is from the cumulative distribution in float64, in descending probability. Only the `num_ranked`
    (default: _NUM_LIKELY) most likely tokens are ranked, as sorting a vocabulary takes longer than a decode
    step on a GPU. All other tokens share the rank behind them. If a filter cuts among these other tokens, all
    tokens of the row are ranked.
    """
    vocab_size = logits.shape[-1]
    num_ranked = min(num_ranked or _NUM_LIKELY, vocab_size)
    on_device = limits.on(logits.device)
    temperature, top_k, top_p = on_device.temperature, on_device.top_k, on_device.top_p
    min_p, uniforms = on_device.min_p, on_device.uniforms
    values, tokens = _rank(logits, num_ranked)
    weights = values.double().sub_(values[:, :1]).div_(temperature).exp_()
    cumulative = weights.cumsum(-1)
    # Whether only ranked tokens are kept: then the mass of the others does not matter.
    is_complete = num_ranked == vocab_size or bool(((limits.top_k > 0) & (limits.top_k <= num_ranked)).all())
    if not is_complete:
        everything = logits.double().sub_(values[:, :1]).div_(temperature).exp_().sum(-1, keepdim=True)
        cumulative = torch.cat((cumulative, torch.maximum(everything, cumulative[:, -1:])), dim=-1)
    num_ranks = cumulative.shape[-1]
    num_by_k = torch.where(top_k > 0, top_k.clamp(max=num_ranks), num_ranks).long()
    if (limits.min_p > 0).any():
        num_likely = (weights >= min_p).sum(-1, keepdim=True).clamp(min=1)
        num_by_k = torch.where(num_likely < num_ranked, torch.minimum(num_by_k, num_likely), num_by_k)
    num_by_p = torch.searchsorted(cumulative, top_p * cumulative.gather(-1, num_by_k - 1)) + 1
    num_kept = torch.minimum(num_by_k, num_by_p)
    rank = torch.searchsorted(cumulative, uniforms * cumulative.gather(-1, num_kept - 1), right=True)
    rank = torch.minimum(rank, num_kept - 1)
    drawn = tokens.gather(-1, rank.clamp(max=num_ranked - 1))[:, 0]
    if is_complete:
        return drawn
    is_cut_behind = (num_by_k == num_ranks) & ((top_k > 0) | (min_p > 0))
    is_cut_behind |= (num_kept == num_ranks) & (top_p < 1)
    behind = is_cut_behind[:, 0].nonzero()[:, 0]
    if len(behind):
        drawn[behind] = _draw_filtered(logits[behind], limits.of(behind.cpu().numpy()), vocab_size)
    return drawn


class Logprobs(NamedTuple):
    """The logprobs of R rows.

    `drawn`, float32 `[R]`, are those of the drawn tokens. `top_tokens`, int64 `[R, N]`, are the N most likely
    tokens of each row, and `top`, float32 `[R, N]`, their logprobs.
    """

    drawn: torch.Tensor
    top_tokens: torch.Tensor
    top: torch.Tensor


@torch.inference_mode()
def logprobs(logits: torch.Tensor, tokens: torch.Tensor, num_top: int) -> Logprobs:
    """Return the logprobs of `tokens` [R] and of each row's `num_top` most likely tokens.

    `logits` are float32 `[R, V]`. The most likely tokens are in descending order, equally likely tokens by
    id.
    """
    values, top_tokens = _rank(logits, num_top)
    log_mass = logits.logsumexp(-1, keepdim=True)
    return Logprobs(
        (logits.gather(-1, tokens[:, None]) - log_mass)[:, 0],
        top_tokens,
        values - log_mass,
    )


def _rank(logits: torch.Tensor, num_ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `num_ranks` largest logits of each row, descending, and their token ids; equal logits by id.

    The sort is over integers that hold logit and id: the logit's bits, made monotonic, above the complement
    of the id. No two integers are equal, so any sort is stable, and on the CPU numpy's vectorised one is 15
    times as fast as torch's.
    """
    if num_ranks == 0:
        return logits[:, :0], logits[:, :0].long()
    vocab_size = logits.shape[-1]
    bits = (logits + 0.0).view(torch.int32)  # + 0.0 makes -0.0 equal to 0.0
    monotonic = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    complement = torch.arange(vocab_size - 1, -1, -1, device=logits.device)
    keys = (monotonic.long() << 32).add_(complement)
    is_few = num_ranks < vocab_size
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
