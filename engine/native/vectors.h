// The vectors that kernels.cpp computes with: of floats, and of pairs of bfloat16. They have the width of the processor:
// 16 lanes and products of pairs in one instruction (AVX-512 with BF16), else 8 lanes (AVX2), where a product of pairs is
// two of floats. Tile sizes, which depend on the number of registers, are here, too.

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

struct bf16 {
    uint16_t bits;
};

inline float to_float(bf16 value) {
    const uint32_t bits = uint32_t(value.bits) << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof(wide));
    return wide;
}

#ifdef __AVX512BF16__

constexpr bool kHasPairs = true;  // products of pairs are instructions
constexpr int kLanes = 16;        // floats in a vector
constexpr int kColumns = 8;       // rows of w at a time
constexpr int kFewBytes = 0;      // of kColumns rows of w, that are called into the first cache; more into the second
constexpr int kRowsAtOnce = 3;    // rows of x at a time, as they are; 3 x 8 sums
constexpr int kFewRows = 12;      // at most so many are multiplied as they are, more are packed (with tiles from 2 on)
constexpr int kBlocksAtOnce = 3;  // vectors of packed rows of x; 8 x 3 sums
constexpr int kHeadsAtOnce = 4;   // heads that share a key; with 4 keys 4 x 4 sums, and as many vectors of output
constexpr int kQueries = 6, kWide = 4;  // queries, and vectors of keys; 6 x 4 sums

using Floats = __m512;
using Pairs = __m512i;
using Mask = __mmask16;
using PairMask = __mmask32;  // of the elements of pairs

constexpr Mask kAll = 0xffff;

// Lanes before `end`; of these, lanes from `begin` on.
inline Mask lanes(int64_t end) { return end >= kLanes ? kAll : (1u << std::max<int64_t>(end, 0)) - 1; }
inline Mask lanes(int64_t begin, int64_t end) { return lanes(end) & ~lanes(begin); }
inline PairMask pair_lanes(int64_t end) {
    return end >= 2 * kLanes ? 0xffffffffu : (1u << std::max<int64_t>(end, 0)) - 1;
}

inline Floats all(float value) { return _mm512_set1_ps(value); }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats keep(Mask mask, Floats a) { return _mm512_maskz_mov_ps(mask, a); }
inline Floats max(Mask mask, Floats a, Floats b) { return _mm512_mask_max_ps(a, mask, a, b); }  // a elsewhere
inline float sum_of(Floats a) { return _mm512_reduce_add_ps(a); }
inline float max_of(Floats a) { return _mm512_reduce_max_ps(a); }
inline Floats round_to_whole(Floats a) { return _mm512_roundscale_ps(a, 0); }
inline Floats times_power_of_two(Floats a, Floats whole) { return _mm512_scalef_ps(a, whole); }

// Loads the lanes of a mask, zeros elsewhere. Masks of loads and stores begin at lane 0.
inline Floats load(const float* from, Mask mask) { return _mm512_maskz_loadu_ps(mask, from); }
inline Pairs load_low_halves(const bf16* from, Mask mask) {
    return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from));
}
inline Pairs to_high_halves(Pairs pairs) { return _mm512_slli_epi32(pairs, 16); }
inline Floats load(const bf16* from, Mask mask) {
    return _mm512_castsi512_ps(to_high_halves(load_low_halves(from, mask)));
}
inline void store(float* to, Mask mask, Floats value) { _mm512_mask_storeu_ps(to, mask, value); }
inline void store(bf16* to, Mask mask, Floats value) {
    _mm256_mask_storeu_epi16(to, mask, (__m256i)_mm512_cvtneps_pbh(value));
}
inline Floats load_aligned(const void* from) { return _mm512_load_ps(from); }
inline void store_aligned(void* to, Floats value) { _mm512_store_ps(to, value); }

inline Pairs load_pairs(const bf16* from, PairMask mask) { return _mm512_maskz_loadu_epi16(mask, from); }
inline Pairs load_whole_pairs(const bf16* from, Mask mask) { return _mm512_maskz_loadu_epi32(mask, from); }
inline Pairs load_pairs_aligned(const void* from) { return _mm512_load_si512(from); }
inline void store_aligned(void* to, Pairs pairs) { _mm512_store_si512(to, pairs); }
inline Pairs all(int32_t pair) { return _mm512_set1_epi32(pair); }
inline Pairs either(Pairs a, Pairs b) { return _mm512_or_si512(a, b); }

inline Floats add_products(Floats sum, Pairs a, Pairs b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }

// Four vectors of partial sums -> their four totals.
inline __m128 totals(Floats a, Floats b, Floats c, Floats d) {
    const __m512d ab = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
    const __m512d cd = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d)));
    const __m512 abcd = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)),
                                      _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)));
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(abcd), _mm512_extractf32x8_ps(abcd, 1));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

// The totals of kColumns vectors, as one.
inline Floats totals(const Floats (&sums)[kColumns]) {
    const __m128 low = totals(sums[0], sums[1], sums[2], sums[3]);
    const __m128 high = totals(sums[4], sums[5], sums[6], sums[7]);
    return _mm512_castps256_ps512(_mm256_set_m128(high, low));
}

// 16 vectors of pairs -> vector p has pair p of each.
inline void transpose(Pairs (&rows)[kLanes]) {
    __m512i twos[kLanes], fours[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; i += 2) {
        twos[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        twos[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; i += 4)
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) {
            fours[i + 2 * h] = _mm512_unpacklo_epi64(twos[i + h], twos[i + 2 + h]);
            fours[i + 2 * h + 1] = _mm512_unpackhi_epi64(twos[i + h], twos[i + 2 + h]);
        }
#pragma GCC unroll 4
    for (int p = 0; p < 4; p++) {  // quarter q of fours[4 i + p] has pair 4 q + p of rows 4 i to 4 i + 3
        const __m512i even = _mm512_shuffle_i32x4(fours[p], fours[4 + p], 0x88);
        const __m512i odd = _mm512_shuffle_i32x4(fours[p], fours[4 + p], 0xdd);
        const __m512i more_even = _mm512_shuffle_i32x4(fours[8 + p], fours[12 + p], 0x88);
        const __m512i more_odd = _mm512_shuffle_i32x4(fours[8 + p], fours[12 + p], 0xdd);
        rows[p] = _mm512_shuffle_i32x4(even, more_even, 0x88);
        rows[4 + p] = _mm512_shuffle_i32x4(odd, more_odd, 0x88);
        rows[8 + p] = _mm512_shuffle_i32x4(even, more_even, 0xdd);
        rows[12 + p] = _mm512_shuffle_i32x4(odd, more_odd, 0xdd);
    }
}

// kColumns vectors, each of a column of 16 rows -> the rows as bfloat16, `stride` apart, as far as there are any.
inline void store_rows(const Floats (&sums)[kColumns], bf16* y, int64_t stride, int64_t num_rows) {
    __m256i columns[kColumns], twos[kColumns];
#pragma GCC unroll 8
    for (int n = 0; n < kColumns; n++) columns[n] = (__m256i)_mm512_cvtneps_pbh(sums[n]);
#pragma GCC unroll 8
    for (int n = 0; n < kColumns; n += 2) {
        twos[n] = _mm256_unpacklo_epi16(columns[n], columns[n + 1]);
        twos[n + 1] = _mm256_unpackhi_epi16(columns[n], columns[n + 1]);
    }
#pragma GCC unroll 8
    for (int h = 0; h < 2; h++) {  // rows 0 to 3 and 8 to 11, then those between and behind
        const __m256i low[] = {_mm256_unpacklo_epi32(twos[h], twos[2 + h]), _mm256_unpackhi_epi32(twos[h], twos[2 + h])};
        const __m256i high[] = {_mm256_unpacklo_epi32(twos[4 + h], twos[6 + h]),
                                _mm256_unpackhi_epi32(twos[4 + h], twos[6 + h])};
#pragma GCC unroll 8
        for (int i = 0; i < 4; i++) {
            const __m256i both = i % 2 ? _mm256_unpackhi_epi64(low[i / 2], high[i / 2])
                                       : _mm256_unpacklo_epi64(low[i / 2], high[i / 2]);
            const int64_t m = 4 * h + i;
            if (m < num_rows) _mm_storeu_si128((__m128i*)(y + m * stride), _mm256_castsi256_si128(both));
            if (m + 8 < num_rows) _mm_storeu_si128((__m128i*)(y + (m + 8) * stride), _mm256_extracti128_si256(both, 1));
        }
    }
}

#else

constexpr bool kHasPairs = false;
constexpr int kLanes = 8, kColumns = 4, kFewBytes = 6144, kRowsAtOnce = 2, kFewRows = 8, kBlocksAtOnce = 2;
constexpr int kHeadsAtOnce = 2, kQueries = 4, kWide = 2;

using Floats = __m256;
using Pairs = __m256i;
using PairMask = int64_t;

struct Mask {
    int64_t begin, end;

    operator __m256i() const {
        const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        const __m256i before_end = _mm256_cmpgt_epi32(_mm256_set1_epi32(int(std::min<int64_t>(end, kLanes))), lane);
        return _mm256_andnot_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(int(std::min<int64_t>(begin, kLanes))), lane), before_end);
    }
};

constexpr Mask kAll = {0, kLanes};

inline Mask lanes(int64_t end) { return {0, end}; }
inline Mask lanes(int64_t begin, int64_t end) { return {begin, end}; }
inline PairMask pair_lanes(int64_t end) { return end; }

inline Floats all(float value) { return _mm256_set1_ps(value); }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Floats keep(Mask mask, Floats a) { return _mm256_and_ps(a, _mm256_castsi256_ps(mask)); }
inline Floats max(Mask mask, Floats a, Floats b) {
    return _mm256_blendv_ps(a, _mm256_max_ps(a, b), _mm256_castsi256_ps(mask));
}
inline float sum_of(Floats a) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}
inline float max_of(Floats a) {
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}
inline Floats round_to_whole(Floats a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// Results below 2^-126 are zero (AVX-512 keeps denormals). Exponents above 127 count as 127.
inline Floats times_power_of_two(Floats a, Floats whole) {
    const __m256i power = _mm256_cvtps_epi32(_mm256_min_ps(whole, all(127.0f)));
    const __m256 factor = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(power, _mm256_set1_epi32(127)), 23));
    return _mm256_and_ps(_mm256_mul_ps(a, factor), _mm256_cmp_ps(whole, all(-127.0f), _CMP_NLE_UQ));
}

inline Floats load(const float* from, Mask mask) {
    return mask.end >= kLanes ? _mm256_loadu_ps(from) : _mm256_maskload_ps(from, mask);
}
// `count` elements, fewer than 16, and zeros behind them. Not inlined: partial vectors are rare.
__attribute__((noinline, cold)) inline Pairs load_few(const bf16* from, int64_t count) {
    bf16 room[2 * kLanes] = {};
    for (int64_t i = 0; i < count; i++) room[i] = from[i];
    return _mm256_loadu_si256((const __m256i*)room);
}
inline Pairs load_low_halves(const bf16* from, Mask mask) {
    if (mask.end <= 0) return _mm256_setzero_si256();
    const bool full = __builtin_expect(mask.end >= kLanes, 1);
    const __m128i halves = full ? _mm_loadu_si128((const __m128i*)from) : _mm256_castsi256_si128(load_few(from, mask.end));
    return _mm256_cvtepu16_epi32(halves);
}
inline Pairs to_high_halves(Pairs pairs) { return _mm256_slli_epi32(pairs, 16); }
inline Floats load(const bf16* from, Mask mask) {
    return _mm256_castsi256_ps(to_high_halves(load_low_halves(from, mask)));
}
inline void store(float* to, Mask mask, Floats value) {
    mask.end >= kLanes ? _mm256_storeu_ps(to, value) : _mm256_maskstore_ps(to, mask, value);
}
// Rounds to nearest, ties to even. NaN stays NaN.
inline __m128i rounded(Floats value) {
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i nearest = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    const __m256i none = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    const __m256i halves = _mm256_blendv_epi8(nearest, _mm256_set1_epi32(0x7fc0), none);
    return _mm_packus_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
}
inline void store(bf16* to, Mask mask, Floats value) {
    const __m128i halves = rounded(value);
    if (mask.end >= kLanes)
        _mm_storeu_si128((__m128i*)to, halves);
    else if (mask.end > 0)
        std::memcpy(to, &halves, sizeof(bf16) * mask.end);
}
inline Floats load_aligned(const void* from) { return _mm256_load_ps((const float*)from); }
inline void store_aligned(void* to, Floats value) { _mm256_store_ps((float*)to, value); }

inline Pairs load_pairs(const bf16* from, PairMask count) {
    if (count <= 0) return _mm256_setzero_si256();
    return __builtin_expect(count >= 2 * kLanes, 1) ? _mm256_loadu_si256((const __m256i*)from) : load_few(from, count);
}
inline Pairs load_whole_pairs(const bf16* from, Mask mask) { return _mm256_maskload_epi32((const int*)from, mask); }
inline Pairs load_pairs_aligned(const void* from) { return _mm256_load_si256((const __m256i*)from); }
inline void store_aligned(void* to, Pairs pairs) { _mm256_store_si256((__m256i*)to, pairs); }
inline Pairs all(int32_t pair) { return _mm256_set1_epi32(pair); }
inline Pairs either(Pairs a, Pairs b) { return _mm256_or_si256(a, b); }

inline Floats add_products(Floats sum, Pairs a, Pairs b) {
    const auto low = [](Pairs pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); };
    const __m256i upper = _mm256_set1_epi32(0xffff0000);
    const auto high = [=](Pairs pairs) { return _mm256_castsi256_ps(_mm256_and_si256(pairs, upper)); };
    return _mm256_fmadd_ps(high(a), high(b), _mm256_fmadd_ps(low(a), low(b), sum));
}

inline __m128 totals(Floats a, Floats b, Floats c, Floats d) {
    const __m256 half = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

inline Floats totals(const Floats (&sums)[kColumns]) {
    return _mm256_castps128_ps256(totals(sums[0], sums[1], sums[2], sums[3]));
}

inline void transpose(Pairs (&rows)[kLanes]) {
    __m256i twos[kLanes], fours[kLanes];
#pragma GCC unroll 8
    for (int i = 0; i < kLanes; i += 2) {
        twos[i] = _mm256_unpacklo_epi32(rows[i], rows[i + 1]);
        twos[i + 1] = _mm256_unpackhi_epi32(rows[i], rows[i + 1]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < kLanes; i += 4)
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) {
            fours[i + 2 * h] = _mm256_unpacklo_epi64(twos[i + h], twos[i + 2 + h]);
            fours[i + 2 * h + 1] = _mm256_unpackhi_epi64(twos[i + h], twos[i + 2 + h]);
        }
#pragma GCC unroll 4
    for (int p = 0; p < 4; p++) {  // half h of fours[4 i + p] has pair 4 h + p of rows 4 i to 4 i + 3
        rows[p] = _mm256_permute2x128_si256(fours[p], fours[4 + p], 0x20);
        rows[4 + p] = _mm256_permute2x128_si256(fours[p], fours[4 + p], 0x31);
    }
}

inline void store_rows(const Floats (&sums)[kColumns], bf16* y, int64_t stride, int64_t num_rows) {
    __m128i columns[kColumns];
#pragma GCC unroll 4
    for (int n = 0; n < kColumns; n++) columns[n] = rounded(sums[n]);
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++) {  // rows 0 to 3, then 4 to 7
        const __m128i low = h ? _mm_unpackhi_epi16(columns[0], columns[1]) : _mm_unpacklo_epi16(columns[0], columns[1]);
        const __m128i high = h ? _mm_unpackhi_epi16(columns[2], columns[3]) : _mm_unpacklo_epi16(columns[2], columns[3]);
        const __m128i twos[] = {_mm_unpacklo_epi32(low, high), _mm_unpackhi_epi32(low, high)};
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const int64_t m = 4 * h + i;
            const int64_t row = i % 2 ? _mm_extract_epi64(twos[i / 2], 1) : _mm_cvtsi128_si64(twos[i / 2]);
            if (m < num_rows) std::memcpy(y + m * stride, &row, sizeof(row));
        }
    }
}

#endif

inline Floats add_products(Floats sum, Floats a, Floats b) { return multiply_add(a, b, sum); }

// e^x to about 2e-7: 2^n * 2^f with f in [-0.5, 0.5], 2^f by its Taylor series.
inline Floats exponential(Floats x) {
    const Floats powers = x * all(1.44269504f), whole = round_to_whole(powers), f = powers - whole;
    Floats series = all(1.540353e-4f);
    for (const float factor : {1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.0f})
        series = multiply_add(series, f, all(factor));
    return times_power_of_two(series, whole);
}
