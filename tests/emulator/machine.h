// The state of a launch, and every access to memory, which is checked before it takes place.
#pragma once
#include <deque>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "numbers.h"

struct Instruction {  // as program.py packs it
    s32 op, guard, guard_not, a, b, line;
    s32 o[18];  // registers, as offsets into those of a warp
};
enum Fault {  // as program.py names them
    OUTSIDE, UNALIGNED, UNINITIALIZED, PENDING, RACE_READ, RACE_WRITE, RACE_OVER_READ, DIVERGENT, BARRIER, ENDLESS,
    STALE, UNWAITED, OVERWRITTEN, UNFENCED, EARLY, UNORDERED,
};
struct FaultRecord { s32 kind, pc, program, thread, other, count; u64 address; };
struct Region { u64 begin, end; const u8* allowed; };

struct Shadow {  // who touched a byte, and when: barriers of the program and of the warp before, fences of its warp
    u32 writer = 0, write_epoch = 0, write_sync = 0, reader = 0, read_epoch = 0, read_sync = 0;
};
constexpr u32 ANY_LANE = 1u << 11, ANY_WARP = ~0u >> 1;  // several threads of a warp; of several warps
constexpr u32 BULK = 1;  // the writer is a bulk copy: write_epoch is its mbarrier, write_sync the phase that it ends

struct Copy { u32 to; u64 from; u32 size, read; int lane; };
struct Operand {  // of a wgmma in shared memory: its descriptor, which rows of it, and what was read
    u64 descriptor, sum;
    int first, rows, size;
    bool transposed;
};
struct Product;
using ProductRun = void (*)(struct Warp&, Product&);
struct Product {  // a wgmma under way: what it was given, and its sums once it is computed
    const struct Instruction* instruction;
    ProductRun compute;
    std::vector<Operand> operands;
    std::vector<u32> sums;
    bool adds, from_registers;
};
struct Move { s32 to, from; u32 mask; };  // of a register that a product under way will write
struct TensorMap { u64 address; u32 columns, rows, row_bytes, size, box_columns, box_rows, swizzle; };  // as program.py packs it
struct Bulk { const TensorMap* map; s32 column, row; u32 shared; int lane, pc; u64 sum; };  // a copy of a box
using Clocks = std::vector<u32>;  // what happened before: of each warp and, behind them, of each mbarrier its phases
inline void join(Clocks& to, const Clocks& from) {
    if (to.size() < from.size()) to.resize(from.size());
    for (size_t k = 0; k < from.size(); ++k) to[k] = std::max(to[k], from[k]);
}
inline u32 at(const Clocks& c, size_t k) { return k < c.size() ? c[k] : 0; }
struct Mbarrier { u32 id, count, waited_for, phase; s64 bytes; std::deque<Bulk> copies; Clocks gathered, gathered_fences, released, released_fences; };
struct Split { int pc; u32 mask; int join; };  // lanes that are elsewhere, and where they meet the others
enum State { READY, BLOCKED, ARRIVED };  // able to run, waiting for an mbarrier, at a barrier of the program
struct Cta;
struct Warp {
    char* r = nullptr;
    Cta* cta = nullptr;
    int index = 0, pc = 0, join = -1, barrier = -1;  // barrier: its number
    u32 expected = 0;  // threads at that barrier, 0 for all
    Clocks clock, fenced;  // what happened before; and of that, before a proxy fence
    State state = READY;
    u32 mask = 0, alive = 0, sync = 0;
    std::vector<Split> others;
    std::vector<Copy> copies;
    std::deque<std::vector<Copy>> groups;
    std::vector<Product> products;
    std::deque<std::vector<Product>> product_groups;
    std::vector<Move> moves;
    std::vector<Bulk> stores;
    std::deque<std::vector<Bulk>> store_groups;
};
struct Launch {
    const Instruction* code;
    const s32* pool;  // the registers of a wgmma
    std::vector<Region> regions;
    std::vector<std::vector<Shadow>> shadows;
    const char* parameters;
    u32 grid[3], threads, shared_bytes;
    bool overlaps;  // the kernel before may still run: see griddepcontrol.wait
    std::unordered_map<u64, FaultRecord> faults;
    u64 warp_instructions = 0, thread_instructions = 0;
};
struct Cta {
    Launch* launch = nullptr;
    u32 id[3], number = 0, everyone = 1;  // everyone: counts barriers of all warps
    Clocks waits;  // of each warp, its time at griddepcontrol.wait, or 0
    Clocks reads;  // of each byte of shared memory, the time of each warp's last read
    std::vector<u8> shared, written, pending;
    std::vector<Shadow> shadow;
    std::unordered_map<u32, Mbarrier> mbarriers;  // by address
    u32 mbarrier_count = 0;
    std::vector<Warp> warps;
};

void fault(Warp& w, int kind, int lane, u64 address = 0, int other = -1) {
    auto [it, is_new] = w.cta->launch->faults.try_emplace(u64(kind) << 32 | u32(w.pc));
    if (is_new)
        it->second = {kind, w.pc, int(w.cta->number), w.index * 32 + lane, other, 0, address};
    ++it->second.count;
}

// Registers of up to 32 bits lie in 32 words, those of 64 bits in 32 double words; a predicate is one word.
template <class T> inline T get(const char* r, int lane) {
    if constexpr (sizeof(T) == 8) return std::bit_cast<T>(reinterpret_cast<const u64*>(r)[lane]);
    const u32 word = reinterpret_cast<const u32*>(r)[lane];
    if constexpr (sizeof(T) == 4) return std::bit_cast<T>(word);
    else if constexpr (sizeof(T) == 2) return std::bit_cast<T>(u16(word));
    else if constexpr (sizeof(T) == 1) return std::bit_cast<T>(u8(word));
}
template <class T> inline void put(char* r, int lane, T value) {
    if constexpr (sizeof(T) == 8) reinterpret_cast<u64*>(r)[lane] = std::bit_cast<u64>(value);
    else if constexpr (sizeof(T) == 4) reinterpret_cast<u32*>(r)[lane] = std::bit_cast<u32>(value);
    else if constexpr (sizeof(T) == 2) reinterpret_cast<u32*>(r)[lane] = std::bit_cast<u16>(value);
    else reinterpret_cast<u32*>(r)[lane] = u32(s32(value));  // of a byte, the sign goes on
}
inline u32& predicate(Warp& w, int r) { return *reinterpret_cast<u32*>(w.r + r); }

template <class F> inline void each(u32 mask, F f) {
    if (mask == ~0u) for (int lane = 0; lane < 32; ++lane) f(lane);
    else for (u32 m = mask; m; m &= m - 1) f(std::countr_zero(m));
}

// Memory ----------------------------------------------------------------------------------------------------

// Threads are numbered program << 12 | several << 11 | warp << 5 | lane; 0xfff stands for several warps.
inline int warp_of(u32 who) { return (who & 0xfff) == 0xfff ? -1 : int(who >> 5 & 31); }
inline bool ordered(u32 who, u32 epoch, u32 sync, const Warp& w, u32 me) {
    if (who == 0 || who == me) return true;
    if (who == BULK) return at(w.clock, w.cta->warps.size() + epoch) >= sync;
    const u32 program = w.cta->number + 1;
    if (who >> 12 != program) return false;  // of another program, whatever the time
    if (warp_of(who) < 0) return epoch < w.cta->everyone;
    if (warp_of(who) != w.index) return at(w.clock, warp_of(who)) >= epoch;
    return sync < w.sync;
}
inline u32 number_of(const Warp& w, int lane) {
    const u32 base = (w.cta->number + 1) << 12 | u32(w.index) << 5;
    return lane < 0 ? base | ANY_LANE : base | u32(lane);
}

// Says what it is that an access is not ordered after.
inline void unordered(Warp& w, int kind, u32 who, int lane, u64 address) {
    const bool is_own = who >> 12 == w.cta->number + 1;
    fault(w, who == BULK ? PENDING : is_own ? kind : STALE, std::max(lane, 0), address, who == BULK ? -1 : who & 0x7ff);
}
void note_read(Warp& w, Shadow& s, int lane, u64 address) {
    const u32 me = number_of(w, lane);
    if (!ordered(s.writer, s.write_epoch, s.write_sync, w, me)) unordered(w, RACE_READ, s.writer, lane, address);
    u32 epoch = at(w.clock, w.index);
    if (s.reader && s.reader >> 12 != me >> 12) s.reader = ANY_WARP;  // several programs
    else if (s.reader && s.reader != me && !ordered(s.reader, s.read_epoch, s.read_sync, w, me)) {
        const bool is_own = warp_of(s.reader) == w.index;
        s.reader = is_own ? number_of(w, -1) : (me | 0xfff);
        if (!is_own) epoch = w.cta->everyone;
    } else s.reader = me;
    s.read_epoch = epoch, s.read_sync = w.sync;
}
// Of a warp that loads one number into all lanes and stores another from one, only lanes that part make a race:
// in global memory that is left to the warp.
void note_write(Warp& w, Shadow& s, int lane, u64 address, bool changes, bool is_global) {
    const u32 me = number_of(w, lane);
    if (changes && !ordered(s.writer, s.write_epoch, s.write_sync, w, me))
        unordered(w, RACE_WRITE, s.writer, lane, address);
    const bool same_warp = s.reader >> 12 == me >> 12 && warp_of(s.reader) == w.index;
    if (changes && !(is_global && same_warp) && !ordered(s.reader, s.read_epoch, s.read_sync, w, me))
        unordered(w, RACE_OVER_READ, s.reader, lane, address);
    s.writer = me, s.write_epoch = at(w.clock, w.index), s.write_sync = w.sync;
}
// The asynchronous proxy (wgmma, bulk copies) sees what threads wrote after a fence.proxy.async: of the writer's warp
// after the write, or of any other after a barrier.
inline bool is_fenced(const Warp& w, const Shadow& s) {
    if (s.writer >> 12 != w.cta->number + 1) return true;  // a bulk copy, or nobody
    return at(w.fenced, warp_of(s.writer)) >= s.write_epoch;
}

// Returns where an access of a lane goes, after all checks; null if it must not take place.
// With `value`, it is a write of these bytes. A lane of -1 is the whole warp.
enum Way { BY_THREAD, BY_COPY, BY_PROXY };  // a copy in the background, which may write what is pending; wgmma or a bulk copy
char* shared_at(Warp& w, int lane, u32 address, u32 size, const char* value, Way way = BY_THREAD) {
    Cta& cta = *w.cta;
    if (address % size) fault(w, UNALIGNED, std::max(lane, 0), address);
    if (u64(address) + size > cta.shared.size()) return fault(w, OUTSIDE, std::max(lane, 0), address), nullptr;
    for (u32 i = address; i < address + size; ++i) {
        if (cta.pending[i] && way != BY_COPY) fault(w, PENDING, std::max(lane, 0), i);
        const size_t count = cta.warps.size();
        if (value) {
            const bool changes = cta.shared[i] != u8(value[i - address]) || way != BY_THREAD;
            const bool was_written = way == BY_PROXY && cta.written[i];
            if (was_written && !is_fenced(w, cta.shadow[i])) fault(w, UNFENCED, std::max(lane, 0), i);
            for (size_t k = 0; changes && k < count; ++k)  // every other warp's last read
                if (int(k) != w.index && cta.reads[i * count + k] > at(w.clock, k)) {
                    fault(w, RACE_OVER_READ, std::max(lane, 0), i, int(k) * 32);
                    break;
                }
            const bool is_own = warp_of(cta.shadow[i].reader) == w.index;  // others are looked at above
            if (!is_own) cta.shadow[i].reader = 0;
            note_write(w, cta.shadow[i], lane, i, changes, false);
            cta.written[i] = 1;
        } else {
            if (!cta.written[i]) fault(w, UNINITIALIZED, std::max(lane, 0), i);
            if (way == BY_PROXY && !is_fenced(w, cta.shadow[i])) fault(w, UNFENCED, std::max(lane, 0), i);
            note_read(w, cta.shadow[i], lane, i);
            cta.reads[i * count + w.index] = at(w.clock, w.index);
        }
    }
    return reinterpret_cast<char*>(cta.shared.data()) + address;
}
// Global memory may be touched once a warp has waited for the kernel before, and this one knows of it.
void check_waited(Warp& w, int lane, u64 address) {
    if (!w.cta->launch->overlaps) return;
    for (size_t k = 0; k < w.cta->waits.size(); ++k)
        if (w.cta->waits[k] && at(w.clock, k) >= w.cta->waits[k]) return;
    fault(w, EARLY, lane, address);
}
char* global_at(Warp& w, int lane, u64 address, u32 size, const char* value) {
    Launch& launch = *w.cta->launch;
    check_waited(w, lane, address);
    if (address % size) fault(w, UNALIGNED, lane, address);
    auto it = std::upper_bound(launch.regions.begin(), launch.regions.end(), address,
                               [](u64 a, const Region& r) { return a < r.begin; });
    if (it == launch.regions.begin() || address + size > (--it)->end)
        return fault(w, OUTSIDE, lane, address), nullptr;
    Shadow* shadow = launch.shadows[it - launch.regions.begin()].data() + (address - it->begin);
    const char* data = reinterpret_cast<const char*>(address);
    for (u32 i = 0; i < size; ++i) {
        if (!it->allowed[address - it->begin + i]) fault(w, OUTSIDE, lane, address + i);
        if (value) note_write(w, shadow[i], lane, address + i, data[i] != value[i], true);
        else note_read(w, shadow[i], lane, address + i);
    }
    return reinterpret_cast<char*>(address);
}
enum Space { GLOBAL, SHARED };
template <Space S> inline char* at(Warp& w, const Instruction& i, int lane, int r, u32 size, const char* value) {
    if constexpr (S == GLOBAL) return global_at(w, lane, get<u64>(w.r + r, lane) + s64(i.b), size, value);
    else return shared_at(w, lane, get<u32>(w.r + r, lane) + u32(i.b), size, value);
}
