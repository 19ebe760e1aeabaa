/* All loops of a tier, as the table NAME: included by tier_avx2.c and tier_avx512.c. */
#include "kernels.h"

#ifdef WIDE_X86
#include "vectors.h"

#include "plain_loops.h"
#include "experts_sum.h"
#include "latent_loops.h"
#include "lane_loops.h"
#include "products_vectors.h"
#include "products_plain.h"
#include "products_packed.h"

PLAIN(fp32, FP32)

const struct loops NAME = {
    .floats = FLOATS,
    .rms_norm = rms_norm,
    .silu_and_mul = silu_and_mul,
    .join_lanes = join_lanes,
    .sum_lanes = sum_lanes,
    .attention = attention,
    .add_slots = add_slots,
    .latents = latent_chunk,
    .packed = {[FP32] = &packed_fp32_loops, [BF16] = &packed_bf16_loops, [FP16] = &packed_fp16_loops},
    .products = {[FP32] = &plain_fp32_loops, [BF16] = &bf16_loops, [FP16] = &fp16_loops, [INT8] = &int8_loops},
};
#endif
