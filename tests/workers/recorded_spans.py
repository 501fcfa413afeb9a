"""A recorder of the spans of instances. Every request of a lab is traced."""

from mooncake.messages.requests import SpanContext
from mooncake.tracing.spans import EndedSpan

SPAN = SpanContext("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")


class RecordedSpans:
    """A replacement of a `Tracer` that keeps the spans."""

    def __init__(self) -> None:
        self.all: list[EndedSpan] = []

    def record(self, work: EndedSpan, parent: SpanContext | None) -> None:
        assert parent == SPAN
        self.all.append(work)

    def of(self, instance: str, request_id: str) -> EndedSpan:
        """Return the only span of a request at an instance."""
        wanted = {"mooncake.instance": instance, "mooncake.request_id": request_id}
        [span] = [span for span in self.all if span.attributes.items() >= wanted.items()]
        return span


def steps(span: EndedSpan) -> list[str]:
    """Return the names of a span's parts, in order of time. Each part must lie within the span."""
    assert all(span.began_s <= part.began_s <= part.ended_s <= span.ended_s for part in span.parts), span
    parts = sorted(span.parts, key=lambda part: (part.began_s, part.ended_s))
    return [part.name.removeprefix(f"{span.name}.") for part in parts]


def total(span: EndedSpan, step: str, attribute: str) -> int:
    """Return the sum of an attribute over all parts with the name `step`."""
    numbers = [
        part.attributes[f"mooncake.{attribute}"] for part in span.parts if part.name.endswith(f".{step}")
    ]
    assert all(isinstance(number, int) for number in numbers)
    return sum(numbers)  # type: ignore[arg-type]


def errors(span: EndedSpan) -> dict[str, str]:
    """Return the errors of the parts that have failed, by name."""
    return {part.name.removeprefix(f"{span.name}."): part.error for part in span.parts if part.error}
