"""The heartbeats of workers: what an instance reports of its work while it lives.

Owns: these figures. Does not know: their metrics (`mooncake.messages.instance_metrics`), who counts.
"""

import msgspec

from mooncake.messages.migration import ModulesPlace, MovesStats
from mooncake.messages.pools import PoolStats
from mooncake.messages.quantities import Count, Seconds, Span
from mooncake.messages.requests import Ref


class MixedIterations(msgspec.Struct, frozen=True):
    """Totals of the iterations that carried chunks of prompts."""

    num_iterations: Count = 0
    num_tokens: Count = 0
    """The number of drawn tokens."""
    forward_s: Seconds = 0.0
    num_prompt_tokens: Count = 0


class DecodeStats(msgspec.Struct, frozen=True):
    """Totals of an instance's decoding in this session.

    `forward_s` is the time of forward passes, draws included; `host_s` the processor time of planning and
    sending, mostly during passes; `bubble_s` the time in which the device waited between two iterations;
    `pause_s` the time for which iterations paused while prompts were being prefilled on the same cores.
    """

    num_iterations: Count = 0
    num_tokens: Count = 0
    forward_s: Seconds = 0.0
    host_s: Seconds = 0.0
    bubble_s: Seconds = 0.0
    pause_s: Seconds = 0.0
    num_preemptions: dict[str, Count] = {}
    """Preemptions by the place of the KVCache during the wait (`PREEMPTED_TO`)."""
    num_refusals: Count = 0
    num_sealed_blocks: Count = 0
    """Blocks stored for other requests or instances: of answers, inlined prompts, pre-copies."""
    num_unsealed: Count = 0
    """Sequences whose blocks found no room in the pool."""
    num_inlined: Count = 0
    """Prompts that the instance has inlined."""
    num_not_inlined: Count = 0
    mixed: MixedIterations = MixedIterations()
    """The totals of those iterations that carried chunks of prompts."""


class DecodeLoad(msgspec.Struct, frozen=True):
    """The present and coming load of a decode instance."""

    num_requests: Count = 0
    """Requests that the instance was given and that have not ended."""
    num_awaiting_turn: Count = 0
    """Prefilled requests, among `num_requests`, that wait because of the batch's predicted TBT."""
    tbt_s: Seconds | None = None
    """The predicted TBT in seconds if all `num_requests` were in one batch; None while unknown."""
    num_prompt_tokens_left: Count = 0
    """Tokens of inlined prompts that have yet to be computed."""
    prompt_token_s: Seconds = 0.0
    """Seconds that the first token of a prompt adds to an iteration, as learned; 0 while unknown.

    No Conductor reads this figure. It is to be removed when protocol 27 is no longer spoken.
    """


class Joining(msgspec.Struct, frozen=True):
    """The waits of a request before it joins the batch, with the fields of `Finished`; None while unknown."""

    ref: Ref
    arrival_s: Span | None
    joining_s: Span | None


TO_POOL, TO_HOST = "pool", "host"
PREEMPTED_TO = (TO_POOL, TO_HOST)


class Heartbeat(msgspec.Struct, tag=True, frozen=True):
    """The report that a worker is alive, with its load. Answered by `HeartbeatAck`."""

    num_running: Count
    """Requests in the batch."""
    num_waiting: Count
    """Requests not in the batch, prompts in prefill included."""
    num_free_device_pages: Count
    pools: dict[str, PoolStats]
    """Pool counters by messenger name. An instance has one messenger, or one for each stage or rank."""
    num_prefill_tokens: dict[str, Count] = {}
    """Prompt tokens of finished prefills by the source of their KVCache (`PREFILL_SOURCES`)."""
    prefill_s: Seconds = 0.0
    """Seconds of forward passes over prompts, except inlined ones."""
    decode: DecodeStats = DecodeStats()
    decode_load: DecodeLoad = DecodeLoad()
    joining: list[Joining] = []
    """The waits that have ended since the last heartbeat, in the order of their ends.

    A request has an entry when its KVCache has arrived, if it is not inlined, and one when the request has
    joined the batch.
    """
    modules: ModulesPlace = ModulesPlace()
    moves: MovesStats = MovesStats()
