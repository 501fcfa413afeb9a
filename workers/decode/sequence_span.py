"""The span of a request at a decode instance, from the reservation of its pages to its end there.

Owns: its form. Does not know: when it is made, where it is sent.
"""

import time

from mooncake.tracing.spans import Attributes, EndedSpan, SpanEvent
from workers.decode.sequence import CopyTimes, Sequence

DECODE = "decode"


def sequence_span(sequence: Sequence, instance: str, error: str) -> EndedSpan:
    """Return the span of a sequence whose time at `instance` ends now. `error`: why it ends early."""
    now_s, request = time.monotonic(), sequence.request
    sought_s = sequence.reserved_s if sequence.is_inlined else sequence.arrived_s
    computed_s = sequence.prefilled_s if sequence.is_inlined else sequence.joined_s
    steps = [
        _step("reserve", sequence.received_s, sequence.reserved_s),
        _step("await_prefill", None if sequence.is_inlined else sequence.reserved_s, sequence.ordered_s),
        _step("turn", sequence.ordered_s, sequence.turn_s),
        _step("receive", sequence.turn_s, sequence.arrived_s),
        *(_copy(copy) for copy in sequence.copies),
        _step("join", sought_s, sequence.joined_s),
        _step("prefill", sequence.joined_s, sequence.prefilled_s),
        _step("run", computed_s, sequence.left_s, {"mooncake.preemptions": sequence.num_preemptions}),
        _step("seal", sequence.left_s, now_s),
    ]
    moments = [("first token", sequence.first_sent_s or sequence.prefilled_s)]
    if sequence.finish_reason is not None:
        moments.append(("last token", sequence.left_s))
    return EndedSpan(
        DECODE,
        sequence.received_s,
        now_s,
        {
            "mooncake.instance": instance,
            "mooncake.request_id": request.request_id,
            "mooncake.attempt": sequence.ref.attempt,
            "mooncake.inlined": sequence.is_inlined,
            "mooncake.prompt_tokens": request.num_prompt_tokens,
            "mooncake.cached_tokens": sequence.num_cached_tokens,
            "mooncake.output_tokens": sequence.num_output_tokens,
            "mooncake.finish_reason": sequence.finish_reason,
            "mooncake.handed_over": sequence.is_wanted_elsewhere and sequence.finish_reason is None,
        },
        [SpanEvent(at_s, name) for name, at_s in moments if at_s is not None],
        error,
        [step for step in steps if step is not None],
    )


def _step(
    name: str, began_s: float | None, ended_s: float | None, attributes: Attributes | None = None
) -> EndedSpan | None:
    if began_s is None or ended_s is None:
        return None
    return EndedSpan(f"{DECODE}.{name}", began_s, ended_s, attributes or {})


def _copy(copy: CopyTimes) -> EndedSpan | None:
    """A round of a migration: of its source, or of its destination."""
    return _step(copy.name, copy.began_s, copy.ended_s, {"mooncake.tokens": copy.num_tokens})
