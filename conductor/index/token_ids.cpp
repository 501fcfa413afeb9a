// Token ids out of a msgpack array of unsigned integers, which a general decoder would make Python objects of.
#include <cstddef>
#include <cstdint>

namespace {

// The next `num_bytes` as one big-endian number; the position moves on.
uint64_t take(const uint8_t*& at, size_t num_bytes) {
    uint64_t value = 0;
    while (num_bytes--) value = value << 8 | *at++;
    return value;
}

}  // namespace

// Returns how many there are, or -1 if this is no such array or has more than `room`. Reads `size` bytes at most.
extern "C" int64_t unpack_token_ids(const uint8_t* packed, size_t size, uint32_t* token_ids, size_t room) {
    const uint8_t *at = packed, *end = packed + size;
    if (at == end) return -1;
    uint8_t first = *at++;
    size_t header = first == 0xdc ? 2 : first == 0xdd ? 4 : 0;
    if ((!header && first >> 4 != 0x9) || size_t(end - at) < header) return -1;
    size_t num_ids = header ? take(at, header) : first & 0xf;
    if (num_ids > room) return -1;
    for (size_t i = 0; i < num_ids; i++) {
        if (at == end) return -1;
        uint8_t kind = *at++;
        if (kind == 0xcd && end - at >= 2) {  // two bytes, as most of them
            token_ids[i] = at[0] << 8 | at[1];
            at += 2;
            continue;
        }
        if (kind < 0x80) {
            token_ids[i] = kind;
            continue;
        }
        if (kind < 0xcc || kind > 0xce) return -1;
        size_t num_bytes = size_t(1) << (kind - 0xcc);
        if (size_t(end - at) < num_bytes) return -1;
        token_ids[i] = uint32_t(take(at, num_bytes));
    }
    return at == end ? int64_t(num_ids) : -1;
}
