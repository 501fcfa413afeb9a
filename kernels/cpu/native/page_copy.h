// Pages of the KVCache, copied between two arrangements in memory, and the memory that they need.
//
// Each function is one call for all pages, so that a thread in Python waits for the interpreter's lock once.
//
// Owns: copies, early allocation. Does not know: what pages contain; its caller has checked all sizes.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace {

// Where a page's part lies in both arrangements: that of page p of an arrangement begins p strides behind the first page's.
struct PagePart {
    const char* source;
    char* target;
    int64_t source_stride, target_stride, num_bytes;
};

inline void copy_pages_of(const PagePart& part, const int64_t* sources, const int64_t* targets, int64_t num_pages) {
    for (int64_t i = 0; i < num_pages; i++)
        memcpy(part.target + targets[i] * part.target_stride, part.source + sources[i] * part.source_stride, part.num_bytes);
}

// Allocates memory that begins with a huge page. A huge page at a time: other threads that change the address space
// wait for a call of madvise.
inline void take_memory_of(char* memory, int64_t num_bytes) {
    constexpr int64_t HUGE_PAGE = 2 << 20;
    for (int64_t start = 0; start < num_bytes; start += HUGE_PAGE)
        madvise(memory + start, size_t(std::min(HUGE_PAGE, num_bytes - start)), MADV_POPULATE_WRITE);
}

}  // namespace
