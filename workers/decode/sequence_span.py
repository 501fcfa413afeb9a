"""The span of a request at a decode instance, from the reservation of its pages to its end there.

Owns: its form. Does not know: when it is made, where it is sent.
"""

import time

from mooncake.tracing.spans import EndedSpan, SpanEvent, step_span
from workers.decode.sequence import CopyTimes, Sequence

DECODE = "decode"


def sequence_span(sequence: Sequence, instance: str, error: str) -> EndedSpan:
    """Return the span of a sequence whose time at `instance` ends now. `error`: why it ends early."""
    now_s, request = time.monotonic(), sequence.request
    sought_s = sequence.reserved_s if sequence.is_inlined else sequence.arrived_s
    computed_s = sequence.prefilled_s if sequence.is_inlined else sequence.joined_s
    steps = [
        step_span("decode.reserve", sequence.received_s, sequence.reserved_s),
        step_span(
            "decode.await_prefill",
            None if sequence.is_inlined else sequence.reserved_s,
            sequence.ordered_s,
        ),
        step_span("decode.turn", sequence.ordered_s, sequence.turn_s),
        step_span("decode.receive", sequence.turn_s, sequence.arrived_s),
        *(_copy(copy) for copy in sequence.copies),
        step_span("decode.join", sought_s, sequence.joined_s),
        step_span("decode.prefill", sequence.joined_s, sequence.prefilled_s),
        step_span(
            "decode.run", computed_s, sequence.left_s, {"mooncake.preemptions": sequence.num_preemptions}
        ),
        step_span("decode.seal", sequence.left_s, now_s),
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


def _copy(copy: CopyTimes) -> EndedSpan | None:
    """A round of a migration: of its source, or of its destination."""
    return step_span(
        f"{DECODE}.{copy.name}", copy.began_s, copy.ended_s, {"mooncake.tokens": copy.num_tokens}
    )
