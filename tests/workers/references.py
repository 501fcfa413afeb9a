"""Random prompts, and the tokens that transformers computes behind them."""

import random
from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

import torch
import transformers

Reference = Callable[[Sequence[int], int], list[int]]
_known: WeakKeyDictionary[transformers.PreTrainedModel, dict[tuple[int, ...], list[int]]] = (
    WeakKeyDictionary()
)
"""The tokens that are known of each model, by prompt."""


def prompt_of(seed: int, num_tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, 512) for _ in range(num_tokens)]


def greedy_tokens(model: transformers.PreTrainedModel, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Return the tokens that follow a prompt. They are computed if not so many are known."""
    of_model, key = _known.setdefault(model, {}), tuple(prompt)
    if len(of_model.get(key, ())) < num_tokens:
        of_model[key] = generated_tokens(model, prompt, num_tokens)
    return of_model[key][:num_tokens]


def generated_tokens(
    model: transformers.PreTrainedModel, prompt: Sequence[int], num_tokens: int, **wishes: object
) -> list[int]:
    """Return the tokens that follow a prompt. `wishes` are arguments of transformers' `generate`."""
    with torch.inference_mode():
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=num_tokens,
            do_sample=False,
            **wishes,
        )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens
