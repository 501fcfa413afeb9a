"""The protocol of a peer's driver: calls as JSON lines on stdin, answers on stdout.

The module needs only the standard library, as a peer's driver runs it in another virtual environment.

Owns: the driver's end of the protocol. Does not know: which methods are called.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import TextIO


def take_stdout() -> TextIO:
    """Reserve stdout for answers. All other output, also that of libraries, goes to stderr from now on."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def answer_commands(answers: TextIO, greeting: object, owner: Callable[[str], object]) -> None:
    """Answer commands until stdin ends. A command is a method's name and its arguments.

    `owner` returns the object that has the method of this name.
    """
    print(json.dumps(greeting), file=answers, flush=True)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(getattr(owner(name), name)(*arguments)), file=answers, flush=True)
