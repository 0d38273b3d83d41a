/* A rank in C: after the handshake it generates blocks, meets pauses and stops, by the documented page alone.
   Arguments: descriptors of socket, page (its own opening) and extent; the rank; bytes of its one region.
   The region holds the block number in every byte (modulo 251), the host state is the block in decimal. */
#define _GNU_SOURCE
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>

#include "page.h"

static char packet[4096];

static size_t paused(uint64_t block) {
    static const unsigned char head[] = "\x82\xa4type\xa6paused\xa5" "block\xcf";
    uint32_t header[3] = {0x314D574D, 0, sizeof head - 1 + 8};
    memcpy(packet, header, 12);
    memcpy(packet + 12, head, sizeof head - 1);
    for (int i = 0; i < 8; i++) packet[12 + sizeof head - 1 + i] = (char)(block >> (56 - 8 * i));
    return 12 + header[2];
}

static int said(ssize_t size, const char *word) { return memmem(packet, (size_t)size, word, strlen(word)) != NULL; }

int main(int argc, char **argv) {
    if (argc != 6) return 2;
    int socket_fd = atoi(argv[1]), page_fd = atoi(argv[2]), extent_fd = atoi(argv[3]), number = atoi(argv[4]);
    size_t size = (size_t)atoll(argv[5]);
    struct stat status;
    fstat(page_fd, &status);
    char *page = mmap(NULL, (size_t)status.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, page_fd, 0);
    char *region = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, extent_fd, 0);
    if (page == MAP_FAILED || region == MAP_FAILED) return 3;
    struct wm_header *header = (struct wm_header *)page;
    if (header->magic != WM_PAGE_MAGIC || header->version != WM_PAGE_VERSION) return 4;
    char *area = page + WM_HEADER_BYTES + (uint64_t)number * header->rank_stride;
    uint64_t capacity = (header->host_state_bytes + 4095) / 4096 * 4096;
    struct wm_rank *rank = (struct wm_rank *)area;
    uint64_t block = rank->progress >> 1;
    rank->flags = WM_MARKS;
    rank->state = WM_RUNNING;
    for (;;) {
        rank->progress = block << 1 | 1;
        block++;
        memset(region, (int)(block % 251), size);
        struct wm_slot *slot = &rank->slot[block & 1];
        slot->block = WM_NEVER;
        slot->length = (uint64_t)sprintf(area + WM_RANK_BYTES + (block & 1) * capacity, "%llu", (unsigned long long)block);
        slot->block = block;
        atomic_store_explicit((_Atomic uint64_t *)&rank->progress, block << 1, memory_order_release);
        atomic_thread_fence(memory_order_seq_cst);
        if (atomic_load_explicit((_Atomic uint64_t *)&header->pause_at, memory_order_acquire) > block) continue;
        struct timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        rank->stopped_ns = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
        rank->state = WM_STOPPED;
        if (send(socket_fd, packet, paused(block), 0) < 0) return 5;
        ssize_t got;
        char *ping;
        while ((got = recv(socket_fd, packet, sizeof packet, 0)) > 0 && (ping = memmem(packet, (size_t)got, "ping", 4))) {
            ping[1] = 'o';
            if (send(socket_fd, packet, (size_t)got, 0) < 0) return 5;
        }
        if (got <= 0) return 6;
        if (said(got, "moved")) return 0;
        if (!said(got, "resume") && !said(got, "advance")) return 7;
        rank->state = WM_RUNNING;
    }
}
