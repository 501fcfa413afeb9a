"""Parsers of option values, for `mooncake-bench`, `mooncake-sim` and `mooncake-plan`.

Owns: these parsers. Does not know: any command.
"""

import argparse
from collections.abc import Callable
from enum import StrEnum
from typing import TypeVar

from mooncake.config.spelling import did_you_mean

Choice = TypeVar("Choice", bound=StrEnum)


def positive(text: str) -> float:
    """Parse a finite number above 0."""
    value = _number(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text}")
    return value


def not_negative(text: str) -> float:
    """Parse a finite number, 0 or above."""
    value = _number(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected 0 or a number above 0, got {text}")
    return value


def share(text: str) -> float:
    """Parse a number from 0 to 1."""
    value = _number(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 1, got {text}")
    return value


def count(text: str) -> int:
    """Parse an integer, 1 or above."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number, got {text}") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {text}")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, got {text}") from None


def counts(module: str, *names: str) -> list[int]:
    """Parse this process's command line as one count for each of `names`.

    `module` is for the usage message.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}")
    for name in names:
        parser.add_argument(name, type=count)
    return list(vars(parser.parse_args()).values())


def lengths(text: str) -> tuple[int, int]:
    """Parse the numbers of tokens of a prompt and of its answer, each 1 or more, as in `128/64`."""
    try:
        num_input, num_output = map(int, text.split("/"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected tokens in and out, as 128/64, got {text}") from None
    return count(str(num_input)), count(str(num_output))


def one_of(choices: type[Choice]) -> Callable[[str], Choice]:
    """Return the parser of an option whose choices are values of an enumeration."""

    def choice(text: str) -> Choice:
        try:
            return choices(text)
        except ValueError:
            meant = did_you_mean(text, choices)
            raise argparse.ArgumentTypeError(
                f"expected one of {', '.join(choices)}, got {text}{meant}"
            ) from None

    return choice
