/* The two products of a decode pass in bf16, on the matrix tiles of x86 (AMX): linear layers and attention.
 *
 * Both are made for few rows (1 to some tens), where the framework's products leave much of the memory bandwidth
 * unused, and both form a row's sums in the same order however many rows there are: a row's result has the same bits
 * at any width.
 */
#include <immintrin.h>
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef uint16_t bf16;

enum {
    TILE = 512,  /* elements of a bf16 tile */
    AHEAD = 3,   /* tiles of W to prefetch: 2 to 4 are best when two tiles of columns compete for the first cache */
    CHUNK = 128, /* rows of x packed at once */
};

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes_per_row[16];
    uint8_t rows[16];
} tile_config;

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

/* What a thread had before a call. The framework keeps a tile configuration of its own per thread and believes that it
 * stays; and weights of far-away keys would be denormal numbers, a hundred times slower than the zeros they stand for. */
typedef struct {
    tile_config tiles __attribute__((aligned(64)));
    unsigned float_mode;
} thread_state;

static void enter(thread_state *before) {
    tile_config mine __attribute__((aligned(64))) = {.palette = 1};
    for (int i = 0; i < 8; i++) mine.bytes_per_row[i] = 64, mine.rows[i] = 16;
    _tile_storeconfig(&before->tiles);
    _tile_loadconfig(&mine);
    before->float_mode = _mm_getcsr();
    _mm_setcsr(before->float_mode | 0x8040); /* denormal results and inputs are zero */
}

static void leave(const thread_state *before) {
    _mm_setcsr(before->float_mode);
    if (before->tiles.palette) _tile_loadconfig(&before->tiles);
    else _tile_release();
}

/* Memory of this thread's own, kept between calls; null when there is none. */
static void *scratch(long bytes) {
    static _Thread_local void *memory;
    static _Thread_local long room;
    if (room < bytes) {
        free(memory);
        memory = aligned_alloc(64, (bytes + 63) / 64 * 64);
        room = memory ? bytes : 0;
    }
    return memory;
}

/* -- linear layers ---------------------------------------------------------------------------------------------
 *
 * y = x W' + bias. W is [out, in] as it lies in memory, walked 32 rows at a time. The rows of x become the columns of
 * the other operand, 16 to a tile, packed once per call and at most 128 at a time, so that they stay in the caches
 * while W streams by.
 *
 *        x', packed:  in/32 x pairs of tiles
 *   W    [ A0 ]       k ->                              C0 C1   fp32, in tile registers until the block is done
 *        [ A1 ]                                         C2 C3
 */

/* Rows of x as columns: in tile t of step k, line j holds the inputs k*32 + 2j and 2j+1 of rows 16t to 16t+15.
 * Tiles go in pairs, a pair's steps together: [pair][k][2]; a last odd tile stands alone. */
static void pack(const bf16 *x, bf16 *packed, long in, long rows) {
    long tiles = (rows + 15) / 16, depth = in / 32;
#pragma omp for schedule(static)
    for (long k = 0; k < depth; k++)
        for (long t = 0; t < tiles; t++) {
            long pair = t / 2, wide = pair * 2 + 1 < tiles ? 2 : 1;
            bf16 *tile = packed + (pair * 2 * depth + k * wide + t % 2) * TILE;
            __m512i r[16];
            for (long c = 0; c < 16; c++)
                r[c] = t * 16 + c < rows ? _mm512_loadu_si512(x + (t * 16 + c) * in + k * 32) : _mm512_setzero_si512();
            transpose(r);
            for (int j = 0; j < 16; j++) _mm512_store_si512(tile + j * 32, r[j]);
        }
}

/* A finished tile of sums, 16 outputs x 16 columns, to bf16 rows of y. */
static void put(const float *sums, const bf16 *bias, bf16 *y, long out, long first, long tile, long rows) {
    __m512i r[16];
    for (int i = 0; i < 16; i++) r[i] = _mm512_load_si512(sums + i * 16);
    transpose(r);
    __m512 add = _mm512_setzero_ps();
    if (bias) {
        __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)(bias + first)));
        add = _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
    }
    for (long c = 0; c < 16 && tile * 16 + c < rows; c++) {
        __m256bh rounded = _mm512_cvtneps_pbh(_mm512_add_ps(_mm512_castsi512_ps(r[c]), add));
        memcpy(y + (tile * 16 + c) * out + first, &rounded, 32);
    }
}

/* Fetch what the row block at `a` needs AHEAD tiles from now; past its end that is the next block's beginning. */
static inline __attribute__((always_inline)) void fetch(const char *a, long k, long tiles, long stride, int rows) {
    const char *p = k + AHEAD < tiles ? a + (k + AHEAD) * 64 : a + rows * stride + (k + AHEAD - tiles) * 64;
    for (int r = 0; r < rows; r++) _mm_prefetch(p + r * stride, _MM_HINT_T0);
}

/* Sums of 16 or 32 outputs x 16 or 32 columns, in tiles 0 to 3. */
static inline __attribute__((always_inline)) void multiply(const char *a, const bf16 *b, long depth, int high, int wide) {
    long stride = depth * 64;
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    for (long k = 0; k < depth; k++, b += wide * TILE) {
        fetch(a, k, depth, stride, high * 16);
        _tile_loadd(6, b, 64);
        if (wide == 2) _tile_loadd(7, b + TILE, 64);
        _tile_loadd(4, a + k * 64, stride);
        if (high == 2) _tile_loadd(5, a + 16 * stride + k * 64, stride);
        _tile_dpbf16ps(0, 4, 6);
        if (wide == 2) _tile_dpbf16ps(1, 4, 7);
        if (high == 2) _tile_dpbf16ps(2, 5, 6);
        if (high == 2 && wide == 2) _tile_dpbf16ps(3, 5, 7);
    }
}

/* 16 or 32 outputs of every packed row; W's block comes from memory for the first pair and from the cache after. */
static void outputs(const bf16 *w, const bf16 *bias, const bf16 *packed, bf16 *y, long out, long in, long rows,
                    long first) {
    float sums[4][256] __attribute__((aligned(64)));
    long tiles = (rows + 15) / 16, depth = in / 32;
    int high = first + 32 <= out ? 2 : 1;
    const char *a = (const char *)(w + first * in);
    for (long t = 0; t < tiles; t += 2) {
        int wide = t + 1 < tiles ? 2 : 1;
        const bf16 *b = packed + t * depth * TILE;
        if (high == 2 && wide == 2) multiply(a, b, depth, 2, 2);
        else if (high == 2) multiply(a, b, depth, 2, 1);
        else if (wide == 2) multiply(a, b, depth, 1, 2);
        else multiply(a, b, depth, 1, 1);
        _tile_stored(0, sums[0], 64); _tile_stored(1, sums[1], 64);
        _tile_stored(2, sums[2], 64); _tile_stored(3, sums[3], 64);
        for (int h = 0; h < high; h++)
            for (int c = 0; c < wide; c++) put(sums[2 * h + c], bias, y, out, first + 16 * h, t + c, rows);
    }
}

/* w [out, in], x [rows, in], y [rows, out], bias [out] or null; out a multiple of 16, in of 32.
 * Returns 0, or -1 when there is no memory for the packed rows. */
int paceline_linear(const bf16 *w, const bf16 *bias, const bf16 *x, bf16 *y, long out, long in, long rows) {
    long most = rows < CHUNK ? rows : CHUNK;
    bf16 *shared = scratch(in / 32 * ((most + 15) / 16) * TILE * (long)sizeof(bf16));
    if (!shared) return -1;
#pragma omp parallel
    {
        thread_state before;
        enter(&before);
        long blocks = (out + 31) / 32, threads = omp_get_num_threads(), me = omp_get_thread_num();
        for (long begin = 0; begin < rows; begin += CHUNK) {
            long count = rows - begin < CHUNK ? rows - begin : CHUNK;
            if (begin) {
#pragma omp barrier
            }
            pack(x + begin * in, shared, in, count);
            for (long b = blocks * me / threads; b < blocks * (me + 1) / threads; b++)
                outputs(w, bias, shared, y + begin * out, out, in, count, b * 32);
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

enum { KEYS = 64, ROWS_MOST = 256, DIM_MOST = 256 };

typedef struct {
    const bf16 *q, *k, *v;
    const uint16_t *mask; /* [batch, row tiles, keys - open]: bit c is row 16 t + c; the first `open` keys are seen by all */
    bf16 *y;              /* [batch, tokens, heads, dim] */
    long q_batch, q_head, q_token, kv_batch, kv_head;
    long batch, kv_heads, group, tokens, dim, keys, open;
    float scale; /* of the scores, in powers of two: 1/sqrt(dim) * log2(e) */
} attention;

static inline __m512 power_of_two(__m512 x) { /* relative error below 2e-7 for x <= 0; 0 from -160 on */
    x = _mm512_max_ps(x, _mm512_set1_ps(-160.0f));
    __m512 n = _mm512_roundscale_ps(x, 0), r = _mm512_sub_ps(x, n), p = _mm512_set1_ps(1.5353362e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3399197e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(9.6181277e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.5503324e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.24022648f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.69314718f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, n);
}

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

/* Rows first to last of one K/V head; a row is (member of the group, token), tokens fastest. */
static void attend(const attention *t, long b, long head, long first, long last, char *memory) {
    long dim = t->dim, tiles = (last - first + 15) / 16;
    long masked = t->keys - t->open, row_tiles = (t->group * t->tokens + 15) / 16;
    bf16 *q = (bf16 *)memory, *turned = q + tiles * 16 * dim, *p = turned + KEYS * dim;
    float *s = (float *)(p + 2 * KEYS * 16), *o = s + 2 * KEYS * 16, *most = o + tiles * 16 * dim, *sum = most + tiles * 16;
    const bf16 *k = t->k + b * t->kv_batch + head * t->kv_head, *v = t->v + b * t->kv_batch + head * t->kv_head;
    const uint16_t *mask = t->mask + (b * row_tiles + first / 16) * masked;
    memset(o, 0, tiles * 16 * dim * sizeof(float));
    for (long i = 0; i < tiles * 16; i++) most[i] = -INFINITY, sum[i] = 0;
    for (long i = 0; i < tiles; i++)
        for (long d = 0; d < dim; d += 32) {
            __m512i r[16];
            for (long c = 0; c < 16; c++) {
                long row = first + i * 16 + c, member = row / t->tokens, token = row % t->tokens;
                const bf16 *from = t->q + b * t->q_batch + (head * t->group + member) * t->q_head + token * t->q_token;
                r[c] = row < last ? _mm512_loadu_si512(from + d) : _mm512_setzero_si512();
            }
            transpose(r);
            for (int j = 0; j < 16; j++) _mm512_store_si512(q + i * 16 * dim + d / 32 * TILE + j * 32, r[j]);
        }
    for (long key = 0; key < t->keys; key += KEYS) {
        turn_values(v + key * dim, turned, dim);
        for (long i = 0; i < tiles; i += 2) {
            int wide = i + 1 < tiles ? 2 : 1, seen = 0;
            if (wide == 2) scores(k + key * dim, q + i * 16 * dim, dim, s, 2, i == 0);
            else scores(k + key * dim, q + i * 16 * dim, dim, s, 1, i == 0);
            for (int j = 0; j < wide; j++) {
                /* Blocks that straddle `open` get a mask of their own: ones up to it, then the given bits. */
                uint16_t mixed[KEYS];
                const uint16_t *bits = key + KEYS <= t->open ? 0 : mask + (i + j) * masked + (key - t->open);
                if (key < t->open && bits) {
                    for (long n = 0; n < KEYS; n++) mixed[n] = key + n < t->open ? 0xffff : bits[n];
                    bits = mixed;
                }
                __m512 top = _mm512_load_ps(most + (i + j) * 16), total = _mm512_load_ps(sum + (i + j) * 16), rescale;
                if (weigh(s + j * KEYS * 16, bits, t->scale, p + j * KEYS * 16, &top, &total, &rescale)) {
                    _mm512_store_ps(most + (i + j) * 16, top);
                    _mm512_store_ps(sum + (i + j) * 16, total);
                    dampen(o + (i + j) * 16 * dim, dim, rescale);
                    seen = 1;
                } else
                    memset(p + j * KEYS * 16, 0, KEYS * 16 * sizeof(bf16)); /* adds exact zeros */
            }
            if (seen && wide == 2) gather(turned, p, dim, o + i * 16 * dim, 2);
            else if (seen) gather(turned, p, dim, o + i * 16 * dim, 1);
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
                long row = first + i * 16 + c, member = row / t->tokens, token = row % t->tokens;
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
        char *memory = scratch(size * t->dim * 6 + KEYS * t->dim * 2 + 2 * KEYS * 16 * 6 + size * 8 + 64);
        thread_state before;
        enter(&before);
        failed = !memory;
        if (memory) {
#pragma omp for schedule(dynamic) nowait
            for (long i = 0; i < heads * parts; i++) {
                long first = i % parts * size, last = first + size < rows ? first + size : rows, head = i / parts;
                attend(t, head / t->kv_heads, head % t->kv_heads, first, last, memory);
            }
        }
        leave(&before);
    }
    return failed ? -1 : 0;
}
