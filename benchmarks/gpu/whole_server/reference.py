"""The reference answers: torch's own layers, computed in this process on the same device.

Owns: the reference model, the comparison. Does not know: servers.
"""

from collections.abc import Iterable, Sequence

import torch

from benchmarks.gpu.whole_server.cluster import Answer
from benchmarks.report import Found
from mooncake.model.checkpoint import DUMMY_SEED
from workers.engine.batch import Batch, Chunk
from workers.engine.kvcache.device_kvcache import DeviceKVCache
from workers.engine.model import DecoderModel
from workers.engine.spec import ModelSpec

MOST_ERROR = 5e-4
"""The largest error of a logprob that is allowed.

One wrong token in a prompt of 1500 changes some logprob of an answer by 0.02, a wrong page by 0.1.
"""
_PAGE_SIZE = 64


class Reference:
    """The model in float32, with the same weights as the server's instances."""

    def __init__(self, spec: ModelSpec, device: str, num_tokens: int) -> None:
        """Make the model. `num_tokens`: the most tokens of a prompt with its answer."""
        layers = range(spec.num_layers)
        self._model = DecoderModel(spec, layers, torch.float32, device, allow_native=False)
        self._model.init_dummy_weights(DUMMY_SEED)
        num_pages = -(-num_tokens // _PAGE_SIZE)
        self._kv = DeviceKVCache(spec, layers, num_pages, _PAGE_SIZE, torch.float32, device)
        self._pages = self._kv.pages.allocate(num_pages)

    @torch.inference_mode()
    def _logprobs(self, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
        """Return the logprobs from which each token of the answer was drawn: `[len(answer), vocab_size]`."""
        model = self._model
        batch = Batch.build([Chunk([*prompt, *answer[:-1]], 0, self._pages)], self._kv)
        hidden = model.forward_layers(model.layers, model.embed(batch), batch, self._kv)
        return model.logits(hidden[len(prompt) - 1 :]).log_softmax(-1)

    def are_alike(self, prompt: Sequence[int], answer: Sequence[int], other: Sequence[int]) -> bool:
        """Return whether two answers are equal up to rounding.

        If they differ, their first different tokens must have equal logprobs up to rounding.
        """
        if list(answer) == list(other):
            return True
        where = next(index for index, (a, b) in enumerate(zip(answer, other, strict=True)) if a != b)
        logprobs = self._logprobs(prompt, answer[: where + 1])[-1]
        return abs(float(logprobs[answer[where]] - logprobs[other[where]])) <= MOST_ERROR

    def compare(self, prompts: Iterable[Sequence[int]], answers: Iterable[Answer]) -> Found:
        """Check that each token is the likeliest one up to rounding, and that all logprobs are right.

        The reference gets the answer's own tokens before each token, so that one wrong token counts as only
        one error.
        """
        num_tokens = num_ties = num_wrong = 0
        error = 0.0
        for prompt, answer in zip(prompts, answers, strict=True):
            logprobs = self._logprobs(prompt, answer.tokens)
            drawn = logprobs.gather(-1, torch.tensor(answer.tokens, device=logprobs.device)[:, None])[:, 0]
            gaps = logprobs.amax(-1) - drawn
            num_tokens += len(answer.tokens)
            num_wrong += int((gaps > MOST_ERROR).sum())
            num_ties += int(((gaps > 0) & (gaps <= MOST_ERROR)).sum())
            if answer.logprobs:
                told = torch.tensor(answer.logprobs, device=drawn.device)
                error = max(error, float((told - drawn).abs().max()))
        figure = (
            f"{num_tokens} tokens, {num_wrong} wrong, {num_ties} ties; logprobs off by at most {error:.1e}"
        )
        return Found(num_wrong == 0 and error <= MOST_ERROR, figure)
