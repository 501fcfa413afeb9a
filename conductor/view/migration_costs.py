"""Predicted costs of moving a running request to another decode instance.

Blocks that the destination's pool holds do not travel. The prefix index knows which of the prompt's
blocks the pool holds.

Owns: this prediction. Does not know: which requests move, and why.
"""

from typing import NamedTuple

from conductor.view.assignments import Assignment
from conductor.view.cluster_view import ClusterView
from conductor.view.instances import Instance
from mooncake.messages.requests import Request


class MigrationCost(NamedTuple):
    """The predicted cost of one migration."""

    num_held_blocks: int
    """The request's leading blocks that the destination's pool is believed to hold."""
    num_bytes: int
    """Bytes of the blocks that the destination lacks."""


def num_tokens_so_far(view: ClusterView, request: Request, assignment: Assignment, now_s: float) -> int:
    """Estimate the tokens that a running request has at `now_s`, from the iterations of its decode."""
    began_iteration = assignment.stay.began_iteration
    num_iterations = (
        0 if began_iteration is None else int(view.forecast.iterations.at(now_s) - began_iteration)
    )
    num_output_tokens = max(request.num_output_tokens, assignment.request.num_output_tokens + num_iterations)
    return request.num_prompt_tokens + min(num_output_tokens, request.sampling.max_tokens)


def migration_cost(
    view: ClusterView, request: Request, assignment: Assignment, destination: Instance, now_s: float
) -> MigrationCost:
    """Predict the cost of moving a request that is being decoded.

    Args:
        view: The view of the instances.
        request: The request, with the output that the Conductor knows of.
        assignment: The request's share of the instances' load.
        destination: The instance to which the request would move.
        now_s: The time.
    """
    slot = view.slot_of(destination.name)
    assert slot is not None
    assert view.layout is not None
    num_tokens = num_tokens_so_far(view, request, assignment, now_s)
    num_held_blocks = view.prefixes.match(request.block_keys).num_blocks_at(slot)
    num_blocks = max(0, num_tokens // view.layout.block_size - num_held_blocks)
    return MigrationCost(num_held_blocks, num_blocks * view.block_bytes)
