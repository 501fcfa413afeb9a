"""The aging of priorities, by which no request waits for ever.

Owns: the rate, and the assumed deadline of a prompt without one. Does not know: queues.
"""

AGING_S = 60.0
"""Seconds of waiting that are worth one step of `priority` (lower goes first)."""
NO_DEADLINE_S = 30.0
"""Seconds until the assumed deadline of a prompt without a deadline."""


def aged_priority(priority: int, waited_s: float) -> int:
    """Return the priority number of a request that has waited for `waited_s` seconds."""
    return priority - int(waited_s // AGING_S)


def due_s(time_left_s: float | None, now_s: float) -> float:
    """Return the time at which the first token of a prompt is due.

    The prompt arrives at `now_s` with `time_left_s` seconds left; a negative time counts as 0. None means
    that the prompt has no deadline, so `NO_DEADLINE_S` is assumed.
    """
    return now_s + (NO_DEADLINE_S if time_left_s is None else max(0.0, time_left_s))


def rank_s(priority: int, due_s: float) -> float:
    """Return the sort key of a queue: the lowest goes first.

    A key is constant while a request waits, as all requests age alike.
    """
    return due_s + priority * AGING_S
