// Products with a packed matrix of weights: y = x W^T, plus a bias, plus a residual.
//
// W [N, K] is packed as panels of PANEL of its rows, [N / PANEL][K][PANEL] words, so that the inner loop reads
// memory in order; the last panel is filled up with zeros. A panel stays in the processor's cache while all
// rows of x go over it. An element of y is the same whatever the number of rows.
//
// Owns: the arithmetic and the packed format. Does not know: layers; its caller has checked all sizes.
#pragma once

#include <algorithm>

#include "elementwise.h"
#include "tile_registers.h"

namespace {

constexpr int PANEL = TILE_VECTORS * WIDTH;
constexpr int LINES = PANEL * int(sizeof(word)) / 64;  // cache lines of one step of a panel
constexpr long ROWS_OF_BLOCK = 128;  // rows that one thread multiplies with a panel

template <class T>
struct Linear {
    const T* x;         // [num_rows, K]
    long num_words;     // K / PER_WORD
    const T* bias;      // [N], or null
    const T* residual;  // [num_rows, N], or null
    long num_columns;   // N
};

// Writes [PANEL] elements of y: the sums of a row, plus bias and residual, which may be null.
template <class T, class OUT>
INLINE void finish_row(Floats (&c)[TILE_VECTORS], const T* bias, const T* residual, OUT* y) {
    UNROLL for (int j = 0; j < TILE_VECTORS; j++) {
        if (bias != nullptr) c[j] = add(c[j], load_floats(bias + j * WIDTH));
        if (residual != nullptr) c[j] = add(c[j], load_floats(residual + j * WIDTH));
        store_floats(y + j * WIDTH, c[j]);
    }
}

// Multiplies ROWS rows of x with one panel: [ROWS][PANEL] of y. The rows of y and of the residual are `stride` elements apart.
template <class T, class OUT, int ROWS, int LINES_AHEAD>
ALONE void multiply_tile(const T* x, long num_words, const word* panel, const char* ahead, const T* bias, const T* residual, OUT* y,
                         long stride) {
    Floats c[ROWS][TILE_VECTORS];
    UNROLL for (int i = 0; i < ROWS; i++) {
        UNROLL for (int j = 0; j < TILE_VECTORS; j++) c[i][j] = zero();
    }
    multiply<T, LINES_AHEAD>(c, x, num_words, 1, panel, PANEL, num_words, ahead);
    UNROLL for (int i = 0; i < ROWS; i++) {
        finish_row(c[i], bias, residual == nullptr ? nullptr : residual + i * stride, y + i * stride);
    }
}

// The addresses that a tile reads and writes.
template <class T, class OUT>
struct Addresses {
    const T *x, *bias, *residual;
    OUT* y;
    long stride;
};

// The cache lines of the next panel that a tile prefetches in each of its steps: `count` lines from line `first` of the step on.
// All tiles of a part together prefetch the panel once.
struct Ahead {
    long first, count;

    // Returns the lines of tile number `tile` of `num_tiles`.
    static Ahead of(long tile, long num_tiles) {
        const long share = (LINES + num_tiles - 1) / num_tiles, first = std::min<long>(tile * share, LINES);
        return {first, std::min(share, LINES - first)};
    }
};

// Multiplies a tile of up to ROWS rows.
template <class T, class OUT, int COUNT, int ROWS = TILE_ROWS>
INLINE void multiply_up_to(const Addresses<T, OUT>& at, long num_rows, long num_words, const word* panel, const char* ahead) {
    if constexpr (ROWS > 0) {
        if (num_rows == ROWS) {
            multiply_tile<T, OUT, ROWS, COUNT>(at.x, num_words, panel, ahead, at.bias, at.residual, at.y, at.stride);
        } else {
            multiply_up_to<T, OUT, COUNT, ROWS - 1>(at, num_rows, num_words, panel, ahead);
        }
    }
}

// Multiplies up to TILE_ROWS rows with one panel, and prefetches lines of the panel `next`.
template <class T, class OUT, int COUNT = LINES>
INLINE void multiply_few(const Addresses<T, OUT>& at, long num_rows, const Ahead& ahead, long num_words, const word* panel,
                         const char* next) {
    if (ahead.count == COUNT) {
        multiply_up_to<T, OUT, COUNT>(at, num_rows, num_words, panel, next + ahead.first * num_words * 64);
    } else if constexpr (COUNT > 0) {
        multiply_few<T, OUT, COUNT - 1>(at, num_rows, ahead, num_words, panel, next);
    }
}

// Multiplies up to ROWS_AT_ONCE rows with one panel, with tile registers. `num_words` is a multiple of ROWS_AT_ONCE.
template <class T, class OUT>
ALONE void multiply_rows_on_tiles(const Addresses<T, OUT>& at, long num_rows, const Ahead& ahead, long num_words, const word* panel,
                                  const char* next) {
    alignas(64) float sums[ROWS_AT_ONCE<T> * PANEL];
    const char* fetched = next + ahead.first * num_words * 64;
    {
        const TileRegisters<T> registers(num_rows);
        multiply_tiles<TILE_VECTORS, false>(at.x, num_words, panel, PANEL, num_words, sums, PANEL, [&](long k) {
            for (long i = 0; i < ROWS_AT_ONCE<T> * ahead.count; i++) _mm_prefetch(fetched + (k * ahead.count + i) * 64, _MM_HINT_T1);
        });
    }
    for (long i = 0; i < num_rows; i++) {
        Floats c[TILE_VECTORS];
        UNROLL for (int j = 0; j < TILE_VECTORS; j++) c[j] = load(sums + i * PANEL + j * WIDTH);
        finish_row(c, at.bias, at.residual == nullptr ? nullptr : at.residual + i * at.stride, at.y + i * at.stride);
    }
}

// Multiplies up to ROWS_AT_ONCE rows with one panel, and prefetches lines of the panel `next`.
template <class T, class OUT>
INLINE void multiply_rows(const Addresses<T, OUT>& at, long num_rows, Ahead ahead, long num_words, const word* panel, const char* next) {
    if constexpr (ON_TILES<T>) {
        if (num_words % ROWS_AT_ONCE<T> == 0) return multiply_rows_on_tiles(at, num_rows, ahead, num_words, panel, next);
    }
    for (long row = 0; row < num_rows; row += TILE_ROWS, ahead.count = 0) {
        const T* residual = at.residual == nullptr ? nullptr : at.residual + row * at.stride;
        const Addresses<T, OUT> some = {at.x + row * num_words * PER_WORD<T>, at.bias, residual, at.y + row * at.stride, at.stride};
        multiply_few(some, std::min<long>(TILE_ROWS, num_rows - row), ahead, num_words, panel, next);
    }
}

// Multiplies rows as `multiply_rows` does, with a last panel that is not full. Memory beside the panel's columns is not touched.
template <class T, class OUT>
ALONE void multiply_part(const Addresses<T, OUT>& at, long num_columns, long num_rows, long num_words, const word* panel) {
    alignas(64) T bias[PANEL] = {}, residual[ROWS_AT_ONCE<T> * PANEL] = {};
    alignas(64) OUT y[ROWS_AT_ONCE<T> * PANEL];
    if (at.bias != nullptr) memcpy(bias, at.bias, num_columns * sizeof(T));
    for (long i = 0; at.residual != nullptr && i < num_rows; i++) {
        memcpy(residual + i * PANEL, at.residual + i * at.stride, num_columns * sizeof(T));
    }
    const Addresses<T, OUT> copy = {at.x, at.bias == nullptr ? nullptr : bias, at.residual == nullptr ? nullptr : residual, y, PANEL};
    multiply_rows(copy, num_rows, Ahead{0, 0}, num_words, panel, nullptr);
    for (long i = 0; i < num_rows; i++) memcpy(at.y + i * at.stride, y + i * PANEL, num_columns * sizeof(OUT));
}

// A part of a product: rows [first, end) times one panel. `next` is the panel that this thread needs afterwards.
template <class T>
struct Part {
    long panel, next, first, end;

    long num_tiles() const { return (end - first + ROWS_AT_ONCE<T> - 1) / ROWS_AT_ONCE<T>; }
    // Returns the rows of each tile. All tiles have about the same size: a small tile waits for its sums, and cannot prefetch.
    long tile_rows() const { return (end - first + num_tiles() - 1) / num_tiles(); }
    // Returns the lines of the next panel that the tile beginning with `row` prefetches.
    Ahead ahead_of(long row) const {
        if (next == panel) return {0, 0};
        return Ahead::of((row - first) / tile_rows(), num_tiles());
    }
};

// Calls `multiply` for the parts of a whole product.
template <class T, class F>
INLINE void divide_product(long num_rows, long num_columns, F multiply) {
    const long num_panels = (num_columns + PANEL - 1) / PANEL, num_blocks = (num_rows + ROWS_OF_BLOCK - 1) / ROWS_OF_BLOCK;
    const long num_parts = num_panels * num_blocks;
    divide(num_parts, [&](long n, int step) {
        const long panel = n / num_blocks, first = n % num_blocks * ROWS_OF_BLOCK;
        const long next = 0 <= n + step && n + step < num_parts ? (n + step) / num_blocks : panel;
        multiply(Part<T>{panel, next, first, std::min(first + ROWS_OF_BLOCK, num_rows)});
    });
}

template <class T, class OUT>
ALONE void multiply_all(const Linear<T>& s, const word* packed, long num_rows, OUT* y) {
    const long panel_words = s.num_words * PANEL;
    divide_product<T>(num_rows, s.num_columns, [&](const Part<T>& part) {
        const word* panel = packed + part.panel * panel_words;
        const char* next = (const char*)(packed + part.next * panel_words);
        const long column = part.panel * PANEL, num_columns = std::min<long>(PANEL, s.num_columns - column);
        for (long row = part.first; row < part.end; row += part.tile_rows()) {
            const long rows = std::min(part.tile_rows(), part.end - row);
            const long first = row * s.num_columns + column;
            const Addresses<T, OUT> at = {
                s.x + row * s.num_words * PER_WORD<T>,
                s.bias == nullptr ? nullptr : s.bias + column,
                s.residual == nullptr ? nullptr : s.residual + first,
                y + first,
                s.num_columns,
            };
            if (num_columns == PANEL) {
                multiply_rows(at, rows, part.ahead_of(row), s.num_words, panel, next);
            } else {
                multiply_part(at, num_columns, rows, s.num_words, panel);
            }
        }
    });
}

// The two halves of a gated product: silu(x G^T) * (x U^T), with biases.
template <class T>
struct Gated {
    const T* x;          // [num_rows, K]
    long num_words;      // K / PER_WORD
    const word *gate, *up;
    const T *gate_bias, *up_bias;  // [N], or null
    long num_columns;    // N
};

// Both products of a tile stay in the processor's cache until they are multiplied.
template <class T>
ALONE void multiply_gated(const Gated<T>& s, long num_rows, T* y) {
    const long panel_words = s.num_words * PANEL;
    divide_product<T>(num_rows, s.num_columns, [&](const Part<T>& part) {
        alignas(64) float gates[ROWS_AT_ONCE<T> * PANEL], ups[ROWS_AT_ONCE<T> * PANEL];
        alignas(64) T narrow[PANEL];
        alignas(64) T gate_bias[PANEL] = {}, up_bias[PANEL] = {};
        const long column = part.panel * PANEL, num_columns = std::min<long>(PANEL, s.num_columns - column);
        if (s.gate_bias != nullptr) memcpy(gate_bias, s.gate_bias + column, num_columns * sizeof(T));
        if (s.up_bias != nullptr) memcpy(up_bias, s.up_bias + column, num_columns * sizeof(T));
        const word *gate = s.gate + part.panel * panel_words, *up = s.up + part.panel * panel_words;
        const char *next_gate = (const char*)(s.gate + part.next * panel_words), *next_up = (const char*)(s.up + part.next * panel_words);
        for (long row = part.first; row < part.end; row += part.tile_rows()) {
            const T* x = s.x + row * s.num_words * PER_WORD<T>;
            const long rows = std::min(part.tile_rows(), part.end - row);
            const Ahead ahead = part.ahead_of(row);
            const Addresses<T, float> left = {x, s.gate_bias == nullptr ? nullptr : gate_bias, nullptr, gates, PANEL};
            const Addresses<T, float> right = {x, s.up_bias == nullptr ? nullptr : up_bias, nullptr, ups, PANEL};
            multiply_rows(left, rows, ahead, s.num_words, gate, next_gate);
            multiply_rows(right, rows, ahead, s.num_words, up, next_up);
            for (long i = 0; i < rows; i++) {
                T* to = num_columns == PANEL ? y + (row + i) * s.num_columns + column : narrow;
                UNROLL for (int j = 0; j < PANEL; j += WIDTH) {
                    store_floats(to + j, silu_mul<T>(load(gates + i * PANEL + j), load(ups + i * PANEL + j)));
                }
                if (to == narrow) memcpy(y + (row + i) * s.num_columns + column, narrow, num_columns * sizeof(T));
            }
        }
    });
}

template <class T>
ALONE void pack(const T* weights, long num_columns, long depth, word* packed) {
    const long num_words = depth / PER_WORD<T>, num_panels = (num_columns + PANEL - 1) / PANEL;
    for (long p = 0; p < num_panels; p++) {
        for (long k = 0; k < num_words; k++) {
            for (long c = 0; c < PANEL; c++) {
                const long column = p * PANEL + c;
                word x = 0;
                if (column < num_columns) memcpy(&x, weights + column * depth + k * PER_WORD<T>, sizeof x);
                packed[(p * num_words + k) * PANEL + c] = x;
            }
        }
    }
}

// Copies the rows `ids` of the packed W to `rows`, as an embedding does.
template <class T>
ALONE void unpack(const word* packed, long depth, const int64_t* ids, long num_ids, T* rows) {
    const long num_words = depth / PER_WORD<T>;
    for (long i = 0; i < num_ids; i++) {
        const word* source = packed + ids[i] / PANEL * num_words * PANEL + ids[i] % PANEL;
        for (long k = 0; k < num_words; k++) {
            memcpy(rows + i * depth + k * PER_WORD<T>, source + k * PANEL, sizeof(word));
        }
    }
}

// Returns the number of words of a packed matrix.
INLINE int64_t count_words(int64_t num_columns, int64_t num_words) {
    return (num_columns + PANEL - 1) / PANEL * PANEL * num_words;
}

}  // namespace
