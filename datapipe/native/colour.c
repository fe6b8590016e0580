/* Samples to pixels, as libjpeg does it to the bit: chroma interpolated ("fancy upsampling"), YCbCr to RGB (JFIF 1.02).
 *
 * Interpolation gives the nearer of two samples three quarters. Rounding alternates, up and down, from pixel to pixel.
 */
#include "pixels.h"

#include <string.h>

#if defined __AVX2__
#include <immintrin.h>
#elif defined DATAPIPE_NEON
#include <arm_neon.h>
#endif

enum { NARROW = 2 }; /* samples of chroma across: of an image as narrow, libjpeg repeats samples */

bool place_chroma(Rows *rows, Memory *memory)
{
    size_t samples = (size_t)rows->width / 2 + 2, row = 2 * samples + ROW_SLACK;
    size_t sums = sizeof(uint16_t) * (samples + 2 + ROW_SLACK);
    uint8_t *room = make_room(memory, sums + 2 * row);
    if (!room)
        return false;
    rows->sums = (uint16_t *)(void *)room + 1;
    rows->chroma[0] = room + sums;
    rows->chroma[1] = room + sums + row;
    return true;
}

/* Sums of a row of chroma and the next nearest row, 3 to 1; of a single row, its samples. */
static void add_rows(const uint8_t *restrict near, const uint8_t *restrict far, int count, uint16_t *restrict sums)
{
    if (!far)
        for (int i = 0; i < count; i++)
            sums[i] = near[i];
    else
        for (int i = 0; i < count; i++)
            sums[i] = (uint16_t)(3 * near[i] + far[i]);
}

/* Two pixels of each sum: 3 parts of it to 1 of its neighbour. */
static void double_columns(const uint16_t *restrict sums, int count, int up, int down, int shift, uint8_t *restrict out)
{
    for (int i = 0; i < count; i++) {
        uint16_t three = (uint16_t)(3 * sums[i]);
        out[2 * i] = (uint8_t)((uint16_t)(three + sums[i - 1] + up) >> shift);
        out[2 * i + 1] = (uint8_t)((uint16_t)(three + sums[i + 1] + down) >> shift);
    }
}

/* Return row `y` of a component, from the box's left on, with a sample for each pixel. */
static const uint8_t *chroma_row(const Rows *rows, int component, int y)
{
    const Window *window = rows->window;
    int across = window->across, down = window->down, width = (window->width + across - 1) / across;
    int row = y / down, top = window->top / down, first = rows->left / across;
    size_t stride = window->stride[component];
    /* the sample of the box's first pixel, in the component's row 0: not for use above the window */
    const uint8_t *start = window->samples[component] + (first - window->left / across);
    const uint8_t *near = start + (size_t)(row - top) * stride, *far = NULL;
    uint8_t *out = rows->chroma[component - 1];
    int count = (rows->left + rows->width - 1) / across - first + 1;

    if (across == 1 && down == 1)
        return near;
    if (down == 2 && (across == 1 || width > NARROW)) {
        int last = (window->height + 1) / 2 - 1, other = y & 1 ? row + 1 : row - 1;
        other = other < 0 ? 0 : other > last ? last : other;
        far = start + (size_t)(other - top) * stride;
    }
    if (across == 4 || (across == 2 && width <= NARROW)) {
        for (int i = 0; i < rows->width; i++)
            out[i] = near[(rows->left + i) / across - first];
        return out;
    }
    if (across == 1 && far) {
        int round = y & 1 ? 2 : 1;
        for (int i = 0; i < count; i++)
            out[i] = (uint8_t)((3 * near[i] + far[i] + round) >> 2);
        return out;
    }
    /* neighbours that the image has. Where the window lacks one, it is what lies beside the row, and so is a pixel that is
     * not the box's: the window has a margin of a pixel */
    bool has_left = first > 0, has_right = first + count < width;
    uint16_t *sums = rows->sums;
    add_rows(near - has_left, far ? far - has_left : NULL, count + has_left + has_right, sums - has_left);
    if (!has_left)
        sums[-1] = sums[0];
    if (!has_right)
        sums[count] = sums[count - 1];
    if (far)
        double_columns(sums, count, 8, 7, 4, out);
    else
        double_columns(sums, count, 1, 2, 2, out);
    return out + (rows->left & 1);
}

/* YCbCr to RGB, in 16-bit fixed point: R = Y + 1.402 Cr, G = Y - 0.344136 Cb - 0.714136 Cr, B = Y + 1.772 Cb. */
enum { R_CR = 91881, G_CB = -22554, G_CR = -46802, B_CB = 116130, HALF = 1 << 15, ONE = 1 << 16 };

#if defined __AVX2__

/* 16 pixels of three planes, interleaved: 48 bytes. */
static inline void store_interleaved(__m128i r, __m128i g, __m128i b, uint8_t *out)
{
    /* byte 3 * i + c of the pixels is byte i of plane c: one shuffle of each plane for each 16 bytes */
    const __m128i r0 = _mm_setr_epi8(0, -1, -1, 1, -1, -1, 2, -1, -1, 3, -1, -1, 4, -1, -1, 5);
    const __m128i g0 = _mm_setr_epi8(-1, 0, -1, -1, 1, -1, -1, 2, -1, -1, 3, -1, -1, 4, -1, -1);
    const __m128i b0 = _mm_setr_epi8(-1, -1, 0, -1, -1, 1, -1, -1, 2, -1, -1, 3, -1, -1, 4, -1);
    const __m128i r1 = _mm_setr_epi8(-1, -1, 6, -1, -1, 7, -1, -1, 8, -1, -1, 9, -1, -1, 10, -1);
    const __m128i g1 = _mm_setr_epi8(5, -1, -1, 6, -1, -1, 7, -1, -1, 8, -1, -1, 9, -1, -1, 10);
    const __m128i b1 = _mm_setr_epi8(-1, 5, -1, -1, 6, -1, -1, 7, -1, -1, 8, -1, -1, 9, -1, -1);
    const __m128i r2 = _mm_setr_epi8(-1, 11, -1, -1, 12, -1, -1, 13, -1, -1, 14, -1, -1, 15, -1, -1);
    const __m128i g2 = _mm_setr_epi8(-1, -1, 11, -1, -1, 12, -1, -1, 13, -1, -1, 14, -1, -1, 15, -1);
    const __m128i b2 = _mm_setr_epi8(10, -1, -1, 11, -1, -1, 12, -1, -1, 13, -1, -1, 14, -1, -1, 15);
    __m128i first = _mm_or_si128(_mm_or_si128(_mm_shuffle_epi8(r, r0), _mm_shuffle_epi8(g, g0)), _mm_shuffle_epi8(b, b0));
    __m128i second = _mm_or_si128(_mm_or_si128(_mm_shuffle_epi8(r, r1), _mm_shuffle_epi8(g, g1)), _mm_shuffle_epi8(b, b1));
    __m128i third = _mm_or_si128(_mm_or_si128(_mm_shuffle_epi8(r, r2), _mm_shuffle_epi8(g, g2)), _mm_shuffle_epi8(b, b2));
    _mm_storeu_si128((__m128i *)out, first);
    _mm_storeu_si128((__m128i *)(out + 16), second);
    _mm_storeu_si128((__m128i *)(out + 32), third);
}

static inline __m128i saturate(__m256i values)
{
    return _mm_packus_epi16(_mm256_castsi256_si128(values), _mm256_extracti128_si256(values, 1));
}

/* value * factor / ONE, rounded; |factor| < HALF */
static inline __m256i scale(__m256i value, int factor)
{
    __m256i twice = _mm256_mulhi_epi16(_mm256_add_epi16(value, value), _mm256_set1_epi16((int16_t)factor));
    return _mm256_srai_epi16(_mm256_add_epi16(twice, _mm256_set1_epi16(1)), 1);
}

static inline __m256i green_part(__m256i pairs)
{
    const __m256i factors = _mm256_set1_epi32((int)((uint16_t)G_CB | (uint32_t)(ONE + G_CR) << 16));
    return _mm256_srai_epi32(_mm256_add_epi32(_mm256_madd_epi16(pairs, factors), _mm256_set1_epi32(HALF)), 16);
}

static void convert(const uint8_t *y, const uint8_t *cb, const uint8_t *cr, int count, uint8_t *out)
{
    const __m256i middle = _mm256_set1_epi16(128);
    for (int i = 0; i < count; i += 16) {
        __m256i luma = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(y + i)));
        __m256i blue = _mm256_sub_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(cb + i))), middle);
        __m256i red = _mm256_sub_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(cr + i))), middle);
        /* whole multiples are taken out of the factors, which then fit into 16 bits: 1.402 = 1 + 0.402 */
        __m256i r = _mm256_add_epi16(_mm256_add_epi16(luma, red), scale(red, R_CR - ONE));
        __m256i b = _mm256_add_epi16(_mm256_add_epi16(luma, _mm256_add_epi16(blue, blue)), scale(blue, B_CB - 2 * ONE));
        __m256i greens = _mm256_packs_epi32(green_part(_mm256_unpacklo_epi16(blue, red)),
                                            green_part(_mm256_unpackhi_epi16(blue, red)));
        __m256i g = _mm256_sub_epi16(_mm256_add_epi16(luma, greens), red);
        store_interleaved(saturate(r), saturate(g), saturate(b), out + 3 * i);
    }
}

#elif defined DATAPIPE_NEON

/* (value * factor + other * other_factor) / ONE, rounded */
static inline int16x8_t scale(int16x8_t value, int factor, int16x8_t other, int other_factor)
{
    int32x4_t low = vmull_n_s16(vget_low_s16(value), (int16_t)factor);
    int32x4_t high = vmull_n_s16(vget_high_s16(value), (int16_t)factor);
    low = vmlal_n_s16(low, vget_low_s16(other), (int16_t)other_factor);
    high = vmlal_n_s16(high, vget_high_s16(other), (int16_t)other_factor);
    return vcombine_s16(vrshrn_n_s32(low, 16), vrshrn_n_s32(high, 16));
}

static inline int16x8_t widened(const uint8_t *samples)
{
    return vreinterpretq_s16_u16(vmovl_u8(vld1_u8(samples)));
}

static void convert(const uint8_t *y, const uint8_t *cb, const uint8_t *cr, int count, uint8_t *out)
{
    const int16x8_t middle = vdupq_n_s16(128);
    for (int i = 0; i < count; i += 8) {
        int16x8_t luma = widened(y + i);
        int16x8_t blue = vsubq_s16(widened(cb + i), middle), red = vsubq_s16(widened(cr + i), middle);
        /* whole multiples are taken out of the factors, which then fit into 16 bits: 1.402 = 1 + 0.402 */
        int16x8_t r = vaddq_s16(vaddq_s16(luma, red), scale(red, R_CR - ONE, red, 0));
        int16x8_t g = vaddq_s16(vsubq_s16(luma, red), scale(blue, G_CB, red, ONE + G_CR));
        int16x8_t b = vaddq_s16(vaddq_s16(luma, vaddq_s16(blue, blue)), scale(blue, B_CB - 2 * ONE, red, 0));
        uint8x8x3_t pixels = {{vqmovun_s16(r), vqmovun_s16(g), vqmovun_s16(b)}};
        vst3_u8(out + 3 * i, pixels);
    }
}

#else

static uint8_t saturate(int value)
{
    return (uint8_t)(value < 0 ? 0 : value > 255 ? 255 : value);
}

static void convert(const uint8_t *y, const uint8_t *cb, const uint8_t *cr, int count, uint8_t *out)
{
    for (int i = 0; i < count; i++, out += 3) {
        int blue = cb[i] - 128, red = cr[i] - 128;
        out[0] = saturate(y[i] + ((R_CR * red + HALF) >> 16));
        out[1] = saturate(y[i] + ((G_CB * blue + G_CR * red + HALF) >> 16));
        out[2] = saturate(y[i] + ((B_CB * blue + HALF) >> 16));
    }
}

#endif

static void interleave(const uint8_t *r, const uint8_t *g, const uint8_t *b, int count, uint8_t *out)
{
    for (int i = 0; i < count; i++, out += 3) {
        out[0] = r[i];
        out[1] = g[i];
        out[2] = b[i];
    }
}

void read_row(const Rows *rows, int y, uint8_t *out)
{
    if (!rows->header) {
        memcpy(out, rows->pixels + (size_t)y * rows->stride, (size_t)rows->width * (size_t)rows->channels);
        return;
    }
    const Window *window = rows->window;
    y += rows->top;
    const uint8_t *first = window->samples[0] + (size_t)(y - window->top) * window->stride[0] + (rows->left - window->left);
    if (rows->channels == 1) {
        memcpy(out, first, (size_t)rows->width);
    } else if (rows->header->components == 1) {
        interleave(first, first, first, rows->width, out);
    } else {
        const uint8_t *second = chroma_row(rows, 1, y), *third = chroma_row(rows, 2, y);
        if (rows->header->is_rgb)
            interleave(first, second, third, rows->width, out);
        else
            convert(first, second, third, rows->width, out);
    }
}
