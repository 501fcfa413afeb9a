"""How many examples Hypothesis draws: a few, each time the same, or in `make soak` all, each time others."""

import hypothesis

REDUCED, FULL = 25, 100


def num_examples(full: int) -> int:
    """As many as the profile allows of `full`, which is what `make soak` draws."""
    return max(1, full * hypothesis.settings.default.max_examples // FULL)
