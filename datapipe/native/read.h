/* Encoded images from files. */
#ifndef DATAPIPE_READ_H
#define DATAPIPE_READ_H

#include "jpeg.h"

/* Neighbours in a file that were read at once. */
typedef struct {
    Memory memory;
    const uint8_t *bytes;
    int64_t start, size; /* of the bytes, in the file */
    int end;             /* the first job behind the group */
} Group;

/* Return the bytes of job `i`, which has a file; NULL if they cannot be read, or are too few. They are there until the
 * next call. Jobs are asked for in order, and `group->end` is 0 before the first of a chunk. */
const uint8_t *read_image(Group *group, const Job *jobs, int i, int count);

#endif
