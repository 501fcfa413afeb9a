// A hash table from block keys (16 bytes) to numbers (32 bits, 0: not there), for tens of millions of keys.
//
// Open addressing in 256 segments that grow one by one, so no insertion waits longer than one segment takes to
// grow. An entry is 20 bytes and a lookup one cache miss; the misses of one call overlap.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr size_t kSegments = 256, kSmallest = 16, kAhead = 16;

#pragma pack(push, 4)
struct Entry {
    uint64_t low, high;
    int32_t number;  // 0: free
};
#pragma pack(pop)

Entry entry_of(const uint8_t* key, int32_t number) {
    Entry entry;
    std::memcpy(&entry.low, key, 8);
    std::memcpy(&entry.high, key + 8, 8);
    entry.number = number;
    return entry;
}

// The topmost bits of the hash choose the segment, the lowest ones the place in the segment.
uint64_t hash(const Entry& entry) {
    uint64_t mixed = (entry.low ^ (entry.high * 0x9E3779B97F4A7C15)) * 0xD6E8FEB86659FD93;
    return (mixed ^ (mixed >> 32)) * 0xD6E8FEB86659FD93;
}

class Segment {
  public:
    void prefetch(uint64_t hash) const {
        if (!entries_.empty()) __builtin_prefetch(&entries_[hash & mask()]);
    }

    int32_t find(const Entry& wanted, uint64_t hash) const {
        return entries_.empty() ? 0 : entries_[place(wanted, hash)].number;
    }

    // Returns 1 if the key is new, else 0.
    int set(const Entry& wanted, uint64_t hash) {
        if (num_keys_ * 8 >= entries_.size() * 7) grow();
        Entry& entry = entries_[place(wanted, hash)];
        bool is_new = !entry.number;
        entry = wanted;
        num_keys_ += is_new;
        return is_new;
    }

    // Returns 1 if the key was there, else 0.
    int erase(const Entry& wanted, uint64_t hash) {
        if (!find(wanted, hash)) return 0;
        erase_at(place(wanted, hash));
        return 1;
    }

    // Drops the marked keys of at most `room` places from `start` on, and appends their numbers to `removed`.
    // Returns the first place that was not examined.
    size_t sweep(size_t start, const uint8_t* is_marked, int32_t* removed, size_t room, size_t* num_removed) {
        while (start < entries_.size() && room > 0) {
            int32_t number = entries_[start].number;
            if (number && is_marked[number]) {
                erase_at(start);  // another entry may be here now
                removed[(*num_removed)++] = number;
            } else {
                start++;
            }
            room--;
        }
        return start;
    }

    bool ends_at(size_t place) const { return place >= entries_.size(); }

  private:
    size_t mask() const { return entries_.size() - 1; }

    // Returns the place of the key, or the free place where the key belongs.
    size_t place(const Entry& wanted, uint64_t hash) const {
        size_t place = hash & mask();
        while (entries_[place].number &&
               (entries_[place].low != wanted.low || entries_[place].high != wanted.high))
            place = (place + 1) & mask();
        return place;
    }

    void grow() {
        std::vector<Entry> before(entries_.empty() ? kSmallest : 2 * entries_.size(), Entry{0, 0, 0});
        before.swap(entries_);
        for (const Entry& entry : before)
            if (entry.number) entries_[place(entry, hash(entry))] = entry;
    }

    // Frees the place `gap` and moves later entries up to close the gap, so that searches need no tombstones.
    void erase_at(size_t gap) {
        for (size_t next = (gap + 1) & mask(); entries_[next].number; next = (next + 1) & mask()) {
            size_t home = hash(entries_[next]) & mask();
            if (((next - home) & mask()) >= ((next - gap) & mask())) {
                entries_[gap] = entries_[next];
                gap = next;
            }
        }
        entries_[gap].number = 0;
        num_keys_--;
    }

    std::vector<Entry> entries_;  // a power of two of them, or none
    size_t num_keys_ = 0;
};

struct Table {
    Segment segments[kSegments];
    int64_t num_keys = 0;
    size_t swept_segment = 0, swept_place = 0;

    Segment& segment(uint64_t hash) { return segments[hash >> 56]; }

    // Calls `visit(i, entry, hash)` for each key. The key's place was prefetched `kAhead` keys before.
    template <class Visit>
    void for_each(const uint8_t* keys, size_t num_keys, Visit visit) {
        uint64_t hashes[kAhead];
        for (size_t i = 0; i < num_keys + kAhead; i++) {
            if (i >= kAhead) {
                size_t now = i - kAhead;
                visit(now, entry_of(keys + 16 * now, 0), hashes[now % kAhead]);
            }
            if (i < num_keys) {
                uint64_t ahead = hashes[i % kAhead] = hash(entry_of(keys + 16 * i, 0));
                segment(ahead).prefetch(ahead);
            }
        }
    }
};

}  // namespace

extern "C" {

Table* table_new() { return new Table; }

void table_free(Table* table) { delete table; }

int64_t table_len(const Table* table) { return table->num_keys; }

void table_find(Table* table, const uint8_t* keys, size_t num_keys, int32_t* numbers) {
    table->for_each(keys, num_keys, [&](size_t i, const Entry& key, uint64_t hash) {
        numbers[i] = table->segment(hash).find(key, hash);
    });
}

// Writes the runs of equal numbers before the first key that is not in the table: the number of each run, and
// the index behind its last key. Returns the number of runs.
size_t table_runs(Table* table, const uint8_t* keys, size_t num_keys, int32_t* numbers, int32_t* ends) {
    size_t num_runs = 0;
    bool is_over = false;
    table->for_each(keys, num_keys, [&](size_t i, const Entry& key, uint64_t hash) {
        int32_t number = is_over ? 0 : table->segment(hash).find(key, hash);
        is_over = !number;
        if (is_over) return;
        if (!num_runs || numbers[num_runs - 1] != number) numbers[num_runs++] = number;
        ends[num_runs - 1] = static_cast<int32_t>(i + 1);
    });
    return num_runs;
}

// Sets the number of each key. The number 0 drops its key.
void table_set(Table* table, const uint8_t* keys, size_t num_keys, const int32_t* numbers) {
    table->for_each(keys, num_keys, [&](size_t i, Entry key, uint64_t hash) {
        key.number = numbers[i];
        Segment& segment = table->segment(hash);
        table->num_keys += key.number ? segment.set(key, hash) : -segment.erase(key, hash);
    });
}

// Examines at most the next `num_places` places of one segment, and drops keys whose number is marked. Writes
// the numbers of the dropped keys to `removed`, which has room for `num_places`, and returns how many they are.
// A call after the end of a segment goes on with the next one, and after the last one with the first.
size_t table_sweep(Table* table, size_t num_places, const uint8_t* is_marked, int32_t* removed) {
    size_t num_removed = 0;
    Segment& segment = table->segments[table->swept_segment];
    table->swept_place = segment.sweep(table->swept_place, is_marked, removed, num_places, &num_removed);
    if (segment.ends_at(table->swept_place)) {
        table->swept_segment = (table->swept_segment + 1) % kSegments;
        table->swept_place = 0;
    }
    table->num_keys -= num_removed;
    return num_removed;
}
}
