/* y = x W' + bias for few rows of bf16, on the matrix tiles of x86 (AMX), at the speed at which W can be read.
 *
 * W is [out, in] as it lies in memory and is read once, 32 rows at a time, 32 inputs per tile. The rows of x become the
 * columns of the other operand, 16 to a tile, packed once per call. A column's sums are formed in the same order
 * whatever the number of columns, so a row's result has the same bits at every width from 1 to 64.
 *
 *        x', packed:  in/32 x tiles of 16 columns      (stays in the caches)
 *   W    [ A0 ]       k ->                              C0 C1   fp32, in tile registers until the row block is done
 *        [ A1 ]                                         C2 C3
 */
#include <immintrin.h>
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef uint16_t bf16;

enum { TILE = 512, AHEAD = 3 }; /* elements of a bf16 tile; tiles to prefetch ahead (2 to 4 are best at two tiles) */

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes_per_row[16];
    uint8_t rows[16];
} tile_config;

/* Ask the kernel for the tile registers; 0 when granted. */
int paceline_thin_init(void) { return (int)syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XTILEDATA */); }

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

/* Rows of x as columns: in tile (k, t), line j holds the inputs k*32 + 2j and 2j+1 of rows 16t to 16t+15. */
static void pack(const bf16 *x, bf16 *packed, long in, long rows, long tiles) {
#pragma omp for schedule(static)
    for (long k = 0; k < in / 32; k++)
        for (long t = 0; t < tiles; t++) {
            __m512i r[16];
            for (long c = 0; c < 16; c++)
                r[c] = t * 16 + c < rows ? _mm512_loadu_si512(x + (t * 16 + c) * in + k * 32) : _mm512_setzero_si512();
            transpose(r);
            for (int j = 0; j < 16; j++) _mm512_store_si512(packed + (k * tiles + t) * TILE + j * 32, r[j]);
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

/* 32 outputs x up to 32 columns. */
static inline __attribute__((always_inline)) void block32(const char *a, const bf16 *b, long depth, int tiles) {
    long stride = depth * 64;
    for (long k = 0; k < depth; k++, b += tiles * TILE) {
        fetch(a, k, depth, stride, 32);
        _tile_loadd(6, b, 64);
        if (tiles == 2) _tile_loadd(7, b + TILE, 64);
        _tile_loadd(4, a + k * 64, stride);
        _tile_loadd(5, a + 16 * stride + k * 64, stride);
        _tile_dpbf16ps(0, 4, 6);
        if (tiles == 2) _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        if (tiles == 2) _tile_dpbf16ps(3, 5, 7);
    }
}

/* 16 outputs x up to 64 columns: the rest of a matrix, and passes wider than 32. */
static inline __attribute__((always_inline)) void block16(const char *a, const bf16 *b, long depth, long tiles) {
    for (long k = 0; k < depth; k++, b += tiles * TILE) {
        fetch(a, k, depth, depth * 64, 16);
        _tile_loadd(4, a + k * 64, depth * 64);
        _tile_loadd(5, b, 64);
        _tile_dpbf16ps(0, 4, 5);
        if (tiles > 1) { _tile_loadd(6, b + TILE, 64); _tile_dpbf16ps(1, 4, 6); }
        if (tiles > 2) { _tile_loadd(7, b + 2 * TILE, 64); _tile_dpbf16ps(2, 4, 7); }
        if (tiles > 3) { _tile_loadd(5, b + 3 * TILE, 64); _tile_dpbf16ps(3, 4, 5); }
    }
}

static void outputs(const bf16 *w, const bf16 *bias, const bf16 *packed, bf16 *y, long out, long in, long rows,
                    long first, long count) {
    float sums[4 * 256] __attribute__((aligned(64)));
    long tiles = (rows + 15) / 16, depth = in / 32;
    const char *a = (const char *)(w + first * in);
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    if (count == 16) block16(a, packed, depth, tiles);
    else if (tiles == 1) block32(a, packed, depth, 1);
    else block32(a, packed, depth, 2);
    _tile_stored(0, sums, 64); _tile_stored(1, sums + 256, 64);
    _tile_stored(2, sums + 512, 64); _tile_stored(3, sums + 768, 64);
    if (count == 16)
        for (long t = 0; t < tiles; t++) put(sums + t * 256, bias, y, out, first, t, rows);
    else
        for (long t = 0; t < tiles; t++) {
            put(sums + t * 256, bias, y, out, first, t, rows);
            put(sums + 512 + t * 256, bias, y, out, first + 16, t, rows);
        }
}

/* w [out, in], x [rows, in], y [rows, out], bias [out] or null; out a multiple of 16, in of 32, 1 <= rows <= 64.
 * Returns 0, or -1 when there is no memory for the packed rows. */
int paceline_thin(const bf16 *w, const bf16 *bias, const bf16 *x, bf16 *y, long out, long in, long rows) {
    static _Thread_local bf16 *packed;
    static _Thread_local long room;
    long tiles = (rows + 15) / 16, needed = in / 32 * tiles * TILE * (long)sizeof(bf16);
    if (room < needed) {
        free(packed);
        packed = aligned_alloc(64, needed);
        room = packed ? needed : 0;
        if (!packed) return -1;
    }
    bf16 *shared = packed;
#pragma omp parallel
    {
        /* The framework keeps a tile configuration of its own per thread and believes that it stays. */
        tile_config mine __attribute__((aligned(64))) = {.palette = 1}, theirs __attribute__((aligned(64)));
        for (int i = 0; i < 8; i++) mine.bytes_per_row[i] = 64, mine.rows[i] = 16;
        _tile_storeconfig(&theirs);
        pack(x, shared, in, rows, tiles);
        _tile_loadconfig(&mine);
        long step = tiles <= 2 ? 32 : 16, blocks = (out + step - 1) / step;
        long threads = omp_get_num_threads(), me = omp_get_thread_num();
        for (long b = blocks * me / threads; b < blocks * (me + 1) / threads; b++)
            outputs(w, bias, shared, y, out, in, rows, b * step, step == 32 && b * 32 + 32 <= out ? 32 : 16);
        if (theirs.palette) _tile_loadconfig(&theirs);
        else _tile_release();
    }
    return 0;
}
