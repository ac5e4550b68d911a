/* A whole pass of a small Llama-like model over few tokens, its weights in 4 or 8 bits.
 *
 * A draft model reads one token per pass, so it pays for bytes of weights and for the steps between products. Here the
 * weights are a third (4 bits) or a half (8 bits) of their bf16 size, and a pass is one call: threads meet at six
 * barriers a layer, nothing else stands between the products. What it computes is a guess, so activations are rounded
 * to 8 bits too; nothing that decides what is written runs here.
 *
 * A weight is low + step * code, with a step and a low for each group of 32 inputs of an output, in half precision.
 * Packed, 16 outputs go side by side, a lane of a register each:
 *
 *     codes of 32 inputs     4 bits: 4 x 64 bytes; line i, lane r: inputs 8i to 8i+3 in the low halves of its 4 bytes,
 *                            8i+4 to 8i+7 in the high halves.  8 bits: 8 x 64 bytes; line i, lane r: inputs 4i to 4i+3
 *     16 steps, 16 lows      2 x 32 bytes
 */
#include "tiles.h"

enum { GROUP = 32, LANES = 16, WIDE = 8, /* tokens that share a walk over the weights */ FETCH = 1280 };

typedef struct {
    const uint8_t *packed;
    const float *bias; /* [out] or null */
    long out, in, bits;
} matrix;

typedef struct {
    matrix qkv, o, gate_up, down; /* gate_up: 16 rows of gate, 16 of up, in turn */
    const float *norm_attention, *norm_mlp, *norm_q, *norm_k; /* the last two are null in most models */
    bf16 *k, *v;                                              /* [batch, kv_heads, capacity, dim] */
} layer;

typedef struct {
    const layer *layers;
    matrix head;
    const float *norm, *cos, *sin; /* cos, sin: [batch x tokens, dim] */
    const uint16_t *mask;          /* see `attention` */
    const long *slots;             /* [batch]: where a row's first token goes in k and v */
    float *x;                      /* [batch x tokens, hidden]: embeddings; overwritten */
    float *logits;                 /* [batch x tokens, head.out] */
    float *work;                   /* [batch x tokens x ((2 heads + 2 kv_heads) x dim + inner)] */
    long num_layers, hidden, inner, heads, kv_heads, dim, batch, tokens, kv_batch, kv_head, keys, open;
    float eps, scale;
} draft_pass;

/* Tokens rounded to 8 bits: value = step * code in groups of 32; `sums` has step * (sum of codes), for the lows. */
typedef struct {
    int8_t *codes; /* [tokens, in] */
    float *steps, *sums; /* [tokens, in / 32] */
} rounded;

static long bytes_of_block(long bits) { return GROUP * LANES * bits / 8 + 2 * LANES * 2; }

static void round_row(const float *x, long in, const rounded *to, long token) {
    for (long g = 0; g < in / GROUP; g++) {
        __m512 a = _mm512_loadu_ps(x + g * GROUP), b = _mm512_loadu_ps(x + g * GROUP + 16);
        float most = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(a), _mm512_abs_ps(b)));
        float step = most / 127.0f;
        __m512 inverse = _mm512_set1_ps(most > 0 ? 127.0f / most : 0.0f);
        __m512i c = _mm512_cvtps_epi32(_mm512_mul_ps(a, inverse)), d = _mm512_cvtps_epi32(_mm512_mul_ps(b, inverse));
        int8_t *codes = to->codes + token * in + g * GROUP;
        _mm_storeu_si128((__m128i *)codes, _mm512_cvtsepi32_epi8(c));
        _mm_storeu_si128((__m128i *)(codes + 16), _mm512_cvtsepi32_epi8(d));
        to->steps[token * (in / GROUP) + g] = step;
        to->sums[token * (in / GROUP) + g] = step * (float)_mm512_reduce_add_epi32(_mm512_add_epi32(c, d));
    }
}

/* 16 outputs of up to 8 tokens: sums[t] gains the products of the block's weights with token t. */
static inline __attribute__((always_inline)) void walk(const matrix *m, long block, const rounded *x, long first, int count,
                                                       int bits, __m512 *sums) {
    const long groups = m->in / GROUP, size = bytes_of_block(bits);
    const uint8_t *w = m->packed + block * groups * size;
    const __m512i half = _mm512_set1_epi8(15);
    for (long g = 0; g < groups; g++, w += size) {
        __m512i codes[8];
        for (int i = 0; i < size; i += 64) _mm_prefetch((const char *)w + FETCH + i, _MM_HINT_T0);
        if (bits == 4)
            for (int i = 0; i < 4; i++) {
                __m512i both = _mm512_loadu_si512(w + i * 64);
                codes[2 * i] = _mm512_and_si512(both, half);
                codes[2 * i + 1] = _mm512_and_si512(_mm512_srli_epi16(both, 4), half);
            }
        else
            for (int i = 0; i < 8; i++) codes[i] = _mm512_loadu_si512(w + i * 64);
        const __m256i *ends = (const __m256i *)(w + size - 64);
        __m512 step = _mm512_cvtph_ps(_mm256_loadu_si256(ends)), low = _mm512_cvtph_ps(_mm256_loadu_si256(ends + 1));
        for (int t = 0; t < count; t++) {
            const int32_t *four = (const int32_t *)(x->codes + (first + t) * m->in + g * GROUP);
            __m512i a = _mm512_setzero_si512(), b = a;
            for (int i = 0; i < 8; i += 2) {
                a = _mm512_dpbusd_epi32(a, codes[i], _mm512_set1_epi32(four[i]));
                b = _mm512_dpbusd_epi32(b, codes[i + 1], _mm512_set1_epi32(four[i + 1]));
            }
            long at = (first + t) * groups + g;
            __m512 dots = _mm512_cvtepi32_ps(_mm512_add_epi32(a, b));
            sums[t] = _mm512_fmadd_ps(_mm512_mul_ps(step, _mm512_set1_ps(x->steps[at])), dots, sums[t]);
            sums[t] = _mm512_fmadd_ps(low, _mm512_set1_ps(x->sums[at]), sums[t]);
        }
    }
}

static inline __attribute__((always_inline)) void outputs_of(const matrix *m, long block, const rounded *x, long first,
                                                             int count, __m512 *sums) {
    __m512 bias = m->bias ? _mm512_loadu_ps(m->bias + block * LANES) : _mm512_setzero_ps();
    for (int t = 0; t < count; t++) sums[t] = bias;
    if (m->bits == 4) walk(m, block, x, first, count, 4, sums);
    else walk(m, block, x, first, count, 8, sums);
}

/* 16 outputs of `count` tokens; the count is a constant in each copy, so that the sums stay in registers. */
static void multiply_few(const matrix *m, long block, const rounded *x, long first, long count, __m512 *sums) {
    switch (count) {
    case 1: outputs_of(m, block, x, first, 1, sums); break;
    case 2: outputs_of(m, block, x, first, 2, sums); break;
    case 3: outputs_of(m, block, x, first, 3, sums); break;
    case 4: outputs_of(m, block, x, first, 4, sums); break;
    default: /* 5 to 8: what is beyond the count is computed from the last token and not used */
        outputs_of(m, block, x, first, WIDE, sums);
    }
}

enum { STORE, ADD, GATE };

/* This thread's share of y = W x (or y += W x; or y = silu(gate) * up); y is [tokens, out]. */
static void product(const matrix *m, const rounded *x, float *y, long tokens, int how) {
    long threads = omp_get_num_threads(), me = omp_get_thread_num(), per = how == GATE ? 2 : 1;
    long units = m->out / LANES / per, width = m->out / per;
    for (long u = units * me / threads; u < units * (me + 1) / threads; u++)
        for (long first = 0; first < tokens; first += WIDE) {
            long count = tokens - first < WIDE ? tokens - first : WIDE;
            __m512 sums[WIDE], up[WIDE];
            multiply_few(m, u * per, x, first, count, sums);
            if (how == GATE) multiply_few(m, u * 2 + 1, x, first, count, up);
            for (long t = 0; t < count; t++) {
                float *to = y + (first + t) * width + u * LANES;
                if (how == ADD) sums[t] = _mm512_add_ps(sums[t], _mm512_loadu_ps(to));
                if (how == GATE) { /* silu(g) = g / (1 + e^-g); e^-g as a power of two of a number that is not positive */
                    __m512 size = _mm512_mul_ps(_mm512_abs_ps(sums[t]), _mm512_set1_ps(-1.44269504f));
                    __m512 e = power_of_two(size), one = _mm512_set1_ps(1.0f);
                    __mmask16 positive = _mm512_cmp_ps_mask(sums[t], _mm512_setzero_ps(), _CMP_GE_OQ);
                    __m512 share = _mm512_div_ps(_mm512_mask_blend_ps(positive, e, one), _mm512_add_ps(one, e));
                    sums[t] = _mm512_mul_ps(_mm512_mul_ps(sums[t], share), up[t]);
                }
                _mm512_storeu_ps(to, sums[t]);
            }
        }
}

/* x / rms(x) * weight, for one row. */
static void normed(const float *x, const float *weight, float *y, long size, float eps) {
    __m512 squares = _mm512_setzero_ps();
    for (long i = 0; i < size; i += 16) {
        __m512 a = _mm512_loadu_ps(x + i);
        squares = _mm512_fmadd_ps(a, a, squares);
    }
    __m512 times = _mm512_set1_ps(1.0f / sqrtf(_mm512_reduce_add_ps(squares) / (float)size + eps));
    for (long i = 0; i < size; i += 16)
        _mm512_storeu_ps(y + i, _mm512_mul_ps(_mm512_mul_ps(_mm512_loadu_ps(x + i), times), _mm512_loadu_ps(weight + i)));
}

/* Turns one head by its position and stores it in bf16; a number that is not finite becomes 0, as in the cache. */
static void turned_head(const float *x, const float *norm, float eps, const float *cos, const float *sin, long dim, bf16 *y) {
    float own[DIM_MOST];
    if (norm) {
        normed(x, norm, own, dim, eps);
        x = own;
    }
    for (long i = 0; i < dim; i += 16) {
        __m512 a = _mm512_loadu_ps(x + i);
        if (cos) {
            __m512 b = i < dim / 2 ? _mm512_sub_ps(_mm512_setzero_ps(), _mm512_loadu_ps(x + i + dim / 2))
                                   : _mm512_loadu_ps(x + i - dim / 2);
            a = _mm512_fmadd_ps(a, _mm512_loadu_ps(cos + i), _mm512_mul_ps(b, _mm512_loadu_ps(sin + i)));
        }
        __mmask16 finite = _mm512_cmp_ps_mask(_mm512_abs_ps(a), _mm512_set1_ps(3e38f), _CMP_LE_OQ);
        __m256bh half = _mm512_cvtneps_pbh(_mm512_maskz_mov_ps(finite, a));
        memcpy(y + i, &half, 32);
    }
}

/* Every thread runs this; returns 0, or 1 when there is no memory. */
static int read_tokens(const draft_pass *t) {
    const long count = t->batch * t->tokens, group = t->heads / t->kv_heads, dim = t->dim;
    const long heads_all = t->heads + 2 * t->kv_heads, longest = t->inner > t->hidden ? t->inner : t->hidden;
    const long widest = longest > t->heads * dim ? longest : t->heads * dim;
    float *qkv = t->work, *inner = qkv + count * heads_all * dim;
    bf16 *q = (bf16 *)(inner + count * t->inner), *y = q + count * t->heads * dim;
    /* Attention's items are a K/V head each, or parts of one where threads would stand idle. */
    long threads = omp_get_num_threads(), me = omp_get_thread_num(), rows = group * t->tokens, items = t->batch * t->kv_heads;
    long parts = (threads + items - 1) / items, size = ((rows + parts - 1) / parts + 15) / 16 * 16;
    if (size > ROWS_MOST) size = ROWS_MOST;
    parts = (rows + size - 1) / size;
    /* Eight tokens are always read as such, so what lies behind the last one must be there. */
    long padded = (count + WIDE - 1) / WIDE * WIDE;
    long attend_bytes = attention_bytes(size, dim), code_bytes = (padded * widest + 63) / 64 * 64;
    char *memory = scratch(attend_bytes + code_bytes + padded * (widest / GROUP) * 8 + widest * 4 + 64);
    int failed = !memory;
    rounded x = {0};
    float *row = 0;
    if (memory) {
        x.codes = (int8_t *)(memory + attend_bytes);
        x.steps = (float *)(memory + attend_bytes + code_bytes);
        x.sums = x.steps + padded * (widest / GROUP);
        row = x.sums + padded * (widest / GROUP);
        memset(memory + attend_bytes, 0, code_bytes + padded * (widest / GROUP) * 8);
    }
    static int any_failed;
#pragma omp single
    any_failed = 0;
    if (failed) any_failed = 1;
#pragma omp barrier
    if (any_failed) return 1;
    for (long l = 0; l < t->num_layers; l++) {
        const layer *at = t->layers + l;
        /* Each thread norms and rounds for itself: cheaper than to wait for another. */
        for (long i = 0; i < count; i++) normed(t->x + i * t->hidden, at->norm_attention, row, t->hidden, t->eps), round_row(row, t->hidden, &x, i);
        product(&at->qkv, &x, qkv, count, STORE);
#pragma omp barrier
        for (long i = me; i < count * heads_all; i += threads) {
            long n = i / heads_all, head = i % heads_all, b = n / t->tokens, token = n % t->tokens;
            const float *from = qkv + i * dim, *cos = t->cos + n * dim, *sin = t->sin + n * dim;
            long slot = b * t->kv_batch + (t->slots[b] + token) * dim;
            if (head < t->heads) turned_head(from, at->norm_q, t->eps, cos, sin, dim, q + ((b * t->heads + head) * t->tokens + token) * dim);
            else if (head < t->heads + t->kv_heads) turned_head(from, at->norm_k, t->eps, cos, sin, dim, at->k + slot + (head - t->heads) * t->kv_head);
            else turned_head(from, 0, 0, 0, 0, dim, at->v + slot + (head - t->heads - t->kv_heads) * t->kv_head);
        }
#pragma omp barrier
        attention a = {q, at->k, at->v, t->mask, y, t->heads * t->tokens * dim, t->tokens * dim, dim, t->kv_batch, t->kv_head,
                       t->batch, t->kv_heads, group, t->tokens, dim, t->keys, t->open, 0, 0, 0, 0, t->scale};
        for (long i = me; i < items * parts; i += threads) {
            long first = i % parts * size, last = first + size < rows ? first + size : rows, head = i / parts;
            paceline_attend(&a, head / t->kv_heads, head % t->kv_heads, first, last, memory);
        }
#pragma omp barrier
        for (long i = 0; i < count; i++) {
            for (long d = 0; d < t->heads * dim; d += 16) {
                __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)(y + i * t->heads * dim + d)));
                _mm512_storeu_si512(row + d, _mm512_slli_epi32(wide, 16));
            }
            round_row(row, t->heads * dim, &x, i);
        }
        product(&at->o, &x, t->x, count, ADD);
#pragma omp barrier
        for (long i = 0; i < count; i++) normed(t->x + i * t->hidden, at->norm_mlp, row, t->hidden, t->eps), round_row(row, t->hidden, &x, i);
        product(&at->gate_up, &x, inner, count, GATE);
#pragma omp barrier
        for (long i = 0; i < count; i++) round_row(inner + i * t->inner, t->inner, &x, i);
        product(&at->down, &x, t->x, count, ADD);
#pragma omp barrier
    }
    for (long i = 0; i < count; i++) normed(t->x + i * t->hidden, t->norm, row, t->hidden, t->eps), round_row(row, t->hidden, &x, i);
    product(&t->head, &x, t->logits, count, STORE);
    return 0;
}

/* Reads batch x tokens tokens: stages their K/V and gives logits. Returns 0, or -1 when there is no memory. */
int paceline_draft(const draft_pass *t) {
    int failed = 0;
#pragma omp parallel reduction(| : failed)
    {
        thread_state before;
        enter(&before);
        failed = read_tokens(t);
        leave(&before);
    }
    return failed ? -1 : 0;
}

/* The code of each number nearest to low + step * code. */
static inline __m512 nearest(__m512 x, __m512 low, __m512 inverse, __m512 top) {
    __m512 place = _mm512_roundscale_ps(_mm512_mul_ps(_mm512_sub_ps(x, low), inverse), 0);
    return _mm512_min_ps(_mm512_max_ps(place, _mm512_setzero_ps()), top);
}

/* Packs w [out, in] (bf16; out a multiple of 16, in of 32). With 4 bits the step that fits best is tried for: weights that
 * were 4 bits wide once, with fewer than 16 steps between the ends of a group, come back as they were.
 * Returns the number of groups with a weight that is not finite or beyond half precision: then nothing is to be used. */
long paceline_draft_pack(const bf16 *w, uint8_t *packed, long out, long in, long bits) {
    const long groups = in / GROUP, size = bytes_of_block(bits);
    const int top = (1 << bits) - 1;
    long bad = 0;
#pragma omp parallel for reduction(+ : bad) schedule(static)
    for (long block = 0; block < out / LANES; block++)
        for (long g = 0; g < groups; g++) {
            uint8_t *to = packed + (block * groups + g) * size;
            uint16_t *steps = (uint16_t *)(to + size - 64), *lows = steps + LANES;
            memset(to, 0, size);
            for (long r = 0; r < LANES; r++) {
                const bf16 *from = w + (block * LANES + r) * in + g * GROUP;
                __m512 x[2];
                for (int i = 0; i < 2; i++)
                    x[i] = (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)(from + i * 16))), 16);
                float low = _mm512_reduce_min_ps(_mm512_min_ps(x[0], x[1])), high = _mm512_reduce_max_ps(_mm512_max_ps(x[0], x[1]));
                __m512 largest = _mm512_set1_ps(60000.0f);
                bad += (_mm512_cmp_ps_mask(_mm512_abs_ps(x[0]), largest, _CMP_LE_OQ) &
                        _mm512_cmp_ps_mask(_mm512_abs_ps(x[1]), largest, _CMP_LE_OQ)) != 0xffff;
                lows[r] = _cvtss_sh(low, 0);
                __m512 start = _mm512_set1_ps(_cvtsh_ss(lows[r])), most = _mm512_set1_ps((float)top);
                float least = INFINITY, range = high - _cvtsh_ss(lows[r]);
                for (int levels = top; levels >= (bits == 4 ? 9 : top); levels--) {
                    uint16_t half = _cvtss_sh(range / (float)levels, 0);
                    float step = _cvtsh_ss(half);
                    __m512 inverse = _mm512_set1_ps(step > 0 ? 1 / step : 0), squares = _mm512_setzero_ps();
                    for (int i = 0; i < 2; i++) {
                        __m512 back = _mm512_fmadd_ps(nearest(x[i], start, inverse, most), _mm512_set1_ps(step), start);
                        __m512 off = _mm512_sub_ps(x[i], back);
                        squares = _mm512_fmadd_ps(off, off, squares);
                    }
                    float error = _mm512_reduce_add_ps(squares);
                    if (error < least) least = error, steps[r] = half;
                }
                float step = _cvtsh_ss(steps[r]);
                uint8_t codes[GROUP];
                for (int i = 0; i < 2; i++) {
                    __m512 code = nearest(x[i], start, _mm512_set1_ps(step > 0 ? 1 / step : 0), most);
                    _mm_storeu_si128((__m128i *)(codes + i * 16), _mm512_cvtusepi32_epi8(_mm512_cvtps_epu32(code)));
                }
                for (int i = 0; i < GROUP; i++)
                    if (bits == 4) to[i / 8 * 64 + r * 4 + i % 4] |= (uint8_t)(i % 8 < 4 ? codes[i] : codes[i] << 4);
                    else to[i / 4 * 64 + r * 4 + i % 4] = codes[i];
            }
        }
    return bad;
}
