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


def place(request: Request, instances: Instances) -> Placement | None:
    """The pair with the fewest assigned prompt tokens; None when no pair can hold the request.

    Prefill holds the prompt, decode the output as well.
    """
    num_prompt_tokens = len(request.token_ids)
    prefill = _least_loaded(instances.of_role(Role.PREFILL), num_prompt_tokens)
    decode = _least_loaded(instances.of_role(Role.DECODE), num_prompt_tokens + request.sampling.max_tokens)
    return Placement(prefill, decode) if prefill is not None and decode is not None else None


def _least_loaded(candidates: list[Instance], num_tokens: int) -> Instance | None:
    return min(
        (instance for instance in candidates if instance.can_hold(num_tokens)),
        key=lambda instance: (instance.num_assigned_tokens, len(instance.requests), instance.name),
        default=None,
    )
