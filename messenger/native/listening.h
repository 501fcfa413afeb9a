// Asks a descriptor again and again whether there is something, without the interpreter.
#pragma once

#include <poll.h>
#include <sched.h>
#include <time.h>

#include <cstdint>

namespace {

inline int64_t now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * int64_t{1000000000} + now.tv_nsec;
}

inline bool is_readable(int fd) {
    pollfd asked = {fd, POLLIN, 0};
    return poll(&asked, 1, 0) > 0;
}

// Whether there is, within `for_ns`. An epoll descriptor speaks for all that it watches.
inline bool hears(int fd, int64_t for_ns) {
    const int64_t until_ns = now_ns() + for_ns;
    while (!is_readable(fd)) {
        if (now_ns() >= until_ns) return false;
        sched_yield();  // whoever is to say it may have been woken on this very core
    }
    return true;
}

}  // namespace
