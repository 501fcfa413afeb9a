// Pages of the KVCache, copied between two arrangements in memory.
//
// One call copies all pages, so that a thread in Python waits for the interpreter's lock once.
//
// Owns: copies. Does not know: what pages contain; its caller has checked all sizes.
#pragma once

#include <cstdint>
#include <cstring>

namespace {

// The place of a page's part in both arrangements: the part of page p begins p strides behind the part of the first page.
struct PagePart {
    const char* source;
    char* target;
    int64_t source_stride, target_stride, num_bytes;
};

inline void copy_pages_of(const PagePart& part, const int64_t* sources, const int64_t* targets, int64_t num_pages) {
    for (int64_t i = 0; i < num_pages; i++)
        memcpy(part.target + targets[i] * part.target_stride, part.source + sources[i] * part.source_stride, part.num_bytes);
}

}  // namespace
