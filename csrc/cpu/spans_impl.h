// The loops of spans.h over Vec<float> and Vec<double>, which the including file defines for its instruction set:
//
//   kWidth                                      lanes
//   broadcast, mul, add, sub, div, max, abs     lane by lane, each rounded by itself
//   load(p)                                     kWidth elements of any type, converted
//   store(p, v), stream(p, v), fence()          rounded to the element type; past the caches; orders streamed stores
//   bit_or(a, b)
//   unordered(v)                                a NaN in the lanes that hold NaN, else 0
#pragma once

#include "../core/numeric.h"
#include "spans.h"

namespace accumkernels::cpu {
namespace {

// 4 vectors in flight per stream. On Zen 5 (2 cores, 124 M elements, bf16) 1, 2, 4 and 8 reach 60, 66.7, 66.7 and 66.4
// GB/s on huge pages; software prefetch, 0 to 8 KB ahead, changes nothing beyond noise.
constexpr int kUnroll = 4;

// The last elements of a span, fewer than a vector, with zeros behind them.
template <class T>
struct Tail {
  T data[16];

  Tail(const T* source, int64_t n) : data{} {
    for (int64_t i = 0; i < n; ++i) data[i] = source[i];
  }
  void copy_to(T* target, int64_t n) const {
    for (int64_t i = 0; i < n; ++i) target[i] = data[i];
  }
};

// Collects x - x, which is 0 for finite x and NaN for all others.
template <class C>
class FiniteTest {
 public:
  using V = Vec<C>;
  using Register = typename V::Register;

  void see(Register x) { bits_ = V::bit_or(bits_, V::sub(x, x)); }
  bool passed() const {
    C lanes[V::kWidth];
    V::store(lanes, bits_);
    bool passed = true;
    for (C lane : lanes) passed &= lane == lane;
    return passed;
  }

 private:
  Register bits_ = V::broadcast(0);
};

// Sum of squares, or of differences of squares, in fp64. The order of summation depends on n alone.
class SquareSum {
 public:
  using V = Vec<double>;

  template <class T>
  void see(int slot, const T* x) {
    sums_[slot] = V::add(sums_[slot], square(x));
  }
  template <class T>
  void see(int slot, const T* after, const T* before) {
    sums_[slot] = V::add(sums_[slot], V::sub(square(after), square(before)));
  }
  double total() const {
    double lanes[V::kWidth];
    V::store(lanes, V::add(V::add(sums_[0], sums_[1]), V::add(sums_[2], sums_[3])));
    double total = 0;
    for (double lane : lanes) total += lane;
    return total;
  }

 private:
  template <class T>
  static V::Register square(const T* x) {
    const auto value = V::load(x);
    return V::mul(value, value);
  }

  V::Register sums_[4] = {V::broadcast(0), V::broadcast(0), V::broadcast(0), V::broadcast(0)};
};

struct SquareSums {
  SquareSum gradient, growth;
};

// One or more vectors' worth of accumulate.
template <class B, class G, Touch touch, bool with_squares, int vectors>
__attribute__((always_inline)) inline void accumulate_step(B* buffer, const G* gradient,
                                                           typename Vec<B>::Register multiplier, FiniteTest<B>& finite,
                                                           SquareSums& squares) {
  using V = Vec<B>;
  typename V::Register result[vectors];
#pragma GCC unroll 8
  for (int k = 0; k < vectors; ++k) {
    result[k] = V::mul(V::load(gradient + k * V::kWidth), multiplier);
    if constexpr (touch == Touch::kAdd) result[k] = V::add(V::load(buffer + k * V::kWidth), result[k]);
    finite.see(result[k]);
  }
  if constexpr (with_squares) {
    B after[vectors * V::kWidth];
    for (int k = 0; k < vectors; ++k) V::store(after + k * V::kWidth, result[k]);
#pragma GCC unroll 16
    for (int k = 0; k < vectors * V::kWidth / Vec<double>::kWidth; ++k) {
      const int64_t i = k * Vec<double>::kWidth;
      squares.gradient.see(k % 4, gradient + i);
      if constexpr (touch == Touch::kAdd) {
        squares.growth.see(k % 4, after + i, buffer + i);
      } else {
        squares.growth.see(k % 4, after + i);
      }
    }
  }
#pragma GCC unroll 8
  for (int k = 0; k < vectors; ++k) {
    if constexpr (touch == Touch::kStream) {
      V::stream(buffer + k * V::kWidth, result[k]);
    } else {
      V::store(buffer + k * V::kWidth, result[k]);
    }
  }
}

template <class B, class G, Touch touch, bool with_squares>
bool accumulate(void* buffer_span, const void* gradient_span, int64_t n, double multiplier, Squares* sums) {
  using V = Vec<B>;
  B* buffer = static_cast<B*>(buffer_span);
  const G* gradient = static_cast<const G*>(gradient_span);
  const auto m = V::broadcast(static_cast<B>(multiplier));
  FiniteTest<B> finite;
  SquareSums squares;

  constexpr int64_t kStep = kUnroll * V::kWidth;
  int64_t i = 0;
  for (; i + kStep <= n; i += kStep) {
    accumulate_step<B, G, touch, with_squares, kUnroll>(buffer + i, gradient + i, m, finite, squares);
  }
  for (; i + V::kWidth <= n; i += V::kWidth) {
    accumulate_step<B, G, touch, with_squares, 1>(buffer + i, gradient + i, m, finite, squares);
  }
  if (i < n) {  // a lane of padding is 0 * multiplier: finite wherever any product can be
    Tail<B> b(buffer + i, touch == Touch::kAdd ? n - i : 0);
    const Tail<G> g(gradient + i, n - i);
    constexpr Touch kTailTouch = touch == Touch::kAdd ? Touch::kAdd : Touch::kStore;
    accumulate_step<B, G, kTailTouch, with_squares, 1>(b.data, g.data, m, finite, squares);
    b.copy_to(buffer + i, n - i);
  }
  if constexpr (touch == Touch::kStream) V::fence();
  if constexpr (with_squares) {
    sums->gradient += squares.gradient.total();
    sums->growth += squares.growth.total();
  }
  return finite.passed();
}

template <class B, class G>
bool product_is_finite(const void* gradient_span, int64_t n, double multiplier) {
  using V = Vec<B>;
  const G* gradient = static_cast<const G*>(gradient_span);
  const auto m = V::broadcast(static_cast<B>(multiplier));
  FiniteTest<B> finite[2];
  int64_t i = 0;
  for (; i + 2 * V::kWidth <= n; i += 2 * V::kWidth) {
    finite[0].see(V::mul(V::load(gradient + i), m));
    finite[1].see(V::mul(V::load(gradient + i + V::kWidth), m));
  }
  for (; i < n; i += V::kWidth) {
    const int64_t rest = n - i < V::kWidth ? n - i : V::kWidth;
    finite[0].see(V::mul(V::load(Tail<G>(gradient + i, rest).data), m));
  }
  return finite[0].passed() & finite[1].passed();
}

template <class T>
double sum_of_squares(const void* span, int64_t n) {
  using V = Vec<double>;
  const T* data = static_cast<const T*>(span);
  SquareSum squares;
  int64_t i = 0;
  for (; i + 4 * V::kWidth <= n; i += 4 * V::kWidth) {
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) squares.see(k, data + i + k * V::kWidth);
  }
  for (; i < n; i += V::kWidth) {
    squares.see(0, Tail<T>(data + i, n - i < V::kWidth ? n - i : V::kWidth).data);
  }
  return squares.total();
}

template <class T>
double max_magnitude(const void* span, int64_t n) {
  using V = Vec<double>;
  const T* data = static_cast<const T*>(span);
  auto largest = V::broadcast(0);
  auto nan = V::broadcast(0);
  const auto see = [&](V::Register x) __attribute__((always_inline)) {
    largest = V::max(V::abs(x), largest);
    nan = V::bit_or(nan, V::unordered(x));
  };
  int64_t i = 0;
  for (; i + V::kWidth <= n; i += V::kWidth) see(V::load(data + i));
  if (i < n) see(V::load(Tail<T>(data + i, n - i).data));

  double lanes[V::kWidth];
  V::store(lanes, V::bit_or(largest, nan));
  double result = 0;
  for (double lane : lanes) {
    if (lane != lane) return lane;
    if (lane > result) result = lane;
  }
  return result;
}

template <class O, class I>
bool scaled_copy(void* output_span, const void* input_span, int64_t n, double divisor) {
  // fp32 arithmetic, or fp64 where either side is fp64.
  using C = std::conditional_t<std::is_same_v<O, double> || std::is_same_v<I, double>, double, float>;
  using V = Vec<C>;
  O* output = static_cast<O*>(output_span);
  const I* input = static_cast<const I*>(input_span);
  const auto d = V::broadcast(static_cast<C>(divisor));
  FiniteTest<C> finite;
  const auto step = [&](O* out, const I* in) __attribute__((always_inline)) {
    V::store(out, V::div(V::load(in), d));
    finite.see(V::load(out));  // as rounded: a finite quotient may exceed fp16
  };
  int64_t i = 0;
  for (; i + V::kWidth <= n; i += V::kWidth) step(output + i, input + i);
  if (i < n) {  // a lane of padding is 0 / divisor: finite wherever any quotient can be
    Tail<O> out(output, 0);
    step(out.data, Tail<I>(input + i, n - i).data);
    out.copy_to(output + i, n - i);
  }
  return finite.passed();
}

template <class B, class G>
constexpr void fill_accumulate(Spans& s, int b, int g) {
  constexpr int add = static_cast<int>(Touch::kAdd);
  constexpr int store = static_cast<int>(Touch::kStore);
  constexpr int stream = static_cast<int>(Touch::kStream);
  s.accumulate[b][g][add] = accumulate<B, G, Touch::kAdd, false>;
  s.accumulate[b][g][store] = accumulate<B, G, Touch::kStore, false>;
  s.accumulate[b][g][stream] = accumulate<B, G, Touch::kStream, false>;
  s.accumulate_with_squares[b][g][add] = accumulate<B, G, Touch::kAdd, true>;
  s.accumulate_with_squares[b][g][store] = accumulate<B, G, Touch::kStore, true>;
  s.accumulate_with_squares[b][g][stream] = accumulate<B, G, Touch::kStream, true>;
  s.product_is_finite[b][g] = product_is_finite<B, G>;
}

template <class T>
constexpr void fill(Spans& s, DType dtype) {
  const int t = static_cast<int>(dtype);
  fill_accumulate<float, T>(s, 0, t);
  fill_accumulate<double, T>(s, 1, t);
  s.sum_of_squares[t] = sum_of_squares<T>;
  s.max_magnitude[t] = max_magnitude<T>;
  s.scaled_copy[t][static_cast<int>(DType::kFloat16)] = scaled_copy<T, Float16>;
  s.scaled_copy[t][static_cast<int>(DType::kBFloat16)] = scaled_copy<T, BFloat16>;
  s.scaled_copy[t][static_cast<int>(DType::kFloat32)] = scaled_copy<T, float>;
  s.scaled_copy[t][static_cast<int>(DType::kFloat64)] = scaled_copy<T, double>;
}

constexpr Spans make_spans(const char* instruction_set) {
  Spans s{};
  s.instruction_set = instruction_set;
  fill<Float16>(s, DType::kFloat16);
  fill<BFloat16>(s, DType::kBFloat16);
  fill<float>(s, DType::kFloat32);
  fill<double>(s, DType::kFloat64);
  return s;
}

}  // namespace
}  // namespace accumkernels::cpu
