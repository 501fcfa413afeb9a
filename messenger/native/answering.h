// The answer to a fetch of blocks that are sealed in this process's segment, as messenger/receiver/answers.py gives it.
#pragma once

#include "catalogue.h"
#include "meta.h"
#include "sending.h"

namespace {

constexpr size_t kMostFound = 64, kMostLayersFound = 256, kMostHeadBytes = 4096;
constexpr uint64_t kMostBytesFound = 1024 * 1024;  // copied into the kernel before others have their turn

// Where blocks that may be read are, in a segment that belongs to this process. Nobody evicts them during a call.
struct Shelf {
    const Catalogue* catalogue;
    uint64_t pages_offset, page_stride, first_layer, num_layers, layer_bytes;
};

// Sends the blocks that a Fetch asks for, if all of them are found. Returns how many bytes the socket has taken, of
// the `*num_head` in `head` and then of the blocks; 0 if nothing was sent.
inline size_t answer_fetch(int fd, const Segment& segment, const Shelf& shelf, MetaReader fetch, uint8_t* head,
                           uint64_t* num_head) {
    fetch.literal("\x86\xa4type\xa5" "Fetch\xa4keys");
    const size_t num_keys = fetch.array();
    if (num_keys == 0 || num_keys > kMostFound) return 0;
    const uint8_t* keys[kMostFound];
    for (size_t i = 0; i < num_keys; i++) {
        size_t key_bytes;
        keys[i] = fetch.binary(&key_bytes);
        if (key_bytes != kKeyBytes) return 0;
    }
    fetch.literal("\xablayer_begin");
    const uint64_t begin = fetch.number();
    fetch.literal("\xa9layer_end");
    const uint64_t end = fetch.number();
    fetch.literal("\xa5heads\xc0\xa7is_read\xc2");
    if (!fetch.is_read() || begin < shelf.first_layer || end <= begin) return 0;
    if (end - shelf.first_layer > shelf.num_layers || num_keys * (end - begin) > kMostLayersFound) return 0;
    const uint64_t first = begin - shelf.first_layer, block_bytes = (end - begin) * shelf.layer_bytes;
    if (num_keys * block_bytes > kMostBytesFound) return 0;

    iovec parts[1 + kMostFound];
    MetaWriter found(head + kFrameHeaderBytes);
    found.literal("\x83\xa4type\xa5" "Found\xa6" "blocks");
    found.array(num_keys);
    uint64_t offset = 0;  // of the latest
    for (size_t i = 0; i < num_keys; i++) {
        const size_t page = find_page(*shelf.catalogue, keys[i]);
        if (page == kNowhere) return 0;
        offset = shelf.pages_offset + page * shelf.page_stride + first * shelf.layer_bytes;
        found.literal("\x95");
        found.number(i);
        found.binary(shelf.catalogue->checksums + page * shelf.num_layers + first, (end - begin) * sizeof(uint64_t));
        found.number(offset);
        found.literal("\0\0");  // where RDMA would find it
        parts[1 + i] = {const_cast<uint8_t*>(segment.begin) + offset, block_bytes};
    }
    found.literal("\xa7" "failure\xc0");
    write_frame_header(head, found.end(), num_keys * block_bytes);
    const size_t head_bytes = found.end() - head;
    parts[0] = {head, head_bytes};
    const ssize_t sent = num_keys == 1 ? send_block(fd, head, head_bytes, segment, offset, block_bytes)
                                       : send_halves(fd, parts, 1 + num_keys);
    if (sent <= 0) return 0;
    *num_head = head_bytes;
    return sent;
}

}  // namespace
