/* What the compiled kernels share: tile registers, memory of a thread, and attention. */
#pragma once
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
    TILE = 512,     /* elements of a bf16 tile */
    KEYS = 64,      /* keys that attention reads at a time */
    ROWS_MOST = 256, /* query rows that it takes at a time */
    DIM_MOST = 256, /* numbers of a head */
};

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes_per_row[16];
    uint8_t rows[16];
} tile_config;

/* What a thread had before a call. The framework keeps a tile configuration of its own per thread and believes that it
 * stays; and weights of far-away keys would be denormal numbers, a hundred times slower than the zeros they stand for. */
typedef struct {
    tile_config tiles __attribute__((aligned(64)));
    unsigned float_mode;
} thread_state;

static inline void enter(thread_state *before) {
    /* Not a local: to the compiler the instruction reads 8 bytes only, and it may leave a local's rest unset. */
    static const tile_config mine __attribute__((aligned(64))) = {
        .palette = 1,
        .bytes_per_row = {64, 64, 64, 64, 64, 64, 64, 64},
        .rows = {16, 16, 16, 16, 16, 16, 16, 16},
    };
    _tile_storeconfig(&before->tiles);
    _tile_loadconfig(&mine);
    before->float_mode = _mm_getcsr();
    _mm_setcsr(before->float_mode | 0x8040); /* denormal results and inputs are zero */
}

static inline void leave(const thread_state *before) {
    _mm_setcsr(before->float_mode);
    if (before->tiles.palette) _tile_loadconfig(&before->tiles);
    else _tile_release();
}

/* Memory of this thread's own, kept between calls; null when there is none. */
static inline void *scratch(long bytes) {
    static _Thread_local void *memory;
    static _Thread_local long room;
    if (room < bytes) {
        free(memory);
        memory = aligned_alloc(64, (bytes + 63) / 64 * 64);
        room = memory ? bytes : 0;
    }
    return memory;
}

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

typedef struct {
    const bf16 *q, *k, *v;
    const uint16_t *mask; /* [batch, row tiles, keys - open]: bit c is row 16 t + c; the first `open` keys are seen by all */
    bf16 *y;              /* [batch, tokens, heads, dim] */
    long q_batch, q_head, q_token, kv_batch, kv_head;
    long batch, kv_heads, group, tokens, dim, keys, open;
    const int32_t *strays, *tokens_of, *order; /* see below; null when there are none */
    long span;
    float scale; /* of the scores, in powers of two: 1/sqrt(dim) * log2(e) */
} attention;

/* Strays are tokens whose path does not lie in the slots that plain decoding would use: nodes off a tree's first path.
 * Summed where they lie, their keys would round differently, so they are put in order first: order[n][i] is the slot
 * that stands for the i-th key of stray n, from the beginning of the block of 64 where the staged keys begin; -1 for a
 * key that it does not see. Its mask bits end where that block begins. Stray n of row b, with strays[b] <= n <
 * strays[b + 1], is token tokens_of[n]. */

/* Rows first to last of one K/V head of one sequence; `memory` has attention_bytes of that many rows. */
void paceline_attend(const attention *t, long b, long head, long first, long last, char *memory);

static inline long attention_bytes(long rows, long dim) {
    return rows * dim * 6 + 3 * KEYS * dim * 2 + 2 * KEYS * 16 * 6 + rows * 8 + 64;
}
