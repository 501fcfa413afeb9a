"""Answers that vLLM generates behind a prompt.

The prompt's blocks arrive in the pool, or vLLM computes them.

Owns: the order of events of one answer. Does not know: how requests are placed, how vLLM computes.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing

from kvstore.protocol.answers import Reservation
from mooncake.errors import PoolFullError, TransferError
from mooncake.messages.fronts import TokenOutput
from mooncake.messages.pools import Grant
from mooncake.messages.requests import FinishReason, Ref, Request
from mooncake.messages.workers import Decode, Finished, Prefilled, Reserve, Reserved
from workers.errors import AnswerLostError
from workers.vllm.attempts import Attempts
from workers.vllm.meter import DecodeMeter

Emit = Callable[[list[tuple[str, TokenOutput]]], Awaitable[None]]


class VllmDecode:
    """The decode runner of a vLLM instance.

    The runner answers `Reserve` with `Reserved`, emits tokens, and ends with `Finished`. Unless the prompt is
    inlined, its blocks are sent here, and `Decode` brings its first token.
    """

    def __init__(self, attempts: Attempts, arrival_timeout_s: float, emit: Emit) -> None:
        self._attempts, self._arrival_timeout_s, self._emit = attempts, arrival_timeout_s, emit
        self._server, self._pool, self._send = attempts.server, attempts.pool, attempts.send
        self._orders: dict[Ref, asyncio.Future[Decode]] = {}
        self.num_requests = 0
        self.meter = DecodeMeter()

    def reserve(self, order: Reserve) -> None:
        """Begin a request as a task."""
        self._attempts.start(order, lambda: self._serve(order))

    def decode(self, order: Decode) -> None:
        """Continue a reserved request whose prefill is done.

        An order for an unknown request is dropped, because the request has just been aborted.
        """
        future = self._orders.get(order.ref)
        if future is not None and not future.done():
            future.set_result(order)

    async def _serve(self, order: Reserve) -> None:
        self.num_requests += 1
        try:
            if order.inline:
                await self._compute_and_generate(order)
            else:
                await self._receive_and_generate(order)
        finally:
            self.num_requests -= 1
            self.meter.left(order.ref)

    async def _compute_and_generate(self, order: Reserve) -> None:
        await self._send(Reserved(order.ref, Grant(0, self._pool.address, [])))
        answer = _Answer(order.ref, order.request)
        # vLLM tells the number of cached tokens only at the end. It computes at least the last block. Tokens
        # that it loads from the pool do not count.
        num_blocks = (len(order.request.token_ids) - 1) // self._pool.segment.layout.block_size
        keys = order.request.block_keys[:num_blocks]
        answer.num_cached_tokens = self._server.kv_events.blocks.num_leading_tokens(keys)
        await self._generate(answer, is_inlined=True)
        await self._finish(answer)

    async def _receive_and_generate(self, order: Reserve) -> None:
        ref, answer = order.ref, _Answer(order.ref, order.request)
        self._orders[ref] = asyncio.get_running_loop().create_future()
        reservation = await self._reserved(order.request)
        self.meter.num_not_inlined += 1
        try:
            await self._send(Reserved(ref, await self._pool.grant(reservation.reservation_id)))
            decode = await self._orders[ref]
            answer.num_cached_tokens = decode.num_cached_tokens
            await self._take(answer, [decode.first_token])
            await self._arrived(reservation)
            if answer.finish_reason is None:
                await self._generate(answer, is_inlined=False)
        finally:
            self._orders.pop(ref, None)
            await self._pool.release(reservation.reservation_id)
        await self._finish(answer)

    async def _reserved(self, request: Request) -> Reservation:
        """Reserve pool pages for the prompt's full blocks, and return the reservation.

        Waits while the pool is full. vLLM computes the tokens behind the last full block.
        """
        while True:
            try:
                return await self._pool.reserve(request.block_keys, 0, request.tenant)
            except PoolFullError as full:
                await self._pool.wait_for_space(full)

    async def _arrived(self, reservation: Reservation) -> None:
        try:
            async with asyncio.timeout(self._arrival_timeout_s):
                await self._pool.wait_arrived(reservation.reservation_id)
        except TimeoutError:
            raise TransferError(f"KVCache has not arrived within {self._arrival_timeout_s:g} s") from None

    async def _generate(self, answer: "_Answer", *, is_inlined: bool) -> None:
        """Emit the tokens of an answer as vLLM draws them.

        If `is_inlined`, the first token is reported to the Conductor.
        """
        tells_first = is_inlined
        outputs = self._server.complete(answer.request, answer.tokens, answer.num_left)
        async with aclosing(outputs):
            async for output in outputs:
                if output.token_ids:
                    self.meter.drew(answer.ref, len(output.token_ids), asyncio.get_running_loop().time())
                    await self._take(answer, output.token_ids)
                if output.token_ids and tells_first:
                    self.meter.num_inlined += 1
                    await self._send(Prefilled(answer.ref, output.token_ids[0], answer.num_cached_tokens))
                    tells_first = False

    async def _take(self, answer: "_Answer", token_ids: list[int]) -> None:
        position = answer.num_output_tokens
        answer.tokens += token_ids
        reason, num_cached_tokens = answer.finish_reason, answer.num_cached_tokens
        output = TokenOutput(answer.ref, position, token_ids, num_cached_tokens, reason)
        await self._emit([(answer.request.reply_to, output)])

    async def _finish(self, answer: "_Answer") -> None:
        reason = answer.finish_reason
        if reason is None:
            raise AnswerLostError(f"vLLM ended an answer after {answer.num_output_tokens} tokens")
        await self._send(Finished(answer.ref, reason, answer.num_output_tokens))


class _Answer:
    """A request's prompt, and its output of this attempt and of earlier ones."""

    def __init__(self, ref: Ref, request: Request) -> None:
        self.ref, self.request = ref, request
        self.tokens = list(request.token_ids)
        self.num_cached_tokens = 0
        """Tokens of the prompt that prefill did not compute."""

    @property
    def num_new(self) -> int:
        """The number of tokens drawn in this attempt."""
        return len(self.tokens) - len(self.request.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.request.num_prompt_tokens

    @property
    def num_left(self) -> int:
        """The number of tokens that may still be drawn."""
        return self.request.sampling.max_tokens - self.num_output_tokens

    @property
    def finish_reason(self) -> FinishReason | None:
        """The reason why the output ends with the newest token; None if the output goes on."""
        if not self.num_new:
            return None
        if self.tokens[-1] in self.request.sampling.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.num_left <= 0 else None
