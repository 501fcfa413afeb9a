"""Messages between two messengers.

The *sender* asks, the *receiver* answers (also for a Fetch, whose blocks travel to the sender). A sender may
have several connections (*lanes*) to one receiver: they are one *session*, and a transfer may use all of
them.

    sender                                receiver
    Hello(nonce)                   ->                     the versions that the sender speaks
                                   <-     Challenge(nonce, proof) | Refused
    Introduction(proof, ...)       ->                     both have shown that they know the cluster's key
                                   <-     Welcome | Refused
    Open(transfer, grant)          ->                     normally left out: the first Write or Expose opens
    Write(transfer, heads, ...)    ->                     over TCP the bytes follow the frame
                                   <-     WriteAck        one per Write, in their order
    Close(transfer, reason)        ->                     done, or given up: the sender has stopped writing
                                   <-     TransferEnded   the receiver has refused it or given it up
    Fetch(keys, layers, heads)     ->                     read blocks, if they are there
                                   <-     Found           one per Fetch, in their order, bytes as in Write
    FetchDone(damaged)             ->                     the oldest Found has been read: release it
    Abandon(lane)                  ->                     forget that lane: others repeat what was on it
    Write(..., is_placed)          ->                     over shared memory: the bytes are in their pages
    Fetch(..., is_read)            ->                     over shared memory: blocks were read; no answer
    Expose(transfer, grant)        ->                     over RDMA: open the grant's pages to this lane
                                   <-     Exposed         where the pages are, until transfer or grant ends
    Probe                          ->                     bytes to be discarded, to measure a path
                                   <-     WriteAck

The first `Write`, `Expose` or `Open` makes a transfer known to the receiver: from then on a loss of the
sender fails the grant. `Open` is sent if nothing was written within `NOT_URGENT_S`, when a lane is lost, and
before the `Close` of a transfer that is given up before any write.

The receiver compares the bytes of each write with their checksums, except if the sender has placed them over
shared memory (`is_placed`): the sender has compared those.

Each side has a shard of the same model's blocks: a range of the model's layers, and in each layer a range of
heads. Layers and heads in messages are numbered as in the model. If both sides have the same heads, frames do
not name any, and several layers of a block travel as one range. Otherwise a frame names the *part* of each
layer that it carries: heads that both sides have. Such a part is one byte range only within a single layer.

Owns: the vocabulary. Does not know: what may be said when (`messenger.wire.protocol`), sockets, pages.
"""

from enum import Enum
from typing import Annotated

import msgspec

from messenger.wire.identity import Identity
from messenger.wire.rdma_info import EndpointInfo, Scratch
from mooncake.messages.blocks import KVLayout

_MOST_CHARS = 1000
Text = Annotated[str, msgspec.Meta(max_length=2 * _MOST_CHARS)]
"""A text for messages to people, shortened by `brief`."""


def brief(text: str) -> str:
    """Return a text, cut to half of the length that messages allow.

    A peer can then pass the text on with words of its own.
    """
    return text if len(text) <= _MOST_CHARS else f"{text[: _MOST_CHARS - 3]}..."


class Hello(msgspec.Struct, tag=True, frozen=True):
    """The first frame of the sender: the versions of this protocol that it speaks, and its nonce.

    A `newest_version` of None stands for `oldest_version`. Senders of version 6 send only `protocol_version`,
    which is the name of `oldest_version` on the wire.
    """

    oldest_version: int = msgspec.field(name="protocol_version")
    nonce: bytes
    newest_version: int | None = None


class Challenge(msgspec.Struct, tag=True, frozen=True):
    """The receiver's answer to `Hello`. `proof` covers both nonces: see `mooncake.security.proofs`.

    `version` is the newest version that both sides speak; receivers of version 6 do not send it.
    """

    nonce: bytes
    proof: bytes
    version: int = 6


class Introduction(msgspec.Struct, tag=True, frozen=True):
    """The sender's identity. `segment_bytes` is set when the descriptor of the sender's segment is passed.

    `session` is a random name that the sender has chosen for its session, `lane` the number of this lane in
    the session. Without an `identity` the sender has no blocks and may only probe.
    """

    proof: bytes
    identity: Identity | None
    session: bytes
    lane: int
    segment_bytes: int | None = None
    endpoint: EndpointInfo | None = None
    """The sender's queue pair, for bytes by RDMA; None without RDMA."""
    takes_copy_slot: bool = False
    """Whether the sender can write to mapped pages."""


class CopySlot(msgspec.Struct, frozen=True, array_like=True):
    """An entry of the receiver's copy table, by which the sender writes granted pages itself.

    The shard of the block in page p begins at `pages_offset + p * page_stride`.
    """

    number: int
    token: int
    """A token for one sender, valid until the receiver has given the lane up."""
    copy_table_offset: int
    pages_offset: int
    page_stride: int
    num_pages: int


class PageTableOffsets(msgspec.Struct, frozen=True, array_like=True):
    """The offsets of the receiver's page table, by which the sender finds sealed blocks itself.

    Each is the byte offset of an array with one entry for each page, and a multiple of 8. Pages are as in
    `CopySlot`. See `messenger.shm.catalogue`.
    """

    states_offset: int
    generations_offset: int
    keys_offset: int
    checksums_offset: int
    places_offset: int
    pages_offset: int
    page_stride: int
    num_pages: int


class Welcome(msgspec.Struct, tag=True, frozen=True):
    """The receiver's identity.

    `segment_bytes` is set when the descriptor of the receiver's segment is passed; with a `slot` the
    descriptor is writable.
    """

    identity: Identity
    segment_bytes: int | None = None
    slot: CopySlot | None = None
    page_table: PageTableOffsets | None = None
    endpoint: EndpointInfo | None = None
    scratch: Scratch | None = None
    """The memory on which the sender can try its queue pair; None without RDMA."""


class Refused(msgspec.Struct, tag=True, frozen=True):
    """The refusal to admit this sender."""

    message: str


class Open(msgspec.Struct, tag=True, frozen=True):
    """The announcement of a transfer, in case no write has opened the transfer.

    `transfer_id` is unique in its session. `ref_text` names the request for the receiver's log.
    """

    transfer_id: int
    grant_id: int
    ref_text: Text


class WriteEntry(msgspec.Struct, frozen=True, array_like=True):
    """Layers `[layer_begin, layer_end)` of the model in one remote page, contiguous on both sides.

    `checksums` holds one little-endian xxh3-64 per layer, of the bytes that are sent. `source_offset` is the
    byte offset in the sender's segment, from which the receiver copies when it maps that segment.
    """

    page: int
    generation: int
    layer_begin: int
    layer_end: int
    checksums: bytes
    source_offset: int

    @property
    def num_layers(self) -> int:
        return self.layer_end - self.layer_begin


class Write(msgspec.Struct, tag=True, frozen=True):
    """A write of bytes. Answered by exactly one `WriteAck`, whatever happens to the transfer.

    The write names the grant too, as it may arrive on another lane before the `Open`. `heads`: the model's
    heads `[begin, end)` whose bytes are sent; None if both sides have the same heads, and all are sent.
    `is_placed`: the sender has written the bytes to their pages, and compared them with their checksums.
    Such a write no longer counts as in flight, but the end of the transfer waits for its answer.
    """

    transfer_id: int
    grant_id: int
    entries: list[WriteEntry]
    heads: tuple[int, int] | None = None
    is_placed: bool = False

    def skipped_bytes(self, layout: KVLayout) -> int:
        """Return the byte offset in a page at which the sent part of the model's layer 0 would begin.

        The offset is negative if this layer is not in the shard.
        """
        skipped_heads = 0 if self.heads is None else self.heads[0] - layout.first_head
        return skipped_heads * layout.head_bytes - layout.first_layer * layout.layer_bytes


class Close(msgspec.Struct, tag=True, frozen=True):
    """The end of a transfer.

    `reason`: why the sender gave the transfer up; None if the transfer is complete.
    """

    transfer_id: int
    reason: Text | None


class Fetch(msgspec.Struct, tag=True, frozen=True):
    """A request for layers `[layer_begin, layer_end)` of the named blocks, numbered as in the model.

    The receiver answers with the blocks that it has. `heads`: as in `Write`. Unless `heads` are all of the
    receiver's heads, only one layer can be fetched at a time. `is_read`: the sender has found all blocks and
    read them in place, and awaits no answer.
    """

    keys: list[bytes]
    layer_begin: int
    layer_end: int
    heads: tuple[int, int] | None = None
    is_read: bool = False


class FoundBlock(msgspec.Struct, frozen=True, array_like=True):
    """A block in a `Found`. `index` is the index of the block's key in the `Fetch`.

    `checksums` and `source_offset` are as in `WriteEntry`.
    """

    index: int
    checksums: bytes
    source_offset: int
    address: int = 0
    remote_key: int = 0
    """The remote key by which the sender may read the block over RDMA until `FetchDone`."""


class Found(msgspec.Struct, tag=True, frozen=True):
    """The answer to a fetch: the found blocks, which stay in place until `FetchDone`.

    `failure`: why the fetch was refused; then there are no blocks.
    """

    blocks: list[FoundBlock]
    failure: Text | None = None


class FetchDone(msgspec.Struct, tag=True, frozen=True):
    """The report that the blocks of the oldest `Found` have been read, or are not wanted any more.

    `damaged`: indices, into the keys of the `Fetch`, of blocks that did not match their checksums. The
    receiver must suspect its own copies.
    """

    damaged: list[int] = []


class Expose(msgspec.Struct, tag=True, frozen=True):
    """The request to open the pages of this grant to the queue pair of this lane."""

    transfer_id: int
    grant_id: int


class ExposedPage(msgspec.Struct, frozen=True, array_like=True):
    """An opened page: the receiver's shard of the block in `page` begins at `address`."""

    page: int
    address: int
    remote_key: int


class Exposed(msgspec.Struct, tag=True, frozen=True):
    """The pages of a grant, open until the transfer ends or the grant is complete.

    `failure`: why no page was opened.
    """

    transfer_id: int
    pages: list[ExposedPage]
    failure: Text | None = None


class Abandon(msgspec.Struct, tag=True, frozen=True):
    """The report that a lane of this session is dead, whether the receiver has noticed or not."""

    lane: int


class Probe(msgspec.Struct, tag=True, frozen=True):
    """A payload that the receiver discards."""


class RefusalKind(Enum):
    """The reason why a write was refused. After CORRUPT the sender must suspect its own copy."""

    STALE = "stale"
    CORRUPT = "corrupt"


class WriteAck(msgspec.Struct, tag=True, frozen=True):
    """The acknowledgement of the oldest unacknowledged write: placed and verified, or refused as a whole."""

    refusal: RefusalKind | None = None
    message: Text = ""


class TransferEnded(msgspec.Struct, tag="Ended", frozen=True):
    """The report that the receiver needs no more of this transfer, as its grant is revoked or unknown."""

    transfer_id: int
    reason: Text


Message = (
    Hello
    | Challenge
    | Introduction
    | Welcome
    | Refused
    | Open
    | Write
    | Close
    | Fetch
    | Found
    | FetchDone
    | Abandon
    | Expose
    | Exposed
    | Probe
    | WriteAck
    | TransferEnded
)
