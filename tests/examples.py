"""The number of examples that Hypothesis draws.

`make soak` draws all, and others each time. Otherwise a few are drawn, the same each time.
"""

import hypothesis

REDUCED, FULL = 25, 100


def num_examples(full: int) -> int:
    """Return the number of examples by the profile: `full` in `make soak`, otherwise a share of it."""
    return max(1, full * hypothesis.settings.default.max_examples // FULL)
