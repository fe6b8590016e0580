/* What is done to each image of a chunk, and what it needs. */
#ifndef DATAPIPE_CHUNK_H
#define DATAPIPE_CHUNK_H

#include "huffman.h"
#include "read.h"

struct Workspace {
    Decoder decoder;
    Memory chroma, resized, unsupported, pieces;
    Group group;
    Hash *hash;
    Huffman tables[8];
};

/* The slot of an image: uint8[size, size, channels]. */
typedef struct {
    int channels, size;
} Slot;

/* Work on an image whose bytes are at `job->data`. False leaves it, and the job, to Python. */
typedef bool Work(Workspace *workspace, Job *job, const Slot *slot, double *spent_s);

double now(void); /* seconds */

/* Do the jobs whose status is DONE, and set the status of those that fail. Returns how many are not DONE.
 * The rest is left alone once `is_abandoned`. */
int do_jobs(Workspace *workspace, Job *jobs, int count, Work *work, const Slot *slot,
            const volatile uint8_t *is_abandoned, volatile Progress *progress, double *spent_s);

#endif
