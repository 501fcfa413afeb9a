"""Checks that answers are well formed for requests that ask for more than greedy tokens.

Owns: the requests, the form of answers. Does not know: how a server is started.
"""

import json
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from benchmarks.gpu.whole_server.cluster import Cluster
from benchmarks.report import Found, Report

PROPERTIES: dict[str, object] = {
    "name": {"type": "string", "maxLength": 20},
    "kind": {"enum": ["small", "large"]},
    "is_new": {"type": "boolean"},
}
SCHEMA = {
    "type": "object",
    "properties": PROPERTIES,
    "required": list(PROPERTIES),
    "additionalProperties": False,
}
NUM_TOKENS = 40


class Features:
    """Checks of one server."""

    def __init__(self, report: Report, cluster: Cluster, prompt: Sequence[int]) -> None:
        self._report, self._cluster, self._prompt = report, cluster, prompt

    def check(self) -> None:
        for name, find in (
            ("json_schema", self._grammar),
            ("seeds, whole vocabulary", lambda: self._seeds({})),
            ("seeds, top_k 20, top_p 0.9", lambda: self._seeds({"top_k": 20, "top_p": 0.9})),
            ("logprobs", self._logprobs),
            ("penalties and bias", self._penalties),
            ("n=2", self._two),
            ("a client hangs up", self._hang_up),
        ):
            self._report.check(name, find)

    def _choices(self, **fields: object) -> list[dict[str, Any]]:
        content = self._cluster.body(self._prompt, NUM_TOKENS, **fields)
        answer = self._cluster.post("/v1/completions", content)
        if answer.status_code != 200:
            raise RuntimeError(f"{answer.status_code} {answer.text[:300]}")
        choices: list[dict[str, Any]] = answer.json()["choices"]
        return choices

    def _grammar(self) -> Found:
        form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
        [choice] = self._choices(
            response_format=form, max_tokens=400, ignore_eos=False, temperature=1, seed=1
        )
        value = json.loads(choice["text"])
        is_good = set(value) == set(PROPERTIES) and choice["finish_reason"] == "stop"
        return Found(is_good, json.dumps(value))

    def _seeds(self, limits: dict[str, object]) -> Found:
        texts = [self._choices(temperature=0.8, seed=seed, **limits)[0]["token_ids"] for seed in (7, 7, 8)]
        is_good = texts[0] == texts[1] != texts[2]
        return Found(is_good, f"{len(set(texts[0]))} different tokens of {NUM_TOKENS}, same seed same tokens")

    def _logprobs(self) -> Found:
        [choice] = self._choices(logprobs=5)
        told = choice["logprobs"]
        tops = [sorted(of.values(), reverse=True) for of in told["top_logprobs"]]
        is_good = len(tops) == NUM_TOKENS == len(told["token_logprobs"])
        is_good &= all(len(of) >= 5 and sum(map(math.exp, of)) <= 1 + 1e-4 for of in tops)
        # Greedy: the drawn token is the likeliest.
        is_good &= all(of[0] == drawn for of, drawn in zip(tops, told["token_logprobs"], strict=True))
        return Found(is_good, f"5 of {NUM_TOKENS} tokens, the first {told['token_logprobs'][0]:.3f}")

    def _penalties(self) -> Found:
        forced = self._choices(logit_bias={"300": 100})[0]["token_ids"]
        free = self._choices(frequency_penalty=2, presence_penalty=2, repetition_penalty=2)[0]["token_ids"]
        both = self._choices(logit_bias={"300": 8}, frequency_penalty=2)[0]["token_ids"]
        is_good = (
            set(forced) == {300} and len(set(free)) >= NUM_TOKENS // 2 and 0 < both.count(300) < NUM_TOKENS
        )
        return Found(is_good, f"{len(set(free))} different tokens, {both.count(300)} biased ones")

    def _two(self) -> Found:
        choices = self._choices(n=2, temperature=1, seed=3)
        tokens = [choice["token_ids"] for choice in sorted(choices, key=lambda of: of["index"])]
        is_good = [len(of) for of in tokens] == [NUM_TOKENS, NUM_TOKENS] and tokens[0] != tokens[1]
        return Found(is_good, f"{len(choices)} choices")

    def _hang_up(self) -> Found:
        for _number in range(3):
            events = self._cluster.events(self._cluster.body(self._prompt, 400))
            first_ten = [event for event, _ in zip(events, range(10), strict=False)]
            assert len(list(pairwise(first_ten))) == 9
            events.close()  # type: ignore[attr-defined]
        return self._cluster.idle()
