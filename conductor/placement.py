"""Which pair of instances serves a request: for now the least loaded pair that can hold it.

Pure: same state and same request give the same answer.
"""

from collections.abc import Collection
from dataclasses import dataclass

from conductor.instances import Instance, Instances
from mooncake.messages import Request, Role


@dataclass(frozen=True, slots=True)
class Placement:
    """The pair chosen for a request."""

    prefill: Instance
    decode: Instance


def num_tokens_held(request: Request, role: Role) -> int:
    """Prefill holds what is known of the sequence, decode all of it."""
    if role is Role.PREFILL:
        return len(request.token_ids)
    return request.num_prompt_tokens + request.sampling.max_tokens


def place(request: Request, instances: Instances, refused_by: Collection[str] = ()) -> Placement | None:
    """The pair with the fewest assigned prompt tokens; None when no pair can hold the request now.

    Not on decode instances that have refused it.
    """
    decodes = [instance for instance in instances.of_role(Role.DECODE) if instance.name not in refused_by]
    prefill = _least_loaded(instances.of_role(Role.PREFILL), num_tokens_held(request, Role.PREFILL))
    decode = _least_loaded(decodes, num_tokens_held(request, Role.DECODE))
    return Placement(prefill, decode) if prefill is not None and decode is not None else None


def why_too_large(request: Request, instances: Instances) -> str | None:
    """Which role has no instance, there or about to return, that could hold it; None if both have."""
    for role in Role:
        expected = instances.expected(role)
        num_tokens = num_tokens_held(request, role)
        if expected and not any(instance.can_hold(num_tokens) for instance in expected):
            largest = max(expected, key=lambda instance: instance.max_sequence_blocks)
            return (
                f"the prompt has {request.num_prompt_tokens} tokens, "
                f"max_tokens is {request.sampling.max_tokens}; "
                f"the KVCache of a {role.value} instance holds at most "
                f"{largest.max_sequence_blocks} blocks of {largest.registration.layout.block_size} tokens"
            )
    return None


def _least_loaded(candidates: list[Instance], num_tokens: int) -> Instance | None:
    return min(
        (instance for instance in candidates if instance.can_hold(num_tokens)),
        key=lambda instance: (instance.num_assigned_tokens, len(instance.requests), instance.name),
        default=None,
    )
