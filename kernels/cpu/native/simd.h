// Vectors of one instruction set, chosen by the compiler's flags: AVX2, AVX512, AVX512 with BF16.
//
// A word is 32 bits: one float32, or two adjacent bfloat16. Matrix products go over words, so that one piece of
// code serves both types. If a processor has no instruction for the product of two bfloat16, both halves of a
// word are widened and multiplied in float32.
//
// Owns: the instructions. Does not know: what is computed.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#define INLINE static inline __attribute__((always_inline))
// Such a function is never inlined: so its inner loop has all registers, and compiling takes seconds, not minutes.
#define ALONE static __attribute__((noinline))
#ifdef __clang__
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

using word = uint32_t;

struct bf16 {
    uint16_t bits;
};

// Elements of a word.
template <class T>
constexpr int PER_WORD = sizeof(word) / sizeof(T);

#ifdef __AVX512F__

using Floats = __m512;
using Words = __m512i;
constexpr int WIDTH = 16;
// A tile of this many rows and vectors keeps its sums in registers.
constexpr int TILE_ROWS = 8, TILE_VECTORS = 3;
constexpr int FEW_ROWS = 4, FEW_VECTORS = 4;

INLINE Floats set(float x) { return _mm512_set1_ps(x); }
INLINE Floats load(const float* p) { return _mm512_loadu_ps(p); }
INLINE void store(float* p, Floats x) { _mm512_storeu_ps(p, x); }
INLINE Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
INLINE Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
INLINE Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
INLINE Floats div(Floats a, Floats b) { return _mm512_div_ps(a, b); }
INLINE Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
INLINE Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
INLINE Floats min(Floats a, Floats b) { return _mm512_min_ps(a, b); }
// `x < limit ? then : otherwise`, lane by lane.
INLINE Floats if_less(Floats x, Floats limit, Floats then, Floats otherwise) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, limit, _CMP_LT_OQ), otherwise, then);
}
INLINE Words load_words(const void* p) { return _mm512_loadu_si512(p); }
INLINE void store_words(void* p, Words x) { _mm512_storeu_si512(p, x); }
INLINE Words broadcast(word x) { return _mm512_set1_epi32(int(x)); }
INLINE Words as_words(Floats x) { return _mm512_castps_si512(x); }
INLINE Floats as_floats(Words x) { return _mm512_castsi512_ps(x); }
INLINE Words add_words(Words a, Words b) { return _mm512_add_epi32(a, b); }
INLINE Words shift_left(Words x, int n) { return _mm512_slli_epi32(x, n); }
INLINE Words high_halves(Words x) { return _mm512_and_si512(x, _mm512_set1_epi32(int(0xffff0000))); }

INLINE Floats load_floats(const bf16* p) {
    return as_floats(shift_left(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}

#ifdef __AVX512BF16__
INLINE __m256i narrow(Floats x) { return (__m256i)_mm512_cvtneps_pbh(x); }

// Words of (bfloat16 of first, bfloat16 of second), lane by lane.
INLINE Words pair(Floats first, Floats second) {
    const Words iota = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const Words order = add_words(iota, shift_left(add_words(iota, _mm512_set1_epi32(16)), 16));
    return _mm512_permutexvar_epi16(order, (Words)_mm512_cvtne2ps_pbh(second, first));
}
#else
// To the nearest, ties to even; NaN stays NaN.
INLINE __m256i narrow(Floats x) {
    Words bits = as_words(x), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    Words rounded = add_words(add_words(bits, _mm512_set1_epi32(0x7fff)), odd);
    __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    rounded = _mm512_mask_mov_epi32(rounded, is_nan, _mm512_set1_epi32(0x7fc00000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
}

INLINE Words pair(Floats first, Floats second) {
    return _mm512_or_si512(shift_left(_mm512_cvtepu16_epi32(narrow(second)), 16),
                           _mm512_cvtepu16_epi32(narrow(first)));
}
#endif

INLINE void store_floats(bf16* p, Floats x) { _mm256_storeu_si256((__m256i*)p, narrow(x)); }

// Rows a and b of 32 bfloat16 each: words of (a[i], b[i]), in order.
INLINE void interleave(Words a, Words b, Words& first, Words& second) {
    const Words iota = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const Words low = add_words(iota, shift_left(add_words(iota, _mm512_set1_epi32(32)), 16));
    first = _mm512_permutex2var_epi16(a, low, b);
    second = _mm512_permutex2var_epi16(a, add_words(low, _mm512_set1_epi32(0x00100010)), b);
}

INLINE void add_eight(__m256& totals, Floats x) {
    totals = _mm256_add_ps(totals, _mm512_castps512_ps256(x));
    totals = _mm256_add_ps(totals, _mm512_extractf32x8_ps(x, 1));
}
INLINE float largest(Floats x) { return _mm512_reduce_max_ps(x); }

// Row i, lane j becomes row j, lane i.
INLINE void transpose(Words (&r)[WIDTH]) {
    Words t[16], u[16];
    UNROLL for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    UNROLL for (int i = 0; i < 4; i++) {
        UNROLL for (int j = 0; j < 2; j++) {
            u[4 * i + 2 * j] = _mm512_unpacklo_epi64(t[4 * i + j], t[4 * i + 2 + j]);
            u[4 * i + 2 * j + 1] = _mm512_unpackhi_epi64(t[4 * i + j], t[4 * i + 2 + j]);
        }
    }
    UNROLL for (int j = 0; j < 4; j++) {
        Words a = _mm512_shuffle_i32x4(u[j], u[4 + j], 0x88), b = _mm512_shuffle_i32x4(u[j], u[4 + j], 0xdd);
        Words c = _mm512_shuffle_i32x4(u[8 + j], u[12 + j], 0x88), d = _mm512_shuffle_i32x4(u[8 + j], u[12 + j], 0xdd);
        r[j] = _mm512_shuffle_i32x4(a, c, 0x88);
        r[4 + j] = _mm512_shuffle_i32x4(b, d, 0x88);
        r[8 + j] = _mm512_shuffle_i32x4(a, c, 0xdd);
        r[12 + j] = _mm512_shuffle_i32x4(b, d, 0xdd);
    }
}

#else

using Floats = __m256;
using Words = __m256i;
constexpr int WIDTH = 8;
constexpr int TILE_ROWS = 4, TILE_VECTORS = 2;
constexpr int FEW_ROWS = 4, FEW_VECTORS = 2;

INLINE Floats set(float x) { return _mm256_set1_ps(x); }
INLINE Floats load(const float* p) { return _mm256_loadu_ps(p); }
INLINE void store(float* p, Floats x) { _mm256_storeu_ps(p, x); }
INLINE Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
INLINE Floats sub(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
INLINE Floats mul(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
INLINE Floats div(Floats a, Floats b) { return _mm256_div_ps(a, b); }
INLINE Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
INLINE Floats max(Floats a, Floats b) { return _mm256_max_ps(a, b); }
INLINE Floats min(Floats a, Floats b) { return _mm256_min_ps(a, b); }
INLINE Floats if_less(Floats x, Floats limit, Floats then, Floats otherwise) {
    return _mm256_blendv_ps(otherwise, then, _mm256_cmp_ps(x, limit, _CMP_LT_OQ));
}
INLINE Words load_words(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
INLINE void store_words(void* p, Words x) { _mm256_storeu_si256((__m256i*)p, x); }
INLINE Words broadcast(word x) { return _mm256_set1_epi32(int(x)); }
INLINE Words as_words(Floats x) { return _mm256_castps_si256(x); }
INLINE Floats as_floats(Words x) { return _mm256_castsi256_ps(x); }
INLINE Words add_words(Words a, Words b) { return _mm256_add_epi32(a, b); }
INLINE Words shift_left(Words x, int n) { return _mm256_slli_epi32(x, n); }
INLINE Words high_halves(Words x) { return _mm256_and_si256(x, _mm256_set1_epi32(int(0xffff0000))); }

INLINE Floats load_floats(const bf16* p) {
    return as_floats(shift_left(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}

// Rounded to bfloat16 in the high halves; the low halves are undefined.
INLINE Words rounded(Floats x) {
    Words bits = as_words(x), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    Words sum = add_words(add_words(bits, _mm256_set1_epi32(0x7fff)), odd);
    Words is_nan = as_words(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(sum, _mm256_set1_epi32(0x7fc00000), is_nan);
}

INLINE void store_floats(bf16* p, Floats x) {
    Words narrow = _mm256_srli_epi32(rounded(x), 16);
    _mm_storeu_si128((__m128i*)p,
                     _mm_packus_epi32(_mm256_castsi256_si128(narrow), _mm256_extracti128_si256(narrow, 1)));
}

INLINE Words pair(Floats first, Floats second) {
    return _mm256_or_si256(high_halves(rounded(second)), _mm256_srli_epi32(rounded(first), 16));
}

INLINE void interleave(Words a, Words b, Words& first, Words& second) {
    Words low = _mm256_unpacklo_epi16(a, b), high = _mm256_unpackhi_epi16(a, b);
    first = _mm256_permute2x128_si256(low, high, 0x20);
    second = _mm256_permute2x128_si256(low, high, 0x31);
}

INLINE void add_eight(__m256& totals, Floats x) { totals = _mm256_add_ps(totals, x); }
INLINE float largest(Floats x) {
    __m128 q = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    q = _mm_max_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_max_ss(q, _mm_shuffle_ps(q, q, 1)));
}

INLINE void transpose(Words (&r)[WIDTH]) {
    Words t[8], u[8];
    UNROLL for (int i = 0; i < 4; i++) {
        t[2 * i] = _mm256_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm256_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    UNROLL for (int i = 0; i < 2; i++) {
        UNROLL for (int j = 0; j < 2; j++) {
            u[4 * i + 2 * j] = _mm256_unpacklo_epi64(t[4 * i + j], t[4 * i + 2 + j]);
            u[4 * i + 2 * j + 1] = _mm256_unpackhi_epi64(t[4 * i + j], t[4 * i + 2 + j]);
        }
    }
    UNROLL for (int j = 0; j < 4; j++) {
        r[j] = _mm256_permute2x128_si256(u[j], u[4 + j], 0x20);
        r[4 + j] = _mm256_permute2x128_si256(u[j], u[4 + j], 0x31);
    }
}

#endif

INLINE Floats zero() { return set(0.0f); }

// Numbers that are 8 apart are summed one after the other; then these 8 sums in the order (i, i + 4), (i, i + 2),
// (i, i + 1). The order is the same in every instruction set, and in both ways in which attention computes the sums.
constexpr int SUMS = 8;

INLINE float sum(__m256 totals) {
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(totals), _mm256_extractf128_ps(totals, 1));
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_shuffle_ps(q, q, 1)));
}

INLINE Floats load_floats(const float* p) { return load(p); }
INLINE void store_floats(float* p, Floats x) { store(p, x); }

// A factor of `dot`: words in the form that the processor's instruction takes.
template <class T>
struct Operand;

template <>
struct Operand<float> {
    Floats value;
    INLINE Operand of(Words x) { return {as_floats(x)}; }
};

INLINE Floats dot(Floats c, Operand<float> a, Operand<float> b) { return fma(a.value, b.value, c); }

#ifdef __AVX512BF16__
template <>
struct Operand<bf16> {
    __m512bh value;
    INLINE Operand of(Words x) { return {(__m512bh)x}; }
};

INLINE Floats dot(Floats c, Operand<bf16> a, Operand<bf16> b) { return _mm512_dpbf16_ps(c, a.value, b.value); }
#else
template <>
struct Operand<bf16> {
    Floats first, second;
    INLINE Operand of(Words x) { return {as_floats(shift_left(x, 16)), as_floats(high_halves(x))}; }
};

INLINE Floats dot(Floats c, Operand<bf16> a, Operand<bf16> b) {
    return fma(a.second, b.second, fma(a.first, b.first, c));
}
#endif

// Adds to c[i][j] the sum over k < depth of panel[k][j] * rows[i][k], in the order of k whatever the tile's shape.
//
// Strides and depth count words: rows[i][k] is `rows[i * row_stride + k * rows_depth_stride]`, panel[k][j] a vector at
// `panel[k * panel_stride + j * WIDTH]`. Meanwhile LINES cache lines for each k are prefetched, from `ahead` on.
template <class T, int LINES = 0, int ROWS, int VECTORS>
INLINE void multiply(Floats (&c)[ROWS][VECTORS], const void* rows, long row_stride, long rows_depth_stride,
                     const void* panel, long panel_stride, long depth, const void* ahead = nullptr) {
    const char* a = (const char*)rows;
    const word* b = (const word*)panel;
    for (long k = 0; k < depth; k++) {
        UNROLL for (int i = 0; i < LINES; i++) _mm_prefetch((const char*)ahead + (k * LINES + i) * 64, _MM_HINT_T1);
        Operand<T> right[VECTORS];
        UNROLL for (int j = 0; j < VECTORS; j++) right[j] = Operand<T>::of(load_words(b + k * panel_stride + j * WIDTH));
        UNROLL for (int i = 0; i < ROWS; i++) {
            word x;
            memcpy(&x, a + (i * row_stride + k * rows_depth_stride) * long(sizeof(word)), sizeof x);
            Operand<T> left = Operand<T>::of(broadcast(x));
            UNROLL for (int j = 0; j < VECTORS; j++) c[i][j] = dot(c[i][j], right[j], left);
        }
    }
}

// Returns 2^x for x <= 0: exactly 1 at 0, and exactly 0 for x <= -127. The relative error is 2e-7 for x >= -125; 1e-4 for
// bfloat16.
template <class T>
INLINE Floats exp2_of(Floats x) {
    const Floats lowest = set(-127.0f), round = set(12582912.0f);  // 1.5 * 2^23: the sum's last bit is worth 1
    Floats clamped = max(x, lowest), shifted = add(clamped, round);
    Floats f = sub(clamped, sub(shifted, round)), p;
    if (sizeof(T) == sizeof(float)) {
        p = fma(set(0.000153533619f), f, set(0.00133988748f));
        p = fma(p, f, set(0.00961843736f));
        p = fma(p, f, set(0.0555033247f));
        p = fma(p, f, set(0.240226479f));
        p = fma(p, f, set(0.693147203f));
    } else {
        p = fma(set(0.0550089258f), f, set(0.242210977f));
        p = fma(p, f, set(0.69328293f));
    }
    p = fma(p, f, set(1.0f));
    return as_floats(add_words(as_words(p), shift_left(as_words(shifted), 23)));
}
