"""The span of a prompt at a prefill instance, or in one stage.

Owns: the span's form. Does not know: when and where the span is sent.
"""

import time

from mooncake.tracing.spans import EndedSpan, SpanEnd, SpanEvent
from workers.kvcache.prefix_fetch import PrefixFetch
from workers.prefill.job import PrefillJob
from workers.prefill.prompt_times import PassTimes

PREFILL = "prefill"


def prompt_span(job: PrefillJob) -> EndedSpan:
    """Return the span of a prompt that leaves this stage now."""
    times, request = job.times, job.order.request
    end, block_bytes = SpanEnd(time.monotonic(), times.error), job.layout.block_bytes
    computed_s = None if job.progress.num_left else times.passes[-1].ended_s
    sent = {"mooncake.bytes": len(job.order.grant.pages) * block_bytes}
    steps = [
        end.step("prefill.queue", times.queued_s, times.turn_s),
        end.step("prefill.reserve", times.turn_s, times.memory_s),
        None if job.fetch is None else _fetch(job.fetch, job.layout.layer_bytes),
        *(_pass(of_pass, block_bytes, end) for of_pass in times.passes),
        end.step("prefill.store", computed_s, times.stored_s),
        end.step("prefill.send", times.stored_s, times.sent_s, sent),
    ]
    return EndedSpan(
        PREFILL,
        times.received_s,
        end.at_s,
        {
            "mooncake.instance": job.instance,
            "mooncake.request_id": request.request_id,
            "mooncake.attempt": job.order.ref.attempt,
            "mooncake.prompt_tokens": len(request.token_ids),
            "mooncake.cached_tokens": job.num_cached_tokens,
        },
        [] if computed_s is None or times.stored_s is None else [SpanEvent(computed_s, "first token")],
        end.error,
        [step for step in steps if step is not None],
    )


def _fetch(fetch: PrefixFetch, layer_bytes: int) -> EndedSpan:
    return EndedSpan(
        "prefill.fetch",
        fetch.begun_s,
        fetch.heard_s,
        {
            "mooncake.prefix_source": fetch.sources[0].messenger.instance,
            "mooncake.asked_blocks": len(fetch.indices),
            "mooncake.bytes": sum(fetch.num_layers) * layer_bytes,
        },
    )


def _pass(of_pass: PassTimes, block_bytes: int, end: SpanEnd) -> EndedSpan | None:
    attributes = {
        "mooncake.start": of_pass.start,
        "mooncake.tokens": of_pass.num_tokens,
        "mooncake.load_wait_s": of_pass.load_wait_s,
        "mooncake.loaded_bytes": of_pass.num_loaded_blocks * block_bytes,
        "mooncake.stored_bytes": of_pass.num_stored_blocks * block_bytes,
    }
    span = end.step("prefill.pass", of_pass.began_s, of_pass.ended_s, attributes)
    if span is None or span.error or of_pass.is_computed:
        return span
    return span._replace(error="given up: aborted, or blocks that were to be reused did not come")
