"""Calls and text of every family, however the text is divided."""

import itertools
import json
import random

import pytest

from conductor.front.openai.tool_calls import (
    Arguments,
    CallEvent,
    CallStart,
    Text,
    ToolCallParser,
    ToolFormat,
)

HERMES, LLAMA, MISTRAL = ToolFormat.HERMES, ToolFormat.LLAMA3_JSON, ToolFormat.MISTRAL
NAMES = ("f", "get_weather")
A = '{"city": "a}\\"{ é", "n": [1, {"x": null}]}'


def parsed(tool_format: ToolFormat, pieces: list[str], max_calls: int | None = None) -> list[CallEvent]:
    """Neighbouring texts and arguments joined."""
    parser = ToolCallParser(tool_format, NAMES, max_calls)
    events = [event for piece in pieces for event in parser.push(piece)] + parser.finish()
    joined: list[CallEvent] = []
    for event in events:
        match joined[-1:], event:
            case [Text(before)], Text(text):
                joined[-1] = Text(before + text)
            case [Arguments(index, before)], Arguments(_, piece):
                joined[-1] = Arguments(index, before + piece)
            case _:
                joined.append(event)
    return joined


def call(index: int, name: str, arguments: str) -> list[CallEvent]:
    return [CallStart(index, name), Arguments(index, arguments)]


HERMES_CALL = f'<tool_call>\n{{"name": "f", "arguments": {A}}}\n</tool_call>'
CASES: list[tuple[ToolFormat, str, list[CallEvent]]] = [
    (HERMES, HERMES_CALL, call(0, "f", A)),
    (HERMES, f" Let me see.\n{HERMES_CALL}\n", [Text(" Let me see."), *call(0, "f", A)]),
    (HERMES, f"{HERMES_CALL}\n{HERMES_CALL}", [*call(0, "f", A), *call(1, "f", A)]),
    (HERMES, f"{HERMES_CALL} so {HERMES_CALL}", [*call(0, "f", A), Text(" so"), *call(1, "f", A)]),
    (HERMES, '<tool_call>[{"name":"f","arguments":{}},{"name":"f"}]</tool_call>', [
        *call(0, "f", "{}"), *call(1, "f", "{}")]),
    (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', call(0, "f", '{"a": 1}')),
    (HERMES, '<tool_call>{"id": 7, "name": "f", "arguments": "{\\"a\\": 1}"}', call(0, "f", '{"a": 1}')),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}, "parameters": {}}', call(0, "f", '{"a": 1}')),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "un', call(0, "f", '{"a": "un')),
    (HERMES, '<tool_call>{"name": "f", "arguments": {}}</tool', call(0, "f", "{}")),
    (HERMES, '<tool_call>{"name": "f", "arguments": {}} more', [*call(0, "f", "{}"), Text("more")]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {}, mist', [*call(0, "f", "{}"), Text("ist")]),
    (HERMES, '<tool_call>{"name": "other", "arguments": {}}</tool_call> x', [
        Text('<tool_call>{"name": "other", "arguments": {}}</tool_call> x')]),
    (HERMES, "<tool_call>what</tool_call>", [Text("<tool_call>what</tool_call>")]),
    (HERMES, "<tool_call></tool_call>!", [Text("<tool_call></tool_call>!")]),
    (HERMES, '<tool_call>{"na', [Text('<tool_call>{"na')]),
    (HERMES, " 1 < 2 <tool\n", [Text(" 1 < 2 <tool\n")]),
    (HERMES, "", []),
    (LLAMA, f'{{"name": "get_weather", "parameters": {A}}}', call(0, "get_weather", A)),
    (LLAMA, '\n{"type": "function", "name": "f", "parameters": {}}; {"name": "f", "parameters": {"b": 2}}', [
        *call(0, "f", "{}"), *call(1, "f", '{"b": 2}')]),
    (LLAMA, ' {"name": "Bob", "age": 3}\n', [Text(' {"name": "Bob", "age": 3}\n')]),
    (LLAMA, '{"name": "f", "age": 3}', [Text('{"name": "f", "age": 3}')]),
    (LLAMA, f'Hello {{"name": "f", "parameters": {A}}}', [Text(f'Hello {{"name": "f", "parameters": {A}}}')]),
    (LLAMA, "; x", [Text("; x")]),
    (MISTRAL, f'[TOOL_CALLS] [{{"name": "f", "arguments": {A}}}, {{"name":"f","arguments":{{}}}}]', [
        *call(0, "f", A), *call(1, "f", "{}")]),
    (MISTRAL, 'Sure.[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "abc"}]', [
        Text("Sure."), *call(0, "f", "{}")]),
    (MISTRAL, "[TOOL_CALLS] none", [Text("[TOOL_CALLS] none")]),
    (MISTRAL, "[1, 2] [TOOL", [Text("[1, 2] [TOOL")]),
]  # fmt: skip


@pytest.mark.parametrize(("tool_format", "text", "expected"), CASES, ids=[case[1][:50] for case in CASES])
def test_every_division_of_a_text_gives_the_same_events(
    tool_format: ToolFormat, text: str, expected: list[CallEvent]
) -> None:
    assert parsed(tool_format, [text]) == expected
    assert parsed(tool_format, list(text)) == expected
    for at in range(len(text)):
        assert parsed(tool_format, [text[:at], text[at:]]) == expected
    random_ = random.Random(0)
    for _ in range(50):
        cuts = [0, *sorted(random_.choices(range(len(text) + 1), k=6)), len(text)]
        assert parsed(tool_format, [text[a:b] for a, b in itertools.pairwise(cuts)]) == expected


def test_arguments_leave_as_they_come() -> None:
    parser = ToolCallParser(HERMES, NAMES)
    assert parser.push('<tool_call>{"name": "f", "arguments": ') == []
    assert parser.push('{"a"') == [CallStart(0, "f"), Arguments(0, '{"a"')]
    assert parser.push(": [1,") == [Arguments(0, ": [1,")]
    assert parser.push(" 2]}}") == [Arguments(0, " 2]}")]
    assert parser.push("\n</tool_call>") == parser.finish() == []


def test_text_is_not_held_back_longer_than_it_may_be_a_mark() -> None:
    parser = ToolCallParser(HERMES, NAMES)
    assert parser.push("a <") == [Text("a")]
    assert parser.push("tool") == []
    assert parser.push("s") == [Text(" <tools")]


def test_calls_beyond_the_allowed_number_are_left_out() -> None:
    assert parsed(HERMES, [HERMES_CALL * 3], max_calls=1) == call(0, "f", A)


@pytest.mark.parametrize("tool_format", list(ToolFormat))
def test_any_text_is_text_calls_or_both(tool_format: ToolFormat) -> None:
    words = [
        *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", '{"name": "f"', ', "arguments": ', '"parameters": '),
        *("{", "}", "[", "]", '"', "\\", ",", ";", " ", "\n", ": ", "1", "x", '{"a": "}"}', '"f"', '"name"'),
    ]
    random_ = random.Random(1)
    for _ in range(400):
        pieces = random_.choices(words, k=random_.randrange(1, 14))
        events = parsed(tool_format, pieces)
        assert events == parsed(tool_format, ["".join(pieces)])
        assert not any(isinstance(event, CallStart) and event.name not in NAMES for event in events)
        if not any(isinstance(event, CallStart) for event in events):
            assert events == [Text("".join(pieces))]


def test_string_arguments_keep_their_escapes() -> None:
    arguments = json.dumps({"text": 'line\n"quoted" \\ \u00e9'})
    [_, given] = parsed(MISTRAL, [f'[TOOL_CALLS] [{{"name": "f", "arguments": {arguments}}}]'])
    assert isinstance(given, Arguments)
    assert given.piece == arguments
