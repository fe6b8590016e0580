/* Antialiased bilinear resizing as torch does it for uint8, to the bit: aten::_upsample_bilinear2d_aa.
 *
 * First each row, then the columns, with the result of the first rounded to 8 bits. A pixel of the output is the mean
 * of the input's pixels around its centre, weighted by a triangle whose half base is the larger of the two scales'
 * pixels; the weights of an axis have 16 bits, of which as many as possible stand behind the point.
 */
#include "pixels.h"

#include <math.h>
#include <string.h>

#if defined __AVX2__
#include <immintrin.h>
#elif defined DATAPIPE_NEON
#include <arm_neon.h>
#endif

enum { MAX_PRECISION = 22 }; /* bits behind the point */
enum { SLACK = 64 };         /* bytes between parts of the memory: vectors reach beyond them */

/* The weights along one axis: of `out` pixels, `taps` each, of which `count` count. */
typedef struct {
    int in, out, taps, most; /* most: the largest `count` */
    int precision;
    int32_t *first, *count;
    int16_t *weights; /* followed by zeros where there are fewer than `taps` */
    double *exact;
} Axis;

static size_t aligned(size_t size)
{
    return (size + 63) / 64 * 64;
}

static Axis axis_of(int in, int out)
{
    double scale = (double)in / out;
    return (Axis){.in = in, .out = out, .taps = (int)ceil(scale >= 1 ? scale : 1) * 2 + 1};
}

static size_t room_for_axis(const Axis *axis)
{
    size_t out = (size_t)axis->out, weights = out * (size_t)axis->taps;
    return 2 * aligned(out * sizeof(int32_t)) + aligned(weights * sizeof(int16_t) + SLACK) +
           aligned(weights * sizeof(double));
}

static void fill_axis(Axis *axis, uint8_t *room)
{
    size_t out = (size_t)axis->out, total = out * (size_t)axis->taps;
    axis->first = (int32_t *)(void *)room;
    axis->count = (int32_t *)(void *)(room += aligned(out * sizeof(int32_t)));
    axis->exact = (double *)(void *)(room += aligned(out * sizeof(int32_t)));
    axis->weights = (int16_t *)(void *)(room + aligned(total * sizeof(double)));
    double scale = (double)axis->in / axis->out, support = scale >= 1 ? scale : 1, largest = 0;
    double inverse = scale >= 1 ? 1 / scale : 1;
    axis->most = 1;
    for (int i = 0; i < axis->out; i++) {
        double centre = scale * (i + 0.5), sum = 0, *exact = axis->exact + (size_t)i * (size_t)axis->taps;
        int first = (int)(centre - support + 0.5), end = (int)(centre + support + 0.5);
        first = first > 0 ? first : 0;
        end = end < axis->in ? end : axis->in;
        int count = end - first < axis->taps ? end - first : axis->taps;
        for (int j = 0; j < count; j++) {
            double distance = fabs((j + first - centre + 0.5) * inverse);
            exact[j] = distance < 1 ? 1 - distance : 0;
            sum += exact[j];
        }
        for (int j = 0; j < count; j++) {
            exact[j] = sum != 0 ? exact[j] / sum : 0;
            largest = exact[j] > largest ? exact[j] : largest;
        }
        axis->first[i] = first;
        axis->count[i] = count;
        axis->most = count > axis->most ? count : axis->most;
    }
    axis->precision = 1; /* at least, for `rounded`; more, since no weight is above 1 */
    while (axis->precision < MAX_PRECISION && (int)(0.5 + largest * (1 << (axis->precision + 1))) < 1 << 15)
        axis->precision++;
    for (int i = 0; i < axis->out; i++) {
        size_t at = (size_t)i * (size_t)axis->taps;
        for (int j = 0; j < axis->taps; j++) {
            double weight = j < axis->count[i] ? axis->exact[at + (size_t)j] : 0;
            axis->weights[at + (size_t)j] = (int16_t)(0.5 + weight * (1 << axis->precision));
        }
    }
}

static uint8_t rounded(int32_t sum, int precision)
{
    sum = (sum + (1 << (precision - 1))) >> precision;
    return (uint8_t)(sum < 0 ? 0 : sum > 255 ? 255 : sum);
}

/* --- along rows --- */

/* `channels` is a constant where this is inlined. */
static inline __attribute__((always_inline)) void resize_row(const Axis *axis, bool flip, int channels,
                                                             const uint8_t *row, uint8_t *out)
{
    for (int i = 0; i < axis->out; i++) {
        int from = flip ? axis->out - 1 - i : i;
        const int16_t *weights = axis->weights + (size_t)from * (size_t)axis->taps;
        const uint8_t *pixel = row + axis->first[from] * channels;
        int32_t sums[3] = {0};
        for (int j = 0; j < axis->count[from]; j++, pixel += channels)
            for (int c = 0; c < channels; c++)
                sums[c] += weights[j] * pixel[c];
        for (int c = 0; c < channels; c++)
            *out++ = rounded(sums[c], axis->precision);
    }
}

/* What vectors need for rows of three channels: for each output pixel, in the order in which it is stored. */
typedef struct {
    int out, pairs, precision;
    int32_t *at;      /* bytes: where its first input pixel begins */
    int16_t *weights; /* in pairs: of two output pixels, each pair of weights four times, one after the other */
} RowPlan;

enum { TOGETHER = 4 }; /* output pixels: the last are repeated to have a multiple of it */

static size_t room_for_plan(const Axis *axis)
{
    size_t count = ((size_t)axis->out + TOGETHER - 1) / TOGETHER * TOGETHER, pairs = ((size_t)axis->taps + 1) / 2;
    return aligned(count * sizeof(int32_t)) + aligned(count * pairs * 16) + SLACK;
}

#if defined __AVX2__

static void fill_plan(RowPlan *plan, const Axis *axis, bool flip, uint8_t *room)
{
    int count = (axis->out + TOGETHER - 1) / TOGETHER * TOGETHER, pairs = (axis->most + 1) / 2;
    *plan = (RowPlan){axis->out, pairs, axis->precision, (int32_t *)(void *)room, NULL};
    plan->weights = (int16_t *)(void *)(room + aligned((size_t)count * sizeof(int32_t)));
    for (int i = 0; i < count; i++) {
        int stored = i < axis->out ? i : axis->out - 1, from = flip ? axis->out - 1 - stored : stored;
        const int16_t *weights = axis->weights + (size_t)from * (size_t)axis->taps;
        plan->at[i] = axis->first[from] * 3;
        int16_t *two = plan->weights + (size_t)(i / 2) * (size_t)pairs * 16 + (i % 2) * 8;
        for (int j = 0; j < pairs; j++, two += 16)
            for (int k = 0; k < 8; k += 2) {
                two[k] = weights[2 * j];
                two[k + 1] = 2 * j + 1 < axis->taps ? weights[2 * j + 1] : (int16_t)0;
            }
    }
}

/* Three channels of two neighbouring pixels, in each half of the vector: their bytes as pairs of 16 bits. */
static inline __m256i two_pixels(const uint8_t *left, const uint8_t *right)
{
    const __m256i spread = _mm256_setr_epi8(0, -1, 3, -1, 1, -1, 4, -1, 2, -1, 5, -1, -1, -1, -1, -1,
                                            0, -1, 3, -1, 1, -1, 4, -1, 2, -1, 5, -1, -1, -1, -1, -1);
    __m128i low = _mm_loadl_epi64((const __m128i *)(const void *)left);
    __m128i high = _mm_loadl_epi64((const __m128i *)(const void *)right);
    return _mm256_shuffle_epi8(_mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1), spread);
}

/* Resize four output pixels at a time. `pairs` is a constant where this is inlined. */
static inline __attribute__((always_inline)) void resize_pairs(const RowPlan *plan, int pairs, const uint8_t *row,
                                                               uint8_t *out)
{
    const __m256i half = _mm256_set1_epi32(1 << (plan->precision - 1));
    const __m128i shift = _mm_cvtsi32_si128(plan->precision);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 0, 4, 1, 5); /* of the pixels after packing */
    const __m128i dense = _mm_setr_epi8(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1);
    const __m256i *weights = (const __m256i *)(const void *)plan->weights;
    for (int i = 0; i < plan->out; i += TOGETHER, weights += 2 * pairs) {
        const uint8_t *from[TOGETHER];
        for (int k = 0; k < TOGETHER; k++)
            from[k] = row + plan->at[i + k];
        __m256i a = half, b = half;
        for (int j = 0; j < pairs; j++) {
            __m256i first = two_pixels(from[0] + 6 * j, from[1] + 6 * j);
            __m256i second = two_pixels(from[2] + 6 * j, from[3] + 6 * j);
            a = _mm256_add_epi32(a, _mm256_madd_epi16(first, _mm256_load_si256(weights + j)));
            b = _mm256_add_epi32(b, _mm256_madd_epi16(second, _mm256_load_si256(weights + pairs + j)));
        }
        __m256i packed = _mm256_packs_epi32(_mm256_sra_epi32(a, shift), _mm256_sra_epi32(b, shift));
        packed = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(packed, packed), order);
        _mm_storeu_si128((__m128i *)(void *)(out + 3 * i), _mm_shuffle_epi8(_mm256_castsi256_si128(packed), dense));
    }
}

static void resize_rgb_row(const RowPlan *plan, const uint8_t *row, uint8_t *out)
{
    if (plan->pairs == 1)
        resize_pairs(plan, 1, row, out);
    else if (plan->pairs == 2)
        resize_pairs(plan, 2, row, out);
    else if (plan->pairs == 3)
        resize_pairs(plan, 3, row, out);
    else
        resize_pairs(plan, plan->pairs, row, out);
}

#elif defined DATAPIPE_NEON

/* Sums to bytes: shifted by -`right`, and limited to 0 and 255. */
static inline uint8x8_t packed(int32x4_t low, int32x4_t high, int32x4_t right)
{
    return vqmovun_s16(vcombine_s16(vqmovn_s32(vshlq_s32(low, right)), vqmovn_s32(vshlq_s32(high, right))));
}

/* Resize a row of three channels, two input pixels at a time: they are in six of eight bytes. */
static void resize_rgb_row(const Axis *axis, bool flip, const uint8_t *row, uint8_t *out)
{
    const int32x4_t half = vdupq_n_s32(1 << (axis->precision - 1)), right = vdupq_n_s32(-axis->precision);
    for (int i = 0; i < axis->out; i++, out += 3) {
        int from = flip ? axis->out - 1 - i : i, count = axis->count[from];
        const int16_t *weights = axis->weights + (size_t)from * (size_t)axis->taps;
        const uint8_t *pixel = row + axis->first[from] * 3;
        int32x4_t sum = half;
        for (int j = 0; j < count; j += 2, pixel += 6) {
            int16x8_t two = vreinterpretq_s16_u16(vmovl_u8(vld1_u8(pixel)));
            sum = vmlal_n_s16(sum, vget_low_s16(two), weights[j]);
            sum = vmlal_n_s16(sum, vget_low_s16(vextq_s16(two, two, 3)), j + 1 < count ? weights[j + 1] : (int16_t)0);
        }
        uint8_t pixels[8];
        vst1_u8(pixels, packed(sum, sum, right));
        memcpy(out, pixels, 3);
    }
}

#endif

/* Resize each row; the results lie `stride` bytes apart, and what is behind them is overwritten. */
static void resize_rows(const Rows *rows, const Axis *axis, bool flip, uint8_t *row, uint8_t *plan_room, size_t stride,
                        uint8_t *out)
{
#if defined __AVX2__
    RowPlan plan;
    if (rows->channels == 3) {
        fill_plan(&plan, axis, flip, plan_room);
        for (int y = 0; y < rows->height; y++, out += stride) {
            read_row(rows, y, row);
            resize_rgb_row(&plan, row, out);
        }
        return;
    }
#else
    (void)plan_room;
#endif
    for (int y = 0; y < rows->height; y++, out += stride) {
        read_row(rows, y, row);
        if (rows->channels == 3)
#if defined DATAPIPE_NEON
            resize_rgb_row(axis, flip, row, out);
#else
            resize_row(axis, flip, 3, row, out);
#endif
        else
            resize_row(axis, flip, 1, row, out);
    }
}

/* --- along columns --- */

/* The weighted sum of rows that lie `stride` bytes apart, of `count` bytes each. */
static void add_rows(const uint8_t *rows, size_t stride, const int16_t *weights, int taps, int precision, size_t count,
                     uint8_t *out)
{
#if defined __AVX2__
    const __m256i half = _mm256_set1_epi32(1 << (precision - 1));
    const __m128i shift = _mm_cvtsi32_si128(precision);
    for (size_t x = 0; x < count; x += 16) {
        __m256i low = half, high = half;
        const uint8_t *row = rows + x;
        for (int j = 0; j < taps; j += 2, row += 2 * stride) {
            bool has_second = j + 1 < taps;
            uint32_t two = (uint16_t)weights[j] | (uint32_t)(has_second ? (uint16_t)weights[j + 1] : 0) << 16;
            const __m256i factors = _mm256_set1_epi32((int)two);
            const void *next = has_second ? row + stride : row;
            __m256i a = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(const void *)row));
            __m256i b = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)next));
            low = _mm256_add_epi32(low, _mm256_madd_epi16(_mm256_unpacklo_epi16(a, b), factors));
            high = _mm256_add_epi32(high, _mm256_madd_epi16(_mm256_unpackhi_epi16(a, b), factors));
        }
        __m256i sums = _mm256_packs_epi32(_mm256_sra_epi32(low, shift), _mm256_sra_epi32(high, shift));
        sums = _mm256_permute4x64_epi64(_mm256_packus_epi16(sums, sums), 0xd8);
        if (count - x >= 16) {
            _mm_storeu_si128((__m128i *)(void *)(out + x), _mm256_castsi256_si128(sums));
        } else {
            uint8_t rest[16];
            _mm_storeu_si128((__m128i *)(void *)rest, _mm256_castsi256_si128(sums));
            memcpy(out + x, rest, count - x);
        }
    }
#elif defined DATAPIPE_NEON
    const int32x4_t half = vdupq_n_s32(1 << (precision - 1)), right = vdupq_n_s32(-precision);
    for (size_t x = 0; x < count; x += 8) {
        int32x4_t low = half, high = half;
        for (int j = 0; j < taps; j++) {
            int16x8_t bytes = vreinterpretq_s16_u16(vmovl_u8(vld1_u8(rows + (size_t)j * stride + x)));
            low = vmlal_n_s16(low, vget_low_s16(bytes), weights[j]);
            high = vmlal_n_s16(high, vget_high_s16(bytes), weights[j]);
        }
        uint8_t sums[8];
        vst1_u8(sums, packed(low, high, right));
        memcpy(out + x, sums, count - x < 8 ? count - x : 8);
    }
#else
    for (size_t start = 0; start < count; start += SLACK) {
        size_t some = count - start < SLACK ? count - start : SLACK;
        int32_t sums[SLACK] = {0};
        for (int j = 0; j < taps; j++)
            for (size_t x = 0; x < SLACK; x++)
                sums[x] += weights[j] * rows[(size_t)j * stride + start + x];
        for (size_t x = 0; x < some; x++)
            out[start + x] = rounded(sums[x], precision);
    }
#endif
}

bool resize(const Rows *rows, bool flip, int out_size, uint8_t *out, Memory *memory)
{
    Axis across = axis_of(rows->width, out_size), down = axis_of(rows->height, out_size);
    size_t channels = (size_t)rows->channels, row_bytes = (size_t)out_size * channels, stride = aligned(row_bytes + SLACK);
    size_t sizes[] = {room_for_axis(&across), room_for_axis(&down), room_for_plan(&across),
                      aligned((size_t)(rows->width + across.taps) * channels + ROW_SLACK), /* vectors weigh all taps */
                      (size_t)rows->height * stride};
    if ((size_t)rows->height > MAX_WINDOW_BYTES / stride)
        return false;
    uint8_t *room = make_room(memory, sizes[0] + sizes[1] + sizes[2] + sizes[3] + sizes[4] + SLACK);
    if (!room)
        return false;
    uint8_t *plan = room + sizes[0] + sizes[1], *row = plan + sizes[2], *narrow = row + sizes[3];
    fill_axis(&across, room);
    fill_axis(&down, room + sizes[0]);
    resize_rows(rows, &across, flip, row, plan, stride, narrow);
    for (int i = 0; i < out_size; i++) {
        const int16_t *weights = down.weights + (size_t)i * (size_t)down.taps;
        add_rows(narrow + (size_t)down.first[i] * stride, stride, weights, down.count[i], down.precision, row_bytes,
                 out + (size_t)i * row_bytes);
    }
    return true;
}
