"""Changes of logits that requests ask for, before a token is drawn.

The changes are penalties for tokens that have occurred (CTRL, arXiv 1909.05858, section 4.1, and OpenAI's
two), biases, and forbidden tokens: those that must not come next, and those that a grammar does not allow.
The order is vLLM's: forbidden tokens, biases, penalties.

Owns: these changes, for the rows that want some. Does not know: the draw, requests.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch


class OutputGrammar(Protocol):
    """A grammar that an output follows, as the draws see it."""

    def allowed_after(self, tokens: Sequence[int], /) -> np.ndarray:
        """Return a bit for each token, uint8: bit `i` of byte `j` says that token `8 * j + i` may follow.

        At least one bit is set.
        """


@dataclass(frozen=True, slots=True)
class LogitRules:
    """The changes of logits for one request, prepared once."""

    repetition_penalty: float
    """The penalty of tokens that occur in prompt or output.

    It divides positive logits of these tokens, and multiplies negative ones.
    """
    presence_penalty: float
    """The penalty subtracted from logits of tokens that occur in the output."""
    frequency_penalty: float
    """The penalty subtracted from a token's logit for each occurrence in the output."""
    prompt_tokens: np.ndarray
    """The distinct tokens of the prompt, int64; empty without a repetition penalty."""
    bias_tokens: np.ndarray
    """The tokens with a bias, int64."""
    biases: np.ndarray
    """The biases of `bias_tokens`, float32."""
    bad_words: Sequence[Sequence[int]]
    """Non-empty token sequences that the output must not contain."""
    min_tokens: int
    """The output length in tokens before which none of `stop_tokens` is drawn."""
    stop_tokens: np.ndarray
    """The tokens that end the output, int64."""
    grammar: OutputGrammar | None = None
    """The grammar of the output; None if there is none.

    The grammar must allow at least one token that `forbidden` does not return.
    """

    @property
    def penalizes(self) -> bool:
        """Whether tokens that have occurred are penalized."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def forbidden(self, output: Sequence[int]) -> list[int]:
        """Return the tokens that must not follow `output`."""
        tokens = [word[-1] for word in self.bad_words if _ends_with(output, word[:-1])]
        if len(output) < self.min_tokens:
            tokens += self.stop_tokens.tolist()
        return tokens


class LogitChanges:
    """The changes of logits in one pass. Rows without rules are not touched, and take no time."""

    def __init__(self) -> None:
        self._rules: dict[int, LogitRules] = {}
        self._outputs: dict[int, list[int]] = {}

    def add(self, row: int, rules: LogitRules, output: Sequence[int]) -> None:
        """Add a row's rules. `output` is the output of the row's request so far."""
        self._rules[row], self._outputs[row] = rules, list(output)

    def extend(self, row: int, token: int) -> None:
        """Append a token to a row's output. A row without rules is ignored."""
        if row in self._outputs:
            self._outputs[row].append(token)

    @torch.inference_mode()
    def apply(self, logits: torch.Tensor) -> None:
        """Apply the changes to `logits` (float32 `[S, V]`) in place."""
        if not self._rules:
            return
        self._forbid(logits)
        self._constrain(logits)
        self._bias(logits)
        self._penalize(logits)

    def _forbid(self, logits: torch.Tensor) -> None:
        forbidden = {row: rules.forbidden(self._outputs[row]) for row, rules in self._rules.items()}
        logits[_places(forbidden, logits.device)] = float("-inf")

    def _constrain(self, logits: torch.Tensor) -> None:
        grammars = {row: rules.grammar for row, rules in self._rules.items() if rules.grammar is not None}
        if grammars:
            masks = np.stack([of.allowed_after(self._outputs[row]) for row, of in grammars.items()])
            bits = np.unpackbits(~masks, axis=1, count=logits.shape[1], bitorder="little")
            are_forbidden = torch.from_numpy(bits.view(np.bool_)).to(logits.device)
            for row, is_forbidden in zip(grammars, are_forbidden, strict=True):
                logits[row].masked_fill_(is_forbidden, float("-inf"))  # in place: rows are large

    def _bias(self, logits: torch.Tensor) -> None:
        rules = {row: of_row for row, of_row in self._rules.items() if len(of_row.biases)}
        if rules:
            places = _places({row: of_row.bias_tokens for row, of_row in rules.items()}, logits.device)
            biases = np.concatenate([of_row.biases for of_row in rules.values()])
            logits[places] += torch.from_numpy(biases).to(logits.device)

    def _penalize(self, logits: torch.Tensor) -> None:
        rules = {row: of_row for row, of_row in self._rules.items() if of_row.penalizes}
        if not rules:
            return
        device = logits.device
        counts = torch.zeros(len(rules), logits.shape[1], device=device)
        # Rows are counted among the penalized rows here, not among all rows.
        outputs = _places({row: self._outputs[of] for row, of in enumerate(rules)}, device)
        counts.index_put_(outputs, torch.ones((), device=device), accumulate=True)
        in_output = counts > 0
        in_any = in_output.clone()
        in_any[_places({row: of.prompt_tokens for row, of in enumerate(rules.values())}, device)] = True

        def of_rows(name: str) -> torch.Tensor:
            return torch.tensor([[getattr(of_row, name)] for of_row in rules.values()], device=device)

        rows = torch.tensor(list(rules), device=device)
        penalized = logits[rows]
        repetition = of_rows("repetition_penalty")
        repeated = torch.where(penalized > 0, penalized / repetition, penalized * repetition)
        penalized = torch.where(in_any, repeated, penalized)
        penalized -= of_rows("frequency_penalty") * counts
        penalized -= of_rows("presence_penalty") * in_output
        logits[rows] = penalized


def _places(
    tokens_of_rows: Mapping[int, Sequence[int] | np.ndarray], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the row indices and token ids (int64 each, of equal length) of these tokens in these rows."""
    lens = [len(tokens) for tokens in tokens_of_rows.values()]
    rows = np.repeat(np.fromiter(tokens_of_rows, np.int64), lens)
    tokens = np.concatenate([np.asarray(of_row, dtype=np.int64) for of_row in tokens_of_rows.values()])
    return torch.from_numpy(rows).to(device), torch.from_numpy(tokens).to(device)


def _ends_with(tokens: Sequence[int], end: Sequence[int]) -> bool:
    return not end or list(tokens[-len(end) :]) == list(end)
