// The table of instructions: a handler for each name that ptx.py knows.
#pragma once
#include "bulk.h"

template <class T> void add_integers(const std::string& t) {
    static constexpr u32 bits = 8 * sizeof(T);
    using U = std::make_unsigned_t<T>;
    using Wide = std::conditional_t<sizeof(T) == 2, std::conditional_t<std::is_signed_v<T>, s32, u32>,
                                    std::conditional_t<std::is_signed_v<T>, s64, u64>>;
    using Huge = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
    add("add." + t, binary<T, T, T>([](T a, T b) { return T(a + b); }));
    add("sub." + t, binary<T, T, T>([](T a, T b) { return T(a - b); }));
    add("mul.lo." + t, binary<T, T, T>([](T a, T b) { return T(u64(a) * u64(b)); }));
    add("mul.hi." + t, binary<T, T, T>([](T a, T b) { return T(Huge(a) * Huge(b) >> bits); }));
    add("mad.lo." + t, ternary<T, T, T, T>([](T a, T b, T c) { return T(u64(a) * u64(b) + u64(c)); }));
    if constexpr (sizeof(T) < 8) {
        add("mul.wide." + t, binary<Wide, T, T>([](T a, T b) { return Wide(a) * Wide(b); }));
        add("mad.wide." + t, ternary<Wide, T, T, Wide>([](T a, T b, Wide c) { return Wide(a) * Wide(b) + c; }));
    }
    add("div." + t, binary<T, T, T>([](T a, T b) { return b == 0 ? T(-1) : b == T(-1) && std::is_signed_v<T> ? T(-a) : T(a / b); }));
    add("rem." + t, binary<T, T, T>([](T a, T b) { return b == 0 || (b == T(-1) && std::is_signed_v<T>) ? T(0) : T(a % b); }));
    add("min." + t, binary<T, T, T>([](T a, T b) { return std::min(a, b); }));
    add("max." + t, binary<T, T, T>([](T a, T b) { return std::max(a, b); }));
    add("and." + t, binary<T, T, T>([](T a, T b) { return T(a & b); }));
    add("or." + t, binary<T, T, T>([](T a, T b) { return T(a | b); }));
    add("xor." + t, binary<T, T, T>([](T a, T b) { return T(a ^ b); }));
    add("not." + t, unary<T, T>([](T a) { return T(~a); }));
    add("neg." + t, unary<T, T>([](T a) { return T(-a); }));
    add("abs." + t, unary<T, T>([](T a) { return a < T(0) ? T(-a) : a; }));
    add("mov." + t, unary<T, T>([](T a) { return a; }));
    add("shl." + t, binary<T, T, u32>([](T a, u32 b) { return b >= bits ? T(0) : T(U(a) << b); }));
    add("shr." + t, binary<T, T, u32>([](T a, u32 b) { return T(a >> (b >= bits ? bits - 1 : b) >> (b >= bits ? 1 : 0)); }));
    add("bfe." + t, ternary<T, T, u32, u32>([](T a, u32 position, u32 length) {
        position &= 255, length &= 255;
        if (length == 0) return T(0);
        const u32 top = std::min(position + length, bits);  // one past the last bit
        if (position >= bits) return T(std::is_signed_v<T> && a < T(0) ? -1 : 0);
        return T(T(U(a) << (bits - top)) >> (bits - top + position));
    }));
    add("popc." + t, unary<u32, U>([](U a) { return std::popcount(a); }));
    add("clz." + t, unary<u32, U>([](U a) { return std::countl_zero(a); }));
    add("selp." + t, select<T>);
    add("setp.eq." + t, compare<T>([](T a, T b) { return a == b; }));
    add("setp.ne." + t, compare<T>([](T a, T b) { return a != b; }));
    add("setp.lt." + t, compare<T>([](T a, T b) { return a < b; }));
    add("setp.le." + t, compare<T>([](T a, T b) { return a <= b; }));
    add("setp.gt." + t, compare<T>([](T a, T b) { return a > b; }));
    add("setp.ge." + t, compare<T>([](T a, T b) { return a >= b; }));
}
template <class T, class R> void add_memory(const std::string& t) {
    add("ld.global." + t, load<GLOBAL, T, R>), add("ld.shared." + t, load<SHARED, T, R>);
    add("st.global." + t, store<GLOBAL, T, R>), add("st.shared." + t, store<SHARED, T, R>);
    add("ld.param." + t, load_parameter<T, R>), add("ld.param_at." + t, load_parameter_at<T, R>);
}
template <class T> void add_memory_types(const std::string& t) {
    if constexpr (sizeof(T) < 8) add_memory<T, std::conditional_t<std::is_signed_v<T>, s32, u32>>(t + ".32");
    add_memory<T, std::conditional_t<std::is_signed_v<T>, s64, u64>>(t + ".64");
}
template <class F> void add_float1(const std::string& name, F) {
    add(name + ".f32", unary<float, float>(F{}));
    add(name + ".ftz.f32", unary<float, float>([](float a) { return flush(F{}(flush(a))); }));
}
template <class F> void add_float2(const std::string& name, F) {
    add(name + ".f32", binary<float, float, float>(F{}));
    add(name + ".ftz.f32", binary<float, float, float>([](float a, float b) { return flush(F{}(flush(a), flush(b))); }));
}
inline float smaller(float a, float b) { return a == b ? (std::signbit(a) ? a : b) : std::fmin(a, b); }
inline float larger(float a, float b) { return a == b ? (std::signbit(a) ? b : a) : std::fmax(a, b); }
inline float nan_or(float a, float b, float value) { return a != a || b != b ? NAN : value; }
template <class T> void add_pairs(const std::string& t) {
    using P = pair<T>;
    add("add." + t, binary<P, P, P>([](P a, P b) { return P{T(a.low + b.low), T(a.high + b.high)}; }));
    add("min." + t, binary<P, P, P>([](P a, P b) { return P{std::min(a.low, b.low), std::min(a.high, b.high)}; }));
    add("max." + t, binary<P, P, P>([](P a, P b) { return P{std::max(a.low, b.low), std::max(a.high, b.high)}; }));
}
void add_floats() {
    add_float1("neg", [](float a) { return -a; });
    add_float1("abs", [](float a) { return std::fabs(a); });
    add_float1("rcp", [](float a) { return float(1.0 / a); });
    add_float1("sqrt", [](float a) { return std::sqrt(a); });
    add_float1("rsqrt", [](float a) { return float(1.0 / std::sqrt(double(a))); });
    add_float1("ex2", [](float a) { return std::exp2(a); });
    add_float1("lg2", [](float a) { return std::log2(a); });
    add_float1("sin", [](float a) { return std::sin(a); });
    add_float1("cos", [](float a) { return std::cos(a); });
    add_float1("tanh", [](float a) { return tanh_approx(a); });
    add_float2("add", [](float a, float b) { return a + b; });
    add_float2("sub", [](float a, float b) { return a - b; });
    add_float2("mul", [](float a, float b) { return a * b; });
    add_float2("div", [](float a, float b) { return a / b; });
    add_float2("min", [](float a, float b) { return smaller(a, b); });
    add_float2("max", [](float a, float b) { return larger(a, b); });
    add_float2("min.NaN", [](float a, float b) { return nan_or(a, b, smaller(a, b)); });
    add_float2("max.NaN", [](float a, float b) { return nan_or(a, b, larger(a, b)); });
    add("fma.f32", ternary<float, float, float, float>([](float a, float b, float c) { return std::fma(a, b, c); }));
    add("fma.ftz.f32", ternary<float, float, float, float>([](float a, float b, float c) {
        return flush(std::fma(flush(a), flush(b), flush(c)));
    }));
#define ADD_COMPARISON(name, expression) \
    add("setp." name ".f32", compare<float>([](float a, float b) { return expression; })); \
    add("setp." name ".f16", compare<f16>([](float a, float b) { return expression; })); \
    add("setp." name ".bf16", compare<bf16>([](float a, float b) { return expression; })); \
    add("setp." name ".ftz.f32", compare<float>([](float a, float b) { a = flush(a), b = flush(b); return expression; }));
    ADD_COMPARISON("eq", a == b) ADD_COMPARISON("ne", a < b || a > b) ADD_COMPARISON("lt", a < b)
    ADD_COMPARISON("le", a <= b) ADD_COMPARISON("gt", a > b) ADD_COMPARISON("ge", a >= b)
    ADD_COMPARISON("equ", !(a < b || a > b)) ADD_COMPARISON("neu", !(a == b)) ADD_COMPARISON("ltu", !(a >= b))
    ADD_COMPARISON("leu", !(a > b)) ADD_COMPARISON("gtu", !(a <= b)) ADD_COMPARISON("geu", !(a < b))
    ADD_COMPARISON("nan", a != a || b != b) ADD_COMPARISON("num", a == a && b == b)
}
template <class H> void add_halves(const std::string& t) {  // arithmetic in double is rounded once, to 16 bits
    using P = pair<H>;
#define ADD_HALF2(name, expression) \
    add(name "." + t, binary<H, H, H>([](float x, float y) { const double a = x, b = y; return H(expression); })); \
    add(name "." + t + "x2", binary<P, P, P>([](P x, P y) { \
        auto f = [](double a, double b) { return H(expression); }; \
        return P{f(float(x.low), float(y.low)), f(float(x.high), float(y.high))}; }));
    ADD_HALF2("add", a + b) ADD_HALF2("sub", a - b) ADD_HALF2("mul", a * b)
    ADD_HALF2("min", smaller(a, b)) ADD_HALF2("max", larger(a, b))
    ADD_HALF2("min.NaN", nan_or(a, b, smaller(a, b))) ADD_HALF2("max.NaN", nan_or(a, b, larger(a, b)))
    add("fma." + t, ternary<H, H, H, H>([](float a, float b, float c) { return H(std::fma(double(a), double(b), double(c))); }));
    add("fma." + t + "x2", ternary<P, P, P, P>([](P a, P b, P c) {
        return P{H(std::fma(double(float(a.low)), double(float(b.low)), double(float(c.low)))),
                 H(std::fma(double(float(a.high)), double(float(b.high)), double(float(c.high))))};
    }));
    static constexpr u16 sign = 0x8000;
    add("neg." + t, unary<u16, u16>([](u16 a) { return a ^ sign; }));
    add("abs." + t, unary<u16, u16>([](u16 a) { return a & ~sign; }));
    add("neg." + t + "x2", unary<u32, u32>([](u32 a) { return a ^ 0x80008000u; }));
    add("abs." + t + "x2", unary<u32, u32>([](u32 a) { return a & 0x7fff7fffu; }));
    add("tanh." + t, unary<H, H>([](float a) { return H(tanh_approx(a)); }));
    add("tanh." + t + "x2", unary<P, P>([](P a) { return P{H(tanh_approx(a.low)), H(tanh_approx(a.high))}; }));
    add("ex2." + t, unary<H, H>([](float a) { return H(std::exp2(double(a))); }));
    add("ex2." + t + "x2", unary<P, P>([](P a) { return P{H(std::exp2(double(float(a.low)))), H(std::exp2(double(float(a.high))))}; }));
    add("cvt.f32." + t, unary<float, H>([](float a) { return a; }));
    add("cvt.rn." + t + ".f32", unary<H, float>([](float a) { return H(a); }));
    add("cvt.rn." + t + "x2.f32", binary<P, float, float>([](float a, float b) { return P{H(b), H(a)}; }));
    add("cvt.rn.relu." + t + "x2.f32", binary<P, float, float>([](float a, float b) { return P{H(larger(b, 0)), H(larger(a, 0))}; }));
}
template <class D, class S> void add_conversion(const std::string& d, const std::string& s) {
    add("cvt." + d + "." + s, unary<D, S>([](S a) { return D(a); }));
}
template <class S> void add_conversions(const std::string& s) {
    add_conversion<u8, S>("u8", s), add_conversion<s8, S>("s8", s), add_conversion<u16, S>("u16", s);
    add_conversion<s16, S>("s16", s), add_conversion<u32, S>("u32", s), add_conversion<s32, S>("s32", s);
    add_conversion<u64, S>("u64", s), add_conversion<s64, S>("s64", s);
    add("cvt.rn.f32." + s, unary<float, S>([](S a) { return float(a); }));
    add("cvt.rn.f16." + s, unary<f16, S>([](S a) { return f16(double(a)); }));
    add("cvt.rn.bf16." + s, unary<bf16, S>([](S a) { return bf16(double(a)); }));
}
template <class D> D to_integer(double x) {  // NaN becomes 0, and what is too large the largest
    if (x != x) return 0;
    const double low = double(std::numeric_limits<D>::min()), high = double(std::numeric_limits<D>::max());
    return x <= low ? std::numeric_limits<D>::min() : x >= high ? std::numeric_limits<D>::max() : D(x);
}
template <class D> void add_roundings(const std::string& d) {
    add("cvt.rzi." + d + ".f32", unary<D, float>([](float a) { return to_integer<D>(std::trunc(a)); }));
    add("cvt.rni." + d + ".f32", unary<D, float>([](float a) { return to_integer<D>(std::nearbyint(a)); }));
    add("cvt.rmi." + d + ".f32", unary<D, float>([](float a) { return to_integer<D>(std::floor(a)); }));
    add("cvt.rpi." + d + ".f32", unary<D, float>([](float a) { return to_integer<D>(std::ceil(a)); }));
}
inline u32 lookup3(u32 a, u32 b, u32 c, u32 table) {
    u32 result = 0;
    for (int k = 0; k < 8; ++k)
        if (table >> k & 1) result |= (k & 4 ? a : ~a) & (k & 2 ? b : ~b) & (k & 1 ? c : ~c);
    return result;
}
void fill_table() {
    add_integers<u16>("u16"), add_integers<s16>("s16"), add_integers<u32>("u32");
    add_integers<s32>("s32"), add_integers<u64>("u64"), add_integers<s64>("s64");
    add_memory_types<u8>("u8"), add_memory_types<s8>("s8"), add_memory_types<u16>("u16");
    add_memory_types<s16>("s16"), add_memory_types<u32>("u32"), add_memory_types<s32>("s32");
    add_memory_types<u64>("u64"), add_memory_types<s64>("s64");
    add_pairs<u16>("u16x2"), add_pairs<s16>("s16x2");
    add_floats(), add_halves<f16>("f16"), add_halves<bf16>("bf16");
    add_conversions<u8>("u8"), add_conversions<s8>("s8"), add_conversions<u16>("u16"), add_conversions<s16>("s16");
    add_conversions<u32>("u32"), add_conversions<s32>("s32"), add_conversions<u64>("u64"), add_conversions<s64>("s64");
    add_roundings<s32>("s32"), add_roundings<u32>("u32"), add_roundings<s64>("s64"), add_roundings<s16>("s16");
    add_roundings<s8>("s8"), add_roundings<u8>("u8"), add_roundings<u16>("u16"), add_roundings<u64>("u64");
    add_float1("cvt.rni.f32", [](float a) { return std::nearbyint(a); });
    add_float1("cvt.rmi.f32", [](float a) { return std::floor(a); });
    add_float1("cvt.rpi.f32", [](float a) { return std::ceil(a); });
    add_float1("cvt.rzi.f32", [](float a) { return std::trunc(a); });
    add("cvt.rna.tf32.f32", unary<u32, u32>([](u32 a) { return (a & 0x7f800000) == 0x7f800000 ? a : (a + 0x1000) & ~0x1fffu; }));
    add("cvt.rn.tf32.f32", unary<u32, u32>([](u32 a) { return (a & 0x7f800000) == 0x7f800000 ? a : (a + 0xfff + (a >> 13 & 1)) & ~0x1fffu; }));
    add("cvt.rz.f16.f32", unary<f16, float>(toward_zero));
    add("cvt.rn.e4m3x2.f32", binary<pair<e4m3>, float, float>([](float a, float b) { return pair<e4m3>{b, a}; }));
    add("cvt.rn.e4m3x2.f16x2", unary<pair<e4m3>, pair<f16>>([](pair<f16> a) { return pair<e4m3>{float(a.low), float(a.high)}; }));
    add("cvt.rn.f16x2.e4m3x2", unary<pair<f16>, pair<e4m3>>([](pair<e4m3> a) { return pair<f16>{float(a.low), float(a.high)}; }));
    add("and.pred", logic([](u32 a, u32 b) { return a & b; }));
    add("or.pred", logic([](u32 a, u32 b) { return a | b; }));
    add("xor.pred", logic([](u32 a, u32 b) { return a ^ b; }));
    add("not.pred", logic([](u32 a, u32) { return ~a; }));
    add("mov.pred", logic([](u32 a, u32) { return a; }));
    add("selp.f32", select<u32>), add("selp.f16", select<u16>);
    add("unpack.u32.u16", unpack<u32, u16>), add("unpack.u64.u32", unpack<u64, u32>), add("unpack.u64.u16", unpack<u64, u16>);
    add("unpack.u32.u8", unpack<u32, u8>), add("unpack.u16.u8", unpack<u16, u8>);
    add("pack.u32.u16", pack<u32, u16>), add("pack.u64.u32", pack<u64, u32>), add("pack.u64.u16", pack<u64, u16>);
    add("pack.u32.u8", pack<u32, u8>), add("pack.u16.u8", pack<u16, u8>);
    add("prmt.u32", ternary<u32, u32, u32, u32>([](u32 a, u32 b, u32 c) {
        u32 result = 0;
        for (int k = 0; k < 4; ++k) {
            const u32 selector = c >> 4 * k & 15, byte = u32((u64(b) << 32 | a) >> 8 * (selector & 7)) & 255;
            result |= (selector & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * k;
        }
        return result;
    }));
    add("lop3.u32", [](Warp& w, const Instruction& i, u32 mask) {
        each(mask, [&](int l) {
            put<u32>(w.r + i.o[0], l, lookup3(get<u32>(w.r + i.o[1], l), get<u32>(w.r + i.o[2], l), get<u32>(w.r + i.o[3], l), i.a));
        });
    });
    add("bfi.u32", [](Warp& w, const Instruction& i, u32 mask) {  // d, what, into, position, length
        each(mask, [&](int l) {
            const u32 p = get<u32>(w.r + i.o[3], l) & 255, n = get<u32>(w.r + i.o[4], l) & 255;
            const u32 field = p > 31 ? 0 : u32((n > 31 ? ~0u : (1u << n) - 1) << p);
            put<u32>(w.r + i.o[0], l, (p > 31 ? 0 : get<u32>(w.r + i.o[1], l) << p & field) | (get<u32>(w.r + i.o[2], l) & ~field));
        });
    });
    add("shf.l.wrap.u32", ternary<u32, u32, u32, u32>([](u32 a, u32 b, u32 c) { return u32((u64(b) << 32 | a) << (c & 31) >> 32); }));
    add("shf.r.wrap.u32", ternary<u32, u32, u32, u32>([](u32 a, u32 b, u32 c) { return u32((u64(b) << 32 | a) >> (c & 31)); }));
    add("shf.l.clamp.u32", ternary<u32, u32, u32, u32>([](u32 a, u32 b, u32 c) { return u32((u64(b) << 32 | a) << std::min(c, 32u) >> 32); }));
    add("shf.r.clamp.u32", ternary<u32, u32, u32, u32>([](u32 a, u32 b, u32 c) { return u32((u64(b) << 32 | a) >> std::min(c, 32u)); }));
    add("dp4a.s32", ternary<s32, u32, u32, s32>([](u32 a, u32 b, s32 c) {
        for (int k = 0; k < 4; ++k) c += s32(s8(a >> 8 * k)) * s32(s8(b >> 8 * k));
        return c;
    }));
    add("special", special_register);
    add("shfl.up", shuffle<UP>), add("shfl.down", shuffle<DOWN>), add("shfl.bfly", shuffle<BUTTERFLY>), add("shfl.idx", shuffle<INDEX>);
    add("vote.all", vote<ALL>), add("vote.any", vote<SOME>), add("vote.ballot", vote<BALLOT>);
    add("redux.add.s32", reduce<s32>([](s32 a, s32 b) { return a + b; }));
    add("redux.min.s32", reduce<s32>([](s32 a, s32 b) { return std::min(a, b); }));
    add("redux.max.s32", reduce<s32>([](s32 a, s32 b) { return std::max(a, b); }));
    add("redux.min.u32", reduce<u32>([](u32 a, u32 b) { return std::min(a, b); }));
    add("redux.max.u32", reduce<u32>([](u32 a, u32 b) { return std::max(a, b); }));
    add("redux.and.u32", reduce<u32>([](u32 a, u32 b) { return a & b; }));
    add("redux.or.u32", reduce<u32>([](u32 a, u32 b) { return a | b; }));
    add("redux.xor.u32", reduce<u32>([](u32 a, u32 b) { return a ^ b; }));
    add("bar.warp", warp_barrier);
    add("ldmatrix", load_matrices<false>), add("ldmatrix.trans", load_matrices<true>);
    add("wgmma.f16", product_start<f16, double, float>), add("wgmma.bf16", product_start<bf16, double, float>);
    add("wgmma.tf32", product_start<float, double, float>), add("wgmma.e4m3", product_start<e4m3, double, float>);
    add("wgmma.s8", product_start<s8, s64, s32>);
    add("wgmma.commit", product_commit), add("wgmma.wait", product_wait);
    add("stmatrix", store_matrices<false>), add("stmatrix.trans", store_matrices<true>);
    add("mma.f16", product<f16, double, float>), add("mma.bf16", product<bf16, double, float>);
    add("mma.tf32", product<float, double, float>), add("mma.s8", product<s8, s64, s32>);
    add("mma.e4m3", product<e4m3, double, float>);
    add("mov.word", move_word), add("fence.proxy", proxy_fence), add("elect", elect), add("griddepcontrol.wait", wait_for_grids), add("nothing", [](Warp&, const Instruction&, u32) {});
    add("mbarrier.init", mbarrier_init), add("mbarrier.inval", mbarrier_invalidate);
    add("mbarrier.arrive", mbarrier_arrive), add("mbarrier.expect", mbarrier_expect), add("mbarrier.try_wait", mbarrier_wait);
    add("bulk.load", bulk_load), add("bulk.store", bulk_store);
    add("bulk.commit", bulk_commit), add("bulk.wait", bulk_wait);
    add("cp.async", copy_start), add("cp.async.commit", copy_commit), add("cp.async.wait", copy_wait);
}
