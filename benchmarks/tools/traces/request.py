"""One request of a load, and the error for loads that cannot be made.

Owns: the vocabulary of loads. Does not know: where loads come from, which system gets them.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from mooncake.errors import MooncakeError

BLOCK_TOKENS = 512
"""The number of tokens of each block that `hash_ids` name."""


class TraceError(MooncakeError):
    """A trace or a description of a load cannot be used. The message names the file and the line."""


class TraceRequest(NamedTuple):
    """One request. `hash_ids` name the blocks of its prompt; the last block may be partial.

    An id stands for a block and all tokens before it, so equal ids mean equal prefixes. A prompt without ids
    shares nothing.
    """

    arrival_s: float
    """Seconds since the load's beginning."""
    num_input_tokens: int
    num_output_tokens: int
    hash_ids: tuple[int, ...] = ()


def num_blocks_of(num_tokens: int) -> int:
    """Return the number of blocks of a prompt, including the partial block."""
    return -(-num_tokens // BLOCK_TOKENS)


def in_blocks(load: Iterable[TraceRequest], block_tokens: int) -> Iterator[TraceRequest]:
    """Yield the same requests with shorter blocks: each block is divided into blocks of `block_tokens`."""
    num_parts = BLOCK_TOKENS // block_tokens
    for request in load:
        if num_parts > 1:
            parts = (of * num_parts + part for of in request.hash_ids for part in range(num_parts))
            request = request._replace(hash_ids=tuple(parts))
        yield request
