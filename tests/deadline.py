"""The seconds for which a test waits for an event at most: long enough for busy machines, and not for
ever."""

DEADLINE_S = 180.0
