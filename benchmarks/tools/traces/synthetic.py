"""Synthetic loads: conversations of several turns, with a prefix that all prompts share.

A request begins a conversation, or continues one. In a continued conversation the prompt begins with the
whole blocks of an earlier prompt, or with only some of them where the client changed an earlier turn.
New tokens follow. Earlier answers are among the new tokens, because the load cannot know the ids of their
blocks.

Owns: the model of a load and its parameters. Does not know: where the parameters come from (`fitting`).
"""

import bisect
import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import msgspec

from benchmarks.tools.traces.arrivals import arrivals
from benchmarks.tools.traces.request import BLOCK_TOKENS, TraceError, TraceRequest, num_blocks_of

MAX_OPEN = 20_000
"""The number of conversations that are kept when the oldest are forgotten.

They are forgotten whenever there are more than twice as many.
"""

Values = tuple[float, ...]
"""A distribution, given by the means of its equally likely parts, ascending. One value is a constant."""


class SyntheticLoad(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The parameters of a load, in the form of the JSON that `mooncake-bench fit` writes."""

    rate_per_s: float
    first_input_tokens: Values
    """Tokens of prompts that begin a conversation, including the shared prefix."""
    output_tokens: Values
    burstiness: float = 1.0
    """The variance of the number of arrivals, divided by its mean; 1 is a Poisson process."""
    shared_prefix_tokens: int = 0
    """Tokens with which all prompts begin, like a system prompt; rounded down to whole blocks of 512."""
    follow_up_share: float = 0.0
    """The share of all requests that continue a conversation."""
    turn_gap_s: Values = (60.0,)
    """Seconds from one arrival of a conversation to the next."""
    kept_share: Values = (1.0,)
    """The share of the whole blocks of the continued prompt that is kept."""
    added_input_tokens: Values = (200.0,)
    """Tokens behind the kept blocks: the earlier answer, and the client's next message."""
    max_input_tokens: int = 131_072
    """The number of tokens at which a conversation ends."""

    def __post_init__(self) -> None:
        if self.rate_per_s <= 0 or self.burstiness < 0 or not 0 <= self.follow_up_share <= 1:
            raise ValueError("rate_per_s must be above 0, burstiness not below, follow_up_share from 0 to 1")
        if self.shared_prefix_tokens < 0 or self.max_input_tokens < 1:
            raise ValueError("shared_prefix_tokens must not be below 0, max_input_tokens be above")
        for name in ("first_input_tokens", "output_tokens", "turn_gap_s", "kept_share", "added_input_tokens"):
            values: Values = getattr(self, name)
            if not values or values[0] < 0 or list(values) != sorted(values):
                raise ValueError(f"{name} must be a list of ascending numbers, none of them negative")

    @classmethod
    def load(cls, path: Path) -> "SyntheticLoad":
        """Read a load from JSON. Raises TraceError."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except (OSError, msgspec.MsgspecError) as error:
            raise TraceError(f"{path}: {error}") from None

    def save(self, path: Path) -> None:
        """Write the load as JSON."""
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")


class Sampler:
    """A sampler that draws from `Values`, also numbers between them.

    The mean of its draws is that of the values.
    """

    def __init__(self, values: Values) -> None:
        gaps = [after - before for before, after in itertools.pairwise(values)]
        half_widths = (min(pair) / 2 for pair in itertools.pairwise([0.0, *gaps, 0.0]))
        self._parts = list(zip(values, half_widths, strict=True))

    def draw(self, rng: random.Random) -> float:
        mean, half_width = self._parts[int(rng.random() * len(self._parts))]
        return mean + half_width * (2 * rng.random() - 1)


def synthesize(load: SyntheticLoad, seed: int) -> Iterator[TraceRequest]:
    """Yield the requests of a load, without end."""
    rng = random.Random(seed)
    output_tokens, turn_gap_s = Sampler(load.output_tokens), Sampler(load.turn_gap_s)
    prompts = _Prompts(load, rng)
    conversations = _Conversations()
    for arrival_s in arrivals(load.rate_per_s, load.burstiness, rng):
        followed = None
        if rng.random() < load.follow_up_share:
            followed = conversations.take(arrival_s - turn_gap_s.draw(rng))
        prompt = prompts.first() if followed is None else prompts.following(followed)
        conversations.put(arrival_s, prompt)
        num_output_tokens = max(1, round(output_tokens.draw(rng)))
        yield TraceRequest(arrival_s, prompt.num_tokens, num_output_tokens, prompt.hash_ids)


class _Prompt(msgspec.Struct, frozen=True):
    num_tokens: int
    hash_ids: tuple[int, ...]


class _Prompts:
    """A maker of prompts, which gives new ids to new blocks."""

    def __init__(self, load: SyntheticLoad, rng: random.Random) -> None:
        self._load, self._rng = load, rng
        self._first_tokens = Sampler(load.first_input_tokens)
        self._kept_share, self._added_tokens = Sampler(load.kept_share), Sampler(load.added_input_tokens)
        self._shared = tuple(range(load.shared_prefix_tokens // BLOCK_TOKENS))
        self._next_id = itertools.count(len(self._shared))

    def first(self) -> _Prompt:
        return self._prompt(min(self._load.max_input_tokens, round(self._first_tokens.draw(self._rng))), ())

    def following(self, followed: _Prompt) -> _Prompt:
        num_whole = followed.num_tokens // BLOCK_TOKENS
        num_kept = max(round(num_whole * self._kept_share.draw(self._rng)), 0)
        kept = followed.hash_ids[: min(num_kept, num_whole)]
        num_tokens = BLOCK_TOKENS * len(kept) + max(1, round(self._added_tokens.draw(self._rng)))
        return self._prompt(num_tokens, kept) if num_tokens <= self._load.max_input_tokens else self.first()

    def _prompt(self, num_tokens: int, kept: tuple[int, ...]) -> _Prompt:
        num_tokens = max(1, num_tokens)
        if len(kept) < len(self._shared):
            kept = self._shared[: num_tokens // BLOCK_TOKENS]
        num_new = num_blocks_of(num_tokens) - len(kept)
        return _Prompt(num_tokens, kept + tuple(itertools.islice(self._next_id, num_new)))


class _Conversations:
    """The conversations that may be continued, by their latest arrival."""

    def __init__(self) -> None:
        self._arrivals_s: list[float] = []
        self._prompts: list[_Prompt] = []

    def put(self, arrival_s: float, prompt: _Prompt) -> None:
        self._arrivals_s.append(arrival_s)
        self._prompts.append(prompt)
        if len(self._prompts) > 2 * MAX_OPEN:
            del self._arrivals_s[:MAX_OPEN], self._prompts[:MAX_OPEN]

    def take(self, arrived_s: float) -> _Prompt | None:
        """Remove the conversation whose latest arrival is nearest to `arrived_s`, and return its prompt.

        Returns None if there is no conversation.
        """
        if not self._prompts:
            return None
        index = bisect.bisect(self._arrivals_s, arrived_s)
        if index == len(self._prompts) or (
            index > 0 and arrived_s - self._arrivals_s[index - 1] < self._arrivals_s[index] - arrived_s
        ):
            index -= 1
        del self._arrivals_s[index]
        return self._prompts.pop(index)
