/* Processors with AVX2, FMA and F16C. */
#define FLOATS 8
#define NAME kernels_avx2
#include "tier.h"
