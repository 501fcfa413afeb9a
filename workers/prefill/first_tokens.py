"""The first tokens of prompts that end with a pass, drawn from the pass's hidden states.

Owns: these draws. Does not know: passes, what becomes of the tokens.
"""

from collections.abc import Sequence

import torch

from workers.engine.model import DecoderModel
from workers.execution.draws import Draws, FirstToken, Row, rules_of
from workers.kvcache.layerwise import PassPart
from workers.prefill.job import PrefillJob


def ends_of(
    parts: Sequence[PassPart], are_computed: Sequence[bool], are_last: Sequence[bool]
) -> dict[int, int]:
    """Return the rows of hidden states from which first tokens are drawn.

    The result's keys are the indices of the prompts' parts.
    """
    ends, row = {}, -1
    for index, part in enumerate(parts):
        row += len(part.chunk.token_ids)
        if are_computed[index] and are_last[index]:
            ends[index] = row
    return ends


def first_tokens(
    model: DecoderModel, jobs: Sequence[PrefillJob], ends: dict[int, int], hidden: torch.Tensor
) -> list[FirstToken | None]:
    """Return the first token of each prompt that ends with this pass, and None for every other prompt.

    `ends` is the result of `ends_of`, `hidden` has the states `[T, hidden_size]` of the last layer.
    """
    tokens: list[FirstToken | None] = [None] * len(jobs)
    if ends:
        requests = [jobs[index].order.request for index in ends]
        logits = model.logits(hidden[list(ends.values())])
        grammars = [jobs[index].grammar for index in ends]
        rows = [
            Row(request.sampling, len(request.token_ids), rules_of(request, grammar), request.output)
            for request, grammar in zip(requests, grammars, strict=True)
        ]
        drawn = Draws(rows).draw(logits)
        for of_drawn, (index, token) in enumerate(zip(ends, drawn.tokens, strict=True)):
            tokens[index] = FirstToken(token, drawn.logprobs.get(of_drawn))
    return tokens
