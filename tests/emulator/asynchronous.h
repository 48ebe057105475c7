// Instructions that go on in the background until something waits for them: wgmma and cp.async.
#pragma once
#include "instructions.h"

// Products of four warps (wgmma), of which each has 16 of the 64 rows. They are computed at once; where they are
// waited for, their operands in shared memory must still be what they were.
u32 element_of(const Operand& o, int row, int k) {  // its address; see "matrix descriptor" in the PTX manual
    const u64 d = o.descriptor;
    const u32 start = u32(d & 0x3fff) << 4, leading = u32(d >> 16 & 0x3fff) << 4, stride = u32(d >> 32 & 0x3fff) << 4;
    const u32 mode = u32(d >> 62), width = mode ? 256u >> mode : 16;  // bytes of a row: 128, 64 and 32, or none swizzled
    const u32 along = u32(o.transposed ? row : k) * o.size, across = u32(o.transposed ? k : row);
    const u32 address = start + across / 8 * (mode == 0 && o.transposed ? leading : stride)
        + along / width * (mode == 0 && o.transposed ? stride : leading) + across % 8 * width + along % width;
    return mode ? address ^ ((address >> 7 & (width / 16 - 1)) << 4) : address;
}
template <class F> u64 read_operand(Warp& w, const Operand& o, F use) {
    u64 sum = 0;
    for (int row = 0; row < o.rows; ++row)
        for (int k = 0; k < 32 / o.size; ++k) {
            u32 bits = ~0u;
            const u32 address = element_of(o, o.first + row, k);
            if (const char* from = shared_at(w, -1, address, o.size, nullptr)) bits = 0, std::memcpy(&bits, from, o.size);
            sum = (sum ^ bits) * 0x100000001b3;
            use(row, k, bits);
        }
    return sum;
}
template <class T, class Sum> Sum number_of_bits(u32 bits) {
    if constexpr (sizeof(T) == 4) return tf32(bits);
    else if constexpr (sizeof(T) == 2) return Sum(float(std::bit_cast<T>(u16(bits))));
    else return Sum(std::bit_cast<T>(u8(bits)));
}
// i.a is how many columns there are, with flags; the registers are those of the result, then those of A if any.
template <class T, class Sum, class Acc> void group_product(Warp& w, const Instruction& i, u32 mask) {
    together(w, mask, ~0u);
    constexpr int size = sizeof(T), count = 4 / size, depth = 32 / size;
    const int columns = i.a & 0xffff;
    const s32 *d = w.cta->launch->pool + i.b, *a = d + columns / 2;
    static thread_local Sum A[16][32], B[256][32];
    if (i.a >> 16 & 1) {
        for (int l = 0; l < 32; ++l)
            for (int r = 0; r < 4; ++r)
                for (int j = 0; j < count; ++j)
                    A[(l >> 2) + 8 * (r & 1)][(r >> 1) * 4 * count + (l & 3) * count + j] =
                        number_of_bits<T, Sum>(get<u32>(w.r + a[r], l) >> 8 * size * j);
    } else {
        Operand o{get<u64>(w.r + i.o[0], 0), 0, 16 * (w.index & 3), 16, size, bool(i.a >> 17 & 1)};
        o.sum = read_operand(w, o, [](int row, int k, u32 bits) { A[row][k] = number_of_bits<T, Sum>(bits); });
        w.operands.push_back(o);
    }
    Operand o{get<u64>(w.r + i.o[1], 0), 0, 0, columns, size, bool(i.a >> 18 & 1)};
    o.sum = read_operand(w, o, [](int row, int k, u32 bits) { B[row][k] = number_of_bits<T, Sum>(bits); });
    w.operands.push_back(o);
    const bool adds = predicate(w, i.o[2]) & 1;
    for (int l = 0; l < 32; ++l)
        for (int r = 0; r < columns / 2; ++r) {
            const int row = (l >> 2) + 8 * (r >> 1 & 1), column = 8 * (r >> 2) + 2 * (l & 3) + (r & 1);
            Sum sum = adds ? Sum(get<Acc>(w.r + d[r], l)) : Sum(0);
            for (int k = 0; k < depth; ++k) sum += A[row][k] * B[column][k];
            put<Acc>(w.r + d[r], l, Acc(sum));
        }
}
void product_commit(Warp& w, const Instruction&, u32 mask) {
    together(w, mask, ~0u);
    w.products.emplace_back().swap(w.operands);
}
void product_wait(Warp& w, const Instruction& i, u32 mask) {
    together(w, mask, ~0u);
    for (; int(w.products.size()) > i.a; w.products.pop_front())
        for (const Operand& o : w.products.front())
            if (read_operand(w, o, [](int, int, u32) {}) != o.sum) fault(w, OVERWRITTEN, 0, element_of(o, o.first, 0));
}

// Copies in the background take place when they are waited for, as late as they may; until then what they
// write is poison. i.a is their size, i.b the displacement of the destination, o[2] how much is read.
void copy_start(Warp& w, const Instruction& i, u32 mask) {
    static const char poison[16] = {-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1};
    each(mask, [&](int l) {
        const u32 to = get<u32>(w.r + i.o[0], l) + u32(i.b);
        const u64 from = get<u64>(w.r + i.o[1], l) + s64(i.o[3]);
        const u32 size = i.a, read = std::min(size, get<u32>(w.r + i.o[2], l));
        if (read && !global_at(w, l, from, read, nullptr)) return;
        for (u32 k = to; k < std::min<u64>(to + size, w.cta->shared.size()); ++k)
            if (w.cta->pending[k]) fault(w, PENDING, l, k);
        if (char* place = shared_at(w, l, to, size, poison, true)) {
            std::memcpy(place, poison, size);
            std::fill_n(w.cta->pending.begin() + to, size, 1);
            w.copies.push_back({to, from, size, read, l});
        }
    });
}
void copy_commit(Warp& w, const Instruction&, u32 mask) {
    together(w, mask, ~0u);
    w.groups.emplace_back().swap(w.copies);
}
void copy_wait(Warp& w, const Instruction& i, u32 mask) {
    together(w, mask, ~0u);
    if (i.a < 0) copy_commit(w, i, mask);  // cp.async.wait_all
    for (; int(w.groups.size()) > std::max(i.a, 0); w.groups.pop_front())
        for (const Copy& c : w.groups.front()) {
            char bytes[16] = {};
            std::memcpy(bytes, reinterpret_cast<const char*>(c.from), c.read);
            std::fill_n(w.cta->pending.begin() + c.to, c.size, 0);
            if (char* place = shared_at(w, c.lane, c.to, c.size, bytes, true)) std::memcpy(place, bytes, c.size);
        }
}
