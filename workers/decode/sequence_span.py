"""The span of a request at a decode instance, from the reservation of its pages to its end there.

Owns: the span's form. Does not know: when and where the span is sent.
"""

import time

from mooncake.tracing.spans import EndedSpan, SpanEnd, SpanEvent
from workers.decode.sequence import PREPARE, Sequence

DECODE = "decode"


def sequence_span(sequence: Sequence, instance: str, error: str) -> EndedSpan:
    """Return the span of a sequence that leaves `instance` now.

    `error` is the reason for an early end, or an empty string.
    """
    end, request = SpanEnd(time.monotonic(), error), sequence.request
    moves_here = any(copy.name == PREPARE for copy in sequence.copies)
    joins = sequence.joined_s is not None or sequence.finish_reason is None
    if sequence.is_inlined:
        awaited_s, sought_s = None, sequence.reserved_s
        prompt_s, computed_s = sequence.joined_s, sequence.prefilled_s
    else:
        awaited_s, sought_s = sequence.reserved_s, sequence.arrived_s if joins else None
        prompt_s, computed_s = None, sequence.joined_s
    left_s, preempted = sequence.left_s, {"mooncake.preemptions": sequence.num_preemptions}
    steps = [
        end.step("decode.reserve", None if moves_here else sequence.received_s, sequence.reserved_s),
        end.step("decode.await_prefill", awaited_s, sequence.ordered_s),
        end.step("decode.turn", sequence.ordered_s, sequence.turn_s),
        end.step("decode.receive", sequence.turn_s, sequence.arrived_s),
        *(
            end.step(f"{DECODE}.{name}", began_s, ended_s, {"mooncake.tokens": num_tokens})
            for name, began_s, ended_s, num_tokens in sequence.copies
        ),
        end.step("decode.join", sought_s, sequence.joined_s or left_s),
        end.step("decode.prefill", prompt_s, sequence.prefilled_s or left_s),
        end.step("decode.run", computed_s, left_s, preempted),
        end.step("decode.seal", left_s, None),
    ]
    moments = [("first token", sequence.first_sent_s or sequence.prefilled_s)]
    if sequence.finish_reason is not None:
        moments.append(("last token", sequence.left_s))
    return EndedSpan(
        DECODE,
        sequence.received_s,
        end.at_s,
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
        end.error,
        [step for step in steps if step is not None],
    )
