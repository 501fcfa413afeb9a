// Attention for few queries: the keys of a block lie in the lanes of the vectors, the heads of a group are rows.
//
// Owns: one query on its way over the blocks of keys, and the prefetches meanwhile. Does not know: batches.
#pragma once

#include <type_traits>

#include "attention_blocks.h"

namespace {

// Heads of a query that are multiplied at a time.
template <class T>
constexpr int HEADS_AT_ONCE = ON_TILES<T> ? ROWS_AT_ONCE<T> : FEW_ROWS;
// Heads for which a block of keys is prepared once.
template <class T>
constexpr int MOST_HEADS = ON_TILES<T> ? ROWS_AT_ONCE<T> : 64;

template <class T, int D>
struct FewMemory {
    alignas(64) word keys[D / PER_WORD<T>][KEYS];
    alignas(64) word values[KEYS / PER_WORD<T>][D];
    alignas(64) float scores[HEADS_AT_ONCE<T>][KEYS];
    alignas(64) T weights[HEADS_AT_ONCE<T>][KEYS];
    float corrections[HEADS_AT_ONCE<T>];
};

// Packs a block's keys into words, transposed; words behind the last key may be anything. Prefetches the keys of `next`.
template <class T, int D>
INLINE void pack_keys(const Block<T, D>& block, const Block<T, D>& next, FewMemory<T, D>& memory) {
    alignas(64) static const T none[D] = {};
    for (int k = 0; k < KEYS; k += WIDTH) {
        for (int i = k; i < std::min(k + WIDTH, next.num_keys); i++) prefetch_row<T, D>(next.keys[i]);
        if (k >= block.num_keys) continue;
        const T* source[WIDTH];
        for (int i = 0; i < WIDTH; i++) source[i] = k + i < block.num_keys ? block.keys[k + i] : none;
        for (int d = 0; d < D / PER_WORD<T>; d += WIDTH) {
            Words r[WIDTH];
            UNROLL for (int i = 0; i < WIDTH; i++) r[i] = load_words(source[i] + d * PER_WORD<T>);
            transpose(r);
            UNROLL for (int i = 0; i < WIDTH; i++) store_words(&memory.keys[d + i][k], r[i]);
        }
    }
}

// Computes the scores of HEADS heads.
template <class T, int D, int HEADS>
ALONE void score_few(const T* query, FewMemory<T, D>& memory) {
    constexpr int WORDS = D / PER_WORD<T>;
    static_assert(KEYS % (FEW_VECTORS * WIDTH) == 0, "else the last store is behind a row of scores");
    for (int k = 0; k < KEYS; k += FEW_VECTORS * WIDTH) {
        Floats c[HEADS][FEW_VECTORS];
        UNROLL for (int i = 0; i < HEADS; i++) {
            UNROLL for (int j = 0; j < FEW_VECTORS; j++) c[i][j] = zero();
        }
        multiply<T>(c, query, WORDS, 1, &memory.keys[0][k], KEYS, WORDS);
        UNROLL for (int i = 0; i < HEADS; i++) {
            UNROLL for (int j = 0; j < FEW_VECTORS; j++) store(&memory.scores[i][k + j * WIDTH], c[i][j]);
        }
    }
}

// Multiplies the sums of HEADS heads by their corrections (`soften_head`), and adds the weighted values.
template <class T, int D, int HEADS>
ALONE void add_few(int num_words, const FewMemory<T, D>& memory, float (*out)[D]) {
    constexpr int VECTORS = D / WIDTH % FEW_VECTORS == 0 ? FEW_VECTORS : 3;
    for (int d = 0; d < D; d += VECTORS * WIDTH) {
        Floats c[HEADS][VECTORS];
        UNROLL for (int i = 0; i < HEADS; i++) {
            UNROLL for (int j = 0; j < VECTORS; j++) c[i][j] = mul(load(out[i] + d + j * WIDTH), set(memory.corrections[i]));
        }
        multiply<T>(c, memory.weights, KEYS / PER_WORD<T>, 1, &memory.values[0][d], D, num_words);
        UNROLL for (int i = 0; i < HEADS; i++) {
            UNROLL for (int j = 0; j < VECTORS; j++) store(out[i] + d + j * WIDTH, c[i][j]);
        }
    }
}

// Calls `f` with `num_heads`, which is at most HEADS, as a constant.
template <int HEADS, class F>
INLINE void with_heads(int num_heads, F f) {
    if constexpr (HEADS == 1) {
        f(std::integral_constant<int, 1>());
    } else if (num_heads == HEADS) {
        f(std::integral_constant<int, HEADS>());
    } else {
        with_heads<HEADS - 1>(num_heads, f);
    }
}

// Computes the scores of up to HEADS_AT_ONCE heads.
template <class T, int D>
INLINE void score_heads(const T* query, int num_heads, FewMemory<T, D>& memory) {
    if constexpr (ON_TILES<T>) {
        constexpr int WORDS = D / PER_WORD<T>;
        multiply_tiles<KEYS / WIDTH, false>(query, WORDS, memory.keys[0], KEYS, WORDS, memory.scores[0], KEYS);
    } else {
        with_heads<FEW_ROWS>(num_heads, [&](auto heads) { score_few<T, D, heads>(query, memory); });
    }
}

// Multiplies the sums of up to HEADS_AT_ONCE heads by their corrections (`soften_head`), and adds the weighted values of the first
// `num_keys` keys.
template <class T, int D>
INLINE void add_values_of_heads(int num_heads, int num_keys, const FewMemory<T, D>& memory, float (*out)[D]) {
    if constexpr (ON_TILES<T>) {
        constexpr int VECTORS = D / WIDTH % 4 == 0 ? 4 : 3;
        for (int i = 0; i < num_heads; i++) {
            for (int d = 0; d < D; d += WIDTH) store(out[i] + d, mul(load(out[i] + d), set(memory.corrections[i])));
        }
        const int num_words = (num_keys + KEYS_AT_ONCE<T> - 1) / KEYS_AT_ONCE<T> * KEYS_AT_ONCE<T> / PER_WORD<T>;
        for (int d = 0; d < D; d += VECTORS * WIDTH) {
            multiply_tiles<VECTORS, true>(memory.weights, KEYS / PER_WORD<T>, &memory.values[0][d], D, num_words, out[0] + d, D);
        }
    } else {
        const int num_words = (num_keys + PER_WORD<T> - 1) / PER_WORD<T>;
        with_heads<FEW_ROWS>(num_heads, [&](auto heads) { add_few<T, D, heads>(num_words, memory, out); });
    }
}

// Turns a head's scores into weights of the values, and computes the head's correction: the factor by which the sums over earlier
// keys are multiplied, because the running maximum has grown.
template <class T, int D>
ALONE void soften_head(int head, float scale_log2, FewMemory<T, D>& memory, float& maximum, float& total) {
    float* scores = memory.scores[head];
    Floats highest = load(scores);
    UNROLL for (int k = WIDTH; k < KEYS; k += WIDTH) highest = max(highest, load(scores + k));
    const float before = maximum;
    maximum = std::max(before, largest(highest));
    const Floats scale = set(scale_log2), shift = mul(set(maximum), set(-scale_log2));
    __m256 totals = _mm256_setzero_ps();
    UNROLL for (int k = 0; k < KEYS; k += WIDTH) {
        Floats weight = exp2_of<T>(fma(load(scores + k), scale, shift));
        add_eight(totals, weight);
        store_floats(&memory.weights[head][k], weight);
    }
    const Floats correction = exp2_of<T>(mul(sub(set(before), set(maximum)), scale));
    store(scores, fma(set(total), correction, set(sum(totals))));
    total = scores[0];
    store(scores, correction);
    memory.corrections[head] = scores[0];
}

// Attends to one block of keys, which begins at position `key`. The query sees the positions [first, last]. out[i] has the sums of
// head i over the earlier blocks.
template <class T, int D>
INLINE void attend_few(const T* query, int num_heads, int key, int first, int last, float scale_log2, FewMemory<T, D>& memory,
                       float (*out)[D], float* maximum, float* total) {
    score_heads(query, num_heads, memory);
    for (int i = 0; i < num_heads; i++) {
        float* scores = memory.scores[i];
        if (key < first) std::fill(scores, scores + (first - key), -INFINITY);
        if (key + KEYS - 1 > last) std::fill(scores + (last + 1 - key), scores + KEYS, -INFINITY);
        soften_head(i, scale_log2, memory, maximum[i], total[i]);
    }
    add_values_of_heads(num_heads, std::min(KEYS, last + 1 - key), memory, out);
}

// Computes one query of a sequence. Pages are scattered, so the processor cannot guess the next address: each block is
// prefetched while the previous one is computed. `after` is the first block of the next query.
template <class T, int D>
ALONE void attend_one(const Sequence<T, D>& s, int row, const Block<T, D>& after) {
    FewMemory<T, D> memory;
    alignas(64) float out[MOST_HEADS<T>][D];
    float maximum[MOST_HEADS<T>], total[MOST_HEADS<T>];
    const int position = s.start + row, last = std::min(position, s.num_keys - 1), first = std::max(0, position - s.window + 1);
    const T* query = s.query + row * s.query_stride;
    for (int begin = 0; begin < s.group; begin += MOST_HEADS<T>) {
        const int num_heads = std::min(MOST_HEADS<T>, s.group - begin);
        const int num_rounds = (num_heads + HEADS_AT_ONCE<T> - 1) / HEADS_AT_ONCE<T>;
        const int heads_at_once = (num_heads + num_rounds - 1) / num_rounds;
        const TileRegisters<T> registers(num_heads);
        memset(out, 0, sizeof out[0] * num_heads);
        std::fill(maximum, maximum + num_heads, LOWEST);
        std::fill(total, total + num_heads, 0.0f);
        Block<T, D> blocks[2];
        Block<T, D>::find(s.rows, first / KEYS * KEYS, last + 1, blocks[0]);
        for (int key = first / KEYS * KEYS, number = 0; key <= last; key += KEYS, number++) {
            const Block<T, D>& block = blocks[number % 2];
            Block<T, D>& next = blocks[(number + 1) % 2];
            Block<T, D>::find(s.rows, key + KEYS, last + 1, next);
            const Block<T, D>& fetched = next.num_keys > 0 ? next : after;
            pack_keys(block, fetched, memory);
            pack_values(block, fetched, memory.values[0]);
            for (int h = 0; h < num_heads; h += heads_at_once) {
                attend_few(query + (begin + h) * D, std::min(heads_at_once, num_heads - h), key, first, last, s.scale_log2, memory,
                           out + h, maximum + h, total + h);
            }
        }
        for (int h = 0; h < num_heads; h++) {
            T* to = s.out + row * s.out_stride + (begin + h) * D;
            const Floats inverse = total[h] > 0.0f ? div(set(1.0f), set(total[h])) : zero();
            for (int d = 0; d < D; d += WIDTH) store_floats(to + d, mul(load(out[h] + d), inverse));
            if (s.lse != nullptr) {
                s.lse[row * s.lse_stride + begin + h] = LN_2 * s.scale_log2 * maximum[h] + logf(total[h]);
            }
        }
    }
}

}  // namespace
