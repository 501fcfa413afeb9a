"""Predicted costs of moving a running request to another decode instance.

Blocks that the destination's pool holds do not travel; the prefix index knows those of the prompt. All travel
while the source goes on decoding, so a client only waits for an iteration of the destination.

Owns: this prediction. Does not know: which requests move, and why.
"""

from typing import NamedTuple

from conductor.view.assignments import Assignment
from conductor.view.cluster_view import ClusterView
from conductor.view.instances import Instance
from mooncake.messages.requests import Request


class MigrationCost(NamedTuple):
    """What a migration takes."""

    num_held_blocks: int
    """The request's leading blocks that the destination's pool is believed to hold."""
    num_bytes: int
    """Bytes of the blocks that it lacks."""
    copy_s: float
    """Seconds for which source and destination are busy with the copies."""
    pause_s: float
    """Seconds by which one gap between tokens is longer."""


def num_tokens_so_far(view: ClusterView, request: Request, assignment: Assignment, now_s: float) -> int:
    """The tokens of a request that is decoded, as far as iterations that have passed tell."""
    began_steps = assignment.stay.began_steps
    num_steps = 0 if began_steps is None else int(view.forecast.steps.at(now_s) - began_steps)
    num_output_tokens = max(request.num_output_tokens, assignment.request.num_output_tokens + num_steps)
    return request.num_prompt_tokens + min(num_output_tokens, request.sampling.max_tokens)


def migration_cost(
    view: ClusterView, request: Request, assignment: Assignment, destination: Instance, now_s: float
) -> MigrationCost:
    """Predict the cost of moving a request that is decoded.

    Args:
        view: What is known of the instances.
        request: The request, with the output that is known of.
        assignment: Its share of their load.
        destination: The instance to which it would move.
        now_s: The time.
    """
    slot = view.slot_of(destination.name)
    assert slot is not None
    assert view.layout is not None
    num_tokens = num_tokens_so_far(view, request, assignment, now_s)
    num_held_blocks = view.prefixes.match(request.block_keys).num_blocks_at(slot)
    num_blocks = max(0, num_tokens // view.layout.block_size - num_held_blocks)
    num_bytes = num_blocks * view.block_bytes
    first_s, byte_s = view.transfers.costs(assignment.decode_slot, 0)
    pause_s = view.next_gap_s(slot, assignment.num_tokens)
    copy_s = first_s + num_bytes * byte_s if num_bytes else 0.0
    return MigrationCost(num_held_blocks, num_bytes, copy_s, pause_s)
