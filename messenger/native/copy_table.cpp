// The copy table of a shared segment: the open grants, and the grants that peers are copying to now.
//
// The table keeps a page from being reused during a copy. A copier first writes the grant into its slot, and then
// checks that the grant is still open. The owner first closes the grant, and then checks the slots. All of these
// accesses are sequentially consistent. So either the copier sees that the grant is closed, or the owner sees the
// copier.
#include "layers.h"

#include <sys/socket.h>

#include <atomic>

namespace {

constexpr size_t kSlots = 64, kGrants = 128;
constexpr size_t kStreamedBytes = 512 * 1024;
constexpr uint64_t kOccupied = uint64_t{1} << 63;

// In a table of zeros no slot is taken and no grant is open. An entry for a grant is the id of the grant plus one.
struct CopyTable {
    struct {
        std::atomic<uint64_t> copied;  // the grant that the slot's process is copying to; 0: none
        std::atomic<uint64_t> owner;   // the slot's token; kOccupied is set while a process has the slot; 0: free
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

// Opens a grant. Returns whether its entry was free: several grants share one.
extern "C" int open_grant(CopyTable* copy_table, uint64_t grant) {
    uint64_t closed = 0;
    return copy_table->grants[grant % kGrants].compare_exchange_strong(closed, grant + 1);
}

// Closes a grant, so that no copy to it begins any more. Bit i of the result is set if slot i is still copying to it.
extern "C" uint64_t close_grant(CopyTable* copy_table, uint64_t grant) {
    uint64_t open = grant + 1;
    copy_table->grants[grant % kGrants].compare_exchange_strong(open, 0);
    return copiers(copy_table, grant + 1);
}

// Closes all grants. Bit i of the result is set if slot i is still copying.
extern "C" uint64_t close_all(CopyTable* copy_table) {
    for (auto& grant : copy_table->grants) grant = 0;
    return ~copiers(copy_table, 0);
}

// Returns whether the slot's process is copying to the grant.
extern "C" int is_copying(const CopyTable* copy_table, size_t slot, uint64_t grant) {
    return copy_table->slots[slot].copied == grant + 1;
}

// Returns the id plus one of the grant that the slot's process is copying to; 0: none.
extern "C" uint64_t copied_to(const CopyTable* copy_table, size_t slot) { return copy_table->slots[slot].copied; }

extern "C" uint64_t owner_of(const CopyTable* copy_table, size_t slot) { return copy_table->slots[slot].owner; }

extern "C" void give_slot(CopyTable* copy_table, size_t slot, uint64_t token) {
    copy_table->slots[slot].copied = 0;
    copy_table->slots[slot].owner = token;
}

// Returns whether the slot is free. A slot whose process has not taken it yet becomes free, and can no longer be taken
// with its present token.
extern "C" int is_vacant(CopyTable* copy_table, size_t slot) {
    uint64_t owner = copy_table->slots[slot].owner;
    return owner == 0 || (!(owner & kOccupied) && copy_table->slots[slot].owner.compare_exchange_strong(owner, 0));
}

// -- peers that copy --

// Takes the slot. Returns whether that was possible: False if the slot is no longer given to this token.
extern "C" int occupy_slot(CopyTable* copy_table, size_t slot, uint64_t token) {
    return copy_table->slots[slot].owner.compare_exchange_strong(token, token | kOccupied);
}

extern "C" void leave_slot(CopyTable* copy_table, size_t slot) { copy_table->slots[slot].owner = 0; }

// Copies the layers of all slices into granted pages, and compares their xxh3-64 with `expected`. Returns -1 if a layer
// is damaged, or if the grant was closed before the end. Otherwise sends `word` over `fd` at once, and returns how many
// of its bytes were sent. `layer_bytes` must be more than 240.
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
