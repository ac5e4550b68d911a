/* The two products of a pass in bf16, on the matrix tiles of x86 (AMX): linear layers and attention.
 *
 * The framework's products leave much of the memory bandwidth unused where rows are few (1 to some tens); here many
 * rows (reading a prompt) are welcome, too. Both form a row's sums in the same order however many rows there are: a
 * row's result has the same bits at any width.
 */
#include "tiles.h"

enum {
    AHEAD = 3,   /* tiles of W to prefetch: 2 to 4 are best when two tiles of columns compete for the first cache */
    CHUNK = 256, /* rows of x packed at once */
    PART = 1024, /* packed tiles that a block of W meets at a time: half of a second cache of 2 MiB */
};

/* -- shared ---------------------------------------------------------------------------------------------------- */

/* Ask the kernel for the tile registers; 0 when granted. */
int paceline_tiles_init(void) { return (int)syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XTILEDATA */); }

/* 16 x 16 words of 32 bits, in place. */
static inline __attribute__((always_inline)) void transpose(__m512i r[16]) {
    __m512i t[16];
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 4; i++) {
        r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
        r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
    }
}

/* -- linear layers ---------------------------------------------------------------------------------------------
 *
 * y = x W' + bias. W is [out, in] as it lies in memory, walked in blocks of 32 rows. The rows of x become the columns
 * of the other operand, 16 to a tile, packed at most 256 at a time.
 *
 *           in, in one or more parts
 *          |------- part -------|                  pair 0     pair 1   ...
 *   W  b   [ A0  .   .   .   .  ]   x', packed:    .          .
 *          [ A1  .   .   .   .  ]                  .          .
 *      b+1 [ next               ]                  .          .
 *          [                    ]                  C0 C1      C0 C1      fp32, in tile registers until the part is done
 *                                                  C2 C3      C2 C3
 *
 * A block of W comes from memory once and meets every pair. What is used again should be found in the second cache:
 * the packed rows of a part, for every block, and the block, for every pair. Few rows have one part. With more, the
 * sums of a part wait in memory as they are, fp32, and are taken up again, so a row's sums are formed in the order of
 * k whatever the parts.
 *
 * Up to 64 rows the pass goes at the speed of memory: W is fetched just ahead of its use, by the first pair. With
 * more, the products take longer than the fetching, and each of n pairs fetches 1/n of the next block meanwhile.
 *
 * Every thread has a share of the blocks and, that done, takes what is left of the others' shares: on a machine that
 * is shared with others, one core may be four times as fast as the next.
 */

/* A chunk of x with all that it meets. */
typedef struct {
    const bf16 *w, *bias, *packed;
    bf16 *y;
    float *waiting; /* [block][pair][4][256] sums of the parts so far; null when there is one part */
    long out, in, rows, tiles, pairs;
} product;

/* What to fetch meanwhile: of 4 x `fours` rows, the tile `ahead` steps on; past the end of `here` that is in `next`. */
typedef struct {
    const char *here, *next;
    long fours, ahead;
} plan;

static long least(long a, long b) { return a < b ? a : b; }

/* Rows of x as columns: in tile t of step k, line j holds the inputs k*32 + 2j and 2j+1 of rows 16t to 16t+15.
 * Tiles go in pairs, a pair's steps together: [part][pair][k][2]; a last odd tile stands alone. */
static void pack(const bf16 *x, bf16 *packed, long in, long rows, long part) {
    long tiles = (rows + 15) / 16, depth = in / 32;
#pragma omp for schedule(static)
    for (long k = 0; k < depth; k++) {
        long begin = k / part * part, steps = least(part, depth - begin);
        for (long t = 0; t < tiles; t++) {
            long pair = t / 2, wide = pair * 2 + 1 < tiles ? 2 : 1;
            bf16 *tile = packed + (begin * tiles + pair * 2 * steps + (k - begin) * wide + t % 2) * TILE;
            __m512i r[16];
            for (long c = 0; c < 16; c++)
                r[c] = t * 16 + c < rows ? _mm512_loadu_si512(x + (t * 16 + c) * in + k * 32) : _mm512_setzero_si512();
            transpose(r);
            for (int j = 0; j < 16; j++) _mm512_store_si512(tile + j * 32, r[j]);
        }
    }
}

/* Finished sums of 16 columns, in tiles `low` and `high` of 16 outputs each, to bf16 rows of y. */
static void put(const float *low, const float *high, const float *bias, bf16 *y, long out, long rows, __mmask32 mask) {
    const __m512i alternate = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,
                                               23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    __m512i r[16]; /* word c of r[i]: outputs 2i and 2i+1 of column c */
    for (int i = 0; i < 16; i++) {
        const float *sums = i < 8 ? low + i * 32 : high + (i - 8) * 32;
        __m512 even = _mm512_add_ps(_mm512_load_ps(sums), _mm512_set1_ps(bias[2 * i]));
        __m512 odd = _mm512_add_ps(_mm512_load_ps(sums + 16), _mm512_set1_ps(bias[2 * i + 1]));
        r[i] = _mm512_permutexvar_epi16(alternate, (__m512i)_mm512_cvtne2ps_pbh(odd, even));
    }
    transpose(r);
    for (long c = 0; c < 16 && c < rows; c++) _mm512_mask_storeu_epi16(y + c * out, mask, r[c]);
}

/* Sums of 16 or 32 outputs x 16 or 32 columns over some steps of k; with `resume`, on top of those in `sums`. */
static inline __attribute__((always_inline)) void multiply(const char *a, long stride, const bf16 *b, long steps,
                                                           float *sums, int resume, plan fetch, int high, int wide) {
    if (resume) {
        _tile_loadd(0, sums, 64); _tile_loadd(1, sums + 256, 64);
        _tile_loadd(2, sums + 512, 64); _tile_loadd(3, sums + 768, 64);
    } else {
        _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    }
    for (long k = 0; k < steps; k++, b += wide * TILE) {
        long soon = k + fetch.ahead;
        const char *line = soon < steps ? fetch.here + soon * 64 : fetch.next + (soon - steps) * 64;
        for (long i = 0; i < fetch.fours; i++, line += 4 * stride)
            for (int j = 0; j < 4; j++) _mm_prefetch(line + j * stride, _MM_HINT_T0);
        _tile_loadd(6, b, 64);
        if (wide == 2) _tile_loadd(7, b + TILE, 64);
        _tile_loadd(4, a + k * 64, stride);
        if (high == 2) _tile_loadd(5, a + 16 * stride + k * 64, stride);
        _tile_dpbf16ps(0, 4, 6);
        if (wide == 2) _tile_dpbf16ps(1, 4, 7);
        if (high == 2) _tile_dpbf16ps(2, 5, 6);
        if (high == 2 && wide == 2) _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, 64); _tile_stored(1, sums + 256, 64);
    _tile_stored(2, sums + 512, 64); _tile_stored(3, sums + 768, 64);
}

/* 16 or 32 outputs of every packed row over one part, which begins at step `begin` of k. A `cold` block is one that
 * nothing was fetched of. */
static void outputs(const product *t, long number, long begin, long steps, int cold) {
    float own[4 * 256] __attribute__((aligned(64))), bias[32] = {0};
    long first = number * 32, stride = t->in * 2;
    int high = first + 32 <= t->out ? 2 : 1, finished = begin + steps == t->in / 32;
    for (int i = 0; t->bias && i < high * 16; i++) {
        uint32_t bits = (uint32_t)t->bias[first + i] << 16;
        memcpy(bias + i, &bits, 4);
    }
    const char *here = (const char *)(t->w + first * t->in + begin * 32), *next = here + 32 * stride;
    for (long p = 0; p < t->pairs; p++) {
        int wide = 2 * p + 1 < t->tiles ? 2 : 1;
        const bf16 *b = t->packed + (begin * t->tiles + p * 2 * steps) * TILE;
        float *sums = t->waiting ? t->waiting + (number * t->pairs + p) * 4 * 256 : own;
        long from = 8 * p / t->pairs, to = 8 * (p + 1) / t->pairs;
        plan fetch = {here, next + from * 4 * stride, to - from, steps};
        if (t->pairs <= 2 || (cold && p == 0)) fetch = (plan){here, next, p == 0 ? high * 4 : 0, AHEAD};
        if (high == 2 && wide == 2) multiply(here, stride, b, steps, sums, begin > 0, fetch, 2, 2);
        else if (high == 2) multiply(here, stride, b, steps, sums, begin > 0, fetch, 2, 1);
        else if (wide == 2) multiply(here, stride, b, steps, sums, begin > 0, fetch, 1, 2);
        else multiply(here, stride, b, steps, sums, begin > 0, fetch, 1, 1);
        for (int c = 0; finished && c < wide; c++) {
            long column = (2 * p + c) * 16;
            put(sums + c * 256, sums + (2 + c) * 256, bias, t->y + column * t->out + first, t->out, t->rows - column,
                high == 2 ? 0xffffffff : 0xffff);
        }
    }
}

/* w [out, in], x [rows, in], y [rows, out], bias [out] or null; out a multiple of 16, in of 32.
 * Returns 0, or -1 when there is no memory for the packed rows. */
int paceline_linear(const bf16 *w, const bf16 *bias, const bf16 *x, bf16 *y, long out, long in, long rows) {
    if (!rows) return 0;
    long chunks = (rows + CHUNK - 1) / CHUNK, chunk = (rows + 32 * chunks - 1) / (32 * chunks) * 32; /* even chunks */
    long tiles = (least(chunk, rows) + 15) / 16, pairs = (tiles + 1) / 2, blocks = (out + 31) / 32, depth = in / 32;
    long parts = (depth * tiles + PART - 1) / PART, part = (depth + parts - 1) / parts; /* even parts, too */
    long packed = depth * tiles * TILE, waiting = parts > 1 ? blocks * pairs * 4 * 256 : 0;
    long counters = chunks * parts * omp_get_max_threads();
    bf16 *shared = scratch(packed * (long)sizeof(bf16) + waiting * (long)sizeof(float) + counters * (long)sizeof(long));
    if (!shared) return -1;
    float *sums = waiting ? (float *)(shared + packed) : NULL;
    long *counts = memset((float *)(shared + packed) + waiting, 0, counters * sizeof(long));
#pragma omp parallel
    {
        thread_state before;
        enter(&before);
        long threads = omp_get_num_threads(), me = omp_get_thread_num();
        long *taken = counts; /* blocks of each thread's share, in this round */
        for (long begin = 0; begin < rows; begin += chunk) {
            long count = least(chunk, rows - begin), tiles = (count + 15) / 16;
            product t = {w, bias, shared, y + begin * out, sums, out, in, count, tiles, (tiles + 1) / 2};
            if (begin) {
#pragma omp barrier
            }
            pack(x + begin * in, shared, in, count, part);
            for (long k = 0; k < depth; k += part, taken += threads) {
                if (k) {
#pragma omp barrier
                }
                for (long i = 0; i < threads; i++) {
                    long whose = (me + i) % threads;
                    long first = blocks * whose / threads, end = blocks * (whose + 1) / threads;
                    for (int cold = 1;; cold = 0) {
                        long b = first + __atomic_fetch_add(taken + whose, 1, __ATOMIC_RELAXED);
                        if (b >= end) break;
                        outputs(&t, b, k, least(part, depth - k), cold);
                    }
                }
            }
        }
        leave(&before);
    }
    return 0;
}

/* -- attention -------------------------------------------------------------------------------------------------
 *
 * The query rows of one K/V head (its group of heads x the tokens of the pass) share every key that is read. Keys come
 * in blocks of 64, which stay in the first cache while all rows look at them; with the rows as columns, 16 to a tile, a row's maximum and sum are one lane of a register:
 *
 *      S' = K Q'   [64 keys, 16 rows]       A = K as it lies in memory         B = Q', packed once
 *      P' = 2^(S' - max)                    a masked key is an exact zero, a masked block an exact no-op
 *      O' += V' P' [head_dim, 16 rows]      A = V', turned once per block      B = P'
 */

/* Two lines of bf16 as words (a, b): word j holds a[j] and b[j]. */
static inline void interleave(__m512i a, __m512i b, __m512i *low, __m512i *high) {
    __m512i lo = _mm512_unpacklo_epi16(a, b), hi = _mm512_unpackhi_epi16(a, b);
    *low = _mm512_permutex2var_epi64(lo, _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0), hi);
    *high = _mm512_permutex2var_epi64(lo, _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4), hi);
}

/* V' of a block: tile (d, s) holds dims 16d.. as lines and keys 32s.. as columns. */
static void turn_values(const bf16 *v, bf16 *turned, long dim) {
    for (long s = 0; s < KEYS / 32; s++)
        for (long d = 0; d < dim; d += 32) {
            __m512i low[16], high[16];
            for (int j = 0; j < 16; j++) {
                const bf16 *row = v + (s * 32 + 2 * j) * dim + d;
                _mm_prefetch(row + KEYS * dim, _MM_HINT_T1); /* the next block's, while this one is worked on */
                _mm_prefetch(row + (KEYS + 1) * dim, _MM_HINT_T1);
                interleave(_mm512_loadu_si512(row), _mm512_loadu_si512(row + dim), &low[j], &high[j]);
            }
            transpose(low);
            transpose(high);
            bf16 *tile = turned + (d / 16 * (KEYS / 32) + s) * TILE;
            for (int j = 0; j < 16; j++) {
                _mm512_store_si512(tile + j * 32, low[j]);
                _mm512_store_si512(tile + KEYS / 32 * TILE + j * 32, high[j]);
            }
        }
}

/* S' of a block for one or two tiles of rows; the first call of a block also fetches the next block's keys. */
static inline __attribute__((always_inline)) void scores(const bf16 *k, const bf16 *q, long dim, float *s, int wide,
                                                         int fetch_next) {
    const bf16 *q1 = q + 16 * dim;
    float *s1 = s + KEYS * 16;
    for (long i = 0; i < KEYS; i += 32) {
        const bf16 *a = k + i * dim;
        _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
        for (long d = 0; d < dim; d += 32) {
            if (fetch_next)
                for (int r = 0; r < 32; r++) _mm_prefetch(a + (KEYS + r) * dim + d, _MM_HINT_T1);
            _tile_loadd(4, a + d, dim * 2);
            _tile_loadd(5, a + 16 * dim + d, dim * 2);
            _tile_loadd(6, q + d / 32 * TILE, 64);
            if (wide == 2) _tile_loadd(7, q1 + d / 32 * TILE, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(2, 5, 6);
            if (wide == 2) _tile_dpbf16ps(1, 4, 7);
            if (wide == 2) _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, s + i * 16, 64);
        _tile_stored(2, s + (i + 16) * 16, 64);
        if (wide == 2) _tile_stored(1, s1 + i * 16, 64);
        if (wide == 2) _tile_stored(3, s1 + (i + 16) * 16, 64);
    }
}

/* Scores to weights P' = 2^(scale * score - max), packed in pairs of keys; updates the rows' maximum and sum and tells
 * how O' must be rescaled. Returns 0 when no row sees any key of the block. */
static int weigh(const float *s, const uint16_t *mask, float scale, bf16 *p, __m512 *most, __m512 *sum, __m512 *rescale) {
    const __m512 none = _mm512_set1_ps(-INFINITY), times = _mm512_set1_ps(scale);
    __m512 top = none, total = _mm512_setzero_ps();
    uint16_t any = mask ? 0 : 0xffff;
    if (mask)
        for (int i = 0; i < KEYS; i++) {
            any |= mask[i];
            top = _mm512_mask_max_ps(top, mask[i], top, _mm512_load_ps(s + i * 16));
        }
    else
        for (int i = 0; i < KEYS; i++) top = _mm512_max_ps(top, _mm512_load_ps(s + i * 16));
    if (!any) return 0;
    top = _mm512_max_ps(*most, _mm512_mul_ps(top, times));
    /* A row that has seen nothing yet has maximum -inf; its differences would be NaN and are masked away. */
    __mmask16 started = _mm512_cmp_ps_mask(top, none, _CMP_NEQ_OQ);
    *rescale = _mm512_maskz_mov_ps(started, power_of_two(_mm512_sub_ps(*most, top)));
    *most = top;
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    for (int i = 0; i < KEYS; i += 2) {
        __m512 w[2];
        for (int j = 0; j < 2; j++) {
            __mmask16 seen = mask ? mask[i + j] & started : started;
            w[j] = _mm512_maskz_mov_ps(seen, power_of_two(_mm512_fmsub_ps(_mm512_load_ps(s + (i + j) * 16), times, top)));
            total = _mm512_add_ps(total, w[j]);
        }
        __m512i both = (__m512i)_mm512_cvtne2ps_pbh(w[1], w[0]);
        _mm512_store_si512(p + i * 16, _mm512_permutexvar_epi16(order, both));
    }
    *sum = _mm512_fmadd_ps(*sum, *rescale, total);
    return 1;
}

/* O' += V' P' for one or two tiles of rows. */
static inline __attribute__((always_inline)) void gather(const bf16 *turned, const bf16 *p, long dim, float *o, int wide) {
    const bf16 *p1 = p + KEYS * 16;
    float *o1 = o + 16 * dim;
    for (long d = 0; d < dim; d += 32) {
        const bf16 *a = turned + d / 16 * (KEYS / 32) * TILE;
        _tile_loadd(0, o + d * 16, 64);
        _tile_loadd(2, o + (d + 16) * 16, 64);
        if (wide == 2) _tile_loadd(1, o1 + d * 16, 64);
        if (wide == 2) _tile_loadd(3, o1 + (d + 16) * 16, 64);
        for (int s = 0; s < KEYS / 32; s++) {
            _tile_loadd(4, a + s * TILE, 64);
            _tile_loadd(5, a + (KEYS / 32 + s) * TILE, 64);
            _tile_loadd(6, p + s * TILE, 64);
            if (wide == 2) _tile_loadd(7, p1 + s * TILE, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(2, 5, 6);
            if (wide == 2) _tile_dpbf16ps(1, 4, 7);
            if (wide == 2) _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, o + d * 16, 64);
        _tile_stored(2, o + (d + 16) * 16, 64);
        if (wide == 2) _tile_stored(1, o1 + d * 16, 64);
        if (wide == 2) _tile_stored(3, o1 + (d + 16) * 16, 64);
    }
}

/* O' *= rescale, where a maximum has changed. */
static void dampen(float *o, long dim, __m512 rescale) {
    if (_mm512_cmp_ps_mask(rescale, _mm512_set1_ps(1.0f), _CMP_NEQ_UQ))
        for (long i = 0; i < dim; i++) _mm512_store_ps(o + i * 16, _mm512_mul_ps(_mm512_load_ps(o + i * 16), rescale));
}

/* One block of keys for one or two tiles of rows: scores, weights, sums. A null mask shows every key to every row. */
static void meet(const attention *t, const bf16 *k, const bf16 *turned, const bf16 *q, const uint16_t *const mask[2],
                 int wide, int fetch_next, float *s, bf16 *p, float *o, float *most, float *sum) {
    int seen = 0;
    if (wide == 2) scores(k, q, t->dim, s, 2, fetch_next);
    else scores(k, q, t->dim, s, 1, fetch_next);
    for (int j = 0; j < wide; j++) {
        __m512 top = _mm512_load_ps(most + j * 16), total = _mm512_load_ps(sum + j * 16), rescale;
        if (weigh(s + j * KEYS * 16, mask[j], t->scale, p + j * KEYS * 16, &top, &total, &rescale)) {
            _mm512_store_ps(most + j * 16, top);
            _mm512_store_ps(sum + j * 16, total);
            dampen(o + j * 16 * t->dim, t->dim, rescale);
            seen = 1;
        } else
            memset(p + j * KEYS * 16, 0, KEYS * 16 * sizeof(bf16)); /* adds exact zeros */
    }
    if (seen && wide == 2) gather(turned, p, t->dim, o, 2);
    else if (seen) gather(turned, p, t->dim, o, 1);
}

/* Rows first to last of one K/V head; a row is (token, member of the group), members fastest. */
void paceline_attend(const attention *t, long b, long head, long first, long last, char *memory) {
    long dim = t->dim, tiles = (last - first + 15) / 16;
    long masked = t->keys - t->open, row_tiles = (t->group * t->tokens + 15) / 16;
    bf16 *q = (bf16 *)memory, *turned = q + tiles * 16 * dim, *p = turned + KEYS * dim, *own = p + 2 * KEYS * 16;
    float *s = (float *)(own + 2 * KEYS * dim), *o = s + 2 * KEYS * 16, *most = o + tiles * 16 * dim, *sum = most + tiles * 16;
    const bf16 *k = t->k + b * t->kv_batch + head * t->kv_head, *v = t->v + b * t->kv_batch + head * t->kv_head;
    const uint16_t *mask = t->mask + (b * row_tiles + first / 16) * masked;
    memset(o, 0, tiles * 16 * dim * sizeof(float));
    for (long i = 0; i < tiles * 16; i++) most[i] = -INFINITY, sum[i] = 0;
    for (long i = 0; i < tiles; i++)
        for (long d = 0; d < dim; d += 32) {
            __m512i r[16];
            for (long c = 0; c < 16; c++) {
                long row = first + i * 16 + c, token = row / t->group, member = row % t->group;
                const bf16 *from = t->q + b * t->q_batch + (head * t->group + member) * t->q_head + token * t->q_token;
                r[c] = row < last ? _mm512_loadu_si512(from + d) : _mm512_setzero_si512();
            }
            transpose(r);
            for (int j = 0; j < 16; j++) _mm512_store_si512(q + i * 16 * dim + d / 32 * TILE + j * 32, r[j]);
        }
    for (long key = 0; key < t->keys; key += KEYS) {
        turn_values(v + key * dim, turned, dim);
        for (long i = 0; i < tiles; i += 2) {
            int wide = i + 1 < tiles ? 2 : 1;
            /* Blocks that straddle `open` get a mask of their own: ones up to it, then the given bits. */
            uint16_t mixed[2][KEYS];
            const uint16_t *bits[2] = {0};
            for (int j = 0; j < wide; j++) {
                if (key + KEYS <= t->open) continue;
                bits[j] = mask + (i + j) * masked + (key - t->open);
                if (key >= t->open) continue;
                for (long n = 0; n < KEYS; n++) mixed[j][n] = key + n < t->open ? 0xffff : bits[j][n];
                bits[j] = mixed[j];
            }
            meet(t, k + key * dim, turned, q + i * 16 * dim, bits, wide, i == 0, s, p, o + i * 16 * dim, most + i * 16, sum + i * 16);
        }
    }
    for (long n = t->strays ? t->strays[b] : 0; t->strays && n < t->strays[b + 1]; n++) {
        long from = t->tokens_of[n] * t->group, to = least(from + t->group, last);
        if (from < first) from = first;
        for (long key = 0; from < to && key < t->span; key += KEYS) {
            const int32_t *order = t->order + n * t->span + key;
            for (long j = 0; j < KEYS; j++) {
                if (order[j] < 0) {
                    memset(own + j * dim, 0, dim * sizeof(bf16));
                    memset(own + (KEYS + j) * dim, 0, dim * sizeof(bf16));
                } else {
                    memcpy(own + j * dim, k + order[j] * dim, dim * sizeof(bf16));
                    memcpy(own + (KEYS + j) * dim, v + order[j] * dim, dim * sizeof(bf16));
                }
            }
            turn_values(own + KEYS * dim, turned, dim);
            for (long i = (from - first) / 16; i <= (to - 1 - first) / 16; i++) {
                uint16_t rows = 0, bits[KEYS];
                for (long c = 0; c < 16; c++) rows |= (uint16_t)((first + i * 16 + c >= from && first + i * 16 + c < to) << c);
                for (long j = 0; j < KEYS; j++) bits[j] = order[j] < 0 ? 0 : rows;
                const uint16_t *const only[2] = {bits, 0};
                meet(t, own, turned, q + i * 16 * dim, only, 1, 0, s, p, o + i * 16 * dim, most + i * 16, sum + i * 16);
            }
        }
    }
    for (long i = 0; i < tiles; i++)
        for (long d = 0; d < dim; d += 16) {
            __m512i r[16];
            __m512 inverse = _mm512_div_ps(_mm512_set1_ps(1.0f), _mm512_load_ps(sum + i * 16));
            for (int j = 0; j < 16; j++)
                r[j] = (__m512i)_mm512_mul_ps(_mm512_load_ps(o + (i * dim + d + j) * 16), inverse);
            transpose(r);
            for (long c = 0; c < 16 && first + i * 16 + c < last; c++) {
                long row = first + i * 16 + c, token = row / t->group, member = row % t->group;
                bf16 *to = t->y + ((b * t->tokens + token) * t->kv_heads * t->group + head * t->group + member) * dim;
                __m256bh rounded = _mm512_cvtneps_pbh((__m512)r[c]);
                memcpy(to + d, &rounded, 32);
            }
        }
}

/* See `attention`; dim a multiple of 32 up to 256, keys of 64. Returns 0, or -1 when there is no memory. */
int paceline_attention(const attention *t) {
    long rows = t->group * t->tokens, heads = t->batch * t->kv_heads, failed = 0;
#pragma omp parallel reduction(| : failed)
    {
        /* One part per K/V head reads the keys once; more parts only where threads would stand idle. */
        long parts = (omp_get_num_threads() + heads - 1) / heads, size = (rows + parts - 1) / parts;
        size = (size + 15) / 16 * 16;
        if (size > ROWS_MOST) size = ROWS_MOST;
        parts = (rows + size - 1) / size;
        char *memory = scratch(attention_bytes(size, t->dim));
        thread_state before;
        enter(&before);
        failed = !memory;
        if (memory) {
#pragma omp for schedule(dynamic) nowait
            for (long i = 0; i < heads * parts; i++) {
                long first = i % parts * size, last = first + size < rows ? first + size : rows, head = i / parts;
                paceline_attend(t, head / t->kv_heads, head % t->kv_heads, first, last, memory);
            }
        }
        leave(&before);
    }
    return failed ? -1 : 0;
}
