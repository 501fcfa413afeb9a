"""The split of a model over the ranks of a tensor-parallel group (Megatron-LM, arXiv 1909.08053, section 3).

A rank computes with its KV heads and the query heads that use them, its columns of the MLP, and its rows of
the vocabulary. The ranks' results are added up over the group twice per layer, after attention and after the
MLP. Parts are as even as whole heads and the kernels allow.

Owns: the split, and a rank's calls to its group. Does not know: weights, arithmetic, how ranks meet.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from workers.engine.spec import ModelSpec, UnsupportedModel

# The MLP is cut at multiples of this number: the CPU's kernels need that, and GPUs are faster with it.
_MLP_MULTIPLE = 16


class RankLost(RuntimeError):
    """Another rank is lost, or has not joined in time, so the group cannot compute."""


@dataclass(frozen=True, slots=True)
class TensorShard:
    """The collective calls of one rank in a group of `size`.

    All ranks make the same calls, in the same order. A call blocks until all ranks have made it; on CUDA the
    stream waits, and not the caller. Raises RankLost if a rank does not make its call in time.
    """

    rank: int
    size: int
    all_reduce: Callable[[torch.Tensor], None]
    """A function that sums a contiguous tensor over the ranks in place, with the same bits on every rank."""
    all_gather: Callable[[torch.Tensor], torch.Tensor]
    """A function that gathers every rank's contiguous `[...]` into `[size, ...]`, in the ranks' order."""

    def __post_init__(self) -> None:
        _check(self.rank, self.size)

    def any(self, flags: Sequence[bool]) -> list[bool]:
        """Return for each flag whether any rank has set it."""
        return self.all_gather(torch.tensor(flags, dtype=torch.uint8)).any(0).tolist()


@dataclass(frozen=True, slots=True)
class RankPart:
    """One rank's part of a model, in ranges of the whole. An unsplit model is rank 0 of 1."""

    kv_heads: range
    heads: range
    """The query heads that use `kv_heads`."""
    mlp_columns: range
    """The columns of gate and up, and rows of down."""
    vocab: range
    """The rows of embedding and head."""
    adds_bias: bool
    """Whether this rank adds the biases of products that are summed over the ranks. Exactly one rank does."""


def kv_heads_of(spec: ModelSpec, rank: int, size: int) -> range:
    """Return the KV heads of `rank`. If `size` does not divide their number, the first ranks hold one more.

    Raises UnsupportedModel if there are fewer KV heads than ranks.
    """
    _check(rank, size)
    if size > spec.num_kv_heads:
        raise UnsupportedModel(
            f"a tensor-parallel group of {size} needs {size} KV heads or more, "
            f"the model has {spec.num_kv_heads}"
        )
    return _share(spec.num_kv_heads, rank, size)


def part_of(spec: ModelSpec, rank: int = 0, size: int = 1) -> RankPart:
    """Return the part of the model that `rank` of `size` ranks holds.

    Raises UnsupportedModel for more ranks than a dimension can be split into.
    """
    kv_heads = kv_heads_of(spec, rank, size)
    group = spec.num_heads // spec.num_kv_heads
    return RankPart(
        kv_heads=kv_heads,
        heads=range(kv_heads.start * group, kv_heads.stop * group),
        mlp_columns=_mlp_columns_of(spec, rank, size),
        vocab=vocab_of(spec, rank, size),
        adds_bias=rank == 0,
    )


def vocab_of(spec: ModelSpec, rank: int, size: int) -> range:
    """Return the token ids whose rows of embedding and head `rank` holds."""
    return _share(spec.vocab_size, rank, size)


def _mlp_columns_of(spec: ModelSpec, rank: int, size: int) -> range:
    unit = 1 if spec.intermediate_size % _MLP_MULTIPLE else _MLP_MULTIPLE
    if size * unit > spec.intermediate_size:
        raise UnsupportedModel(
            f"a tensor-parallel group of {size} needs an intermediate_size of {size * unit} or more, "
            f"the model has {spec.intermediate_size}"
        )
    units = _share(spec.intermediate_size // unit, rank, size)
    return range(units.start * unit, units.stop * unit)


def _share(count: int, rank: int, size: int) -> range:
    base, extra = divmod(count, size)
    start = rank * base + min(rank, extra)
    return range(start, start + base + (rank < extra))


def _check(rank: int, size: int) -> None:
    if not 0 <= rank < size:
        raise ValueError(f"expected a rank in [0, {size}), got {rank}")
