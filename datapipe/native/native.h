/* The library that datapipe loads with ctypes: the functions that Python calls, and the record that they share.
 *
 * Plain C11, without Python: nothing here holds the interpreter's lock, and nothing is kept between calls except
 * memory. A sample's way: chunk.c -> header.c (markers) or pnm.c -> scan.c (entropy-coded data to blocks, by the tables
 * of huffman.c) -> idct.h (blocks to samples) -> colour.c (samples to rows of pixels) -> resize.c (to the batch's slot).
 */
#ifndef DATAPIPE_NATIVE_H
#define DATAPIPE_NATIVE_H

#include <stdint.h>

#define NATIVE_VERSION 1 /* of this interface and of the pixels: `VERSION` in __init__.py */

enum Status {
    DONE = 0,
    UNSUPPORTED = 1, /* not an image for this library, or a damaged one: the slot is not valid, Python decides */
};

/* A box of pixels: left, top, width, height. */
typedef struct {
    int32_t left, top, width, height;
} Box;

/* One image of a chunk. The same fields as `JOB` in __init__.py. */
typedef struct {
    const uint8_t *data; /* the encoded image; pixels, where `is_pixels` */
    int64_t size;        /* of `data`, bytes */
    uint8_t *out;        /* uint8[out_size, out_size, channels]: the batch's slot */
    Box box;             /* of the image, to be resized to the slot */
    int32_t width;       /* of the image, pixels, as the index says */
    int32_t height;
    uint8_t flip;      /* mirror the result, left to right */
    uint8_t is_pixels; /* `data` are uint8[height, width, channels] */
    uint8_t status;    /* in: DONE, or anything else to leave this image alone; out: enum Status */
    uint8_t scale;     /* 1, or 2, 4 or 8: a JPEG is decoded at 1/2, 1/4 or 1/8, if its MCUs are squares */
} Job;

enum Stage { DECODE, RESIZE }; /* seconds of each are told */

typedef struct Workspace Workspace; /* memory for one thread */

#define EXPORTED __attribute__((visibility("default")))

EXPORTED int native_version(void);
EXPORTED int native_has_avx2(void); /* whether this processor runs the library that was compiled for AVX2 */
EXPORTED Workspace *native_open(void);
EXPORTED void native_close(Workspace *workspace);
EXPORTED int native_decode_chunk(Workspace *workspace, Job *jobs, int count, int channels, int out_size,
                                 const volatile uint8_t *is_abandoned, double *spent_s);

#endif
