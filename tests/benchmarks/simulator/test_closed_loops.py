from dataclasses import dataclass, field

from benchmarks.tools.simulator.cluster.closed_loops import ClosedLoop, ClosedLoops
from benchmarks.tools.simulator.cluster.machines.clock import Clock
from benchmarks.tools.simulator.cluster.requests import SimulatedRequest
from benchmarks.tools.traces.request import TraceRequest


@dataclass
class Server:
    """A server that takes as many seconds for a request as its prompt has tokens."""

    clock: Clock
    times_s: list[tuple[float, float]] = field(default_factory=list)
    """Arrivals and ends, in order of ends."""
    num_open: int = 0
    most_open: int = 0

    def serve(self, loops: list[ClosedLoop]) -> ClosedLoops:
        self.feed = ClosedLoops(self.clock, loops, 32, self.submit)
        self.clock.run()
        return self.feed

    def submit(self, request: SimulatedRequest) -> None:
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        self.clock.after(request.num_input_tokens, self.end, request)

    def end(self, request: SimulatedRequest) -> None:
        self.num_open -= 1
        self.times_s.append((request.arrival_s, self.clock.now_s))
        self.feed.ended()


def test_a_request_begins_when_another_one_ends() -> None:
    server = Server(Clock())
    feed = server.serve([ClosedLoop(2, [TraceRequest(0.0, num, 1) for num in (3, 5, 4, 1)])])
    assert server.times_s == [(0.0, 3.0), (0.0, 5.0), (5.0, 6.0), (3.0, 7.0)]
    assert (server.most_open, feed.num_submitted, feed.is_over) == (2, 4, True)


def test_a_loop_begins_when_the_earlier_one_has_ended() -> None:
    server = Server(Clock())
    server.serve([ClosedLoop(9, [TraceRequest(0.0, num, 1) for num in (3, 5)])] * 2)
    (_, first_s), (_, ended_s), (began_s, _), (also_s, _) = server.times_s
    assert (first_s, ended_s) == (3.0, 5.0)
    assert began_s == also_s > ended_s
