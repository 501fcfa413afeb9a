// Attention for few queries: the keys of a block lie in the lanes of the vectors, the heads of a group are rows.
//
// Owns: one query on its way over the blocks of keys, and what is fetched meanwhile. Does not know: batches.
#pragma once

#include "attention_blocks.h"

namespace {

template <class T, int D>
struct FewMemory {
    alignas(64) word keys[D / PER_WORD<T>][KEYS];
    alignas(64) word values[KEYS / PER_WORD<T>][D];
    alignas(64) float scores[FEW_ROWS][KEYS];
    alignas(64) T weights[FEW_ROWS][KEYS];
};

// Words of a block's keys, transposed; what stands for unseen ones does not matter. Fetches the keys of `next`.
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

// out[i] holds the sums of head i so far: [HEADS][D].
template <class T, int D, int HEADS>
ALONE void attend_few(const T* query, int key, int first, int last, float scale_log2, FewMemory<T, D>& memory,
                       float* out, float* maximum, float* total) {
    constexpr int VECTORS = D / WIDTH % FEW_VECTORS == 0 ? FEW_VECTORS : 3;
    constexpr int WORDS = D / PER_WORD<T>;
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
    float corrections[HEADS];
    for (int i = 0; i < HEADS; i++) {
        float* scores = memory.scores[i];
        if (key < first) std::fill(scores, scores + (first - key), -INFINITY);
        if (key + KEYS - 1 > last) std::fill(scores + (last + 1 - key), scores + KEYS, -INFINITY);
        Floats highest = load(scores);
        UNROLL for (int k = WIDTH; k < KEYS; k += WIDTH) highest = max(highest, load(scores + k));
        const float before = maximum[i];
        maximum[i] = std::max(before, largest(highest));
        const Floats scale = set(scale_log2), shift = mul(set(maximum[i]), set(-scale_log2));
        __m256 totals = _mm256_setzero_ps();
        UNROLL for (int k = 0; k < KEYS; k += WIDTH) {
            Floats weight = exp2_of<T>(fma(load(scores + k), scale, shift));
            add_eight(totals, weight);
            store_floats(&memory.weights[i][k], weight);
        }
        const Floats correction = exp2_of<T>(mul(sub(set(before), set(maximum[i])), scale));
        store(scores, fma(set(total[i]), correction, set(sum(totals))));
        total[i] = scores[0];
        store(scores, correction);
        corrections[i] = scores[0];
    }
    const int num_words = (std::min(KEYS, last + 1 - key) + PER_WORD<T> - 1) / PER_WORD<T>;
    for (int d = 0; d < D; d += VECTORS * WIDTH) {
        Floats c[HEADS][VECTORS];
        UNROLL for (int i = 0; i < HEADS; i++) {
            UNROLL for (int j = 0; j < VECTORS; j++) {
                c[i][j] = mul(load(out + i * D + d + j * WIDTH), set(corrections[i]));
            }
        }
        multiply<T>(c, memory.weights, KEYS / PER_WORD<T>, 1, &memory.values[0][d], D, num_words);
        UNROLL for (int i = 0; i < HEADS; i++) {
            UNROLL for (int j = 0; j < VECTORS; j++) store(out + i * D + d + j * WIDTH, c[i][j]);
        }
    }
}

// One query of a sequence. Pages are scattered, so that the processor does not guess what comes next: each block is
// fetched while the one before it is computed; `after` is what will be computed after this query.
template <class T, int D>
ALONE void attend_one(const Sequence<T, D>& s, int row, const Block<T, D>& after) {
    constexpr int MOST_HEADS = 64;
    FewMemory<T, D> memory;
    alignas(64) float out[MOST_HEADS][D];
    float maximum[MOST_HEADS], total[MOST_HEADS];
    const int last = s.start + row, first = std::max(0, last - s.window + 1);
    const T* query = s.query + row * s.query_step;
    for (int begin = 0; begin < s.group; begin += MOST_HEADS) {
        const int num_heads = std::min(MOST_HEADS, s.group - begin);
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
            for (int h = 0; h < num_heads;) {
                const int left = num_heads - h, steps = (left + FEW_ROWS - 1) / FEW_ROWS, heads = (left + steps - 1) / steps;
                const T* rows = query + (begin + h) * D;
                switch (heads) {
                    case 1: attend_few<T, D, 1>(rows, key, first, last, s.scale_log2, memory, out[h], maximum + h, total + h); break;
                    case 2: attend_few<T, D, 2>(rows, key, first, last, s.scale_log2, memory, out[h], maximum + h, total + h); break;
                    case 3: attend_few<T, D, 3>(rows, key, first, last, s.scale_log2, memory, out[h], maximum + h, total + h); break;
                    default: attend_few<T, D, 4>(rows, key, first, last, s.scale_log2, memory, out[h], maximum + h, total + h);
                }
                h += heads;
            }
        }
        for (int h = 0; h < num_heads; h++) {
            T* to = s.out + row * s.out_step + (begin + h) * D;
            const Floats inverse = div(set(1.0f), set(total[h]));
            for (int d = 0; d < D; d += WIDTH) store_floats(to + d, mul(load(out[h] + d), inverse));
            if (s.lse != nullptr) {
                s.lse[row * s.lse_step + begin + h] = LN_2 * s.scale_log2 * maximum[h] + logf(total[h]);
            }
        }
    }
}

}  // namespace
