// The functions that Python calls, for bfloat16 and float32. Python checks sizes. A result of 1 means success.

#include <sys/syscall.h>
#include <unistd.h>

#include "attention.h"
#include "elementwise.h"
#include "idle_cores.h"
#include "layer.h"
#include "linear.h"
#include "moved_attention.h"
#include "page_copy.h"

#define EXPORT(NAME, T)                                                                                                       \
    extern "C" void attention_##NAME(const T* query, int64_t query_stride, const T* kv, T* out, float* lse, const Batch* batch) {\
        attend_any(Attention<T>{query, query_stride, kv, out, int64_t(batch->num_heads) * batch->head_dim, lse}, *batch);       \
    }                                                                                                                         \
    extern "C" int64_t packed_words_##NAME(int64_t num_columns, int64_t depth) {                                              \
        return count_words(num_columns, depth / PER_WORD<T>);                                                                 \
    }                                                                                                                         \
    extern "C" void pack_##NAME(const T* weights, int64_t num_columns, int64_t depth, word* packed) {                         \
        pack(weights, num_columns, depth, packed);                                                                            \
    }                                                                                                                         \
    extern "C" void unpack_##NAME(const word* packed, int64_t depth, const int64_t* ids, int64_t num_ids, T* rows) {          \
        unpack(packed, depth, ids, num_ids, rows);                                                                            \
    }                                                                                                                         \
    extern "C" void linear_##NAME(const T* x, int64_t num_rows, int64_t depth, const word* packed, int64_t num_columns,       \
                                  const T* bias, const T* residual, T* y) {                                                   \
        multiply_all(Linear<T>{x, depth / PER_WORD<T>, bias, residual, num_columns}, packed, num_rows, y);                    \
    }                                                                                                                         \
    extern "C" void linear_to_float32_##NAME(const T* x, int64_t num_rows, int64_t depth, const word* packed,                 \
                                             int64_t num_columns, const T* bias, const T* residual, float* y) {               \
        multiply_all(Linear<T>{x, depth / PER_WORD<T>, bias, residual, num_columns}, packed, num_rows, y);                    \
    }                                                                                                                         \
    extern "C" void rms_norm_##NAME(const T* x, int64_t num_rows, int64_t n, const T* weight, float eps, T* y) {              \
        normalise_rows(x, num_rows, n, weight, eps, y);                                                                       \
    }                                                                                                                         \
    extern "C" void gated_linear_##NAME(const T* x, int64_t num_rows, int64_t depth, const word* gate, const word* up,        \
                                        int64_t num_columns, const T* gate_bias, const T* up_bias, T* y) {                    \
        multiply_gated(Gated<T>{x, depth / PER_WORD<T>, gate, up, gate_bias, up_bias, num_columns}, num_rows, y);             \
    }                                                                                                                         \
    extern "C" int rotate_and_write_##NAME(T* qkv, T* kv, const Slots* slots, const Pages* pages, const T* query_norm,        \
                                           const T* key_norm, float eps) {                                                    \
        return rotate_and_write(qkv, kv, *slots, *pages, HeadNorms<T>{query_norm, key_norm, eps});                            \
    }                                                                                                                         \
    extern "C" int layers_##NAME(const LayerOfPass<T>* layers, int64_t num_layers, const Exchange<T>* exchange,               \
                                 Mailbox* owner, const Slots* slots, const T* hidden, T* out, T* workspace) {                 \
        return run_layers(layers, num_layers, exchange, owner, *slots, hidden, out, workspace);                               \
    }                                                                                                                         \
    extern "C" int host_layers_##NAME(Mailbox* mailbox, uint32_t number, const HostedLayer<T>* layers, int64_t num_layers,    \
                                      const int64_t* pages, const int64_t* offsets, int64_t num_tokens, const T* asked,       \
                                      T* answers) {                                                                           \
        return host_layers(*mailbox, number, layers, num_layers, pages, offsets, num_tokens, asked, answers);                 \
    }                                                                                                                         \
    extern "C" int attention_half_##NAME(const LayerWeights<T>* weights, const Batch* batch, const Slots* slots,              \
                                         const T* hidden, T* kv, T* out, T* workspace) {                                      \
        return run_attention(*weights, *batch, (const Exchange<T>*)nullptr, *slots, hidden, kv, (const T*)nullptr, out,       \
                             workspace);                                                                                      \
    }                                                                                                                         \
    extern "C" void mlp_half_##NAME(const LayerWeights<T>* weights, int64_t num_rows, const T* hidden, T* out,                \
                                    T* workspace) {                                                                           \
        run_mlp(*weights, num_rows, hidden, (const T*)nullptr, out, workspace);                                               \
    }

EXPORT(bfloat16, bf16)
EXPORT(float32, float)

// Returns whether this process may use tiles. Linux wants to be asked, because tiles make the state of a thread larger.
extern "C" int may_use_tiles() {
    constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

// The threads of the whole process, for all kernels.
extern "C" void set_num_threads(int num_threads) { idle_cores().set_num_threads(num_threads); }
extern "C" void be_guest() { idle_cores().be_guest(); }
extern "C" uint32_t num_placements() { return idle_cores().placements(); }

extern "C" void copy_pages(const PagePart* parts, int64_t num_parts, const int64_t* sources, const int64_t* targets,
                           int64_t num_pages) {
    for (int64_t i = 0; i < num_parts; i++) copy_pages_of(parts[i], sources, targets, num_pages);
}

// Both sides of an exchange with a helper (mailbox.h).
extern "C" void connect_mailbox(Mailbox* mailbox, uint64_t num_bytes, int descriptor, int64_t timeout_ms) {
    mailbox->wire = {num_bytes, descriptor, timeout_ms, {}, 0};
}
extern "C" uint32_t passes_begun(Mailbox* mailbox) { return mailbox->begun.load(); }
extern "C" void show_bytes(Mailbox* mailbox, const char* data, uint64_t num_bytes) { show(*mailbox, data, num_bytes); }
extern "C" void begin_pass(Mailbox* mailbox, const char* data, uint64_t num_bytes) {
    count_up(*mailbox, Counter::BEGUN, data, num_bytes);
}
extern "C" int await_pass(Mailbox* mailbox, uint32_t number) {
    return wait_other(*mailbox, mailbox->begun, [=](uint32_t begun) { return begun != number; });
}
extern "C" void answer_pass(Mailbox* mailbox, const char* data, uint64_t num_bytes) {
    count_up(*mailbox, Counter::ANSWERED, data, num_bytes);
}
extern "C" int await_answer(Mailbox* mailbox, uint32_t number, int64_t timeout_ms) {
    return wait_answer(*mailbox, number, timeout_ms);
}
extern "C" void layer_computed(Mailbox* mailbox) { layer_computed(*mailbox); }
extern "C" void close_mailbox(Mailbox* mailbox) { close_exchange(*mailbox); }
extern "C" int mailbox_is_closed(Mailbox* mailbox) { return mailbox->closed.load(); }
