/* The products' inner loops for AMX: bf16 weights as products_dot.c has them, whose 16 pairs of inputs by 16 rows are one tile.
 *
 * A row of a tile is a token, and is summed along the inputs by itself: whatever the number of tokens, one kind of instruction
 * computes them all.
 */
#include "products_wide.h"

#if defined(WIDE_X86) && (defined(__clang__) || __GNUC__ >= 11)
#include <sys/syscall.h>
#include <unistd.h>

#define TILES __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16,amx-tile,amx-bf16")))

/* What a tile holds: tokens, and inputs of each. */
enum { TOKENS = 16, INPUTS = 32, TOGETHER = 2 * TOKENS };

/* What _tile_loadconfig reads. */
struct config {
    uint8_t palette, start, reserved[14];
    uint16_t width[16]; /* bytes of a row */
    uint8_t rows[16];
};

/* Sums of up to 32 tokens: tiles 0 and 1 are the low and the high rows of the first 16 tokens, 2 and 3 those of the others; 4 and 5
 * hold tokens, 6 and 7 weights. */
INLINE TILES void shape(int64_t tokens) {
    struct config config = {.palette = 1};
    const int64_t first = tokens < TOKENS ? tokens : TOKENS, others = tokens > TOKENS ? tokens - TOKENS : 1;
    for (int i = 0; i < 8; i++) {
        const int64_t held = i > 5 ? INPUTS / 2 : i == 2 || i == 3 || i == 5 ? others : first;
        config.width[i] = 64, config.rows[i] = (uint8_t)held;
    }
    __asm__ volatile("" : : "r"(&config) : "memory"); /* some compilers' _tile_loadconfig names 8 of the 64 bytes */
    _tile_loadconfig(&config);
}

/* One step along the inputs: x [tokens][32 inputs], `stride` bytes apart, times packed weights [16][32 rows][2 inputs]. */
INLINE TILES void step(int more, const bf16 *packed, const bf16 *x, int64_t stride) {
    _tile_loadd(6, packed, 128);
    _tile_loadd(7, packed + 32, 128);
    _tile_loadd(4, x, stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (more) {
        _tile_loadd(5, (const char *)x + TOKENS * stride, stride);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
}

/* sums [tokens][32 rows] of `count` inputs of up to 32 tokens, `stride` apart. cold: the weights are not in a cache yet. */
INLINE TILES void sum(const int more, const int cold, float *sums, const bf16 *packed, const bf16 *x, int64_t stride, int64_t count, int64_t tokens) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    int64_t i = 0;
    for (; i + INPUTS <= count; i += INPUTS, packed += ROWS * INPUTS) {
        if (cold) fetch_ahead(packed, ROWS * INPUTS * 2);
        step(more, packed, x + i, stride * 2);
    }
    if (i < count) { /* the last few inputs, zeros behind them */
        bf16 rest[TOGETHER * INPUTS] = {0}, weights[ROWS * INPUTS] = {0};
        for (int64_t t = 0; t < tokens; t++) memcpy(rest + t * INPUTS, x + t * stride + i, sizeof(bf16) * (size_t)(count - i));
        memcpy(weights, packed, sizeof(bf16) * (size_t)(ROWS * (count - i)));
        __asm__ volatile("" ::: "memory"); /* _tile_loadd does not say that it reads */
        step(more, weights, rest, INPUTS * 2);
    }
    _tile_stored(0, sums, ROWS * 4);
    _tile_stored(1, sums + 16, ROWS * 4);
    if (more) {
        _tile_stored(2, sums + TOKENS * ROWS, ROWS * 4);
        _tile_stored(3, sums + TOKENS * ROWS + 16, ROWS * 4);
    }
}

/* A block of rows for up to 32 tokens. */
INLINE TILES void tiles(int more, const int cold, const struct product *p, const struct tokens *t, int64_t block) {
    float sums[TOGETHER * ROWS];
    __m512 nodes[TOGETHER][TREE * 2];
    const int64_t inputs = p->inputs, leaves = p->leaves ? p->leaves : 1, count = inputs / leaves;
    const bf16 *weight = (const bf16 *)p->weight + block * ROWS * inputs;
    for (int leaf = 0; leaf < leaves; leaf++) {
        sum(more, cold, sums, weight + leaf * count * ROWS, (const bf16 *)t->x + leaf * count, t->x_stride, count, t->count);
        for (int64_t k = 0; k < t->count; k++) {
            __m512 low = _mm512_loadu_ps(sums + k * ROWS), high = _mm512_loadu_ps(sums + k * ROWS + 16);
            if (p->leaves) join(1, p, leaf, &low, &high, nodes[k], block);
            if (leaf == leaves - 1)
                finish(1, p, p->leaves ? NULL : p->bias, &low, &high, (bf16 *)t->y + k * t->y_stride, t->y_stride, block);
        }
    }
}

TILES static void block_tiles(const struct product *p, const struct tokens *t, int64_t block) {
    for (int64_t from = 0; from < t->count; from += TOGETHER) {
        const struct tokens some = tokens_between(t, from, t->count - from < TOGETHER ? t->count : from + TOGETHER, 2, 2);
        if (from == 0 || some.count < TOGETHER) shape(some.count);
        if (from > 0)
            tiles(some.count > TOKENS, 0, p, &some, block);
        else if (some.count > TOKENS)
            tiles(1, 1, p, &some, block);
        else
            tiles(0, 1, p, &some, block);
    }
    _tile_release();
}

/* The tables of AVX-512 BF16 with bf16's products on tiles; 0 where the system does not let this process use them. */
int kernels_use_tiles(struct loops *loops) {
    enum { REQUEST = 0x1023, TILE_DATA = 18 }; /* arch_prctl's ARCH_REQ_XCOMP_PERM */
    static struct product_loops table;
    if (syscall(SYS_arch_prctl, REQUEST, TILE_DATA)) return 0;
    table = *loops->products[BF16], table.block = block_tiles, table.gathers = 0;
    loops->products[BF16] = &table;
    return 1;
}
#elif defined(WIDE_X86)
int kernels_use_tiles(struct loops *loops) { /* the compiler knows no tiles */
    (void)loops;
    return 0;
}
#endif
