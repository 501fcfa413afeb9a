"""How long waiting makes up for a lower priority, so that nobody waits for ever.

Owns: that rate, and what a prompt without a deadline counts as. Does not know: what is waited for.
"""

AGING_S = 60.0
"""who has waited so long more counts as one step of `priority` (lower goes first) before the others"""
NO_DEADLINE_S = 30.0
"""how long a prompt without a deadline stands behind those that have one"""


def aged_priority(priority: int, waited_s: float) -> int:
    """The priority number of who has waited so long."""
    return priority - int(waited_s // AGING_S)


def due_s(time_left_s: float | None, now_s: float) -> float:
    """When the first token of a prompt is due that comes now; what is overdue is due now."""
    return now_s + (NO_DEADLINE_S if time_left_s is None else max(0.0, time_left_s))


def standing_s(priority: int, due_s: float) -> float:
    """Who has the lowest goes first. It does not change by waiting: all others age as well."""
    return due_s + priority * AGING_S
