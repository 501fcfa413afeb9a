// The loops of Algorithm 1 over all instances (Mooncake, section 6), with the paper's names and in its order.
//
// `algorithm1.py` is the reference, with the same results to the last bit: compile with -ffp-contract=off.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <limits>

namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

// Arrays by slot. The first five are written: the times that the prompt would take on each instance.
struct Columns {
    int64_t num_slots;
    double *queue_s, *rest_s, *ttft_s;
    uint8_t* is_remote;
    double* again_s;
    const uint8_t* is_prefill;
    const double *ends_s, *behind_head_s;
    const double *constant_s, *token_s, *pair_s;
    const int64_t* prefill_room_blocks;
    const double *next_iteration_s, *next_token_s, *next_delay;
    const double *iteration_s, *request_s, *kv_token_s;
    const int64_t* decode_room_blocks;
    const uint8_t* inlines;
    const int64_t* least_chunk_tokens;
    const double *num_prompts, *num_decoding, *num_decoding_tokens;
    const double *in_flight_bytes, *ordered_bytes;
};

struct Prompt {
    int64_t len, num_blocks, block_size, num_stored_blocks, num_coming_blocks;
    double load_block_s;
    struct {
        int64_t num_blocks;
        double whole_s, block_s, worth_below_blocks;
    } fetch;
    double now_s;

    int64_t prefix_len(int64_t prefix_blocks) const { return std::min(prefix_blocks * block_size, len - 1); }
};

struct Inlining {
    int64_t num_blocks, mixed_chunk_tokens;
    double budget_s;
};

bool is_in(const uint8_t* row, int64_t slot) { return row[slot / 8] >> slot % 8 & 1; }

// Numbers of blocks, each with a row of bits by slot. The first `num_depths` numbers are depths: the row has
// the slots that hold exactly so many leading blocks. The other `num_on_ssd` numbers are lengths of runs: the
// row has the slots that hold the run on SSD only.
struct Match {
    int64_t num_depths, num_on_ssd, row_bytes;
    const int32_t* numbers;
    const uint8_t* rows;

    const uint8_t* row(int64_t number) const { return rows + number * row_bytes; }

    bool has_longest(int64_t slot) const { return is_in(row(num_depths - 1), slot); }

    int64_t num_prefix_blocks(int64_t slot) const {
        int64_t number = 0;
        while (!is_in(row(number), slot)) number++;  // each slot is in the row of one depth
        return numbers[number];
    }

    int64_t num_ssd_blocks(int64_t slot) const {
        int64_t sum = 0;
        for (int64_t number = num_depths; number < num_depths + num_on_ssd; number++)
            if (is_in(row(number), slot)) sum += numbers[number];
        return sum;
    }
};

double estimate_prefill_queue_time(const Columns& at, int64_t p, const double* behind_s, double now_s) {
    double left_s = std::max(at.ends_s[p] - now_s, at.behind_head_s[p]);
    return behind_s ? left_s - behind_s[p] : left_s;
}

// The polynomial of `mooncake.messages.costs`. At least one token is computed, as the first output token is
// drawn from it.
double estimate_prefill_execution_time(const Columns& at, int64_t p, const Prompt& prompt, int64_t prefix_blocks) {
    int64_t prefix_len = prompt.prefix_len(prefix_blocks);
    double num_new = prompt.len - prefix_len, num_pairs = num_new * (prefix_len + num_new / 2);
    return at.constant_s[p] + num_new * at.token_s[p] + num_pairs * at.pair_s[p];
}

// The part of a prefill behind `prefix_blocks` for blocks that are coming elsewhere and that no instance holds.
double estimate_time_again(const Columns& at, int64_t p, const Prompt& prompt, int64_t prefix_blocks) {
    prefix_blocks = std::max(prefix_blocks, prompt.num_stored_blocks);
    if (prefix_blocks >= prompt.num_coming_blocks) return 0;
    double whole_s = estimate_prefill_execution_time(at, p, prompt, prefix_blocks);
    return whole_s - estimate_prefill_execution_time(at, p, prompt, prompt.num_coming_blocks);
}

bool has_room_to_decode(const Columns& at, int64_t d, int64_t num_blocks, const uint8_t* refused) {
    return at.decode_room_blocks[d] >= num_blocks && !(refused && is_in(refused, d));
}

}  // namespace

extern "C" {

// Line 4: returns the slot that can send the longest prefix first, among those that hold it.
int64_t find_best_prefix_match(const Columns* at, int64_t num_depths, int64_t num_on_ssd, const int32_t* numbers,
                               const uint8_t* rows, double block_bytes) {
    Match match{num_depths, num_on_ssd, (at->num_slots + 7) / 8, numbers, rows};
    int64_t best = 0;
    double least_bytes = kNever;
    for (int64_t slot = 0; slot < at->num_slots; slot++) {
        if (!match.has_longest(slot)) continue;
        double ahead_bytes = std::max(at->in_flight_bytes[slot], at->ordered_bytes[slot]);
        ahead_bytes += match.num_ssd_blocks(slot) * block_bytes;
        if (ahead_bytes < least_bytes) {
            least_bytes = ahead_bytes;
            best = slot;
        }
    }
    return best;
}

// Lines 2 to 23: writes the predicted times on each instance, and returns the slot with the least cost.
int64_t estimate_ttft(const Columns* at, int64_t num_depths, int64_t num_on_ssd, const int32_t* numbers,
                      const uint8_t* rows, const Prompt* prompt, const double* behind_s) {
    Match match{num_depths, num_on_ssd, (at->num_slots + 7) / 8, numbers, rows};
    const auto& fetch = prompt->fetch;
    int64_t p = 0;
    double least_cost_s = kNever;
    for (int64_t slot = 0; slot < at->num_slots; slot++) {
        int64_t prefix_blocks = match.num_prefix_blocks(slot);
        double t_queue = estimate_prefill_queue_time(*at, slot, behind_s, prompt->now_s);
        double local_s = match.num_ssd_blocks(slot) * prompt->load_block_s +
                         estimate_prefill_execution_time(*at, slot, *prompt, prefix_blocks);
        double t_transfer = fetch.whole_s - prefix_blocks * fetch.block_s;
        double remote_s = t_transfer + estimate_prefill_execution_time(*at, slot, *prompt, fetch.num_blocks);
        // Line 8, and section 6.2: a fetch must be quicker than computing what it brings.
        bool is_remote = prefix_blocks < fetch.worth_below_blocks && remote_s < local_s;
        double rest_s = is_remote ? remote_s : local_s;
        bool is_possible = at->is_prefill[slot] && at->prefill_room_blocks[slot] >= prompt->num_blocks;
        double ttft_s = is_possible ? t_queue + rest_s : kNever;
        double t_again = estimate_time_again(*at, slot, *prompt, is_remote ? fetch.num_blocks : prefix_blocks);
        if (ttft_s + t_again < least_cost_s) {
            least_cost_s = ttft_s + t_again;
            p = slot;
        }
        at->queue_s[slot] = t_queue;
        at->rest_s[slot] = rest_s;
        at->ttft_s[slot] = ttft_s;
        at->is_remote[slot] = is_remote;
        at->again_s[slot] = t_again;
    }
    return p;
}

// Line 24: returns the slot whose TBT with one more request is least, and writes this TBT; -1 if no instance
// has room. `refused` is the row of the slots that must not be chosen, or null.
int64_t select_decoding_instance(const Columns* at, int64_t len, int64_t num_blocks, const uint8_t* refused,
                                 double* tbt_s) {
    int64_t d = -1;
    *tbt_s = kNever;
    for (int64_t slot = 0; slot < at->num_slots; slot++) {
        double next_tbt_s = at->next_delay[slot] * (at->next_iteration_s[slot] + len * at->next_token_s[slot]);
        if (has_room_to_decode(*at, slot, num_blocks, refused) && next_tbt_s < *tbt_s) {
            *tbt_s = next_tbt_s;
            d = slot;
        }
    }
    return d;
}

// Section 5: returns the slot on which the prompt adds the least waiting if it is inlined there; -1 if it can
// be inlined nowhere. Writes the times of `Inlined` to `times_s`: queue, load, prefill, iterations beside,
// waiting.
int64_t select_inlining_instance(const Columns* at, int64_t num_depths, int64_t num_on_ssd, const int32_t* numbers,
                                 const uint8_t* rows, const Prompt* prompt, const double* behind_s,
                                 const Inlining* inlining, const uint8_t* refused, double* times_s) {
    Match match{num_depths, num_on_ssd, (at->num_slots + 7) / 8, numbers, rows};
    int64_t best = -1;
    for (int64_t slot = 0; slot < at->num_slots; slot++) {
        if (!at->inlines[slot] || !has_room_to_decode(*at, slot, inlining->num_blocks, refused)) continue;
        int64_t prefix_blocks = match.num_prefix_blocks(slot);
        double prefill_s = estimate_prefill_execution_time(*at, slot, *prompt, prefix_blocks), beside_s = 0;
        int64_t num_new = prompt->len - prompt->prefix_len(prefix_blocks);
        double num_decoding = at->num_decoding[slot];
        if (num_decoding) {
            double iteration_s = at->iteration_s[slot] + num_decoding * at->request_s[slot] +
                            at->num_decoding_tokens[slot] * at->kv_token_s[slot];
            double left_s = inlining->budget_s - iteration_s;
            int64_t chunk = std::max(prompt->block_size, std::min(at->least_chunk_tokens[slot], num_new));
            if (left_s <= 0 || chunk * (prefill_s / num_new) > left_s) continue;
            double num_chunks = left_s == kNever ? double(num_new) / inlining->mixed_chunk_tokens : prefill_s / left_s;
            beside_s = std::ceil(num_chunks) * iteration_s;
        }
        double queue_s = estimate_prefill_queue_time(*at, slot, behind_s, prompt->now_s);
        double load_s = match.num_ssd_blocks(slot) * prompt->load_block_s;
        double delayed_s = (num_decoding + at->num_prompts[slot]) * prefill_s;
        double again_s = estimate_time_again(*at, slot, *prompt, prefix_blocks);
        double waiting_s = queue_s + load_s + prefill_s + beside_s + delayed_s + again_s;
        if (best >= 0 && waiting_s >= times_s[4]) continue;
        best = slot;
        const double found_s[] = {queue_s, load_s, prefill_s, beside_s, waiting_s};
        std::copy(std::begin(found_s), std::end(found_s), times_s);
    }
    return best;
}
}
