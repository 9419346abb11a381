// A decode step on a CPU: few rows against many weights, and attention over a paged cache. Plain C functions on
// contiguous rows, called by engine/native/ops.py; each says which shapes it takes.
//
// Libraries are made for large matrices. A decode step is bound by how fast weights and keys stream from memory, and by
// what stands around the arithmetic. Weights stay as the checkpoint has them ([out, in], bfloat16 or float32). A row of x and a row
// of the weight are both contiguous: for few rows pairs are multiplied along the row. More rows of x are packed.
// Sums are float32 throughout. Threads are OpenMP's, the same ones as PyTorch's. Vectors are those of the processor that
// this is compiled for (vectors.h). Where a processor multiplies tiles (AMX), what is packed is what its tiles are loaded
// from: linear layers, and attention of many queries.

#include <cpuid.h>
#include <immintrin.h>
#include <omp.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "calls.h"
#include "vectors.h"

namespace {

struct alignas(4 * kLanes) Line {  // a vector of pairs; where it has 16, a cache line
    uint32_t pairs[kLanes];
};

// --- tiles: one instruction multiplies 16 rows of 16 pairs by 16 pairs of 16 columns

#if __has_include(<amxbf16intrin.h>) && defined(__AVX512BF16__)
#define TILED __attribute__((target("amx-tile,amx-bf16")))

// What the processor is told of them: eight, each of 16 rows of a line.
alignas(64) constexpr struct {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
} kTileSizes;

// The tiles of this thread, as long as it computes with them.
struct Tiles {
    TILED Tiles() { _tile_loadconfig(&kTileSizes); }
    TILED ~Tiles() { _tile_release(); }
};

// 16 rows of num_pairs pairs, a multiple of 16, against kWidth blocks of packed columns -> sums [16][kWidth * 16], `width`
// between rows. Pairs of a block are `pair_step` lines apart, blocks `block_step`. With kAhead the rows behind these are
// called for, line by line as they lie in memory.
template <int kWidth, bool kAhead>
TILED void multiply_tiles(float* sums, int64_t width, const bf16* rows, int64_t stride, const Line* lines, int64_t pair_step,
                          int64_t block_step, int64_t num_pairs) {
    const int64_t step = sizeof(Line) * pair_step;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t p = 0; p < num_pairs; p += kLanes) {
        const Line* block = lines + p * pair_step;
        if (kAhead)
            for (int i = 0; i < kLanes; i++) _mm_prefetch(rows + kLanes * (stride + 2 * p) + 32 * i, _MM_HINT_T1);
        _tile_loadd(4, rows + 2 * p, 2 * stride);
        _tile_loadd(5, block, step);
        _tile_dpbf16ps(0, 4, 5);
        if (kWidth < 2) continue;
        _tile_loadd(6, block + block_step, step);
        _tile_dpbf16ps(1, 4, 6);
        if (kWidth < 3) continue;
        _tile_loadd(7, block + 2 * block_step, step);
        _tile_dpbf16ps(2, 4, 7);
        if (kWidth < 4) continue;
        _tile_loadd(5, block + 3 * block_step, step);
        _tile_dpbf16ps(3, 4, 5);
    }
    _tile_stored(0, sums, 4 * width);
    if (kWidth > 1) _tile_stored(1, sums + kLanes, 4 * width);
    if (kWidth > 2) _tile_stored(2, sums + 2 * kLanes, 4 * width);
    if (kWidth > 3) _tile_stored(3, sums + 3 * kLanes, 4 * width);
}

// Whether the processor has tiles, and Linux lets this process use them.
bool ask_for_tiles() {
    unsigned a, b, c, d = 0;
    constexpr unsigned kProducts = 1u << 22, kTiles = 1u << 24;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || ~d & (kProducts | kTiles)) return false;
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#else  // a compiler that does not know them; GCC does from 11 on
struct Tiles {
    ~Tiles() {}
};
template <int kWidth, bool kAhead>
void multiply_tiles(float*, int64_t, const bf16*, int64_t, const Line*, int64_t, int64_t, int64_t) {}
bool ask_for_tiles() { return false; }
#endif

bool has_tiles = ask_for_tiles();

template <bool kAhead>
auto multiply_tiles_of(int64_t width) {
    return width == 1   ? multiply_tiles<1, kAhead>
           : width == 2 ? multiply_tiles<2, kAhead>
           : width == 3 ? multiply_tiles<3, kAhead>
                        : multiply_tiles<4, kAhead>;
}

// --- linear layers

constexpr int kPackedRows = 192;  // so many rows of x are packed at a time: they stay in the processor's cache

constexpr int kTiledBlocks = 4;  // blocks of packed rows that tiles take at a time

bool tiled(int64_t size_n, int64_t size_k) { return has_tiles && size_n % kLanes == 0 && size_k % (2 * kLanes) == 0; }

// A vector of elements, floats or pairs of bfloat16, as many as `part_lanes` has: pairs are multiplied as they are.
inline Mask part_lanes(const float*, int64_t count) { return lanes(count); }
inline PairMask part_lanes(const bf16*, int64_t count) { return pair_lanes(count); }
inline Floats load_part(const float* from, Mask mask) { return load(from, mask); }
inline Pairs load_part(const bf16* from, PairMask mask) { return load_pairs(from, mask); }

// kRows rows of x against kColumns rows of w. Meanwhile the next kColumns rows of w are called for, line by line as they
// lie in memory: so the processor's own prefetcher joins in. More than a few would wait for room in the first cache.
template <typename T, int kRows>
inline void linear_tile(const T* x, int64_t x_stride, const T* w, const T* bias, T* y, int64_t y_stride, int64_t size_k) {
    constexpr int kElements = 4 * kLanes / sizeof(T), kLine = 64 / sizeof(T);
    const bool few = kColumns * size_k * int64_t(sizeof(T)) <= kFewBytes;
    Floats sums[kRows][kColumns] = {};
    for (int64_t k = 0; k < size_k; k += kElements) {
        const auto there = part_lanes(x, size_k - k);
        for (int i = 0; i < kColumns * kElements / kLine; i++) {
            const T* ahead = w + kColumns * (size_k + k) + kLine * i;
            few ? _mm_prefetch(ahead, _MM_HINT_T0) : _mm_prefetch(ahead, _MM_HINT_T1);
        }
        decltype(load_part(x, there)) rows[kRows];
#pragma GCC unroll 8
        for (int m = 0; m < kRows; m++) rows[m] = load_part(x + m * x_stride + k, there);
#pragma GCC unroll 8
        for (int n = 0; n < kColumns; n++) {
            const auto column = load_part(w + n * size_k + k, there);
#pragma GCC unroll 8
            for (int m = 0; m < kRows; m++) sums[m][n] = add_products(sums[m][n], rows[m], column);
        }
    }
    const Floats offsets = bias ? load(bias, lanes(kColumns)) : Floats{};
#pragma GCC unroll 8
    for (int m = 0; m < kRows; m++) store(y + m * y_stride, lanes(kColumns), totals(sums[m]) + offsets);
}

// size_m rows of size_k, an even number; row i is at row_at(i) -> lines [size_m / kLanes, rounded up][num_pairs]: pair p of
// kLanes rows side by side. Another pair meets these rows at once, and nothing is added up along a vector. Rows behind the last, and
// pairs behind those of a row, are zeros.
template <typename RowAt>
inline void pack_rows(RowAt row_at, int64_t size_m, int64_t size_k, Line* lines, int64_t num_pairs) {
#pragma omp parallel for schedule(static)
    for (int64_t m = 0; m < size_m; m += kLanes) {
        Line *to = lines + m / kLanes * num_pairs, *end = to + num_pairs;
        for (int64_t k = 0; k < size_k; k += 2 * kLanes) {
            const int64_t pairs = std::min<int64_t>((size_k - k) / 2, kLanes);
            Pairs rows[kLanes];
#pragma GCC unroll 16
            for (int i = 0; i < kLanes; i++)
                rows[i] = load_whole_pairs(row_at(std::min(m + i, size_m - 1)) + k, m + i < size_m ? lanes(pairs) : lanes(0));
            transpose(rows);
            for (int64_t p = 0; p < pairs; p++) store_aligned(to++, rows[p]);
        }
        std::fill(to, end, Line{});
    }
}

// One pair of each of kRows rows against the same pair of kWidth blocks, which are `step` lines apart.
template <int kRows, int kWidth>
inline void multiply(Floats (&sums)[kRows][kWidth], const Line* lines, int64_t step, const bf16* rows, int64_t stride) {
    Pairs blocks[kWidth];
#pragma GCC unroll 8
    for (int w = 0; w < kWidth; w++) blocks[w] = load_pairs_aligned(lines + w * step);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; r++) {
        int32_t pair;
        std::memcpy(&pair, rows + r * stride, 4);
        const Pairs row = all(pair);
#pragma GCC unroll 8
        for (int w = 0; w < kWidth; w++) sums[r][w] = add_products(sums[r][w], row, blocks[w]);
    }
}

// Sums of columns of kLanes rows, and the bias of each -> the rows, y_stride apart, as far as there are any.
inline void store_columns(Floats (&sums)[kColumns], const bf16* bias, bf16* y, int64_t y_stride, int64_t size_m) {
#pragma GCC unroll 8
    for (int n = 0; n < kColumns; n++) sums[n] = sums[n] + all(bias ? to_float(bias[n]) : 0.0f);
    store_rows(sums, y, y_stride, size_m);
}

// kBlocks blocks of packed rows against kColumns rows of w. size_k is a multiple of four; size_m says how many of the
// rows there are. The first blocks call for the next rows of w.
template <int kBlocks, bool kFirst>
void packed_tile(const Line* lines, const bf16* w, const bf16* bias, bf16* y, int64_t y_stride, int64_t size_m,
                 int64_t size_k) {
    const int64_t num_pairs = size_k / 2;
    Floats sums[kColumns][kBlocks] = {};
    for (int64_t p = 0; p < num_pairs; p += 2) {
        if (kFirst) _mm_prefetch(w + kColumns * (size_k + 2 * p), _MM_HINT_T0);
#pragma GCC unroll 2
        for (int64_t pair = p; pair < p + 2; pair++) multiply(sums, lines + pair, num_pairs, w + 2 * pair, size_k);
    }
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; b++) {
        Floats columns[kColumns];
#pragma GCC unroll 8
        for (int n = 0; n < kColumns; n++) columns[n] = sums[n][b];
        store_columns(columns, bias, y + b * kLanes * y_stride, y_stride, size_m - b * kLanes);
    }
}

template <bool kFirst>
auto packed_tile_of(int64_t blocks) {
    return blocks == 1 ? packed_tile<1, kFirst> : blocks == 2 ? packed_tile<2, kFirst> : packed_tile<3, kFirst>;
}

// Blocks of packed rows, kTiledBlocks at most, against 16 rows of w by tiles; the first blocks call for the next rows.
void tiled_columns(const Line* lines, const bf16* w, const bf16* bias, bf16* y, int64_t y_stride, int64_t size_m,
                   int64_t size_k, bool first) {
    const int64_t num_pairs = size_k / 2, blocks = std::min<int64_t>((size_m + kLanes - 1) / kLanes, kTiledBlocks);
    Line sums[kLanes][kTiledBlocks];
    const auto multiply = first ? multiply_tiles_of<true>(blocks) : multiply_tiles_of<false>(blocks);
    multiply((float*)sums, kTiledBlocks * kLanes, w, size_k, lines, 1, num_pairs, num_pairs);
    for (int64_t b = 0; b < blocks; b++)
        for (int64_t n = 0; n < kLanes; n += kColumns) {
            Floats columns[kColumns];
#pragma GCC unroll 8
            for (int i = 0; i < kColumns; i++) columns[i] = load_aligned(&sums[n + i][b]);
            store_columns(columns, bias ? bias + n : nullptr, y + b * kLanes * y_stride + n, y_stride, size_m - b * kLanes);
        }
}

// Rows of x as they are, kRowsAtOnce at a time.
template <typename T>
void multiply_rows(const T* x, int64_t x_stride, const T* w, const T* bias, T* y, int64_t size_m, int64_t size_n, int64_t size_k) {
#pragma omp parallel for schedule(static)
    for (int64_t of = 0; of < size_n; of += kColumns) {
        const int64_t n = std::min<int64_t>(of, size_n - kColumns);  // the last ones overlap
        const T* offsets = bias ? bias + n : nullptr;
        for (int64_t m = 0; m < size_m; m += kRowsAtOnce) {
            const int64_t rows = std::min<int64_t>(size_m - m, kRowsAtOnce);
            const auto tile = rows == 1 ? linear_tile<T, 1> : rows == 2 ? linear_tile<T, 2> : linear_tile<T, kRowsAtOnce>;
            tile(x + m * x_stride, x_stride, w + n * size_k, offsets, y + m * size_n + n, size_n, size_k);
        }
    }
}

void multiply_packed(const bf16* x, int64_t x_stride, const bf16* w, const bf16* bias, bf16* y, int64_t size_m,
                     int64_t size_n, int64_t size_k) {
    thread_local std::vector<Line> packed;
    const int64_t num_blocks = (size_m + kLanes - 1) / kLanes, num_pairs = size_k / 2;
    packed.resize(std::max<int64_t>(num_blocks * num_pairs, packed.size()));
    Line* lines = packed.data();
    pack_rows([=](int64_t m) { return x + m * x_stride; }, size_m, size_k, lines, num_pairs);
    const auto offsets = [=](int64_t n) { return bias ? bias + n : nullptr; };
    if (tiled(size_n, size_k)) {
#pragma omp parallel
        {
            const Tiles tiles;
#pragma omp for schedule(static)
            for (int64_t n = 0; n < size_n; n += kLanes)
                for (int64_t m = 0; m < size_m; m += kTiledBlocks * kLanes)
                    tiled_columns(lines + m / kLanes * num_pairs, w + n * size_k, offsets(n), y + m * size_n + n, size_n,
                                  size_m - m, size_k, m == 0);
        }
        return;
    }
#pragma omp parallel for schedule(static)
    for (int64_t of = 0; of < size_n; of += kColumns)
        for (int64_t b = 0, blocks; b < num_blocks; b += blocks) {
            const int64_t n = std::min<int64_t>(of, size_n - kColumns);
            blocks = num_blocks - b == kBlocksAtOnce + 1 ? 2 : std::min<int64_t>(num_blocks - b, kBlocksAtOnce);
            const auto tile = b == 0 ? packed_tile_of<true>(blocks) : packed_tile_of<false>(blocks);
            tile(lines + b * num_pairs, w + n * size_k, offsets(n), y + b * kLanes * size_n + n, size_n, size_m - b * kLanes,
                 size_k);
        }
}

// --- attention

// The keys (or values) of one head: key i of a sequence is at `base + offsets[i]`.
template <typename T>
struct Paged {
    const T* keys;
    const T* values;
    const int64_t* offsets;
    int64_t count;
    int64_t head_dim;
};

constexpr int kKeys = 4;    // so many keys at a time
constexpr int kAhead = 16;  // so many keys before its turn a key is called for, and a value likewise

template <typename T>
inline void call_for(const T* row, int64_t size) {
    for (int64_t d = 0; d < size; d += 64 / sizeof(T)) _mm_prefetch(row + d, _MM_HINT_T0);
}

// kHeads query heads that share their keys, one token. query and out [kHeads, head_dim]; bias null or, for head h and
// key i, at bias[h * bias_stride + i]; scores has room for kHeads * padded, padded = count rounded up to kLanes.
template <typename T, int kSixteens, int kHeads>
void attend(const T* query, const Paged<T>& paged, const float* bias, int64_t bias_stride, float scale, float* scores,
            T* out) {
    const int64_t count = paged.count, padded = (count + kLanes - 1) / kLanes * kLanes, head_dim = paged.head_dim;
    constexpr int kVectors = 16 * kSixteens / kLanes;
    constexpr int kElements = 4 * kLanes / sizeof(T), kParts = (kVectors * kLanes + kElements - 1) / kElements;
    for (int64_t i = 0; i < count; i += kKeys) {
        const T* keys[kKeys];
        for (int j = 0; j < kKeys; j++) {
            keys[j] = paged.keys + paged.offsets[std::min(i + j, count - 1)];
            call_for(paged.keys + paged.offsets[std::min(i + j + kAhead, count - 1)], head_dim);
        }
        Floats sums[kHeads][kKeys] = {};
#pragma GCC unroll 8
        for (int p = 0; p < kParts; p++) {
            const int64_t d = p * kElements;
            const auto there = part_lanes(query, head_dim - d);
            decltype(load_part(query, there)) parts[kHeads];
#pragma GCC unroll 4
            for (int h = 0; h < kHeads; h++) parts[h] = load_part(query + h * head_dim + d, there);
#pragma GCC unroll 4
            for (int j = 0; j < kKeys; j++) {
                const auto key = load_part(keys[j] + d, there);
#pragma GCC unroll 4
                for (int h = 0; h < kHeads; h++) sums[h][j] = add_products(sums[h][j], parts[h], key);
            }
        }
        for (int h = 0; h < kHeads; h++)
            _mm_storeu_ps(scores + h * padded + i, totals(sums[h][0], sums[h][1], sums[h][2], sums[h][3]));
    }
    float factors[kHeads];
    for (int h = 0; h < kHeads; h++) {
        float* row = scores + h * padded;
        Floats most = all(-3e38f), sum = {};
        for (int64_t i = 0; i < count; i += kLanes) {
            const Mask there = lanes(count - i);
            Floats score = load(row + i, there) * all(scale);
            if (bias) score = score + load(bias + h * bias_stride + i, there);
            store(row + i, there, score);
            most = max(there, most, score);
        }
        most = all(max_of(most));
        for (int64_t i = 0; i < count; i += kLanes) {
            const Mask there = lanes(count - i);
            const Floats weight = keep(there, exponential(load(row + i, there) - most));
            store(row + i, there, weight);
            sum = sum + weight;
        }
        factors[h] = 1.0f / sum_of(sum);
    }
    constexpr int kWidth = kVectors > 6 ? 4 : kVectors > 4 ? 3 : kVectors;  // vectors of output at once
    for (int64_t d = 0; d < head_dim; d += kWidth * kLanes) {
        Floats results[kHeads][kWidth] = {};
        for (int64_t i = 0; i < count; i++) {
            const T* value = paged.values + paged.offsets[i] + d;
            call_for(paged.values + paged.offsets[std::min(i + kAhead, count - 1)] + d, kWidth * kLanes);
#pragma GCC unroll 4
            for (int v = 0; v < kWidth; v++) {
                const Floats part = load(value + v * kLanes, lanes(head_dim - d - v * kLanes));
#pragma GCC unroll 4
                for (int h = 0; h < kHeads; h++)
                    results[h][v] = multiply_add(all(scores[h * padded + i]), part, results[h][v]);
            }
        }
        for (int h = 0; h < kHeads; h++)
            for (int v = 0; v < kWidth; v++) {
                const int64_t at = d + v * kLanes;
                store(out + h * head_dim + at, lanes(head_dim - at), results[h][v] * all(factors[h]));
            }
    }
}

template <typename T>
using Attend = void (*)(const T*, const Paged<T>&, const float*, int64_t, float, float*, T*);

// The variant for a head_dim of up to 16 * kSixteens and up to kHeadsAtOnce heads.
template <typename T, int kSixteens>
Attend<T> of_heads(int64_t heads) {
    if (heads == 1) return attend<T, kSixteens, 1>;
    if constexpr (kHeadsAtOnce > 2) {
        if (heads == 2) return attend<T, kSixteens, 2>;
        if (heads == 3) return attend<T, kSixteens, 3>;
    }
    return attend<T, kSixteens, kHeadsAtOnce>;
}
template <typename T>
Attend<T> variant(int64_t head_dim, int64_t heads) {
    switch ((head_dim + 15) / 16) {
        case 1: return of_heads<T, 1>(heads);
        case 2: return of_heads<T, 2>(heads);
        case 3: return of_heads<T, 3>(heads);
        case 4: return of_heads<T, 4>(heads);
        case 5: return of_heads<T, 5>(heads);
        case 6: return of_heads<T, 6>(heads);
        case 7:
        case 8: return of_heads<T, 8>(heads);
        default: return of_heads<T, 16>(heads);
    }
}

// --- attention of many queries over the same keys: encoders and prompts

constexpr int kTiledQueries = kLanes;

// Keys begin .. end of the first of many rows; those of each further row begin and end so many keys later.
struct KeyRange {
    int64_t begin, end, begin_step, end_step;

    int64_t begin_of(int64_t row) const { return begin + row * begin_step; }
    int64_t end_of(int64_t row) const { return end + row * end_step; }
    KeyRange from(int64_t row) const { return {begin_of(row), end_of(row), begin_step, end_step}; }
};

// The operands of one head, paired as the product of pairs wants them. kDim is head_dim where it is known when this is
// compiled, else 0.
template <int kDim>
struct PackedHead {
    std::vector<Line> keys;     // [padded / kLanes][num_pairs]: pair p of kLanes keys
    std::vector<Line> values;   // [padded / 2][value_lines]: keys 2 j and 2 j + 1 side by side
    std::vector<Line> scores;   // [kQueries or kTiledQueries][padded / kLanes] float32
    std::vector<Line> weights;  // [as many][padded / kLanes / 2] bfloat16
    std::vector<Line> queries;  // [kTiledQueries][num_pairs / 16] for tiles, with zeros
    int64_t padded;             // number of keys, to a multiple of kWide * kLanes, with zeros
    int64_t dim;

    int64_t head_dim() const { return kDim ? kDim : dim; }
    int64_t num_pairs() const { return has_tiles ? (head_dim() / 2 + kLanes - 1) / kLanes * kLanes : head_dim() / 2; }
    int64_t value_lines() const { return (head_dim() + kLanes - 1) / kLanes; }

    template <typename KeyAt, typename ValueAt>
    void pack(KeyAt key_at, ValueAt value_at, int64_t size, int64_t size_d) {
        dim = size_d;
        padded = (size + kWide * kLanes - 1) / (kWide * kLanes) * kWide * kLanes;
        keys.resize(padded / kLanes * num_pairs());
        values.resize(padded / 2 * value_lines());
        const int64_t rows = has_tiles ? kTiledQueries : kQueries;
        scores.resize(rows * padded / kLanes);
        weights.resize(rows * padded / kLanes / 2);
        const int64_t blocks = (size + kLanes - 1) / kLanes, twos = (size + 1) / 2;
        pack_rows(key_at, size, head_dim(), keys.data(), num_pairs());
        std::fill(keys.begin() + blocks * num_pairs(), keys.end(), Line{});
        for (int64_t j = 0; j < twos; j++)
            for (int64_t line = 0; line < value_lines(); line++) {
                const bf16* even = value_at(2 * j) + line * kLanes;
                const bf16* odd = value_at(std::min(2 * j + 1, size - 1)) + line * kLanes;
                const Mask there = lanes(head_dim() - line * kLanes);
                const Pairs first = load_low_halves(even, there);
                const Pairs second = load_low_halves(odd, 2 * j + 1 < size ? there : lanes(0));
                store_aligned(&values[j * value_lines() + line], either(first, to_high_halves(second)));
            }
        std::fill(values.begin() + twos * value_lines(), values.end(), Line{});
    }

    // `count` rows of queries, kQueries at least, query_stride apart -> as many rows of out, out_stride apart. Row q sees
    // the keys of `seen` for row q.
    void attend(const bf16* query, int64_t query_stride, int64_t count, float scale, bf16* out, int64_t out_stride,
                KeyRange seen) {
        if (has_tiles) {
            const Tiles tiles;
            for (int64_t i = 0; i < count; i += kTiledQueries)
                attend_tiled(query + i * query_stride, query_stride, std::min<int64_t>(count - i, kTiledQueries), scale,
                             out + i * out_stride, out_stride, seen.from(i));
            return;
        }
        for (int64_t i = 0; i < count; i += kQueries) {
            const int64_t first = std::min<int64_t>(i, count - kQueries);  // the last ones overlap
            attend_few(query + first * query_stride, query_stride, scale, out + first * out_stride, out_stride, seen.from(first));
        }
    }

   private:
    // Keys around those that `count` rows see, from `start` to `width`, in whole steps.
    static std::pair<int64_t, int64_t> around(KeyRange seen, int64_t count) {
        const int64_t wide = kWide * kLanes;
        return {seen.begin / wide * wide, (seen.end_of(count - 1) + wide - 1) / wide * wide};
    }

    // `count` rows, kTiledQueries at most.
    void attend_tiled(const bf16* query, int64_t query_stride, int64_t count, float scale, bf16* out, int64_t out_stride,
                      KeyRange seen) {
        const auto [start, width] = around(seen, count);
        queries.assign(kTiledQueries * num_pairs() / kLanes, Line{});
        bf16* rows = (bf16*)queries.data();
        for (int64_t q = 0; q < count; q++) std::copy_n(query + q * query_stride, head_dim(), rows + q * 2 * num_pairs());
        float* score = (float*)scores.data();
        bf16* weight = (bf16*)weights.data();
        for (int64_t block = start / kLanes; block < width / kLanes; block += kWide)
            multiply_tiles<kWide, false>(score + block * kLanes, width, rows, 2 * num_pairs(), &keys[block * num_pairs()], 1,
                                         num_pairs(), num_pairs());
        float factors[kTiledQueries];
        for (int q = 0; q < count; q++)
            factors[q] = soften(score + q * width, weight + q * width, scale, start, seen.begin_of(q), seen.end_of(q), width);
        for (int64_t line = 0; line < value_lines(); line += kWide) {
            const int64_t blocks = std::min<int64_t>(value_lines() - line, kWide);
            Line sums[kTiledQueries][kWide];
            multiply_tiles_of<false>(blocks)((float*)sums, kWide * kLanes, weight + start, width,
                                             &values[start / 2 * value_lines() + line], value_lines(), 1, (width - start) / 2);
            for (int q = 0; q < count; q++)
                for (int b = 0; b < blocks; b++)
                    store_part(load_aligned(&sums[q][b]), factors[q], out + q * out_stride, line + b);
        }
    }

    void store_part(Floats sums, float factor, bf16* out, int64_t line) const {
        store(out + line * kLanes, lanes(head_dim() - line * kLanes), sums * all(factor));
    }

    // kQueries rows.
    void attend_few(const bf16* query, int64_t query_stride, float scale, bf16* out, int64_t out_stride, KeyRange seen) {
        const auto [start, width] = around(seen, kQueries);
        float* score = (float*)scores.data();
        bf16* weight = (bf16*)weights.data();
        for (int64_t block = start / kLanes; block < width / kLanes; block += kWide) {
            Floats sums[kQueries][kWide] = {};
            for (int64_t p = 0; p < num_pairs(); p++)
                multiply(sums, &keys[block * num_pairs() + p], num_pairs(), query + 2 * p, query_stride);
            for (int q = 0; q < kQueries; q++)
                for (int w = 0; w < kWide; w++)
                    store_aligned(score + q * width + (block + w) * kLanes, sums[q][w]);
        }
        float factors[kQueries];
        for (int q = 0; q < kQueries; q++)
            factors[q] = soften(score + q * width, weight + q * width, scale, start, seen.begin_of(q), seen.end_of(q), width);
        for (int64_t line = 0; line < value_lines(); line += kWide) switch (std::min<int64_t>(value_lines() - line, kWide)) {
            case 1: sum_values<1>(line, start, width, factors, out, out_stride); break;
            case 2: sum_values<2>(line, start, width, factors, out, out_stride); break;
            case 3: sum_values<3>(line, start, width, factors, out, out_stride); break;
            default: sum_values<kWide>(line, start, width, factors, out, out_stride);
        }
    }

    // kWidth * kLanes columns of the weighted values from `start` to `width`.
    template <int kWidth>
    void sum_values(int64_t line, int64_t start, int64_t width, const float* factors, bf16* out, int64_t out_stride) const {
        Floats sums[kQueries][kWidth] = {};
        for (int64_t j = start / 2; j < width / 2; j++)
            multiply(sums, &values[j * value_lines() + line], 1, (const bf16*)weights.data() + 2 * j, width);
        for (int q = 0; q < kQueries; q++)
            for (int w = 0; w < kWidth; w++) store_part(sums[q][w], factors[q], out + q * out_stride, line + w);
    }

    // exp(scale * (score - max)) of keys begin to end as bfloat16, zero around them from start to width; returns the
    // reciprocal of their sum.
    static float soften(const float* score, bf16* weight, float scale, int64_t start, int64_t begin, int64_t end, int64_t width) {
        const auto seen = [=](int64_t i) { return lanes(begin - i, end - i); };
        Floats most = all(-3e38f), sum = {};
        for (int64_t i = start; i < end; i += kLanes) most = max(seen(i), most, load(score + i, kAll));
        most = all(max_of(most));
        for (int64_t i = start; i < width; i += kLanes) {
            const Floats below = load(score + i, kAll) - most;
            const Floats value = keep(seen(i), exponential(below * all(scale)));
            store(weight + i, kAll, value);
            sum = sum + value;
        }
        return 1.0f / sum_of(sum);
    }
};

// Where [batch, heads, tokens, head_dim] lies: strides in elements; the last dimension is contiguous.
struct Strides {
    int64_t batch, head, token;

    const bf16* at(const bf16* tensor, int64_t item, int64_t of_head) const {
        return tensor + item * batch + of_head * head;
    }
};

template <int kDim>
void dense_attention(const bf16* query, Strides of_query, const bf16* key, Strides of_key, const bf16* value,
                     Strides of_value, bf16* out, int64_t batch, int64_t num_heads, int64_t num_kv_heads,
                     int64_t num_queries, int64_t num_keys, int64_t head_dim, float scale) {
    const int64_t group = num_heads / num_kv_heads, out_stride = num_heads * head_dim;
#pragma omp parallel for collapse(2) schedule(dynamic, 1)
    for (int64_t item = 0; item < batch; item++)
        for (int64_t head = 0; head < num_heads; head++) {
            thread_local PackedHead<kDim> packed;
            const bf16 *keys = of_key.at(key, item, head / group), *values = of_value.at(value, item, head / group);
            packed.pack([=](int64_t i) { return keys + i * of_key.token; },
                        [=](int64_t i) { return values + i * of_value.token; }, num_keys, head_dim);
            const bf16* from = of_query.at(query, item, head);
            bf16* to = out + item * num_queries * out_stride + head * head_dim;
            packed.attend(from, of_query.token, num_queries, scale, to, out_stride, {0, num_keys, 0, 0});
        }
}

// --- attention over a paged cache

// Keys and values of a layer, and the blocks of each request: tables [num_requests, table_stride].
template <typename T>
struct Cache {
    const T* keys;
    int64_t value_offset;
    const int64_t* tables;
    int64_t table_stride, num_kv_heads, head_dim, block_size;

    // Where keys begin .. end of a request lie, for head 0.
    void locate(int64_t request, int64_t begin, int64_t end, std::vector<int64_t>& offsets) const {
        offsets.resize(end - begin);
        for (int64_t key = begin; key < end; key++) {
            const int64_t block = tables[request * table_stride + key / block_size];
            offsets[key - begin] = (block * block_size + key % block_size) * num_kv_heads * head_dim;
        }
    }
};

// Consecutive tokens of a request, computed together where they are more than one.
struct Run {
    int64_t token, count, request;
    KeyRange seen;
};

constexpr int kFewTokens = 8, kManyTokens = 192;  // fewer tokens are computed one by one, more in parts

// Tokens [num_tokens] of `requests` with their key ranges, as runs; one by one unless `together`.
std::vector<Run> runs_of(const int64_t* requests, const int64_t* ranges, int64_t num_tokens, bool together,
                         int64_t num_kv_heads) {
    std::vector<Run> runs;
    for (int64_t token = 0, count; token < num_tokens; token += count) {
        const auto step = [=](int64_t t, int side) { return ranges[2 * (t + 1) + side] - ranges[2 * t + side]; };
        const auto belongs = [=](int64_t t) {
            return requests[t] == requests[token] && step(t - 1, 0) == step(token, 0) && step(t - 1, 1) == step(token, 1);
        };
        count = 1;
        while (together && token + count < num_tokens && belongs(token + count)) count++;
        const int64_t begin_step = count > 1 ? step(token, 0) : 0, end_step = count > 1 ? step(token, 1) : 0;
        const auto has_keys = [=](int64_t t) { return ranges[2 * t + 1] > ranges[2 * t]; };
        const bool steady = begin_step >= 0 && end_step >= 0 && has_keys(token) && has_keys(token + count - 1);
        const int64_t most = std::clamp<int64_t>(count * num_kv_heads / omp_get_max_threads(), 3 * kFewTokens, kManyTokens);
        const int64_t parts = count < kFewTokens || !steady ? count : (count + most - 1) / most;
        for (int64_t part = 0; part < parts; part++) {
            const int64_t first = token + part * count / parts, last = token + (part + 1) * count / parts;
            const KeyRange seen{ranges[2 * first], ranges[2 * first + 1], begin_step, end_step};
            runs.push_back({first, last - first, requests[first], seen});
        }
    }
    return runs;
}

// One token, and the query heads of one head of keys. bias null or [heads, bias_stride].
template <typename T>
void attend_one(const T* query, const Cache<T>& cache, const Run& run, int64_t kv_head, int64_t group, const float* bias,
                int64_t bias_stride, float scale, T* out) {
    thread_local std::vector<int64_t> offsets;
    thread_local std::vector<float> scores;
    const int64_t count = run.seen.end - run.seen.begin, head_dim = cache.head_dim;
    if (count <= 0) {
        std::fill_n(out, group * head_dim, T{});
        return;
    }
    cache.locate(run.request, run.seen.begin, run.seen.end, offsets);
    scores.resize(kHeadsAtOnce * (count + kLanes));
    const T* keys = cache.keys + kv_head * head_dim;
    const Paged<T> paged{keys, keys + cache.value_offset, offsets.data(), count, head_dim};
    for (int64_t h = 0; h < group; h += kHeadsAtOnce)
        variant<T>(head_dim, group - h)(query + h * head_dim, paged, bias ? bias + h * bias_stride : nullptr, bias_stride,
                                        scale, scores.data(), out + h * head_dim);
}

// Many tokens, and the query heads of one head of keys; query and out are those of the first token.
template <int kDim>
void attend_run(const bf16* query, int64_t query_stride, const Cache<bf16>& cache, const Run& run, int64_t kv_head,
                int64_t group, float scale, bf16* out, int64_t out_stride) {
    thread_local std::vector<int64_t> offsets;
    thread_local PackedHead<kDim> packed;
    const int64_t begin = run.seen.begin, end = run.seen.end_of(run.count - 1);
    cache.locate(run.request, begin, end, offsets);
    const bf16* keys = cache.keys + kv_head * cache.head_dim;
    const int64_t *at = offsets.data(), value_offset = cache.value_offset;
    packed.pack([=](int64_t i) { return keys + at[i]; }, [=](int64_t i) { return keys + value_offset + at[i]; }, end - begin,
                cache.head_dim);
    const KeyRange seen{0, run.seen.end - begin, run.seen.begin_step, run.seen.end_step};
    for (int64_t h = 0; h < group; h++)
        packed.attend(query + h * cache.head_dim, query_stride, run.count, scale, out + h * cache.head_dim, out_stride, seen);
}
void attend_run(const bf16* query, int64_t query_stride, const Cache<bf16>& cache, const Run& run, int64_t kv_head,
                int64_t group, float scale, bf16* out, int64_t out_stride) {
    const auto attend = cache.head_dim == 64 ? attend_run<64> : cache.head_dim == 128 ? attend_run<128> : attend_run<0>;
    attend(query, query_stride, cache, run, kv_head, group, scale, out, out_stride);
}

template <typename T>
void paged_attention(const T* query, int64_t query_stride, const Cache<T>& cache, const int64_t* requests,
                     const int64_t* key_ranges, const float* bias, int64_t bias_len, T* out, int64_t num_tokens,
                     int64_t num_heads, float scale) {
    const int64_t group = num_heads / cache.num_kv_heads, head_dim = cache.head_dim, out_stride = num_heads * head_dim;
    constexpr bool kPacks = std::is_same_v<T, bf16>;
    const bool together = kPacks && !bias && head_dim % 2 == 0;
    const std::vector<Run> runs = runs_of(requests, key_ranges, num_tokens, together, cache.num_kv_heads);
#pragma omp parallel for collapse(2) schedule(dynamic, 1)
    for (size_t r = 0; r < runs.size(); r++)
        for (int64_t kv_head = 0; kv_head < cache.num_kv_heads; kv_head++) {
            const Run& run = runs[r];
            const int64_t head = kv_head * group;
            const T* from = query + run.token * query_stride + head * head_dim;
            T* to = out + run.token * out_stride + head * head_dim;
            if constexpr (kPacks) {
                if (run.count > 1) {
                    attend_run(from, query_stride, cache, run, kv_head, group, scale, to, out_stride);
                    continue;
                }
            }
            const float* addends = bias ? bias + (head * num_tokens + run.token) * bias_len + run.seen.begin : nullptr;
            attend_one(from, cache, run, kv_head, group, addends, num_tokens * bias_len, scale, to);
        }
}

template <typename T>
void rotate(bf16* x, int64_t x_stride, const T* cosines, const T* sines, int64_t num_tokens, int64_t num_heads,
            int64_t head_dim) {
    const int64_t half = head_dim / 2;
#pragma omp parallel for schedule(static) if (num_tokens >= 16)
    for (int64_t token = 0; token < num_tokens; token++)
        for (int64_t i = 0; i < half; i += kLanes) {
            const int64_t at = token * head_dim + i;
            const Mask mask = lanes(half - i);
            const Floats cos_low = load(cosines + at, mask), cos_high = load(cosines + at + half, mask);
            const Floats sin_low = load(sines + at, mask), sin_high = load(sines + at + half, mask);
            for (int64_t head = 0; head < num_heads; head++) {
                bf16* low = x + token * x_stride + head * head_dim + i;
                bf16* high = low + half;
                const Floats first = load(low, mask), second = load(high, mask);
                store(low, mask, multiply_add(second, sin_low, first * cos_low));
                store(high, mask, multiply_add(first, sin_high, second * cos_high));
            }
        }
}

}  // namespace

extern "C" {

// Compute with tiles from now on, as this library does where it can, or without; returns whether.
bool use_tiles(bool wanted) { return has_tiles = wanted && ask_for_tiles(); }

// Whether products of pairs of bfloat16 are instructions here.
bool has_pairs() { return kHasPairs; }

// x [size_m, size_k] with x_stride between rows, w [size_n, size_k], bias [size_n] or null -> y [size_m, size_n].
// size_n is at least eight, size_k a multiple of four.
void linear_bf16(const bf16* x, int64_t x_stride, const bf16* w, const bf16* bias, bf16* y, int64_t size_m, int64_t size_n,
                 int64_t size_k) {
    kept([=, rows = Rows{size_m}] {
        const int64_t size_m = rows;
        if (size_m <= (tiled(size_n, size_k) ? 1 : kFewRows)) multiply_rows(x, x_stride, w, bias, y, size_m, size_n, size_k);
        else
            for (int64_t m = 0; m < size_m; m += kPackedRows)
                multiply_packed(x + m * x_stride, x_stride, w, bias, y + m * size_n, std::min<int64_t>(size_m - m, kPackedRows),
                                size_n, size_k);
    });
}
void linear_f32(const float* x, int64_t x_stride, const float* w, const float* bias, float* y, int64_t size_m, int64_t size_n,
                int64_t size_k) {
    kept([=, rows = Rows{size_m}] { multiply_rows(x, x_stride, w, bias, y, rows, size_n, size_k); });
}

// Query tokens, each against a range of the keys of its request; an empty range gives zeros. Without a bias, tokens of
// bfloat16 that stand side by side in a request are computed together.
//   query       [num_tokens, num_heads, head_dim], query_stride between tokens; head_dim at most 256
//   cache       [2, num_blocks, block_size, num_kv_heads, head_dim]; value_offset between keys and values
//   tables      [num_requests, table_stride] blocks of each request
//   requests    [num_tokens] the request of each token; key_ranges [num_tokens, 2]
//   bias        null or [num_heads, num_tokens, bias_len], added to the scaled scores
void paged_attention_bf16(const bf16* query, int64_t query_stride, const bf16* cache, int64_t value_offset,
                          const int64_t* tables, int64_t table_stride, const int64_t* requests,
                          const int64_t* key_ranges, const float* bias, int64_t bias_len, bf16* out,
                          int64_t num_tokens, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                          int64_t block_size, float scale) {
    const Cache<bf16> blocks{cache, value_offset, tables, table_stride, num_kv_heads, head_dim, block_size};
    kept([=] {
        paged_attention(query, query_stride, blocks, requests, key_ranges, bias, bias_len, out, num_tokens, num_heads, scale);
    });
}
void paged_attention_f32(const float* query, int64_t query_stride, const float* cache, int64_t value_offset,
                         const int64_t* tables, int64_t table_stride, const int64_t* requests,
                         const int64_t* key_ranges, const float* bias, int64_t bias_len, float* out,
                         int64_t num_tokens, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                         int64_t block_size, float scale) {
    const Cache<float> blocks{cache, value_offset, tables, table_stride, num_kv_heads, head_dim, block_size};
    kept([=] {
        paged_attention(query, query_stride, blocks, requests, key_ranges, bias, bias_len, out, num_tokens, num_heads, scale);
    });
}

// query [batch, num_heads, num_queries, head_dim], key and value [batch, num_kv_heads, num_keys, head_dim] with strides
// of batch, head and token (the last dimension is contiguous) -> out [batch, num_queries, num_heads, head_dim] contiguous.
// At least six queries; head_dim is even.
void dense_attention_bf16(const bf16* query, const int64_t* query_strides, const bf16* key, const int64_t* key_strides,
                          const bf16* value, const int64_t* value_strides, bf16* out, int64_t batch, int64_t num_heads,
                          int64_t num_kv_heads, int64_t num_queries, int64_t num_keys, int64_t head_dim, float scale) {
    const auto run = head_dim == 64 ? dense_attention<64> : head_dim == 128 ? dense_attention<128> : dense_attention<0>;
    const auto strides = [](const int64_t* of) { return Strides{of[0], of[1], of[2]}; };
    kept([=, of_query = strides(query_strides), of_key = strides(key_strides), of_value = strides(value_strides)] {
        run(query, of_query, key, of_key, value, of_value, out, batch, num_heads, num_kv_heads, num_queries, num_keys,
            head_dim, scale);
    });
}

// Keys and values [num_tokens, width] (strides between rows given) into their slots of a cache. All in units of two bytes.
void write_cache(const uint16_t* key, int64_t key_stride, const uint16_t* value, int64_t value_stride, uint16_t* cache,
                 int64_t value_offset, const int64_t* slots, int64_t num_tokens, int64_t width) {
    kept([=] {
#pragma omp parallel for schedule(static) if (num_tokens >= 64)
        for (int64_t token = 0; token < num_tokens; token++) {
            std::copy_n(key + token * key_stride, width, cache + slots[token] * width);
            std::copy_n(value + token * value_stride, width, cache + value_offset + slots[token] * width);
        }
    });
}

// Row rows[i] of x [num_tokens, width], x_stride between rows, as row i of y, for the first *num_rows rows. All in units of
// two bytes. Calls kept behind this one compute the rows of so many tokens.
void take_rows(const uint16_t* x, int64_t x_stride, const int64_t* rows, const int64_t* num_rows, uint16_t* y,
               int64_t num_tokens, int64_t width) {
    if (keeping) {
        most_tokens = num_rows;
        all_tokens = num_tokens;
    }
    kept([=] {
        for (int64_t row = 0; row < *num_rows; row++) std::copy_n(x + rows[row] * x_stride, width, y + row * width);
    });
}

// Adds `added` (null: nothing) to hidden in place, then y = hidden / rms(hidden) * weight. All [num_rows, size].
void add_rms_norm(bf16* hidden, const bf16* added, const bf16* weight, bf16* y, int64_t num_rows, int64_t size,
                  float eps) {
    kept([=, rows = Rows{num_rows}] {
        const int64_t num_rows = rows;
#pragma omp parallel for schedule(static) if (num_rows >= 16)
        for (int64_t row = 0; row < num_rows; row++) {
            bf16* x = hidden + row * size;
            Floats squares = {};
            for (int64_t i = 0; i < size; i += kLanes) {
                const Mask mask = lanes(size - i);
                if (added) store(x + i, mask, load(x + i, mask) + load(added + row * size + i, mask));
                const Floats value = load(x + i, mask);
                squares = multiply_add(value, value, squares);
            }
            const Floats factor = all(1.0f / __builtin_sqrtf(sum_of(squares) / size + eps));
            for (int64_t i = 0; i < size; i += kLanes) {
                const Mask mask = lanes(size - i);
                store(y + row * size + i, mask, load(x + i, mask) * factor * load(weight + i, mask));
            }
        }
    });
}

// gate_up [num_rows, 2 * size] -> y [num_rows, size] = silu(gate) * up.
void silu_mul(const bf16* gate_up, bf16* y, int64_t num_rows, int64_t size) {
    kept([=, rows = Rows{num_rows}] {
        const int64_t num_rows = rows;
#pragma omp parallel for schedule(static) if (num_rows >= 4)
        for (int64_t row = 0; row < num_rows; row++)
            for (int64_t i = 0; i < size; i += kLanes) {
                const Mask mask = lanes(size - i);
                const Floats gate = load(gate_up + row * 2 * size + i, mask);
                const Floats up = load(gate_up + row * 2 * size + size + i, mask);
                const Floats below = all(1.0f) + exponential(Floats{} - gate);
                store(y + row * size + i, mask, gate / below * up);
            }
    });
}

// x [num_tokens, num_heads, head_dim] in place, x_stride between tokens; cosines and signed sines [num_tokens, head_dim]:
// x * cos + (second half, first half) * sin. head_dim is even.
void rotate_by_bf16(bf16* x, int64_t x_stride, const bf16* cosines, const bf16* sines, int64_t num_tokens,
                    int64_t num_heads, int64_t head_dim) {
    kept([=] { rotate(x, x_stride, cosines, sines, num_tokens, num_heads, head_dim); });
}
void rotate_by_f32(bf16* x, int64_t x_stride, const float* cosines, const float* sines, int64_t num_tokens,
                   int64_t num_heads, int64_t head_dim) {
    kept([=] { rotate(x, x_stride, cosines, sines, num_tokens, num_heads, head_dim); });
}

}  // extern "C"
