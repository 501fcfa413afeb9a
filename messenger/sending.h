// Sending a head and the blocks behind it.
#pragma once

#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>

namespace {

// Of a block whose own pages leave: fewer bytes are copied as soon, of more one end copies while the other does.
constexpr size_t kLeastSharedBytes = 16 * 1024, kMostSharedBytes = 128 * 1024;

// That is mapped, from the beginning of its file.
struct Segment {
    const uint8_t* begin;
    int64_t file;
};

// Returns how many bytes the socket has taken; if none, the negative errno.
inline ssize_t send_some(int fd, iovec* parts, size_t num_parts, int flags = 0) {
    msghdr message = {};
    message.msg_iov = parts;
    message.msg_iovlen = num_parts;
    ssize_t sent;
    do sent = sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL | flags);
    while (sent < 0 && errno == EINTR);
    return sent < 0 ? -errno : sent;
}

// The same of two parts or more, by two calls: the other end is busy with one half while the other is being copied.
inline ssize_t send_halves(int fd, iovec* parts, size_t num_parts) {
    const size_t num_first = num_parts / 2 + 1;
    ssize_t num_bytes = 0;
    for (size_t i = 0; i < num_first; i++) num_bytes += parts[i].iov_len;
    const ssize_t first = send_some(fd, parts, num_first);
    if (first < num_bytes || num_first == num_parts) return first;
    return first + std::max<ssize_t>(send_some(fd, parts + num_first, num_parts - num_first), 0);
}

// Returns how many bytes the socket has taken of the head and the block, which is in the segment; if none, the negative
// errno. Of a block of middling size it takes the pages themselves: they stay as they are until the block has arrived,
// and the only copy is that of the other end. What the file does not give is left to those who copy.
inline ssize_t send_block(int fd, const uint8_t* head, size_t head_bytes, const Segment& segment, off_t offset,
                          size_t num_bytes) {
    const bool is_shared = num_bytes >= kLeastSharedBytes && num_bytes <= kMostSharedBytes;
    iovec parts[] = {{const_cast<uint8_t*>(head), head_bytes},
                     {const_cast<uint8_t*>(segment.begin) + offset, num_bytes}};
    const ssize_t sent = send_some(fd, parts, is_shared ? 1 : 2, is_shared ? MSG_MORE : 0);
    if (!is_shared || sent < static_cast<ssize_t>(head_bytes)) return sent;
    return sent + std::max<ssize_t>(sendfile(fd, segment.file, &offset, num_bytes), 0);
}

}  // namespace
