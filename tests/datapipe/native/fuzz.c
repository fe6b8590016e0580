/* Decodes damaged images, and cuts windows out of them, in a program that is compiled with sanitizers:
 * `fuzz COUNT SEED FILE…`.
 *
 * Each image is a file in which some bytes were changed, removed or inserted, cut out at any box, size and scale. It lies
 * at the end of its memory, so that a read behind it is seen; and so does the memory for its window, of its size. Prints
 * how many were decoded, how many windows were cut, how many of these are smaller than their image, and a checksum of the
 * pixels.
 */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../../datapipe/native/native.h"

typedef struct {
    uint8_t *bytes;
    size_t size;
    int width, height;
} Image;

static uint64_t state;

static uint32_t draw(uint32_t limit) /* SplitMix64 */
{
    uint64_t z = state += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return (uint32_t)((z ^ z >> 31) >> 32) % limit;
}

static Image read_file(const char *path)
{
    Image file = {0};
    FILE *stream = fopen(path, "rb");
    if (!stream || fscanf(stream, "%d %d\n", &file.width, &file.height) != 2)
        exit(2);
    file.bytes = malloc(1 << 20);
    file.size = fread(file.bytes, 1, 1 << 20, stream);
    fclose(stream);
    return file;
}

/* Return a damaged copy, with its size. */
static uint8_t *damage(const Image *file, size_t *size)
{
    uint8_t *bytes = calloc(file->size + 64, 1);
    memcpy(bytes, file->bytes, file->size);
    *size = file->size;
    for (uint32_t changes = draw(6); changes; changes--) {
        size_t at = draw((uint32_t)*size), count = 1 + draw(8);
        switch (draw(8)) {
        case 0: /* cut off, with or without an end of image */
            *size = at + 2;
            if (*size > file->size)
                *size = file->size;
            break;
        case 1:
            if (at + count < *size) {
                memmove(bytes + at, bytes + at + count, *size - at - count);
                *size -= count;
            }
            break;
        case 2:
            if (*size + count < file->size + 64) {
                memmove(bytes + at + count, bytes + at, *size - at);
                *size += count;
            }
            break;
        case 3:
            bytes[at] = 0xff;
            break;
        case 4:
            bytes[at] = 0;
            break;
        default:
            bytes[at] = (uint8_t)draw(256);
        }
    }
    if (*size >= 2 && draw(4)) {
        bytes[*size - 2] = 0xff;
        bytes[*size - 1] = 0xd9;
    }
    uint8_t *exact = malloc(*size ? *size : 1);
    memcpy(exact, bytes, *size);
    free(bytes);
    return exact;
}

int main(int count, char **words)
{
    int files = count - 3, decoded = 0, cut = 0, smaller = 0;
    uint32_t checksum = 2166136261; /* FNV-1a */
    Image *all = malloc((size_t)files * sizeof *all);
    for (int i = 0; i < files; i++)
        all[i] = read_file(words[3 + i]);
    state = (uint64_t)atol(words[2]);
    Workspace *workspace = native_open(NULL);
    uint8_t is_abandoned = 0;
    Progress progress = {0};
    double spent_s[3] = {0};
    for (long i = 0; i < atol(words[1]); i++) {
        const Image *file = &all[draw((uint32_t)files)];
        int size = 1 + (int)draw(40), channels = draw(4) ? 3 : 1;
        Job job = {.width = file->width, .height = file->height, .flip = (uint8_t)draw(2), .is_pixels = draw(50) == 0};
        size_t length;
        job.data = damage(file, &length);
        job.size = (int64_t)length;
        job.scale = (uint8_t)(draw(4) ? 1 : 1 << draw(4));
        job.box = (Box){(int)draw((uint32_t)file->width), (int)draw((uint32_t)file->height), 0, 0};
        job.box.width = 1 + (int)draw((uint32_t)(file->width - job.box.left));
        job.box.height = 1 + (int)draw((uint32_t)(file->height - job.box.top));
        if (!draw(4))
            job.box = (Box){(int)draw(80) - 40, (int)draw(80) - 40, size, size};
        if (!draw(40))
            *(draw(2) ? &job.box.left : &job.box.top) = draw(2) ? INT32_MAX : INT32_MIN;
        job.out = malloc((size_t)(size * size * channels));
        Job window = job;
        bool is_done = !native_decode_chunk(workspace, &job, 1, channels, size, &is_abandoned, &progress, spent_s);
        decoded += is_done;
        for (int k = 0; is_done && k < size * size * channels; k++)
            checksum = (checksum ^ job.out[k]) * 16777619;
        free(job.out);
        window.out = malloc(length ? length : 1);
        if (!native_cut_chunk(workspace, &window, 1, draw(2), &is_abandoned, &progress, spent_s)) {
            cut++;
            smaller += window.size < (int64_t)length;
        }
        free((void *)window.data);
        free(window.out);
    }
    native_close(workspace);
    for (int i = 0; i < files; i++)
        free(all[i].bytes);
    free(all);
    printf("%d %d %d %08lx\n", decoded, cut, smaller, (unsigned long)checksum);
    return 0;
}
