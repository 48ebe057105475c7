// Executes decoded PTX on a CPU: the programs (CTAs) of a grid one by one, their warps in turn from barrier to
// barrier; the 32 lanes of a warp together. ptx.py decodes PTX into `Instruction`s, program.py names the faults.
#include "table.h"

enum Control { BRANCH = -1, RETURN = -2, BARRIER_SYNC = -3, BRANCH_TABLE = -4 };

// Where lanes have come to the place where all that went apart meet, or have ended, the others go on.
void regroup(Warp& w) {
    while (!w.others.empty() && (w.pc == w.join || !w.mask)) {
        w.pc = w.others.back().pc, w.mask = w.others.back().mask & w.alive, w.join = w.others.back().join;
        w.others.pop_back();
    }
}

void run_warp(Warp& w, u64 limit) {  // to a barrier, an mbarrier that is not complete or the end
    const Instruction* code = w.cta->launch->code;
    Launch& launch = *w.cta->launch;
    w.state = READY;
    while (w.alive) {
        const Instruction& i = code[w.pc];
        u32 mask = w.mask;
        if (i.guard >= 0) mask &= i.guard_not ? ~predicate(w, i.guard) : predicate(w, i.guard);
        ++launch.warp_instructions, launch.thread_instructions += std::popcount(mask);
        if (launch.warp_instructions > limit) {
            fault(w, ENDLESS, 0), w.alive = 0;
            return;
        }
        if (i.op >= 0) {
            if (mask) handlers[i.op](w, i, mask);
            if (w.state == BLOCKED) return;
            ++w.pc;
        } else if (i.op == BRANCH) {
            const int next = w.pc + 1;
            w.pc = mask ? i.a : next;
            if (mask && mask != w.mask) {
                w.others.push_back({i.b, w.mask, w.join});
                w.others.push_back({next, w.mask & ~mask, i.b});
                w.mask = mask, w.join = i.b;
            }
        } else if (i.op == RETURN) {
            w.alive &= ~mask, w.mask &= ~mask, ++w.pc;
        } else if (i.op == BRANCH_TABLE) {  // all lanes go the same way
            const u32 index = get<u32>(w.r + i.o[0], std::countr_zero(mask));
            each(mask, [&](int l) { if (get<u32>(w.r + i.o[0], l) != index) fault(w, DIVERGENT, l); });
            if (index >= u32(i.b)) { fault(w, OUTSIDE, 0), w.alive = 0; return; }
            w.pc = w.cta->launch->pool[i.a + index];
        } else if (mask) {  // a barrier
            if (mask != w.alive || w.alive != ~0u) fault(w, DIVERGENT, std::countr_zero(w.alive & ~mask));
            w.barrier = i.a, w.expected = i.b, ++w.pc, w.state = ARRIVED;
            regroup(w);
            return;
        } else ++w.pc;
        if (w.pc == w.join || !w.mask) regroup(w);
    }
    const bool is_waited_for = w.copies.empty() && w.groups.empty() && w.products.empty() && w.product_groups.empty()
        && w.stores.empty() && w.store_groups.empty();
    if (!is_waited_for) --w.pc, fault(w, UNWAITED, 0);
}

// What all warps at a barrier have behind them once they have met.
void meet(Cta& cta, int barrier) {
    Clocks clock, fenced;
    bool is_everyone = true;
    for (Warp& w : cta.warps)
        if (w.state == ARRIVED && w.barrier == barrier) join(clock, w.clock), join(fenced, w.fenced);
        else is_everyone = false;
    for (Warp& w : cta.warps)
        if (w.state == ARRIVED && w.barrier == barrier)
            w.clock = clock, w.fenced = fenced, ++w.clock[w.index], ++w.sync, w.state = READY, w.barrier = -1;
    cta.everyone += is_everyone;
}
// Lets the warps on that wait at a barrier of which enough have come; returns whether there was one.
bool meet_where_complete(Cta& cta) {
    bool met = false;
    for (int barrier = 0; barrier < 16; ++barrier) {
        u32 arrived = 0, expected = 0, ended = 0;
        Warp* first = nullptr;
        for (Warp& w : cta.warps) {
            ended += !w.alive;
            if (!w.alive || w.state != ARRIVED || w.barrier != barrier) continue;
            const u32 wanted = w.expected ? w.expected : u32(cta.warps.size()) * 32;
            if (first && wanted != expected) fault(w, BARRIER, 0);
            if (!first) first = &w, expected = wanted;
            if (!w.expected) expected = wanted;
            arrived += 32;
        }
        if (!first) continue;
        if (!first->expected) expected -= 32 * ended;
        if (arrived > expected) fault(*first, BARRIER, 0);
        if (arrived >= expected) meet(cta, barrier), met = true;
    }
    return met;
}
// Runs the warps of a program in turn until all have ended; a warp that waits for an mbarrier or at a barrier goes on when
// others have made it complete.
void run_program(Cta& cta, u64 limit) {
    for (bool moved = true; moved;) {
        moved = false;
        for (Warp& w : cta.warps) {
            if (!w.alive || w.state == ARRIVED) continue;
            const int pc = w.state == BLOCKED ? w.pc : -1;
            run_warp(w, limit);
            moved |= w.state != BLOCKED || w.pc != pc;
        }
        moved |= meet_where_complete(cta);
    }
    for (Warp& w : cta.warps) {  // and nobody can make it complete
        if (w.alive && w.state == BLOCKED) fault(w, ENDLESS, 0);
        if (w.alive && w.state == ARRIVED) --w.pc, fault(w, BARRIER, 0);
        w.alive = 0;
    }
}

struct Constant { s32 offset, wide; u64 value; };

extern "C" {
int operation(const char* name) {
    if (handlers.empty()) fill_table();
    auto it = numbers.find(name);
    return it == numbers.end() ? INT_MIN : it->second;
}

// Runs a grid; returns the number of faults, of which at most `most` are written.
int run(const Instruction* code, const s32* pool, int register_bytes, const Constant* constants, int constant_count,
        const char* parameters, const u32* grid, u32 threads, u32 shared_bytes, const Region* regions, int region_count,
        FaultRecord* faults, int most, u64 limit, u64* totals, bool overlaps) {
    Launch launch{code, pool, {regions, regions + region_count}, {}, parameters, {grid[0], grid[1], grid[2]}, threads, shared_bytes, overlaps, {}};
    for (const Region& r : launch.regions) launch.shadows.emplace_back(r.end - r.begin);
    const int warp_count = int(threads) / 32;
    std::vector<std::vector<char>> registers(warp_count, std::vector<char>(register_bytes));
    u32 number = 0;
    for (u32 z = 0; z < grid[2]; ++z) for (u32 y = 0; y < grid[1]; ++y) for (u32 x = 0; x < grid[0]; ++x) {
        Cta cta;
        cta.launch = &launch, cta.id[0] = x, cta.id[1] = y, cta.id[2] = z, cta.number = number++;
        cta.shared.assign(shared_bytes, 0xff), cta.written.assign(shared_bytes, 0);
        cta.pending.assign(shared_bytes, 0), cta.shadow.assign(shared_bytes, Shadow{});
        cta.reads.assign(size_t(shared_bytes) * warp_count, 0);
        cta.waits.assign(warp_count, 0);
        cta.warps.resize(warp_count);
        for (int k = 0; k < warp_count; ++k) {
            Warp& w = cta.warps[k];
            w.r = registers[k].data(), w.cta = &cta, w.index = k, w.mask = w.alive = ~0u;
            w.clock.assign(warp_count, 0), w.clock[k] = 1, w.fenced.assign(warp_count, 0);
            std::memset(w.r, 0xcb, register_bytes);
            for (int c = 0; c < constant_count; ++c)
                for (int l = 0; l < 32; ++l)
                    if (constants[c].wide) put<u64>(w.r + constants[c].offset, l, constants[c].value);
                    else put<u32>(w.r + constants[c].offset, l, u32(constants[c].value));
        }
        run_program(cta, limit);
        const bool has_waited = std::any_of(cta.waits.begin(), cta.waits.end(), [](u32 time) { return time; });
        if (overlaps && !has_waited) fault(cta.warps[0], UNORDERED, 0);  // it may end before the kernel before
        for (auto& [address, m] : cta.mbarriers)
            if (!m.copies.empty()) cta.warps[0].pc = m.copies.front().pc, fault(cta.warps[0], UNWAITED, 0, address);
    }
    int count = 0;
    for (auto& [key, record] : launch.faults)
        if (count++ < most) faults[count - 1] = record;
    totals[0] = launch.warp_instructions, totals[1] = launch.thread_instructions;
    return count;
}
}
