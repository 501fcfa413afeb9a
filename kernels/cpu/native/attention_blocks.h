// The common parts of both kinds of attention: a batch, the places of its sequences' keys and values, blocks of KEYS keys.
//
// Owns: the layout of pages. Does not know: in which order anything is computed.
#pragma once

#include <algorithm>

#include "tile_registers.h"

namespace {

constexpr int KEYS = 64;
// The number of queries (times heads) of one tile. TILES tiles share the preparation of the values.
constexpr int COLUMNS = TILE_VECTORS * WIDTH;
constexpr int TILES = 4;
// The maximum of a row before its first key. It is finite, so that such a row gets no NaN.
constexpr float LOWEST = -1e30f;
// Weights are computed for a multiple of this number of keys; tile registers multiply 16 words at once.
template <class T>
constexpr int KEYS_AT_ONCE = ON_TILES<T> ? 16 * PER_WORD<T> : WIDTH;
constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

// All sequences of a batch and their pages, for layers that share a window. attention.py has the same structure.
struct Batch {
    const int32_t* pages;         // the page tables, one after the other
    const int64_t* first_pages;   // the index in `pages` at which each sequence's table begins
    const int32_t* query_lens;    // new tokens of each sequence
    const int32_t* kv_lens;       // all tokens of each sequence, the new ones included
    const int32_t* num_keys;      // the keys of each sequence that its pages have: all, or the first ones
    int64_t num_pages;            // the number of pages of a layer
    int32_t num_sequences, num_heads, num_kv_heads, head_dim, page_size;
    int32_t window;               // keys that a query sees, itself included
    float scale;
};

template <class T>
struct Attention {
    const T* query;               // [tokens, num_heads, D], tokens `query_stride` elements apart
    int64_t query_stride;
    const T* kv;                  // [pages, num_kv_heads, 2, page_size, D]
    T* out;                       // [tokens, num_heads, D], tokens `out_stride` elements apart
    int64_t out_stride;
    float* lse;                   // [tokens, num_heads], or null
};

// The keys of one sequence and KV head. The value of each key lies `to_values` elements behind the key.
template <class T, int D>
struct Rows {
    const T* first_page;          // this head's part of page 0
    const int32_t* table;
    int64_t page_stride;
    int page_size;

    int64_t to_values() const { return int64_t(page_size) * D; }
};

// The addresses of the keys [first, end), at most KEYS of them.
template <class T, int D>
struct Block {
    const T* keys[KEYS];
    int64_t to_values;
    int num_keys;

    INLINE void find(const Rows<T, D>& rows, int first, int end, Block& block) {
        block.to_values = rows.to_values();
        block.num_keys = std::max(0, std::min(KEYS, end - first));
        if (block.num_keys == 0) return;
        int page = first / rows.page_size, offset = first % rows.page_size;
        for (int i = 0; i < block.num_keys; i++) {
            block.keys[i] = rows.first_page + rows.table[page] * rows.page_stride + offset * D;
            if (++offset == rows.page_size) offset = 0, page++;
        }
    }
};

template <class T, int D>
INLINE void prefetch_row(const T* row) {
    for (int byte = 0; byte < D * int(sizeof(T)); byte += 64) _mm_prefetch((const char*)row + byte, _MM_HINT_T1);
}

template <class T, int D>
struct Sequence {
    Rows<T, D> rows;
    int group;                    // query heads of this KV head
    int start;                    // position of the first query
    int num_keys;                 // the keys that the pages have; further keys are not there
    int num_queries;
    int window;
    float scale_log2;             // the scale of scores, times log2(e)
    const T* query;               // the first query's first head of the group
    int64_t query_stride;
    T* out;
    int64_t out_stride;
    float* lse;
    int64_t lse_stride;
};

// Packs a block's values into words for `multiply`: [KEYS / PER_WORD][D]. Words behind the last key are zero, so that the
// content of a page behind its last token does not matter. Prefetches the values of `next`.
template <class T, int D>
INLINE void pack_values(const Block<T, D>& block, const Block<T, D>& next, word* packed) {
    alignas(64) static const T none[D] = {};
    if constexpr (ON_TILES<T>) {
        const int num_words = (block.num_keys + PER_WORD<T> - 1) / PER_WORD<T>;
        std::fill(packed + num_words * D, packed + KEYS / PER_WORD<T> * D, 0);
    }
    for (int key = 0; key < block.num_keys; key += PER_WORD<T>) {
        const T* a = block.keys[key] + block.to_values;
        word* row = packed + key / PER_WORD<T> * D;
        for (int i = key; i < std::min(key + PER_WORD<T>, next.num_keys); i++) prefetch_row<T, D>(next.keys[i] + next.to_values);
        if constexpr (PER_WORD<T> == 1) {
            UNROLL for (int d = 0; d < D; d += WIDTH) store_words(row + d, load_words(a + d));
        } else {
            const T* b = key + 1 < block.num_keys ? block.keys[key + 1] + block.to_values : none;
            UNROLL for (int d = 0; d < D; d += 2 * WIDTH) {
                Words low, high;
                interleave(load_words(a + d), load_words(b + d), low, high);
                store_words(row + d, low);
                store_words(row + d + WIDTH, high);
            }
        }
    }
}

}  // namespace
