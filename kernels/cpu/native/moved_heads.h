// Attention of some KV heads in another process, the *helper*, through a mailbox.
//
// Per layer the owner of the sequences puts the moved heads' queries, keys and values into it, computes its own heads'
// attention, and takes the results; the helper writes keys and values to the pages that it hosts, and attends. Heads do not
// depend on each other: each result has the bits that the owner would have computed.
//
// Owns: the order of these steps. Does not know: who the other process is, how a batch is described to it.
#pragma once

#include "attention.h"
#include "elementwise.h"
#include "mailbox.h"

namespace {

// The owner's side. moved_heads.py has the same structure. `asked` has a row for each token: the moved heads' queries, keys
// and values; `answers` their attention, [tokens, num_heads, head_dim].
template <class T>
struct Exchange {
    Mailbox* mailbox;
    T* asked;
    const T* answers;
    int32_t num_heads, num_kv_heads;
    int64_t timeout_ms;

    // `qkv` has the queries, keys and values of all heads, the moved ones last.
    void ask(const T* qkv, long num_tokens, const Pages& size) const {
        const long head_dim = size.head_dim, moved = num_heads * head_dim, moved_kv = num_kv_heads * head_dim;
        const long end_of_queries = size.num_heads * head_dim, all_kv = size.num_kv_heads * head_dim;
        T* to = asked;
        for (long t = 0; t < num_tokens; t++, qkv += end_of_queries + 2 * all_kv) {
            const T* end = qkv + end_of_queries;
            to = std::copy(end - moved, end, to);
            to = std::copy(end + all_kv - moved_kv, end + all_kv, to);
            to = std::copy(end + 2 * all_kv - moved_kv, end + 2 * all_kv, to);
        }
        count_up(*mailbox, Counter::ASKED, asked, uint64_t(to - asked) * sizeof(T));
    }

    // Puts the results behind those of the heads that were not moved, of rows of `out_stride`. False if none come.
    bool take(T* out, long num_tokens, long out_stride, long head_dim) const {
        const uint32_t number = mailbox->asked.load();
        const auto end = Clock::now() + std::chrono::milliseconds(timeout_ms);
        if (!wait_other(*mailbox, mailbox->answered, [=](uint32_t answered) { return answered == number; }, end)) return false;
        const long moved = num_heads * head_dim;
        for (long t = 0; t < num_tokens; t++) std::copy_n(answers + t * moved, moved, out + (t + 1) * out_stride - moved);
        return true;
    }
};

// A layer of a pass at the helper: the pages that it hosts. moved_heads.py has the same structure.
template <class T>
struct HostedLayer {
    const Batch* batch;
    T* kv;
};

// Answers the layers of pass `number`. False when the exchange is closed, or the owner has begun another pass.
template <class T>
bool host_layers(Mailbox& mailbox, uint32_t number, const HostedLayer<T>* layers, long num_layers, const int64_t* pages,
                 const int64_t* offsets, long num_tokens, const T* asked, T* answers) {
    for (long i = 0; i < num_layers; i++) {
        const Batch& batch = *layers[i].batch;
        const uint32_t answered = mailbox.answered.load();
        const auto is_asked = [=](uint32_t asked) { return asked == answered + 1; };
        if (!wait_other(mailbox, mailbox.asked, is_asked) || mailbox.begun.load() != number) return false;
        const long head_dim = batch.head_dim, queries = batch.num_heads * head_dim, keys = batch.num_kv_heads * head_dim;
        const long row = queries + 2 * keys, half_head = batch.page_size * head_dim;
        for (long t = 0; t < num_tokens; t++) {
            T* slot = layers[i].kv + pages[t] * batch.num_kv_heads * 2 * half_head + offsets[t] * head_dim;
            const T* key = asked + t * row + queries;
            for (int h = 0; h < batch.num_kv_heads; h++, key += head_dim, slot += 2 * half_head) {
                std::copy_n(key, head_dim, slot);
                std::copy_n(key + keys, head_dim, slot + half_head);
            }
        }
        attend_any(Attention<T>{asked, row, layers[i].kv, answers, queries, nullptr}, batch);
        count_up(mailbox, Counter::ANSWERED, answers, uint64_t(num_tokens * queries) * sizeof(T));
    }
    return true;
}

}  // namespace
