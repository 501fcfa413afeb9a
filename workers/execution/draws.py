"""The draws of a pass: from requests' sampling parameters to the tensors that the engine samples with.

Owns: the parameters of each row. Does not know: the model, batches, how a logit is changed.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from mooncake.messages.requests import Request, SamplingParams, TokenLogprobs
from workers.engine.logit_changes import LogitChanges, LogitRules, OutputGrammar
from workers.engine.sampling import DrawLimits, logprobs, sample, uniform


class Drawn(NamedTuple):
    """The result of a pass: one token for each row.

    `logprobs` has an entry for each row whose request wants logprobs, by the row's index.
    """

    tokens: list[int]
    logprobs: dict[int, TokenLogprobs]


class FirstToken(NamedTuple):
    """A prompt's first token, drawn by prefill, with its `logprobs` if the request wants them."""

    token: int
    logprobs: TokenLogprobs | None = None


class Row(NamedTuple):
    """The input of one draw: the `position` of the token to draw, and the request's `output` so far.

    `rules` are the request's changes of logits; None if there are none.
    """

    sampling: SamplingParams
    position: int
    rules: LogitRules | None = None
    output: Sequence[int] = ()


def rules_of(request: Request, grammar: OutputGrammar | None = None) -> LogitRules | None:
    """Return the changes of logits that a request asks for; None if it asks for none.

    `grammar` is the state of the request's grammar.
    """
    sampling = request.sampling
    is_neutral = (
        (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1, 0, 0)
        and not sampling.logit_bias
        and not sampling.bad_words
        and not sampling.min_tokens
        and grammar is None
    )
    if is_neutral:
        return None
    prompt = request.token_ids[: request.num_prompt_tokens] if sampling.repetition_penalty != 1 else []
    return LogitRules(
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        prompt_tokens=np.unique(np.asarray(prompt, dtype=np.int64)),
        bias_tokens=np.fromiter(sampling.logit_bias, np.int64),
        biases=np.fromiter(sampling.logit_bias.values(), np.float32),
        bad_words=sampling.bad_words,
        min_tokens=sampling.min_tokens,
        stop_tokens=np.asarray(sampling.stop_token_ids, dtype=np.int64),
        grammar=grammar,
    )


class Draws:
    """The draws of one pass: one row for each chunk whose next token is drawn.

    Each row draws the token that follows its chunk's last token. `chunks` are the indices of these chunks in
    the pass, in the order of `rows`; None if every chunk has a row.
    """

    def __init__(self, rows: Sequence[Row], chunks: Sequence[int] | None = None) -> None:
        self._chunks = chunks
        sampling = [row.sampling for row in rows]
        uniforms = [
            uniform(row.sampling.seed, row.position) if row.sampling.temperature > 0 else 0.0 for row in rows
        ]
        self._limits = DrawLimits(
            np.array([params.temperature for params in sampling]),
            np.array([params.top_k for params in sampling]),
            np.array([params.top_p for params in sampling]),
            np.array([params.min_p for params in sampling]),
            np.array(uniforms),
        )
        self._changes = LogitChanges()
        for index, row in enumerate(rows):
            if row.rules is not None:
                self._changes.add(index, row.rules, row.output)
        self._num_logprobs = {
            index: params.num_logprobs
            for index, params in enumerate(sampling)
            if params.num_logprobs is not None
        }

    def extend(self, row: int, token: int) -> None:
        """Append a token to the output of a row, for penalties and grammars that depend on the output.

        To be called for a row that was made before the earlier pass had drawn the row's newest token.
        """
        self._changes.extend(row, token)

    def draw(self, logits: torch.Tensor) -> Drawn:
        """Draw one token for each row, and wait for the device.

        `logits` are float32 `[N, vocab_size]`, with a row for each chunk of the pass, or only for each chunk
        whose next token is drawn. If every row of `logits` is drawn from, `logits` are changed in place.
        """
        if self._chunks is not None and len(self._chunks) < len(logits):
            logits = logits[torch.tensor(self._chunks, dtype=torch.int64, device=logits.device)]
        if not len(logits):
            if logits.is_cuda:
                torch.cuda.current_stream(logits.device).synchronize()
            return Drawn([], {})
        if not self._num_logprobs:
            self._changes.apply(logits)
            return Drawn(sample(logits, self._limits).tolist(), {})
        rows = torch.tensor(list(self._num_logprobs), device=logits.device)
        as_they_came = logits[rows]
        self._changes.apply(logits)
        tokens = sample(logits, self._limits)
        return Drawn(tokens.tolist(), self._report(as_they_came, tokens[rows]))

    def _report(self, logits: torch.Tensor, tokens: torch.Tensor) -> dict[int, TokenLogprobs]:
        computed = logprobs(logits, tokens, max(self._num_logprobs.values()))
        drawn, top_tokens, top = (values.tolist() for values in computed)
        return {
            row: TokenLogprobs(drawn[index], top_tokens[index][:num], top[index][:num])
            for index, (row, num) in enumerate(self._num_logprobs.items())
        }
