"""A profile: costs of prefill and decode of one model on one device, measured by `mooncake-serve profile`.

Owns: the file's format, the check that a profile is of this model and device. Does not know: how costs are
measured, or predicted.
"""

from pathlib import Path

import msgspec

from mooncake.errors import ConfigError
from mooncake.messages.costs import Costs, ModelShape, Point

VERSION = 2
_ADVICE = "measure it anew with `mooncake-serve profile FILE`"


class PrefillCosts(msgspec.Struct, frozen=True):
    """The costs of a prefill in seconds (`mooncake.messages.costs`)."""

    constant_s: float
    token_s: float
    pair_s: float


class DecodeCosts(msgspec.Struct, frozen=True):
    """The costs of an iteration in seconds (`mooncake.messages.costs`)."""

    constant_s: float
    request_s: float
    token_s: float


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """The fitted costs of one model on one device, with the measured points.

    `engine` and `device` are the values with which workers register.
    """

    version: int = VERSION
    model: str
    shape: ModelShape
    dtype: str
    engine: str
    device: str
    """The name of the GPU or processor."""
    prefill: PrefillCosts
    decode: DecodeCosts
    prefill_points: list[Point] = []
    """Measured prefills: new tokens, cached tokens, seconds."""
    decode_points: list[Point] = []
    """Measured decode iterations: requests, KV tokens of all requests, seconds."""

    @property
    def costs(self) -> tuple[Costs, Costs]:
        """The costs of prefill, and of decode."""
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


class _AnyVersion(msgspec.Struct, frozen=True):
    version: int


def load_profile(path: Path) -> Profile:
    """Return the profile in `path`.

    Raises ConfigError if there is no profile of this version, or if its costs are negative or all 0.
    """
    try:
        content = path.read_bytes()
        version = msgspec.json.decode(content, type=_AnyVersion).version
        if version != VERSION:
            raise ConfigError(f"conductor.profile: {path} has version {version}, not {VERSION}; {_ADVICE}")
        profile = msgspec.json.decode(content, type=Profile)
    except OSError as error:
        raise ConfigError(f"conductor.profile: cannot read {path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"conductor.profile: {path} is no profile: {error}; {_ADVICE}") from None
    if min(*profile.costs[0], *profile.costs[1]) < 0 or not all(sum(costs) > 0 for costs in profile.costs):
        raise ConfigError(f"conductor.profile: {path} has costs that are negative or all 0; {_ADVICE}")
    return profile


def load_profile_of(path: Path, model: str, shape: ModelShape, dtype: str) -> Profile:
    """Return the profile in `path`, which must be of this model, shape and dtype. Raises ConfigError."""
    profile = load_profile(path)
    if (profile.model, profile.dtype, profile.shape) == (model, dtype, shape):
        return profile
    if (profile.model, profile.dtype) != (model, dtype):
        theirs, ours = f"{profile.model} in {profile.dtype}", f"{model} in {dtype}"
    else:
        measured, served = msgspec.structs.asdict(profile.shape), msgspec.structs.asdict(shape)
        differing = [name for name in served if measured[name] != served[name]]
        theirs = f"a {model} of " + ", ".join(f"{name} {measured[name]}" for name in differing)
        ours = "one of " + ", ".join(f"{name} {served[name]}" for name in differing)
    raise ConfigError(f"conductor.profile: {path} was measured with {theirs}, this is {ours}; {_ADVICE}")


def why_other_device(profiled: str, instance: str, device: str) -> str | None:
    """Return why an instance on `device` cannot begin with costs measured on `profiled`; None if it can."""
    if device == profiled:
        return None
    return (
        f"conductor.profile was measured on {profiled}, {instance} computes on"
        f" {device or 'an unknown device'}; {_ADVICE} on such a device, or leave the profile out"
    )
