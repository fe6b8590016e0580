/* Decodes what libFuzzer makes up, led by the code that it reached: for an hour, from examples in the folder SEEDS, by
 *
 *     clang -std=c11 -O2 -g -ffp-contract=off -DEXACT_ROOM -fsanitize=fuzzer,address,undefined -mavx2 -mbmi -mbmi2 \
 *         tests/datapipe/native/fuzz_coverage.c datapipe/native/[a-z]*.c -lm -o fuzz
 *     ./fuzz FOUND SEEDS -max_total_time=3600 -max_len=4096
 *
 * An input is a Choice and a file, at the end of its memory; the size of the image is that of the file's header, if any. */
#define _GNU_SOURCE /* memfd_create */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "../../../datapipe/native/jpeg.h"

enum { GREY = 1, FLIP = 2, PIXELS = 4, AS_SLOT = 8, FROM_FILE = 16, FAR = 32, DIRECT = 64, JOBS = 3 };

typedef struct {
    int16_t left, top, width, height, offset, size;
    uint8_t out_size, choices, scale, has_checksum;
} Choice;

static uint64_t add_bytes(const void *data, size_t size) /* reads all, as a checksum does */
{
    uint64_t sum = 0;
    for (size_t i = 0; i < size; i++)
        sum += ((const uint8_t *)data)[i];
    return sum;
}

static Job choose_job(const Choice *choice, const uint8_t *data, size_t length, int out_size)
{
    Job job = {.data = data, .size = (int64_t)length, .scale = (uint8_t)(1 << choice->scale % 4),
               .flip = !!(choice->choices & FLIP), .is_pixels = !!(choice->choices & PIXELS),
               .is_direct = !!(choice->choices & DIRECT), .has_checksum = choice->has_checksum & 1,
               .checksum = (uint32_t)add_bytes(data, length)};
    Header header;
    char text[33];
    snprintf(text, sizeof text, "%.*s", (int)(length < 32 ? length : 32), (const char *)data);
    if (read_header(data, length, &header))
        job.width = header.width, job.height = header.height;
    else if (sscanf(text, "P%*c %5d %5d", &job.width, &job.height) != 2)
        job.width = choice->width, job.height = choice->height;
    job.box = (Box){choice->left, choice->top, out_size, out_size};
    if (!(choice->choices & AS_SLOT) && job.width > 0 && job.height > 0) {
        int left = abs(choice->left) % job.width, top = abs(choice->top) % job.height;
        job.box = (Box){left, top, 1 + abs(choice->width) % (job.width - left), 1 + abs(choice->height) % (job.height - top)};
    }
    return job;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t length)
{
    static Workspace *workspace; /* used again and again, as by a loader */
    Choice choice;
    if (length < sizeof choice || !(workspace = workspace ? workspace : native_open(add_bytes)))
        return -1;
    memcpy(&choice, data, sizeof choice);
    int size = 1 + choice.out_size % 80, channels = choice.choices & GREY ? 1 : 3, file = memfd_create("image", 0);
    Job job = choose_job(&choice, data + sizeof choice, length - sizeof choice, size), jobs[JOBS] = {job, job, job};
    int count = choice.choices & FROM_FILE ? JOBS : 1;
    if (write(file, job.data, (size_t)job.size) != job.size)
        abort();
    jobs[1].offset = choice.choices & FAR ? INT64_MAX ^ choice.offset : choice.offset; /* it need not be there */
    jobs[1].size = choice.size;
    for (int i = 0; i < count; i++) {
        jobs[i].out = malloc((size_t)(size * size * channels));
        jobs[i].data = count > 1 ? NULL : job.data;
        jobs[i].fd = file;
    }
    if ((int64_t)job.width * job.height < 1 << 22) /* larger ones take long */
        native_decode_chunk(workspace, jobs, count, channels, size, &(uint8_t){0}, &(Progress){0}, (double[3]){0});
    for (int i = 0; i < count; i++) {
        if (jobs[i].status == UNSUPPORTED) /* its bytes are there */
            add_bytes(jobs[i].data, (size_t)jobs[i].size);
        free(jobs[i].out);
    }
    return close(file);
}
