// A block that comes off a socket from its start on, hashed while it is in the processor's cache.
#pragma once

#include <sys/socket.h>

#include <cerrno>

#include "layers.h"
#include "listening.h"

namespace {

// The block arrives from its start on: `num_there` bytes are there, of which `num_hashed` have been hashed
// before. `state` is that of the layer in between. Returns how many have been hashed now.
inline size_t hash_there(const uint8_t* block, size_t layer_bytes, size_t num_hashed, size_t num_there,
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

// The same, off a socket: receives until `num_wanted` bytes of the block are there, `num_there` of them already,
// and hashes them while they are in the processor's cache. It returns `patience_ns` after `waiting_since`, when it
// first had to wait: 0 if that has not been. The result is how many are there now, or the negative errno if there
// came none at all (0: the end of the stream).
inline ssize_t receive_and_hash(int fd, uint8_t* block, size_t layer_bytes, size_t num_there, size_t num_wanted,
                                int64_t patience_ns, int64_t& waiting_since, size_t* num_hashed,
                                uint64_t (&state)[8], uint64_t* digests) {
    constexpr size_t kPiece = 256 * 1024;
    const size_t num_before = num_there;
    while (num_there < num_wanted) {
        const ssize_t received = recv(fd, block + num_there, std::min(kPiece, num_wanted - num_there), MSG_DONTWAIT);
        if (received > 0) {
            num_there += received;
            *num_hashed = hash_there(block, layer_bytes, *num_hashed, num_there, state, digests);
        } else if (received < 0 && errno == EINTR) {
            continue;
        } else if (received < 0 && errno == EAGAIN) {
            const int64_t now = now_ns();
            if (waiting_since == 0) waiting_since = now;
            if (now - waiting_since >= patience_ns) return num_there > num_before ? num_there : -EAGAIN;
            sched_yield();
        } else {
            return num_there > num_before ? num_there : -(received == 0 ? 0 : errno);
        }
    }
    return num_there;
}

}  // namespace
