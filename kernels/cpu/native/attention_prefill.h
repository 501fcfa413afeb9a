// Attention for chunks of a prompt: COLUMNS pairs of query and head lie in the lanes of the vectors.
//
// Owns: a tile of queries on its way over the blocks of keys. Does not know: batches.
#pragma once

#include "attention_blocks.h"

namespace {

template <class T, int D>
struct Tile {
    alignas(64) word query[D / PER_WORD<T>][COLUMNS];
    alignas(64) float out[D][COLUMNS];
    alignas(64) float maximum[COLUMNS], total[COLUMNS];
    alignas(64) float position[COLUMNS];  // the position of each column's query: exact up to 2^24
    int first, last;                      // positions of the tile's first and last query
};

template <class T, int D>
struct PrefillMemory {
    Tile<T, D> tiles[TILES];
    alignas(64) word values[KEYS / PER_WORD<T> * D];  // with tile registers the words of a dimension lie side by side
    alignas(64) float scores[KEYS][COLUMNS];
    alignas(64) word weights[KEYS / PER_WORD<T>][COLUMNS];
    alignas(64) float corrections[COLUMNS];
    alignas(64) T few_keys[ROWS_AT_ONCE<T>][D];
};

// Column c of a sequence is head `c % group` of query `c / group`. If the tile goes beyond the
// sequence's last column, the tile's further columns repeat the last column.
template <class T, int D>
ALONE void load_tile(const Sequence<T, D>& s, int column, Tile<T, D>& tile) {
    const int num_columns = s.num_queries * s.group;
    const T* source[COLUMNS];
    for (int i = 0; i < COLUMNS; i++) {
        int c = std::min(column + i, num_columns - 1);
        source[i] = s.query + c / s.group * s.query_stride + c % s.group * D;
        tile.position[i] = float(s.start + c / s.group);
    }
    tile.first = s.start + column / s.group;
    tile.last = s.start + (std::min(column + COLUMNS, num_columns) - 1) / s.group;
    for (int v = 0; v < COLUMNS; v += WIDTH) {
        for (int d = 0; d < D / PER_WORD<T>; d += WIDTH) {
            Words r[WIDTH];
            UNROLL for (int i = 0; i < WIDTH; i++) r[i] = load_words(source[v + i] + d * PER_WORD<T>);
            transpose(r);
            UNROLL for (int i = 0; i < WIDTH; i++) store_words(&tile.query[d + i][v], r[i]);
        }
        store(&tile.maximum[v], set(LOWEST));
        store(&tile.total[v], zero());
    }
    memset(tile.out, 0, sizeof tile.out);
}

template <class T, int D>
ALONE void store_tile(const Sequence<T, D>& s, int column, const Tile<T, D>& tile) {
    const int num_columns = s.num_queries * s.group;
    for (int v = 0; v < COLUMNS; v += WIDTH) {
        const Floats total = load(&tile.total[v]), inverse = if_less(zero(), total, div(set(1.0f), total), zero());
        for (int d = 0; d < D; d += WIDTH) {
            Words r[WIDTH];
            UNROLL for (int i = 0; i < WIDTH; i++) r[i] = as_words(mul(load(&tile.out[d + i][v]), inverse));
            transpose(r);
            for (int i = 0; i < WIDTH && column + v + i < num_columns; i++) {
                int c = column + v + i;
                store_floats(s.out + c / s.group * s.out_stride + c % s.group * D + d, as_floats(r[i]));
            }
        }
    }
    if (s.lse == nullptr) return;
    for (int i = 0; i < COLUMNS && column + i < num_columns; i++) {
        int c = column + i;
        s.lse[c / s.group * s.lse_stride + c % s.group] =
            LN_2 * s.scale_log2 * tile.maximum[i] + logf(tile.total[i]);
    }
}

// Computes the scores of ROWS_AT_ONCE keys.
template <class T, int D>
ALONE void score_rows(const T* keys, const word* query, float* scores) {
    if constexpr (ON_TILES<T>) {
        multiply_tiles<TILE_VECTORS, false>(keys, D / PER_WORD<T>, query, COLUMNS, D / PER_WORD<T>, scores, COLUMNS);
    } else {
        Floats c[TILE_ROWS][TILE_VECTORS];
        UNROLL for (int i = 0; i < TILE_ROWS; i++) {
            UNROLL for (int j = 0; j < TILE_VECTORS; j++) c[i][j] = zero();
        }
        multiply<T>(c, keys, D / PER_WORD<T>, 1, query, COLUMNS, D / PER_WORD<T>);
        UNROLL for (int i = 0; i < TILE_ROWS; i++) {
            UNROLL for (int j = 0; j < TILE_VECTORS; j++) store(scores + i * COLUMNS + j * WIDTH, c[i][j]);
        }
    }
}

// Packs the values of a block for `add_values`.
template <class T, int D>
ALONE void load_values(const Block<T, D>& block, word* values) {
    constexpr int NUM_WORDS = KEYS / PER_WORD<T>;
    Block<T, D> none;
    none.num_keys = 0;
    if constexpr (ON_TILES<T>) {
        alignas(64) word packed[NUM_WORDS][D];
        pack_values(block, none, packed[0]);
        for (int k = 0; k < NUM_WORDS; k += WIDTH) {
            for (int d = 0; d < D; d += WIDTH) {
                Words r[WIDTH];
                UNROLL for (int i = 0; i < WIDTH; i++) r[i] = load_words(&packed[k + i][d]);
                transpose(r);
                UNROLL for (int i = 0; i < WIDTH; i++) store_words(values + (d + i) * NUM_WORDS + k, r[i]);
            }
        }
    } else {
        pack_values(block, none, values);
    }
}

// Multiplies ROWS_AT_ONCE dimensions of the sums, from dimension `d` on, by the columns' corrections (`memory.corrections`), and
// adds the weighted values of `num_keys` keys.
template <class T, int D>
ALONE void add_values(int d, int num_keys, PrefillMemory<T, D>& memory, float* out) {
    const int num_words = num_keys / PER_WORD<T>;
    if constexpr (ON_TILES<T>) {
        for (int v = 0; v < COLUMNS; v += WIDTH) {
            const Floats correction = load(memory.corrections + v);
            UNROLL for (int i = 0; i < ROWS_AT_ONCE<T>; i++) {
                store(out + i * COLUMNS + v, mul(load(out + i * COLUMNS + v), correction));
            }
        }
        multiply_tiles<TILE_VECTORS, true>(memory.values + d * (KEYS / PER_WORD<T>), KEYS / PER_WORD<T>, memory.weights[0], COLUMNS,
                                           num_words, out, COLUMNS);
    } else {
        Floats c[TILE_ROWS][TILE_VECTORS];
        UNROLL for (int i = 0; i < TILE_ROWS; i++) {
            UNROLL for (int j = 0; j < TILE_VECTORS; j++) {
                c[i][j] = mul(load(out + i * COLUMNS + j * WIDTH), load(memory.corrections + j * WIDTH));
            }
        }
        multiply<T>(c, memory.values + d, 1, D, memory.weights[0], COLUMNS, num_words);
        UNROLL for (int i = 0; i < TILE_ROWS; i++) {
            UNROLL for (int j = 0; j < TILE_VECTORS; j++) store(out + i * COLUMNS + j * WIDTH, c[i][j]);
        }
    }
}

// Computes the scores of the first `num_keys` keys of a block, a multiple of ROWS_AT_ONCE. Scores behind the block's last key
// may be anything.
template <class T, int D>
INLINE void score_tile(const Block<T, D>& block, int page_size, int num_keys, const Tile<T, D>& tile,
                       PrefillMemory<T, D>& memory) {
    const bool is_whole = page_size % ROWS_AT_ONCE<T> == 0;
    for (int k = 0; k < num_keys; k += ROWS_AT_ONCE<T>) {
        const T* rows = block.keys[k];
        if (!is_whole) {
            for (int i = 0; i < ROWS_AT_ONCE<T> && k + i < block.num_keys; i++) {
                memcpy(memory.few_keys[i], block.keys[k + i], sizeof memory.few_keys[i]);
            }
            rows = memory.few_keys[0];
        }
        score_rows<T, D>(rows, tile.query[0], memory.scores[k]);
    }
}

// Hides from each query the keys behind the query's position, before its window, and behind `last_key`.
template <class T, int D>
INLINE void hide_keys(int window, int key, int num_keys, int last_key, const Tile<T, D>& tile, PrefillMemory<T, D>& memory) {
    const int begin = key <= tile.last - window ? 0 : std::max(0, std::min(tile.first, last_key) + 1 - key);
    for (int v = 0; v < COLUMNS; v += WIDTH) {
        const Floats query = load(&tile.position[v]), first = sub(query, set(float(window - 1)));
        const Floats last = min(query, set(float(last_key)));
        for (int k = begin; k < num_keys; k++) {
            const Floats position = set(float(key + k)), hidden = set(-INFINITY);
            Floats score = load(&memory.scores[k][v]);
            score = if_less(position, first, hidden, if_less(last, position, hidden, score));
            store(&memory.scores[k][v], score);
        }
    }
}

// Turns scores into weights of the values, and computes the factors for the sums so far. `num_keys` is a multiple of
// KEYS_AT_ONCE.
template <class T, int D>
ALONE void soften(int v, int num_keys, float scale_log2, Tile<T, D>& tile, PrefillMemory<T, D>& memory) {
    Floats before = load(&tile.maximum[v]), maximum = before, other = before;
    for (int k = 0; k < num_keys; k += 2) {
        maximum = max(maximum, load(&memory.scores[k][v]));
        other = max(other, load(&memory.scores[k + 1][v]));
    }
    maximum = max(maximum, other);
    const Floats scale = set(scale_log2), shift = mul(maximum, set(-scale_log2));
    Floats totals[SUMS];
    UNROLL for (int i = 0; i < SUMS; i++) totals[i] = zero();
    for (int k = 0; k < num_keys; k += SUMS) {
        UNROLL for (int i = 0; i < SUMS; i += PER_WORD<T>) {
            Floats a = exp2_of<T>(fma(load(&memory.scores[k + i][v]), scale, shift));
            totals[i] = add(totals[i], a);
            if constexpr (PER_WORD<T> == 1) {
                store((float*)&memory.weights[k + i][v], a);
            } else {
                Floats b = exp2_of<T>(fma(load(&memory.scores[k + i + 1][v]), scale, shift));
                totals[i + 1] = add(totals[i + 1], b);
                store_words(&memory.weights[(k + i) / PER_WORD<T>][v], pair(a, b));
            }
        }
    }
    UNROLL for (int half = SUMS / 2; half > 0; half /= 2) {  // the order of `sum`
        UNROLL for (int i = 0; i < half; i++) totals[i] = add(totals[i], totals[i + half]);
    }
    const Floats correction = exp2_of<T>(mul(sub(before, maximum), scale));
    store(&memory.corrections[v], correction);
    store(&tile.maximum[v], maximum);
    store(&tile.total[v], fma(load(&tile.total[v]), correction, totals[0]));
}

template <class T, int D>
INLINE void attend_tile(const Sequence<T, D>& s, const Block<T, D>& block, int key, Tile<T, D>& tile, PrefillMemory<T, D>& memory) {
    const auto rounded = [](int n, int step) { return (n + step - 1) / step * step; };
    const int last_key = s.num_keys - 1;
    const int num_seen = std::min(KEYS, std::min(tile.last, last_key) + 1 - key), num_keys = rounded(num_seen, KEYS_AT_ONCE<T>);
    score_tile(block, s.rows.page_size, rounded(num_seen, ROWS_AT_ONCE<T>), tile, memory);
    if (key + num_keys - 1 > std::min(tile.first, last_key) || key <= tile.last - s.window) {
        hide_keys(s.window, key, num_keys, last_key, tile, memory);
    }
    for (int v = 0; v < COLUMNS; v += WIDTH) soften(v, num_keys, s.scale_log2, tile, memory);
    const int num_added = ON_TILES<T> ? num_keys : rounded(num_seen, PER_WORD<T>);
    for (int d = 0; d < D; d += ROWS_AT_ONCE<T>) add_values(d, num_added, memory, tile.out[d]);
}

// Computes the columns [column, column + TILES * COLUMNS) of a sequence.
template <class T, int D>
ALONE void prefill(const Sequence<T, D>& s, int column) {
    const TileRegisters<T> registers(ROWS_AT_ONCE<T>);
    PrefillMemory<T, D> memory;
    Block<T, D> block;
    const int num_columns = s.num_queries * s.group;
    const int num_tiles = std::min(TILES, (num_columns - column + COLUMNS - 1) / COLUMNS);
    for (int t = 0; t < num_tiles; t++) load_tile(s, column + t * COLUMNS, memory.tiles[t]);
    const int end = std::min(memory.tiles[num_tiles - 1].last + 1, s.num_keys);
    const int first = std::max(0, memory.tiles[0].first - s.window + 1);
    for (int key = first / KEYS * KEYS; key < end; key += KEYS) {
        Block<T, D>::find(s.rows, key, std::min(s.start + s.num_queries, s.num_keys), block);
        load_values(block, memory.values);
        for (int t = 0; t < num_tiles; t++) {
            Tile<T, D>& tile = memory.tiles[t];
            if (key <= tile.last && key + KEYS > tile.first - s.window + 1) attend_tile(s, block, key, tile, memory);
        }
    }
    for (int t = 0; t < num_tiles; t++) store_tile(s, column + t * COLUMNS, memory.tiles[t]);
}

}  // namespace
