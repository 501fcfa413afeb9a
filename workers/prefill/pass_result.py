"""The result of a prefill pass.

Owns: its form. Does not know: how passes are computed.
"""

from typing import NamedTuple

import torch

from workers.execution.draws import FirstToken
from workers.groups.stage_messages import ChunkRange


class ChunkResult(NamedTuple):
    """The result of one prompt's chunk in a pass.

    `first_token` is set in the last stage if the prompt ended with the chunk. A chunk is not computed if the
    prompt was aborted, or if blocks that were to be reused did not arrive (`PrefillJob.lacks_reuse`).
    """

    is_computed: bool
    first_token: FirstToken | None = None


class PassResult(NamedTuple):
    """The result of a pass.

    `hidden` are the states `[T, hidden_size]` of the chunks `ranges`, on the CPU, for the next stage. Without
    a next stage, or without a computed chunk, `hidden` is None and `ranges` is empty.

    With `is_lost`, a helper that has layers was lost: no chunk is computed, and the pass can be repeated once
    the layers are back.
    """

    results: list[ChunkResult]
    ranges: list[ChunkRange]
    hidden: torch.Tensor | None
    is_lost: bool = False
