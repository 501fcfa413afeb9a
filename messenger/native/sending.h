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

// Shared memory: a mapping of the file behind `fd`, from its beginning.
struct Segment {
    const uint8_t* begin;
    int64_t fd;
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

// The same of a head and two blocks or more, by two calls: the other end is busy with one half while the other is
// being copied.
inline ssize_t send_halves(int fd, iovec* parts, size_t num_parts) {
    const size_t num_first = num_parts / 2 + 1;
    ssize_t num_bytes = 0;
    for (size_t i = 0; i < num_first; i++) num_bytes += parts[i].iov_len;
    const ssize_t first = send_some(fd, parts, num_first);
    if (first < num_bytes) return first;
    return first + std::max<ssize_t>(send_some(fd, parts + num_first, num_parts - num_first), 0);
}

// Returns how many bytes the socket has taken of the head and the block, which is in the segment; if none, the negative
// errno. Of a block of middling size it takes the pages themselves, and the only copy is that of the other end: they
// stay as they are until it has said that it has them, or the connection is lost. Where the file gives no pages (none
// of a hugetlbfs does) they are copied. The socket does not block, and SIGPIPE is ignored, as Python does.
inline ssize_t send_block(int fd, const uint8_t* head, size_t head_bytes, const Segment& segment, off_t offset,
                          size_t num_bytes) {
    const bool is_shared = num_bytes >= kLeastSharedBytes && num_bytes <= kMostSharedBytes;
    iovec parts[] = {{const_cast<uint8_t*>(head), head_bytes},
                     {const_cast<uint8_t*>(segment.begin) + offset, num_bytes}};
    const ssize_t sent = send_some(fd, parts, is_shared ? 1 : 2, is_shared ? MSG_MORE : 0);
    if (!is_shared || sent < static_cast<ssize_t>(head_bytes)) return sent;
    ssize_t rest = sendfile(fd, segment.fd, &offset, num_bytes);
    if (rest < 0 && errno != EAGAIN) rest = send_some(fd, parts + 1, 1);
    return sent + std::max<ssize_t>(rest, 0);
}

}  // namespace
