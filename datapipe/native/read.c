/* Encoded images from files: neighbours with one read. Their checksums are compared in chunk.c. */
#define _POSIX_C_SOURCE 200809L /* pread */
#define _FILE_OFFSET_BITS 64    /* where off_t would have 32 */

#include "read.h"

#include <errno.h>
#include <unistd.h>

#define GAP 4096               /* bytes between two neighbours: to read them takes less than another call */
#define MAX_GROUP (4 << 20)    /* bytes that are read at once, if they are more than one image */
#define PAGE 4096              /* what O_DIRECT needs of offsets, sizes and memory: no disk in use needs more (open(2)) */

/* Return how many bytes there are: fewer than `size` only at the end of the file, or where they cannot be read. */
static int64_t read_fully(int fd, uint8_t *to, int64_t size, int64_t offset, bool is_direct)
{
    int64_t done = 0;
    while (done < size) {
        ssize_t count = pread(fd, to + done, (size_t)(size - done), (off_t)(offset + done));
        if (count < 0 && errno == EINTR)
            continue;
        if (count <= 0)
            break;
        done += count;
        if (is_direct && count % PAGE) /* the end of the file */
            break;
    }
    return done;
}

bool is_sane(const Job *job)
{
    return job->size >= 0 && job->size <= MAX_ENCODED && job->offset >= 0 && job->offset <= INT64_MAX - 2 * MAX_ENCODED;
}

/* Return the first of the jobs behind `first` that is not read together with it, and where those before it end. */
static int find_group(const Job *jobs, int first, int count, int64_t *stop)
{
    const Job *job = &jobs[first];
    int64_t end = job->offset + job->size;
    int next = first + 1;
    for (; next < count; next++) {
        const Job *other = &jobs[next];
        if (other->data || other->status != DONE || other->fd != job->fd || !is_sane(other))
            break;
        int64_t gap = other->offset - end;
        if (gap < 0 || gap > GAP || other->offset + other->size - job->offset > MAX_GROUP)
            break;
        end = other->offset + other->size;
    }
    *stop = end;
    return next;
}

const uint8_t *read_image(Group *group, const Job *jobs, int i, int count)
{
    const Job *job = &jobs[i];
    if (i >= group->end) {
        int64_t stop, alignment = job->is_direct ? PAGE : 1;
        group->end = find_group(jobs, i, count, &stop);
        int64_t start = job->offset / alignment * alignment, size = stop - start;
        int64_t whole = (size + alignment - 1) / alignment * alignment;
        uint8_t *memory = make_room(&group->memory, (size_t)whole + PAGE);
        group->start = start;
        group->size = 0;
        if (memory) {
            memory += -(uintptr_t)memory % PAGE;
            group->size = read_fully(job->fd, memory, whole, start, job->is_direct);
        }
        group->bytes = memory;
    }
    bool is_there = group->bytes && job->offset + job->size - group->start <= group->size;
    return is_there ? group->bytes + (job->offset - group->start) : NULL;
}
