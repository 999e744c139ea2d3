/* CPU kernels for decode steps: what torch has no single call for, or reads its operands more than once for.
 *
 * Each function computes what its twin in paceline.kernels.reference says, in float32 throughout; bfloat16 operands are
 * widened as they are read and rounded to nearest even as they are written. Vectors are the compiler's own, so that one
 * source serves AVX2, AVX-512 and NEON. Threads are those of the OpenMP runtime that torch has loaded: a second pool of
 * spinning threads would take the cores from the first. Callers check shapes, types and contiguity (ops.py).
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef float loose_vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES)));
typedef uint16_t half_vec __attribute__((vector_size(2 * LANES)));
typedef uint16_t loose_half_vec __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

#define INLINE static inline __attribute__((always_inline))
#define BF16 1 /* the `kind` of a bfloat16 operand; 0 is float32 */

/* Elements and vectors of either kind. */

INLINE float load1(const void *at, int64_t i, int kind) {
    if (kind != BF16) return ((const float *)at)[i];
    uint32_t bits = (uint32_t)((const uint16_t *)at)[i] << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

INLINE uint16_t round1(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0; /* a NaN stays one */
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

INLINE void store1(void *at, int64_t i, float value, int kind) {
    if (kind == BF16)
        ((uint16_t *)at)[i] = round1(value);
    else
        ((float *)at)[i] = value;
}

/* What storing and loading again gives. */
INLINE float rounded(float value, int kind) {
    if (kind != BF16) return value;
    uint16_t bits = round1(value);
    return load1(&bits, 0, BF16);
}

INLINE vec load(const void *at, int64_t i, int kind) {
    if (kind != BF16) return *(const loose_vec *)((const float *)at + i);
    half_vec narrow = *(const loose_half_vec *)((const uint16_t *)at + i);
    return (vec)(__builtin_convertvector(narrow, uvec) << 16);
}

INLINE float sum(vec values) {
#if LANES == 16
    typedef float half __attribute__((vector_size(32)));
    half eight = __builtin_shufflevector(values, values, 0, 1, 2, 3, 4, 5, 6, 7) +
                 __builtin_shufflevector(values, values, 8, 9, 10, 11, 12, 13, 14, 15);
#elif LANES == 8
    vec eight = values;
#endif
#if LANES >= 8
    typedef float quarter __attribute__((vector_size(16)));
    quarter four = __builtin_shufflevector(eight, eight, 0, 1, 2, 3) + __builtin_shufflevector(eight, eight, 4, 5, 6, 7);
#else
    vec four = values;
#endif
    return (four[0] + four[2]) + (four[1] + four[3]); /* in the order of sum_each */
}

INLINE vec choose(ivec where, vec yes, vec no) { return (vec)((where & (ivec)yes) | (~where & (ivec)no)); }

/* The sum of each of `count` vectors. Sixteen are folded into one another: two shuffles for each sum. */
INLINE void sum_each(const vec *values, float *sums, int count) {
#if LANES == 16
#define FOLD(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
    if (count == 16) {
        vec a[8], b[4], c[2];
        for (int i = 0; i < 8; i++) {
            vec x = values[i], y = values[i + 8];
            a[i] = FOLD(x, y, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
                   FOLD(x, y, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
        }
        for (int i = 0; i < 4; i++) {
            vec x = a[i], y = a[i + 4];
            b[i] = FOLD(x, y, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
                   FOLD(x, y, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
        }
        for (int i = 0; i < 2; i++) {
            vec x = b[i], y = b[i + 2];
            c[i] = FOLD(x, y, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
                   FOLD(x, y, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
        }
        *(loose_vec *)sums = FOLD(c[0], c[1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
                             FOLD(c[0], c[1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
        return;
    }
#endif
    for (int i = 0; i < count; i++) sums[i] = sum(values[i]);
}

/* e^x to about 2 units in the last place; 0 below -87. */
INLINE vec exponential(vec x) {
    x = choose(x < -87.0f, (vec){} - 87.0f, x); /* a NaN is neither, and stays */
    x = choose(x > 88.0f, (vec){} + 88.0f, x);
    vec shifted = x * 1.44269504f + 12582912.0f; /* rounds to an integer, in the low bits */
    ivec power = (ivec)shifted - 0x4b400000;
    vec whole = shifted - 12582912.0f;
    x = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    vec y = (vec){} + 1.9875691500e-4f;
    y = y * x + 1.3981999507e-3f;
    y = y * x + 8.3334519073e-3f;
    y = y * x + 4.1665795894e-2f;
    y = y * x + 1.6666665459e-1f;
    y = y * x + 5.0000001201e-1f;
    y = y * x * x + x + 1.0f;
    return y * (vec)((power + 127) << 23);
}

/* The dense product with few rows: out[r, o] = sum of x[r, :] * weight[o, :]. Each weight is read from memory once; a
 * tile of ROWS x OUTPUTS sums stays in registers. `inputs` is a multiple of LANES.
 *
 * While tiles of several rows use weights out of the cache, memory would idle: so each fetches its share (its `turn` of
 * `turns`) of the weights that come next, at `ahead`. Past the matrix's end that is a hint about nothing, and harmless.
 */
#define TILE(ROWS, OUTPUTS)                                                                                         \
    INLINE void tile_##ROWS##x##OUTPUTS(const float *x, const void *weight, float *sums, int64_t inputs, int kind,  \
                                        const char *ahead, int64_t ahead_size, int turn, int turns) {               \
        vec acc[ROWS * OUTPUTS] = {};                                                                               \
        for (int64_t i = 0; i < inputs; i += LANES) {                                                               \
            for (int q = turn; q < OUTPUTS; q += turns) __builtin_prefetch(ahead + (q * inputs + i) * ahead_size);  \
            vec w[OUTPUTS];                                                                                         \
            _Pragma("GCC unroll 8") for (int o = 0; o < OUTPUTS; o++) w[o] = load(weight, o * inputs + i, kind);    \
            _Pragma("GCC unroll 8") for (int r = 0; r < ROWS; r++) {                                                \
                vec value = load(x, r * inputs + i, 0);                                                             \
                _Pragma("GCC unroll 8") for (int o = 0; o < OUTPUTS; o++) acc[r * OUTPUTS + o] += value * w[o];     \
            }                                                                                                       \
        }                                                                                                           \
        sum_each(acc, sums, ROWS * OUTPUTS);                                                                        \
    }
TILE(1, 8)
TILE(2, 8)
TILE(4, 4)

#define BAND 8 /* outputs that a thread computes for all rows before it goes on */
#define MOST_INPUTS 32768

INLINE void store_tile(const float *sums, int rows, int width, const void *bias, void *out, int64_t first,
                       int64_t outputs, int kind) {
    for (int r = 0; r < rows; r++)
        for (int o = 0; o < width; o++) {
            float value = sums[r * width + o] + (bias ? load1(bias, first + o, kind) : 0.0f);
            store1(out, r * outputs + first + o, value, kind);
        }
}

/* `out` and `x` begin at the first of `rows`. */
INLINE void few_rows(const float *x, const void *weight, const void *bias, void *out, int64_t rows, int64_t inputs,
                     int64_t outputs, int64_t first, int kind) {
    const int64_t size = kind == BF16 ? 2 : 4;
    const char *next = (const char *)weight + BAND * inputs * size;
    float sums[2 * BAND];
    if (rows >= 2) {
        tile_2x8(x, weight, sums, inputs, kind, next, size, 0, 1);
        store_tile(sums, 2, BAND, bias, out, first, outputs, kind);
    }
    if (rows % 2) {
        tile_1x8(x + (rows - 1) * inputs, weight, sums, inputs, kind, next, size, 0, 1);
        void *last = (char *)out + (rows - 1) * outputs * size;
        store_tile(sums, 1, BAND, bias, last, first, outputs, kind);
    }
}

INLINE void band(const float *x, const char *weight, const void *bias, char *out, int64_t rows, int64_t inputs,
                 int64_t outputs, int64_t first, int kind) {
    const int64_t size = kind == BF16 ? 2 : 4, fours = rows / 4 * 4;
    for (int64_t o = 0; o < BAND && fours; o += 4) {
        const void *from = weight + o * inputs * size;
        const char *next = weight + (o + 4) * inputs * size;
        float wide[kind == BF16 && rows >= 8 ? 4 * inputs : 1] __attribute__((aligned(64)));
        int given = kind;
        if (kind == BF16 && rows >= 8) { /* widened once for all rows */
            for (int64_t i = 0; i < 4 * inputs; i += LANES) *(loose_vec *)(wide + i) = load(from, i, BF16);
            from = wide, given = 0;
        }
        for (int64_t r = 0; r < fours; r += 4) {
            float sums[16];
            if (given == BF16)
                tile_4x4(x + r * inputs, from, sums, inputs, BF16, next, size, r / 4, fours / 4);
            else
                tile_4x4(x + r * inputs, from, sums, inputs, 0, next, size, r / 4, fours / 4);
            store_tile(sums, 4, 4, bias, out + r * outputs * size, first + o, outputs, kind);
        }
    }
    few_rows(x + fours * inputs, weight, bias, out + fours * outputs * size, rows - fours, inputs, outputs, first, kind);
}

/* `x` float32 [rows, inputs]; `weight` [outputs, inputs], `bias` [outputs] or null, `out` [rows, outputs] of `kind`. */
void skinny_linear(const float *x, const void *weight, const void *bias, void *out, int64_t rows, int64_t inputs,
                   int64_t outputs, int64_t kind) {
#pragma omp parallel for schedule(static)
    for (int64_t first = 0; first < outputs; first += BAND) {
        if (kind == BF16)
            band(x, (const char *)weight + first * inputs * 2, bias, out, rows, inputs, outputs, first, BF16);
        else
            band(x, (const char *)weight + first * inputs * 4, bias, out, rows, inputs, outputs, first, 0);
    }
}

/* The same over weights as a GGUF file has them, in blocks of 32: Q4_1 (scale, least, 32 half bytes, the low ones first) or
 * Q8_0 (scale, 32 bytes). Each is widened to the very float32 that dequantising gives: scale * number is exact.
 */
#define Q4_1 2
#define Q8_0 3
#define MOST_QUANTISED_INPUTS 8192

typedef float wide_block __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t wide_integers __attribute__((vector_size(64)));
typedef uint8_t sixteen __attribute__((vector_size(16)));

/* By way of integers: compilers convert bytes to floats one at a time. */
#define TO_FLOAT(bytes) __builtin_convertvector(__builtin_convertvector(bytes, wide_integers), wide_block)

INLINE float half_float(const uint8_t *at) {
    _Float16 value;
    memcpy(&value, at, 2);
    return (float)value;
}

INLINE void widen(const uint8_t *from, float *to, int64_t blocks, int encoding) {
    for (int64_t b = 0; b < blocks; b++, to += 32) {
        const float scale = half_float(from);
        if (encoding == Q4_1) {
            const float least = half_float(from + 2);
            sixteen bytes;
            memcpy(&bytes, from + 4, 16);
            *(wide_block *)to = TO_FLOAT(bytes & 15) * scale + least;
            *(wide_block *)(to + 16) = TO_FLOAT(bytes >> 4) * scale + least;
            from += 20;
        } else {
            sixteen low, high; /* signed bytes, which compilers widen slowly: as unsigned ones, 128 greater */
            memcpy(&low, from + 2, 16);
            memcpy(&high, from + 18, 16);
            *(wide_block *)to = (TO_FLOAT(low ^ 128) - 128.0f) * scale;
            *(wide_block *)(to + 16) = (TO_FLOAT(high ^ 128) - 128.0f) * scale;
            from += 34;
        }
    }
}

/* `weight` uint8 [outputs, bytes of `inputs`]; all else float32, as above. */
void quantised_linear(const float *x, const uint8_t *weight, const void *bias, void *out, int64_t rows, int64_t inputs,
                      int64_t outputs, int64_t encoding) {
    const int64_t row_bytes = inputs / 32 * (encoding == Q4_1 ? 20 : 34);
#pragma omp parallel for schedule(static)
    for (int64_t first = 0; first < outputs; first += BAND) {
        float wide[BAND * inputs] __attribute__((aligned(64)));
        if (encoding == Q4_1)
            widen(weight + first * row_bytes, wide, BAND * inputs / 32, Q4_1);
        else
            widen(weight + first * row_bytes, wide, BAND * inputs / 32, Q8_0);
        band(x, (const char *)wide, bias, out, rows, inputs, outputs, first, 0);
    }
}

/* Adds `x`, if any, to `residual` in place; out = residual / rms(residual) * weight. All [rows, hidden]. */
INLINE void norm_row(const void *x, void *residual, const void *weight, void *out, int64_t hidden, float eps,
                     int kind) {
    double squares = 0;
    for (int64_t i = 0; i < hidden; i++) {
        float value = load1(residual, i, kind);
        if (x) {
            value = rounded(value + load1(x, i, kind), kind);
            store1(residual, i, value, kind);
        }
        squares += (double)value * value;
    }
    float scale = 1.0f / sqrtf((float)(squares / hidden) + eps);
    for (int64_t i = 0; i < hidden; i++)
        store1(out, i, rounded(load1(residual, i, kind) * scale, kind) * load1(weight, i, kind), kind);
}

void add_rms_norm(const char *x, char *residual, const void *weight, char *out, int64_t rows, int64_t hidden, double eps,
                  int64_t kind) {
    const int64_t stride = hidden * (kind == BF16 ? 2 : 4);
    for (int64_t r = 0; r < rows; r++) {
        const char *added = x ? x + r * stride : 0;
        if (kind == BF16)
            norm_row(added, residual + r * stride, weight, out + r * stride, hidden, (float)eps, BF16);
        else
            norm_row(added, residual + r * stride, weight, out + r * stride, hidden, (float)eps, 0);
    }
}

/* out[r, i] = silu(gate_up[r, i]) * gate_up[r, width + i]; `width` is a multiple of LANES. */
INLINE void swiglu_row(const void *gate_up, void *out, int64_t width, int kind) {
    for (int64_t i = 0; i < width; i += LANES) {
        vec gate = load(gate_up, i, kind), up = load(gate_up, width + i, kind);
        vec silu = gate / (1.0f + exponential(-gate));
        for (int lane = 0; lane < LANES; lane++)
            store1(out, i + lane, rounded(silu[lane], kind) * up[lane], kind);
    }
}

void swiglu(const char *gate_up, char *out, int64_t rows, int64_t width, int64_t kind) {
    const int64_t size = kind == BF16 ? 2 : 4;
#pragma omp parallel for schedule(static) if (rows >= 8)
    for (int64_t r = 0; r < rows; r++) {
        if (kind == BF16)
            swiglu_row(gate_up + r * 2 * width * size, out + r * width * size, width, BF16);
        else
            swiglu_row(gate_up + r * 2 * width * size, out + r * width * size, width, 0);
    }
}

/* Turns queries and keys of `qkv` [tokens, heads + 2 * kv_heads, head_dim] in place, and stores keys and values in the
 * pool, seen as rows of head_dim, at `rows` [tokens, 2 * kv_heads] + `shift`. `cos`, `sin` float32 [tokens, head_dim / 2].
 */
INLINE void rope_token(char *qkv, const float *cos, const float *sin, const int64_t *rows, char *pool, int64_t shift,
                       int64_t heads, int64_t kv_heads, int64_t head_dim, int kind) {
    const int64_t half = head_dim / 2, size = kind == BF16 ? 2 : 4;
    for (int64_t h = 0; h < heads + kv_heads; h++) {
        char *head = qkv + h * head_dim * size;
        for (int64_t i = 0; i < half; i++) {
            float first = load1(head, i, kind), second = load1(head, half + i, kind);
            store1(head, i, first * cos[i] - second * sin[i], kind);
            store1(head, half + i, second * cos[i] + first * sin[i], kind);
        }
    }
    for (int64_t j = 0; j < 2 * kv_heads; j++)
        memcpy(pool + (rows[j] + shift) * head_dim * size, qkv + (heads + j) * head_dim * size, head_dim * size);
}

void rope_and_store(char *qkv, const float *cos, const float *sin, const int64_t *rows, char *pool, int64_t shift,
                    int64_t tokens, int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t kind) {
    const int64_t stride = (heads + 2 * kv_heads) * head_dim * (kind == BF16 ? 2 : 4);
#pragma omp parallel for schedule(static) if (tokens >= 32)
    for (int64_t t = 0; t < tokens; t++) {
        const int64_t angle = t * (head_dim / 2), stored = t * 2 * kv_heads;
        if (kind == BF16)
            rope_token(qkv + t * stride, cos + angle, sin + angle, rows + stored, pool, shift, heads, kv_heads, head_dim,
                       BF16);
        else
            rope_token(qkv + t * stride, cos + angle, sin + angle, rows + stored, pool, shift, heads, kv_heads, head_dim,
                       0);
    }
}

/* One query head's attention to the tokens [first, context) of its request, block by block where they lie in the pool.
 *
 * `blocks` are the request's; a block's keys of this head and layer begin at block * block_stride + offset, in elements,
 * and its values block_tokens * head_dim behind them. The softmax is the online one: its greatest score is corrected
 * from block to block (Milakov and Gimelshein, 2018).
 */
#define MOST_LANES_OF_A_HEAD 256 /* head_dim at most */
#define BLOCK_AT_MOST 64

#define EACH_PIECE _Pragma("GCC unroll 8") for (int64_t p = 0; p < pieces; p++)

INLINE void attend(const void *query, const char *pool, const int32_t *blocks, void *out, int64_t first,
                   int64_t context, int64_t block_stride, int64_t offset, int64_t block_tokens, int64_t head_dim,
                   float scale, int kind) {
    const int64_t size = kind == BF16 ? 2 : 4, pieces = head_dim / LANES;
    vec q[MOST_LANES_OF_A_HEAD / LANES], acc[MOST_LANES_OF_A_HEAD / LANES];
    float scores[BLOCK_AT_MOST + 16] __attribute__((aligned(64)));
    float greatest = -INFINITY, total = 0;
    EACH_PIECE {
        q[p] = load(query, p * LANES, kind) * scale;
        acc[p] = (vec){};
    }
    for (int64_t b = first / block_tokens; b * block_tokens < context; b++) {
        const char *keys = pool + ((int64_t)blocks[b] * block_stride + offset) * size;
        const char *values = keys + block_tokens * head_dim * size;
        /* What comes next lies anywhere, where no hardware looks ahead. */
        const int64_t follower = (b + 1) * block_tokens < context ? blocks[b + 1] : blocks[b];
        const char *ahead = pool + (follower * block_stride + offset) * size;
        int64_t from = b * block_tokens < first ? first - b * block_tokens : 0;
        int64_t to = context - b * block_tokens < block_tokens ? context - b * block_tokens : block_tokens;
        float most = greatest;
        for (int64_t t0 = 0; t0 < to; t0 += 16) {
            vec products[16] = {};
            for (int64_t t = t0 < from ? from : t0; t < to && t < t0 + 16; t++)
                EACH_PIECE {
                    products[t - t0] += q[p] * load(keys, t * head_dim + p * LANES, kind);
                    __builtin_prefetch(ahead + (t * head_dim + p * LANES) * size);
                    __builtin_prefetch(ahead + ((block_tokens + t) * head_dim + p * LANES) * size);
                }
            sum_each(products, scores + t0, 16);
        }
        for (int64_t t = from; t < to; t++) most = scores[t] > most ? scores[t] : most;
        if (most == -INFINITY) most = 0; /* all of them -inf: the products overflowed, and the sum below says so */
        float correction = expf(greatest - most);
        greatest = most;
        total *= correction;
        EACH_PIECE acc[p] *= correction;
        for (int64_t t = from; t < to; t += LANES) {
            vec weights = exponential(load(scores, t, 0) - most);
            memcpy(scores + t, &weights, sizeof weights);
        }
        for (int64_t t = from; t < to; t++) {
            total += scores[t];
            EACH_PIECE acc[p] += scores[t] * load(values, t * head_dim + p * LANES, kind);
        }
    }
    EACH_PIECE {
        vec found = acc[p] / total;
        for (int lane = 0; lane < LANES; lane++) store1(out, p * LANES + lane, found[lane], kind);
    }
}

/* Of one token a request. `qkv` [requests, heads + 2 * kv_heads, head_dim]; `tables` [requests, width] block ids;
 * `firsts` and `contexts` [requests]; `layer_offset` in elements; `head_stride` between KV heads of a block.
 */
void decode_attention(const char *qkv, const char *pool, const int32_t *tables, const int32_t *firsts,
                      const int32_t *contexts, char *out, int64_t requests, int64_t width, int64_t heads,
                      int64_t kv_heads, int64_t head_dim, int64_t block_tokens, int64_t block_stride,
                      int64_t head_stride, int64_t layer_offset, double scale, int64_t kind) {
    const int64_t size = kind == BF16 ? 2 : 4, group = heads / kv_heads;
#pragma omp parallel for schedule(dynamic, 4) if (requests > 1 || contexts[0] >= 256)
    for (int64_t each = 0; each < requests * heads; each++) {
        const int64_t r = each / heads, h = each % heads;
        const char *query = qkv + (r * (heads + 2 * kv_heads) + h) * head_dim * size;
        char *to = out + (r * heads + h) * head_dim * size;
        const int64_t offset = h / group * head_stride + layer_offset;
        const int32_t *blocks = tables + r * width;
        /* Sizes that the compiler knows are sums that stay in registers. */
#define ATTEND(HEAD_DIM, KIND)                                                                                      \
    attend(query, pool, blocks, to, firsts[r], contexts[r], block_stride, offset, block_tokens, HEAD_DIM,           \
           (float)scale, KIND)
        if (kind == BF16 && head_dim == 64)
            ATTEND(64, BF16);
        else if (kind == BF16 && head_dim == 128)
            ATTEND(128, BF16);
        else if (kind == BF16)
            ATTEND(head_dim, BF16);
        else if (head_dim == 64)
            ATTEND(64, 0);
        else if (head_dim == 128)
            ATTEND(128, 0);
        else
            ATTEND(head_dim, 0);
    }
}
