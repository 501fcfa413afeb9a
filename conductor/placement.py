"""Which pair of instances serves a request: for now the least loaded pair that can hold it.

Pure: same state and same request give the same answer.
"""

from dataclasses import dataclass

from conductor.instances import Instance, Instances
from mooncake.messages import Request, Role


@dataclass(frozen=True, slots=True)
class Placement:
    """The pair chosen for a request."""

    prefill: Instance
    decode: Instance


def num_prompt_blocks(request: Request, block_size: int) -> int:
    """Blocks of the prompt, its partial last one included."""
    return -(-len(request.token_ids) // block_size)


def place(request: Request, instances: Instances) -> Placement | None:
    """The pair with the fewest assigned prompt tokens; None when no pair can hold the prompt."""
    prefill = _least_loaded(instances.of_role(Role.PREFILL), request)
    decode = _least_loaded(instances.of_role(Role.DECODE), request)
    return Placement(prefill, decode) if prefill is not None and decode is not None else None


def _least_loaded(candidates: list[Instance], request: Request) -> Instance | None:
    able = [
        instance
        for instance in candidates
        if num_prompt_blocks(request, instance.registration.layout.block_size) <= instance.max_prompt_blocks
    ]
    return min(
        able,
        key=lambda instance: (instance.num_assigned_tokens, len(instance.requests), instance.name),
        default=None,
    )
