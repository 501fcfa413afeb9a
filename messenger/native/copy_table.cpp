// The copy table of a shared segment: which grants its pages are open for, and which peers copy to them now.
//
// One word for each side of the handshake that keeps pages from being reused under a copy: a copier writes the
// grant into its slot and then looks whether the grant is still open; the owner closes the grant first and then
// looks at the slots. At least one of both sees the other: the order is that of sequential consistency.
#include "layers.h"

#include <sys/socket.h>

#include <atomic>

namespace {

constexpr size_t kSlots = 64, kGrants = 128;
constexpr size_t kStreamedBytes = 512 * 1024;
constexpr uint64_t kOccupied = uint64_t{1} << 63;

// All zeros: no slot is taken, no grant is open. Grants are kept as their id plus one.
struct CopyTable {
    struct {
        std::atomic<uint64_t> copied;  // the grant that the slot's process is copying to
        std::atomic<uint64_t> owner;   // the token that the slot is given for, with kOccupied once it is taken; 0: free
    } slots[kSlots];
    std::atomic<uint64_t> grants[kGrants];
};
static_assert(sizeof(CopyTable) == 2048 && std::atomic<uint64_t>::is_always_lock_free);

struct Slice {
    uint64_t target, source, num_layers;  // offsets in bytes
};

uint64_t copiers(const CopyTable* copy_table, uint64_t word) {
    uint64_t found = 0;
    for (size_t i = 0; i < kSlots; i++) found |= uint64_t{copy_table->slots[i].copied == word} << i;
    return found;
}

}  // namespace

// -- the owner of the segment --

// Returns whether the grant is open now: its entry may be taken by another.
extern "C" int open_grant(CopyTable* copy_table, uint64_t grant) {
    uint64_t closed = 0;
    return copy_table->grants[grant % kGrants].compare_exchange_strong(closed, grant + 1);
}

// No copy begins after this. The result has a bit for each slot that is copying still.
extern "C" uint64_t close_grant(CopyTable* copy_table, uint64_t grant) {
    uint64_t open = grant + 1;
    copy_table->grants[grant % kGrants].compare_exchange_strong(open, 0);
    return copiers(copy_table, grant + 1);
}

// Closes all grants.
extern "C" uint64_t close_all(CopyTable* copy_table) {
    for (auto& grant : copy_table->grants) grant = 0;
    return ~copiers(copy_table, 0);
}

// Returns whether the slot's process is copying to the grant.
extern "C" int is_copying(const CopyTable* copy_table, size_t slot, uint64_t grant) {
    return copy_table->slots[slot].copied == grant + 1;
}

// Returns one more than the grant that the slot's process is copying to; 0: none.
extern "C" uint64_t copied_to(const CopyTable* copy_table, size_t slot) { return copy_table->slots[slot].copied; }

extern "C" uint64_t owner_of(const CopyTable* copy_table, size_t slot) { return copy_table->slots[slot].owner; }

extern "C" void give_slot(CopyTable* copy_table, size_t slot, uint64_t token) {
    copy_table->slots[slot].copied = 0;
    copy_table->slots[slot].owner = token;
}

// Returns whether no process has the slot; nor will one with the token of then.
extern "C" int is_vacant(CopyTable* copy_table, size_t slot) {
    uint64_t owner = copy_table->slots[slot].owner;
    return owner == 0 || (!(owner & kOccupied) && copy_table->slots[slot].owner.compare_exchange_strong(owner, 0));
}

// -- peers that copy --

// Occupies the slot. Returns whether it is still given for this token.
extern "C" int occupy_slot(CopyTable* copy_table, size_t slot, uint64_t token) {
    return copy_table->slots[slot].owner.compare_exchange_strong(token, token | kOccupied);
}

extern "C" void leave_slot(CopyTable* copy_table, size_t slot) { copy_table->slots[slot].owner = 0; }

// Copies the layers of all slices into granted pages and compares their xxh3-64 with `expected`. -1 unless all are
// there, intact, and the grant was open all the time; else `word` is sent over `fd` at once, and this is how many
// of its bytes have left. `layer_bytes` is more than 240.
extern "C" ssize_t place(CopyTable* copy_table, size_t slot, uint64_t grant, uint8_t* target, const uint8_t* source,
                         const Slice* slices, size_t num_slices, size_t layer_bytes, const uint8_t* expected, int fd,
                         const uint8_t* word, size_t word_bytes) {
    const auto& open = copy_table->grants[grant % kGrants];
    auto& copied = copy_table->slots[slot].copied;
    copied = grant + 1;
    bool is_wanted = grant + 1 != 0 && open == grant + 1;  // the entry of a closed grant is 0
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
    // Bytes that do not leave now, for any reason, are sent by the caller.
    return word_bytes == 0 ? 0 : std::max<ssize_t>(0, send(fd, word, word_bytes, MSG_DONTWAIT | MSG_NOSIGNAL));
}
