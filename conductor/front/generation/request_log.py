"""The log of requests: one line at level INFO for each request that has ended.

Owns: the line, which never has text of a prompt or an answer. Does not know: why a request ended.
"""

import logging
from collections.abc import Callable, Sequence

from mooncake.messages.costs import tbt_s

log = logging.getLogger(__name__)

PairOf = Callable[[str], tuple[str | None, str | None]]
"""A function that returns a request's prefill and decode instance; None for an instance that is unknown."""


class RequestLog:
    """The log of a front's requests: a line for each choice that was submitted to the Conductor.

    Requests that are denied before, such as those answered with 400 or 401, have no line. Lines name
    instances only if the Conductor is in this process.
    """

    def __init__(self, pair_of: PairOf | None) -> None:
        self._pair_of = pair_of

    def ended(
        self,
        request_id: str,
        how: str,
        *,
        num_prompt_tokens: int,
        num_cached_tokens: int,
        num_tokens: int,
        ttft_s: float | None,
        gaps_s: Sequence[float],
    ) -> None:
        """Log a request that is over.

        `how` is the finish reason, "aborted" or an error. `ttft_s` is None for a request without tokens.
        `gaps_s` are the seconds between the request's iterations.
        """
        if not log.isEnabledFor(logging.INFO):
            return
        prefill, decode = (None, None) if self._pair_of is None else self._pair_of(request_id)
        pair = " -> ".join(filter(None, (prefill, decode)))
        tbt = tbt_s(gaps_s)
        parts = [
            f"{num_prompt_tokens} tokens in",
            f"{num_cached_tokens} cached" if ttft_s is not None else "",
            f"{num_tokens} out",
            f"TTFT {ttft_s:.3f} s" if ttft_s is not None else "",
            f"TBT {1000 * tbt:.1f} ms" if tbt is not None else "",
            pair,
            how,
        ]
        log.info("request %s: %s", request_id, ", ".join(filter(None, parts)))
