/* Processors with AVX-512 F, BW, VL and DQ; with BF16 too, kernels.c puts products_dot.c's loops in. */
#define FLOATS 16
#define NAME kernels_avx512
#include "tier.h"
