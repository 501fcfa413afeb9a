"""The messages of migrations: of a running request to another decode instance, and of modules to a helper.

    Conductor                 source                      destination
    PreCopy           ->      stores full blocks, now or when there is one more
                      <-      PreCopied(output)
    Prepare(output)   ->                                  fetches and loads them, holds a slot
                                                    <-    Prepared
    ... rounds, a limited number, until the destination lacks few tokens ...
    HandOver          ->      the request leaves its batch
                      <-      HandedOver(output)
    TakeOver(output)  ->                                  decodes the request

All messages pass through the Conductor, so the request always has one owner: the source until the Conductor
has `HandedOver`, the destination from then on. Until `HandOver` is ordered, a failure of the destination ends
only the migration. If the destination fails later, the request runs again behind what its front has.

Modules (`ModuleKind`) move to a helper, and back, by order of operators or of the Conductor itself
(BanaServe, section 4.1):

    MoveModules       operator, through a front -> Conductor  (`mooncake.messages.operators`)
    PlaceModules      Conductor -> owner of them, which agrees with the helper (`workers.modules`)
    ModulesPlace      owner -> Conductor, in each heartbeat

Owns: this vocabulary. Does not know: sockets, why anything moves.
"""

import re
from enum import StrEnum
from typing import Annotated

import msgspec

from mooncake.messages.pools import PoolShard
from mooncake.messages.quantities import Count, PositiveCount, Seconds, TokenId
from mooncake.messages.requests import Ref, Request

# -- Conductor -> worker ----------------------------------------------------------------------------


class PreCopy(msgspec.Struct, tag=True, frozen=True):
    """Order to the source of a migration: store the full blocks of a running request in its own pool.

    Decoding goes on meanwhile. Answered by `PreCopied`; a request that ends first is
    answered by `Finished` alone.
    """

    ref: Ref
    num_tokens: Count = 0
    """Tokens whose KVCache must exist before the source answers.

    The source does not wait for a request that is not in the batch.
    """


class Prepare(msgspec.Struct, tag=True, frozen=True):
    """Order to the destination of a migration: reserve slot and pages for a request, and get its KVCache.

    The request runs at the source. The destination fetches the full blocks of `request`, output so far
    included, from the source's pool (`shards`), as far as its own pool lacks them, and loads them to its
    device. The request gets a slot of the batch and pages, and is not decoded yet. The order is repeated with
    a longer output in each round of copies. Answered by `Prepared`, or by `WorkFailed` if there is no room or
    the blocks do not arrive within `timeout_s` seconds.
    """

    ref: Ref
    """The name of the attempt that the request will have at the destination."""
    request: Request
    shards: tuple[PoolShard, ...]
    timeout_s: float
    tbt_slo_s: float | None = None


class HandOver(msgspec.Struct, tag=True, frozen=True):
    """Order to the source of a migration: stop decoding a request between two iterations.

    Answered by `HandedOver`; a request that ends first is answered by `Finished` alone.
    """

    ref: Ref


class TakeOver(msgspec.Struct, tag=True, frozen=True):
    """Order to the destination of a migration: decode a prepared request from now on.

    `request` has the whole output so far. The destination recomputes the tokens behind the blocks that it has
    loaded, and continues the output. Tokens and `Finished` follow, as for any request.
    """

    ref: Ref
    request: Request


# -- worker -> Conductor ----------------------------------------------------------------------------


class PreCopied(msgspec.Struct, tag=True, frozen=True):
    """Answer to `PreCopy`: the source's pool has the full blocks of prompt and `output`.

    Blocks for which the pool had no room are missing. `output` are all tokens that were drawn for the
    request, in earlier attempts too. The newest token has no KVCache yet.
    """

    ref: Ref
    output: list[TokenId]


class Prepared(msgspec.Struct, tag=True, frozen=True):
    """Answer to `Prepare`: the request has a slot.

    The KVCache of its first `num_tokens` tokens is loaded.
    """

    ref: Ref
    num_tokens: Count


class HandedOver(msgspec.Struct, tag=True, frozen=True):
    """Answer to `HandOver`: the request has left the source's batch, and no further token is drawn there.

    `output` are all tokens that the request has drawn; the source has sent them to the front.
    """

    ref: Ref
    output: list[TokenId]


FromMigration = PreCopied | Prepared | HandedOver
"""The answers of source and destination."""
MigrationOrder = PreCopy | Prepare | HandOver | TakeOver
"""The orders to source and destination."""


# -- modules ----------------------------------------------------------------------------------------


LAYERS_PATTERN = "^([0-9]{1,5}):([0-9]{1,5})$"
"""The pattern of layers in text: `START:STOP`."""


LEAST_SHARE, MOST_SHARE = 0.01, 0.99
"""The bounds of a share of sequences that can be at a helper."""
Share = Annotated[float, msgspec.Meta(ge=0, le=MOST_SHARE)]


class LayerRange(msgspec.Struct, frozen=True):
    """A non-empty range of layers, `[start, stop)`."""

    start: Count
    stop: PositiveCount

    def __post_init__(self) -> None:
        if self.start >= self.stop:
            raise ValueError(f"expected at least one layer, got {self}")

    @classmethod
    def parse(cls, text: str) -> "LayerRange":
        """Return the layers that `START:STOP` names. Raises ValueError."""
        numbers = re.fullmatch(LAYERS_PATTERN, text)
        if numbers is None:
            raise ValueError(f"expected layers as START:STOP, such as 10:20, got {text!r}")
        return cls(int(numbers[1]), int(numbers[2]))

    @property
    def count(self) -> int:
        """The number of layers."""
        return self.stop - self.start

    def __str__(self) -> str:
        return f"{self.start}:{self.stop}"


class ModuleKind(StrEnum):
    """The kinds of modules that a helper can have, as text for people."""

    HEADS = "KV heads"
    LAYERS = "layers"
    PAGES = "pages of sequences"
    """The first pages of long sequences. Commands and `/admin` call this kind `sequences`."""


class ModulesPart(msgspec.Struct, frozen=True):
    """A part of a model or its KVCache that a helper can have.

    The part is `layers`, the last `num_heads` KV heads of all layers, or the first `share` of the pages of
    each sequence. At most one of the three is given; a part without any is empty.
    """

    num_heads: Count = 0
    layers: LayerRange | None = None
    share: Share = 0.0

    def __post_init__(self) -> None:
        if (self.num_heads > 0) + (self.layers is not None) + (self.share > 0) > 1:
            raise ValueError("expected KV heads, layers or a share of sequences, got several of them")
        if 0 < self.share < LEAST_SHARE:
            raise ValueError(f"expected a share of at least {LEAST_SHARE}, got {self.share}")

    def __bool__(self) -> bool:
        return self != _NOTHING

    @property
    def what(self) -> str:
        """The part as text."""
        match self.kind:
            case ModuleKind.PAGES:
                return f"the first {100 * self.share:g}% of sequences"
            case ModuleKind.LAYERS:
                return f"layers {self.layers}"
            case ModuleKind.HEADS:
                return f"{self.num_heads} of the KV heads"

    @property
    def kind(self) -> ModuleKind:
        """The kind of the part's modules. The part must not be empty."""
        if self.share:
            return ModuleKind.PAGES
        return ModuleKind.HEADS if self.layers is None else ModuleKind.LAYERS


_NOTHING = ModulesPart()


class ModulesSupport(msgspec.Struct, frozen=True):
    """The ability of an instance to have modules at a helper, and to be a helper."""

    socket: str = ""
    """The Unix socket at which the instance listens for owners of modules on its host; empty for none."""
    why_not: str = "it has no support for that"
    """The reason why modules can neither leave nor come; empty if they can."""
    endpoint: str = ""
    """The TCP endpoint at which the instance listens for owners on other hosts; empty for none."""


class ModulesPlace(msgspec.Struct, frozen=True):
    """The place of an instance's modules, with the outcome of the latest order."""

    epoch: int = 0
    number: Count = 0
    """The number of the latest order; it was given by the Conductor of this `epoch`."""
    helper: str = ""
    """The instance that has `part`, or is getting modules; empty for none."""
    part: ModulesPart = ModulesPart()
    is_moving: bool = False
    """Whether the order is being carried out, or modules return because the helper is lost or slow."""
    error: str = ""
    """The reason for modules that are not where the latest order wants them; else empty.

    The order was not carried out, or modules have returned without an order.
    """
    num_device_pages: Count | None = None
    """The present number of the instance's device pages; None: the registered number."""

    @property
    def are_elsewhere(self) -> bool:
        """Whether modules are at a helper, or moving there."""
        return self.helper != "" or self.is_moving


class PlaceModules(msgspec.Struct, tag=True, frozen=True):
    """Order to an instance: move `part` to a helper.

    An empty `part` is the order to move all modules back. `ModulesPlace` with this number reports the result.
    """

    epoch: int
    number: Count
    helper: str = ""
    address: str = ""
    """The address at which the helper listens: a Unix socket's path, on another host a TCP endpoint."""
    part: ModulesPart = ModulesPart()


MOVE_OUTCOMES = ("moved", "back", "slow", "lost", "refused")
"""The outcomes of moves.

`moved`: modules are at the helper. `back`: they are back by order. `slow`, `lost`: they are back because the
helper was slow, or was lost. `refused`: no module has moved.
"""
PAUSE_BOUNDS_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
"""The upper bounds in seconds of the buckets of pauses; a last bucket has longer ones."""


class MovesStats(msgspec.Struct, frozen=True):
    """Totals of an instance's moves of modules in this session."""

    num_moves: dict[str, Count] = {}
    """The number of moves by outcome (`MOVE_OUTCOMES`)."""
    copied_bytes: Count = 0
    """The bytes of KVCache copied by moves, in both directions."""
    num_pauses: list[Count] = []
    """The number of pauses between two iterations, by duration.

    There is a bucket for each of `PAUSE_BOUNDS_S`, and one for longer pauses.
    """
    pause_s: Seconds = 0.0
