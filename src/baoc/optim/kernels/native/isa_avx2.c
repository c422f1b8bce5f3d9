#if defined(__x86_64__) && defined(__GNUC__)
#define ISA(name) name##_avx2
#define USE_AVX2
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#include "isa.h"
#pragma clang attribute pop
#else
#pragma GCC target("avx2,fma,f16c")
#include "isa.h"
#endif
#endif
