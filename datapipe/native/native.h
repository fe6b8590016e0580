/* The library that datapipe loads with ctypes: the functions that Python calls, and the record that they share.
 *
 * Plain C11, without Python: nothing here holds the interpreter's lock, and nothing is kept between calls except
 * memory. A sample's way: chunk.c -> read.c (bytes from files) -> header.c (markers) or pnm.c -> scan.c (entropy-coded
 * data to blocks, by the tables of huffman.c) -> idct.h (blocks to samples) -> colour.c (samples to rows of pixels) ->
 * resize.c (to the batch's slot). Where another decoder takes the images: chunk.c -> read.c -> header.c -> cut.c.
 */
#ifndef DATAPIPE_NATIVE_H
#define DATAPIPE_NATIVE_H

#include <stddef.h>
#include <stdint.h>

#define NATIVE_VERSION 3 /* of this interface and of the pixels: `VERSION` in __init__.py */

enum Status {
    DONE = 0,
    UNSUPPORTED = 1, /* not an image for this library, or a damaged one: the slot is not valid, Python decides */
    UNREAD = 2,      /* the bytes cannot be read, or are not those of the checksum: Python reads again */
};

/* A box of pixels: left, top, width, height. */
typedef struct {
    int32_t left, top, width, height;
} Box;

/* One image of a chunk. The same fields as `JOB` in __init__.py. */
typedef struct {
    const uint8_t *data; /* the encoded image; pixels, where `is_pixels`. NULL: it is read from `fd`, and NULL again
                          * afterwards, unless it is UNSUPPORTED: then it lies here until the workspace is used again */
    int64_t size;        /* of the encoded image, bytes; of a window that was cut out, then of that */
    uint8_t *out;        /* uint8[out_size, out_size, channels]: the batch's slot; or uint8[size] for a window. NULL: a
                          * JPEG is read to its end, and DONE if libjpeg would not warn of damage */
    int64_t offset;      /* of the encoded image in the file, bytes */
    Box box;             /* of the image, to be resized to the slot; of a window that was cut out, then of that */
    int32_t width;       /* of the image, pixels, as the index says */
    int32_t height;
    int32_t fd;        /* of an open file */
    uint32_t checksum; /* the lower half of the image's xxh3-64, where `has_checksum` */
    uint8_t has_checksum;
    uint8_t is_direct; /* `fd` was opened with O_DIRECT */
    uint8_t flip;      /* mirror the result, left to right */
    uint8_t is_pixels; /* the image is uint8[height, width, channels] */
    uint8_t status;    /* in: DONE, or anything else to leave this image alone; out: enum Status */
    uint8_t scale;     /* 1, or 2, 4 or 8: a JPEG is decoded at 1/2, 1/4 or 1/8, if its MCUs are squares */
} Job;

enum Stage { READ, DECODE, RESIZE, WINDOW = 1 }; /* seconds of each are told; of cutting: READ and WINDOW */

/* A file to be read as a whole. The same fields as `FILE` in __init__.py. */
typedef struct {
    const char *name;  /* in its folder */
    int64_t size;      /* out: bytes; -1: left to Python */
    int32_t folder;    /* descriptor; below 0: the file is left to Python */
    uint32_t checksum; /* out: the lower half of the xxh3-64 */
} File;

/* What is being read, for another thread that watches. */
typedef struct {
    int64_t number;   /* of the job, from 1; 0: none */
    int64_t since_ns; /* since the call began */
} Progress;

typedef uint64_t Hash(const void *data, size_t size); /* xxh3-64 */

typedef struct Workspace Workspace; /* memory for one thread */

#define EXPORTED __attribute__((visibility("default")))

EXPORTED int native_version(void);
EXPORTED int native_has_avx2(void); /* whether this processor runs the library that was compiled for AVX2 */
EXPORTED Workspace *native_open(Hash *hash); /* NULL: no job has a checksum. Returns NULL without memory */
EXPORTED void native_close(Workspace *workspace);
EXPORTED int native_decode_chunk(Workspace *workspace, Job *jobs, int count, int channels, int out_size,
                                 const volatile uint8_t *is_abandoned, volatile Progress *progress, double *spent_s);
EXPORTED int native_cut_chunk(Workspace *workspace, Job *jobs, int count, int may_end_late,
                              const volatile uint8_t *is_abandoned, volatile Progress *progress, double *spent_s);

/* Read files one behind the other into memory with room for so many bytes, and return how many there are. Those that
 * cannot be read, or do not fit, are left to Python, and so are all behind the one at which it `is_abandoned`: their
 * sizes are to be -1 before. `flags` are those of open(2). */
EXPORTED int64_t native_read_files(Workspace *workspace, File *files, int count, int flags, uint8_t *memory,
                                   int64_t room, const volatile uint8_t *is_abandoned, volatile Progress *progress);

#endif
