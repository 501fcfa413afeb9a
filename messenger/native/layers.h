// The xxh3-64 of one layer, and copies that bypass the caches. All compiled code that hashes or copies blocks uses these two.
//
// The hash follows the published description of XXH3 (seed 0, default secret, inputs longer than 240 bytes). Copying
// and hashing in one pass reads memory once. Large copies bypass the caches by streaming stores, so that the processor
// does not read the target first. Bytes moved: one read and one write of the block.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

constexpr size_t kStripe = 64;
constexpr size_t kStripesPerRound = 16;  // (secret - stripe) / 8
constexpr size_t kRound = kStripe * kStripesPerRound;
constexpr size_t kRoundsAhead = 2;
constexpr uint64_t kPrime32_1 = 0x9E3779B1, kPrime32_2 = 0x85EBCA77, kPrime32_3 = 0xC2B2AE3D;
constexpr uint64_t kPrime64_1 = 0x9E3779B185EBCA87, kPrime64_2 = 0xC2B2AE3D27D4EB4F,
                   kPrime64_3 = 0x165667B19E3779F9, kPrime64_4 = 0x85EBCA77C2B2AE63,
                   kPrime64_5 = 0x27D4EB2F165667C5;

alignas(64) constexpr uint8_t kSecret[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

inline uint64_t read64(const uint8_t* bytes) {
    uint64_t value;
    std::memcpy(&value, bytes, sizeof value);
    return value;
}

#if defined(__AVX512F__)
struct Lanes {
    __m512i acc;
    explicit Lanes(const uint64_t (&start)[8]) : acc(_mm512_loadu_si512(start)) {}
    void accumulate(const uint8_t* stripe, const uint8_t* secret) {
        const __m512i value = _mm512_loadu_si512(stripe);
        const __m512i keyed = _mm512_xor_si512(value, _mm512_loadu_si512(secret));
        const __m512i product = _mm512_mul_epu32(keyed, _mm512_srli_epi64(keyed, 32));
        const __m512i swapped = _mm512_shuffle_epi32(value, static_cast<_MM_PERM_ENUM>(0x4E));
        acc = _mm512_add_epi64(acc, _mm512_add_epi64(swapped, product));
    }
    void scramble(const uint8_t* secret) {
        const __m512i prime = _mm512_set1_epi64(kPrime32_1);
        __m512i mixed = _mm512_xor_si512(acc, _mm512_srli_epi64(acc, 47));
        mixed = _mm512_xor_si512(mixed, _mm512_loadu_si512(secret));
        const __m512i high = _mm512_mul_epu32(_mm512_srli_epi64(mixed, 32), prime);
        acc = _mm512_add_epi64(_mm512_mul_epu32(mixed, prime), _mm512_slli_epi64(high, 32));
    }
    void store(uint64_t (&out)[8]) const { _mm512_storeu_si512(out, acc); }
};
#elif defined(__AVX2__)
struct Lanes {
    __m256i acc[2];
    explicit Lanes(const uint64_t (&start)[8]) {
        for (int i = 0; i < 2; i++) acc[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(start) + i);
    }
    void accumulate(const uint8_t* stripe, const uint8_t* secret) {
        for (int i = 0; i < 2; i++) {
            const __m256i value = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(stripe) + i);
            const __m256i key = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(secret) + i);
            const __m256i keyed = _mm256_xor_si256(value, key);
            const __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
            acc[i] = _mm256_add_epi64(acc[i], _mm256_add_epi64(_mm256_shuffle_epi32(value, 0x4E), product));
        }
    }
    void scramble(const uint8_t* secret) {
        const __m256i prime = _mm256_set1_epi64x(kPrime32_1);
        for (int i = 0; i < 2; i++) {
            const __m256i key = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(secret) + i);
            const __m256i mixed = _mm256_xor_si256(_mm256_xor_si256(acc[i], _mm256_srli_epi64(acc[i], 47)), key);
            const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(mixed, 32), prime);
            acc[i] = _mm256_add_epi64(_mm256_mul_epu32(mixed, prime), _mm256_slli_epi64(high, 32));
        }
    }
    void store(uint64_t (&out)[8]) const {
        for (int i = 0; i < 2; i++) _mm256_storeu_si256(reinterpret_cast<__m256i*>(out) + i, acc[i]);
    }
};
#else
struct Lanes {
    uint64_t acc[8];
    explicit Lanes(const uint64_t (&start)[8]) { std::memcpy(acc, start, sizeof acc); }
    void accumulate(const uint8_t* stripe, const uint8_t* secret) {
        for (int i = 0; i < 8; i++) {
            const uint64_t value = read64(stripe + 8 * i), keyed = value ^ read64(secret + 8 * i);
            acc[i ^ 1] += value;
            acc[i] += (keyed & 0xFFFFFFFF) * (keyed >> 32);
        }
    }
    void scramble(const uint8_t* secret) {
        for (int i = 0; i < 8; i++) acc[i] = (acc[i] ^ (acc[i] >> 47) ^ read64(secret + 8 * i)) * kPrime32_1;
    }
    void store(uint64_t (&out)[8]) const { std::memcpy(out, acc, sizeof acc); }
};
#endif

inline uint64_t folded(uint64_t a, uint64_t b) {
    const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
    return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

constexpr uint64_t kStart[8] = {kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3,
                                kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1};

// The hash of one layer. `round` must be called for each round, in order, before `digest`.
class Layer {
  public:
    Layer(const uint8_t* bytes, size_t num_bytes, const uint64_t (&state)[8] = kStart)
        : bytes_(bytes), num_bytes_(num_bytes), lanes_(state) {}

    // The number of rounds that end before the last byte of the layer. `digest` hashes the rest.
    size_t num_rounds() const { return (num_bytes_ - 1) / kRound; }

    void round(size_t index) {
        const uint8_t* start = bytes_ + index * kRound;
        for (size_t i = 0; i < kStripesPerRound; i++) lanes_.accumulate(start + i * kStripe, kSecret + 8 * i);
        lanes_.scramble(kSecret + sizeof kSecret - kStripe);
    }

    uint64_t digest() {
        const uint8_t* start = bytes_ + num_rounds() * kRound;
        const size_t num_stripes = (num_bytes_ - 1 - num_rounds() * kRound) / kStripe;
        for (size_t i = 0; i < num_stripes; i++) lanes_.accumulate(start + i * kStripe, kSecret + 8 * i);
        lanes_.accumulate(bytes_ + num_bytes_ - kStripe, kSecret + sizeof kSecret - kStripe - 7);
        uint64_t acc[8];
        lanes_.store(acc);
        uint64_t hash = num_bytes_ * kPrime64_1;
        for (int i = 0; i < 4; i++) {
            const uint8_t* secret = kSecret + 11 + 16 * i;
            hash += folded(acc[2 * i] ^ read64(secret), acc[2 * i + 1] ^ read64(secret + 8));
        }
        hash = (hash ^ (hash >> 37)) * 0x165667919E3779F9;
        return hash ^ (hash >> 32);
    }

    void store(uint64_t (&state)[8]) const { lanes_.store(state); }

  private:
    const uint8_t* bytes_;
    size_t num_bytes_;
    Lanes lanes_;
};

// Copies one cache line and bypasses the caches. `line` must be aligned to kStripe bytes.
#if defined(__AVX512F__)
constexpr bool kCanStream = true;
inline void stream(uint8_t* line, const uint8_t* source) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(line), _mm512_loadu_si512(source));
}
#elif defined(__AVX2__)
constexpr bool kCanStream = true;
inline void stream(uint8_t* line, const uint8_t* source) {
    for (int i = 0; i < 2; i++)
        _mm256_stream_si256(reinterpret_cast<__m256i*>(line) + i,
                            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source) + i));
}
#else
constexpr bool kCanStream = false;
inline void stream(uint8_t*, const uint8_t*) {}
#endif

// Copies bytes to consecutive addresses from `target` on. A `streaming` copy bypasses the caches.
class Copier {
  public:
    Copier(uint8_t* target, bool streaming) : target_(target), streaming_(kCanStream && streaming) {}
    ~Copier() {
        plain(kept_, num_kept_);
#if defined(__AVX2__) || defined(__AVX512F__)
        if (streaming_) _mm_sfence();
#endif
    }

    // Copies the next bytes. `source` must begin where the source of the previous call ended.
    void copy(const uint8_t* source, size_t num_bytes) {
        if (!streaming_) return plain(source, num_bytes);
        source -= num_kept_;
        num_bytes += num_kept_;
        const size_t head = std::min<size_t>(-reinterpret_cast<uintptr_t>(target_) % kStripe, num_bytes);
        plain(source, head);
        source += head;
        num_bytes -= head;
        for (; num_bytes >= kStripe; num_bytes -= kStripe, source += kStripe, target_ += kStripe)
            stream(target_, source);
        kept_ = source;
        num_kept_ = num_bytes;
    }

  private:
    void plain(const uint8_t* source, size_t num_bytes) {
        if (num_bytes == 0) return;
        std::memcpy(target_, source, num_bytes);
        target_ += num_bytes;
    }

    uint8_t* target_;
    bool streaming_;
    // A part of a line is kept until the line is complete, because plain stores between streaming stores take several
    // times as long.
    const uint8_t* kept_ = nullptr;
    size_t num_kept_ = 0;
};

// Prefetches a round that is read soon. The addresses may be outside of mapped memory.
inline void announce(const uint8_t* round) {
    for (size_t i = 0; i < kRound; i += kStripe) __builtin_prefetch(round + i);
}

// Copies one layer, and returns its xxh3-64. Each byte is hashed and written in the same pass, after it was read once.
inline uint64_t copy_layer(Copier& copier, const uint8_t* start, size_t layer_bytes) {
    Layer layer(start, layer_bytes);
    for (size_t round = 0; round < layer.num_rounds(); round++) {
        announce(start + (round + kRoundsAhead) * kRound);
        layer.round(round);
        copier.copy(start + round * kRound, kRound);
    }
    const uint64_t digest = layer.digest();
    copier.copy(start + layer.num_rounds() * kRound, layer_bytes - layer.num_rounds() * kRound);
    return digest;
}

}  // namespace
