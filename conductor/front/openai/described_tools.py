"""Tools for a chat template that has no place for them: described in the system message, as Hermes models
were taught (`<tools>`, `<tool_call>`, `<tool_response>`).

Owns: these words. Does not know: which model it is.
"""

import json
from collections.abc import Sequence
from typing import Any

_INTRODUCTION = """\
You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def describe_tools(
    messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """`messages` of systems, users and assistants alone, which say what those with tools said."""
    described = [_plain(message) for message in messages]
    if tools:
        text = _INTRODUCTION.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
        if described and described[0]["role"] == "system":
            described[0]["content"] += f"\n\n{text}"
        else:
            described.insert(0, {"role": "system", "content": text})
    return described


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    plain = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id")}
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = [
        f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>"
        for call in message.get("tool_calls", ())
    ]
    plain["content"] = "\n".join([*([plain["content"]] if plain["content"] else []), *calls])
    return plain
