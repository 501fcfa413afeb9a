"""A profile: the costs of one kind of worker, as `mooncake-serve profile` has measured them.

Owns: the file. Does not know: how anything is measured, or predicted.
"""

from pathlib import Path

import msgspec

from mooncake.errors import ConfigError
from mooncake.messages.costs import Costs, Point

VERSION = 1


class PrefillCosts(msgspec.Struct, frozen=True):
    """The costs of a prefill in seconds (`mooncake.messages.costs`)."""

    constant_s: float
    token_s: float
    pair_s: float


class DecodeCosts(msgspec.Struct, frozen=True):
    """The costs of a decode step in seconds (`mooncake.messages.costs`)."""

    constant_s: float
    request_s: float
    token_s: float


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """The fitted costs of one engine, named as workers do when they register, and the measured points."""

    version: int = VERSION
    model: str
    dtype: str
    engine: str
    prefill: PrefillCosts
    decode: DecodeCosts
    prefill_points: list[Point] = []
    """Measured prefills: new tokens, cached tokens, seconds."""
    decode_points: list[Point] = []
    """Measured decode steps: requests, KV tokens of all, seconds."""

    @property
    def costs(self) -> tuple[Costs, Costs]:
        """The costs of prefill and of decode."""
        return (
            Costs(self.prefill.constant_s, self.prefill.token_s, self.prefill.pair_s),
            Costs(self.decode.constant_s, self.decode.request_s, self.decode.token_s),
        )

    def save(self, path: Path) -> None:
        """Write the profile as JSON. Raises ConfigError if the file cannot be written."""
        try:
            path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")
        except OSError as error:
            raise ConfigError(f"cannot write the profile {path}: {error.strerror}") from None


def load_profile(path: Path) -> Profile:
    """Read the profile in `path`. Raises ConfigError if there is none, or one of another version."""
    advice = "measure it anew with `mooncake-serve profile FILE`"
    try:
        profile = msgspec.json.decode(path.read_bytes(), type=Profile)
    except OSError as error:
        raise ConfigError(f"conductor.profile: cannot read {path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"conductor.profile: {path} is no profile: {error}; {advice}") from None
    if profile.version != VERSION:
        raise ConfigError(f"conductor.profile: {path} has version {profile.version}, not {VERSION}; {advice}")
    if min(*profile.costs[0], *profile.costs[1]) < 0 or not all(sum(costs) > 0 for costs in profile.costs):
        raise ConfigError(f"conductor.profile: {path} has costs that are negative or all 0; {advice}")
    return profile
