/* The inverse DCT of libjpeg's "islow" method, to the bit: Loeffler, Ligtenberg and Moschytz 1989, with 11
 * multiplications a line in 13-bit fixed point, columns first, with two more bits kept between the passes.
 *
 * As in libjpeg-turbo's vectors, products are of 16 bits, and what does not fit wraps or saturates: coefficients
 * that an encoder made never get there.
 */
#ifndef DATAPIPE_IDCT_H
#define DATAPIPE_IDCT_H

#include "jpeg.h"

enum { BITS = 13, KEPT = 2, FIRST_SHIFT = BITS - KEPT, SECOND_SHIFT = BITS + KEPT + 3 };

/* cos and sin terms, times 2 ** 13. Each product of the paper is c * x + d * y here, so that one instruction does it. */
enum {
    E2 = 10703, /* 0.541196100 + 0.765366865 */
    E6 = 4433,  /* 0.541196100 */
    E7 = -10704, /* 0.541196100 - 1.847759065 */
    O3 = 9633 - 16069, /* 1.175875602 - 1.961570560 */
    O4 = 9633 - 3196,  /* 1.175875602 - 0.390180644 */
    O5 = 9633,         /* 1.175875602 */
    A7 = 2446 - 7373,  /* 0.298631336 - 0.899976223 */
    A1 = 12299 - 7373, /* 1.501321110 - 0.899976223 */
    A0 = -7373,        /* -0.899976223 */
    B5 = 16819 - 20995, /* 2.053119869 - 2.562915447 */
    B3 = 25172 - 20995, /* 3.072711026 - 2.562915447 */
    B0 = -20995,        /* -2.562915447 */
};

/* A block on its way: its coefficients, not yet multiplied by their quantisation steps, both row by row and aligned, and
 * where its samples go. */
typedef struct {
    const int16_t *coefficients, *quantisation;
    uint8_t *out;
    size_t stride;
    int side; /* samples across and down: 8, or fewer at a smaller scale */
} Block;

#if defined __AVX2__
#include <immintrin.h>

/* Two blocks are transformed at once, one in the low half of each vector, one in the high half. */

static inline __m256i sum_of_products(__m256i pairs, int a, int b)
{
    return _mm256_madd_epi16(pairs, _mm256_set1_epi32((int)((uint16_t)a | (uint32_t)(uint16_t)b << 16)));
}

/* Transform four columns of each block: pairs of 16 bits in, sums of 32 bits out, rounded and shifted. */
static inline void transform_half(__m256i r26, __m256i r04, __m256i r73_51, __m256i r71, __m256i r53, int shift,
                                  __m256i out[8])
{
    __m256i c3 = sum_of_products(r26, E2, E6), c2 = sum_of_products(r26, E6, E7);
    __m256i c0 = sum_of_products(r04, 1 << BITS, 1 << BITS), c1 = sum_of_products(r04, 1 << BITS, -(1 << BITS));
    __m256i s3 = sum_of_products(r73_51, O3, O5), s4 = sum_of_products(r73_51, O5, O4);
    __m256i half = _mm256_set1_epi32(1 << (shift - 1));
    c0 = _mm256_add_epi32(c0, half);
    c1 = _mm256_add_epi32(c1, half);
    __m256i even[4] = {_mm256_add_epi32(c0, c3), _mm256_add_epi32(c1, c2), _mm256_sub_epi32(c1, c2),
                       _mm256_sub_epi32(c0, c3)};
    __m256i odd[4] = {_mm256_add_epi32(sum_of_products(r71, A0, A1), s4),
                      _mm256_add_epi32(sum_of_products(r53, B0, B3), s3),
                      _mm256_add_epi32(sum_of_products(r53, B5, B0), s4),
                      _mm256_add_epi32(sum_of_products(r71, A7, A0), s3)};
    for (int k = 0; k < 4; k++) {
        out[k] = _mm256_srai_epi32(_mm256_add_epi32(even[k], odd[k]), shift);
        out[7 - k] = _mm256_srai_epi32(_mm256_sub_epi32(even[k], odd[k]), shift);
    }
}

static inline void transform(__m256i rows[8], int shift)
{
    __m256i low[8], high[8];
    __m256i sum73 = _mm256_add_epi16(rows[7], rows[3]), sum51 = _mm256_add_epi16(rows[5], rows[1]);
    transform_half(_mm256_unpacklo_epi16(rows[2], rows[6]), _mm256_unpacklo_epi16(rows[0], rows[4]),
                   _mm256_unpacklo_epi16(sum73, sum51), _mm256_unpacklo_epi16(rows[7], rows[1]),
                   _mm256_unpacklo_epi16(rows[5], rows[3]), shift, low);
    transform_half(_mm256_unpackhi_epi16(rows[2], rows[6]), _mm256_unpackhi_epi16(rows[0], rows[4]),
                   _mm256_unpackhi_epi16(sum73, sum51), _mm256_unpackhi_epi16(rows[7], rows[1]),
                   _mm256_unpackhi_epi16(rows[5], rows[3]), shift, high);
    for (int k = 0; k < 8; k++)
        rows[k] = _mm256_packs_epi32(low[k], high[k]);
}

static inline void transpose(__m256i rows[8])
{
    __m256i twos[8], fours[8];
    for (int i = 0; i < 8; i += 2) {
        twos[i] = _mm256_unpacklo_epi16(rows[i], rows[i + 1]);
        twos[i + 1] = _mm256_unpackhi_epi16(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        fours[i] = _mm256_unpacklo_epi32(twos[i], twos[i + 2]);
        fours[i + 1] = _mm256_unpackhi_epi32(twos[i], twos[i + 2]);
        fours[i + 2] = _mm256_unpacklo_epi32(twos[i + 1], twos[i + 3]);
        fours[i + 3] = _mm256_unpackhi_epi32(twos[i + 1], twos[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        rows[2 * i] = _mm256_unpacklo_epi64(fours[i], fours[i + 4]);
        rows[2 * i + 1] = _mm256_unpackhi_epi64(fours[i], fours[i + 4]);
    }
}

static inline __m256i load_rows(const int16_t *a, const int16_t *b)
{
    __m128i low = _mm_load_si128((const __m128i *)(const void *)a), high = _mm_load_si128((const __m128i *)(const void *)b);
    return _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
}

static inline void store_rows(__m128i two, uint8_t *out, size_t stride)
{
    _mm_storel_epi64((__m128i *)(void *)out, two);
    _mm_storel_epi64((__m128i *)(void *)(out + stride), _mm_unpackhi_epi64(two, two));
}

/* Transform two blocks, which may be the same. */
static inline void inverse_dct(const Block *a, const Block *b)
{
    __m256i rows[8];
    for (int i = 0; i < 8; i++)
        rows[i] = _mm256_mullo_epi16(load_rows(a->coefficients + 8 * i, b->coefficients + 8 * i),
                                     load_rows(a->quantisation + 8 * i, b->quantisation + 8 * i));
    transform(rows, FIRST_SHIFT);
    transpose(rows);
    transform(rows, SECOND_SHIFT);
    transpose(rows);
    for (size_t i = 0; i < 8; i += 2) {
        __m256i samples = _mm256_xor_si256(_mm256_packs_epi16(rows[i], rows[i + 1]), _mm256_set1_epi8(-128)); /* + 128 */
        store_rows(_mm256_castsi256_si128(samples), a->out + i * a->stride, a->stride);
        store_rows(_mm256_extracti128_si256(samples, 1), b->out + i * b->stride, b->stride);
    }
}

#elif defined DATAPIPE_NEON
#include <arm_neon.h>

static inline int32x4_t sum_of_products(int16x4_t x, int16x4_t y, int a, int b)
{
    return vmlal_n_s16(vmull_n_s16(x, (int16_t)a), y, (int16_t)b);
}

/* Transform four columns: rows of 16 bits in, rows of 16 bits out, rounded and shifted. */
static inline void transform_half(const int16x4_t r[8], int shift, int16x4_t out[8])
{
    int16x4_t sum73 = vadd_s16(r[7], r[3]), sum51 = vadd_s16(r[5], r[1]);
    int32x4_t c3 = sum_of_products(r[2], r[6], E2, E6), c2 = sum_of_products(r[2], r[6], E6, E7);
    int32x4_t c0 = sum_of_products(r[0], r[4], 1 << BITS, 1 << BITS);
    int32x4_t c1 = sum_of_products(r[0], r[4], 1 << BITS, -(1 << BITS));
    int32x4_t s3 = sum_of_products(sum73, sum51, O3, O5), s4 = sum_of_products(sum73, sum51, O5, O4);
    int32x4_t half = vdupq_n_s32(1 << (shift - 1)), right = vdupq_n_s32(-shift);
    c0 = vaddq_s32(c0, half);
    c1 = vaddq_s32(c1, half);
    int32x4_t even[4] = {vaddq_s32(c0, c3), vaddq_s32(c1, c2), vsubq_s32(c1, c2), vsubq_s32(c0, c3)};
    int32x4_t odd[4] = {vaddq_s32(sum_of_products(r[7], r[1], A0, A1), s4),
                        vaddq_s32(sum_of_products(r[5], r[3], B0, B3), s3),
                        vaddq_s32(sum_of_products(r[5], r[3], B5, B0), s4),
                        vaddq_s32(sum_of_products(r[7], r[1], A7, A0), s3)};
    for (int k = 0; k < 4; k++) {
        out[k] = vqmovn_s32(vshlq_s32(vaddq_s32(even[k], odd[k]), right));
        out[7 - k] = vqmovn_s32(vshlq_s32(vsubq_s32(even[k], odd[k]), right));
    }
}

static inline void transform(int16x8_t rows[8], int shift)
{
    int16x4_t low[8], high[8];
    for (int k = 0; k < 8; k++) {
        low[k] = vget_low_s16(rows[k]);
        high[k] = vget_high_s16(rows[k]);
    }
    transform_half(low, shift, low);
    transform_half(high, shift, high);
    for (int k = 0; k < 8; k++)
        rows[k] = vcombine_s16(low[k], high[k]);
}

static inline void transpose(int16x8_t rows[8])
{
    int32x4_t fours[8]; /* of rows 0 to 3, then 4 to 7: columns k and k + 4 in each */
    for (int i = 0; i < 8; i += 4) {
        int16x8x2_t first = vtrnq_s16(rows[i], rows[i + 1]), second = vtrnq_s16(rows[i + 2], rows[i + 3]);
        for (int k = 0; k < 2; k++) {
            int32x4x2_t both = vtrnq_s32(vreinterpretq_s32_s16(first.val[k]), vreinterpretq_s32_s16(second.val[k]));
            fours[i + k] = both.val[0];
            fours[i + k + 2] = both.val[1];
        }
    }
    for (int k = 0; k < 4; k++) {
        rows[k] = vreinterpretq_s16_s32(vcombine_s32(vget_low_s32(fours[k]), vget_low_s32(fours[k + 4])));
        rows[k + 4] = vreinterpretq_s16_s32(vcombine_s32(vget_high_s32(fours[k]), vget_high_s32(fours[k + 4])));
    }
}

static inline void inverse_dct(const Block *a, const Block *b)
{
    for (const Block *block = a; block; block = block == b || a == b ? NULL : b) {
        int16x8_t rows[8];
        for (int i = 0; i < 8; i++)
            rows[i] = vmulq_s16(vld1q_s16(block->coefficients + 8 * i), vld1q_s16(block->quantisation + 8 * i));
        transform(rows, FIRST_SHIFT);
        transpose(rows);
        transform(rows, SECOND_SHIFT);
        transpose(rows);
        for (size_t i = 0; i < 8; i++) /* + 128 */
            vst1_u8(block->out + i * block->stride, veor_u8(vreinterpret_u8_s8(vqmovn_s16(rows[i])), vdup_n_u8(128)));
    }
}

#else

static inline int clamp(int value, int low, int high)
{
    return value < low ? low : value > high ? high : value;
}

/* Round and shift a sum, which wraps as the vectors' do. */
static inline int16_t descale(uint32_t sum, int shift)
{
    return (int16_t)clamp((int32_t)(sum + (1u << (shift - 1))) >> shift, INT16_MIN, INT16_MAX);
}

/* Transform the columns, and turn them into rows. */
static inline void transform(const int16_t *in, int16_t *out, int shift)
{
    for (int i = 0; i < BLOCK; i++) {
        int32_t c[BLOCK];
        for (int k = 0; k < BLOCK; k++)
            c[k] = in[BLOCK * k + i];
        int32_t c3 = E2 * c[2] + E6 * c[6], c2 = E6 * c[2] + E7 * c[6];
        int32_t c0 = (c[0] + c[4]) * (1 << BITS), c1 = (c[0] - c[4]) * (1 << BITS);
        int32_t sum3 = (int16_t)(c[7] + c[3]), sum4 = (int16_t)(c[5] + c[1]);
        int32_t s3 = O3 * sum3 + O5 * sum4, s4 = O5 * sum3 + O4 * sum4;
        int32_t odd[4] = {A0 * c[7] + A1 * c[1] + s4, B0 * c[5] + B3 * c[3] + s3, B5 * c[5] + B0 * c[3] + s4,
                          A7 * c[7] + A0 * c[1] + s3};
        int32_t even[4] = {c0 + c3, c1 + c2, c1 - c2, c0 - c3};
        for (int k = 0; k < 4; k++) {
            out[BLOCK * i + k] = descale((uint32_t)even[k] + (uint32_t)odd[k], shift);
            out[BLOCK * i + 7 - k] = descale((uint32_t)even[k] - (uint32_t)odd[k], shift);
        }
    }
}

static inline void inverse_dct(const Block *a, const Block *b)
{
    for (const Block *block = a; block; block = block == b || a == b ? NULL : b) {
        int16_t whole[64], half[64];
        for (int i = 0; i < 64; i++)
            whole[i] = (int16_t)(block->coefficients[i] * block->quantisation[i]);
        transform(whole, half, FIRST_SHIFT);
        transform(half, whole, SECOND_SHIFT);
        for (int i = 0; i < 64; i++)
            block->out[(size_t)(i / BLOCK) * block->stride + (size_t)(i % BLOCK)] =
                (uint8_t)(clamp(whole[i], -128, 127) + 128);
    }
}

#endif

/* --- at a smaller scale: libjpeg's "reduced" method, in which a few coefficients give 4 x 4, 2 x 2 or 1 x 1 samples --- */

/* Sums are unsigned, because those of hostile coefficients wrap. */
static inline int32_t round_off(uint32_t sum, int shift)
{
    return (int32_t)(sum + (1u << (shift - 1))) >> shift;
}

static inline uint8_t to_sample(uint32_t sum, int shift)
{
    int32_t value = round_off(sum, shift) + 128;
    return (uint8_t)(value < 0 ? 0 : value > 255 ? 255 : value);
}

/* Four outputs of a line, before rounding, times 2 ** (BITS + 1). The coefficients lie `step` apart; the fifth has no
 * part in it. */
static inline void reduce_to_4(const uint32_t *c, int step, uint32_t out[4])
{
    uint32_t c0 = c[0] * (1 << (BITS + 1)), c2 = 15137 * c[2 * step] - 6270 * c[6 * step];
    uint32_t c1 = c[step], c3 = c[3 * step], c5 = c[5 * step], c7 = c[7 * step];
    uint32_t inner = 11893 * c5 - 1730 * c7 - 17799 * c3 + 8697 * c1;
    uint32_t outer = 7373 * c3 - 4926 * c5 - 4176 * c7 + 20995 * c1;
    out[0] = c0 + c2 + outer;
    out[1] = c0 - c2 + inner;
    out[2] = c0 - c2 - inner;
    out[3] = c0 + c2 - outer;
}

/* The same for two outputs, times 2 ** (BITS + 2): of the even coefficients only the first counts. */
static inline void reduce_to_2(const uint32_t *c, int step, uint32_t out[4])
{
    uint32_t c0 = c[0] * (1 << (BITS + 2));
    uint32_t odd = 6967 * c[5 * step] - 5906 * c[7 * step] - 10426 * c[3 * step] + 29692 * c[step];
    out[0] = c0 + odd;
    out[1] = c0 - odd;
}

/* Transform a block to 4 x 4, 2 x 2 or 1 x 1 samples. */
static inline void reduced_inverse_dct(const Block *block)
{
    int side = block->side;
    int more = side == 4 ? 1 : 2; /* bits that `reduce_to_4` and `reduce_to_2` add to BITS */
    uint32_t whole[64], lines[64], sums[4];
    for (int i = 0; i < 64; i++)
        whole[i] = (uint32_t)(int16_t)(block->coefficients[i] * block->quantisation[i]);
    if (side == 1) {
        block->out[0] = to_sample(whole[0], 3);
        return;
    }
    for (int i = 0; i < BLOCK; i++) {
        if (side == 4)
            reduce_to_4(whole + i, BLOCK, sums);
        else
            reduce_to_2(whole + i, BLOCK, sums);
        for (int k = 0; k < side; k++)
            lines[BLOCK * k + i] = (uint32_t)round_off(sums[k], FIRST_SHIFT + more);
    }
    for (int k = 0; k < side; k++) {
        if (side == 4)
            reduce_to_4(lines + BLOCK * k, 1, sums);
        else
            reduce_to_2(lines + BLOCK * k, 1, sums);
        for (int i = 0; i < side; i++)
            block->out[(size_t)k * block->stride + (size_t)i] = to_sample(sums[i], SECOND_SHIFT + more);
    }
}

#endif
