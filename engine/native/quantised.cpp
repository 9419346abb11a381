// Linear layers whose weights are small codes: 8-bit integers, 4-bit integers or 8-bit floats (E4M3). Called by
// engine/native/quantised.py.
//
// A decode step waits for weights, so codes are read from memory once and turned into float32 in the first cache: a
// piece of a few rows of the weight, then all rows of x against it. Beside x in bfloat16, integer codes stay integers: x
// becomes 16-bit integers with a scale for each 32 columns, finer than bfloat16 for all but values 2^7 below the largest
// of these, and a product of 16 pairs is one instruction. Every row of x gets the same sums in the same order, however
// many rows there are.

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "calls.h"

namespace {

struct bf16 {
    uint16_t bits;
};

constexpr int kLanes = 8;       // floats in a vector
constexpr int kColumns = 4;     // rows of the weight at a time
constexpr int64_t kPiece = 512; // weights of each of these rows at a time, a multiple of 32: 8 KiB of float32
constexpr int64_t kRows = 64;   // rows of x for which a piece is turned into float32 once

inline float to_float(float value) { return value; }
inline float to_float(bf16 value) {
    const uint32_t bits = uint32_t(value.bits) << 16;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}
inline void put(float* to, float value) { *to = value; }
inline void put(bf16* to, float value) {  // to the nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    to->bits = value != value ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

inline __m128i load_eight(const uint8_t* from) { return _mm_loadl_epi64((const __m128i*)from); }

// Of a group of a row: (code - zero) * scale. Without zeros there is nothing to subtract.
template <bool kZeros>
struct Affine {
    __m256 scale, zero;
    Affine(float by, float from) : scale(_mm256_set1_ps(by)), zero(_mm256_set1_ps(from)) {}
    inline __m256 operator()(__m256 code) const {
        return _mm256_mul_ps(kZeros ? _mm256_sub_ps(code, zero) : code, scale);
    }
};

// Each kind turns 32 codes of a row, from code `k` on, into four vectors.
struct Int8 {
    static int64_t bytes(int64_t count) { return count; }
    template <typename Values>
    static inline void decode(const uint8_t* row, int64_t k, const Values& values, __m256* out) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++)
            out[i] = values(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load_eight(row + k + i * kLanes))));
    }
    static inline void integers(const uint8_t* block, __m256i* out) {  // 32 codes, 16 bits each
        out[0] = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)block));
        out[1] = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(block + 16)));
    }
};

struct Int4 {  // in a block of 32 codes, byte i holds code i below code 16 + i
    static int64_t bytes(int64_t count) { return count / 2; }
    template <typename Values>
    static inline void decode(const uint8_t* row, int64_t k, const Values& values, __m256* out) {
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
            const __m256i pairs = _mm256_cvtepu8_epi32(load_eight(row + bytes(k) + i * kLanes));
            out[i] = values(_mm256_cvtepi32_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(15))));
            out[2 + i] = values(_mm256_cvtepi32_ps(_mm256_srli_epi32(pairs, 4)));
        }
    }
    static inline void integers(const uint8_t* block, __m256i* out) {
        const __m256i pairs = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)block));
        out[0] = _mm256_and_si256(pairs, _mm256_set1_epi16(15));
        out[1] = _mm256_srli_epi16(pairs, 4);
    }
};

struct E4m3 {  // moved into a float16, whose exponent counts from 8 further below: the value times 2^-8
    static int64_t bytes(int64_t count) { return count; }
    template <typename Values>
    static inline void decode(const uint8_t* row, int64_t k, const Values& values, __m256* out) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const __m128i wide = _mm_cvtepu8_epi16(load_eight(row + k + i * kLanes));
            const __m128i sign = _mm_slli_epi16(_mm_and_si128(wide, _mm_set1_epi16(0x80)), 8);
            const __m128i rest = _mm_slli_epi16(_mm_and_si128(wide, _mm_set1_epi16(0x7f)), 7);
            const __m256 value = _mm256_cvtph_ps(_mm_or_si128(sign, rest));
            out[i] = values(_mm256_mul_ps(value, _mm256_set1_ps(256.0f)));
        }
    }
};

// The scales and zeros of the weight [size_n, groups]; a group is `group` columns wide, a multiple of 32 unless there is
// one group alone.
struct Groups {
    const float* scales;
    const float* zeros;  // or null, not of 4-bit codes
    int64_t count, group;

    int64_t end(int64_t k) const { return (k / group + 1) * group; }  // of the group of column k
    template <bool kZeros>
    Affine<kZeros> values(int64_t n, int64_t k) const {
        const int64_t at = n * count + k / group;
        return {scales[at], kZeros ? zeros[at] : 0.0f};
    }
};

// Weights begin .. end of row n, float32; `begin` is a multiple of 32.
template <typename Kind, bool kZeros>
inline void decode_run(const uint8_t* codes, const Groups& groups, int64_t n, int64_t size_k, int64_t begin, int64_t end,
                       float* out) {
    const uint8_t* row = codes + n * Kind::bytes(size_k);
    for (int64_t k = begin; k < end;) {
        const int64_t stop = std::min(end, groups.end(k));
        const auto values = groups.values<kZeros>(n, k);
        __m256 vectors[4];
        for (; k + 32 <= stop; k += 32) {
            Kind::decode(row, k, values, vectors);
            for (int i = 0; i < 4; i++) _mm256_storeu_ps(out + k - begin + i * kLanes, vectors[i]);
        }
        if (k < stop) {  // the end of a row whose size is no multiple of 32, never of 4-bit codes
            uint8_t last[32] = {};
            float floats[32];
            std::copy(row + k, row + stop, last);
            Kind::decode(last, 0, values, vectors);
            for (int i = 0; i < 4; i++) _mm256_storeu_ps(floats + i * kLanes, vectors[i]);
            std::copy(floats, floats + (stop - k), out + k - begin);
            k = stop;
        }
    }
}

// A single row of x against kColumns rows of the weight from n on, up to `end`, a multiple of 32: nothing is written in
// between.
template <typename Kind, bool kZeros>
inline void add_one_row(const float* x, const uint8_t* codes, const Groups& groups, int64_t n, int64_t size_k,
                        int64_t end, __m256* sums) {
    const uint8_t* rows[kColumns];
    __m256 parts[kColumns];
    const int64_t row_bytes = Kind::bytes(size_k);
    for (int c = 0; c < kColumns; c++) rows[c] = codes + (n + c) * row_bytes, parts[c] = sums[c];
    for (int64_t k = 0; k < end;) {
        const int64_t stop = std::min(end, groups.end(k));
        const Affine<kZeros> values[kColumns] = {groups.values<kZeros>(n, k), groups.values<kZeros>(n + 1, k),
                                                 groups.values<kZeros>(n + 2, k), groups.values<kZeros>(n + 3, k)};
        for (; k < stop; k += 32)
#pragma GCC unroll 4
            for (int c = 0; c < kColumns; c++) {
                __m256 vectors[4];
                _mm_prefetch(rows[c] + kColumns * row_bytes + Kind::bytes(k), _MM_HINT_T0);  // what comes next
                Kind::decode(rows[c], k, values[c], vectors);
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++)
                    parts[c] = _mm256_fmadd_ps(_mm256_loadu_ps(x + k + i * kLanes), vectors[i], parts[c]);
            }
    }
    for (int c = 0; c < kColumns; c++) sums[c] = parts[c];
}

inline float total(__m256 sum) {
    const __m128 half = _mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps(sum, 1));
    const __m128 quarter = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(quarter, _mm_movehdup_ps(quarter)));
}

// Adds kCount rows of x times kColumns rows of weights to sums [kCount][kColumns]. size is a multiple of kLanes.
template <int kCount>
inline void add_products(const float* x, int64_t x_stride, const float* weights, __m256* sums, int64_t size) {
    __m256 parts[kCount][kColumns];
    for (int m = 0; m < kCount; m++)
        for (int n = 0; n < kColumns; n++) parts[m][n] = sums[m * kColumns + n];
    for (int64_t k = 0; k < size; k += kLanes) {
        __m256 columns[kColumns];
#pragma GCC unroll 4
        for (int n = 0; n < kColumns; n++) columns[n] = _mm256_loadu_ps(weights + n * kPiece + k);
#pragma GCC unroll 4
        for (int m = 0; m < kCount; m++) {
            const __m256 row = _mm256_loadu_ps(x + m * x_stride + k);
#pragma GCC unroll 4
            for (int n = 0; n < kColumns; n++) parts[m][n] = _mm256_fmadd_ps(row, columns[n], parts[m][n]);
        }
    }
    for (int m = 0; m < kCount; m++)
        for (int n = 0; n < kColumns; n++) sums[m * kColumns + n] = parts[m][n];
}

template <typename Kind, bool kZeros, typename T>
void multiply(const T* x, int64_t x_stride, const uint8_t* codes, const Groups& groups, const T* bias, T* y,
              int64_t size_m, int64_t size_n, int64_t size_k) {
    const int64_t padded = (size_k + kLanes - 1) / kLanes * kLanes;
    std::vector<float> rows(size_m * padded);  // float32, zeros behind the end
    for (int64_t m = 0; m < size_m; m++)
        for (int64_t k = 0; k < size_k; k++) rows[m * padded + k] = to_float(x[m * x_stride + k]);
#pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < size_n; n += kColumns) {
        alignas(32) float weights[kColumns * kPiece] = {};
        __m256 sums[kRows * kColumns];
        const int64_t columns = std::min<int64_t>(kColumns, size_n - n);
        for (int64_t first = 0; first < size_m; first += kRows) {
            const int64_t count = std::min(kRows, size_m - first);
            std::fill_n(sums, count * kColumns, _mm256_setzero_ps());
            const int64_t done = count == 1 && columns == kColumns ? size_k / 32 * 32 : 0;
            if (done) add_one_row<Kind, kZeros>(rows.data() + first * padded, codes, groups, n, size_k, done, sums);
            for (int64_t k = done; k < size_k; k += kPiece) {
                const int64_t end = std::min(k + kPiece, size_k), size = (end - k + kLanes - 1) / kLanes * kLanes;
                for (int64_t c = 0; c < columns; c++) {
                    decode_run<Kind, kZeros>(codes, groups, n + c, size_k, k, end, weights + c * kPiece);
                    std::fill(weights + c * kPiece + (end - k), weights + c * kPiece + size, 0.0f);
                }
                for (int64_t m = 0; m < count; m += 3) {
                    const auto add = count - m >= 3 ? add_products<3> : count - m == 2 ? add_products<2> : add_products<1>;
                    add(rows.data() + (first + m) * padded + k, padded, weights, sums + m * kColumns, size);
                }
            }
            for (int64_t m = 0; m < count; m++)
                for (int64_t c = 0; c < columns; c++)
                    put(y + (first + m) * size_n + n + c,
                        total(sums[m * kColumns + c]) + (bias ? to_float(bias[n + c]) : 0.0f));
        }
    }
}

// Rows of x as 16-bit integers: value = code * scale of its block of 32 columns. Zeros fill the last block.
struct IntegerRows {
    int64_t blocks;
    std::vector<int16_t> codes;  // [size_m, blocks, 32]
    std::vector<float> scales;   // [size_m, blocks]

    IntegerRows(const bf16* x, int64_t x_stride, int64_t size_m, int64_t size_k)
        : blocks((size_k + 31) / 32), codes(size_m * blocks * 32), scales(size_m * blocks) {
        for (int64_t at = 0; at < size_m * blocks; at++) {
            const int64_t first = at % blocks * 32, count = std::min<int64_t>(32, size_k - first);
            const bf16* from = x + at / blocks * x_stride + first;
            float largest = 0, values[32];
            bool finite = true;
            for (int64_t i = 0; i < count; i++) {
                values[i] = to_float(from[i]);
                largest = std::max(largest, std::fabs(values[i]));
                finite &= std::isfinite(values[i]);
            }
            scales[at] = finite ? largest / 32767 : NAN;  // which makes the sums NaN, too
            const float by = finite && largest > 0 ? 32767 / largest : 0;
            for (int64_t i = 0; by > 0 && i < count; i++) codes[at * 32 + i] = int16_t(std::lrintf(values[i] * by));
        }
    }
};

// Adds the products of a block of kCount rows of x, `stride` codes apart, and a block of a row of the weight.
template <typename Kind, bool kZeros, int kCount>
inline void add_block(const int16_t* x, const float* x_scales, int64_t x_blocks, const uint8_t* codes, float zero,
                      float scale, __m256* sums) {
    __m256i weights[2];
    Kind::integers(codes, weights);
    if (kZeros) {
        const __m256i from = _mm256_set1_epi16(int16_t(zero));
        weights[0] = _mm256_sub_epi16(weights[0], from), weights[1] = _mm256_sub_epi16(weights[1], from);
    }
#pragma GCC unroll 2
    for (int r = 0; r < kCount; r++) {
        const __m256i* row = (const __m256i*)(x + r * x_blocks * 32);
        const __m256i pairs = _mm256_add_epi32(_mm256_madd_epi16(_mm256_loadu_si256(row), weights[0]),
                                               _mm256_madd_epi16(_mm256_loadu_si256(row + 1), weights[1]));
        sums[r * kColumns] =
            _mm256_fmadd_ps(_mm256_cvtepi32_ps(pairs), _mm256_set1_ps(x_scales[r * x_blocks] * scale), sums[r * kColumns]);
    }
}

// kCount rows of x from m on times kColumns rows of the weight from n on -> totals, float32 [kCount][kColumns].
template <typename Kind, bool kZeros, bool kGrouped, int kCount>
inline void multiply_rows(const IntegerRows& x, int64_t m, const uint8_t* codes, const Groups& groups, int64_t n,
                          int64_t size_k, float* totals) {
    __m256 sums[kCount * kColumns];
    for (auto& sum : sums) sum = _mm256_setzero_ps();
    const int16_t* x_codes = x.codes.data() + m * x.blocks * 32;
    const float* x_scales = x.scales.data() + m * x.blocks;
    const uint8_t* rows[kColumns];
    for (int c = 0; c < kColumns; c++) rows[c] = codes + (n + c) * Kind::bytes(size_k);
    const int64_t step = kColumns * Kind::bytes(size_k);
    for (int64_t block = 0; block < x.blocks; block++) {
        const int64_t group = kGrouped ? block * 32 / groups.group : 0;
        const bool ends = size_k - block * 32 < 32;
#pragma GCC unroll 4
        for (int c = 0; c < kColumns; c++) {
            const uint8_t* from = rows[c] + Kind::bytes(block * 32);
            uint8_t last[32];
            if (__builtin_expect(ends, 0)) {
                std::fill(std::copy(from, from + size_k - block * 32, last), last + 32, 0);
                from = last;
            } else {
                _mm_prefetch(from + step, _MM_HINT_T0);  // what comes next
            }
            const int64_t at = (n + c) * groups.count + group;
            add_block<Kind, kZeros, kCount>(x_codes + block * 32, x_scales + block, x.blocks, from,
                                            kZeros ? groups.zeros[at] : 0.0f, kGrouped ? groups.scales[at] : 1.0f, sums + c);
        }
    }
    for (int r = 0; r < kCount; r++)
        for (int c = 0; c < kColumns; c++)
            totals[r * kColumns + c] = total(sums[r * kColumns + c]) * (kGrouped ? 1.0f : groups.scales[n + c]);
}

template <typename Kind, bool kZeros, bool kGrouped>
void multiply_integers(const bf16* x, int64_t x_stride, const uint8_t* codes, const Groups& groups, const bf16* bias,
                       bf16* y, int64_t size_m, int64_t size_n, int64_t size_k) {
    const IntegerRows integers(x, x_stride, size_m, size_k);
#pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < size_n; n += kColumns) {
        const int64_t from = std::max<int64_t>(0, std::min(n, size_n - kColumns));  // the last ones again, if too few
        for (int64_t m = 0; m < size_m; m += 2) {
            float totals[2 * kColumns];
            const int count = m + 1 < size_m ? 2 : 1;
            const auto run = count == 2 ? multiply_rows<Kind, kZeros, kGrouped, 2> : multiply_rows<Kind, kZeros, kGrouped, 1>;
            run(integers, m, codes, groups, from, size_k, totals);
            for (int64_t at = 0; at < count * kColumns; at++) {
                const int64_t column = from + at % kColumns;
                if (column < n) continue;
                put(y + (m + at / kColumns) * size_n + column, totals[at] + (bias ? to_float(bias[column]) : 0.0f));
            }
        }
    }
}

void of_integers(int64_t kind, const bf16* x, int64_t x_stride, const uint8_t* codes, const Groups& groups,
                 const bf16* bias, bf16* y, int64_t size_m, int64_t size_n, int64_t size_k) {
    const bool grouped = groups.count > 1;
    const auto run = kind == 1      ? (grouped ? multiply_integers<Int4, true, true> : multiply_integers<Int4, true, false>)
                     : groups.zeros ? (grouped ? multiply_integers<Int8, true, true> : multiply_integers<Int8, true, false>)
                     : grouped      ? multiply_integers<Int8, false, true>
                                    : multiply_integers<Int8, false, false>;
    run(x, x_stride, codes, groups, bias, y, size_m, size_n, size_k);
}

template <typename T>
void of_kind(int64_t kind, const T* x, int64_t x_stride, const uint8_t* codes, const Groups& groups, const T* bias, T* y,
             int64_t size_m, int64_t size_n, int64_t size_k) {
    const auto run = kind == 2       ? multiply<E4m3, false, T>
                     : kind == 1     ? multiply<Int4, true, T>
                     : groups.zeros ? multiply<Int8, true, T>
                                    : multiply<Int8, false, T>;
    run(x, x_stride, codes, groups, bias, y, size_m, size_n, size_k);
}

}  // namespace

extern "C" {

// x [size_m, size_k] with x_stride between rows -> y [size_m, size_n], both of the same type, as is bias (or null).
//   kind       0: int8 codes [size_n, size_k]; 1: 4-bit codes [size_n, size_k / 2], size_k a multiple of 32; 2: E4M3
//   scales     float32 [size_n, groups], as zeros (or null: none); a group has `group` columns
void quantised_linear_f32(int64_t kind, const float* x, int64_t x_stride, const uint8_t* codes, const float* scales,
                          const float* zeros, int64_t groups, int64_t group, const float* bias, float* y, int64_t size_m,
                          int64_t size_n, int64_t size_k) {
    const Groups all{scales, zeros, groups, group};
    kept([=] { of_kind(kind, x, x_stride, codes, all, bias, y, size_m, size_n, size_k); });
}
void quantised_linear_bf16(int64_t kind, const bf16* x, int64_t x_stride, const uint8_t* codes, const float* scales,
                           const float* zeros, int64_t groups, int64_t group, const bf16* bias, bf16* y, int64_t size_m,
                           int64_t size_n, int64_t size_k) {
    const auto run = kind != 2 && size_n >= kColumns ? of_integers : of_kind<bf16>;
    const Groups all{scales, zeros, groups, group};
    kept([=] { run(kind, x, x_stride, codes, all, bias, y, size_m, size_n, size_k); });
}

}  // extern "C"
