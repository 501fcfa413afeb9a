"""Suggestions for names that do not exist: flags, commands, keys, choices.

Owns: which known names are near. Does not know: what they name.
"""

import difflib
import re
from collections.abc import Iterable

_MOST_NAMED = 3


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the end of an error message, such as `; did you mean --model?`; empty if no known name is near.

    A known name that ends with `word` is nearer than any misspelling: `--max-batch` means
    `--worker-max-batch`.
    """
    names = list(known)
    bare = re.sub(r"[-_.]", "-", word.strip("-"))
    near = [name for name in names if re.sub(r"[-_.]", "-", name).endswith(f"-{bare}")]
    near = near[:_MOST_NAMED] or difflib.get_close_matches(word, names, n=1)
    return f"; did you mean {' or '.join(near)}?" if near else ""
