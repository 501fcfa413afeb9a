// The catalogue of a shared segment: in which page a sealed block is.
#pragma once

#include "layers.h"

namespace {

constexpr size_t kKeyBytes = 16, kPlaces = 4, kLooked = 2 * kPlaces, kNowhere = ~size_t{0};
constexpr uint8_t kSealed = 2;

// Arrays with one entry for each page, written by the owner of the segment. Bytes of keys are random.
struct Catalogue {
    const uint8_t* states;
    const uint32_t* generations;
    const uint8_t* keys;
    const uint64_t* checksums;  // of each layer
    uint32_t* places;           // kPlaces for each page: hints to pages, plus one; those of a key begin at its hash
    uint64_t num_pages, num_layers;
};

template <typename T>
T seen(const T& word) {
    return __atomic_load_n(&word, __ATOMIC_ACQUIRE);
}

inline bool holds(const Catalogue& catalogue, size_t page, const uint8_t* key) {
    return seen(catalogue.states[page]) == kSealed &&
           std::memcmp(catalogue.keys + page * kKeyBytes, key, kKeyBytes) == 0;
}

inline uint32_t& place(const Catalogue& catalogue, const uint8_t* key, size_t i) {
    const size_t first = read64(key) % catalogue.num_pages * kPlaces;
    return catalogue.places[(first + i) % (catalogue.num_pages * kPlaces)];
}

inline size_t find_page(const Catalogue& catalogue, const uint8_t* key) {
    for (size_t i = 0; i < kLooked; i++) {
        const size_t page = size_t{seen(place(catalogue, key, i))} - 1;
        if (page < catalogue.num_pages && holds(catalogue, page, key)) return page;
    }
    return kNowhere;
}

}  // namespace
