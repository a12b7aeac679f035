#include "reference.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace reference {

using namespace accumkernels;

namespace {

template <class T>
T read(const void* array, int64_t i) {
  T value;
  std::memcpy(&value, static_cast<const char*>(array) + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
  return value;
}

template <class T>
void write(T value, void* array, int64_t i) {
  std::memcpy(static_cast<char*>(array) + i * static_cast<int64_t>(sizeof(T)), &value, sizeof(T));
}

// A 16-bit format: sign, exponent, and `mantissa` bits that are stored.
struct Format {
  int mantissa;
  int bias;
};
constexpr Format kHalf{10, 15};
constexpr Format kBrain{7, 127};

double decode(Format format, uint16_t bits) {
  const double sign = bits & 0x8000 ? -1.0 : 1.0;
  const int exponent = (bits & 0x7fff) >> format.mantissa;
  const int fraction = bits & ((1 << format.mantissa) - 1);
  if (exponent == 2 * format.bias + 1) return fraction != 0 ? NAN : sign * INFINITY;
  const int leading = exponent == 0 ? 0 : 1 << format.mantissa;  // a subnormal number has none
  return sign * std::ldexp(leading + fraction, std::max(exponent, 1) - format.bias - format.mantissa);
}

// Rounding a whole number of steps carries into the exponent by itself, up to infinity.
uint16_t encode(Format format, double value) {
  const int sign = std::signbit(value) ? 0x8000 : 0;
  const int infinity = (2 * format.bias + 1) << format.mantissa;
  if (std::isnan(value)) return static_cast<uint16_t>(infinity | 1);
  if (std::isinf(value)) return static_cast<uint16_t>(sign | infinity);
  const double lowest = std::ldexp(1.0, 1 - format.bias);  // the smallest normal number
  const int exponent = std::fabs(value) < lowest ? 1 - format.bias : std::ilogb(value);
  const double steps = std::nearbyint(std::ldexp(std::fabs(value), format.mantissa - exponent));
  const double bits = std::ldexp(exponent + format.bias - 1, format.mantissa) + steps;
  return static_cast<uint16_t>(sign | static_cast<int>(std::min<double>(bits, infinity)));
}

}  // namespace

double get(DType dtype, const void* array, int64_t i) {
  switch (dtype) {
    case DType::kFloat16:
      return decode(kHalf, read<uint16_t>(array, i));
    case DType::kBFloat16:
      return decode(kBrain, read<uint16_t>(array, i));
    case DType::kFloat32:
      return static_cast<double>(read<float>(array, i));
    case DType::kFloat64:
      return read<double>(array, i);
  }
  return NAN;
}

// fp64 reaches 16 bits by way of fp32, as in torch.
void put(DType dtype, double value, void* array, int64_t i) {
  switch (dtype) {
    case DType::kFloat16:
      return write(encode(kHalf, static_cast<double>(static_cast<float>(value))), array, i);
    case DType::kBFloat16:
      return write(encode(kBrain, static_cast<double>(static_cast<float>(value))), array, i);
    case DType::kFloat32:
      return write(static_cast<float>(value), array, i);
    case DType::kFloat64:
      return write(value, array, i);
  }
}

namespace {

struct Sums {
  bool finite_products = true;
  bool finite_sums = true;
  double gradient = 0.0;
  double growth = 0.0;
};

// buffer[offset + i] += gradient[i] * multiplier, the product and the sum each rounded to the buffer's type.
template <class Buffer>
void add_gradient(const Gradient& gradient, Buffer* buffer, Buffer multiplier, Sums* sums) {
  for (int64_t i = 0; i < gradient.numel; ++i) {
    const double value = get(gradient.dtype, gradient.data, i);
    const Buffer product = static_cast<Buffer>(value) * multiplier;
    const Buffer before = buffer[gradient.offset + i];
    const Buffer after = gradient.overwrite ? product : before + product;
    buffer[gradient.offset + i] = after;
    sums->finite_products = sums->finite_products && std::isfinite(product);
    sums->finite_sums = sums->finite_sums && std::isfinite(after);
    sums->gradient += value * value;
    sums->growth += static_cast<double>(after) * static_cast<double>(after);
    if (!gradient.overwrite) sums->growth -= static_cast<double>(before) * static_cast<double>(before);
  }
}

template <class Buffer>
void accumulate_into(const AccumulateArgs& args) {
  Buffer* buffer = static_cast<Buffer*>(args.buffer);
  const double weight = args.weight_tensor ? *args.weight_tensor : args.weight;
  const double loss_scale = args.loss_scale ? static_cast<double>(*args.loss_scale) : 1.0;
  const bool bad_weight = !(weight >= 0.0 && std::isfinite(weight));
  if (args.drop && *args.drop != 0.0) {
    if (args.count) args.state[kFoundInf] = 1.0;
    for (int64_t n = 0; n < args.num_gradients; ++n) {
      const Gradient& gradient = args.gradients[n];
      if (gradient.overwrite) std::fill_n(buffer + gradient.offset, gradient.numel, Buffer(0));
    }
    return;
  }
  if (args.count && bad_weight) args.state[kFoundInf] = args.state[kPoisoned] = 1.0;
  if (args.count && !bad_weight) {
    args.state[kWeight] += weight;
    if (weight > 0.0) args.state[kUsed] += 1.0;
  }
  double gradient_squares = 0.0, growth = 0.0;
  for (int64_t n = 0; n < args.num_gradients; ++n) {
    Sums sums;
    add_gradient(args.gradients[n], buffer, static_cast<Buffer>(weight / loss_scale), &sums);
    gradient_squares += sums.gradient;
    growth += sums.growth;
    if (args.flags && !sums.finite_sums) {
      args.state[kFoundInf] = args.state[kPoisoned] = 1.0;
      if (!sums.finite_products) args.flags[args.gradients[n].segment] = args.tag;
    }
  }
  if (args.sq_norm) {
    args.sq_norm[0] += weight / (loss_scale * loss_scale) * gradient_squares;
    args.sq_norm[1] += growth;
  }
}

}  // namespace

void accumulate(const AccumulateArgs& args) {
  args.buffer_dtype == DType::kFloat64 ? accumulate_into<double>(args) : accumulate_into<float>(args);
}

void check_finite(const CheckFiniteArgs& args) {
  if (args.weight_tensor && !(*args.weight_tensor >= 0.0 && std::isfinite(*args.weight_tensor))) *args.found_inf = 1.0;
  for (int64_t n = 0; n < args.num_gradients; ++n) {
    const Gradient& gradient = args.gradients[n];
    for (int64_t i = 0; i < gradient.numel; ++i) {
      if (std::isfinite(get(gradient.dtype, gradient.data, i))) continue;
      *args.found_inf = 1.0;
      args.flags[gradient.segment] = args.tag;
    }
  }
}

void norm(const NormArgs& args) {
  double result = args.norm == Norm::kL2 ? 0.0 : *args.out;
  for (int64_t n = 0; n < args.num_spans; ++n) {
    for (int64_t i = 0; i < args.spans[n].numel; ++i) {
      const double value = get(args.spans[n].dtype, args.spans[n].data, i);
      if (args.norm == Norm::kL2) {
        result += value * value;
      } else if (std::isnan(value) || std::fabs(value) > result) {
        result = std::fabs(value);
      }
      if (std::isnan(result)) break;
    }
  }
  *args.out = args.norm == Norm::kL2 ? *args.out + result : result;
}

// In fp64 where either side has it, else in fp32.
void scaled_copy(const ScaledCopyArgs& args) {
  const double divisor = args.divisor ? *args.divisor : 1.0;
  for (int64_t n = 0; n < args.num_pairs; ++n) {
    const CopyPair& pair = args.pairs[n];
    const bool wide = pair.output_dtype == DType::kFloat64 || pair.input_dtype == DType::kFloat64;
    for (int64_t i = 0; i < pair.numel; ++i) {
      const double value = get(pair.input_dtype, pair.input, i);
      const float narrow = static_cast<float>(value) / static_cast<float>(divisor);
      put(pair.output_dtype, wide ? value / divisor : static_cast<double>(narrow), pair.output, i);
      if (args.found_inf && !std::isfinite(get(pair.output_dtype, pair.output, i))) *args.found_inf = 1.0;
    }
  }
}

void decide(const DecideArgs& args) {
  const double weight = args.state[kWeight];
  const double asked = args.divisor ? *args.divisor : weight;
  const float narrow = static_cast<float>(asked);  // gradients are divided in fp32
  const bool may_divide = narrow > 0.0f && std::isfinite(narrow);
  const bool bad_divisor = !may_divide && (args.divisor || weight != 0.0);
  bool overflowed = args.state[kFoundInf] > 0.0 || bad_divisor;
  bool skip = args.state[kPoisoned] > 0.0 || bad_divisor || weight == 0.0;
  const double divisor = skip ? 1.0 : asked;
  const bool empty = weight == 0.0 && !overflowed;
  if (args.overflow && *args.overflow != 0.0 && !empty) skip = overflowed = true;
  const double norm = args.norm ? *args.norm / divisor : 0.0;
  double coefficient = (args.max_norm ? *args.max_norm : INFINITY) / (norm + 1e-6);
  if (coefficient > 1.0) coefficient = 1.0;
  const double verdict[] = {1.0,  double(skip), double(overflowed),    double(empty), divisor,
                            norm, coefficient,  divisor / coefficient, weight,        args.state[kUsed]};
  for (int i = 0; i < kVerdictCount; ++i) {
    args.verdict[i] = verdict[i];
    args.single[i] = static_cast<float>(verdict[i]);
  }
}

}  // namespace reference
