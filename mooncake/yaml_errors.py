"""Messages of one line about texts that are no YAML.

Owns: these messages. Does not know: files, what the text is for.
"""

import yaml


def what_is_wrong(error: yaml.YAMLError | UnicodeDecodeError) -> str:
    """Return the position and the problem of a YAML error, without the line that PyYAML quotes."""
    mark = getattr(error, "problem_mark", None)
    if not isinstance(error, yaml.MarkedYAMLError) or mark is None:
        return " ".join(str(error).split())
    begun = error.context_mark
    context = error.context or ""
    if context and begun is not None and begun.line != mark.line:
        context += f" that begins in line {begun.line + 1}"
    reason = f"{error.problem} ({context})" if context else f"{error.problem}"
    return " ".join(f"line {mark.line + 1}, column {mark.column + 1}: {reason}".split())
