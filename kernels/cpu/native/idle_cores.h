// The division of work among threads that compute on the cores of other processes only while these cores are idle.
//
// Several processes share the cores. Each process has a thread that computes, the *caller*, and *helpers*. A *region* is a
// number of pieces, in any order. The caller takes pieces from the front, helpers take pieces from the back, until none is
// left. Then the caller waits only for pieces that helpers have begun. A helper that loses its core to another process in
// the middle of a piece ends the piece on the caller's core. While another process computes on its core, a helper rests. So
// if other processes leave no core idle, the caller computes as if alone.
//
// Owns: the helpers, which thread computes which piece. Does not know: what a piece is.
#pragma once

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <csignal>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "simd.h"

namespace {

using Clock = std::chrono::steady_clock;

// The time for which a helper looks for work before it sleeps: longer than the gap between two layers of a prompt's pass.
// Until then the helper need not be woken, and another thread that wants its core gets the core at once.
constexpr auto LOOKING = std::chrono::milliseconds(1);
// A helper counts as having lost its core when the caller has waited for the helper's piece for this time, plus twice the time
// that a piece takes.
constexpr auto PATIENCE = std::chrono::microseconds(20);
// The time of work after which a helper lets another thread have its core, if one waits for it.
constexpr auto TURN = std::chrono::microseconds(50);
// A helper that cannot run for this time has lost its core to a thread that computes. A thread that only handles a message needs
// the core for a shorter time.
constexpr auto LOST = std::chrono::milliseconds(1);
// The niceness of helpers: other threads on a helper's core go first. But if helpers ran on idle cores alone (SCHED_IDLE), a
// helper that has begun a piece might wait for seconds, and its caller with it: other processes can want the caller's core too.
constexpr int NICENESS = 5;
constexpr Clock::duration SHORTEST_REST = std::chrono::milliseconds(1), LONGEST_REST = std::chrono::milliseconds(32);

INLINE void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
    syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

INLINE void wake_all(std::atomic<uint32_t>& word) { syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0); }

// The pieces [first, last) of the present region that no thread has taken, in one word. A helper first takes a piece, and then
// reads the region's function and argument.
struct Left {
    uint32_t first, last;

    static Left of(uint64_t bits) { return {uint32_t(bits >> 32), uint32_t(bits)}; }
    uint64_t bits() const { return uint64_t(first) << 32 | last; }
    uint32_t count() const { return last - first; }
};

using Compute = void (*)(void* argument, long n, int step);

// The pauses of a helper that has lost its core. Each pause is twice as long as the previous one, up to LONGEST_REST. If the helper
// last had a core for longer than it has been without one now, the next pause is SHORTEST_REST.
class Rest {
   public:
    // Pauses until the helper gets a core as soon as it wants one. It lost its core at `lost`, and got one again at `found`.
    void take(Clock::time_point lost, Clock::time_point found) {
        if (lost - ended > found - lost) time = SHORTEST_REST;
        for (bool is_late = true; is_late; time = std::min(2 * time, LONGEST_REST)) {
            const auto due = Clock::now() + time;
            std::this_thread::sleep_until(due);
            ended = Clock::now();
            is_late = ended - due > LOST;
        }
    }

   private:
    Clock::duration time = SHORTEST_REST;
    Clock::time_point ended;
};

class IdleCores {
   public:
    // Sets the number of threads, the caller's included. Helpers that have been started stay.
    void set_num_threads(int num_threads) {
        std::lock_guard<std::mutex> region(in_use);
        num_used.store(num_threads - 1);
        while (long(helpers.size()) < num_threads - 1) start();
        callers_core = -1;
    }

    // Forgets the helpers, in a child process, which has none of the threads.
    void forget() {
        helpers.clear();
        num_used.store(0);
    }

    // Makes the calling thread a guest, which computes for another process, beside this process's own caller. A guest does not move
    // the helpers off its core once the caller has moved them off the caller's core. If both threads moved the helpers, each region
    // would begin with a system call for every helper.
    void be_guest() { is_guest = true; }

    uint32_t placements() const { return num_placements.load(); }

    bool can_help() const { return num_used.load(std::memory_order_relaxed) > 0; }

    // Computes a region of `count` pieces. Returns when all pieces are computed.
    void run(uint32_t count, Compute compute, void* argument) {
        std::unique_lock<std::mutex> region(in_use, std::try_to_lock);
        if (!region.owns_lock()) {  // the helpers work for another thread
            for (uint32_t n = 0; n < count; n++) compute(argument, n, 1);
            return;
        }
        const auto began = Clock::now();
        if (const int core = sched_getcpu(); core != callers_core && !(is_guest && callers_core >= 0)) {
            place_helpers(core, false);
            callers_core = core;
        }
        current_compute.store(compute, std::memory_order_relaxed);
        current_argument.store(argument, std::memory_order_relaxed);
        num_done.store(0, std::memory_order_relaxed);
        left.exchange(Left{0, count}.bits());
        if (num_asleep.load() > 0) {
            num_wakes.fetch_add(1);
            wake_all(num_wakes);
        }
        uint32_t num_own = 0;
        for (uint64_t bits = left.load(std::memory_order_relaxed); Left::of(bits).count() > 0;) {
            const Left before = Left::of(bits);
            if (!left.compare_exchange_weak(bits, Left{before.first + 1, before.last}.bits())) continue;
            compute(argument, before.first, 1);
            num_own++;
            bits = left.load(std::memory_order_relaxed);
        }
        wait(count - num_own, (Clock::now() - began) / std::max(num_own, 1u));
    }

   private:
    void start() {
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the threads of the process
        const int number = int(helpers.size());
        helpers.push_back(new std::thread([this, number] { help(number); }));  // never joined: it ends with the process
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    void help(int number) {
        setpriority(PRIO_PROCESS, id_t(syscall(SYS_gettid)), NICENESS);
        Rest rest;
        auto worked = Clock::now(), yielded = worked;
        while (true) {
            const uint32_t wakes = num_wakes.load();
            const bool is_used = number < num_used.load(std::memory_order_relaxed);
            auto began = Clock::now();
            if (is_used && take_one()) {
                began = worked = Clock::now();
            } else if (began - worked > LOOKING) {
                num_asleep.fetch_add(1);
                if (!is_used || Left::of(left.load()).count() == 0) sleep_while(num_wakes, wakes);
                num_asleep.fetch_sub(1);
                worked = Clock::now();
                continue;
            }
            if (began == worked && worked - yielded < TURN) continue;
            sched_yield();
            yielded = Clock::now();
            if (yielded - began > LOST) rest.take(began, yielded);
        }
    }

    bool take_one() {
        uint64_t bits = left.load(std::memory_order_relaxed);
        const Left before = Left::of(bits);
        if (before.count() == 0 || !left.compare_exchange_strong(bits, Left{before.first, before.last - 1}.bits())) return false;
        // The region cannot end before this piece, so the function and argument are the region's own.
        current_compute.load(std::memory_order_relaxed)(current_argument.load(std::memory_order_relaxed), before.last - 1, -1);
        num_done.fetch_add(1);
        if (caller_sleeps.load()) wake_all(num_done);
        return true;
    }

    // Waits until helpers have computed the pieces that they have taken. `piece` is the time that a piece takes.
    void wait(uint32_t num_taken, Clock::duration piece) {
        const auto end = Clock::now() + PATIENCE + 2 * piece;
        while (num_done.load(std::memory_order_acquire) < num_taken) {
            _mm_pause();
            if (Clock::now() > end) return swap_places(num_taken);
        }
    }

    // Lets the caller sleep, so that a helper in the middle of a piece continues on the caller's core.
    void swap_places(uint32_t num_taken) {
        place_helpers(sched_getcpu(), true);
        callers_core = -1;
        caller_sleeps.store(true);
        for (uint32_t done; (done = num_done.load()) < num_taken;) sleep_while(num_done, done);
        caller_sleeps.store(false);
    }

    // Places the helpers on the caller's core `core` if `on_it`, else on all other cores that the process may use. On other cores
    // they do not wait for the caller.
    void place_helpers(int core, bool on_it) {
        num_placements.fetch_add(1, std::memory_order_relaxed);
        cpu_set_t cores;
        sched_getaffinity(0, sizeof cores, &cores);
        if (on_it) {
            CPU_ZERO(&cores);
            CPU_SET(core, &cores);
        } else if (CPU_COUNT(&cores) > 1) {
            CPU_CLR(core, &cores);
        }
        for (std::thread* helper : helpers) pthread_setaffinity_np(helper->native_handle(), sizeof cores, &cores);
    }

    std::mutex in_use;  // held while a region is computed
    std::vector<std::thread*> helpers;
    std::atomic<int> num_used{0};
    int callers_core = -1;
    static inline thread_local bool is_guest = false;
    std::atomic<uint32_t> num_placements{0};
    alignas(64) std::atomic<uint64_t> left{0};
    std::atomic<Compute> current_compute{nullptr};
    std::atomic<void*> current_argument{nullptr};
    std::atomic<uint32_t> num_wakes{0}, num_asleep{0};
    alignas(64) std::atomic<uint32_t> num_done{0};
    std::atomic<bool> caller_sleeps{false};
};

IdleCores& idle_cores() {
    static IdleCores& cores = *[] {
        pthread_atfork(nullptr, nullptr, [] { idle_cores().forget(); });
        return new IdleCores;  // never destroyed: helpers may look at it until the process ends
    }();
    return cores;
}

// Calls `compute(n, step)` for each n in [0, count), in any order. The thread that computes piece n will most likely go on with
// piece n + step.
template <class F>
INLINE void divide(long count, F compute) {
    IdleCores& cores = idle_cores();
    if (count < 2 || !cores.can_help()) {
        for (long n = 0; n < count; n++) compute(n, 1);
    } else {
        cores.run(uint32_t(count), [](void* argument, long n, int step) { (*(F*)argument)(n, step); }, &compute);
    }
}

}  // namespace
