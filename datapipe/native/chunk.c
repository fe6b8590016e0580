/* A chunk of a batch in one call: each image is read, and then decoded, cropped, resized and mirrored into its slot, or
 * otherwise worked on. */
#define _POSIX_C_SOURCE 200809L /* clock_gettime, posix_memalign */

#include "chunk.h"
#include "pixels.h"

#include <stdlib.h>
#include <time.h>

uint8_t *make_room(Memory *memory, size_t size)
{
#if defined EXACT_ROOM /* for tests: so that sanitizers see what lies behind */
    bool is_enough = false;
#else
    bool is_enough = memory->size >= size;
    size += size / 2;
#endif
    if (!is_enough) {
        void *bytes = NULL;
        free(memory->bytes);
        memory->size = posix_memalign(&bytes, 64, size) ? 0 : size;
        memory->bytes = memory->size ? bytes : NULL;
    }
    return memory->bytes;
}

int native_version(void)
{
    return NATIVE_VERSION;
}

int native_has_avx2(void)
{
#if defined __x86_64__
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
#else
    return 0;
#endif
}

Workspace *native_open(Hash *hash)
{
    Workspace *workspace = calloc(1, sizeof *workspace);
    if (workspace) {
        workspace->hash = hash;
        workspace->decoder.dc = workspace->tables;
        workspace->decoder.ac = workspace->tables + 4;
    }
    return workspace;
}

void native_close(Workspace *workspace)
{
    if (workspace) {
        free(workspace->decoder.entropy.bytes);
        free(workspace->decoder.samples.bytes);
        free(workspace->chroma.bytes);
        free(workspace->resized.bytes);
        free(workspace->unsupported.bytes);
        free(workspace->pieces.bytes);
        free(workspace->group.memory.bytes);
    }
    free(workspace);
}

static int larger(int a, int b)
{
    return a > b ? a : b;
}

static int smaller(int a, int b)
{
    return a < b ? a : b;
}

/* Write the rows as they are into a slot of which they are a part, and black around them. */
static bool copy(const Rows *rows, int left, int top, bool flip, int size, uint8_t *out, Memory *memory)
{
    size_t pixel = (size_t)rows->channels, line = (size_t)size * pixel;
    uint8_t *row = make_room(memory, (size_t)rows->width * pixel + ROW_SLACK);
    if (!row)
        return false;
    if (rows->width < size || rows->height < size)
        memset(out, 0, line * (size_t)size);
    for (int y = 0; y < rows->height; y++) {
        uint8_t *to = out + (size_t)(top + y) * line;
        read_row(rows, y, row);
        if (!flip) {
            memcpy(to + (size_t)left * pixel, row, (size_t)rows->width * pixel);
            continue;
        }
        for (int x = 0; x < rows->width; x++)
            memcpy(to + (size_t)(size - 1 - left - x) * pixel, row + (size_t)x * pixel, pixel);
    }
    return true;
}

/* Whether the job can be done at all: an image of the given size, and a box within it, or one that is as large as the
 * slot and has a part of the image. */
static bool is_possible(const Job *job, int out_size)
{
    const Box *box = &job->box;
    int64_t right = (int64_t)box->left + box->width, bottom = (int64_t)box->top + box->height;
    bool is_within = box->left >= 0 && box->top >= 0 && right <= job->width && bottom <= job->height;
    bool is_slot = box->width == out_size && box->height == out_size && box->left < job->width &&
                   box->top < job->height && right > 0 && bottom > 0;
    return job->width > 0 && job->height > 0 && job->width <= MAX_SIDE && job->height <= MAX_SIDE &&
           (int64_t)job->width * job->height <= MAX_PIXELS && box->width > 0 && box->height > 0 &&
           out_size > 0 && out_size <= MAX_SIDE &&
           (job->scale == 1 || job->scale == 2 || job->scale == 4 || job->scale == 8) && (is_within || is_slot);
}

/* Return the pixels of an image that is stored as such; NULL for an image that is encoded. */
static const uint8_t *find_pixels(const Job *job, int channels)
{
    size_t size = (size_t)job->size;
    if (!job->is_pixels)
        return find_pnm_pixels(job->data, size, job->width, job->height, channels);
    return size == (size_t)job->width * (size_t)job->height * (size_t)channels ? job->data : NULL;
}

double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static bool check(Workspace *workspace, const Job *job)
{
    Header header;
    return read_header(job->data, (size_t)job->size, &header) && header.width == job->width &&
           header.height == job->height && check_scan(&workspace->decoder, job->data, (size_t)job->size, &header);
}

static bool decode(Workspace *workspace, Job *job, const Slot *slot, double *spent_s)
{
    if (!job->out)
        return check(workspace, job);
    int channels = slot->channels, out_size = slot->size;
    Header header;
    Window window;
    double began = now();
    if (!is_possible(job, out_size))
        return false;
    /* the part of the box that lies within the image */
    int left = larger(job->box.left, 0), right = smaller(job->box.left + job->box.width, job->width);
    int top = larger(job->box.top, 0), bottom = smaller(job->box.top + job->box.height, job->height);
    int scale = 1;
    Rows rows = {.channels = channels};
    const uint8_t *pixels = find_pixels(job, channels);
    if (pixels) {
        rows.stride = (size_t)job->width * (size_t)channels;
        rows.pixels = pixels + (size_t)top * rows.stride + (size_t)(left * channels);
    } else {
        Box box = {left, top, right - left, bottom - top};
        if (job->is_pixels || !read_header(job->data, (size_t)job->size, &header))
            return false;
        if (header.width != job->width || header.height != job->height || (channels == 1 && header.is_rgb))
            return false;
        if (!decode_window(&workspace->decoder, job->data, (size_t)job->size, &header, box, job->scale, &window))
            return false;
        scale = window.scale;
        rows.header = &header;
        rows.window = &window;
        rows.left = left / scale;
        rows.top = top / scale;
    }
    rows.width = (right - left) / scale;
    rows.height = (bottom - top) / scale;
    if (!rows.width || !rows.height || !place_chroma(&rows, &workspace->chroma))
        return false;
    bool is_whole = job->box.width / scale == out_size && job->box.height / scale == out_size, is_done;
    double decoded = now();
    if (is_whole)
        is_done = copy(&rows, left - job->box.left, top - job->box.top, job->flip, out_size, job->out,
                       &workspace->resized);
    else
        is_done = resize(&rows, job->flip, out_size, job->out, &workspace->resized);
    spent_s[DECODE] += decoded - began;
    spent_s[RESIZE] += now() - decoded;
    return is_done;
}

/* Return the bytes of job `i`, from memory or its file; NULL if there are none, or not those of its checksum. */
static const uint8_t *find_bytes(Workspace *workspace, const Job *jobs, int i, int count)
{
    const Job *job = &jobs[i];
    if (!is_sane(job))
        return NULL;
    const uint8_t *data = job->data ? job->data : read_image(&workspace->group, jobs, i, count);
    bool is_right = data && (!job->has_checksum || (workspace->hash &&
                             (uint32_t)workspace->hash(data, (size_t)job->size) == job->checksum));
    return is_right ? data : NULL;
}

/* Keep the bytes of job `i`, which were read, for Python. */
static const uint8_t *keep(Memory *memory, size_t *used, const uint8_t *data, const Job *jobs, int i, int count)
{
    size_t size = (size_t)jobs[i].size, needed = 0;
    if (!*used) { /* once: room for all that may come; what is not used costs nothing */
        for (int j = i; j < count; j++)
            needed += is_sane(&jobs[j]) ? (size_t)jobs[j].size : 0;
        if (!make_room(memory, needed + 1))
            return NULL;
    }
    if (memory->size - *used < size) /* their sum is too large for 32 bits */
        return NULL;
    uint8_t *kept = memcpy(memory->bytes + *used, data, size);
    *used += size;
    return kept;
}

int do_jobs(Workspace *workspace, Job *jobs, int count, Work *work, const Slot *slot,
            const volatile uint8_t *is_abandoned, volatile Progress *progress, double *spent_s)
{
    int failed = 0;
    size_t kept = 0;
    double start = now();
    workspace->group.end = 0;
    for (int i = 0; i < count && !*is_abandoned; i++) {
        Job *job = &jobs[i];
        if (job->status == DONE) {
            double began = now();
            progress->since_ns = (int64_t)(1e9 * (began - start));
            progress->number = i + 1;
            bool is_from_file = !job->data;
            job->data = find_bytes(workspace, jobs, i, count);
            progress->number = 0;
            spent_s[READ] += now() - began;
            if (!job->data)
                job->status = UNREAD;
            else if (!work(workspace, job, slot, spent_s))
                job->status = UNSUPPORTED;
            if (is_from_file && job->status == UNSUPPORTED) {
                job->data = keep(&workspace->unsupported, &kept, job->data, jobs, i, count);
                if (!job->data)
                    job->status = UNREAD;
            } else if (is_from_file) {
                job->data = NULL; /* it is gone with the next read */
            }
        }
        failed += job->status != DONE;
    }
    return failed;
}

int native_decode_chunk(Workspace *workspace, Job *jobs, int count, int channels, int out_size,
                        const volatile uint8_t *is_abandoned, volatile Progress *progress, double *spent_s)
{
    Slot slot = {channels, out_size};
    return do_jobs(workspace, jobs, count, decode, &slot, is_abandoned, progress, spent_s);
}
