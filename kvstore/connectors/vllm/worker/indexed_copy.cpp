// Copies between memory in which the same elements have different orders.
#include <cstddef>
#include <cstdint>

namespace {

template <class Element>
void copy(void* const* targets, const int32_t* const* target_orders, const void* const* sources,
          const int32_t* const* source_orders, size_t num_elements, size_t num_pieces) {
    for (size_t piece = 0; piece < num_pieces; piece++) {
        Element* target = static_cast<Element*>(targets[piece]);
        const Element* source = static_cast<const Element*>(sources[piece]);
        const int32_t *to = target_orders[piece], *from = source_orders[piece];
        for (size_t i = 0; i < num_elements; i++) target[to[i]] = source[from[i]];
    }
}

}  // namespace

// Copies `num_pieces` pieces of `num_elements` elements each. Element i of a piece goes from index
// `source_orders[piece][i]` of its source to index `target_orders[piece][i]` of its target. `element_bytes`: 2 or 4.
extern "C" void copy_indexed(void* const* targets, const int32_t* const* target_orders, const void* const* sources,
                             const int32_t* const* source_orders, size_t num_elements, size_t element_bytes,
                             size_t num_pieces) {
    const auto copy_elements = element_bytes == 4 ? copy<uint32_t> : copy<uint16_t>;
    copy_elements(targets, target_orders, sources, source_orders, num_elements, num_pieces);
}
