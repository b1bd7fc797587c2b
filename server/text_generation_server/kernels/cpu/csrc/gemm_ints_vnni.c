/* The products of gemm_ints.c for processors with VPDPBUSD, where the target does not have it anyway. */
#if defined(__AVX512F__) && !defined(__AVX512VNNI__)
#pragma GCC target("avx512vnni")
#include "int_dots.h"
#elif defined(CAN_AVX_VNNI)
#pragma GCC target("avxvnni")
#include "int_dots.h"
#endif
