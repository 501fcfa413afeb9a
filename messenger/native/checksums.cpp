// The xxh3-64 of each layer of a block, computed alone, while the block is copied, or while it is received.
#include <sched.h>
#include <sys/socket.h>
#include <time.h>

#include <cerrno>

#include "layers.h"

namespace {

int64_t now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * int64_t{1000000000} + now.tv_nsec;
}

// Hashes the bytes of a block that have arrived since the last call. The first `num_there` bytes of the block are
// there, and the first `num_hashed` bytes were hashed before. `state` keeps the hash of a layer that is not complete.
// Returns how many bytes are hashed now.
size_t hash_there(const uint8_t* block, size_t layer_bytes, size_t num_hashed, size_t num_there,
                         uint64_t (&state)[8], uint64_t* digests) {
    while (num_hashed < num_there) {
        const size_t index = num_hashed / layer_bytes, start = index * layer_bytes;
        if (num_hashed == start) std::memcpy(state, kStart, sizeof kStart);
        Layer layer(block + start, layer_bytes, state);
        const size_t num_rounds = std::min(layer.num_rounds(), (num_there - start) / kRound);
        for (size_t round = (num_hashed - start) / kRound; round < num_rounds; round++) layer.round(round);
        if (num_there < start + layer_bytes) {
            layer.store(state);
            return start + num_rounds * kRound;
        }
        digests[index] = layer.digest();
        num_hashed = start + layer_bytes;
    }
    return num_hashed;
}

}  // namespace

// Writes the xxh3-64 of each layer to `digests`. `layer_bytes` must be more than 240.
extern "C" void hash_layers(const uint8_t* block, size_t layer_bytes, size_t num_layers, uint64_t* digests) {
    for (size_t i = 0; i < num_layers; i++) {
        Layer layer(block + i * layer_bytes, layer_bytes);
        for (size_t round = 0; round < layer.num_rounds(); round++) layer.round(round);
        digests[i] = layer.digest();
    }
}

// Does what `hash_there` does.
extern "C" size_t hash_arrived(const uint8_t* block, size_t layer_bytes, size_t num_hashed, size_t num_there,
                               uint64_t (*state)[8], uint64_t* digests) {
    return hash_there(block, layer_bytes, num_hashed, num_there, *state, digests);
}

// Receives from a stream socket until `num_wanted` bytes of the block are there, and hashes the bytes while they are
// in the processor's cache. `num_there` bytes are there before the call. The call ends early `patience_ns` after it
// first had to wait. Returns how many bytes are there now. If no byte came, returns the negative errno, or 0 at the
// end of the stream.
extern "C" ssize_t receive_layers(int fd, uint8_t* block, size_t layer_bytes, size_t num_there, size_t num_wanted,
                                  int64_t patience_ns, size_t* num_hashed, uint64_t (*state)[8],
                                  uint64_t* digests) {
    constexpr size_t kPiece = 64 * 1024;
    const size_t num_before = num_there;
    int64_t waiting_since = 0;
    while (num_there < num_wanted) {
        const ssize_t received = recv(fd, block + num_there, std::min(kPiece, num_wanted - num_there), MSG_DONTWAIT);
        if (received > 0) {
            num_there += received;
            *num_hashed = hash_there(block, layer_bytes, *num_hashed, num_there, *state, digests);
        } else if (received < 0 && errno == EINTR) {
            continue;
        } else if (received < 0 && errno == EAGAIN) {
            const int64_t now = now_ns();
            if (waiting_since == 0) waiting_since = now;
            if (now - waiting_since >= patience_ns) return num_there > num_before ? num_there : -EAGAIN;
            sched_yield();  // the other end may have been woken up on this very core
        } else {
            return num_there > num_before ? num_there : -(received == 0 ? 0 : errno);
        }
    }
    return num_there;
}

// Copies the layers of one block, and writes their xxh3-64 to `digests`. A `streaming` copy bypasses the caches.
extern "C" void copy_layers(uint8_t* target, const uint8_t* source, size_t layer_bytes, size_t num_layers,
                            uint64_t* digests, int streaming) {
    Copier copier(target, streaming);
    for (size_t i = 0; i < num_layers; i++) digests[i] = copy_layer(copier, source + i * layer_bytes, layer_bytes);
}

// Copies one layer of each of several blocks, from and to any addresses, and writes their xxh3-64 to `digests`.
extern "C" void copy_scattered(uint8_t* const* targets, const uint8_t* const* sources, size_t layer_bytes,
                               size_t num_blocks, uint64_t* digests) {
    for (size_t i = 0; i < num_blocks; i++) copy_layers(targets[i], sources[i], layer_bytes, 1, digests + i, false);
}
