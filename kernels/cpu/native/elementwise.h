// The operations between the products of a decoder layer, each in one pass over memory: norm, rotation and page
// write. The gate of the MLP is not among them: the gated product applies it (linear.h).
//
// Owns: the arithmetic, in float32 inside. Does not know: layers; its caller has checked all sizes.
#pragma once

#include <algorithm>

#include "idle_cores.h"
#include "simd.h"

namespace {

// Rows of a tile. Fewer rows are not worth the work of another core.
constexpr long ROWS_OF_TILE = 32;

// Calls `row(n)` for each row.
template <class F>
INLINE void divide_rows(long num_rows, F row) {
    divide((num_rows + ROWS_OF_TILE - 1) / ROWS_OF_TILE, [&](long tile, int) {
        const long first = tile * ROWS_OF_TILE, end = std::min(first + ROWS_OF_TILE, num_rows);
        for (long n = first; n < end; n++) row(n);
    });
}

// Computes x / rms(x) * weight over n elements; n is a multiple of WIDTH.
template <class T>
INLINE void normalise(const T* x, const T* weight, long n, float eps, T* y) {
    Floats squares[4] = {zero(), zero(), zero(), zero()};
    for (long i = 0; i < n; i += WIDTH) {
        Floats v = load_floats(x + i);
        Floats& to = squares[i / WIDTH % 4];
        to = fma(v, v, to);
    }
    __m256 totals = _mm256_setzero_ps();
    add_eight(totals, add(add(squares[0], squares[1]), add(squares[2], squares[3])));
    const float total = sum(totals);
    const Floats scale = set(1.0f / sqrtf(total / float(n) + eps));
    for (long i = 0; i < n; i += WIDTH) store_floats(y + i, mul(mul(load_floats(x + i), scale), load_floats(weight + i)));
}

template <class T>
ALONE void normalise_rows(const T* x, long num_rows, long n, const T* weight, float eps, T* y) {
    divide_rows(num_rows, [&](long row) { normalise(x + row * n, weight, n, eps, y + row * n); });
}

template <class T>
INLINE Floats silu_mul(Floats gate, Floats up) {
    const Floats one = set(1.0f);
    // exp(-|gate|), which cannot overflow
    const Floats e = exp2_of<T>(mul(min(gate, sub(zero(), gate)), set(1.4426950408889634f)));
    return mul(mul(gate, up), div(if_less(gate, zero(), e, one), add(one, e)));
}

// Rotates pairs of elements (i, i + head_dim / 2); cos and sin have one number for each pair.
template <class T>
INLINE void rotate(const T* x, const float* cos, const float* sin, int head_dim, T* y) {
    const int half = head_dim / 2;
    for (int i = 0; i < half; i += WIDTH) {
        const Floats a = load_floats(x + i), b = load_floats(x + half + i), c = load(cos + i), s = load(sin + i);
        store_floats(y + i, fma(a, c, mul(b, sub(zero(), s))));
        store_floats(y + half + i, fma(b, c, mul(a, s)));
    }
}

// The token slots and angles of a batch. elementwise.py has the same structure.
struct Slots {
    const float *cos, *sin;          // [num_tokens, head_dim / 2]
    const int64_t *pages, *offsets;  // [num_tokens]
    int64_t num_tokens;
};

// Sizes of a layer's pages [num_pages, num_kept, 2, page_size, head_dim] and its heads. Pages hold the first KV heads; the
// others, if there are any, are elsewhere.
struct Pages {
    int64_t num_pages;
    int num_heads, num_kv_heads, num_kept, head_dim, page_size;
};

// The weights [head_dim] of the norm of each query and of each key; null if the model has no such norms.
template <class T>
struct HeadNorms {
    const T *query, *key;
    float eps;
};

// Rotates queries in place, and writes the rotated keys, and the values, to pages. `qkv` is [num_tokens, num_heads +
// 2 * num_kv_heads, head_dim]. Keys that are not written to pages are rotated in place. Returns false if a slot is outside of
// the pages.
template <class T>
ALONE bool rotate_and_write(T* qkv, T* kv, const Slots& slots, const Pages& size, const HeadNorms<T>& norms) {
    for (long t = 0; t < slots.num_tokens; t++) {
        const int64_t page = slots.pages[t], offset = slots.offsets[t];
        if (page < 0 || page >= size.num_pages || offset < 0 || offset >= size.page_size) return false;
    }
    const int head_dim = size.head_dim;
    const long row_elements = long(size.num_heads + 2 * size.num_kv_heads) * head_dim;
    const long half_head = long(size.page_size) * head_dim;  // the keys, or the values, of a head in a page
    divide_rows(slots.num_tokens, [&](long t) {
        const float *cos = slots.cos + t * (head_dim / 2), *sin = slots.sin + t * (head_dim / 2);
        T* head = qkv + t * row_elements;
        for (int h = 0; h < size.num_heads; h++, head += head_dim) {
            if (norms.query != nullptr) normalise(head, norms.query, head_dim, norms.eps, head);
            rotate(head, cos, sin, head_dim, head);
        }
        T* slot = kv + slots.pages[t] * size.num_kept * 2 * half_head + slots.offsets[t] * head_dim;
        for (int h = 0; h < size.num_kv_heads; h++, head += head_dim, slot += 2 * half_head) {
            if (norms.key != nullptr) normalise(head, norms.key, head_dim, norms.eps, head);
            rotate(head, cos, sin, head_dim, h < size.num_kept ? slot : head);
            if (h >= size.num_kept) continue;
            memcpy(slot + half_head, head + size.num_kv_heads * head_dim, head_dim * sizeof(T));
        }
    });
    return true;
}

}  // namespace
