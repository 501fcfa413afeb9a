"""How long waiting makes up for a lower priority, so that nobody waits for ever.

Owns: that rate. Does not know: what is waited for.
"""

AGING_S = 60.0
"""who has waited so long more counts as one step of `priority` (lower goes first) before the others"""


def aged_priority(priority: int, waited_s: float) -> int:
    """The priority number of who has waited so long."""
    return priority - int(waited_s // AGING_S)


def standing_s(priority: int, due_s: float) -> float:
    """Who has the lowest goes first. It does not change by waiting: all others age as well."""
    return due_s + priority * AGING_S
