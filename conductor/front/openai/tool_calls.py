"""Tool calls in a model's text, separated from the rest of the text.

The parser is pure and incremental: it gets text, and returns events as soon as they are certain. Joined, the
events of a text do not depend on how the text was divided into pieces.

Owns: the formats of model families, the marks around calls, and when it is certain that a text is a call.
Does not know: requests, OpenAI's JSON.
"""

import re
from collections.abc import Collection
from enum import Enum, StrEnum, auto
from typing import NamedTuple

from conductor.front.openai.call_object import CallObject, NotACallError


class ToolFormat(StrEnum):
    """The format in which a family of models writes tool calls.

    The setting `http.tool_parser` has these values.
    """

    HERMES = "hermes"
    """The format of Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""
    LLAMA3_JSON = "llama3_json"
    """The format of Llama 3: the whole text is `{"name": ..., "parameters": {...}}`.

    The text may also be several such objects, divided by semicolons.
    """
    MISTRAL = "mistral"
    """The format of Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`."""

    @property
    def begin(self) -> str:
        """The mark before tool calls; empty if calls begin with the text."""
        return {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]"}.get(self, "")

    @property
    def end(self) -> str:
        """The mark behind tool calls; empty if there is none."""
        return "</tool_call>" if self is ToolFormat.HERMES else ""

    @property
    def arguments_key(self) -> str:
        """The key of the arguments in a call's object."""
        return "parameters" if self is ToolFormat.LLAMA3_JSON else "arguments"


def takes_tools(template: str) -> bool:
    """Return whether a chat template has a place for tools."""
    return re.search(r"\btools\b", template) is not None


def format_of_template(template: str) -> ToolFormat | None:
    """Return the format in which a model with this chat template writes calls; None if it is unknown."""
    if not takes_tools(template) or "<function=" in template:
        return None
    if "[TOOL_CALLS]" in template:
        return ToolFormat.MISTRAL
    if "<tool_call>" in template:
        return ToolFormat.HERMES
    if '"parameters": ' in template and "ipython" in template:
        return ToolFormat.LLAMA3_JSON
    return None


class Text(NamedTuple):
    """An event: text that belongs to no tool call."""

    text: str


class CallStart(NamedTuple):
    """An event: the tool call with this `number`, counted from 0, begins."""

    number: int
    name: str


class Arguments(NamedTuple):
    """An event: a further part of a call's arguments.

    Together the parts are JSON if the model has written JSON.
    """

    number: int
    piece: str


CallEvent = Text | CallStart | Arguments

_SEPARATORS = "[],;"


class _In(Enum):
    """The part of the text that the parser has reached: the parser's state."""

    TEXT = auto()
    BETWEEN = auto()  # behind the mark of calls, no call has begun
    CALL = auto()


class ToolCallParser:
    """An incremental parser of one answer. Calls of functions that are not in `names` count as text.

    White space around calls is dropped, and so are calls beyond `max_calls`.
    """

    def __init__(self, tool_format: ToolFormat, names: Collection[str], max_calls: int | None = None) -> None:
        self._format, self._names, self._max_calls = tool_format, names, max_calls
        self._in = _In.TEXT if tool_format.begin else _In.BETWEEN
        self._rest = ""
        """Text that has not been parsed."""
        self._raw = ""
        """The text of a possible call, which is returned as text if it turns out not to be a call."""
        self._space = ""
        """White space that is dropped if a call follows, and returned if text follows."""
        self._object = CallObject(names)
        self._is_given = False
        """Whether the event of the current call's start was returned."""
        self.num_calls = 0
        self.is_over = False
        """Whether as many calls as `max_calls` allows are complete."""
        self._events: list[CallEvent] = []

    def push(self, text: str) -> list[CallEvent]:
        """Parse more of the model's text, and return the events that are certain now."""
        self._rest += text
        while self._rest and self._step():
            pass
        return self._take()

    def finish(self, is_cut: bool = False) -> list[CallEvent]:
        """End the answer, and return the events of the text that was held back.

        `is_cut` says that the answer has reached its longest length. Then the possible beginning of a call is
        dropped, not returned as text.
        """
        may_be_call = self._in is not _In.TEXT or len(self._rest) > 1  # a single character is no mark yet
        # Otherwise the rest is a part of the mark behind calls, and is dropped.
        if (self._raw or self._in is _In.TEXT) and not (is_cut and may_be_call):
            self._say(self._raw + self._rest)
        self._raw = self._rest = ""
        if self._space and not self.num_calls:
            self._events.append(Text(self._space))
        self._space = ""
        return self._take()

    @property
    def is_within_call(self) -> bool:
        """Whether the arguments of the latest call are incomplete."""
        return self._in is _In.CALL and self._is_given

    def _take(self) -> list[CallEvent]:
        events, self._events = self._events, []
        return events

    def _step(self) -> bool:
        """Make one step of parsing. Returns whether another step may be possible."""
        match self._in:
            case _In.TEXT:
                return self._step_text()
            case _In.BETWEEN:
                return self._step_between()
            case _In.CALL:
                return self._step_call()

    def _step_text(self) -> bool:
        mark = self._format.begin
        if not mark:
            self._say(self._rest)
            self._rest = ""
            return False
        found = self._rest.find(mark)
        if found < 0:
            num_held = _num_common(self._rest, mark)
            self._say(self._rest[: len(self._rest) - num_held])
            self._rest = self._rest[len(self._rest) - num_held :]
            return False
        self._say(self._rest[:found])
        self._rest, self._raw, self._in = self._rest[found + len(mark) :], mark, _In.BETWEEN
        return True

    def _step_between(self) -> bool:
        mark = self._format.end
        if mark.startswith(self._rest[: len(mark)]) and mark:
            if len(self._rest) < len(mark):
                return False
            if self._raw:  # marks around nothing
                self._say(self._raw + mark)
            self._raw, self._rest, self._in = "", self._rest[len(mark) :], _In.TEXT
            return True
        char = self._rest[0]
        if char == "{":
            self._object, self._is_given, self._in = CallObject(self._names), False, _In.CALL
        elif char.isspace() or (char in _SEPARATORS and (self._format.begin or self.num_calls)):
            self._raw += char if self._raw or not self.num_calls else ""
            self._rest = self._rest[1:]
        else:
            self._give_up()
        return True

    def _step_call(self) -> bool:
        start = 0
        while start < len(self._rest):
            try:
                end = self._object.push_plain(self._rest, start)
                if end == start:
                    self._object.push(self._rest[start])
                    end += 1
            except NotACallError:
                self._raw += self._rest[start]
                self._rest = self._rest[start + 1 :]
                self._give_up()
                return True
            self._raw += "" if self._is_given else self._rest[start:end]
            start = end
            if self._object.is_call and not self._is_given:
                self._begin_call()
            if self._object.has_ended:
                self._rest = self._rest[start:]
                self._give_arguments()
                self._is_given, self._in = False, _In.BETWEEN
                self.is_over = self.num_calls == self._max_calls
                return True
        self._rest = ""
        self._give_arguments()
        return False

    def _begin_call(self) -> None:
        assert self._object.name is not None
        self._is_given, self._raw, self._space = True, "", ""
        self.num_calls += 1
        if self._is_wanted:
            self._events.append(CallStart(self.num_calls - 1, self._object.name))

    def _give_arguments(self) -> None:
        if self._is_given and (piece := self._object.take()) and self._is_wanted:
            self._events.append(Arguments(self.num_calls - 1, piece))

    @property
    def _is_wanted(self) -> bool:
        return self._max_calls is None or self.num_calls <= self._max_calls

    def _give_up(self) -> None:
        """Append a text event for text that looked like a tool call and is none."""
        self._say(self._raw)
        self._raw, self._in = "", _In.TEXT

    def _say(self, text: str) -> None:
        """Append a text event.

        White space at its end waits until it is known whether text or a call follows.
        """
        text = self._space + text
        said = text.rstrip()
        self._space = text[len(said) :]
        if said:
            self._events.append(Text(said))


def _num_common(text: str, mark: str) -> int:
    """Return the length of the longest suffix of `text` that is a prefix of `mark`, but not all of `mark`."""
    return next(num for num in range(min(len(text), len(mark) - 1), -1, -1) if text.endswith(mark[:num]))
