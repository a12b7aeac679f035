// scaled_copy_: tensors divided by a scalar, into tensors of any other dtype.
#include <vector>

#include "../core/args.h"
#include "arguments.h"
#include "device.h"
#include "register.h"

namespace accumkernels {

void scaled_copy_(StableIValue* stack, uint64_t num_arguments, uint64_t) {
  constexpr const char* op = "scaled_copy_";
  Arguments arguments(op, 4, stack, num_arguments);
  const std::vector<Tensor> outputs = arguments.tensors();
  const std::vector<Tensor> inputs = arguments.tensors();
  const Tensor divisor = arguments.optional_tensor();
  const Tensor found_inf = arguments.optional_tensor();

  check_length(op, "inputs", inputs.size(), "outputs", outputs.size());
  if (outputs.empty()) return;
  const Device device = outputs[0].device();
  std::vector<CopyPair> pairs;
  pairs.reserve(outputs.size());
  for (size_t k = 0; k < outputs.size(); ++k) {
    const int64_t i = static_cast<int64_t>(k);
    const DType output_type = check_dense({op, "outputs", i}, outputs[k], device);
    const DType input_type = check_dense({op, "inputs", i}, inputs[k], device);
    const int64_t numel = outputs[k].numel();
    if (inputs[k].numel() != numel) {
      fail(Name{op, "inputs", i}, " has ", inputs[k].numel(), " elements, expected ", numel, " as outputs[", i, "]");
    }
    pairs.push_back({outputs[k].mutable_data(), inputs[k].data(), numel, output_type, input_type});
  }

  ScaledCopyArgs args{};
  args.divisor = optional_scalar({op, "divisor"}, divisor, device);
  args.found_inf = mutable_scalar({op, "found_inf"}, found_inf, device);
  args.pairs = pairs.data();
  args.num_pairs = static_cast<int64_t>(pairs.size());

  if (device.is_cpu()) return cpu::scaled_copy(args, parallel_for);
#ifdef ACCUMKERNELS_WITH_CUDA
  const CudaScope cuda(op, device);
  cuda.check(cuda::scaled_copy(args, cuda.stream()));
#endif
}

ACCUMKERNELS_REGISTER(scaled_copy_)

}  // namespace accumkernels
