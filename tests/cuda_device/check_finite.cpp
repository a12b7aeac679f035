// check_finite_, against the reference.

#include "check.h"
#include "reference.h"

namespace check {
namespace {

using namespace accumkernels;

// Tensors of these sizes; those whose number is in `bad` have a value that is not finite at their end or beginning.
void run(const std::vector<int64_t>& sizes, const std::vector<int64_t>& bad, int shift, double value,
         const double* weight = nullptr) {
  std::vector<Array> grads;
  Array found_inf("found_inf", Array::kFloat64, 1);
  Array flags("flags", Array::kInt32, static_cast<int64_t>(sizes.size()) + 1);
  Array weight_tensor = scalar("weight", DType::kFloat64, weight ? *weight : 0.0);
  std::vector<DType> dtypes;
  for (size_t i = 0; i < sizes.size(); ++i) {
    dtypes.push_back(kDTypes[i % 4]);
    grads.emplace_back("gradient " + std::to_string(i), kind_of(dtypes[i]), sizes[i], shift * size_of(dtypes[i]));
    fill(&grads.back(), dtypes[i], static_cast<uint32_t>(i));
  }
  for (const int64_t i : bad) reference::put(dtypes[i], value, grads[i].expected<void>(), i % 2 ? 0 : sizes[i] - 1);
  std::vector<Gradient> gradients;
  const auto arguments = [&](bool device) {
    gradients.clear();
    for (size_t i = 0; i < sizes.size(); ++i) {
      const void* data = device ? grads[i].device<void>() : grads[i].expected<void>();
      gradients.push_back({data, sizes[i], 0, static_cast<int32_t>(i), dtypes[i], false});
    }
    CheckFiniteArgs args{};
    args.gradients = gradients.data();
    args.num_gradients = static_cast<int64_t>(sizes.size());
    args.found_inf = device ? found_inf.device<double>() : found_inf.expected<double>();
    args.flags = device ? flags.device<int32_t>() : flags.expected<int32_t>();
    args.tag = 3;
    if (weight) args.weight_tensor = device ? weight_tensor.device<double>() : weight_tensor.expected<double>();
    return args;
  };
  for (Array& grad : grads) grad.upload();
  for (Array* array : {&found_inf, &flags, &weight_tensor}) array->upload();
  succeed(cuda::check_finite(arguments(true), nullptr), "check_finite");
  reference::check_finite(arguments(false));
  for (Array* array : {&found_inf, &flags}) array->compare();
}

void values() {
  std::vector<int64_t> sizes;
  for (const int64_t size : kSizes) sizes.insert(sizes.end(), {size, size, size, size});  // in every dtype
  for (const int shift : {0, 1}) {
    run(sizes, {}, shift, 0.0);
    for (const double value : {kInfinity, -kInfinity, kNaN}) {
      std::vector<int64_t> bad;
      for (int64_t i = shift; i < static_cast<int64_t>(sizes.size()); i += 3) bad.push_back(i);
      run(sizes, bad, shift, value);
    }
  }
}

void many() {
  for (const int64_t count : {256, 257, 1354, 1355, 1500}) {  // tables hold 256 and 1,354
    std::vector<int64_t> sizes, bad;
    for (int64_t i = 0; i < count; ++i) sizes.push_back(1 + i % 20);
    for (int64_t i = 0; i < count; i += 10) bad.push_back(i);
    run(sizes, bad, 0, kInfinity);
  }
}

void weights() {
  for (const double weight : {0.0, 2.0, -1.0, kNaN, kInfinity}) {
    for (const std::vector<int64_t>& sizes : {std::vector<int64_t>{}, {0}, {5, 0, 7}}) run(sizes, {}, 0, 0.0, &weight);
  }
}

void blocks() { run({9000, 9000, 9000}, {0, 2}, 0, kNaN); }

}  // namespace

const std::vector<Check> kCheckFinite = {
    {"check_finite/values", "every dtype and size, infinities and NaN first or last: exactly those tensors", values},
    {"check_finite/many", "short and long tables, several launches", many},
    {"check_finite/weights", "bad weights, with and without gradients", weights},
    {"check_finite/blocks", "flags that several blocks raise", blocks},
};

}  // namespace check
