// What the accesses of a warp cost: sectors of 32 bytes in global memory, wavefronts of 128 bytes in shared memory.
#pragma once
#include "machine.h"

// Counts what a request takes, and the least that its bytes could take.
inline void count(Warp& w, const Instruction& i, u64 units, u64 least) {
    Traffic& t = w.cta->launch->traffic[&i - w.cta->launch->code];
    ++t.requests, t.units += units, t.least += least;
}

// Sectors that the lanes of a request touch; bytes that several lanes touch count once.
inline void count_sectors(Warp& w, const Instruction& i, const u64* addresses, int lanes, u32 size) {
    u64 sectors[64];
    u32 bytes[64];  // of each sector, those that are touched
    int count_of = 0;
    for (int l = 0; l < lanes; ++l)
        for (u64 at = addresses[l], end = at + size; at < end;) {
            const u64 sector = at / 32, next = std::min(end, (sector + 1) * 32);
            int k = 0;
            while (k < count_of && sectors[k] != sector) ++k;
            if (k == count_of) sectors[count_of] = sector, bytes[count_of++] = 0;
            bytes[k] |= (next - at == 32 ? ~0u : ((1u << (next - at)) - 1) << at % 32);
            at = next;
        }
    u64 touched = 0;
    for (int k = 0; k < count_of; ++k) touched += std::popcount(bytes[k]);
    if (lanes) count(w, i, count_of, (touched + 31) / 32);
}

// Wavefronts: lanes of 16 bytes come by eights, of 8 by sixteens. One takes a word of each of the 32 banks, for all
// lanes that want it.
inline void count_wavefronts(Warp& w, const Instruction& i, const u32* addresses, int lanes, u32 size) {
    const int together = int(128 / std::max(size, 4u)), words = int(std::max(size, 4u) / 4);
    u64 wavefronts = 0, least = 0;
    for (int first = 0; first < lanes; first += together) {
        u32 of_bank[32][32];
        int count_of[32] = {}, most = 0, distinct = 0;
        for (int l = first; l < std::min(lanes, first + together); ++l)
            for (int k = 0; k < words; ++k) {
                const u32 word = addresses[l] / 4 + u32(k), bank = word % 32;
                if (std::find(of_bank[bank], of_bank[bank] + count_of[bank], word) != of_bank[bank] + count_of[bank]) continue;
                of_bank[bank][count_of[bank]++] = word, ++distinct;
                most = std::max(most, count_of[bank]);
            }
        wavefronts += most, least += (distinct + 31) / 32;
    }
    if (lanes) count(w, i, wavefronts, least);
}
