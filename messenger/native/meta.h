// Frames and msgpack, as messenger/wire/protocol.py writes them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace {

constexpr ptrdiff_t kFrameHeaderBytes = 8;  // meta length u32, payload length u32, little-endian
constexpr uint64_t kMostNumber = uint64_t{1} << 63;

inline uint32_t read32(const uint8_t* bytes) {
    uint32_t value;
    std::memcpy(&value, bytes, sizeof value);
    return value;
}

// `head` has room for it in front of the message, which ends at `end`.
inline void write_frame_header(uint8_t* head, const uint8_t* end, uint64_t payload_bytes) {
    const uint32_t lengths[2] = {static_cast<uint32_t>(end - head - kFrameHeaderBytes),
                                 static_cast<uint32_t>(payload_bytes)};
    std::memcpy(head, lengths, sizeof lengths);
}

// Reads msgpack as it is written for these messages. What is anything else makes `is_good` false, for good.
class MetaReader {
  public:
    MetaReader(const uint8_t* begin, const uint8_t* end) : at_(begin), end_(end) {}

    bool is_good() const { return is_good_; }
    bool is_read() const { return is_good_ && at_ == end_; }

    template <size_t size>
    void literal(const char (&text)[size]) {
        const uint8_t* found = take(size - 1);
        is_good_ = is_good_ && std::memcmp(found, text, size - 1) == 0;
    }

    uint64_t number() {
        const uint8_t* kind = take(1);
        if (!is_good_) return 0;
        if (*kind < 0x80) return *kind;
        if (*kind < 0xcc || *kind > 0xcf) return fail();
        const uint64_t value = big_endian(size_t{1} << (*kind - 0xcc));
        return value < kMostNumber ? value : fail();
    }

    size_t array() {
        const uint8_t* kind = take(1);
        if (!is_good_) return 0;
        if (*kind == 0xdc) return big_endian(2);
        return *kind >> 4 == 9 ? *kind & 0xf : fail();
    }

    const uint8_t* binary(size_t* num_bytes) {
        const uint8_t* kind = take(1);
        *num_bytes = 0;
        if (!is_good_) return nullptr;
        if (*kind != 0xc4 && *kind != 0xc5) return fail(), nullptr;
        *num_bytes = big_endian(*kind == 0xc4 ? 1 : 2);
        return take(*num_bytes);
    }

  private:
    uint64_t fail() {
        is_good_ = false;
        return 0;
    }

    // Valid to be read if it is good.
    const uint8_t* take(size_t num_bytes) {
        if (!is_good_ || static_cast<size_t>(end_ - at_) < num_bytes) return fail(), nullptr;
        at_ += num_bytes;
        return at_ - num_bytes;
    }

    uint64_t big_endian(size_t num_bytes) {
        const uint8_t* bytes = take(num_bytes);
        uint64_t value = 0;
        for (size_t i = 0; is_good_ && i < num_bytes; i++) value = value << 8 | bytes[i];
        return value;
    }

    const uint8_t *at_, *end_;
    bool is_good_ = true;
};

// Writes msgpack, each value in the shortest form. There is room for it.
class MetaWriter {
  public:
    explicit MetaWriter(uint8_t* begin) : at_(begin) {}

    const uint8_t* end() const { return at_; }

    template <size_t size>
    void literal(const char (&text)[size]) {
        bytes(text, size - 1);
    }

    void number(uint64_t value) {
        if (value < 0x80)
            *at_++ = value;
        else if (value <= 0xff)
            big_endian(0xcc, value, 1);
        else if (value <= 0xffff)
            big_endian(0xcd, value, 2);
        else if (value <= 0xffffffff)
            big_endian(0xce, value, 4);
        else
            big_endian(0xcf, value, 8);
    }

    void array(size_t num_items) {
        if (num_items < 16)
            *at_++ = 0x90 | num_items;
        else
            big_endian(0xdc, num_items, 2);
    }

    void binary(const void* data, size_t num_bytes) {
        if (num_bytes <= 0xff)
            big_endian(0xc4, num_bytes, 1);
        else
            big_endian(0xc5, num_bytes, 2);
        bytes(data, num_bytes);
    }

  private:
    void bytes(const void* data, size_t num_bytes) {
        std::memcpy(at_, data, num_bytes);
        at_ += num_bytes;
    }

    void big_endian(uint8_t kind, uint64_t value, size_t num_bytes) {
        *at_++ = kind;
        for (size_t i = num_bytes; i-- > 0;) *at_++ = value >> (8 * i);
    }

    uint8_t* at_;
};

}  // namespace
