"""The common part of all commands: parsing of arguments, reports of errors, exit codes.

Owns: these rules. Does not know: any command.
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from typing import Any, NoReturn

from mooncake.config.spelling import did_you_mean
from mooncake.errors import ConfigError, MooncakeError
from mooncake.messages.workers import SPOKEN

FAILED, WRONG_USE, INTERRUPTED = 1, 2, 130

_OPTION = re.compile(r"--?[A-Za-z]")
"""The pattern of an option's beginning; `-5` is a value."""


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` whose errors are one line each, and name the nearest known name.

    Options have no abbreviations. A misspelled option is reported before anything else: argparse would take
    the option's value for a command, or report a missing argument instead.
    """

    def __init__(self, *, no_command: str = "", **settings: Any) -> None:
        """Make a parser.

        `no_command` is appended to the error about an unknown command, behind the list of commands.
        """
        self._no_command = no_command
        settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **settings)

    def add_version(self) -> None:
        """Add the option `--version`.

        The option prints the versions of the distribution and of the protocol between nodes.
        """
        text = f"%(prog)s {version('mooncake-serve')}, protocol {SPOKEN}"
        self.add_argument("--version", action="version", version=text)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Return the parsed arguments. An unknown argument ends the program."""
        given = sys.argv[1:] if args is None else list(args)
        for name in self._option_names(given):
            if name not in self._option_string_actions:
                self.error(f"unknown option {name}{self._meant(name)}")
        options, rest = super().parse_known_args(given, namespace)
        if rest:
            self.error(f"{rest[0]!r} is one argument too many")
        return options, rest

    def error(self, message: str) -> NoReturn:
        """Print one line and end the program with the exit code of wrong use."""
        self.exit(WRONG_USE, f"error: {message} ({self.prog} --help)\n")

    def _option_names(self, given: Sequence[str]) -> Iterator[str]:
        """Yield the names of the options that were given to this parser itself.

        Stops at `--`, and at a subcommand, whose options belong to the subcommand.
        """
        arguments = iter(given)
        for argument in arguments:
            if argument == "--":
                return
            if _OPTION.match(argument) and " " not in argument:
                name, equals, _ = argument.partition("=")
                yield name
                action = self._option_string_actions.get(name)
                if action is not None and action.nargs is None and not equals:
                    next(arguments, None)  # the value
            elif self._subparsers is not None:
                return

    def _meant(self, name: str) -> str:
        if any(name in parser._option_string_actions for parser in self._commands().values()):
            return f"; it belongs behind the command: {self.prog} COMMAND {name}"
        return did_you_mean(name, self._option_string_actions)

    def _commands(self) -> dict[str, "Parser"]:
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                return dict(action.choices)
        return {}

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Check that a command exists, or that an option's value is among its choices."""
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            what = "command" if isinstance(action, argparse._SubParsersAction) else "value"
            hint = f"; {self._no_command}" if what == "command" and self._no_command else ""
            meant = did_you_mean(str(value), known) or f"; expected one of {', '.join(known)}{hint}"
            raise argparse.ArgumentError(
                None if what == "command" else action, f"unknown {what} {value}{meant}"
            )


def exit_code(command: Callable[[], int]) -> int:
    """Run a command, and return its exit code: 1 after an error, 2 for wrong use, 130 after Ctrl-C."""
    try:
        return command()
    except KeyboardInterrupt:
        return INTERRUPTED
    except (MooncakeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return WRONG_USE if isinstance(error, ConfigError) else FAILED
