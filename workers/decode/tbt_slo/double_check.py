"""The double check: a decode instance's own test of the TBT SLO (Mooncake, section 3, the local scheduler).

Before a request's first token is sent, the instance predicts the TBT of its batch with the request. Then the
request joins, waits for a smaller batch, or is refused. The first token of a request that joins can still be
held, so that the gap to the second token is within the SLO.

Owns: the requests that wait for a smaller batch, held first tokens. Does not know: messages, how iterations
are measured and predicted.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator

from mooncake.messages.costs import HOLD_SHARE
from mooncake.messages.fronts import TokenOutput
from mooncake.messages.heartbeats import DecodeLoad
from workers.decode.sequence import Sequence
from workers.decode.tbt_slo.tbt import IterationPredictors


class TooSlowError(Exception):
    """The batch would miss the TBT SLO with this request."""

    def __init__(self, batch_size: int, predicted_tbt_s: float, margin_s: float, tbt_slo_s: float) -> None:
        margin = f", {1000 * margin_s:.1f} ms of them as a margin" if predicted_tbt_s <= tbt_slo_s else ""
        super().__init__(
            f"a token would take {1000 * predicted_tbt_s:.1f} ms in this batch, at most"
            f" {1000 * tbt_slo_s:g} ms are allowed (conductor.tbt_slo_s){margin}; come back later"
        )
        self.batch_size, self.predicted_tbt_s = batch_size, predicted_tbt_s


class DoubleCheck:
    """The double check of one instance, which decodes at most `max_batch` requests together."""

    def __init__(self, predictors: IterationPredictors, max_batch: int) -> None:
        self._predictors, self._max_batch = predictors, max_batch
        self._turn = asyncio.Lock()
        """The lock of the request that is being checked. Other requests wait for the lock."""
        self._changed = asyncio.Event()
        self._num_waiting = 0
        """Number of requests that wait for their turn."""

    async def wait_turn(
        self, sequence: Sequence, others: Callable[[], Iterable[Sequence]], time_left_s: float | None
    ) -> None:
        """Wait until the sequence may join the batch: first come, first served.

        Raises TooSlowError if the batch is still too large after `time_left_s` seconds. If `time_left_s` is
        None, there is no wait.
        """
        if time_left_s is not None:
            with contextlib.suppress(TimeoutError), self._waiting():
                async with asyncio.timeout(max(0.0, time_left_s)), self._turn:
                    while self._refusal(sequence, others()) is not None:
                        self._changed.clear()
                        await self._changed.wait()
        refusal = self._refusal(sequence, others())
        if refusal is not None:
            raise refusal

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        self._num_waiting += 1
        try:
            yield
        finally:
            self._num_waiting -= 1

    def recheck(self) -> None:
        """Check the waiting requests again. To be called after an iteration, and when a sequence has left."""
        self._changed.set()

    def load(self, sequences: Iterable[Sequence]) -> DecodeLoad:
        """Return the load of these sequences, whether they are prefilled or not."""
        batch = [sequence for sequence in sequences if sequence.finish_reason is None]
        num_kv_tokens = sum(len(sequence.tokens) for sequence in batch)
        tbt_s = self._predictors.batch_tbt_s(len(batch), num_kv_tokens, self._max_batch)
        return DecodeLoad(
            len(batch),
            self._num_waiting,
            tbt_s,
            sum(sequence.num_prompt_tokens_left for sequence in batch),
            self._predictors.prompt_cost.predict_s(1, 0) or 0.0,
        )

    def _refusal(self, sequence: Sequence, others: Iterable[Sequence]) -> TooSlowError | None:
        """Return why the sequence cannot join now; None if it can.

        An empty batch refuses no sequence, because its prediction may be outdated.
        """
        batch = [other for other in others if other is not sequence and other.finish_reason is None]
        if sequence.tbt_slo_s is None or not batch:
            return None
        num_kv_tokens = sum(len(other.tokens) for other in (*batch, sequence))
        num_requests, tbt_slo_s = len(batch) + 1, sequence.tbt_slo_s
        missed = self._predictors.too_slow(num_requests, num_kv_tokens, self._max_batch, tbt_slo_s)
        return None if missed is None else TooSlowError(num_requests, *missed, tbt_slo_s)


class HeldTokens:
    """The first tokens that are held until the iterations that draw the second tokens begin.

    A token is held no longer than its TTFT SLO allows. The gap to the second token counts as TBT. If the
    first token leaves at once, the gap includes the remaining transfer, the load, the wait for a slot and the
    end of the running iteration. If the token is held, the TTFT includes these times.
    """

    def __init__(self, on_release: Callable[[], None]) -> None:
        """Begin without held tokens. `on_release` is called when `release` has released a token."""
        self._on_release = on_release
        self._held: dict[Sequence, tuple[str, TokenOutput]] = {}
        self._released: dict[Sequence, tuple[str, TokenOutput]] = {}

    def hold(self, sequence: Sequence, time_left_s: float) -> None:
        """Hold the sequence's newest token, which is due in `time_left_s` seconds."""
        self._held[sequence] = sequence.newest_output
        asyncio.get_running_loop().call_later(HOLD_SHARE * time_left_s, self.release, sequence)

    def release(self, sequence: Sequence) -> None:
        """Release the sequence's token if one is held."""
        if sequence in self._held:
            self._release(sequence)
            self._on_release()

    def begun(self, sequences: Iterable[Sequence]) -> None:
        """Release the tokens of sequences whose next tokens are being computed.

        The caller takes the tokens at once, so `on_release` is not called.
        """
        for sequence in sequences:
            if sequence in self._held:
                self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        self._released[sequence] = self._held.pop(sequence)
        sequence.first_sent_s = asyncio.get_running_loop().time()

    def take_released(self) -> list[tuple[str, TokenOutput]]:
        """Return the tokens to send, each with the endpoint of its request's front."""
        released, self._released = self._released, {}
        return list(released.values())

    def take(self, sequence: Sequence) -> tuple[str, TokenOutput] | None:
        """Return the sequence's token that is held, or released but not yet taken; None if there is none.

        The token comes with the endpoint of its request's front. The caller must send the token.
        """
        return self._held.pop(sequence, None) or self._released.pop(sequence, None)

    def drop(self, sequence: Sequence) -> None:
        """Drop the token of a request that has ended, if one is held."""
        self._held.pop(sequence, None)
