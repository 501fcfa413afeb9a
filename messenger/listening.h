// Asks a descriptor again and again whether there is something, without the interpreter.
#pragma once

#include <poll.h>
#include <sched.h>
#include <time.h>

#include <cstdint>

namespace {

// Whether there is, within `for_ns`. An epoll descriptor speaks for all that it watches.
inline bool hears(int fd, int64_t for_ns) {
    const auto now_ns = [] {
        timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        return now.tv_sec * int64_t{1000000000} + now.tv_nsec;
    };
    const int64_t until_ns = now_ns() + for_ns;
    pollfd asked = {fd, POLLIN, 0};
    while (poll(&asked, 1, 0) <= 0) {
        if (now_ns() >= until_ns) return false;
        sched_yield();  // whoever is to say it may have been woken on this very core
    }
    return true;
}

}  // namespace
