"""What the commands here have in common: exit codes, how errors are told, types of options.

Owns: these. Does not know: any command.
"""

import argparse
import sys
from collections.abc import Callable
from enum import StrEnum
from typing import TypeVar

from mooncake.errors import ConfigError, MooncakeError

FAILED, WRONG_USE, INTERRUPTED = 1, 2, 130

Choice = TypeVar("Choice", bound=StrEnum)


def exit_code(command: Callable[[], int]) -> int:
    """The command's own, or 1 if something failed, 2 for wrong use, 130 after Ctrl-C."""
    try:
        return command()
    except KeyboardInterrupt:
        return INTERRUPTED
    except (MooncakeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return WRONG_USE if isinstance(error, ConfigError) else FAILED


def positive(text: str) -> float:
    """A finite number above 0."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text}")
    return value


def not_negative(text: str) -> float:
    """A finite number, 0 or above."""
    return 0.0 if float(text) == 0 else positive(text)


def share(text: str) -> float:
    """A number from 0 to 1."""
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 1, got {text}")
    return value


def count(text: str) -> int:
    """1 or more."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {text}")
    return value


def counts(module: str, *names: str) -> list[int]:
    """What `module` is called with: one count for each of `names`."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}")
    for name in names:
        parser.add_argument(name, type=count)
    return list(vars(parser.parse_args()).values())


def lengths(text: str) -> tuple[int, int]:
    """Tokens in and out, each 1 or more: `128/64`."""
    try:
        num_input, num_output = map(int, text.split("/"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected tokens in and out, as 128/64, got {text}") from None
    return count(str(num_input)), count(str(num_output))


def one_of(choices: type[Choice]) -> Callable[[str], Choice]:
    """By its value."""

    def choice(text: str) -> Choice:
        try:
            return choices(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected one of {', '.join(choices)}, got {text}") from None

    return choice
