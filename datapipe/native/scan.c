/* Entropy-coded data to samples (ITU-T T.81, annex F.2): only of the MCUs that a box needs, the others are skipped.
 *
 * Wherever libjpeg would warn of damage on the way, this gives up, and leaves the image to a decoder that tells it.
 */
#include "huffman.h"
#include "idct.h"

#include <assert.h>

#if defined __AVX2__
#include <immintrin.h>
#endif

enum { STUFFING = 0x00 };
/* A block of hostile codes takes at most 16 + 11 + 63 * 26 bits: so far an MCU may read beyond its data. */
enum { MAX_MCU_BYTES = (MAX_LUMA_BLOCKS + 2) * (27 + 63 * 26) / 8 + READ_AHEAD };

typedef struct {
    const Header *header;
    const Window *window;
    const Huffman *dc[MAX_COMPONENTS], *ac[MAX_COMPONENTS];
    int columns, rows; /* MCUs of the image */
    _Alignas(32) int16_t quantisation[MAX_COMPONENTS][64]; /* row by row */
    const uint8_t *at, *end; /* of the data: what was not read yet */
    Memory *entropy;
    bool is_check; /* no MCU is in the window, and yet all are read */
} Scan;

/* The decoder's state between two restart markers. */
typedef struct {
    BitReader reader;
    const uint8_t *end; /* of the data without stuffing */
    int predictions[MAX_COMPONENTS];
    unsigned damage;
} Piece;

static inline unsigned decode_dc(BitReader *reader, const Huffman *table, int *prediction)
{
    Entry code = find_code(table, reader->bits);
    *prediction = (int16_t)(*prediction + additional(reader->bits, code));
    consume(reader, code & 255);
    return code >> 24; /* damage */
}

/* Decode the next coefficient of a block, or two, and return its place in zigzag order. */
static inline unsigned decode_ac(BitReader *reader, const Huffman *table, unsigned place, int16_t *block)
{
    uint32_t known = table->coefficients[reader->bits >> (64 - LOOKUP_BITS)];
    unsigned first = place + (known >> 4 & 63);
    refill(reader); /* while that is being looked up: at least 29 bits are left of the last time */
    if (__builtin_expect(first < 63, 1)) {
        block[ZIGZAG[first]] = (int16_t)((int32_t)(known << 8) >> 25);
        place += known >> 10 & 127;
        block[ZIGZAG[place]] = (int16_t)((int32_t)known >> 24);
        consume(reader, known & 15);
    } else {
        Entry code = find_code(table, reader->bits);
        place += code >> 24;
        block[ZIGZAG[place]] = (int16_t)additional(reader->bits, code);
        consume(reader, code & 255);
    }
    return place;
}

/* Decode a block into 64 zeros and one more (F.2.2.2). */
static inline void decode_block(Piece *piece, const Huffman *dc, const Huffman *ac, int component, int16_t *block)
{
    BitReader reader = piece->reader;
    refill(&reader);
    unsigned damage = decode_dc(&reader, dc, &piece->predictions[component]);
    block[0] = (int16_t)piece->predictions[component];
    unsigned place = 0;
    do
        place = decode_ac(&reader, ac, place, block);
    while (place < 63);
    piece->reader = reader;
    piece->damage |= damage | is_damaged(place);
}

/* Read a block of which only the DC coefficient counts, for the next ones. */
static inline void skip_block(Piece *piece, const Huffman *dc, const Huffman *ac, int component)
{
    BitReader reader = piece->reader;
    refill(&reader);
    unsigned damage = decode_dc(&reader, dc, &piece->predictions[component]);
    unsigned place = 0;
    for (;;) {
        unsigned codes = ac->skips[reader.bits >> (64 - SKIP_BITS)], advance = codes >> 6 & 127;
        refill(&reader); /* while that is being looked up: 34 bits are left of the last time */
        if (__builtin_expect(place + advance < 63, 1)) {
            place += advance;
            consume(&reader, codes & 63);
            if (codes >> 13)
                break;
        } else {
            Entry code = find_code(ac, reader.bits);
            place += code >> 24;
            consume(&reader, code & 255);
            if (place >= 63) {
                damage |= is_damaged(place);
                break;
            }
        }
    }
    piece->reader = reader;
    piece->damage |= damage;
}

static void decode_mcu(const Scan *scan, Piece *piece, int column, int row)
{
    const Header *header = scan->header;
    const Window *window = scan->window;
    size_t x = (size_t)(column - window->first_column), y = (size_t)(row - window->first_row);
    _Alignas(32) int16_t coefficients[MAX_LUMA_BLOCKS + 2][80]; /* 64, what lies OUTSIDE, and up to 32 bytes */
    Block blocks[MAX_LUMA_BLOCKS + 2];
    int count = 0;
    for (int component = 0; component < header->components; component++) {
        int across = component ? 1 : header->across, down = component ? 1 : header->down;
        size_t side = (size_t)window->block[component], stride = window->stride[component];
        uint8_t *out = window->samples[component] + y * side * (size_t)down * stride + x * side * (size_t)across;
        for (int i = 0; i < across * down; i++, count++) {
            memset(coefficients[count], 0, 64 * sizeof(int16_t));
            decode_block(piece, scan->dc[component], scan->ac[component], component, coefficients[count]);
            uint8_t *corner = out + (size_t)(i / across) * side * stride + (size_t)(i % across) * side;
            blocks[count] = (Block){coefficients[count], scan->quantisation[component], corner, stride, (int)side};
        }
    }
    for (int i = 0; i < count;) {
        if (blocks[i].side < BLOCK) {
            reduced_inverse_dct(&blocks[i++]);
        } else { /* two at once; the last may be alone */
            inverse_dct(&blocks[i], &blocks[i + 1 < count ? i + 1 : i]);
            i += 2;
        }
    }
}

static void skip_mcu(const Scan *scan, Piece *piece)
{
    const Header *header = scan->header;
    for (int i = 0; i < header->across * header->down; i++)
        skip_block(piece, scan->dc[0], scan->ac[0], 0);
    for (int i = 1; i < header->components; i++)
        skip_block(piece, scan->dc[i], scan->ac[i], i);
}

/* Decode MCUs from `first` to `end` - 1, counted row by row. False if they are damaged. */
static bool decode_mcus(const Scan *scan, Piece *piece, int first, int end)
{
    const Window *window = scan->window;
    int column = first % scan->columns, row = first / scan->columns;
    for (int i = first; i < end; i++) {
        bool is_within = row >= window->first_row && column >= window->first_column && column < window->end_column;
        if (is_within)
            decode_mcu(scan, piece, column, row);
        else if (row == window->end_row - 1 && column >= window->end_column)
            return true; /* the window is full */
        else
            skip_mcu(scan, piece);
        if (piece->damage || piece->reader.next - (piece->reader.count >> 3) > piece->end)
            return false;
        if (++column == scan->columns) {
            column = 0;
            row++;
        }
    }
    return true;
}

/* Copy entropy-coded data up to a marker, without stuffed zeros (B.1.1.5). Returns the end of the copy.
 *
 * There is room for 32 bytes more than the data. `*at` is moved to the marker, or to `end` if there is none.
 */
static uint8_t *copy_without_stuffing(const uint8_t **at, const uint8_t *end, uint8_t *out)
{
    const uint8_t *from = *at;
#if defined __AVX2__
    while (end - from > 32) {
        __m256i bytes = _mm256_loadu_si256((const __m256i *)from);
        unsigned found = (unsigned)_mm256_movemask_epi8(_mm256_cmpeq_epi8(bytes, _mm256_set1_epi8(-1)));
        _mm256_storeu_si256((__m256i *)out, bytes);
        int count = found ? __builtin_ctz(found) : 32;
        from += count;
        out += count;
        if (!found)
            continue;
        if (from[1] != STUFFING) {
            *at = from;
            return out;
        }
        *out++ = 0xff;
        from += 2;
    }
#endif
    while (from < end) {
        const uint8_t *marker = memchr(from, 0xff, (size_t)(end - from));
        size_t count = (size_t)((marker ? marker : end) - from);
        memcpy(out, from, count);
        out += count;
        from += count;
        if (end - from < 2 || from[1] != STUFFING)
            break;
        *out++ = 0xff;
        from += 2;
    }
    *at = from;
    return out;
}

/* Find the next marker in entropy-coded data; `end` if there is none. */
static const uint8_t *find_marker(const uint8_t *at, const uint8_t *end)
{
    while (end - at > 1) {
        at = memchr(at, 0xff, (size_t)(end - at));
        if (!at || end - at < 2)
            break;
        if (at[1] != STUFFING)
            return at;
        at += 2;
    }
    return end;
}

/* Whether the window has any of the MCUs from `first` to `end` - 1. */
static bool has_any(const Window *window, int columns, int first, int end)
{
    int first_row = first / columns, last_row = (end - 1) / columns;
    for (int row = first_row; row <= last_row; row++) {
        int first_column = row == first_row ? first % columns : 0;
        int end_column = row == last_row ? (end - 1) % columns + 1 : columns;
        if (row >= window->first_row && row < window->end_row && first_column < window->end_column &&
            end_column > window->first_column)
            return true;
    }
    return false;
}

/* Decode the pieces between restart markers (E.2.4), or the only one, until the window is full. */
static bool decode_pieces(Scan *scan)
{
    const Window *window = scan->window;
    int needed = window->end_row * scan->columns, total = scan->rows * scan->columns;
    int interval = scan->header->restart_interval ? scan->header->restart_interval : total;
    uint8_t *room = make_room(scan->entropy, (size_t)(scan->end - scan->at) + MAX_MCU_BYTES + 64);
    if (!room)
        return false;
    for (int first = 0, number = 0; first < needed; first += interval, number++) {
        int end = interval < total - first ? first + interval : total;
        if (scan->is_check || has_any(window, scan->columns, first, end)) {
            Piece piece = {{room, 0, 0}, copy_without_stuffing(&scan->at, scan->end, room), {0}, 0};
            memset(room + (piece.end - room), 0, MAX_MCU_BYTES); /* what lies behind counts for nothing */
            if (!decode_mcus(scan, &piece, first, end < needed ? end : needed))
                return false;
            if (scan->is_check && piece.end - (piece.reader.next - (piece.reader.count >> 3)) > 0)
                return false; /* bytes that belong to no MCU */
        } else {
            scan->at = find_marker(scan->at, scan->end);
        }
        int marker = end == total ? EOI : RST0 + (number & 7);
        if (scan->end - scan->at < 2 || scan->at[1] != marker)
            return false;
        scan->at += 2;
    }
    return true;
}

/* Choose the MCUs that cover a box with a margin of a pixel: chroma is interpolated from the next sample.
 *
 * At a smaller scale libjpeg shrinks blocks of luma, and blocks of chroma only as far as both have the same size then.
 */
static void choose_window(const Scan *scan, Box box, int scale, Window *window)
{
    const Header *header = scan->header;
    int width = BLOCK * header->across, height = BLOCK * header->down; /* of an MCU, pixels */
    int left = box.left > 0 ? box.left - 1 : 0, top = box.top > 0 ? box.top - 1 : 0;
    int right = box.left + box.width + 1, bottom = box.top + box.height + 1;
    window->first_column = left / width;
    window->first_row = top / height;
    window->end_column = right < header->width ? (right + width - 1) / width : scan->columns;
    window->end_row = bottom < header->height ? (bottom + height - 1) / height : scan->rows;
    window->scale = scale = header->across == header->down ? scale : 1;
    window->left = window->first_column * width / scale;
    window->top = window->first_row * height / scale;
    window->width = (header->width + scale - 1) / scale;
    window->height = (header->height + scale - 1) / scale;
    window->across = scale > 1 ? 1 : header->across;
    window->down = scale > 1 ? 1 : header->down;
    for (int i = 0; i < header->components; i++)
        window->block[i] = BLOCK / scale * (i && scale > 1 ? header->across : 1);
}

/* Lay out the window's samples. Rows are 64 bytes longer than needed, before and behind: vectors reach beyond them. */
static bool place_samples(const Header *header, Memory *memory, Window *window)
{
    size_t columns = (size_t)(window->end_column - window->first_column);
    size_t rows = (size_t)(window->end_row - window->first_row), sizes[MAX_COMPONENTS], total = 64;
    for (int i = 0; i < header->components; i++) {
        size_t across = i ? 1 : (size_t)header->across, down = i ? 1 : (size_t)header->down;
        size_t side = (size_t)window->block[i];
        window->stride[i] = (columns * side * across + 127) / 64 * 64;
        sizes[i] = window->stride[i] * rows * side * down;
        total += sizes[i];
    }
    if (total > MAX_WINDOW_BYTES)
        return false;
    uint8_t *room = make_room(memory, total + 64);
    if (!room)
        return false;
    room += 64;
    for (int i = 0; i < header->components; i++) {
        window->samples[i] = room;
        room += sizes[i];
    }
    return true;
}

/* Prepare for reading a scan. False if a table is damaged. */
static bool begin_scan(Decoder *decoder, const uint8_t *data, size_t size, const Header *header, Scan *scan)
{
    int width = BLOCK * header->across, height = BLOCK * header->down;
    assert(header->components == 1 || header->components == 3); /* `read_header` sees to it: MCUs have a block */
    *scan = (Scan){.header = header, .at = data + header->scan_at, .end = data + size, .entropy = &decoder->entropy};
    scan->columns = (header->width + width - 1) / width;
    scan->rows = (header->height + height - 1) / height;
    for (int i = 0; i < header->components; i++) {
        int dc = header->dc_of[i], ac = header->ac_of[i];
        if (!build_huffman(&decoder->dc[dc], &header->dc[dc], false) ||
            !build_huffman(&decoder->ac[ac], &header->ac[ac], true))
            return false;
        scan->dc[i] = &decoder->dc[dc];
        scan->ac[i] = &decoder->ac[ac];
        for (int k = 0; k < 64; k++)
            scan->quantisation[i][ZIGZAG[k]] = (int16_t)header->quantisation[header->quantisation_of[i]][k];
    }
    return true;
}

/* Whether all entropy-coded data can be read, and belong to MCUs. */
bool check_scan(Decoder *decoder, const uint8_t *data, size_t size, const Header *header)
{
    Scan scan;
    if (!begin_scan(decoder, data, size, header, &scan))
        return false;
    Window nothing = {.end_column = scan.columns, .first_row = scan.rows, .end_row = scan.rows};
    scan.window = &nothing;
    scan.is_check = true;
    return decode_pieces(&scan);
}

/* Decode the samples that a box needs, which lies within the image; `window` says where they are, and at which scale.
 * False if this is left to another decoder. */
bool decode_window(Decoder *decoder, const uint8_t *data, size_t size, const Header *header, Box box, int scale,
                   Window *window)
{
    Scan scan;
    if (!begin_scan(decoder, data, size, header, &scan))
        return false;
    scan.window = window;
    choose_window(&scan, box, scale, window);
    return place_samples(header, &decoder->samples, window) && decode_pieces(&scan);
}
