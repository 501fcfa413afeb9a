"""One tool call's JSON object, parsed while the model writes it.

Owns: the keys of a call's object, and the text of its arguments, which is passed on unchanged. Does not know:
the text around the object.
"""

import json
import re
from collections.abc import Collection
from enum import Enum, auto

_PLAIN = re.compile(r'[^"\\]+')  # inside a string
_KNOWN_KEYS = frozenset({"name", "arguments", "parameters", "type", "id"})
_ARGUMENTS_KEYS = ("arguments", "parameters")


class NotACallError(Exception):
    """The error of a JSON object that is no tool call."""


class _At(Enum):
    """The part of a call's object to which the next character belongs: the state of the parser."""

    BEGIN = auto()
    KEY_OR_END = auto()
    KEY = auto()
    COLON = auto()
    VALUE_BEGIN = auto()
    VALUE = auto()
    END = auto()


class CallObject:
    """The JSON object of a tool call, parsed character by character.

    `name` is set once it is known. The object is certain to be a call (`is_call`) when its name, one of
    `names`, and the beginning of its arguments have been pushed, or when it has ended without arguments.
    Until then, the object may turn out to be no call (`NotACallError`). From then on, `take` returns the
    arguments piece by piece, and invalid JSON ends the object.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._at = _At.BEGIN
        self.name: str | None = None
        self._arguments = ""  # not taken yet
        self._has_arguments = self._streams = False
        self._key = self._value = ""
        self._depth = 0
        self._in_string = self._is_escaped = False

    @property
    def has_ended(self) -> bool:
        """Whether the JSON object is complete."""
        return self._at is _At.END

    @property
    def is_call(self) -> bool:
        """Whether the object is certain to be a call."""
        return self.name is not None and (self._has_arguments or self._at is _At.END)

    def take(self) -> str:
        """Return the new text of the arguments since the last `take`."""
        taken, self._arguments = self._arguments, ""
        return taken

    def push_plain(self, text: str, start: int) -> int:
        """Push the text from `start` up to the next quote or backslash, if the parser is in a string value.

        Returns the index of the first character that was not pushed.
        """
        plain = _PLAIN.match(text, start) if self._at is _At.VALUE and self._in_string else None
        if plain is None or self._is_escaped:
            return start
        if self._streams:
            self._arguments += plain[0]
        else:
            self._value += plain[0]
        return plain.end()

    def push(self, char: str) -> None:
        """Push one character. Raises NotACallError, but never once `is_call` is True."""
        match self._at:
            case _At.BEGIN:
                self._at = _At.KEY_OR_END  # the caller has seen that it is `{`
            case _At.KEY_OR_END:
                self._push_outside(char)
            case _At.KEY:
                self._key += char
                if self._ends_string(char):
                    self._end_key()
            case _At.COLON:
                if char == ":":
                    self._at = _At.VALUE_BEGIN
                elif not char.isspace():
                    self._fail()
            case _At.VALUE_BEGIN if not char.isspace():
                self._begin_value(char)
            case _At.VALUE:
                self._push_value(char)

    def _push_outside(self, char: str) -> None:
        if char == '"':
            self._key, self._in_string, self._at = char, True, _At.KEY
        elif char == "}":
            self._end()
        elif not char.isspace() and char != ",":
            self._fail()

    def _end_key(self) -> None:
        self._key = _decoded(self._key)
        if self._key not in _KNOWN_KEYS:
            self._fail()
        self._at = _At.COLON

    def _begin_value(self, char: str) -> None:
        self._at, self._value, self._depth = _At.VALUE, "", 0
        self._in_string = self._is_escaped = False
        self._streams = self._key in _ARGUMENTS_KEYS and char == "{" and not self._has_arguments
        self._has_arguments |= self._streams
        self._push_value(char)

    def _push_value(self, char: str) -> None:
        if not self._in_string and self._depth == 0 and self._value and (char in ",}" or char.isspace()):
            self._end_value()  # of a number or a word, which has no end of its own
            self._push_outside(char)
            return
        if self._streams:
            self._arguments += char
        if not self._streams or not self._value:
            self._value += char
        if self._in_string:
            if self._ends_string(char) and self._depth == 0:
                self._end_value()
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            if self._depth <= 0:
                self._end_value()

    def _ends_string(self, char: str) -> bool:
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            self._in_string = False
            return True
        return False

    def _end_value(self) -> None:
        self._at = _At.KEY_OR_END
        if self._key == "name" and self.name is None:
            name = _decoded(self._value)
            if name not in self._names:
                self._fail()
            self.name = name
        elif self._key in _ARGUMENTS_KEYS and not self._has_arguments:
            # Some models write the object as a string; a number or a word is none.
            self._arguments, self._has_arguments = _decoded(self._value) or "{}", True

    def _end(self) -> None:
        if self.name is None:
            self._fail()
        if not self._has_arguments:
            self._arguments, self._has_arguments = "{}", True
        self._at = _At.END

    def _fail(self) -> None:
        if not self.is_call:
            raise NotACallError
        self._at = _At.END  # events that were returned cannot be taken back


def _decoded(text: str) -> str:
    """Return the string whose JSON form is `text`; an empty string if `text` is not the JSON of a string."""
    try:
        value = json.loads(text, strict=False)
    except ValueError:
        return ""
    return value if isinstance(value, str) else ""
