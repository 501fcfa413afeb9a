// A whole decoder layer in one call, so that Python's part is small: the operations of the other headers, in order. The
// halves of a layer can be called alone: after each half, the ranks of a tensor-parallel group add up their results.
//
// Owns: the order, the use of the workspace. Does not know: which layer it is; its caller has checked all sizes.
#pragma once

#include "attention.h"
#include "elementwise.h"
#include "linear.h"
#include "moved_attention.h"

namespace {

// layer.py has the same structure. Biases and norms of heads may be null.
template <class T>
struct LayerWeights {
    const T* input_norm;
    const word* qkv;
    const T *qkv_bias, *query_norm, *key_norm;
    const word* o;
    const T *o_bias, *post_norm;
    const word *gate, *up;
    const T *gate_bias, *up_bias;
    const word* down;
    const T* down_bias;
    int64_t hidden_size, intermediate_size;
    float eps;
};

// Computes norm, attention and output product, plus `residual`, which may be null. Returns false if a slot is outside of the
// pages, or if a helper does not answer. `exchange` is null without a helper; `batch` has the heads and keys of this process.
//
// `hidden`, `residual` and `out` are [tokens, hidden_size]; the last two may be the same tensor. The workspace has room for
// tokens * (max(hidden_size, num_heads * head_dim) + (num_heads + 2 * num_kv_heads) * head_dim) elements.
template <class T>
bool run_attention(const LayerWeights<T>& w, const Batch& batch, const Exchange<T>* exchange, const Slots& slots, const T* hidden,
                   T* kv, const T* residual, T* out, T* workspace) {
    const long rows = slots.num_tokens, size = w.hidden_size;
    const bool is_helped = exchange != nullptr;
    const int num_heads = batch.num_heads + (is_helped ? exchange->num_moved_heads() : 0);
    const int num_kv_heads = batch.num_kv_heads + (is_helped ? exchange->num_moved_kv_heads() : 0);
    const long query_size = long(num_heads) * batch.head_dim, qkv_size = query_size + 2 * long(num_kv_heads) * batch.head_dim;
    T *narrow = workspace, *qkv = narrow + rows * std::max(size, query_size);

    normalise_rows(hidden, rows, size, w.input_norm, w.eps, narrow);
    multiply_all(Linear<T>{narrow, size / PER_WORD<T>, w.qkv_bias, nullptr, qkv_size}, w.qkv, rows, qkv);
    const Pages pages = {batch.num_pages, num_heads, num_kv_heads, batch.num_kv_heads, batch.head_dim, batch.page_size};
    const HeadNorms<T> norms = {w.query_norm, w.key_norm, w.eps};
    if (!rotate_and_write(qkv, kv, slots, pages, norms)) return false;
    if (is_helped) exchange->ask(qkv, rows, pages);
    attend_any(Attention<T>{qkv, qkv_size, kv, narrow, query_size, is_helped ? exchange->lse : nullptr}, batch);
    if (is_helped && !exchange->take(narrow, rows, query_size, batch.head_dim)) return false;
    multiply_all(Linear<T>{narrow, query_size / PER_WORD<T>, w.o_bias, residual, size}, w.o, rows, out);
    return true;
}

// Computes norm and MLP, plus `residual`, which may be null. Any of the three tensors [rows, hidden_size] may be the same. The
// workspace has room for rows * (hidden_size + intermediate_size) elements.
template <class T>
void run_mlp(const LayerWeights<T>& w, long rows, const T* hidden, const T* residual, T* out, T* workspace) {
    const long size = w.hidden_size, inner = w.intermediate_size;
    T *narrow = workspace, *gated = narrow + rows * size;

    normalise_rows(hidden, rows, size, w.post_norm, w.eps, narrow);
    multiply_gated(Gated<T>{narrow, size / PER_WORD<T>, w.gate, w.up, w.gate_bias, w.up_bias, inner}, rows, gated);
    multiply_all(Linear<T>{gated, inner / PER_WORD<T>, w.down_bias, residual, size}, w.down, rows, out);
}

// A layer of a pass, and its pages. layer.py has the same structure.
template <class T>
struct LayerOfPass {
    const LayerWeights<T>* weights;
    const Batch* batch;
    T* kv;
};

// Computes layers: both halves of each, with residuals. `hidden` may be `out`. `owner`, which may be null, is told when each
// layer is done. Returns false when `run_attention` does.
template <class T>
bool run_layers(const LayerOfPass<T>* layers, long num_layers, const Exchange<T>* exchange, Mailbox* owner, const Slots& slots,
                const T* hidden, T* out, T* workspace) {
    for (long i = 0; i < num_layers; i++, hidden = out) {
        const LayerOfPass<T>& layer = layers[i];
        if (!run_attention(*layer.weights, *layer.batch, exchange, slots, hidden, layer.kv, hidden, out, workspace)) return false;
        run_mlp(*layer.weights, slots.num_tokens, out, out, out, workspace);
        if (owner != nullptr) layer_computed(*owner);
    }
    return true;
}

}  // namespace
