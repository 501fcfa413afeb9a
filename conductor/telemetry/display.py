"""The state of the cluster that `/metrics` and `/dashboard` show. Pure: no clock.

Owns: the form of that state. Does not know: HTTP, how the state is drawn.
"""

from collections import Counter
from collections.abc import Callable
from itertools import islice
from typing import Any

from conductor.policy import Conductor
from conductor.telemetry.history import TRANSFERRING, History, RequestTimeline
from conductor.telemetry.metrics import instances_text
from conductor.view.instances import Emptying, Instance
from mooncake.messages.heartbeats import Heartbeat

NUM_REQUESTS = 40
NUM_REJECTIONS = 20
NUM_PATHS = 60
NUM_CONTEXTS = 40
NUM_MOVES = 40
NUM_DECISIONS = 20
NumReceived = Callable[[str], int | None]


class Display:
    """The cluster's state in the form that is displayed.

    Times are seconds since 1970: the Conductor's clock plus `wall_offset_s`.
    """

    def __init__(self, conductor: Conductor, history: History, model_name: str, wall_offset_s: float) -> None:
        self._conductor, self._history = conductor, history
        self._model_name = model_name
        self._wall_offset_s = wall_offset_s

    def metrics_text(self) -> str:
        """Return the instances' metrics in Prometheus' text format."""
        return instances_text(self._conductor, self._model_name)

    def state(self, num_received: NumReceived) -> dict[str, Any]:
        """Return everything that the dashboard shows, as JSON values.

        These are instances and their changes, migrations, decisions about roles, traffic between pools,
        context caches, and the latest requests and rejections. No value changes merely because time passes.

        `num_received` returns the number of tokens of a request that have arrived at the front; None for a
        request that is not in flight.
        """
        history = self._history
        return {
            "model": self._model_name,
            "instances": [_instance(instance) for instance in self._conductor.instances],
            "changes": [
                {**change._asdict(), "at_s": self._wall_s(change.at_s)} for change in history.changes.latest
            ],
            "moves": self._moves(),
            "num_moves": {
                f"{reason}: {outcome}": number
                for (reason, outcome), number in self._conductor.stats.migrations.num_ended.items()
            },
            "decisions": self._decisions(),
            "paths": self._paths(),
            "num_transfers": history.num_steps[TRANSFERRING],
            "contexts": [
                {
                    "id": context_id,
                    "num_blocks": len(context.keys),
                    "num_pinned": context.num_pinned,
                    "holder": None if context.holder is None else context.holder.name,
                    "expires_s": self._wall_s(context.expires_s),
                }
                for context_id, context in self._conductor.contexts.newest(NUM_CONTEXTS)
            ],
            "num_ended": history.num_ended,
            "num_rejected": history.num_rejected,
            "requests": [
                self._summary(timeline, num_received)
                for ring in (reversed(history.live.values()), reversed(history.ended.values()))
                for timeline in islice(ring, NUM_REQUESTS)
            ],
            "rejections": [
                {
                    "at_s": self._wall_s(rejection.at_s),
                    "request_id": rejection.request_id,
                    "status": rejection.status,
                    "reason": rejection.reason,
                    "message": rejection.message,
                    "num_prompt_tokens": rejection.prompt_len,
                }
                for rejection in islice(reversed(history.rejections), NUM_REJECTIONS)
            ],
        }

    def timeline(self, request_id: str, num_received: NumReceived) -> dict[str, Any] | None:
        """Return the moments of one request as JSON values; None if the request is unknown."""
        timeline = self._history.find(request_id)
        if timeline is None:
            return None
        moments = [{**moment._asdict(), "at_s": self._wall_s(moment.at_s)} for moment in timeline.moments]
        return {**self._summary(timeline, num_received), "moments": moments}

    def pair(self, request_id: str) -> tuple[str | None, str | None]:
        """Return the names of a request's prefill and decode instance; (None, None) if it is unknown."""
        timeline = self._history.find(request_id)
        return (None, None) if timeline is None else (timeline.prefill, timeline.decode)

    def _summary(self, timeline: RequestTimeline, num_received: NumReceived) -> dict[str, Any]:
        num_tokens = timeline.num_output_tokens or num_received(timeline.request_id) or 0
        return {
            "id": timeline.request_id,
            "submitted_s": self._wall_s(timeline.moments[0].at_s),
            "last_s": self._wall_s(timeline.last.at_s),
            "step": timeline.last.step,
            "is_over": timeline.is_over,
            "prefill": timeline.prefill,
            "decode": timeline.decode,
            "num_attempts": timeline.num_attempts,
            "num_moves": timeline.num_moves,
            "num_prompt_tokens": timeline.num_prompt_tokens,
            "num_cached_tokens": timeline.num_cached_tokens,
            "num_output_tokens": num_tokens,
        }

    def _moves(self) -> list[dict[str, Any]]:
        """Return the migrations in progress as JSON values."""
        moves = []
        for request_id, tracked in islice(self._conductor.migrations.in_progress.items(), NUM_MOVES):
            if (migration := tracked.migration) is not None:
                moves.append(
                    {
                        "id": request_id,
                        "source": tracked.decode,
                        "destination": migration.destination.instance.name,
                        "reason": migration.reason,
                        "step": migration.step.name.lower(),
                        "num_rounds": migration.num_rounds,
                        "began_s": self._wall_s(migration.began_s),
                    }
                )
        return moves

    def _decisions(self) -> list[dict[str, Any]]:
        """Return the rebalancer's latest decisions as JSON values, latest first."""
        rebalancer = self._conductor.elasticity.rebalancer
        if rebalancer is None:
            return []
        return [
            {
                "at_s": self._wall_s(decision.at_s),
                "instance": decision.change.instance,
                "before": decision.change.before,
                "after": decision.change.after,
                "why": decision.change.why,
                "benefit_s": round(decision.change.benefit_s, 2),
                "cost_s": round(decision.change.cost_s, 2),
                "accepted_before": decision.accepted_before,
                "outcome": None if decision.outcome is None else decision.outcome._asdict(),
            }
            for decision in islice(reversed(rebalancer.decisions), NUM_DECISIONS)
        ]

    def _paths(self) -> list[dict[str, Any]]:
        """Return the paths between pools that have carried the most bytes, as JSON values.

        The bytes of a path are those that its source has sent plus those that its target has fetched.
        """
        num_bytes: Counter[tuple[str, str, str]] = Counter()
        for instance in self._conductor.instances:
            for part, pool in instance.heartbeat.pools.items() if instance.heartbeat is not None else ():
                for peer, stats in pool.peers.items():
                    for transport, sent_bytes in stats.sent_bytes.items():
                        num_bytes[part, peer, transport] += sent_bytes
                    for transport, received_bytes in stats.received_bytes.items():
                        num_bytes[peer, part, transport] += received_bytes
        return [
            {"source": source, "target": target, "transport": transport, "bytes": total}
            for (source, target, transport), total in num_bytes.most_common(NUM_PATHS)
        ]

    def _wall_s(self, at_s: float) -> float:
        return round(at_s + self._wall_offset_s, 4)


def _instance(instance: Instance) -> dict[str, Any]:
    emptying = instance.emptying or Emptying(0.0)
    shown = {
        "name": instance.name,
        "role": instance.role,
        "state": instance.state,
        "next_role": emptying.next_role,
        "num_moved": emptying.num_moved,
        "num_blocks_left": emptying.num_blocks_left,
        "engine": instance.registration.engine,
        "num_requests": len(instance.requests),
        "num_assigned_tokens": instance.num_assigned_tokens,
        "num_device_pages": instance.num_device_pages,
        "moved": instance.modules.part.what if instance.modules.part else "",
        "helper": instance.modules.helper,
    }
    return shown if instance.heartbeat is None else shown | _reported(instance.heartbeat)


def _reported(heartbeat: Heartbeat) -> dict[str, Any]:
    pools = heartbeat.pools.values()
    return {
        "num_running": heartbeat.num_running,
        "num_waiting": heartbeat.num_waiting,
        "num_free_device_pages": heartbeat.num_free_device_pages,
        "num_decoded_tokens": heartbeat.decode.num_tokens,
        "prefill_tokens": heartbeat.num_prefill_tokens,
        "num_pages": sum(pool.num_pages for pool in pools),
        "num_used_pages": sum(pool.num_used for pool in pools),
        "num_sealed_pages": sum(pool.num_sealed for pool in pools),
        "num_orphaned_pages": sum(pool.num_orphaned for pool in pools),
        "num_hits": sum(tier.num_hits for pool in pools for tier in pool.tiers.values()),
        "num_misses": sum(sum(pool.num_misses.values()) for pool in pools),
        "is_healthy": all(tier.is_healthy for pool in pools for tier in pool.tiers.values()),
    }
