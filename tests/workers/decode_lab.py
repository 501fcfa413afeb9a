"""Instances without a Conductor. A test gives them orders, such as single steps of migrations."""

import asyncio
import contextlib
import functools
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import transformers

from conductor.front.generation.reception import Reception
from mooncake.messages.blocks import block_keys, root_key
from mooncake.messages.migration import (
    FromMigration,
    HandedOver,
    HandOver,
    PreCopied,
    PreCopy,
    Prepare,
    Prepared,
    TakeOver,
)
from mooncake.messages.pools import PoolShard
from mooncake.messages.requests import Ref, Request, SamplingParams
from mooncake.messages.workers import (
    Abort,
    Decode,
    Finished,
    FromWorker,
    Prefill,
    Prefilled,
    Reserve,
    Reserved,
    WorkFailed,
)
from tests.kvstore.nodes import DEADLINE_S
from tests.workers.mini_cluster import (
    FINGERPRINT,
    Answer,
    InstanceUnderTest,
    MakeCopies,
    MiniCluster,
    Sizes,
    mini_cluster,
)
from tests.workers.recorded_spans import SPAN
from workers.kvcache.copies import copies_for

Said = FromMigration | Finished | WorkFailed
FETCH_TIMEOUT_S = DEADLINE_S


@dataclass(slots=True, eq=False)
class Decoded:
    """A request, and the instance that decodes it as attempt `ref`."""

    request: Request
    answer: Answer
    at: InstanceUnderTest
    ref: Ref
    tbt_slo_s: float | None
    inline: bool
    num_attempts: int = 1


class DecodeLab(MiniCluster):
    """A cluster whose instances obey the test alone.

    The first one prefills, unless the test chooses another.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self._decoded: dict[str, Decoded] = {}
        self._said: dict[Ref, asyncio.Queue[Said]] = defaultdict(asyncio.Queue)
        self.prefills_at: InstanceUnderTest | None = None
        """The instance that computes prompts that are not inlined; None for the first instance."""
        self.time_left_s: float | None = None
        """Seconds for which first tokens may be held, of prompts that are not inlined and have a TBT SLO."""

    @property
    def _prefill(self) -> InstanceUnderTest:
        return self.prefills_at or self.instances[0]

    @property
    def decodes(self) -> list[InstanceUnderTest]:
        return self.instances[1:]

    def begin(
        self,
        name: str,
        prompt: list[int],
        sampling: SamplingParams,
        at: InstanceUnderTest,
        *,
        tenant: str = "",
        answer_id: str = "",
        salt: str = "",
        priority: int = 0,
        tbt_slo_s: float | None = None,
        inline: bool = True,
    ) -> Decoded:
        """Order an instance to decode a request."""
        root = root_key(FINGERPRINT, salt)
        keys = block_keys(prompt, self.sizes.block_size, root)
        request = Request(
            name,
            prompt,
            keys,
            sampling,
            "front",
            bool(salt),
            root,
            tenant=tenant,
            priority=priority,
            answer_id=answer_id,
            span=SPAN,
        )
        answer = self.answers[name] = Answer(Reception(request, lambda _: None, 0.0))
        decoded = self._decoded[name] = Decoded(request, answer, at, Ref(1, name, 1), tbt_slo_s, inline)
        at.obey(Reserve(decoded.ref, request, tbt_slo_s, may_refuse=False, inline=inline))
        return decoded

    def hear(self, instance: InstanceUnderTest, message: FromWorker) -> None:
        match message:
            case Reserved(ref=ref, grant=grant):
                decoded = self._decoded[ref.request_id]
                if not decoded.inline:
                    self._prefill.obey(Prefill(ref, decoded.request, grant))
            case Prefilled(ref, first_token, num_cached_tokens, logprobs):
                if instance is self._prefill:
                    order = Decode(ref, first_token, num_cached_tokens, logprobs, self.time_left_s)
                    self._decoded[ref.request_id].at.obey(order)
            case PreCopied() | Prepared() | HandedOver() | Finished() | WorkFailed():
                self._said[message.ref].put_nowait(message)

    @property
    def num_said(self) -> int:
        """The number of answers that the test has not taken."""
        return sum(said.qsize() for said in self._said.values())

    async def next_said(self, ref: Ref) -> Said:
        """Return the next answer about an attempt."""
        async with asyncio.timeout(DEADLINE_S):
            return await self._said[ref].get()

    def abort(self, decoded: Decoded) -> None:
        """Abort a request, as if its client had gone."""
        decoded.at.obey(Abort(decoded.ref))


class Move:
    """A migration, step by step. Each step returns the answer to its order."""

    def __init__(self, lab: DecodeLab, decoded: Decoded, destination: InstanceUnderTest) -> None:
        self.lab, self.decoded, self.destination = lab, decoded, destination
        self._source, self._source_ref = decoded.at, decoded.ref
        decoded.num_attempts += 1
        self.ref = Ref(1, decoded.request.request_id, decoded.num_attempts)
        self.output: list[int] = []

    @property
    def _continued(self) -> Request:
        return self.decoded.request.continued(self.output, self.lab.sizes.block_size)

    async def pre_copy(self, num_tokens: int = 0) -> PreCopied | Finished | WorkFailed:
        self._source.obey(PreCopy(self._source_ref, num_tokens))
        answer = await self.lab.next_said(self._source_ref)
        assert isinstance(answer, PreCopied | Finished | WorkFailed)
        if isinstance(answer, PreCopied):
            self.output = answer.output
        return answer

    async def prepare(self, timeout_s: float = FETCH_TIMEOUT_S) -> Prepared | WorkFailed:
        shards = tuple(PoolShard(pool.address, pool.segment.layout) for pool in self._source.pools)
        self.destination.obey(Prepare(self.ref, self._continued, shards, timeout_s, self.decoded.tbt_slo_s))
        answer = await self.lab.next_said(self.ref)
        assert isinstance(answer, Prepared | WorkFailed)
        return answer

    async def hand_over(self) -> HandedOver | Finished | WorkFailed:
        self._source.obey(HandOver(self._source_ref))
        while isinstance(answer := await self.lab.next_said(self._source_ref), PreCopied):
            pass
        assert isinstance(answer, HandedOver | Finished | WorkFailed)
        if isinstance(answer, HandedOver):
            self.output = answer.output
        return answer

    def take_over(self) -> None:
        self.decoded.at, self.decoded.ref = self.destination, self.ref
        self.destination.obey(TakeOver(self.ref, self._continued))

    def give_up(self) -> None:
        self.destination.obey(Abort(self.ref))

    async def finish(self) -> bool:
        """Carry out the last steps. Returns whether the request has moved; otherwise it has ended."""
        if not isinstance(await self.hand_over(), HandedOver):
            self.give_up()
            return False
        self.take_over()
        return True

    async def run(self, num_rounds: int = 1) -> Prepared | None:
        """Carry out all steps. Returns the last `Prepared`; None if the request stays, or has ended."""
        for _ in range(num_rounds):
            if not isinstance(await self.pre_copy(), PreCopied):
                self.give_up()
                return None
            prepared = await self.prepare()
            if not isinstance(prepared, Prepared):
                return None
        return prepared if await self.finish() else None


@contextlib.asynccontextmanager
async def decode_lab(
    model: transformers.PreTrainedModel,
    folder: Path,
    sizes: Sizes | None = None,
    decode_copies: MakeCopies = copies_for,
    timeout_s: float = 6 * DEADLINE_S,
) -> AsyncIterator[DecodeLab]:
    """Make a context with two instances that decode and one that prefills."""
    sizes = sizes or Sizes(num_decode=2)
    async with mini_cluster(model, folder, sizes, decode_copies, timeout_s, make=DecodeLab) as lab:
        yield lab


StartDecodeLab = functools.partial[contextlib.AbstractAsyncContextManager[DecodeLab]]
"""The type of a function that makes a `decode_lab` of some model in some folder."""
