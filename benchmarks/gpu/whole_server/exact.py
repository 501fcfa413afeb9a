"""Checks of a server's greedy answers against a reference, for each way that KVCache takes.

Owns: the ways. Does not know: how a server is started, the reference model.
"""

import random
from collections.abc import Sequence

from benchmarks.gpu.whole_server.cluster import Cluster, wait_for
from benchmarks.gpu.whole_server.reference import Reference
from benchmarks.report import Found, Report

NUM_TOKENS = 24
LENGTHS = (1, 63, 64, 65, 200, 700, 1500)
"""The lengths of prompts: just below and above one block of 64 tokens, and up to six passes of 256."""
SHORT_LENGTHS = (5, 64, 130, 257, 390)
FILLER_LEN = 1500


class Exactness:
    """Checks of one server. `pool_tokens`: the tokens that an instance's pool holds in DRAM."""

    def __init__(
        self, report: Report, cluster: Cluster, reference: Reference, vocab_size: int, pool_tokens: int
    ) -> None:
        self._report, self._cluster, self._reference = report, cluster, reference
        self._pool_tokens, self._vocab_size = pool_tokens, vocab_size
        self._rng = random.Random(cluster.name)
        self.prompts = [self.new_prompt(length) for length in LENGTHS]

    def new_prompt(self, length: int) -> list[int]:
        return [self._rng.randrange(1, self._vocab_size) for _ in range(length)]

    def pair(self) -> None:
        """Check prompts that a prefill instance computes, and whose KVCache goes to a decode instance."""
        self._compare("a prefill and a decode instance", self.prompts, num_at_once=1)
        self._compare("prefix hits", self.prompts, num_at_once=1, hits=True)
        self._second_turns()
        self._compare("32 at once", self._short_prompts(32), num_at_once=32)
        self._report.check("hits on SSD", self._ssd)

    def coupled(self) -> None:
        """Check prompts that the decode instance computes itself."""
        self._compare("an instance with both roles", self.prompts, num_at_once=1)
        self._compare("both roles, prefix hits", self.prompts, num_at_once=1, hits=True)
        self._compare("both roles, 32 at once", self._short_prompts(32), num_at_once=32)

    def _short_prompts(self, num: int) -> list[list[int]]:
        return [self.new_prompt(SHORT_LENGTHS[index % len(SHORT_LENGTHS)]) for index in range(num)]

    def _compare(
        self, name: str, prompts: Sequence[list[int]], num_at_once: int, *, hits: bool = False
    ) -> None:
        self._report.check(f"{name}, float32", lambda: self._found(prompts, num_at_once, hits=hits))

    def _found(self, prompts: Sequence[list[int]], num_at_once: int, *, hits: bool) -> Found:
        answers = self._cluster.ask_all(prompts, NUM_TOKENS, num_at_once, logprobs=1)
        found = self._reference.compare(prompts, answers)
        num_cached = sum(answer.num_cached for answer in answers)
        is_good = found.is_good and (not hits or num_cached > 0)
        return Found(is_good, f"{found.figure}; {num_cached} cached tokens")

    def _second_turns(self) -> None:
        """Check prompts that continue earlier answers, whose blocks the decode instances have stored."""

        def find() -> Found:
            answers = self._cluster.ask_all(self.prompts, NUM_TOKENS, 1)
            prompts = [
                [*prompt, *answer.tokens, *self.new_prompt(70)]
                for prompt, answer in zip(self.prompts, answers, strict=True)
            ]
            return self._found(prompts, 4, hits=True)

        self._report.check("second turns, float32", find)

    def _ssd(self) -> Found:
        fillers = [self.new_prompt(FILLER_LEN) for _ in range(-(-2 * self._pool_tokens // FILLER_LEN))]
        self._cluster.ask_all(fillers, 2, 4)
        before = self._ssd_hits()
        found = self._found(self.prompts, 1, hits=True)
        wait_for(lambda: self._ssd_hits() > before, "a block came from SSD")
        return Found(found.is_good, f"{self._ssd_hits() - before:.0f} blocks from SSD; {found.figure}")

    def _ssd_hits(self) -> float:
        return self._cluster.total("mooncake_pool_hits_total", 'tier="ssd"')
