"""Random prompts, and the greedy tokens that transformers or a model of ours computes behind them."""

import random
from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

import torch
import transformers

from workers.engine.batch import Batch, Chunk
from workers.engine.kvcache.device_kvcache import DeviceKVCache
from workers.engine.model import DecoderModel

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


def greedy_in_batch(
    model: DecoderModel,
    kv: DeviceKVCache,
    tables: Sequence[list[int]],
    prompts: Sequence[list[int]],
    num_new: int,
    chunk_size: int,
) -> list[list[int]]:
    """Return each prompt with its `num_new` greedy tokens.

    All are in one running batch: prefill chunks of some beside decode steps of others. `tables` have the
    pages of each.
    """
    sequences = [list(prompt) for prompt in prompts]
    num_cached = [0] * len(prompts)
    while running := [s for s, prompt in enumerate(prompts) if len(sequences[s]) < len(prompt) + num_new]:
        chunks = [
            Chunk(sequences[s][num_cached[s] :][:chunk_size], num_cached[s], tables[s]) for s in running
        ]
        tokens = model.forward(Batch.build(chunks, kv), kv).argmax(-1).tolist()
        for s, chunk, token in zip(running, chunks, tokens, strict=True):
            num_cached[s] += len(chunk.token_ids)
            if num_cached[s] == len(sequences[s]):
                sequences[s].append(token)
    return sequences
