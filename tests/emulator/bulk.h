// Bulk copies of boxes (TMA) between global and shared memory, and the mbarriers that count their bytes.
#pragma once
#include "asynchronous.h"

// The leader of a warp is its first lane.
void elect(Warp& w, const Instruction& i, u32 mask) {
    together(w, mask, get<u32>(w.r + i.o[2], std::countr_zero(mask)));
    const u32 leader = mask & -mask;
    each(mask, [&](int l) { put<u32>(w.r + i.o[0], l, std::countr_zero(mask)); });
    u32& p = predicate(w, i.o[1]);
    p = (p & ~mask) | leader;
}

// Returns the mbarrier at an address, after the checks of a read of it; null if there is none. A proxy fence between its
// initialization and a bulk copy is not asked for: Triton's compiler makes none there.
Mbarrier* mbarrier_at(Warp& w, int lane, u32 address) {
    shared_at(w, lane, address, 8, nullptr);
    auto it = w.cta->mbarriers.find(address);
    return it == w.cta->mbarriers.end() ? (fault(w, UNINITIALIZED, lane, address), nullptr) : &it->second;
}
u32 mbarrier_address(Warp& w, const Instruction& i, int lane) { return get<u32>(w.r + i.o[0], lane) + u32(i.b); }
void mbarrier_init(Warp& w, const Instruction& i, u32 mask) {
    each(mask, [&](int l) {
        const u32 address = mbarrier_address(w, i, l);
        const u64 value = ++w.cta->mbarrier_count;
        if (char* place = shared_at(w, l, address, 8, reinterpret_cast<const char*>(&value))) std::memcpy(place, &value, 8);
        w.cta->mbarriers[address] = {w.cta->mbarrier_count, u32(i.a), u32(i.a), 0, 0, {}, {}, {}, {}, {}};
    });
}
// Afterwards the memory is as if nobody had written it: PTX lets it serve for anything. Triton's loads in a loop of one step
// put the second tile over the mbarrier of the first, without a proxy fence.
void mbarrier_invalidate(Warp& w, const Instruction& i, u32 mask) {
    each(mask, [&](int l) {
        const u32 address = mbarrier_address(w, i, l);
        const u64 value = 0;
        if (Mbarrier* m = mbarrier_at(w, l, address); m && !m->copies.empty()) fault(w, UNWAITED, l, address);
        char* place = shared_at(w, l, address, 8, reinterpret_cast<const char*>(&value));
        if (place) std::memcpy(place, &value, 8), std::memset(&w.cta->written[address], 0, 8);
        w.cta->mbarriers.erase(address);
    });
}
inline void end_phase_if_complete(Warp& w, Mbarrier& m) {
    if (m.waited_for || m.bytes) return;
    ++m.phase, m.waited_for = m.count;
    join(m.released, m.gathered), join(m.released_fences, m.gathered_fences);
    const size_t place = w.cta->warps.size() + m.id;
    if (m.released.size() <= place) m.released.resize(place + 1);
    m.released[place] = m.phase;
}
inline void release(Warp& w, Mbarrier& m) {
    join(m.gathered, w.clock), join(m.gathered_fences, w.fenced), ++w.clock[w.index];
}
void mbarrier_arrive(Warp& w, const Instruction& i, u32 mask) {
    each(mask, [&](int l) {
        Mbarrier* m = mbarrier_at(w, l, mbarrier_address(w, i, l));
        if (!m) return;
        if (m->waited_for < u32(i.a)) return fault(w, BARRIER, l, mbarrier_address(w, i, l));  // more arrive than it counts
        m->waited_for -= i.a;
        release(w, *m);
        end_phase_if_complete(w, *m);
    });
}
void mbarrier_expect(Warp& w, const Instruction& i, u32 mask) {
    each(mask, [&](int l) {
        Mbarrier* m = mbarrier_at(w, l, mbarrier_address(w, i, l));
        if (!m) return;
        if (m->waited_for == 0) return fault(w, BARRIER, l, mbarrier_address(w, i, l));  // more arrive than it counts
        --m->waited_for, m->bytes += i.a;
        release(w, *m);
        end_phase_if_complete(w, *m);
    });
}

// A box ------------------------------------------------------------------------------------------------------

inline u32 box_row(const TensorMap& m) { return m.box_columns * m.size; }  // bytes
inline u32 place_in_box(const Bulk& c, u32 byte) {  // rows one after the other, of which 16 bytes each are swizzled
    const u32 address = c.shared + byte, mask = c.map->swizzle ? (1u << c.map->swizzle) - 1 : 0;
    return address ^ (address >> 7 & mask) << 4;
}
// Calls f(address in shared memory, address in global memory or 0, bytes) for every run of bytes of a box, at most 16.
template <class F> void each_run(const Bulk& c, F f) {
    const TensorMap& m = *c.map;
    for (u32 row = 0; row < m.box_rows; ++row)
        for (u32 byte = 0; byte < box_row(m); byte += 16) {
            const u32 bytes = std::min(16u, box_row(m) - byte);
            const s64 y = s64(c.row) + row, x = s64(c.column) * m.size + byte, end = s64(m.columns) * m.size;
            const bool is_inside = y >= 0 && y < m.rows && x >= 0 && x < end;
            const u32 inside = is_inside ? u32(std::min<s64>(bytes, end - x)) : 0;  // columns are a multiple of 16 bytes
            f(place_in_box(c, row * box_row(m) + byte), is_inside ? m.address + u64(y) * m.row_bytes + u64(x) : 0, bytes, inside);
        }
}
Bulk bulk_copy(Warp& w, const Instruction& i, int lane) {
    auto* map = reinterpret_cast<const TensorMap*>(w.cta->launch->parameters + get<u64>(w.r + i.o[0], lane));
    Bulk copy{map, get<s32>(w.r + i.o[1], lane), get<s32>(w.r + i.o[2], lane), get<u32>(w.r + i.o[3], lane), lane, w.pc, 0};
    if (copy.shared % 128) fault(w, UNALIGNED, lane, copy.shared);
    return copy;
}

// A box comes as late as it may: when a warp waits for the mbarrier. Until then poison lies there.
void bulk_load(Warp& w, const Instruction& i, u32 mask) {
    static const char poison[16] = {-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1};
    each(mask, [&](int l) {
        const Bulk copy = bulk_copy(w, i, l);
        check_waited(w, l, copy.map->address);
        Mbarrier* m = mbarrier_at(w, l, get<u32>(w.r + i.o[4], l));
        each_run(copy, [&](u32 to, u64, u32 bytes, u32) {
            if (char* place = shared_at(w, l, to, bytes, poison, BY_PROXY)) {
                std::memcpy(place, poison, bytes);
                std::fill_n(w.cta->pending.begin() + to, bytes, 1);
            }
        });
        if (m) m->copies.push_back(copy);
    });
}
void finish_load(Warp& w, Mbarrier& m) {  // of the oldest copy
    const Bulk copy = m.copies.front();
    m.copies.pop_front();
    const int pc = std::exchange(w.pc, copy.pc);
    each_run(copy, [&](u32 to, u64 from, u32 bytes, u32 inside) {
        if (to + bytes > w.cta->shared.size()) return;
        char* place = reinterpret_cast<char*>(w.cta->shared.data()) + to;
        std::memset(place, 0, bytes);
        if (inside && global_at(w, copy.lane, from, inside, nullptr)) std::memcpy(place, reinterpret_cast<char*>(from), inside);
        std::fill_n(w.cta->pending.begin() + to, bytes, 0);
        for (u32 k = to; k < to + bytes; ++k) {
            Shadow& s = w.cta->shadow[k];
            s.writer = BULK, s.write_epoch = m.id, s.write_sync = m.phase + 1;
        }
        m.bytes -= bytes;
    });
    w.pc = pc;
    end_phase_if_complete(w, m);
}
void mbarrier_wait(Warp& w, const Instruction& i, u32 mask) {  // the predicate, the address, the parity
    const int first = std::countr_zero(mask);
    const u32 address = get<u32>(w.r + i.o[1], first) + u32(i.b), parity = get<u32>(w.r + i.o[2], first) & 1;
    Mbarrier* m = mbarrier_at(w, -1, address);
    predicate(w, i.o[0]) |= mask;
    if (!m) return;
    while ((m->phase & 1) == parity && m->waited_for == 0 && !m->copies.empty()) finish_load(w, *m);
    if ((m->phase & 1) == parity) w.state = BLOCKED;
    else join(w.clock, m->released), join(w.fenced, m->released_fences);
}

// A box goes when its thread waits for it, and is checked when it starts, too.
template <class F> u64 read_box(Warp& w, const Bulk& copy, F use) {
    u64 sum = 0;
    each_run(copy, [&](u32 from, u64 to, u32 bytes, u32 inside) {
        char* place = inside ? shared_at(w, copy.lane, from, bytes, nullptr, BY_PROXY) : nullptr;
        for (u32 k = 0; place && k < inside; ++k) sum = (sum ^ u8(place[k])) * 0x100000001b3;
        if (place) use(place, to, inside);
    });
    return sum;
}
void bulk_store(Warp& w, const Instruction& i, u32 mask) {
    each(mask, [&](int l) {
        Bulk copy = bulk_copy(w, i, l);
        check_waited(w, l, copy.map->address);
        copy.sum = read_box(w, copy, [](char*, u64, u32) {});
        w.stores.push_back(copy);
    });
}
void bulk_commit(Warp& w, const Instruction&, u32) { w.store_groups.emplace_back().swap(w.stores); }
void bulk_wait(Warp& w, const Instruction& i, u32) {
    for (; int(w.store_groups.size()) > i.a; w.store_groups.pop_front())
        for (const Bulk& copy : w.store_groups.front()) {
            const int pc = std::exchange(w.pc, copy.pc);
            const u64 sum = read_box(w, copy, [&](char* from, u64 to, u32 bytes) {
                if (char* place = global_at(w, copy.lane, to, bytes, from)) std::memcpy(place, from, bytes);
            });
            if (sum != copy.sum) fault(w, OVERWRITTEN, copy.lane, copy.shared);
            w.pc = pc;
        }
}
