// A part of attention in another process, the *helper*, through a mailbox: some KV heads, or the first keys of sequences.
//
// For each layer the owner of the sequences puts the helper's input into the mailbox, computes its own part, and takes the results.
// If the helper has heads, the input is these heads' queries, keys and values: the helper writes keys and values to its pages, and
// attends. Heads do not depend on each other: each result has the bits that the owner would have computed. If the helper has
// keys, the input is the queries of all heads, of sequences that have pages at the helper: the helper attends to these pages, and
// both results are merged by the denominators of their softmaxes.
//
// Owns: the order of these steps. Does not know: who the other process is, how a batch is described to it.
#pragma once

#include "attention.h"
#include "elementwise.h"
#include "mailbox.h"

namespace {

// The owner's side. moved_attention.py has the same structure. `asked` has a row for each token: queries, then keys and values of
// moved heads; `answers` has the attention of these queries, [rows, num_heads, head_dim], and behind it, where the helper has keys,
// the logarithms of the softmaxes' denominators, float [rows, num_heads].
template <class T>
struct Exchange {
    Mailbox* mailbox;
    T* asked;
    const T* answers;
    const int64_t* tokens;  // where the helper has keys: the tokens whose sequences have pages there
    int64_t num_tokens;
    float* lse;             // where the helper has keys: the owner's logarithms, [tokens of the pass, num_heads]; else null
    int32_t num_heads, num_kv_heads;  // heads of the queries that are sent, and of the keys and values that are sent with them
    int64_t timeout_ms;

    bool has_keys() const { return lse != nullptr; }
    int num_moved_heads() const { return has_keys() ? 0 : num_heads; }
    int num_moved_kv_heads() const { return has_keys() ? 0 : num_kv_heads; }

    // Sends the helper's input of one layer. `qkv` has the queries, keys and values of all heads, moved heads last.
    void ask(const T* qkv, long num_tokens_of_pass, const Pages& size) const {
        const long head_dim = size.head_dim, queries = num_heads * head_dim, keys = num_kv_heads * head_dim;
        const long end_of_queries = size.num_heads * head_dim, all_kv = size.num_kv_heads * head_dim;
        const long num_rows = has_keys() ? num_tokens : num_tokens_of_pass;
        T* to = asked;
        for (long row = 0; row < num_rows; row++) {
            const T* end = qkv + (has_keys() ? tokens[row] : row) * (end_of_queries + 2 * all_kv) + end_of_queries;
            to = std::copy(end - queries, end, to);
            to = std::copy(end + all_kv - keys, end + all_kv, to);
            to = std::copy(end + 2 * all_kv - keys, end + 2 * all_kv, to);
        }
        count_up(*mailbox, Counter::ASKED, asked, uint64_t(to - asked) * sizeof(T));
    }

    // Waits for the helper's results, and puts them into `out`, which has rows of `out_stride`. Returns false if none come.
    bool take(T* out, long num_tokens_of_pass, long out_stride, long head_dim) const {
        const uint32_t number = mailbox->asked.load();
        const auto end = Clock::now() + std::chrono::milliseconds(timeout_ms);
        if (!wait_other(*mailbox, mailbox->answered, [=](uint32_t answered) { return answered == number; }, end)) return false;
        const long row_size = num_heads * head_dim;
        if (has_keys()) {
            for (long row = 0; row < num_tokens; row++) merge(out + tokens[row] * out_stride, row, head_dim);
        } else {
            for (long t = 0; t < num_tokens_of_pass; t++) {
                std::copy_n(answers + t * row_size, row_size, out + (t + 1) * out_stride - row_size);
            }
        }
        return true;
    }

    // Merges both results of all heads of one token: exp(l1 - l) o1 + exp(l2 - l) o2 with l = log(exp l1 + exp l2). If the helper
    // has seen no key, its l2 is -inf and its o2 is 0. The owner has seen at least the token itself.
    void merge(T* out, long row, long head_dim) const {
        const float *own = lse + tokens[row] * num_heads;
        const float *others = reinterpret_cast<const float*>(answers + num_tokens * num_heads * head_dim) + row * num_heads;
        const T* from = answers + row * num_heads * head_dim;
        for (int h = 0; h < num_heads; h++, out += head_dim, from += head_dim) {
            const Floats weight = set(1.0f / (1.0f + expf(others[h] - own[h])));
            const Floats other_weight = set(1.0f / (1.0f + expf(own[h] - others[h])));
            for (long d = 0; d < head_dim; d += WIDTH) {
                store_floats(out + d, fma(load_floats(from + d), other_weight, mul(load_floats(out + d), weight)));
            }
        }
    }
};

// A layer of a pass at the helper: the pages that it hosts. moved_attention.py has the same structure.
template <class T>
struct HostedLayer {
    const Batch* batch;
    T* kv;
};

// Answers the layers of pass `number`. Returns false if the exchange is closed, or if the owner has begun another pass. `pages` and
// `offsets` are the token slots for keys and values of moved heads; they are null if the owner has all new keys.
template <class T>
bool host_layers(Mailbox& mailbox, uint32_t number, const HostedLayer<T>* layers, long num_layers, const int64_t* pages,
                 const int64_t* offsets, long num_tokens, const T* asked, T* answers) {
    for (long i = 0; i < num_layers; i++) {
        const Batch& batch = *layers[i].batch;
        const uint32_t answered = mailbox.answered.load();
        const auto is_asked = [=](uint32_t asked) { return asked == answered + 1; };
        if (!wait_other(mailbox, mailbox.asked, is_asked) || mailbox.begun.load() != number) return false;
        const bool has_keys = pages == nullptr;
        const long head_dim = batch.head_dim, queries = batch.num_heads * head_dim;
        const long keys = has_keys ? 0 : batch.num_kv_heads * head_dim;
        const long row = queries + 2 * keys, half_head = batch.page_size * head_dim;
        for (long t = 0; !has_keys && t < num_tokens; t++) {
            T* slot = layers[i].kv + pages[t] * batch.num_kv_heads * 2 * half_head + offsets[t] * head_dim;
            const T* key = asked + t * row + queries;
            for (int h = 0; h < batch.num_kv_heads; h++, key += head_dim, slot += 2 * half_head) {
                std::copy_n(key, head_dim, slot);
                std::copy_n(key + keys, head_dim, slot + half_head);
            }
        }
        float* lse = has_keys ? reinterpret_cast<float*>(answers + num_tokens * queries) : nullptr;
        attend_any(Attention<T>{asked, row, layers[i].kv, answers, queries, lse}, batch);
        const uint64_t lse_bytes = has_keys ? num_tokens * batch.num_heads * sizeof(float) : 0;
        count_up(mailbox, Counter::ANSWERED, answers, num_tokens * queries * sizeof(T) + lse_bytes);
    }
    return true;
}

}  // namespace
