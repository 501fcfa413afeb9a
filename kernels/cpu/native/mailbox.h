// A mailbox, through which an owner of sequences and its helper, another process, exchange passes: counters, and data behind
// them, which Python lays out.
//
// Either both processes map the mailbox, or each has one for itself, and a stream connects them: what one side writes is sent to
// the same place of the other side's mailbox.
//
// Owns: counters, waits, the stream. Does not know: what is exchanged.
#pragma once

#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <iterator>

#include "idle_cores.h"

namespace {

// The time for which a waiter spins before it sleeps. LONG_SPIN, on a core that no other thread wants, is longer than the 0.6 ms
// between two layers of SmolLM2-135M, so that its helper is not woken for each layer.
constexpr Clock::duration LONG_SPIN = std::chrono::milliseconds(1), SHORT_SPIN = std::chrono::microseconds(50);
// The time for which spins are short after a waiter has lost its core (LOST). A waiter that sleeps and is woken goes before the thread
// that took its core; a waiter that spins waits until that thread's time is over.
constexpr auto SHORT_SPINS = std::chrono::seconds(1);
constexpr int LOOK_MS = 100;  // milliseconds between two looks of a waiter whether the other side has closed: a wake may be missed
constexpr timespec EXCHANGE_LOOK = {0, LOOK_MS * 1'000'000};

enum class Counter : uint32_t { BEGUN, ASKED, ANSWERED, COMPUTED, NONE };

// The header of a message on a stream: `num_bytes` bytes follow, which the sender has written at `offset` of its
// mailbox. When they have arrived, `counter` becomes `value`.
struct Frame {
    Counter counter;
    uint32_t value;
    uint64_t offset, num_bytes;
};

// This process's end of a stream. In a mailbox that both processes map, all fields are 0 and unused.
struct Wire {
    uint64_t mailbox_bytes;  // 0 where both processes map the mailbox
    int32_t descriptor;
    int64_t timeout_ms;  // the time for which the other side may take nothing; 0: no limit
    Frame frame;         // the frame that arrives
    uint64_t num_received;

    bool is_connected() const { return mailbox_bytes != 0; }
};

// The beginning of a mailbox, of COUNTERS_BYTES. Only the owner counts up `begun` and `asked`, only the helper counts
// up `answered` and `computed`.
struct Mailbox {
    alignas(64) std::atomic<uint32_t> begun;     // passes that are described
    alignas(64) std::atomic<uint32_t> asked;     // layers
    alignas(64) std::atomic<uint32_t> answered;  // layers that were asked (moved_attention.h), or whole passes (hosted_layers.py)
    alignas(64) std::atomic<uint32_t> closed;    // 1 when one side has ended the exchange
    alignas(64) std::atomic<uint32_t> computed;  // layers of passes that are answered as a whole
    alignas(64) Wire wire;

    std::atomic<uint32_t>& count(Counter counter) {
        std::atomic<uint32_t>* counts[] = {&begun, &asked, &answered, &computed};
        return *counts[uint32_t(counter)];
    }
};
constexpr uint64_t COUNTERS_BYTES = 4096;
static_assert(sizeof(Mailbox) <= COUNTERS_BYTES);

// Wakes a waiter that is in another process, unlike in idle_cores.h.
INLINE void wake_other(std::atomic<uint32_t>& word) { syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

inline void close_exchange(Mailbox& mailbox) {
    mailbox.closed.store(1);
    if (mailbox.wire.is_connected()) {
        shutdown(mailbox.wire.descriptor, SHUT_RDWR);
    } else {
        for (std::atomic<uint32_t>* word : {&mailbox.begun, &mailbox.asked, &mailbox.answered}) wake_other(*word);
    }
}

enum class Received { SOME, NOTHING, END };

// Receives the bytes of one frame that have arrived. A frame that does not fit ends the stream.
inline Received receive_part(Mailbox& mailbox) {
    Wire& wire = mailbox.wire;
    Frame& frame = wire.frame;
    char *head = reinterpret_cast<char*>(&frame), *base = reinterpret_cast<char*>(&mailbox);
    const bool is_head = wire.num_received < sizeof frame;
    char* to = is_head ? head + wire.num_received : base + frame.offset + (wire.num_received - sizeof frame);
    const uint64_t end = is_head ? sizeof frame : sizeof frame + frame.num_bytes;
    const ssize_t num = recv(wire.descriptor, to, end - wire.num_received, MSG_DONTWAIT);
    if (num < 0 && (errno == EAGAIN || errno == EINTR)) return Received::NOTHING;
    if (num <= 0) return Received::END;
    wire.num_received += uint64_t(num);
    if (wire.num_received < sizeof frame) return Received::SOME;
    if (is_head) {
        const uint64_t size = wire.mailbox_bytes;
        const bool fits = frame.offset >= COUNTERS_BYTES && frame.offset <= size && frame.num_bytes <= size - frame.offset;
        if (!fits || frame.counter > Counter::NONE) return Received::END;
    }
    if (wire.num_received == sizeof frame + frame.num_bytes) {
        if (frame.counter != Counter::NONE) mailbox.count(frame.counter).store(frame.value, std::memory_order_release);
        wire.num_received = 0;
    }
    return Received::SOME;
}

// Receives bytes that have arrived. If there are none, waits for at most `wait_ms`.
inline void receive(Mailbox& mailbox, int wait_ms) {
    const Received received = receive_part(mailbox);
    if (received == Received::END) return close_exchange(mailbox);
    if (received == Received::SOME || wait_ms == 0) return;
    pollfd arrival = {mailbox.wire.descriptor, POLLIN, 0};
    poll(&arrival, 1, wait_ms);
}

// Receives all bytes that have arrived.
inline void receive_all(Mailbox& mailbox) {
    Received received;
    while ((received = receive_part(mailbox)) == Received::SOME) {}
    if (received == Received::END) close_exchange(mailbox);
}

// Sends a frame, and the bytes that this side has written. Receives meanwhile, else both sides could wait for each other. Closes the
// exchange if the other side takes no bytes for `timeout_ms`; a helper that computes a layer takes none until the layer is done.
inline void send_frame(Mailbox& mailbox, Frame frame) {
    const Wire& wire = mailbox.wire;
    iovec parts[] = {{&frame, sizeof frame}, {reinterpret_cast<char*>(&mailbox) + frame.offset, frame.num_bytes}};
    auto taken = Clock::now();
    while (parts[0].iov_len + parts[1].iov_len > 0 && !mailbox.closed.load()) {
        msghdr message = {};
        message.msg_iov = parts;
        message.msg_iovlen = std::size(parts);
        ssize_t num = sendmsg(wire.descriptor, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (num < 0 && errno == EINTR) continue;
        if (num < 0 && errno == EAGAIN) {
            if (wire.timeout_ms && Clock::now() - taken > std::chrono::milliseconds(wire.timeout_ms))
                return close_exchange(mailbox);
            pollfd either = {wire.descriptor, POLLIN | POLLOUT, 0};
            poll(&either, 1, LOOK_MS);
            if (either.revents & POLLIN) receive_all(mailbox);
            continue;
        }
        if (num < 0) return close_exchange(mailbox);
        taken = Clock::now();
        for (iovec& part : parts) {
            const size_t of_part = std::min(size_t(num), part.iov_len);
            part.iov_base = static_cast<char*>(part.iov_base) + of_part;
            part.iov_len -= of_part;
            num -= ssize_t(of_part);
        }
    }
}

// Sends bytes of the mailbox that this side has written, and then the `value` of `counter`, if the sides share no memory.
inline void show(Mailbox& mailbox, const void* data, uint64_t num_bytes, Counter counter = Counter::NONE, uint32_t value = 0) {
    const uint64_t offset = uint64_t(static_cast<const char*>(data) - reinterpret_cast<const char*>(&mailbox));
    if (mailbox.wire.is_connected()) send_frame(mailbox, {counter, value, offset, num_bytes});
}

// Counts a counter of this side up, after this side has written bytes.
inline void count_up(Mailbox& mailbox, Counter counter, const void* data, uint64_t num_bytes) {
    std::atomic<uint32_t>& count = mailbox.count(counter);
    count.store(count.load() + 1);
    show(mailbox, data, num_bytes, counter, count.load());
    if (!mailbox.wire.is_connected()) wake_other(count);
}

// Counts a computed layer of a pass whose layers are answered together (hosted_layers.py). Wakes nobody. Receives from the stream,
// because the owner may send another pass meanwhile.
inline void layer_computed(Mailbox& mailbox) {
    const uint32_t computed = mailbox.computed.fetch_add(1) + 1;
    if (!mailbox.wire.is_connected()) return;
    show(mailbox, reinterpret_cast<const char*>(&mailbox) + COUNTERS_BYTES, 0, Counter::COMPUTED, computed);
    receive_all(mailbox);
}

// Returns whether a waiter that began at `began` spins once more. If not, it shall sleep. In a long spin other threads may have the core.
inline bool keep_spinning(Clock::time_point began, Clock::time_point now) {
    static thread_local Clock::time_point short_until;
    if (now < short_until) {
        _mm_pause();
        return now - began < SHORT_SPIN;
    }
    if (now - began >= LONG_SPIN) return false;
    sched_yield();
    if (const auto back = Clock::now(); back - now > LOST) short_until = back + SHORT_SPINS;
    return true;
}

// Waits until `is_due` holds for the value of `word`. Returns false if the exchange is closed before, or `end` has passed. `is_due`
// may put `end` off.
template <class F>
bool wait_other(Mailbox& mailbox, std::atomic<uint32_t>& word, F is_due,
                const Clock::time_point& end = Clock::time_point::max()) {
    const auto began = Clock::now();
    for (uint32_t value; !is_due(value = word.load(std::memory_order_acquire));) {
        const auto now = Clock::now();
        if (mailbox.closed.load() || now > end) return false;
        if (mailbox.wire.is_connected()) {
            receive(mailbox, now - began < SHORT_SPIN ? 0 : LOOK_MS);
        } else if (!keep_spinning(began, now)) {
            syscall(SYS_futex, &word, FUTEX_WAIT, value, &EXCHANGE_LOOK, nullptr, 0);
        }
    }
    return true;
}

// Waits until the passes up to `number` are answered as a whole (hosted_layers.py). Returns false if the exchange is closed before,
// or if the helper takes longer than `timeout_ms` for a layer.
inline bool wait_answer(Mailbox& mailbox, uint32_t number, int64_t timeout_ms) {
    const uint32_t num_ahead = mailbox.begun.load() - number;  // passes behind this one, which may be answered too
    const auto layer_end = [=] { return Clock::now() + std::chrono::milliseconds(timeout_ms); };
    auto end = layer_end();
    uint32_t computed = mailbox.computed.load();
    const auto is_answered = [&](uint32_t answered) {
        const uint32_t before = computed;
        computed = mailbox.computed.load();
        if (computed != before) end = layer_end();
        return answered - number <= num_ahead;
    };
    return wait_other(mailbox, mailbox.answered, is_answered, end);
}

}  // namespace
