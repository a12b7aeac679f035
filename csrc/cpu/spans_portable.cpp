// For every processor: small arrays in plain C++, which compilers turn into the vectors that the target always has.
#include "../core/numeric.h"

namespace accumkernels::cpu {
namespace {

// As convert of numeric.h, but fp16 by the processor where all of its kind can (there a few vector instructions).
template <class To, class From>
inline To element(From value) {
#if defined(__aarch64__)
  if constexpr (std::is_same_v<From, Float16> && !std::is_same_v<To, Float16>) {
    __fp16 half;
    memcpy(&half, &value, sizeof(half));
    return convert<To>(static_cast<float>(half));
  } else if constexpr (std::is_same_v<To, Float16> && !std::is_same_v<From, Float16>) {
    // fp64 is rounded once, as by torch on this processor; elsewhere torch and we go by way of fp32.
    using Wide = std::conditional_t<std::is_same_v<From, double>, double, float>;
    const __fp16 half = static_cast<__fp16>(convert<Wide>(value));
    Float16 result;
    memcpy(&result, &half, sizeof(result));
    return result;
  }
#endif
  return convert<To>(value);
}

template <class C>
struct Vec {
  static constexpr int kWidth = 32 / sizeof(C);
  struct Register {
    C lane[kWidth];
  };

  static Register broadcast(C x) {
    return map([x](int) { return x; });
  }
  template <class T>
  static Register load(const T* p) {
    return map([p](int i) { return element<C>(p[i]); });
  }
  template <class T>
  static void store(T* p, const Register& v) {
    for (int i = 0; i < kWidth; ++i) p[i] = element<T>(v.lane[i]);
  }
  static void stream(C* p, const Register& v) { store(p, v); }
  static void fence() {}

  static Register mul(const Register& a, const Register& b) {
    return map([&](int i) { return a.lane[i] * b.lane[i]; });
  }
  static Register add(const Register& a, const Register& b) {
    return map([&](int i) { return a.lane[i] + b.lane[i]; });
  }
  static Register sub(const Register& a, const Register& b) {
    return map([&](int i) { return a.lane[i] - b.lane[i]; });
  }
  static Register div(const Register& a, const Register& b) {
    return map([&](int i) { return a.lane[i] / b.lane[i]; });
  }
  static Register abs(const Register& a) {
    return map([&](int i) { return a.lane[i] < 0 ? -a.lane[i] : a.lane[i]; });
  }
  static Register max(const Register& a, const Register& b) {
    return map([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
  }
  // 0 or NaN in each lane, and so is their sum: what spans_impl.h wants of an or.
  static Register bit_or(const Register& a, const Register& b) { return add(a, b); }
  static Register unordered(const Register& a) {
    return map([&](int i) { return a.lane[i] == a.lane[i] ? C(0) : a.lane[i]; });
  }

 private:
  template <class Function>
  static Register map(const Function& function) {
    Register result;
    for (int i = 0; i < kWidth; ++i) result.lane[i] = function(i);
    return result;
  }
};

}  // namespace
}  // namespace accumkernels::cpu

#include "spans_impl.h"

namespace accumkernels::cpu {
constexpr Spans kPortableSpans = make_spans("portable");
}  // namespace accumkernels::cpu
