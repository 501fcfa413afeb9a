"""The TTFT, TBT and throughput of a server, and the time that a prefix in the pool saves.

Owns: the loads. Does not know: how a server is started.
"""

import random
import statistics
import time
from collections.abc import Sequence
from itertools import pairwise

from benchmarks.gpu.whole_server.cluster import Answer, Cluster
from benchmarks.report import Found, Report

_STEPS = ("reserving", "prefilling", "inlined", "transferring", "loading")


class Speed:
    """Measurements of one server."""

    def __init__(self, report: Report, cluster: Cluster, vocab_size: int) -> None:
        self._report, self._cluster = report, cluster
        self._rng, self._vocab_size = random.Random(5), vocab_size

    def measure(self, prompt_len: int, num_tokens: int, long_len: int) -> None:
        """Measure TTFT, TBT and throughput, and the time that a stored prefix saves.

        `long_len`: the tokens of the prompt that is sent twice to measure the stored prefix.
        """
        for num_streams in (1, 8, 32):
            for which in ("first burst", "again"):
                self._report.check(
                    f"{num_streams} streams, {prompt_len} in, {num_tokens} out, {which}",
                    lambda num=num_streams: self._burst(num, prompt_len, num_tokens),  # type: ignore[misc]
                )
        self._report.check(f"a prompt of {long_len} tokens, first", lambda: self._long(long_len))
        self._report.check(f"a prompt of {long_len} tokens, and again", lambda: self._prefix(long_len))

    def _prompt(self, length: int) -> list[int]:
        return [self._rng.randrange(1, self._vocab_size) for _ in range(length)]

    def _burst(self, num_streams: int, prompt_len: int, num_tokens: int) -> Found:
        prompts = [self._prompt(prompt_len) for _ in range(num_streams)]
        before = self._seconds()
        began_s = time.perf_counter()
        answers = self._cluster.ask_all(prompts, num_tokens, num_streams)
        elapsed_s = time.perf_counter() - began_s
        ttfts_s = sorted(answer.times_s[0] for answer in answers)
        gaps_s = sorted(gap for answer in answers for gap in _gaps(answer))
        return Found(
            True,
            f"TTFT p50 {1e3 * statistics.median(ttfts_s):.0f} ms, max {1e3 * ttfts_s[-1]:.0f} ms; "
            f"TBT p50 {1e3 * statistics.median(gaps_s):.1f} ms, "
            f"p99 {1e3 * gaps_s[int(0.99 * (len(gaps_s) - 1))]:.1f} ms, max {1e3 * gaps_s[-1]:.0f} ms; "
            f"{num_streams * num_tokens / elapsed_s:.0f} tok/s out, "
            f"{num_streams * prompt_len / ttfts_s[-1]:.0f} tok/s in until the last TTFT; "
            f"a request's seconds: {self._since(before, num_streams)}",
        )

    def _long(self, length: int) -> Found:
        answer, steps = self._timed(self._prompt(length))
        return Found(
            True, f"TTFT {answer.times_s[0]:.3f} s, {length / answer.times_s[0]:.0f} tok/s ({steps})"
        )

    def _prefix(self, length: int) -> Found:
        prompt = self._prompt(length)
        first, first_steps = self._timed(prompt)
        again, steps = self._timed(prompt)
        share = again.times_s[0] / first.times_s[0]
        return Found(
            again.num_cached > 0,
            f"TTFT {first.times_s[0]:.3f} s ({first_steps}), "
            f"then {again.times_s[0]:.3f} s ({steps}), {share:.0%}, {again.num_cached} tokens cached",
        )

    def _timed(self, prompt: Sequence[int]) -> tuple[Answer, str]:
        """Send a prompt, and return the answer with a text: the seconds of each step before decode."""
        before = self._seconds()
        answer = self._cluster.ask(prompt, 8)
        return answer, self._since(before)

    def _seconds(self) -> list[float]:
        return [
            self._cluster.total("mooncake_request_step_seconds_total", f'step="{step}"') for step in _STEPS
        ]

    def _since(self, before: Sequence[float], num_requests: int = 1) -> str:
        """Return as text the mean seconds that each step before decode has taken since `before`."""
        times_s = [(now - old) / num_requests for now, old in zip(self._seconds(), before, strict=True)]
        return ", ".join(
            f"{step} {time_s:.3f}" for step, time_s in zip(_STEPS, times_s, strict=True) if time_s > 0
        )


def _gaps(answer: Answer) -> list[float]:
    return [later - earlier for earlier, later in pairwise(answer.times_s)]
