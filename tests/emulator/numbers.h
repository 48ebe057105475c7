// Numbers of 8, 16 and 19 bits, with the rounding of a GPU.
#pragma once
#include <algorithm>
#include <bit>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

using u8 = uint8_t; using u16 = uint16_t; using u32 = uint32_t; using u64 = uint64_t;
using s8 = int8_t; using s16 = int16_t; using s32 = int32_t; using s64 = int64_t;

struct f16 {
    u16 bits;
    f16() = default;
    f16(double x) : bits(std::bit_cast<u16>(static_cast<_Float16>(x))) {}
    operator float() const { return static_cast<float>(std::bit_cast<_Float16>(bits)); }
};
struct bf16 {
    u16 bits;
    bf16() = default;
    bf16(double x) {
        float f = static_cast<float>(x);
        if (double(f) != x && x == x && std::isfinite(f)) {  // round to odd, so that rounding again is exact
            u32 b = std::bit_cast<u32>(f);
            if ((std::fabs(double(f)) > std::fabs(x))) --b;
            f = std::bit_cast<float>(b | 1);
        }
        u32 b = std::bit_cast<u32>(f);
        bits = f != f ? 0x7fff : u16((b + 0x7fff + (b >> 16 & 1)) >> 16);
    }
    operator float() const { return std::bit_cast<float>(u32(bits) << 16); }
};
struct e4m3 {
    u8 bits;
    e4m3() = default;
    e4m3(float x) {  // numbers that are too large become the largest
        const u8 sign = std::signbit(x) ? 0x80 : 0;
        const float size = std::min(std::fabs(x), 448.0f);
        int exponent = 0;
        std::frexp(size, &exponent);
        exponent = std::max(exponent - 1, -6);
        const int steps = int(std::nearbyint(std::ldexp(size, 3 - exponent)));  // of 8 there are as many as in the next
        bits = x != x ? 0x7f : u8(sign | (size == 0 ? 0 : 8 * (exponent + 6) + steps));
    }
    operator float() const {
        const int exponent = bits >> 3 & 15, fraction = bits & 7;
        const float size = exponent == 15 && fraction == 7 ? NAN
            : exponent ? std::ldexp(8.0f + fraction, exponent - 10) : std::ldexp(float(fraction), -9);
        return bits & 0x80 ? -size : size;
    }
};
template <class H> struct pair { H low, high; };

inline float flush(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }
inline float tf32(u32 bits) { return std::bit_cast<float>(bits & ~0x1fffu); }
// tanh.approx is good to 2^-11; so is this, and no better: an error that depends on the bits of x.
inline float tanh_approx(float x) {
    const u32 hash = std::bit_cast<u32>(x) * 2654435761u >> 16;
    return float(std::tanh(double(x)) * (1.0 + (double(hash) / 32768.0 - 1.0) * 0x1p-11));
}
constexpr auto toward_zero = [](float x) {
    f16 result(x);
    if (std::fabs(float(result)) > std::fabs(x)) --result.bits;  // infinity becomes the largest number
    if (std::isinf(x)) result = f16(x);
    return result;
};
