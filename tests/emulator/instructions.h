// Instructions of lanes and of warps: how the lanes go through a function.
#pragma once
#include "machine.h"

using Handler = void (*)(Warp&, const Instruction&, u32);
std::unordered_map<std::string, int> numbers;
std::vector<Handler> handlers;
void add(const std::string& name, Handler handler) {
    numbers[name] = int(handlers.size());
    handlers.push_back(handler);
}

template <class D, class A, class F> Handler unary(F) {
    return [](Warp& w, const Instruction& i, u32 mask) {
        char *d = w.r + i.o[0], *a = w.r + i.o[1];
        each(mask, [=](int l) { put<D>(d, l, D(F{}(get<A>(a, l)))); });
    };
}
template <class D, class A, class B, class F> Handler binary(F) {
    return [](Warp& w, const Instruction& i, u32 mask) {
        char *d = w.r + i.o[0], *a = w.r + i.o[1], *b = w.r + i.o[2];
        each(mask, [=](int l) { put<D>(d, l, D(F{}(get<A>(a, l), get<B>(b, l)))); });
    };
}
template <class D, class A, class B, class C, class F> Handler ternary(F) {
    return [](Warp& w, const Instruction& i, u32 mask) {
        char *d = w.r + i.o[0], *a = w.r + i.o[1], *b = w.r + i.o[2], *c = w.r + i.o[3];
        each(mask, [=](int l) { put<D>(d, l, D(F{}(get<A>(a, l), get<B>(b, l), get<C>(c, l)))); });
    };
}
template <class A, class F> Handler compare(F) {
    return [](Warp& w, const Instruction& i, u32 mask) {
        char *a = w.r + i.o[1], *b = w.r + i.o[2];
        u32 result = 0;
        each(mask, [&](int l) { result |= u32(F{}(get<A>(a, l), get<A>(b, l))) << l; });
        u32& p = predicate(w, i.o[0]);
        p = (p & ~mask) | (result & mask);
    };
}
template <class F> Handler logic(F) {  // of predicates
    return [](Warp& w, const Instruction& i, u32 mask) {
        u32& p = predicate(w, i.o[0]);
        p = (p & ~mask) | (F{}(predicate(w, i.o[1]), predicate(w, i.o[2])) & mask);
    };
}
template <class T> void select(Warp& w, const Instruction& i, u32 mask) {
    const u32 p = predicate(w, i.o[3]);
    each(mask, [&](int l) { put<T>(w.r + i.o[0], l, get<T>(w.r + i.o[p >> l & 1 ? 1 : 2], l)); });
}
// A number of o[] registers of one width, whose bits come from one of another: mov.b32 {a, b}, c and back.
template <class Wide, class Narrow> void unpack(Warp& w, const Instruction& i, u32 mask) {
    each(mask, [&](int l) {
        const Wide value = get<Wide>(w.r + i.o[i.a], l);
        for (int k = 0; k < i.a; ++k) put<Narrow>(w.r + i.o[k], l, Narrow(value >> (8 * sizeof(Narrow) * k)));
    });
}
template <class Wide, class Narrow> void pack(Warp& w, const Instruction& i, u32 mask) {
    each(mask, [&](int l) {
        Wide value = 0;
        for (int k = 0; k < i.a; ++k)
            value |= Wide(std::make_unsigned_t<Narrow>(get<Narrow>(w.r + i.o[1 + k], l))) << (8 * sizeof(Narrow) * k);
        put<Wide>(w.r + i.o[0], l, value);
    });
}

// Loads and stores of i.a numbers; registers of bytes get their sign or zeros.
// R is what a register holds, of 4 or 8 bytes.
template <Space S, class T, class R> void load(Warp& w, const Instruction& i, u32 mask) {
    each(mask, [&](int l) {
        T values[8] = {};
        if (const char* from = at<S>(w, i, l, i.o[i.a], i.a * sizeof(T), nullptr))
            std::memcpy(values, from, i.a * sizeof(T));
        for (int k = 0; k < i.a; ++k) put<R>(w.r + i.o[k], l, R(values[k]));
    });
}
template <Space S, class T, class R> void store(Warp& w, const Instruction& i, u32 mask) {
    each(mask, [&](int l) {
        T values[8];
        for (int k = 0; k < i.a; ++k) values[k] = T(get<R>(w.r + i.o[k], l));
        const char* bytes = reinterpret_cast<char*>(values);
        if (char* to = at<S>(w, i, l, i.o[i.a], i.a * sizeof(T), bytes)) std::memcpy(to, bytes, i.a * sizeof(T));
    });
}
template <class T, class R> void load_parameter(Warp& w, const Instruction& i, u32 mask) {
    for (int k = 0; k < i.b; ++k) {
        T value;
        std::memcpy(&value, w.cta->launch->parameters + i.a + k * sizeof(T), sizeof(T));
        each(mask, [&](int l) { put<R>(w.r + i.o[k], l, R(value)); });
    }
}
template <class T, class R> void load_parameter_at(Warp& w, const Instruction& i, u32 mask) {
    each(mask, [&](int l) {
        const char* from = w.cta->launch->parameters + get<u64>(w.r + i.o[i.a], l) + i.b;
        for (int k = 0; k < i.a; ++k) {
            T value;
            std::memcpy(&value, from + k * sizeof(T), sizeof(T));
            put<R>(w.r + i.o[k], l, R(value));
        }
    });
}
void special_register(Warp& w, const Instruction& i, u32 mask) {
    const Cta& cta = *w.cta;
    each(mask, [&](int l) {
        u32 value = 0;
        if (i.a == 0) value = w.index * 32 + l;
        else if (i.a < 3) value = 0;  // the other axes of the threads
        else if (i.a < 6) value = cta.id[i.a - 3];
        else if (i.a == 6) value = cta.launch->threads;
        else if (i.a < 9) value = 1;
        else if (i.a < 12) value = cta.launch->grid[i.a - 9];
        else value = i.a == 12 ? l : w.index;
        put<u32>(w.r + i.o[0], l, value);
    });
}

// Warps: all lanes that take part must be there -----------------------------------------------------------------

bool together(Warp& w, u32 mask, u32 members) {
    if (!(members & w.alive & ~mask)) return true;
    fault(w, DIVERGENT, std::countr_zero(members & w.alive & ~mask));
    return false;
}
enum Shuffle { UP, DOWN, BUTTERFLY, INDEX };
template <Shuffle S> void shuffle(Warp& w, const Instruction& i, u32 mask) {  // d, p, a, b, c, members
    together(w, mask, get<u32>(w.r + i.o[5], std::countr_zero(mask)));
    u32 values[32], result[32], valid = 0;
    for (int l = 0; l < 32; ++l) values[l] = get<u32>(w.r + i.o[2], l);
    each(mask, [&](int l) {
        const u32 b = get<u32>(w.r + i.o[3], l) & 31, c = get<u32>(w.r + i.o[4], l), segment = c >> 8 & 31;
        const int last = (l & segment) | (c & 31 & ~segment), first = l & segment;
        int j = S == UP ? l - int(b) : S == DOWN ? l + int(b) : S == BUTTERFLY ? (l ^ int(b)) : int(first | (b & ~segment));
        const bool inside = S == UP ? j >= last : j <= last;
        if (!inside) j = l;
        if (!(mask >> j & 1)) fault(w, DIVERGENT, l);  // a lane that is not there
        result[l] = values[j], valid |= u32(inside) << l;
    });
    each(mask, [&](int l) { put<u32>(w.r + i.o[0], l, result[l]); });
    predicate(w, i.o[1]) = (predicate(w, i.o[1]) & ~mask) | (valid & mask);
}
enum Vote { ALL, SOME, BALLOT };
template <Vote V> void vote(Warp& w, const Instruction& i, u32 mask) {  // d, p, members
    together(w, mask, get<u32>(w.r + i.o[2], std::countr_zero(mask)));
    const u32 on = (i.b ? ~predicate(w, i.o[1]) : predicate(w, i.o[1])) & mask;
    if (V == BALLOT) return each(mask, [&](int l) { put<u32>(w.r + i.o[0], l, on); });
    u32& p = predicate(w, i.o[0]);
    p = (p & ~mask) | ((V == ALL ? on == mask : on != 0) ? mask : 0);
}
template <class T, class F> Handler reduce(F) {  // d, a, members
    return [](Warp& w, const Instruction& i, u32 mask) {
        together(w, mask, get<u32>(w.r + i.o[2], std::countr_zero(mask)));
        T sum = get<T>(w.r + i.o[1], std::countr_zero(mask));
        for (u32 m = mask & (mask - 1); m; m &= m - 1) sum = F{}(sum, get<T>(w.r + i.o[1], std::countr_zero(m)));
        each(mask, [&](int l) { put<T>(w.r + i.o[0], l, sum); });
    };
}
void warp_barrier(Warp& w, const Instruction& i, u32 mask) {
    if (together(w, mask, get<u32>(w.r + i.o[0], std::countr_zero(mask)))) ++w.sync;
}
template <bool Transposed> void load_matrices(Warp& w, const Instruction& i, u32 mask) {
    together(w, mask, ~0u);
    u16 rows[8][8] = {};
    for (int k = 0; k < i.a; ++k) {
        for (int row = 0; row < 8; ++row) {
            const u32 address = get<u32>(w.r + i.o[i.a], 8 * k + row) + u32(i.b);
            std::memset(rows[row], 0xff, 16);
            if (const char* from = shared_at(w, -1, address, 16, nullptr)) std::memcpy(rows[row], from, 16);
        }
        for (int l = 0; l < 32; ++l) {
            const int row = l >> 2, column = 2 * (l & 3);
            const u32 low = Transposed ? rows[column][row] : rows[row][column];
            const u32 high = Transposed ? rows[column + 1][row] : rows[row][column + 1];
            put<u32>(w.r + i.o[k], l, low | high << 16);
        }
    }
}
template <bool Transposed> void store_matrices(Warp& w, const Instruction& i, u32 mask) {
    together(w, mask, ~0u);
    for (int k = 0; k < i.a; ++k) {
        u16 rows[8][8];
        for (int l = 0; l < 32; ++l)
            for (int j = 0; j < 2; ++j) {
                const int row = l >> 2, column = 2 * (l & 3) + j;
                (Transposed ? rows[column][row] : rows[row][column]) = u16(get<u32>(w.r + i.o[k], l) >> 16 * j);
            }
        for (int row = 0; row < 8; ++row) {
            const u32 address = get<u32>(w.r + i.o[i.a], 8 * k + row) + u32(i.b);
            const char* bytes = reinterpret_cast<char*>(rows[row]);
            if (char* to = shared_at(w, -1, address, 16, bytes)) std::memcpy(to, bytes, 16);
        }
    }
}
// The matrix product of a warp: 16 × 8 results, of i.a registers of A and i.b of B that hold `Count` numbers each.
template <class T, class Sum, class Acc> void product(Warp& w, const Instruction& i, u32 mask) {
    together(w, mask, ~0u);
    constexpr int count = 4 / sizeof(T);
    const s32 *d = i.o, *a = i.o + 4, *b = a + i.a, *c = b + i.b;
    Sum A[16][64], B[64][8];
    auto number = [&](int r, int l, int j) -> Sum {
        const u32 word = get<u32>(w.r + r, l);
        if constexpr (sizeof(T) == 4) return tf32(word);
        else if constexpr (sizeof(T) == 2) return Sum(float(std::bit_cast<T>(u16(word >> 16 * j))));
        else return Sum(std::bit_cast<T>(u8(word >> 8 * j)));
    };
    for (int l = 0; l < 32; ++l)
        for (int j = 0; j < count; ++j) {
            const int group = l >> 2, k = (l & 3) * count + j;
            for (int r = 0; r < i.a; ++r) A[group + 8 * (r & 1)][(r >> 1) * 4 * count + k] = number(a[r], l, j);
            for (int r = 0; r < i.b; ++r) B[r * 4 * count + k][group] = number(b[r], l, j);
        }
    const int depth = i.b * 4 * count;
    for (int l = 0; l < 32; ++l) {
        Acc results[4];
        for (int r = 0; r < 4; ++r) {
            const int row = (l >> 2) + 8 * (r >> 1), column = 2 * (l & 3) + (r & 1);
            Sum sum = Sum(get<Acc>(w.r + c[r], l));
            for (int k = 0; k < depth; ++k) sum += A[row][k] * B[k][column];
            if constexpr (std::is_integral_v<Acc>) sum = std::clamp<Sum>(sum, INT_MIN, INT_MAX);
            results[r] = Acc(sum);
        }
        for (int r = 0; r < 4; ++r) put<Acc>(w.r + d[r], l, results[r]);
    }
}
