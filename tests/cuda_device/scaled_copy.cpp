// scaled_copy_, against the reference.

#include "check.h"
#include "reference.h"

namespace check {
namespace {

using namespace accumkernels;

struct Pair {
  int64_t numel;
  DType output, input;
};

struct Shifts {
  int output = 0, input = 0;
};

void run(const std::vector<Pair>& pairs, const double* divisor, Shifts shifts = {}, double last = 0.0,
         bool watch = true) {
  std::vector<Array> outputs, inputs;
  Array found_inf("found_inf", Array::kFloat64, 1);
  Array by = scalar("divisor", DType::kFloat64, divisor ? *divisor : 1.0);
  for (const Pair& pair : pairs) {
    const std::string name = std::string(name_of(pair.output)) + " of " + name_of(pair.input);
    outputs.emplace_back(name, kind_of(pair.output), pair.numel, shifts.output * size_of(pair.output));
    inputs.emplace_back("input", kind_of(pair.input), pair.numel, shifts.input * size_of(pair.input));
    fill(&inputs.back(), pair.input, static_cast<uint32_t>(inputs.size()));
  }
  if (last != 0.0) reference::put(pairs.back().input, last, inputs.back().expected<void>(), pairs.back().numel - 1);
  std::vector<CopyPair> copies;
  const auto arguments = [&](bool device) {
    copies.clear();
    for (size_t i = 0; i < pairs.size(); ++i) {
      copies.push_back({device ? outputs[i].device<void>() : outputs[i].expected<void>(),
                        device ? inputs[i].device<void>() : inputs[i].expected<void>(), pairs[i].numel, pairs[i].output,
                        pairs[i].input});
    }
    ScaledCopyArgs args{copies.data(), static_cast<int64_t>(copies.size()), nullptr, nullptr};
    if (divisor) args.divisor = device ? by.device<double>() : by.expected<double>();
    if (watch) args.found_inf = device ? found_inf.device<double>() : found_inf.expected<double>();
    return args;
  };
  for (auto* arrays : {&outputs, &inputs}) {
    for (Array& array : *arrays) array.upload();
  }
  found_inf.upload();
  by.upload();
  succeed(cuda::scaled_copy(arguments(true), nullptr), "scaled_copy");
  reference::scaled_copy(arguments(false));
  for (Array& array : outputs) array.compare();
  found_inf.compare();
}

void dtypes() {
  const double three = 3.0;
  for (const DType output : kDTypes) {
    for (const DType input : kDTypes) {
      std::vector<Pair> pairs;
      for (const int64_t size : kSizes) pairs.push_back({size, output, input});
      run(pairs, nullptr);
      run(pairs, &three, {1, 0});
      run(pairs, &three, {0, 1});
      run({pairs.end() - 4, pairs.end()}, &three, {1, 1});
    }
  }
}

// Every 16-bit number, and what lies between them.
void rounding() {
  for (const DType output : {DType::kFloat16, DType::kBFloat16}) {
    for (const DType input : {DType::kFloat32, DType::kFloat64}) {
      for (const double value : {65504.0, 65519.0, 65520.0, 1e30, 3.4e38, 6e-8, 2.9e-8, 1e-41, 5.0 / 3.0}) {
        for (const int64_t size : {1, 8, 5000}) run({{size, output, input}}, nullptr, {}, value, size != 8);
      }
    }
  }
}

void many() {
  const double seven = 7.0;
  for (const int64_t count : {256, 257, 1015, 1016, 1300}) {  // tables hold 256 and 1,015
    std::vector<Pair> pairs;
    for (int64_t i = 0; i < count; ++i) pairs.push_back({i % 7, kDTypes[i % 4], kDTypes[i / 4 % 4]});
    run(pairs, &seven);
  }
}

void empty() {
  run({}, nullptr);
  run({{0, DType::kFloat16, DType::kFloat32}}, nullptr);
}

void blocks() {
  const double three = 3.0;
  run({{9000, DType::kFloat16, DType::kFloat32}, {9000, DType::kBFloat16, DType::kFloat32}}, &three, {}, 1e39);
}

}  // namespace

const std::vector<Check> kScaledCopy = {
    {"scaled_copy/dtypes", "every pair of dtypes and size, each side aligned or not, divided or not", dtypes},
    {"scaled_copy/rounding", "what rounds to infinity, to subnormal numbers, up and down", rounding},
    {"scaled_copy/many", "short and long tables, several launches", many},
    {"scaled_copy/empty", "lists without elements", empty},
    {"scaled_copy/blocks", "several blocks that find an infinity", blocks},
};

}  // namespace check
