// Sending what is small, so that the other end is busy with its beginning while the rest is still being copied.
#pragma once

#include <sys/socket.h>
#include <sys/uio.h>

#include <cerrno>
#include <cstddef>

namespace {

constexpr size_t kFirstBytes = 40 * 1024, kMostHalvedBytes = 128 * 1024;  // of more the kernel makes pieces itself

inline ssize_t send_some(int fd, iovec* parts, size_t num_parts) {
    msghdr message = {};
    message.msg_iov = parts;
    message.msg_iovlen = num_parts;
    ssize_t sent;
    do sent = sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    while (sent < 0 && errno == EINTR);
    return sent;
}

// Returns how many bytes the socket has taken of `parts`, which are changed; if none, the negative errno.
inline ssize_t send_parts(int fd, iovec* parts, size_t num_parts) {
    size_t num_bytes = 0;
    for (size_t i = 0; i < num_parts; i++) num_bytes += parts[i].iov_len;
    ssize_t first = 0;
    if (num_bytes > kFirstBytes && num_bytes <= kMostHalvedBytes) {
        size_t index = 0, left = kFirstBytes;
        while (left > parts[index].iov_len) left -= parts[index++].iov_len;
        iovec& cut = parts[index];
        const size_t cut_bytes = cut.iov_len;
        cut.iov_len = left;
        first = send_some(fd, parts, index + 1);
        if (first != static_cast<ssize_t>(kFirstBytes)) return first < 0 ? -errno : first;
        cut = {static_cast<char*>(cut.iov_base) + left, cut_bytes - left};
        parts += index;
        num_parts -= index;
    }
    const ssize_t rest = send_some(fd, parts, num_parts);
    if (rest < 0) return first > 0 ? first : -errno;
    return first + rest;
}

}  // namespace
