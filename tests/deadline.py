"""How long a test waits for what must happen: a guard against waiting for ever, on machines that are busy."""

DEADLINE_S = 180.0
