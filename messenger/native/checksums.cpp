// xxh3-64 of each layer of a block, alone, while the block is copied, or while it comes off a socket.
#include "arriving.h"

// `layer_bytes` is more than 240.
extern "C" void hash_layers(const uint8_t* block, size_t layer_bytes, size_t num_layers, uint64_t* digests) {
    for (size_t i = 0; i < num_layers; i++) {
        Layer layer(block + i * layer_bytes, layer_bytes);
        for (size_t round = 0; round < layer.num_rounds(); round++) layer.round(round);
        digests[i] = layer.digest();
    }
}

extern "C" size_t hash_arrived(const uint8_t* block, size_t layer_bytes, size_t num_hashed, size_t num_there,
                               uint64_t (*state)[8], uint64_t* digests) {
    return hash_there(block, layer_bytes, num_hashed, num_there, *state, digests);
}

extern "C" ssize_t receive_layers(int fd, uint8_t* block, size_t layer_bytes, size_t num_there, size_t num_wanted,
                                  int64_t patience_ns, size_t* num_hashed, uint64_t (*state)[8],
                                  uint64_t* digests) {
    int64_t waiting_since = 0;
    return receive_and_hash(fd, block, layer_bytes, num_there, num_wanted, patience_ns, waiting_since, num_hashed,
                            *state, digests);
}

extern "C" void copy_layers(uint8_t* target, const uint8_t* source, size_t layer_bytes, size_t num_layers,
                            uint64_t* digests, int streaming) {
    Copier copier(target, streaming);
    for (size_t i = 0; i < num_layers; i++) digests[i] = copy_layer(copier, source + i * layer_bytes, layer_bytes);
}

// One layer of each of several blocks, which lie anywhere.
extern "C" void copy_scattered(uint8_t* const* targets, const uint8_t* const* sources, size_t layer_bytes,
                               size_t num_blocks, uint64_t* digests) {
    for (size_t i = 0; i < num_blocks; i++) copy_layers(targets[i], sources[i], layer_bytes, 1, digests + i, false);
}
