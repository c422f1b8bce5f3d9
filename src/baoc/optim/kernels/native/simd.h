/* Vectors as wide as the instruction set has them. Arithmetic is the compiler's own (GCC and clang know + - * / < & on
 * vector types); here is what C has no operator for. */
#ifndef BAOC_SIMD_H
#define BAOC_SIMD_H

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

#if defined(USE_AVX512)
#define LANES 16
#elif defined(USE_AVX2)
#define LANES 8
#else
#define LANES 4
#endif

typedef float vfloat __attribute__((vector_size(4 * LANES)));
typedef int32_t vint __attribute__((vector_size(4 * LANES)));
typedef uint32_t vuint __attribute__((vector_size(4 * LANES)));

INLINE vfloat vfloat_of(float x) { return x - (vfloat){0}; }
INLINE vint vint_of(int32_t x) { return x - (vint){0}; }

INLINE float as_float(int32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

INLINE int32_t bits_of(float x)
{
    int32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* Lanes from `count` on become `other`. */
INLINE vint with_others(vint x, int count, int32_t other)
{
    for (int i = count; i < LANES; i++)
        x[i] = other;
    return x;
}

INLINE vfloat magnitude(vfloat x) { return (vfloat)((vint)x & 0x7fffffff); }
INLINE vfloat to_float(vint x) { return __builtin_convertvector(x, vfloat); }
INLINE vint to_int(vfloat x) { return __builtin_convertvector(x, vint); } /* towards zero */

#define LINE 64 /* bytes */

/* Asks memory for a line that is needed soon. It comes to the L2 cache, which can wait for far more lines at once than L1. */
INLINE void fetch(const void *line) { __builtin_prefetch(line, 0, 2); }

/* Loads and stores of up to LANES elements; a partial one goes through a zeroed buffer. */
#define DEFINE_LOAD(name, type, element, full)             \
    INLINE type name(const element *from, int count)       \
    {                                                      \
        element part[LANES];                               \
        if (count < LANES) {                               \
            memset(part, 0, sizeof part);                  \
            memcpy(part, from, sizeof(element) * (size_t)count); \
            from = part;                                   \
        }                                                  \
        return full(from);                                 \
    }

#define DEFINE_STORE(name, type, element, full)            \
    INLINE void name(element *to, type x, int count)       \
    {                                                      \
        if (count >= LANES) {                              \
            full(to, x);                                   \
        } else {                                           \
            element part[LANES];                           \
            full(part, x);                                 \
            memcpy(to, part, sizeof(element) * (size_t)count); \
        }                                                  \
    }

INLINE vfloat load_all(const float *from)
{
    vfloat x;
    memcpy(&x, from, sizeof x);
    return x;
}

INLINE void store_all(float *to, vfloat x) { memcpy(to, &x, sizeof x); }

/* fused_add is a * b + c and fused_subtract a * b - c, in one rounding where there is an instruction for it. Bytes are
 * narrowed with saturation; store_four takes four vectors at once, for fewer instructions, and no number below `least`.
 * signed_like negates where the other one has a sign (and may make zero of what it has a zero for). unless_zero is for
 * codes that have no sign. widen_upper reads numbers of 16 bits as the upper halves of two vectors; store_upper and
 * store_lower write those halves, and store_second_bytes bits 8 to 15 of four vectors. widen_small reads the numbers of two vectors as half precision would have them that keeps a
 * sign, three bits of exponent and four of the fraction. */
#if defined(USE_AVX512)

typedef __mmask16 vmask;
INLINE vmask less(vfloat a, vfloat b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_LT_OQ); }
INLINE vmask equal(vfloat a, vfloat b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_EQ_OQ); }
INLINE vmask less_int(vint a, vint b) { return _mm512_cmplt_epi32_mask((__m512i)a, (__m512i)b); }
INLINE vfloat choose(vmask where, vfloat yes, vfloat no) { return (vfloat)_mm512_mask_blend_ps(where, (__m512)no, (__m512)yes); }
INLINE vfloat keep_lanes(vmask where, vfloat x) { return (vfloat)_mm512_maskz_mov_ps(where, (__m512)x); }
INLINE vint choose_int(vmask where, vint yes, vint no) { return (vint)_mm512_mask_blend_epi32(where, (__m512i)no, (__m512i)yes); }
INLINE vfloat fused_add(vfloat a, vfloat b, vfloat c) { return (vfloat)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
INLINE vfloat fused_subtract(vfloat a, vfloat b, vfloat c) { return (vfloat)_mm512_fmsub_ps((__m512)a, (__m512)b, (__m512)c); }
INLINE vfloat square_root(vfloat x) { return (vfloat)_mm512_sqrt_ps((__m512)x); }
INLINE vint larger_int(vint a, vint b) { return (vint)_mm512_max_epi32((__m512i)a, (__m512i)b); }
INLINE vint smaller_int(vint a, vint b) { return (vint)_mm512_min_epi32((__m512i)a, (__m512i)b); }
INLINE int32_t largest_lane(vint x) { return _mm512_reduce_max_epi32((__m512i)x); }
INLINE vint absolute(vint x) { return (vint)_mm512_abs_epi32((__m512i)x); }
INLINE vfloat unless_zero(vint code, vfloat x) { return (vfloat)_mm512_maskz_mov_ps(_mm512_test_epi32_mask((__m512i)code, (__m512i)code), (__m512)x); }
INLINE vfloat smaller_of(vfloat a, vfloat b) { return (vfloat)_mm512_min_ps((__m512)a, (__m512)b); }
INLINE vint signed_like(vint x, vfloat sign)
{
    const __mmask16 negative = _mm512_movepi32_mask((__m512i)sign);
    return (vint)_mm512_mask_sub_epi32((__m512i)x, negative, _mm512_setzero_si512(), (__m512i)x);
}
INLINE vint widen_u16(const uint16_t *from) { return (vint)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)); }
INLINE vint widen_i8(const int8_t *from) { return (vint)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)); }
INLINE vint widen_u8(const uint8_t *from) { return (vint)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)from)); }
INLINE void narrow_16(uint16_t *to, vint x) { _mm256_storeu_si256((__m256i *)to, _mm512_cvtepi32_epi16((__m512i)x)); }
INLINE void narrow_i8(int8_t *to, vint x) { _mm_storeu_si128((__m128i *)to, _mm512_cvtsepi32_epi8((__m512i)x)); }
INLINE void narrow_u8(uint8_t *to, vint x)
{
    _mm_storeu_si128((__m128i *)to, _mm512_cvtusepi32_epi8(_mm512_max_epi32((__m512i)x, _mm512_setzero_si512())));
}

#define LANE ((vint){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15})

/* Packing works within quarters of a register: this puts their parts in order. */
INLINE __m512i in_order(__m512i x)
{
    return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), x);
}

INLINE void store_four_i8(int8_t *to, const vint *x)
{
    __m512i low = _mm512_packs_epi32((__m512i)x[0], (__m512i)x[1]), high = _mm512_packs_epi32((__m512i)x[2], (__m512i)x[3]);
    _mm512_storeu_si512((void *)to, in_order(_mm512_packs_epi16(low, high)));
}

INLINE void store_four_u8(uint8_t *to, const vint *x, uint8_t least)
{
    __m512i low = _mm512_packs_epi32((__m512i)x[0], (__m512i)x[1]), high = _mm512_packs_epi32((__m512i)x[2], (__m512i)x[3]);
    _mm512_storeu_si512((void *)to, _mm512_max_epu8(in_order(_mm512_packus_epi16(low, high)), _mm512_set1_epi8((char)least)));
}

/* Words `first`, `first` + 2, ... of two vectors. */
INLINE __m512i every_other(const vint *x, int first)
{
    __m512i place = _mm512_set1_epi32(0x00020000 + 0x00010001 * first);
    place = _mm512_add_epi32(place, _mm512_mullo_epi32(_mm512_set1_epi32(0x00040004), (__m512i)LANE));
    return _mm512_permutex2var_epi16((__m512i)x[0], place, (__m512i)x[1]);
}

INLINE void widen_upper(const uint16_t *from, vint *to)
{
    const __m512i both = _mm512_loadu_si512((const void *)from), place = _mm512_slli_epi32((__m512i)LANE, 16);
    const __mmask32 upper = 0xaaaaaaaa;
    to[0] = (vint)_mm512_maskz_permutexvar_epi16(upper, place, both);
    to[1] = (vint)_mm512_maskz_permutexvar_epi16(upper, _mm512_add_epi32(place, _mm512_set1_epi32(LANES << 16)), both);
}

INLINE void store_upper(uint16_t *to, const vint *x) { _mm512_storeu_si512((void *)to, every_other(x, 1)); }
INLINE void store_lower(uint16_t *to, const vint *x) { _mm512_storeu_si512((void *)to, every_other(x, 0)); }

INLINE void store_second_bytes(int8_t *to, const vint *x)
{
    const __m512i low = _mm512_srli_epi16(every_other(x, 0), 8), high = _mm512_srli_epi16(every_other(x + 2, 0), 8);
    const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    _mm512_storeu_si512((void *)to, _mm512_permutexvar_epi64(order, _mm512_packus_epi16(low, high)));
}

INLINE void widen_small(const int8_t *from, vfloat *to)
{
    const __m512i code = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)from));
    const __m512i sign = _mm512_and_si512(code, _mm512_set1_epi16(INT16_MIN));
    const __m512i half = _mm512_or_si512(_mm512_slli_epi16(_mm512_abs_epi16(code), 6), sign);
    to[0] = (vfloat)_mm512_cvtph_ps(_mm512_castsi512_si256(half));
    to[1] = (vfloat)_mm512_cvtph_ps(_mm512_extracti64x4_epi64(half, 1));
}

#elif defined(USE_AVX2)

typedef vint vmask;
INLINE vmask less(vfloat a, vfloat b) { return a < b; }
INLINE vmask equal(vfloat a, vfloat b) { return a == b; }
INLINE vmask less_int(vint a, vint b) { return a < b; }
INLINE vfloat choose(vmask where, vfloat yes, vfloat no) { return (vfloat)_mm256_blendv_ps((__m256)no, (__m256)yes, (__m256)where); }
INLINE vint choose_int(vmask where, vint yes, vint no) { return (vint)choose(where, (vfloat)yes, (vfloat)no); }
INLINE vfloat keep_lanes(vmask where, vfloat x) { return (vfloat)((vint)x & where); }
INLINE vfloat fused_add(vfloat a, vfloat b, vfloat c) { return (vfloat)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
INLINE vfloat fused_subtract(vfloat a, vfloat b, vfloat c) { return (vfloat)_mm256_fmsub_ps((__m256)a, (__m256)b, (__m256)c); }
INLINE vfloat square_root(vfloat x) { return (vfloat)_mm256_sqrt_ps((__m256)x); }
INLINE vint larger_int(vint a, vint b) { return (vint)_mm256_max_epi32((__m256i)a, (__m256i)b); }
INLINE vint smaller_int(vint a, vint b) { return (vint)_mm256_min_epi32((__m256i)a, (__m256i)b); }

INLINE int32_t largest_lane(vint x)
{
    __m128i top = _mm_max_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
    top = _mm_max_epi32(top, _mm_shuffle_epi32(top, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(top, _mm_shuffle_epi32(top, 0xb1)));
}

INLINE vint absolute(vint x) { return (vint)_mm256_abs_epi32((__m256i)x); }
INLINE vfloat unless_zero(vint code, vfloat x) { return (vfloat)_mm256_sign_epi32((__m256i)x, (__m256i)code); }
INLINE vfloat smaller_of(vfloat a, vfloat b) { return (vfloat)_mm256_min_ps((__m256)a, (__m256)b); }
INLINE vint signed_like(vint x, vfloat sign) { return (vint)_mm256_sign_epi32((__m256i)x, (__m256i)sign); }
INLINE vint widen_u16(const uint16_t *from) { return (vint)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from)); }
INLINE vint widen_i8(const int8_t *from) { return (vint)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from)); }
INLINE vint widen_u8(const uint8_t *from) { return (vint)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)from)); }

INLINE void narrow_16(uint16_t *to, vint x)
{
    __m128i low = _mm256_castsi256_si128((__m256i)x), high = _mm256_extracti128_si256((__m256i)x, 1);
    _mm_storeu_si128((__m128i *)to, _mm_packus_epi32(low, high));
}

INLINE __m128i halves(vint x)
{
    return _mm_packs_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
}

INLINE void narrow_i8(int8_t *to, vint x) { _mm_storel_epi64((__m128i *)to, _mm_packs_epi16(halves(x), halves(x))); }
INLINE void narrow_u8(uint8_t *to, vint x) { _mm_storel_epi64((__m128i *)to, _mm_packus_epi16(halves(x), halves(x))); }

/* Packing works within halves of a register: this puts their parts in order. */
INLINE __m256i in_order(__m256i x) { return _mm256_permutevar8x32_epi32(x, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)); }

INLINE void store_four_i8(int8_t *to, const vint *x)
{
    __m256i low = _mm256_packs_epi32((__m256i)x[0], (__m256i)x[1]), high = _mm256_packs_epi32((__m256i)x[2], (__m256i)x[3]);
    _mm256_storeu_si256((__m256i *)to, in_order(_mm256_packs_epi16(low, high)));
}

INLINE void store_four_u8(uint8_t *to, const vint *x, uint8_t least)
{
    __m256i low = _mm256_packs_epi32((__m256i)x[0], (__m256i)x[1]), high = _mm256_packs_epi32((__m256i)x[2], (__m256i)x[3]);
    _mm256_storeu_si256((__m256i *)to, _mm256_max_epu8(in_order(_mm256_packus_epi16(low, high)), _mm256_set1_epi8((char)least)));
}

INLINE void widen_small(const int8_t *from, vfloat *to)
{
    const __m256i code = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)from));
    const __m256i sign = _mm256_and_si256(code, _mm256_set1_epi16(INT16_MIN));
    const __m256i half = _mm256_or_si256(_mm256_slli_epi16(_mm256_abs_epi16(code), 6), sign);
    to[0] = (vfloat)_mm256_cvtph_ps(_mm256_castsi256_si128(half));
    to[1] = (vfloat)_mm256_cvtph_ps(_mm256_extracti128_si256(half, 1));
}

#else

typedef vint vmask;

INLINE vmask less(vfloat a, vfloat b) { return a < b; }
INLINE vmask equal(vfloat a, vfloat b) { return a == b; }
INLINE vmask less_int(vint a, vint b) { return a < b; }
INLINE vint choose_int(vmask where, vint yes, vint no) { return (where & yes) | (~where & no); }
INLINE vfloat choose(vmask where, vfloat yes, vfloat no) { return (vfloat)choose_int(where, (vint)yes, (vint)no); }
INLINE vfloat keep_lanes(vmask where, vfloat x) { return (vfloat)((vint)x & where); }
INLINE vfloat fused_add(vfloat a, vfloat b, vfloat c) { return a * b + c; }
INLINE vfloat fused_subtract(vfloat a, vfloat b, vfloat c) { return a * b - c; }
INLINE vfloat square_root(vfloat x)
{
    for (int i = 0; i < LANES; i++)
        x[i] = sqrtf(x[i]);
    return x;
}

INLINE vint larger_int(vint a, vint b) { return choose_int(a > b, a, b); }
INLINE vint smaller_int(vint a, vint b) { return choose_int(a < b, a, b); }

INLINE int32_t largest_lane(vint x)
{
    int32_t best = x[0];
    for (int i = 1; i < LANES; i++)
        best = x[i] > best ? x[i] : best;
    return best;
}

INLINE vint absolute(vint x) { return larger_int(x, -x); }
INLINE vfloat unless_zero(vint code, vfloat x) { return keep_lanes(code != 0, x); }
INLINE vfloat smaller_of(vfloat a, vfloat b) { return choose(a < b, a, b); }
INLINE vint signed_like(vint x, vfloat sign) { return choose_int((vint)sign < 0, -x, x); }

#define DEFINE_WIDEN(name, element)              \
    INLINE vint name(const element *from)        \
    {                                            \
        vint x;                                  \
        for (int i = 0; i < LANES; i++)          \
            x[i] = from[i];                      \
        return x;                                \
    }
DEFINE_WIDEN(widen_u16, uint16_t)
DEFINE_WIDEN(widen_i8, int8_t)
DEFINE_WIDEN(widen_u8, uint8_t)

INLINE void narrow_16(uint16_t *to, vint x)
{
    for (int i = 0; i < LANES; i++)
        to[i] = (uint16_t)x[i];
}

#define DEFINE_NARROW(name, element, least, most)                                     \
    INLINE void name(element *to, vint x)                                             \
    {                                                                                 \
        for (int i = 0; i < LANES; i++)                                               \
            to[i] = (element)(x[i] < (least) ? (least) : x[i] > (most) ? (most) : x[i]); \
    }
DEFINE_NARROW(narrow_i8, int8_t, INT8_MIN, INT8_MAX)
DEFINE_NARROW(narrow_u8, uint8_t, 0, UINT8_MAX)

INLINE void store_four_i8(int8_t *to, const vint *x)
{
    for (int k = 0; k < 4; k++)
        narrow_i8(to + k * LANES, x[k]);
}

INLINE void store_four_u8(uint8_t *to, const vint *x, uint8_t least)
{
    for (int k = 0; k < 4; k++)
        narrow_u8(to + k * LANES, larger_int(x[k], vint_of(least)));
}

INLINE void widen_small(const int8_t *from, vfloat *to)
{
    for (int k = 0; k < 2; k++) {
        const vint code = widen_i8(from + k * LANES);
        const vfloat number = (vfloat)((absolute(code) << 19) + (112 << 23));
        to[k] = (vfloat)((vint)smaller_of(number, number * 2.0f - 0x1p-14f) | (code & INT32_MIN));
    }
}

#endif

#if !defined(USE_AVX512)
INLINE void widen_upper(const uint16_t *from, vint *to)
{
    to[0] = widen_u16(from) << 16;
    to[1] = widen_u16(from + LANES) << 16;
}

INLINE void store_upper(uint16_t *to, const vint *x)
{
    for (int k = 0; k < 2; k++)
        narrow_16(to + k * LANES, (vint)((vuint)x[k] >> 16));
}

INLINE void store_lower(uint16_t *to, const vint *x)
{
    for (int k = 0; k < 2; k++)
        narrow_16(to + k * LANES, x[k] & 0xffff);
}

INLINE void store_second_bytes(int8_t *to, const vint *x)
{
    vint byte[4];
    for (int k = 0; k < 4; k++)
        byte[k] = x[k] >> 8 & 0xff;
    store_four_u8((uint8_t *)to, byte, 0);
}
#endif

/* To nearest, ties to even, of numbers from 0 to 2^31. From 2^23 on, floats have no fraction. */
INLINE vint nearest_int(vfloat x)
{
    const vfloat one = vfloat_of(0x1p23f);
    return to_int(choose(less(x, one), (x + one) - one, x));
}

DEFINE_LOAD(load, vfloat, float, load_all)
DEFINE_LOAD(load_u16, vint, uint16_t, widen_u16)
DEFINE_LOAD(load_i8, vint, int8_t, widen_i8)
DEFINE_LOAD(load_u8, vint, uint8_t, widen_u8)
DEFINE_STORE(store, vfloat, float, store_all)
DEFINE_STORE(store_16, vint, uint16_t, narrow_16)
DEFINE_STORE(store_i8, vint, int8_t, narrow_i8)
DEFINE_STORE(store_u8, vint, uint8_t, narrow_u8)

#endif
