/* The markers before the scan (ITU-T T.81, annex B). Whatever is unusual is refused: another decoder takes the image. */
#include "jpeg.h"

#include <string.h>

/* Colour transform of an Adobe segment; no segment: NONE. */
enum { ADOBE_RGB = 0, ADOBE_YCC = 1, NONE = -1 };

#define NONE_OF_16 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64

const uint8_t ZIGZAG[192] = {
     0,  1,  8, 16,  9,  2,  3, 10, 17, 24, 32, 25, 18, 11,  4,  5,
    12, 19, 26, 33, 40, 48, 41, 34, 27, 20, 13,  6,  7, 14, 21, 28,
    35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23, 30, 37, 44, 51,
    58, 59, 52, 45, 38, 31, 39, 46, 53, 60, 61, 54, 47, 55, 62, 63,
    NONE_OF_16, NONE_OF_16, NONE_OF_16, NONE_OF_16, NONE_OF_16, NONE_OF_16, NONE_OF_16, NONE_OF_16};

/* The body of a segment. */
typedef struct {
    const uint8_t *at, *end;
} Segment;

static int left_in(const Segment *segment)
{
    return (int)(segment->end - segment->at);
}

static int read_short(const uint8_t *bytes)
{
    return bytes[0] << 8 | bytes[1];
}

static bool read_quantisation(Segment segment, Header *header) /* B.2.4.1 */
{
    while (left_in(&segment)) {
        int precision = *segment.at >> 4, table = *segment.at & 15;
        segment.at++;
        if (precision > 1 || table > 3 || left_in(&segment) < 64 * (1 + precision))
            return false;
        for (int k = 0; k < 64; k++, segment.at += 1 + precision)
            header->quantisation[table][k] = (uint16_t)(precision ? read_short(segment.at) : *segment.at);
        header->given_quantisation |= (uint8_t)(1 << table);
    }
    return true;
}

static bool read_huffman(Segment segment, Header *header) /* B.2.4.2 */
{
    while (left_in(&segment)) {
        if (left_in(&segment) < 17)
            return false;
        int is_ac = *segment.at >> 4, table = *segment.at & 15, total = 0;
        if (is_ac > 1 || table > 3)
            return false;
        HuffmanSpec *spec = is_ac ? &header->ac[table] : &header->dc[table];
        memset(spec, 0, sizeof *spec);
        memcpy(spec->counts, segment.at, 17);
        spec->counts[0] = 1;
        for (int length = 1; length <= 16; length++)
            total += spec->counts[length];
        segment.at += 17;
        if (total > 256 || left_in(&segment) < total)
            return false;
        memcpy(spec->symbols, segment.at, (size_t)total);
        segment.at += total;
    }
    return true;
}

/* The frame (B.2.2): 8 bits, one component, or three of which the others are not sampled more finely than the first. */
static bool read_frame(Segment segment, Header *header, uint8_t *ids)
{
    const uint8_t *at = segment.at;
    if (left_in(&segment) < 6 || at[0] != 8)
        return false;
    header->height = read_short(at + 1);
    header->width = read_short(at + 3);
    header->components = at[5];
    if ((header->components != 1 && header->components != 3) || left_in(&segment) != 6 + 3 * header->components)
        return false;
    if (!header->width || !header->height || header->width > MAX_SIDE || header->height > MAX_SIDE)
        return false;
    for (int i = 0; i < header->components; i++) {
        const uint8_t *component = at + 6 + 3 * i;
        int across = component[1] >> 4, down = component[1] & 15;
        ids[i] = component[0];
        header->quantisation_of[i] = component[2]; /* read once: others may write to a file that is mapped */
        if (header->quantisation_of[i] > 3 || !across || !down || across > 4 || down > 4)
            return false;
        if (i == 0) { /* A.2.2: a scan of one component has MCUs of one block, whatever its factors */
            header->across = header->components == 1 ? 1 : across;
            header->down = header->components == 1 ? 1 : down;
        } else if (across != 1 || down != 1) {
            return false;
        }
    }
    int shape = header->across * 10 + header->down;
    return shape == 11 || shape == 21 || shape == 12 || shape == 22 || shape == 41;
}

/* The scan's header (B.2.3): all components, in the frame's order, with all coefficients. */
static bool read_scan(Segment segment, Header *header, const uint8_t *ids)
{
    const uint8_t *at = segment.at;
    int count = header->components;
    if (left_in(&segment) != 4 + 2 * count || at[0] != count)
        return false;
    for (int i = 0; i < count; i++) {
        const uint8_t *component = at + 1 + 2 * i;
        int dc = component[1] >> 4, ac = component[1] & 15;
        if (component[0] != ids[i] || dc > 3 || ac > 3 || !header->dc[dc].counts[0] || !header->ac[ac].counts[0])
            return false;
        if (!(header->given_quantisation >> header->quantisation_of[i] & 1))
            return false;
        header->dc_of[i] = (uint8_t)dc;
        header->ac_of[i] = (uint8_t)ac;
    }
    at += 1 + 2 * count;
    return at[0] == 0 && at[1] == 63 && at[2] == 0;
}

/* Say whether three components are RGB (1) or YCbCr (0), as libjpeg does; -1 where decoders might differ. */
static int guess_rgb(bool has_jfif, int adobe, const uint8_t *ids)
{
    bool has_usual_ids = ids[0] == 1 && ids[1] == 2 && ids[2] == 3;
    if (adobe == ADOBE_RGB)
        return has_jfif ? -1 : 1;
    if (adobe == ADOBE_YCC || (adobe == NONE && (has_jfif || has_usual_ids)))
        return 0;
    return -1;
}

/* Read a JPEG's header. False for a JPEG that this library does not decode, or a damaged one. */
bool read_header(const uint8_t *data, size_t size, Header *header)
{
    uint8_t ids[MAX_COMPONENTS] = {0};
    bool has_frame = false, has_jfif = false;
    int adobe = NONE;

    memset(header, 0, sizeof *header);
    if (size < 4 || data[0] != 0xff || data[1] != SOI || data[size - 2] != 0xff || data[size - 1] != EOI)
        return false;
    for (size_t at = 2;;) {
        if (size - at < 4 || data[at] != 0xff)
            return false;
        int marker = data[at + 1];
        size_t length = (size_t)read_short(data + at + 2);
        if (length < 2 || length > size - at - 2)
            return false;
        size_t marker_at = at;
        Segment segment = {data + at + 4, data + at + 2 + length};
        at += 2 + length;
        if (marker == DQT) {
            if (!read_quantisation(segment, header))
                return false;
        } else if (marker == DHT) {
            if (!read_huffman(segment, header))
                return false;
        } else if (marker == SOF0 || marker == SOF1) {
            if (has_frame || !read_frame(segment, header, ids))
                return false;
            has_frame = true;
            header->frame_at = marker_at;
        } else if (marker == DRI) {
            if (left_in(&segment) != 2)
                return false;
            header->restart_interval = read_short(segment.at);
        } else if (marker == SOS) {
            if (!has_frame || !read_scan(segment, header, ids))
                return false;
            int is_rgb = header->components == 3 ? guess_rgb(has_jfif, adobe, ids) : 0;
            header->is_rgb = is_rgb == 1;
            header->scan_at = at;
            return is_rgb >= 0 && (!header->is_rgb || header->across * header->down == 1);
        } else if (marker == APP0) {
            has_jfif |= left_in(&segment) >= 14 && !memcmp(segment.at, "JFIF", 5);
        } else if (marker == APP14) {
            if (left_in(&segment) >= 12 && !memcmp(segment.at, "Adobe", 5))
                adobe = segment.at[11];
        } else if (!((marker > APP0 && marker <= APP15) || marker == COM)) {
            return false;
        }
    }
}
