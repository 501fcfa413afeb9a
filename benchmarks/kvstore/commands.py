"""The protocol of a peer's driver: calls as JSON lines on stdin, answers on stdout.

Needs only the standard library: a peer's driver runs it in another virtual environment.

Owns: the driver's end of the lines. Does not know: what is called.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import TextIO


def take_stdout() -> TextIO:
    """Reserve stdout for answers: all other output, also of libraries, goes to stderr from now on."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def answer_commands(answers: TextIO, greeting: object, owner: Callable[[str], object]) -> None:
    """Answer commands until stdin ends. `owner` maps a command's name to the object whose method of that name
    is called."""
    print(json.dumps(greeting), file=answers, flush=True)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(getattr(owner(name), name)(*arguments)), file=answers, flush=True)
