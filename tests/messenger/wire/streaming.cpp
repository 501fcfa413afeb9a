// Counts what a streaming copy of layers writes past the streaming stores, by standing in for memcpy.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace std {
inline size_t num_plain_bytes = 0;
inline void* counted(void* target, const void* source, size_t num_bytes) {
    if (num_bytes != sizeof(uint64_t)) num_plain_bytes += num_bytes;  // of the hash
    return __builtin_memcpy(target, source, num_bytes);
}
}  // namespace std

#define memcpy counted
#include "../../../messenger/native/layers.h"

extern "C" size_t plain_bytes(uint8_t* target, const uint8_t* source, size_t layer_bytes, size_t num_layers) {
    std::num_plain_bytes = 0;
    {
        Copier copier(target, true);
        for (size_t i = 0; i < num_layers; i++) copy_layer(copier, source + i * layer_bytes, layer_bytes);
    }
    return std::num_plain_bytes;
}

extern "C" int can_stream() {
#if defined(__AVX2__) || defined(__AVX512F__)
    return 1;
#else
    return 0;
#endif
}
