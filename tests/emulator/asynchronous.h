// Instructions that go on in the background until something waits for them: wgmma and cp.async.
#pragma once
#include "instructions.h"

// Products of four warps (wgmma), of which each has 16 of the 64 rows. Between the instruction and its wait the operands
// may be read at any time: they are checked at both, and must be the same. The sums are poison until the wait.
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
            if (const char* from = shared_at(w, -1, address, o.size, nullptr, BY_PROXY)) bits = 0, std::memcpy(&bits, from, o.size);
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
template <class T, class Sum, class Acc> void compute_product(Warp& w, Product& p) {
    constexpr int size = sizeof(T), count = 4 / size, depth = 32 / size;
    const Instruction& i = *p.instruction;
    const int columns = i.a & 0xffff;
    const s32* a = w.cta->launch->pool + i.b + columns / 2;
    static thread_local Sum A[16][32], B[256][32];
    auto reread = [&](const Operand& o, Sum(*numbers)[32]) {
        const u64 sum = read_operand(w, o, [=](int row, int k, u32 bits) { numbers[row][k] = number_of_bits<T, Sum>(bits); });
        if (sum != o.sum) fault(w, OVERWRITTEN, 0, element_of(o, o.first, 0));
    };
    if (p.from_registers) {
        for (int l = 0; l < 32; ++l)
            for (int r = 0; r < 4; ++r)
                for (int j = 0; j < count; ++j)
                    A[(l >> 2) + 8 * (r & 1)][(r >> 1) * 4 * count + (l & 3) * count + j] =
                        number_of_bits<T, Sum>(get<u32>(w.r + a[r], l) >> 8 * size * j);
    } else reread(p.operands.back(), A);
    reread(p.operands.front(), B);
    for (int l = 0; l < 32; ++l)
        for (int r = 0; r < columns / 2; ++r) {
            const int row = (l >> 2) + 8 * (r >> 1 & 1), column = 8 * (r >> 2) + 2 * (l & 3) + (r & 1);
            u32& bits = p.sums[32 * r + l];
            Sum sum = p.adds ? Sum(std::bit_cast<Acc>(bits)) : Sum(0);
            for (int k = 0; k < depth; ++k) sum += A[row][k] * B[column][k];
            bits = std::bit_cast<u32>(Acc(sum));
        }
}
// Calls a function for each product under way, the oldest first.
template <class F> void each_product(Warp& w, F f) {
    for (auto& group : w.product_groups) for (Product& p : group) f(p);
    for (Product& p : w.products) f(p);
}
inline const s32* sum_registers(const Warp& w, const Product& p) { return w.cta->launch->pool + p.instruction->b; }
// Triton's compiler moves sums on before it waits for them, and waits for the copies: these are filled at the wait, too.
void move_word(Warp& w, const Instruction& i, u32 mask) {
    each(mask, [&](int l) { put<u32>(w.r + i.o[0], l, get<u32>(w.r + i.o[1], l)); });
    bool is_under_way = false;
    each_product(w, [&](Product& p) {
        const s32* sums = sum_registers(w, p);
        is_under_way |= std::find(sums, sums + p.sums.size() / 32, i.o[1]) != sums + p.sums.size() / 32;
    });
    if (is_under_way) w.moves.push_back({i.o[0], i.o[1], mask});
}
template <class T, class Sum, class Acc> void product_start(Warp& w, const Instruction& i, u32 mask) {
    together(w, mask, ~0u);
    const int columns = i.a & 0xffff, size = sizeof(T);
    const s32* d = w.cta->launch->pool + i.b;
    Product p{&i, compute_product<T, Sum, Acc>, {}, {}, bool(predicate(w, i.o[2]) & 1), bool(i.a >> 16 & 1)};
    p.operands.push_back({get<u64>(w.r + i.o[1], 0), 0, 0, columns, size, bool(i.a >> 18 & 1)});
    if (!p.from_registers)
        p.operands.push_back({get<u64>(w.r + i.o[0], 0), 0, 16 * (w.index & 3), 16, size, bool(i.a >> 17 & 1)});
    for (Operand& o : p.operands) o.sum = read_operand(w, o, [](int, int, u32) {});
    for (int r = 0; r < columns / 2; ++r)
        for (int l = 0; l < 32; ++l) p.sums.push_back(get<u32>(w.r + d[r], l)), put<u32>(w.r + d[r], l, ~0u);
    w.products.push_back(std::move(p));
}
void product_commit(Warp& w, const Instruction&, u32 mask) {
    together(w, mask, ~0u);
    w.product_groups.emplace_back().swap(w.products);
}
void product_wait(Warp& w, const Instruction& i, u32 mask) {
    together(w, mask, ~0u);
    while (int(w.product_groups.size()) > i.a) {
        std::vector<Product> group = std::move(w.product_groups.front());
        w.product_groups.pop_front();
        for (size_t k = 0; k < group.size(); ++k) {
            Product &p = group[k], *next = nullptr;  // the next one that adds to the same sums
            const s32* registers = sum_registers(w, p);
            p.compute(w, p);
            auto find = [&](Product& q) { if (!next && *sum_registers(w, q) == *registers) next = &q; };
            for (size_t n = k + 1; n < group.size(); ++n) find(group[n]);
            each_product(w, find);
            if (next) next->sums = p.sums;
            else for (size_t n = 0; n < p.sums.size(); ++n) put<u32>(w.r + registers[n / 32], int(n % 32), p.sums[n]);
        }
    }
    if (!w.product_groups.empty() || !w.products.empty()) return;
    for (const Move& m : w.moves)
        each(m.mask, [&](int l) { put<u32>(w.r + m.to, l, get<u32>(w.r + m.from, l)); });
    w.moves.clear();
}
void proxy_fence(Warp& w, const Instruction&, u32) { join(w.fenced, w.clock), ++w.clock[w.index]; }
void wait_for_grids(Warp& w, const Instruction&, u32 mask) {
    together(w, mask, ~0u);
    if (!w.cta->waits[w.index]) w.cta->waits[w.index] = at(w.clock, w.index);
}

// Copies in the background take place when they are waited for, as late as they may; until then what they
// write is poison. i.a is their size, i.b the displacement of the destination, o[2] how much is read (−1: all).
void copy_start(Warp& w, const Instruction& i, u32 mask) {
    static const char poison[16] = {-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1};
    each(mask, [&](int l) {
        const u32 to = get<u32>(w.r + i.o[0], l) + u32(i.b);
        const u64 from = get<u64>(w.r + i.o[1], l) + s64(i.o[3]);
        const u32 size = i.a, read = i.o[2] < 0 ? size : std::min(size, get<u32>(w.r + i.o[2], l));
        if (read && !global_at(w, l, from, read, nullptr)) return;
        for (u32 k = to; k < std::min<u64>(to + size, w.cta->shared.size()); ++k)
            if (w.cta->pending[k]) fault(w, PENDING, l, k);
        if (char* place = shared_at(w, l, to, size, poison, BY_COPY)) {
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
            if (char* place = shared_at(w, c.lane, c.to, c.size, bytes, BY_COPY)) std::memcpy(place, bytes, c.size);
        }
}
