// Tile registers (AMX), which multiply up to 16 rows of 16 words with 16 words of 16 columns in one instruction.
//
// An element of a product is summed in the order of the words. The order depends neither on the number of other rows and
// columns, nor on which of the two matrices is the left one.
//
// Owns: the registers. Does not know: what is multiplied.
#pragma once

#include "simd.h"

namespace {

// Whether products of T use tile registers.
template <class T>
constexpr bool ON_TILES = false;

// Rows that are multiplied at a time.
template <class T>
constexpr int ROWS_AT_ONCE = TILE_ROWS;

// Configures this thread's tile registers for a number of left rows, until the object is destroyed.
template <class T>
struct TileRegisters {
    explicit TileRegisters(long) {}
};

#ifdef __AMX_BF16__
constexpr int TILE_SIDE = 16;  // rows of a tile, and words of each

template <>
constexpr bool ON_TILES<bf16> = true;

template <>
constexpr int ROWS_AT_ONCE<bf16> = TILE_SIDE;

// The operand of LDTILECFG: the sums are in tiles 0 to 3, the left rows in tile 4, the right words in tile 5.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t num_row_bytes[16] = {};
    uint8_t num_rows[16] = {};

    explicit TileShapes(long num_left_rows) {
        for (int tile = 0; tile < 6; tile++) {
            num_row_bytes[tile] = 64;
            num_rows[tile] = tile < 5 ? num_left_rows : TILE_SIDE;
        }
    }
};

template <>
struct TileRegisters<bf16> {
    explicit TileRegisters(long num_left_rows) {
        const TileShapes shapes(num_left_rows);
        _tile_loadconfig(&shapes);
    }
    TileRegisters(const TileRegisters&) = delete;
    ~TileRegisters() { _tile_release(); }
};

// Computes the sum over k < depth of rows[i][k] * panel[k][j], and stores it in sums[i][j], or adds it there if ADDS. There are as
// many rows i as the registers have, and VECTORS * TILE_SIDE columns j. Depth, a multiple of TILE_SIDE, and the strides of rows and
// panel count words; `sums_stride` counts floats. Calls `before_step(k)` every TILE_SIDE words.
template <int VECTORS, bool ADDS, class F = void (*)(long)>
INLINE void multiply_tiles(const void* rows, long row_stride, const word* panel, long panel_stride, long depth, float* sums,
                           long sums_stride, F before_step = [](long) {}) {
    static_assert(VECTORS <= 4 && WIDTH == TILE_SIDE);
    constexpr long bytes = sizeof(word);
    if constexpr (ADDS) {
        _tile_loadd(0, sums, sums_stride * bytes);
        if constexpr (VECTORS > 1) _tile_loadd(1, sums + WIDTH, sums_stride * bytes);
        if constexpr (VECTORS > 2) _tile_loadd(2, sums + 2 * WIDTH, sums_stride * bytes);
        if constexpr (VECTORS > 3) _tile_loadd(3, sums + 3 * WIDTH, sums_stride * bytes);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (long k = 0; k < depth; k += TILE_SIDE) {
        const word* right = panel + k * panel_stride;
        before_step(k);
        _tile_loadd(4, (const char*)rows + k * bytes, row_stride * bytes);
        _tile_loadd(5, right, panel_stride * bytes);
        _tile_dpbf16ps(0, 4, 5);
        if constexpr (VECTORS > 1) {
            _tile_loadd(5, right + WIDTH, panel_stride * bytes);
            _tile_dpbf16ps(1, 4, 5);
        }
        if constexpr (VECTORS > 2) {
            _tile_loadd(5, right + 2 * WIDTH, panel_stride * bytes);
            _tile_dpbf16ps(2, 4, 5);
        }
        if constexpr (VECTORS > 3) {
            _tile_loadd(5, right + 3 * WIDTH, panel_stride * bytes);
            _tile_dpbf16ps(3, 4, 5);
        }
    }
    _tile_stored(0, sums, sums_stride * bytes);
    if constexpr (VECTORS > 1) _tile_stored(1, sums + WIDTH, sums_stride * bytes);
    if constexpr (VECTORS > 2) _tile_stored(2, sums + 2 * WIDTH, sums_stride * bytes);
    if constexpr (VECTORS > 3) _tile_stored(3, sums + 3 * WIDTH, sums_stride * bytes);
}
#else
template <int VECTORS, bool ADDS, class F = void (*)(long)>
void multiply_tiles(const void*, long, const word*, long, long, float*, long, F = nullptr) = delete;
#endif

}  // namespace
