// Receives the frame that comes next, its payload straight to where it belongs, and answers it, before anything of
// it is read by those who know more.
//
// They read its head afterwards, and do all that is to be done: this only runs ahead of them. So it takes only what
// they would certainly take, as their tables say (see openings.py), and leaves the rest to them.
#include "answering.h"
#include "arriving.h"
#include "listening.h"
#include "meta.h"
#include "sending.h"

namespace {

constexpr size_t kGlanceBytes = 2048;         // has the head of a write of some layers
constexpr size_t kMostReceived = 1024 * 1024; // before others may have their turn
constexpr size_t kMostTargets = 64, kMostLayers = 256;
constexpr size_t kTransfers = 64;
constexpr int64_t kPatienceNs = 200'000;

// Openings of a segment: which layers of which pages may be written, and for whom.
struct Pages {
    const uint64_t* grants;       // by page: one more than the grant that it is open for, else 0
    const uint64_t* generations;  // by page
    const uint8_t* taken;         // by page and layer: not 0 if it is there, or comes already
    uint8_t* memory;
    uint64_t num_pages, page_stride, first_layer, num_layers, layer_bytes, most_bytes;
};

// Transfers of a sender: of those in `open` the latest with each remainder.
struct Transfers {
    uint64_t first_new;  // it has not named this one, nor any that is higher
    struct {
        uint64_t number, grant;  // the grant as in Pages
    } open[kTransfers];
};

struct Target {
    uint8_t* begin;
    uint64_t num_bytes;  // whole layers

    const uint8_t* end() const { return begin + num_bytes; }
};

struct Placement {
    // in
    const Pages* pages;  // where writes go; or null
    const Transfers* transfers;
    const uint8_t* answer;  // to a write that is there and intact: ours, or that of who is asked
    uint64_t answer_bytes;
    Segment segment;     // from which blocks are sent
    const Shelf* shelf;  // where fetches find blocks in it; or null
    uint64_t may_answer, may_answer_fetches;
    Target expected;  // where the only payload goes that may come; of no bytes if nowhere
    uint64_t expected_layer_bytes;
    // out
    uint64_t num_ahead;  // bytes in the buffer: the head, and what has come behind the payload
    uint64_t num_received;
    uint64_t num_targets;  // of the payload; 0: it is in the buffer, if there is any
    uint64_t num_there;    // bytes in all targets
    uint64_t num_hashed;   // of the last target that has any
    uint64_t layer_bytes;
    uint64_t num_answered;
    uint64_t num_asked;    // bytes of the request that have left
    uint64_t is_answered;  // not 0: that it is done is all that has come, and the block that was asked for is intact
    uint64_t num_head;  // of the answer to a fetch; 0: there was none
    uint64_t num_sent;  // of that, and of the blocks behind it
    Target targets[kMostTargets];
    uint64_t state[8];
    uint64_t digests[kMostLayers];
    uint8_t head[kMostHeadBytes];
};
static_assert(sizeof(Pages) == 80 && sizeof(Transfers) == 8 + 16 * kTransfers &&
              sizeof(Placement) == 8 * (23 + 2 * kMostTargets + 8 + kMostLayers) + kMostHeadBytes);

// Whether this says that a transfer is done, or a fetch: nobody is the worse for hearing it later.
bool can_wait(MetaReader done, MetaReader fetched) {
    done.literal("\x83\xa4type\xa5" "Close\xabtransfer_id");
    done.number();
    done.literal("\xa6reason\xc0");
    fetched.literal("\x81\xa4type\xa9" "FetchDone");
    return done.is_read() || fetched.is_read();
}

// Where the payload of a write goes, if all of it is wanted: then `placement` has its targets. Returns the checksums
// that it should have, in the buffer, entry by entry.
bool find_targets(Placement& placement, MetaReader meta, uint64_t payload_bytes, const uint8_t** checksums) {
    const Pages& pages = *placement.pages;
    meta.literal("\x86\xa4type\xa5Write\xabtransfer_id");
    const uint64_t transfer = meta.number();
    meta.literal("\xa8grant_id");
    const uint64_t grant = meta.number() + 1;
    meta.literal("\xa7" "entries");
    const size_t num_entries = meta.array();
    const auto& opened = placement.transfers->open[transfer % kTransfers];
    const bool is_open = opened.grant != 0 && opened.number == transfer;
    if (is_open ? opened.grant != grant : transfer < placement.transfers->first_new) return false;
    if (num_entries == 0 || num_entries > kMostTargets || payload_bytes > pages.most_bytes) return false;
    uint64_t num_bytes = 0;
    for (size_t i = 0; i < num_entries; i++) {
        meta.literal("\x96");
        const uint64_t page = meta.number(), generation = meta.number();
        const uint64_t begin = meta.number(), end = meta.number();
        size_t checksum_bytes;
        checksums[i] = meta.binary(&checksum_bytes);
        meta.number();  // where it comes from
        if (!meta.is_good()) return false;
        if (page >= pages.num_pages || pages.grants[page] != grant || pages.generations[page] != generation)
            return false;
        if (begin < pages.first_layer || end <= begin || end - pages.first_layer > pages.num_layers) return false;
        const uint64_t num_layers = end - begin, first = begin - pages.first_layer;
        if (checksum_bytes != num_layers * sizeof(uint64_t)) return false;
        const uint8_t* taken = pages.taken + page * pages.num_layers + first;
        if (std::any_of(taken, taken + num_layers, [](uint8_t is_taken) { return is_taken != 0; })) return false;
        Target& target = placement.targets[i];
        target = {pages.memory + page * pages.page_stride + first * pages.layer_bytes,
                  num_layers * pages.layer_bytes};
        for (const Target* other = placement.targets; other < &target; other++)
            if (target.begin < other->end() && other->begin < target.end()) return false;
        num_bytes += target.num_bytes;
    }
    meta.literal("\xa5heads\xc0\xa9is_placed\xc2");
    if (!meta.is_read() || num_bytes != payload_bytes || num_bytes > kMostLayers * pages.layer_bytes) return false;
    placement.num_targets = num_entries;
    placement.layer_bytes = pages.layer_bytes;
    return true;
}

// The checksums of the only block that is found, or null if this says anything else.
const uint8_t* checksums_of_found(MetaReader meta, size_t num_bytes) {
    meta.literal("\x83\xa4type\xa5" "Found\xa6" "blocks\x91\x95\0");
    size_t checksum_bytes;
    const uint8_t* const checksums = meta.binary(&checksum_bytes);
    meta.number();  // where it comes from
    meta.literal("\0\0\xa7" "failure\xc0");
    return meta.is_read() && checksum_bytes == num_bytes ? checksums : nullptr;
}

ssize_t receive_some(int fd, uint8_t* buffer, size_t num_bytes) {
    ssize_t received;
    do received = recv(fd, buffer, num_bytes, MSG_DONTWAIT);
    while (received < 0 && errno == EINTR);
    return received;
}

// The same of what comes within `for_ns`, unless `others` can be read before.
ssize_t receive_within(int fd, uint8_t* buffer, size_t num_bytes, int others, int64_t for_ns) {
    const int64_t until_ns = for_ns > 0 ? now_ns() + for_ns : 0;
    for (bool is_last = for_ns <= 0;;) {
        const ssize_t received = receive_some(fd, buffer, num_bytes);
        if (received >= 0 || errno != EAGAIN || is_last) return received;
        is_last = is_readable(others);
        if (is_last) continue;
        if (now_ns() >= until_ns) return errno = EAGAIN, -1;
        sched_yield();  // whoever is to say it may have been woken on this very core
    }
}

// Finds in the buffer a frame whose payload is known to belong somewhere, behind none but such that can wait.
// Returns where its payload begins, or null. A fetch in its place is answered over `fd`.
uint8_t* find(int fd, uint8_t* buffer, Placement& placement, const uint8_t** checksums) {
    uint8_t *const end = buffer + placement.num_ahead, *at = buffer;
    while (end - at >= kFrameHeaderBytes) {
        const uint64_t meta_bytes = read32(at), payload_bytes = read32(at + sizeof(uint32_t));
        at += kFrameHeaderBytes;
        if (meta_bytes > static_cast<uint64_t>(end - at)) return nullptr;
        const MetaReader meta(at, at + meta_bytes);
        at += meta_bytes;
        if (payload_bytes != 0 && placement.pages != nullptr)
            return find_targets(placement, meta, payload_bytes, checksums) ? at : nullptr;
        if (payload_bytes != 0) {
            if (payload_bytes != placement.expected.num_bytes) return nullptr;
            placement.targets[0] = placement.expected;
            placement.num_targets = 1;
            placement.layer_bytes = placement.expected_layer_bytes;
            const uint64_t num_layers = payload_bytes / placement.layer_bytes;
            checksums[0] = checksums_of_found(meta, num_layers * sizeof(uint64_t));
            return at;
        }
        if (placement.pages == nullptr) return nullptr;
        if (can_wait(meta, meta)) continue;
        if (placement.shelf != nullptr && placement.may_answer_fetches)
            placement.num_sent =
                answer_fetch(fd, placement.segment, *placement.shelf, meta, placement.head, &placement.num_head);
        return nullptr;
    }
    return nullptr;
}

// Fills the targets in their order, at first from the buffer, where `payload` is the rest of it.
void receive_payload(int fd, uint8_t* buffer, uint8_t* payload, Placement& p) {
    size_t budget = kMostReceived;
    int64_t waiting_since = 0;  // for whichever of them: others wait for all of this
    uint64_t* digests = p.digests;
    for (const Target* target = p.targets; target < p.targets + p.num_targets; target++) {
        uint8_t* const end = buffer + p.num_ahead;
        const size_t num_ready = std::min<size_t>(end - payload, target->num_bytes);
        std::memcpy(target->begin, payload, num_ready);
        std::memmove(payload, payload + num_ready, end - payload - num_ready);
        p.num_ahead -= num_ready;
        p.num_hashed = hash_there(target->begin, p.layer_bytes, 0, num_ready, p.state, digests);
        const ssize_t there =
            receive_and_hash(fd, target->begin, p.layer_bytes, num_ready,
                             std::min<size_t>(target->num_bytes, num_ready + budget), kPatienceNs, waiting_since,
                             &p.num_hashed, p.state, digests);
        const size_t num_there = std::max<ssize_t>(there, num_ready);  // whoever receives next finds out why
        p.num_received += num_there - num_ready;
        p.num_there += num_there;
        if (num_there < target->num_bytes) return;
        budget -= num_there - num_ready;
        digests += target->num_bytes / p.layer_bytes;
    }
}

// Whether all of it is there, and as it should be.
bool is_intact(const Placement& placement, const uint8_t* const* checksums) {
    const uint64_t* digests = placement.digests;
    uint64_t num_bytes = 0;
    for (size_t i = 0; i < placement.num_targets; i++) num_bytes += placement.targets[i].num_bytes;
    if (placement.num_there < num_bytes) return false;
    for (size_t i = 0; i < placement.num_targets; i++) {
        const size_t num_layers = placement.targets[i].num_bytes / placement.layer_bytes;
        if (checksums[i] == nullptr) return false;
        if (std::memcmp(digests, checksums[i], num_layers * sizeof(uint64_t)) != 0) return false;
        digests += num_layers;
    }
    return true;
}

}  // namespace

// Receives something into `buffer`, which is empty, and what `placement` says. The result is the number of bytes
// received, or the negative errno if there came none (0: the end of the stream). Layers have more than 240 bytes.
// It listens for `listen_ns` until `others` can be read, if that is not 0: a descriptor that speaks for `fd` too.
extern "C" ssize_t receive_direct(int fd, uint8_t* buffer, size_t buffer_bytes, Placement* placement, int others,
                                  int64_t listen_ns) {
    placement->num_targets = placement->num_there = placement->num_hashed = placement->num_answered = 0;
    placement->num_head = placement->num_sent = placement->is_answered = 0;
    const ssize_t glanced =
        receive_within(fd, buffer, std::min(kGlanceBytes, buffer_bytes), others, listen_ns);
    if (glanced <= 0) return glanced < 0 ? -errno : 0;
    placement->num_ahead = placement->num_received = glanced;
    const uint8_t* checksums[kMostTargets];
    if (uint8_t* const payload = find(fd, buffer, *placement, checksums)) {
        receive_payload(fd, buffer, payload, *placement);
        if (placement->may_answer && is_intact(*placement, checksums)) {
            const ssize_t sent = send(fd, placement->answer, placement->answer_bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
            placement->num_answered = std::max<ssize_t>(sent, 0);
        } else if (placement->pages == nullptr) {
            const bool is_alone = payload - buffer == static_cast<ptrdiff_t>(placement->num_ahead);
            placement->is_answered = is_alone && is_intact(*placement, checksums);
        }
    } else if (glanced == kGlanceBytes) {
        const ssize_t more = receive_some(fd, buffer + glanced, buffer_bytes - glanced);
        if (more > 0) placement->num_ahead = placement->num_received = glanced + more;
    }
    return placement->num_received;
}

// Sends a request, its head and the block that it brings, and then listens for what comes next as `receive_direct`
// does, if all of it has left: `num_asked`. The result is the same; the negative errno too if it could not be sent.
extern "C" ssize_t exchange(int fd, const uint8_t* head, size_t head_bytes, int64_t offset, size_t block_bytes,
                            uint8_t* buffer, size_t buffer_bytes, Placement* placement, int others,
                            int64_t listen_ns) {
    placement->num_asked = placement->is_answered = 0;
    const ssize_t sent = send_block(fd, head, head_bytes, placement->segment, offset, block_bytes);
    if (sent < 0) return sent;
    placement->num_asked = sent;
    if (placement->num_asked < head_bytes + block_bytes) return -EAGAIN;
    const ssize_t received = receive_direct(fd, buffer, buffer_bytes, placement, others, listen_ns);
    if (received > 0 && placement->expected.num_bytes == 0 && placement->num_ahead == placement->answer_bytes)
        placement->is_answered = std::memcmp(buffer, placement->answer, placement->answer_bytes) == 0;
    return received;
}
