// The board of a shared segment: which grants its pages are open for, and who is copying to them right now.
//
// One word for each side of the handshake that keeps pages from being reused under a copy: a copier writes the
// grant into its seat and then looks whether the grant is still open; who closes the grant does that first and
// then looks at the seats. Each sees the other, or both do: the order is that of sequential consistency.
#include "layers.h"

#include <sys/socket.h>

#include <atomic>

namespace {

constexpr size_t kSeats = 64, kGrants = 128;
constexpr size_t kStreamedBytes = 512 * 1024;
constexpr uint64_t kSits = uint64_t{1} << 63;

// All zeros: nobody is there, nothing is open. Grants are kept as their id plus one.
struct Board {
    struct {
        std::atomic<uint64_t> copied;  // the grant that whoever sits here is copying to
        std::atomic<uint64_t> owner;   // the ticket that the seat is given for, with kSits once it is taken; 0: free
    } seats[kSeats];
    std::atomic<uint64_t> grants[kGrants];
};
static_assert(sizeof(Board) == 2048 && std::atomic<uint64_t>::is_always_lock_free);

struct Slice {
    uint64_t target, source, num_layers;  // offsets in bytes
};

uint64_t copiers(const Board* board, uint64_t word) {
    uint64_t found = 0;
    for (size_t i = 0; i < kSeats; i++) found |= uint64_t{board->seats[i].copied == word} << i;
    return found;
}

}  // namespace

// -- the owner of the segment --

// Whether it is open now: its place may be taken by another.
extern "C" int open_grant(Board* board, uint64_t grant) {
    uint64_t closed = 0;
    return board->grants[grant % kGrants].compare_exchange_strong(closed, grant + 1);
}

// No copy begins after this. The result has a bit for each seat that is copying still.
extern "C" uint64_t close_grant(Board* board, uint64_t grant) {
    uint64_t open = grant + 1;
    board->grants[grant % kGrants].compare_exchange_strong(open, 0);
    return copiers(board, grant + 1);
}

// The same of all grants.
extern "C" uint64_t close_all(Board* board) {
    for (auto& grant : board->grants) grant = 0;
    return ~copiers(board, 0);
}

// Whether whoever sits there is copying to the grant.
extern "C" int is_copying(const Board* board, size_t seat, uint64_t grant) {
    return board->seats[seat].copied == grant + 1;
}

// One more than that grant; 0: to none.
extern "C" uint64_t copied_to(const Board* board, size_t seat) { return board->seats[seat].copied; }

extern "C" uint64_t owner_of(const Board* board, size_t seat) { return board->seats[seat].owner; }

extern "C" void give_seat(Board* board, size_t seat, uint64_t ticket) {
    board->seats[seat].copied = 0;
    board->seats[seat].owner = ticket;
}

// Whether nobody sits there: nor will anybody with the ticket of then.
extern "C" int is_vacant(Board* board, size_t seat) {
    uint64_t owner = board->seats[seat].owner;
    return owner == 0 || (!(owner & kSits) && board->seats[seat].owner.compare_exchange_strong(owner, 0));
}

// -- whoever sits at the board --

// Whether the seat is still given for this ticket.
extern "C" int sit_down(Board* board, size_t seat, uint64_t ticket) {
    return board->seats[seat].owner.compare_exchange_strong(ticket, ticket | kSits);
}

extern "C" void leave_seat(Board* board, size_t seat) { board->seats[seat].owner = 0; }

// Copies the layers of all slices into granted pages and compares their xxh3-64 with `expected`. -1 unless all are
// there, intact, and the grant was open all the time; else `word` is sent over `fd` at once, and this is how many
// of its bytes have left. `layer_bytes` is more than 240.
extern "C" ssize_t place(Board* board, size_t seat, uint64_t grant, uint8_t* target, const uint8_t* source,
                         const Slice* slices, size_t num_slices, size_t layer_bytes, const uint8_t* expected, int fd,
                         const uint8_t* word, size_t word_bytes) {
    const auto& open = board->grants[grant % kGrants];
    auto& copied = board->seats[seat].copied;
    copied = grant + 1;
    bool is_wanted = grant + 1 != 0 && open == grant + 1;  // a place that is closed has 0
    for (size_t i = 0; i < num_slices && is_wanted; i++) {
        const Slice& slice = slices[i];
        Copier copier(target + slice.target, slice.num_layers * layer_bytes >= kStreamedBytes);
        for (size_t k = 0; k < slice.num_layers && is_wanted; k++, expected += sizeof(uint64_t)) {
            const uint8_t* layer = source + slice.source + k * layer_bytes;
            is_wanted = copy_layer(copier, layer, layer_bytes) == read64(expected) && open == grant + 1;
        }
    }
    copied.store(0, std::memory_order_release);
    if (!is_wanted) return -1;
    // What does not leave now, for whatever reason, is sent like everything else.
    return word_bytes == 0 ? 0 : std::max<ssize_t>(0, send(fd, word, word_bytes, MSG_DONTWAIT | MSG_NOSIGNAL));
}
