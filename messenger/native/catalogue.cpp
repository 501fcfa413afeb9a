// The catalogue of a shared segment: in which page a sealed block is, for readers on the same host.
//
// A reader takes no lock or lease, and eviction does not wait for readers. A reader notes the generation of the page,
// copies the block, and compares the bytes with their checksums. Then it checks that the page still has the block, in
// the same generation: the owner unseals a page before the page may be written again. If the check fails, the reader
// drops the copied bytes.
#include <atomic>

#include "layers.h"

namespace {

constexpr size_t kKeyBytes = 16, kPlaces = 4, kLooked = 2 * kPlaces, kNowhere = ~size_t{0};
constexpr uint8_t kSealed = 2;

// Arrays with one entry for each page, written by the owner of the segment. Keys are hashes, so that their first bytes
// serve as hash values.
struct Catalogue {
    const uint8_t* states;
    const uint32_t* generations;
    const uint8_t* keys;
    const uint64_t* checksums;  // of each layer
    uint32_t* places;           // hints: kPlaces for each page. A hint is a page number plus one; 0 is no hint.
                                // The hints for a key begin at the place that its first bytes give.
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

constexpr size_t kStreamedBytes = 512 * 1024;

// Returns whether the hint may be overwritten: its page has no sealed block, or a search for that block's key does not
// come to this hint.
bool is_stale(const Catalogue& catalogue, const uint32_t& hint) {
    const size_t page = size_t{hint} - 1;
    if (page >= catalogue.num_pages || catalogue.states[page] != kSealed) return true;
    for (size_t i = 0; i < kLooked; i++)
        if (&place(catalogue, catalogue.keys + page * kKeyBytes, i) == &hint) return false;
    return true;
}

// Copies layers of a block. Returns whether the block was found, the copied bytes match their checksums, and the page
// still held the block after the last layer was copied.
bool copy_block(const Catalogue& catalogue, const uint8_t* key, const uint8_t* pages, size_t page_stride,
                size_t first_layer, size_t num_layers, size_t layer_bytes, uint8_t* target, uint64_t* checksums) {
    const size_t page = find_page(catalogue, key);
    if (page == kNowhere) return false;
    const uint32_t generation = seen(catalogue.generations[page]);
    if (!holds(catalogue, page, key)) return false;
    const uint64_t* expected = catalogue.checksums + page * catalogue.num_layers + first_layer;
    const uint8_t* source = pages + page * page_stride + first_layer * layer_bytes;
    {
        Copier copier(target, num_layers * layer_bytes >= kStreamedBytes);
        for (size_t i = 0; i < num_layers; i++) {
            checksums[i] = copy_layer(copier, source + i * layer_bytes, layer_bytes);
            if (checksums[i] != expected[i]) return false;
        }
    }
    std::atomic_thread_fence(std::memory_order_acquire);
    return holds(catalogue, page, key) && seen(catalogue.generations[page]) == generation;
}

}  // namespace

// Enters the sealed blocks in these pages, so that readers find them. If more than kLooked keys have their hints at the
// same places, some of their blocks are not found.
extern "C" void note_pages(const Catalogue* catalogue, const int64_t* pages, size_t num_pages) {
    for (size_t n = 0; n < num_pages; n++) {
        const uint8_t* key = catalogue->keys + pages[n] * kKeyBytes;
        size_t chosen = pages[n] % kLooked;
        for (size_t i = kLooked; i-- > 0;) {
            const uint32_t& hint = place(*catalogue, key, i);
            if (hint == pages[n] + 1 || is_stale(*catalogue, hint)) chosen = i;
        }
        __atomic_store_n(&place(*catalogue, key, chosen), static_cast<uint32_t>(pages[n] + 1), __ATOMIC_RELEASE);
    }
}

// Returns how many of the blocks can be found.
extern "C" size_t count_blocks(const Catalogue* catalogue, const uint8_t* keys, size_t num_blocks) {
    size_t num_found = 0;
    for (size_t n = 0; n < num_blocks; n++) num_found += find_page(*catalogue, keys + n * kKeyBytes) != kNowhere;
    return num_found;
}

// Copies layers of each block to its target, and writes the xxh3-64 of all layers to `checksums`, block after block.
// Returns whether all blocks were copied intact. `layer_bytes` must be more than 240.
extern "C" int read_blocks(const Catalogue* catalogue, const uint8_t* keys, size_t num_blocks, const uint8_t* pages,
                           size_t page_stride, size_t first_layer, size_t num_layers, size_t layer_bytes,
                           uint8_t* const* targets, uint64_t* checksums) {
    for (size_t n = 0; n < num_blocks; n++)
        if (!copy_block(*catalogue, keys + n * kKeyBytes, pages, page_stride, first_layer, num_layers, layer_bytes,
                        targets[n], checksums + n * num_layers))
            return false;
    return true;
}
