// Causal grouped-query attention over a paged KVCache, without a score matrix in memory.
//
// The keys of a sequence are taken in blocks of KEYS, counted from its position 0, with an online softmax
// (running maximum and sum). There are two ways to do that: queries in the lanes of a vector, for chunks of a
// prompt, and keys in the lanes, for few queries (decode). Both add the same products in the same order, so that
// they give the same bits: a token's result depends neither on how its prompt was cut nor on its batch.
//
// Owns: how a batch is divided into pieces of work. Does not know: layers, requests; its caller has checked all sizes.
#pragma once

#include <vector>

#include "attention_decode.h"
#include "attention_prefill.h"
#include "idle_cores.h"

namespace {

// The number of columns below which a sequence's queries are computed one by one.
constexpr int FEW_COLUMNS = COLUMNS / 2;

template <class T, int D>
Sequence<T, D> sequence_of(const Attention<T>& layer, const Batch& batch, int i, int head, int64_t first_token) {
    const int group = batch.num_heads / batch.num_kv_heads;
    const int64_t head_elements = 2 * int64_t(batch.page_size) * D;
    const int32_t* table = batch.pages + batch.first_pages[i];
    return {
        {layer.kv + head * head_elements, table, batch.num_kv_heads * head_elements, batch.page_size},
        group,
        batch.kv_lens[i] - batch.query_lens[i],
        batch.num_keys[i],
        batch.query_lens[i],
        batch.window,
        batch.scale * LOG2_E,
        layer.query + first_token * layer.query_stride + head * group * D,
        layer.query_stride,
        layer.out + first_token * layer.out_stride + head * group * D,
        layer.out_stride,
        layer.lse == nullptr ? nullptr : layer.lse + first_token * batch.num_heads + head * group,
        batch.num_heads,
    };
}

// One piece of work: TILES tiles of a sequence, or one query of a sequence with few queries.
struct Item {
    int sequence, head, step;
    bool is_one;
    int64_t first_token;
};

// Finds the first block of keys that the piece of work `item` will read.
template <class T, int D>
void find_first(const Attention<T>& layer, const Batch& batch, const Item& item, Block<T, D>& block) {
    const Sequence<T, D> s = sequence_of<T, D>(layer, batch, item.sequence, item.head, 0);
    const int position = s.start + item.step, first = std::max(0, position - s.window + 1) / KEYS * KEYS;
    Block<T, D>::find(s.rows, first, std::min(position + 1, s.num_keys), block);
}

template <class T, int D>
ALONE void attend(const Attention<T>& layer, const Batch& batch) {
    const int group = batch.num_heads / batch.num_kv_heads;
    std::vector<Item> items;
    int64_t first_token = 0;
    for (int i = 0; i < batch.num_sequences; i++) {
        const int num_queries = batch.query_lens[i], num_columns = num_queries * group;
        const bool are_few = num_columns < FEW_COLUMNS || num_queries == 1;
        const int num_steps = are_few ? num_queries : (num_columns + TILES * COLUMNS - 1) / (TILES * COLUMNS);
        for (int head = 0; head < batch.num_kv_heads; head++) {
            for (int step = 0; step < num_steps; step++) items.push_back({i, head, step, are_few, first_token});
        }
        first_token += num_queries;
    }
    divide(long(items.size()), [&](long n, int step) {
        const Item& item = items[n];
        const Sequence<T, D> s = sequence_of<T, D>(layer, batch, item.sequence, item.head, item.first_token);
        if (item.is_one) {
            Block<T, D> after;
            after.num_keys = 0;
            const long next = n + step;
            if (0 <= next && next < long(items.size()) && items[next].is_one) find_first(layer, batch, items[next], after);
            attend_one(s, item.step, after);
        } else {
            prefill(s, item.step * TILES * COLUMNS);
        }
    });
}

// Computes the attention of a batch. The caller has checked head_dim.
template <class T>
void attend_any(const Attention<T>& layer, const Batch& batch) {
    switch (batch.head_dim) {
        case 64: return attend<T, 64>(layer, batch);
        case 96: return attend<T, 96>(layer, batch);
        default: return attend<T, 128>(layer, batch);
    }
}

}  // namespace
