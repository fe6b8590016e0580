/* Windows out of JPEGs for another decoder, without decoding: byte for byte those of `cut` in images/window.py, which says
 * why they are what they are. Sections are those of ITU-T T.81. */
#include "chunk.h"

#include <string.h>

#define MARGIN 1                         /* pixels beside the box: MARGIN in window.py */
#define NARROW 2                         /* samples of chroma across: NARROW in window.py */
#define MOST_PIXELS (2 * (1 << 28) / 3)  /* of an image: MAX_PIXELS in codec.py, which refuses larger ones */
#define FARTHEST (1 << 30)               /* pixels from the corner to a box: so that no number here overflows */
#define SIZE_AT 5                        /* of a frame header: its height, and its width behind it (B.2.2) */

/* Some of the rows of MCUs, or of the pieces across. */
typedef struct {
    int first, end;
} Range;

/* The pieces between restart markers (E.1.4). */
typedef struct {
    int across;         /* of a row of MCUs */
    const size_t *ends; /* the marker behind each piece; NULL where they are not usable */
} Pieces;

/* Return those of `count` units that cover a line with its margin. */
static Range cover(int64_t start, int64_t length, int unit, int count)
{
    int64_t before = start - MARGIN, behind = start + length + MARGIN;
    int64_t first = before > 0 ? before / unit : 0, end = behind > 0 ? (behind + unit - 1) / unit : 0;
    if (first > count - 1)
        first = count - 1;
    if (end > count)
        end = count;
    if (end < first + 1)
        end = first + 1;
    return (Range){(int)first, (int)end};
}

/* Return the first of the markers whose bits `mask` are those of `marker`; NULL if there is none. In entropy-coded data
 * 0xFF stands before a zero or a marker (B.1.1.5). */
static const uint8_t *find_marker(const uint8_t *at, const uint8_t *end, int mask, int marker)
{
    while (end - at >= 2) {
        at = memchr(at, 0xff, (size_t)(end - at) - 1);
        if (!at || (at[1] & mask) == marker)
            return at;
        at++;
    }
    return NULL;
}

static const uint8_t *find_restart(const uint8_t *at, const uint8_t *end)
{
    return find_marker(at, end, 0xf8, RST0);
}

/* Find the marker behind each of `count` pieces, the last being the end of the image: `piece_ends` in jpeg.py. They are
 * usable if there are so many, and the last restart marker has its number. False without memory. */
static bool find_pieces(const uint8_t *data, size_t size, size_t scan_at, size_t count, Memory *memory, Pieces *pieces)
{
    const uint8_t *at = data + scan_at, *end = data + size, *last = at;
    pieces->ends = NULL;
    if (count - 1 > (size - scan_at) / 2)
        return true;
    size_t *ends = (size_t *)(void *)make_room(memory, count * sizeof *ends);
    if (!ends)
        return false;
    for (size_t i = 0; i < count - 1; i++) {
        last = find_restart(at, end);
        if (!last)
            return true;
        ends[i] = (size_t)(last - data);
        at = last + 2;
    }
    const uint8_t *image_end = find_marker(last, end, 0xff, EOI);
    if (!image_end || find_restart(at, image_end))
        return true;
    if (count > 1 && (last[1] & 7) != (int)((count - 2) & 7))
        return true;
    ends[count - 1] = (size_t)(image_end - data);
    pieces->ends = ends;
    return true;
}

static void write_short(uint8_t *to, int number)
{
    to[0] = (uint8_t)(number >> 8);
    to[1] = (uint8_t)number;
}

/* Write a JPEG of some of the pieces, which is not longer than the whole one; return its size. */
static size_t join(const uint8_t *data, const Header *header, const Pieces *pieces, Range rows, Range columns,
                   uint8_t *out)
{
    size_t length = header->scan_at, across = (size_t)pieces->across;
    int number = 0;
    memcpy(out, data, length);
    for (size_t row = (size_t)rows.first; row < (size_t)rows.end; row++) {
        size_t first = row * across + (size_t)columns.first, end = row * across + (size_t)columns.end;
        size_t start = first ? pieces->ends[first - 1] + 2 : header->scan_at, stop = pieces->ends[end - 1] + 2;
        memcpy(out + length, data + start, stop - start);
        for (size_t i = first; i < end; i++, number++)
            out[length + (pieces->ends[i] + 1 - start)] = (uint8_t)(RST0 | (number & 7));
        length += stop - start;
    }
    out[length - 1] = EOI;
    return length;
}

/* Read the header of a JPEG that has the job's size. False for what is left to Python. */
static bool read_job(const Job *job, Header *header)
{
    const Box *box = &job->box;
    return job->size > 0 && !job->is_pixels && read_header(job->data, (size_t)job->size, header) &&
           header->width == job->width && header->height == job->height &&
           (int64_t)header->width * header->height <= MOST_PIXELS && box->left >= -FARTHEST &&
           box->left <= FARTHEST && box->top >= -FARTHEST && box->top <= FARTHEST;
}

/* Write the window of a job's box; make the job's size and box those of the window. False for what is left to Python.
 * Without usable restart markers, rows below the box stay in the data behind the window if that `may_end_late`. */
static bool cut(Memory *memory, Job *job, bool may_end_late)
{
    Header header;
    if (!read_job(job, &header))
        return false;
    const uint8_t *data = job->data;
    size_t size = (size_t)job->size;
    Box *box = &job->box;
    int mcu_width = BLOCK * header.across, mcu_height = BLOCK * header.down, interval = header.restart_interval;
    int columns = (header.width + mcu_width - 1) / mcu_width, all_rows = (header.height + mcu_height - 1) / mcu_height;
    Range rows = cover(box->top, box->height, mcu_height, all_rows);
    int bottom = rows.end * mcu_height < header.height ? rows.end * mcu_height : header.height;
    if (interval && columns % interval == 0) {
        Pieces pieces = {.across = columns / interval};
        int piece_width = interval * mcu_width;
        Range across = cover(box->left, box->width, piece_width, pieces.across);
        if (across.first && header.width - across.first * piece_width <= NARROW * mcu_width / BLOCK)
            across.first--;
        bool is_whole = across.end - across.first == pieces.across && rows.end - rows.first == all_rows;
        size_t count = (size_t)pieces.across * (size_t)all_rows;
        if (!is_whole && !find_pieces(data, size, header.scan_at, count, memory, &pieces))
            return false;
        if (pieces.ends) {
            int left = across.first * piece_width, top = rows.first * mcu_height;
            int right = across.end * piece_width < header.width ? across.end * piece_width : header.width;
            job->size = (int64_t)join(data, &header, &pieces, rows, across, job->out);
            write_short(job->out + header.frame_at + SIZE_AT, bottom - top);
            write_short(job->out + header.frame_at + SIZE_AT + 2, right - left);
            box->left -= left;
            box->top -= top;
            return true;
        }
    }
    memcpy(job->out, data, size);
    if (may_end_late)
        write_short(job->out + header.frame_at + SIZE_AT, bottom);
    return true;
}

static bool cut_timed(Workspace *workspace, Job *job, bool may_end_late, double *spent_s)
{
    double began = now();
    bool is_done = cut(&workspace->pieces, job, may_end_late);
    spent_s[WINDOW] += now() - began;
    return is_done;
}

static bool cut_window(Workspace *workspace, Job *job, const Slot *slot, double *spent_s)
{
    (void)slot;
    return cut_timed(workspace, job, true, spent_s);
}

static bool cut_pieces(Workspace *workspace, Job *job, const Slot *slot, double *spent_s)
{
    (void)slot;
    return cut_timed(workspace, job, false, spent_s);
}

/* Do as native_decode_chunk does, but write a window to `job->out`, with its size and the box in it to the job. Unless
 * it `may_end_late`, the whole image instead of a window whose data would not end with its last row. */
int native_cut_chunk(Workspace *workspace, Job *jobs, int count, int may_end_late,
                     const volatile uint8_t *is_abandoned, volatile Progress *progress, double *spent_s)
{
    Work *work = may_end_late ? cut_window : cut_pieces;
    return do_jobs(workspace, jobs, count, work, NULL, is_abandoned, progress, spent_s);
}
